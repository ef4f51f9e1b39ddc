"""Applies a worker's KV events to the prefix index.

How the fields of an event are read:

hash         8 bytes are a big-endian number, so that -1 and 2**64 - 1 are one hash; a decimal string is
             that number; anything else is replaced by a digest
group        only full attention can be reused by prefix: sliding windows and further cache groups are
             left out
medium       GPU or not stated: device; else host. A removal that does not state it is from both. Of several
             colder media the one that stored a block last holds it: it is not gone by leaving the other
extra keys   `cache_salt=...` makes a tree of its own; a repeated adapter name is ignored; all others become
             part of the block's identity
partial      a block without all its tokens is left out, as are the blocks behind it in the event
"""

import hashlib
import re
import secrets
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

from slagate.pools.prefix.claims import DEVICE, HOST
from slagate.pools.prefix.holder import Holder
from slagate.pools.prefix.index import PrefixIndex
from slagate.pools.prefix.trie import Root
from slagate.proto import openengine_pb2 as oe

SALT_KEY = "cache_salt="

_STRING = "string"
_DECIMAL = re.compile(rb"-?[0-9]{1,20}", re.ASCII)
_MASK = (1 << 64) - 1
_DIGEST_KEY = secrets.token_bytes(16)  # so that nobody can make the digests of two blocks equal

_PLAIN = Root()
_DEVICE_MEDIA = (oe.STORAGE_MEDIUM_GPU, oe.STORAGE_MEDIUM_UNSPECIFIED)

_EVENT_WORK = 150
_BLOCK_WORK = 40
_HASH_WORK = 25
"""Units of about 20 ns; a token counts as one."""

_SLICE_TOKENS = 2048
_SLICE_HASHES = 128
"""The most of a long event that is applied in one step."""


class MismatchError(Exception):
    """The worker's blocks can never be indexed; the message says why."""


class BlockWriter:
    """Applies one rank's events to the index, in parts between which other tasks may run."""

    def __init__(self, index: PrefixIndex, holder: Holder, *, block_tokens: int) -> None:
        self._index = index
        self._holder = holder
        self._block_tokens = block_tokens
        self._slice_blocks = max(1, _SLICE_TOKENS // block_tokens)
        self.n_events = 0
        self.n_errors = 0  # events that contradict themselves
        self.was_cleared = False  # by an event
        # Blocks that a colder medium than host memory stored last, and which.
        self._beyond_host: dict[int, int] = {}

    @property
    def has_gap(self) -> bool:
        """Whether the index had to leave out blocks that a snapshot would bring."""
        return self._holder.has_gap

    def apply(self, events: Iterable[oe.KvEvent]) -> Iterator[int]:
        """Apply events, yielding the work of each part in 20 ns. Raises `MismatchError`."""
        for event in events:
            self.n_events += 1
            if event.HasField("block_stored"):
                yield from self._store(event.block_stored)
            elif event.HasField("block_removed"):
                yield from self._remove(event.block_removed)
            elif event.HasField("all_blocks_cleared"):
                self.was_cleared = True
                self._beyond_host.clear()
                self._index.cleared(self._holder)
                yield _EVENT_WORK
            else:  # of a later revision
                self.n_errors += 1
                yield _EVENT_WORK

    def _store(self, stored: oe.BlockStored) -> Iterator[int]:
        if stored.group_idx or stored.kv_cache_spec_sliding_window:
            yield _EVENT_WORK
            return
        size, tokens, names = self._block_tokens, stored.token_ids, stored.block_hashes
        if stored.block_size != size:
            raise MismatchError(
                f"its KV events have blocks of {stored.block_size} tokens, its server info of {size}"
            )
        n_blocks = min(len(names), len(tokens) // size)
        if len(tokens) > len(names) * size or len(stored.extra_keys) > len(names):
            self.n_errors += 1
            n_blocks = 0
        if not n_blocks:
            yield _EVENT_WORK
            return
        parent = None
        if stored.HasField("parent_block_hash"):
            parent = _number(stored.parent_block_hash)
        root, keys = _PLAIN, None
        if stored.extra_keys or stored.lora_name or stored.lora_id:
            root, keys = _identity(stored)
        tier = DEVICE if stored.medium in _DEVICE_MEDIA else HOST
        done = 0
        while True:
            end = min(n_blocks, done + self._slice_blocks)
            hashes = _numbers(names[done:end])
            if tier == HOST:
                self._store_colder(hashes, stored.medium)
            self._index.stored(
                self._holder,
                hashes,
                parent,
                array("I", tokens[done * size : end * size]).tobytes(),
                root=root,
                tier=tier,
                keys=keys and {at - done: keys[at] for at in range(done, end) if at in keys},
            )
            yield _EVENT_WORK + (end - done) * (_BLOCK_WORK + size)
            if end == n_blocks:
                return
            done, parent = end, hashes[-1]

    def _remove(self, removed: oe.BlockRemoved) -> Iterator[int]:
        if removed.group_idx or not removed.block_hashes:
            yield _EVENT_WORK
            return
        names, medium = removed.block_hashes, removed.medium
        tier: int | None = DEVICE if medium == oe.STORAGE_MEDIUM_GPU else HOST
        if medium == oe.STORAGE_MEDIUM_UNSPECIFIED:
            tier = None
        for start in range(0, len(names), _SLICE_HASHES):
            hashes = _numbers(names[start : start + _SLICE_HASHES])
            if tier != DEVICE and (self._beyond_host or medium > oe.STORAGE_MEDIUM_CPU_PINNED):
                hashes = self._remove_colder(hashes, medium)
            self._index.removed(self._holder, hashes, tier=tier)
            yield _EVENT_WORK + len(hashes) * _HASH_WORK

    def _store_colder(self, hashes: Iterable[int], medium: int) -> None:
        """Note which colder medium stored blocks last."""
        if medium != oe.STORAGE_MEDIUM_CPU_PINNED:
            self._beyond_host.update(dict.fromkeys(hashes, medium))
        elif self._beyond_host:
            for hash_ in hashes:
                self._beyond_host.pop(hash_, None)

    def _remove_colder(self, hashes: Iterable[int], medium: int) -> list[int]:
        """Those of the blocks that are gone, and have not only moved from this medium to another one."""
        gone = []
        for hash_ in hashes:
            holding = self._beyond_host.get(hash_, oe.STORAGE_MEDIUM_CPU_PINNED)
            if medium in (holding, oe.STORAGE_MEDIUM_UNSPECIFIED):
                self._beyond_host.pop(hash_, None)
                gone.append(hash_)
        return gone


def identity(values: Iterable[str]) -> bytes:
    """The bytes that the extra keys of a block, in their order, add to its identity."""
    return b"\0".join(value.encode() for value in values)


def _identity(stored: oe.BlockStored) -> tuple[Root, Mapping[int, bytes] | None]:
    """The tree that a chain of blocks belongs to, and the extra keys by block."""
    adapter = stored.lora_name or (f"lora_id={stored.lora_id}" if stored.lora_id else "")
    salt = ""
    keys: dict[int, bytes] = {}
    for at, key in enumerate(stored.extra_keys):
        others = []
        for value in key.values:
            if value.startswith(SALT_KEY):
                salt = value[len(SALT_KEY) :]
            elif value != adapter:
                others.append(value)
        if others:
            keys[at] = identity(others)
    return Root(adapter, salt), keys or None


def _numbers(names: Sequence[oe.KvBlockHash]) -> Sequence[int]:
    if len(names) == 1:
        return [_number(names[0])]
    values = [name.value for name in names]
    if names[0].encoding == _STRING or set(map(len, values)) != {8}:
        return [_number(name) for name in names]
    return struct.unpack(f">{len(values)}Q", b"".join(values))


def _number(name: oe.KvBlockHash) -> int:
    value = name.value
    if len(value) == 8 and name.encoding != _STRING:
        return int.from_bytes(value, "big")
    if name.encoding == _STRING and _DECIMAL.fullmatch(value):
        return int(value) & _MASK
    return int.from_bytes(hashlib.blake2b(value, digest_size=8, key=_DIGEST_KEY).digest(), "big")
