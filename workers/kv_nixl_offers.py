"""Sessions offered from a pool of slots, where a content is once, however many sessions have it."""

import os
from dataclasses import dataclass

import numpy as np

from slagate.workers.kv_nixl_descriptor import TAG_BYTES, Slots
from slagate.workers.kv_nixl_pool import SlotPool
from slagate.workers.kv_transfer import Blocks

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

    def add(self, blocks: Blocks) -> Offer:
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
        ticket, own = np.split(self._pool.take(1 + len(fresh)), [1])
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
        self._pool.give_back(np.concatenate([ticket, unused]))

    def _write(self, slots: Slots, blocks: Blocks) -> None:
        numbers = np.arange(self._n_written + 1, self._n_written + 1 + len(slots), dtype="<u8")
        self._n_written += len(slots)
        self._pool.write(slots, blocks)
        self._pool.mark(slots, numbers.view(np.uint8).reshape(-1, TAG_BYTES))


def _keys(blocks: Blocks) -> list[bytes]:
    heads = np.ascontiguousarray(blocks[:, :_KEY_BYTES])
    keys: list[bytes] = heads.view(f"V{heads.shape[1]}").ravel().tolist()
    return keys
