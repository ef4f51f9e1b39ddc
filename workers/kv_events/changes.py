"""Changes of what is cached, as read from an engine's KV events and as published."""

from typing import NamedTuple, TypeAlias


class Block(NamedTuple):
    """One full block: its tokens as `wire.token_field` encodes them, and what else entered its hash."""

    hash: int
    tokens: bytes
    keys: tuple[str, ...]


class Stored(NamedTuple):
    """A chain of blocks, each the child of the one before, is cached on a level (0 GPU, 1 host)."""

    rank: int
    parent: int | None
    blocks: tuple[Block, ...]
    level: int
    lora_name: str
    cache_salt: str


class Removed(NamedTuple):
    """Blocks are gone from whatever level they were on."""

    rank: int
    hashes: tuple[int, ...]


class Moved(NamedTuple):
    """A block is on this level now, and on no other."""

    rank: int
    hash: int
    level: int


class Cleared(NamedTuple):
    """Nothing is known to be cached any more."""

    rank: int


Change: TypeAlias = Stored | Removed | Moved | Cleared
