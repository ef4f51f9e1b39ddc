"""The content of a block of the simulated KV cache, and the token that the model puts after it.

A block's *state* is a 128-bit hash of every token up to its end, chained block by block:

    state[i] = blake2b-128(state[i - 1] || tokens of block i as little-endian uint32)

with a seed over the model name and the cache salt in place of `state[-1]`; a partial last block hashes
the tokens it has. Block bytes, block reuse and output tokens are all functions of states, so a run on
one worker, a run split over two, and a run resumed from its own output give the same tokens, and a
block with any other content gives different ones.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

STATE_BYTES = 16
TOKEN_BYTES = 4
_WORD = np.dtype("<u8")

Blocks = npt.NDArray[np.uint8]


def seed_state(model: str, cache_salt: str = "") -> bytes:
    """The state in front of the first block; differs by model and by cache salt."""
    salt = blake2b(cache_salt.encode(), digest_size=STATE_BYTES).digest()
    return blake2b(model.encode(), key=salt, digest_size=STATE_BYTES).digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian uint32. Raises `ValueError` when one does not fit."""
    try:
        packed = np.frombuffer(array("I", tokens), dtype=np.uint32)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers in [0, 2^32): {error}") from error
    return packed.astype("<u4", copy=False).tobytes()


def block_states(packed: bytes, seed: bytes, block_tokens: int) -> list[bytes]:
    """The state of each block of `packed` tokens (see `token_bytes`), a partial last one included."""
    states = []
    state, size = seed, block_tokens * TOKEN_BYTES
    for start in range(0, len(packed), size):
        state = blake2b(state + packed[start : start + size], digest_size=STATE_BYTES).digest()
        states.append(state)
    return states


def next_token(state: bytes, vocab_size: int, branch: int = 0) -> int:
    """The token, in [0, vocab_size), that the model puts after the context ending in `state`.

    `branch` k is the k-th parallel sequence of one request: it takes another token than the branches
    0 .. k-1 would at this state, as long as the vocabulary has that many.
    """
    token = int.from_bytes(state[:8], "little") % vocab_size
    if branch:
        others = max(1, vocab_size - 1)
        token += 1 + (int.from_bytes(state[8:], "little") + branch - 1) % others
        token %= vocab_size
    return token


class AnswerLength(NamedTuple):
    """How many tokens the answer to a prompt has: the last of them, and no other, is the end of text."""

    n_tokens: int
    end_id: int

    def token(self, drawn: int, n_before: int) -> int:
        """The token behind `n_before` others, where the context alone would give `drawn`."""
        if n_before + 1 == self.n_tokens:
            return self.end_id
        return drawn if drawn != self.end_id else max(0, drawn - 1)


class TokenChain:
    """A growing context: the state of its last block, and the states of the blocks it has filled.

    It starts after `parent`, the state of the full block in front of `tail`: packed tokens, fewer than a
    block, perhaps none.
    """

    __slots__ = ("_block_tokens", "_hasher", "_room", "filled", "state")

    def __init__(self, parent: bytes, tail: bytes, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._room = block_tokens - len(tail) // TOKEN_BYTES
        self._hasher = blake2b(parent + tail, digest_size=STATE_BYTES)
        self.state = self._hasher.digest() if tail else parent
        self.filled: list[bytes] = []

    def append(self, token: int) -> None:
        """Extend the context by one token."""
        self._hasher.update(token.to_bytes(TOKEN_BYTES, "little"))
        self.state = state = self._hasher.digest()
        self._room -= 1
        if not self._room:
            self.filled.append(state)
            self._room = self._block_tokens
            self._hasher = blake2b(state, digest_size=STATE_BYTES)


def continuation(
    prompt_tokens: Sequence[int],
    n_tokens: int,
    *,
    model: str,
    block_tokens: int,
    vocab_size: int,
    cache_salt: str = "",
    branch: int = 0,
    answer: AnswerLength | None = None,
) -> list[int]:
    """The `n_tokens` that the model generates after a prompt: every correct stream has these.

    `branch` is the index of the output among the parallel ones of a request.
    """
    packed = token_bytes(prompt_tokens)
    whole = len(packed) - len(packed) % (block_tokens * TOKEN_BYTES)
    seed = seed_state(model, cache_salt)
    parent = block_states(packed[:whole], seed, block_tokens)[-1] if whole else seed
    chain = TokenChain(parent, packed[whole:], block_tokens)
    tokens: list[int] = []
    for n_before in range(n_tokens):
        token = next_token(chain.state, vocab_size, branch)
        if answer is not None:
            token = answer.token(token, n_before)
        tokens.append(token)
        chain.append(token)
    return tokens


@dataclass(frozen=True, slots=True)
class CachePrompt:
    """A prompt as the KV cache sees it.

    `packed` are its tokens (`token_bytes`), `states` the states of its blocks, a partial last one included.
    `seed` is the state in front of the first block (`seed_state`, of which `cache_salt` is a part).
    """

    seed: bytes
    states: Sequence[bytes]
    packed: bytes
    cache_salt: str = ""


@lru_cache(maxsize=8)
def _multipliers(block_bytes: int) -> npt.NDArray[np.uint64]:
    """Odd constants, shape u64[block_bytes / 16, 2]; multiplying by one is a bijection on words."""
    if block_bytes < STATE_BYTES or block_bytes % STATE_BYTES:
        raise ValueError(f"block_bytes must be a positive multiple of 16, got {block_bytes}")
    count = np.arange(block_bytes // _WORD.itemsize, dtype=_WORD)
    # The golden-ratio step gives well-spread words, all different within a block.
    odd: npt.NDArray[np.uint64] = (
        count * np.uint64(0x9E3779B97F4A7C15) << np.uint64(1)
    ) | np.uint64(1)
    odd[:2] = (0xD1342543DE82EF95, 0xAF251AF3B0F025B5)
    return odd.reshape(-1, 2)


def block_contents(states: Sequence[bytes], block_bytes: int) -> Blocks:
    """The KV bytes of blocks in these states, shape u8[n_blocks, block_bytes].

    Raises `ValueError` when `block_bytes` is not a positive multiple of 16.
    """
    multipliers = _multipliers(block_bytes)
    words = np.frombuffer(b"".join(states), dtype=_WORD).reshape(-1, 1, 2)
    return (words * multipliers).reshape(len(states), -1).view(np.uint8)


def state_of(block: Blocks) -> bytes:
    """The state a block's bytes were made from; inverts its first two words."""
    first = block[:STATE_BYTES].view(_WORD) * _inverses(len(block))
    return first.astype(_WORD, copy=False).tobytes()


@lru_cache(maxsize=8)
def _inverses(block_bytes: int) -> npt.NDArray[np.uint64]:
    first = _multipliers(block_bytes)[0]
    return np.array([pow(int(odd), -1, 1 << 64) for odd in first], dtype=_WORD)


def verify(blocks: Blocks, states: Sequence[bytes]) -> list[int]:
    """Indices of the blocks that are not, byte for byte, the content of their state."""
    wrong = (blocks != block_contents(states, blocks.shape[1])).any(axis=1)
    return [int(i) for i in np.flatnonzero(wrong)]
