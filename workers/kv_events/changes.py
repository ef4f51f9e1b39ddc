"""Changes of an engine's KV cache, as read from its events and as published."""

from typing import NamedTuple, TypeAlias

import msgspec


class Block(msgspec.Struct, frozen=True, gc=False):
    """A full KV block."""

    hash: int
    tokens: bytes  # as `wire.token_field` encodes their ids
    keys: tuple[str, ...]  # extra keys: what its hash depends on besides tokens, such as a picture


class Stored(NamedTuple):
    """A chain of blocks, each the child of the one before, is cached: level 0 is GPU, 1 host, 2 disk."""

    rank: int
    parent: int | None  # hash of the block before the first; None at the beginning of a prompt
    blocks: tuple[Block, ...]
    level: int
    lora_name: str
    cache_salt: str


class Removed(NamedTuple):
    """Blocks are no longer cached, on any level."""

    rank: int
    hashes: tuple[int, ...]


class Moved(NamedTuple):
    """A block is cached on this level, and on no other."""

    rank: int
    hash: int
    level: int


class Cleared(NamedTuple):
    """No block of the rank is known to be cached any more."""

    rank: int


Change: TypeAlias = Stored | Removed | Moved | Cleared
