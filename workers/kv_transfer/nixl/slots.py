"""The memory that an agent registers: one region, in slots of a block each, and the sessions in it."""

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slagate.workers.kv_transfer.nixl.descriptor import (
    TAG_BYTES,
    NixlDescriptor,
    Slots,
    Tags,
    tags_digest,
)
from slagate.workers.kv_transfer.transport import (
    Blocks,
    KvIntegrity,
    KvTransferError,
    KvUnavailable,
    used_up,
)

_ALIGN_BYTES = 64
_STEP_BLOCKS = 16
"""Blocks that are copied or compared at once, so few that they stay in the processor's cache."""


class SlotPool:
    """Memory in slots of a tag and a block each; pages that were never used cost nothing.

    No tag is used twice, and it is cleared when its slot is freed. So the reader of a slot whose content
    has changed sees another tag, or none. Slots are taken and freed on one thread, while another one may
    read slots that are taken. Raises `KvUnavailable` if there is not enough memory.
    """

    def __init__(self, n_slots: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.stride_bytes = -(-(block_bytes + TAG_BYTES) // _ALIGN_BYTES) * _ALIGN_BYTES
        try:
            self.memory = np.zeros((n_slots, self.stride_bytes), np.uint8)  # u8[n_slots, stride]
            self._free = np.ones(n_slots, np.bool_)  # bool[n_slots]
        except (MemoryError, ValueError) as error:
            raise KvUnavailable(
                f"no memory for a pool of {n_slots} blocks of {block_bytes} bytes"
            ) from error
        self.n_free = n_slots

    @property
    def n_slots(self) -> int:
        """The number of slots, free or not."""
        return len(self._free)

    @property
    def start_address(self) -> int:
        """The address of slot 0."""
        return int(self.memory.ctypes.data)

    def take_slots(self, n_slots: int) -> Slots:
        """Take the lowest free slots. Raises `KvTransferError` if there are not enough."""
        if n_slots > self.n_free:
            raise KvTransferError(
                f"the pool is full: {n_slots} slots wanted, {self.n_free} of {self.n_slots} free"
            )
        slots = np.flatnonzero(self._free)[:n_slots].astype(np.uint32)
        self._free[slots] = False
        self.n_free -= n_slots
        return slots

    def free_slots(self, slots: Slots) -> None:
        """Free slots, and clear their tags, so that peers cannot read them any more."""
        assert not self._free[slots].any(), "a slot was given back twice"
        self.memory[slots, :TAG_BYTES] = 0
        self._free[slots] = True
        self.n_free += len(slots)

    def write(self, slots: Slots, blocks: Blocks) -> None:
        """Copy blocks into slots that were taken."""
        ends = TAG_BYTES + blocks.shape[1]
        for step in _steps(len(slots)):
            self.memory[slots[step], TAG_BYTES:ends] = blocks[step]

    def holds(self, slots: Slots, blocks: Blocks) -> npt.NDArray[np.bool_]:
        """Which of the slots have the same bytes as the corresponding block; bool[n]."""
        ends = TAG_BYTES + blocks.shape[1]
        equal = np.empty(len(slots), np.bool_)
        for step in _steps(len(slots)):
            here = self.memory[slots[step], TAG_BYTES:ends]
            equal[step] = (here == blocks[step]).all(axis=1)
        return equal

    def mark(self, slots: Slots, tags: Tags) -> None:
        """Write the tags of slots that were taken."""
        self.memory[slots, :TAG_BYTES] = tags

    def tags(self, slots: Slots) -> Tags:
        """The tags of slots; zeros where no block is offered."""
        return self.memory[slots, :TAG_BYTES]

    def read(self, slots: Slots, wanted: NixlDescriptor) -> Blocks:
        """A checked copy of a session's blocks; `slots[0]`: its ticket. Raises `KvTransferError`."""
        tags = self.tags(slots)
        if not tags.any(axis=1).all():
            raise used_up(wanted.session_id)
        where = f"session {wanted.session_id}"
        if tags[0].tobytes() != wanted.tag or tags_digest(tags[1:]) != wanted.tags_digest:
            raise KvIntegrity(f"{where}: its slots hold another session's blocks by now")
        blocks = np.ascontiguousarray(
            self.memory[slots[1:], TAG_BYTES : TAG_BYTES + wanted.block_bytes]
        )
        if checksum(blocks) != wanted.crc:
            raise KvIntegrity(f"{where}: corrupted, checksum does not match")
        return blocks


def checksum(blocks: Blocks) -> int:
    """CRC-32 of all bytes of a session's blocks, by which a reader finds out damage on the way."""
    return zlib.crc32(np.ascontiguousarray(blocks).data)


def _steps(n_blocks: int) -> Iterator[slice]:
    for start in range(0, n_blocks, _STEP_BLOCKS):
        yield slice(start, start + _STEP_BLOCKS)


_KEY_BYTES = 16
"""The first bytes of a block, by which equal ones are found; the rest is compared then."""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """The slots of a session: first its ticket, which no other session has, then one for each block.

    The ticket has `tag` as long as the session may be read.
    """

    slots: Slots
    tag: bytes


class Offers:
    """The offers of one pool. Not thread-safe.

    Equal blocks share a slot, which is freed when the last offer with it is withdrawn. Tags of blocks count
    the writes to the pool, so that a slot has another tag after each of them.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._n_written = 0
        self._n_users = np.zeros(pool.n_slots, np.int64)  # i64[n_slots]
        self._slot_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def offer_blocks(self, blocks: Blocks) -> Offer:
        """Offer blocks u8[n > 0, bytes <= the pool's]; only those that the pool does not have are copied.

        Raises `KvTransferError`, with nothing changed, if the pool has no room for them and a ticket.
        """
        keys = _keys(blocks)
        found = np.array([self._slot_of.get(key, -1) for key in keys])
        known = np.flatnonzero(found >= 0)
        found[known[~self._pool.holds(found[known], blocks[known])]] = -1
        # i64[n]: the first block with equal content, which alone is written.
        source = np.arange(len(blocks))
        first_of: dict[bytes, int] = {}
        for i in np.flatnonzero(found < 0).tolist():
            first = first_of.setdefault(keys[i], i)
            if first != i and np.array_equal(blocks[first], blocks[i]):
                source[i] = first
        fresh = np.flatnonzero((found < 0) & (source == np.arange(len(blocks))))
        ticket, own = np.split(self._pool.take_slots(1 + len(fresh)), [1])
        found[fresh] = own
        slots = found[source].astype(np.uint32)
        np.add.at(self._n_users, slots, 1)
        self._write(own, blocks[fresh] if len(fresh) < len(blocks) else blocks)
        for slot, i in zip(own.tolist(), fresh.tolist(), strict=True):
            self._slot_of[keys[i]] = slot
            self._key_of[slot] = keys[i]
        tag = os.urandom(TAG_BYTES)
        self._pool.mark(ticket, np.frombuffer(tag, np.uint8))
        return Offer(np.concatenate([ticket, slots]), tag)

    def withdraw(self, offer: Offer) -> None:
        """Make an offer unreadable, and free those of its slots that no other offer has."""
        ticket, slots = np.split(offer.slots, [1])
        np.subtract.at(self._n_users, slots, 1)
        unused = np.unique(slots[self._n_users[slots] == 0])
        for slot in unused.tolist():
            key = self._key_of.pop(slot)
            # Another block with the same first bytes may have taken this key, and left again.
            if self._slot_of.get(key) == slot:
                del self._slot_of[key]
        self._pool.free_slots(np.concatenate([ticket, unused]))

    def _write(self, slots: Slots, blocks: Blocks) -> None:
        numbers = np.arange(self._n_written + 1, self._n_written + 1 + len(slots), dtype="<u8")
        self._n_written += len(slots)
        self._pool.write(slots, blocks)
        self._pool.mark(slots, numbers.view(np.uint8).reshape(-1, TAG_BYTES))


def _keys(blocks: Blocks) -> list[bytes]:
    heads = np.ascontiguousarray(blocks[:, :_KEY_BYTES])
    keys: list[bytes] = heads.view(f"V{heads.shape[1]}").ravel().tolist()
    return keys
