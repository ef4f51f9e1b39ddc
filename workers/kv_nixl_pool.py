"""The one region of host memory that an agent registers, cut into slots of one block each."""

import zlib

import numpy as np

from slagate.workers.kv_nixl_descriptor import TAG_BYTES, NixlDescriptor, Slots
from slagate.workers.kv_transfer import Blocks, KvIntegrity, KvTransferError, KvUnavailable, used_up

_ALIGN_BYTES = 64


class SlotPool:
    """Slots of a tag and one block each; only the pages that were ever used cost memory.

    A tag names one export. It is cleared when a slot is given back, so whoever reads a slot that is no
    longer his sees another tag or none. Taking and giving back happens on one thread; another one may
    read slots that are taken. Raises `KvUnavailable` when there is no memory for it.
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

    def take(self, n_slots: int) -> Slots:
        """The lowest free slots. Raises `KvTransferError` when there are not enough."""
        if n_slots > self.n_free:
            raise KvTransferError(
                f"the pool is full: {n_slots} blocks wanted, {self.n_free} of {self.n_slots} free"
            )
        slots = np.flatnonzero(self._free)[:n_slots].astype(np.uint32)
        self._free[slots] = False
        self.n_free -= n_slots
        return slots

    def give_back(self, slots: Slots) -> None:
        """Make slots free, unreadable for whoever still holds their tag."""
        assert not self._free[slots].any(), "a slot was given back twice"
        self.memory[slots, :TAG_BYTES] = 0
        self._free[slots] = True
        self.n_free += len(slots)

    def write(self, slots: Slots, blocks: Blocks, tag: bytes) -> None:
        """Put blocks into taken slots."""
        self.memory[slots, TAG_BYTES : TAG_BYTES + blocks.shape[1]] = blocks
        self.memory[slots, :TAG_BYTES] = np.frombuffer(tag, np.uint8)

    def read(self, slots: Slots, wanted: NixlDescriptor) -> Blocks:
        """What was copied into slots. Raises `KvTransferError` when it is not the blocks wanted."""
        tags = self.memory[slots, :TAG_BYTES]
        if not tags.any(axis=1).all():
            raise used_up(wanted.session_id)
        where = f"session {wanted.session_id}"
        if (tags != np.frombuffer(wanted.tag, np.uint8)).any():
            raise KvIntegrity(f"{where}: its slots hold another session's blocks by now")
        blocks = np.ascontiguousarray(
            self.memory[slots, TAG_BYTES : TAG_BYTES + wanted.block_bytes]
        )
        if zlib.crc32(blocks.data) != wanted.crc:
            raise KvIntegrity(f"{where}: corrupted, checksum does not match")
        return blocks


def checksum(blocks: Blocks) -> int:
    """CRC-32 of the blocks' bytes, in order."""
    return zlib.crc32(np.ascontiguousarray(blocks).data)
