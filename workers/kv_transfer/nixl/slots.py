"""The one region of host memory that an agent registers, in slots of a block each, and sessions in it.

A content is in the region once, however many sessions have it.
"""

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
"""Blocks copied or compared at once: what is gathered for it stays in the processor's cache."""


class SlotPool:
    """Slots of a tag and one block each; only the pages that were ever used cost memory.

    No tag is used twice, and it is cleared when its slot is given back, so whoever reads a slot that no
    longer holds what he wants sees another tag or none. Taking and giving back happens on one thread;
    another one may read slots that are taken. Raises `KvUnavailable` when there is no memory for it.
    """

    def __init__(self, n_slots: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.stride_bytes = -(-(block_bytes + TAG_BYTES) // _ALIGN_BYTES) * _ALIGN_BYTES
        try:
            self.memory = np.zeros((n_slots, self.stride_bytes), dtype=np.uint8)
            self._free = np.ones(n_slots, dtype=np.bool_)
        except (MemoryError, ValueError) as error:
            raise KvUnavailable(
                f"no memory for a pool of {n_slots} blocks of {block_bytes} bytes"
            ) from error
        self.n_free = n_slots

    @property
    def n_slots(self) -> int:
        """All slots, free or not."""
        return len(self._free)

    @property
    def base(self) -> int:
        """Address of slot 0."""
        return int(self.memory.ctypes.data)

    def take_slots(self, n_slots: int) -> Slots:
        """The lowest free slots. Raises `KvTransferError` when there are not enough."""
        if n_slots > self.n_free:
            raise KvTransferError(
                f"the pool is full: {n_slots} slots wanted, {self.n_free} of {self.n_slots} free"
            )
        slots = np.flatnonzero(self._free)[:n_slots].astype(np.uint32)
        self._free[slots] = False
        self.n_free -= n_slots
        return slots

    def free_slots(self, slots: Slots) -> None:
        """Make slots free, unreadable for whoever still holds their tags."""
        assert not self._free[slots].any(), "a slot was given back twice"
        self.memory[slots, :TAG_BYTES] = 0
        self._free[slots] = True
        self.n_free += len(slots)

    def write(self, slots: Slots, blocks: Blocks) -> None:
        """Put blocks into taken slots."""
        ends = TAG_BYTES + blocks.shape[1]
        for step in _steps(len(slots)):
            self.memory[slots[step], TAG_BYTES:ends] = blocks[step]

    def holds(self, slots: Slots, blocks: Blocks) -> npt.NDArray[np.bool_]:
        """Which of the slots hold, byte for byte, the block beside them; bool[n]."""
        ends = TAG_BYTES + blocks.shape[1]
        equal = np.empty(len(slots), np.bool_)
        for step in _steps(len(slots)):
            here = self.memory[slots[step], TAG_BYTES:ends]
            equal[step] = (here == blocks[step]).all(axis=1)
        return equal

    def mark(self, slots: Slots, tags: Tags) -> None:
        """Put tags in front of what taken slots hold."""
        self.memory[slots, :TAG_BYTES] = tags

    def tags(self, slots: Slots) -> Tags:
        """What stands in front of the content of slots; zeros where nothing is offered."""
        return self.memory[slots, :TAG_BYTES]

    def read(self, slots: Slots, wanted: NixlDescriptor) -> Blocks:
        """What was copied into slots, the ticket first.

        Raises `KvTransferError` when it is not the blocks wanted.
        """
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
    """CRC-32 of the blocks' bytes, in order."""
    return zlib.crc32(np.ascontiguousarray(blocks).data)


def _steps(n_blocks: int) -> Iterator[slice]:
    for start in range(0, n_blocks, _STEP_BLOCKS):
        yield slice(start, start + _STEP_BLOCKS)


_KEY_BYTES = 16
"""How much of a block it is looked up by; whether the rest agrees as well is compared."""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A session's slots: its ticket first, which no other session has, then one a block.

    `tag` stands on the ticket as long as the session may be read.
    """

    slots: Slots
    tag: bytes


class Offers:
    """What is offered from one pool. Not thread-safe.

    Blocks of equal bytes share a slot, which is free again when the last offer of them is withdrawn. Its
    tag is the number of the writing, so a slot that is written anew is not taken for what it held before.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._n_written = 0
        self._n_users = np.zeros(pool.n_slots, np.int64)
        self._slot_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def offer_blocks(self, blocks: Blocks) -> Offer:
        """Offer blocks u8[n > 0, bytes <= the pool's]; only those that are not there yet are copied.

        Raises `KvTransferError`, with nothing changed, when the pool has no room for these and a ticket.
        """
        keys = _keys(blocks)
        found = np.array([self._slot_of.get(key, -1) for key in keys])
        known = np.flatnonzero(found >= 0)
        found[known[~self._pool.holds(found[known], blocks[known])]] = -1
        source = np.arange(
            len(blocks)
        )  # A block that comes up twice is written the first time only.
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
        """Make an offer unreadable, and those of its slots free that no other offer has."""
        ticket, slots = np.split(offer.slots, [1])
        np.subtract.at(self._n_users, slots, 1)
        unused = np.unique(slots[self._n_users[slots] == 0])
        for slot in unused.tolist():
            key = self._key_of.pop(slot)
            # Another block that begins alike may have come later, and gone.
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
