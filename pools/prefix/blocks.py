"""What a block contains, as bytes that are compared: its tokens, or a stand-in for tokens and a key.

Placeholder tokens of two pictures are the same; the pictures are not. A block whose engine hash has more
inputs than tokens (multimodal hashes, virtual tokens) is replaced by a digest of its tokens and that key,
with the top bit of each word set: no vocabulary has such token ids, so it never equals a plain block.
"""

import hashlib
from collections.abc import Mapping

from slagate.pools.prefix.trie import TOKEN_BYTES


def substituted(content: bytes, keys: Mapping[int, bytes], block_bytes: int) -> bytes:
    """Full blocks with those that have a key replaced; numbers beyond the last full block are passed over.

    Raises `ValueError` for a negative block number.
    """
    blocks = bytearray(content)
    for number, key in keys.items():
        if number < 0:
            raise ValueError(f"keys: block number {number} is negative")
        start = number * block_bytes
        block = content[start : start + block_bytes]
        if len(block) == block_bytes:
            blocks[start : start + block_bytes] = _stand_in(block, key)
    return bytes(blocks)


def _stand_in(block: bytes, key: bytes) -> bytes:
    # The block's length is fixed, so joining is unambiguous.
    digest = hashlib.shake_128(block + key).digest(len(block))
    marks = int.from_bytes(b"\0\0\0\x80" * (len(block) // TOKEN_BYTES), "little")
    return (int.from_bytes(digest, "little") | marks).to_bytes(len(block), "little")
