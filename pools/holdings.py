"""One worker's attention-DP rank in the prefix index: its claims, found by the engine's block hashes.

    maps[tier]: hash, folded to 60 bits ─▶ number ─▶ table: Holding ─▶ run, and the hashes by block number

Many blocks share one number object, so a claim costs a dict slot, the folded hash (two digits of a Python
int, where 64 bits take three) and 8 bytes in the holding. Ints only: the collector never walks such a dict.
A map is several dicts, by the hash's top bits: one large dict grows in one long pause.
"""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from slagate.pools.holding import Holding
from slagate.pools.pending import Pending
from slagate.pools.run_trie import Run

FOLD = (1 << 60) - 1
SHARD_SHIFT = 56
"""What is left of a folded hash says which dict of a map it is in."""

_N_SHARDS = 16

Shards = tuple[dict[int, int], ...]


class Holder:
    """One worker's attention-DP rank; changed by its `PrefixIndex` only."""

    __slots__ = (
        "_free",
        "bit",
        "by_run",
        "has_gap",
        "lanes",
        "maps",
        "n_blocks",
        "n_dropped",
        "odd",
        "pending",
        "table",
    )

    def __init__(self, bit: int, max_pending: int) -> None:
        self.n_dropped = (
            0  # blocks that were not taken: the index is full, or too many were pending
        )
        self.start(bit, Pending(max_pending))

    def start(self, bit: int, pending: Pending) -> None:
        """Begin with nothing."""
        self.bit = bit  # -1 after it left
        self.lanes = 0b11 << 2 * bit if bit >= 0 else 0  # any tier, device
        self.n_blocks = 0
        self.has_gap = False  # blocks were not taken: it holds more than is known here
        self.maps: tuple[Shards, Shards] = (_shards(), _shards())
        # Claims whose folded hash another claim has taken: whole hash -> number.
        self.odd: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self.table: list[Holding | None] = []
        self.by_run: dict[Run, int] = {}
        self.pending = pending
        self._free: list[int] = []

    @property
    def n_pending(self) -> int:
        """Blocks whose parent is not known (yet)."""
        return len(self.pending)

    def find(self, tier: int, hash_: int) -> tuple[int, int]:
        """Number of the holding and block that a claim is on; (-1, -1): there is no such claim."""
        number = self.odd[tier].get(hash_) if self.odd[tier] else None
        if number is None:
            key = hash_ & FOLD
            number = self.maps[tier][key >> SHARD_SHIFT].get(key)
            if number is None:
                return -1, -1
        holding = self.table[number]
        at = -1 if holding is None else holding.find(tier, hash_)
        return (number, at) if at >= 0 else (-1, -1)

    def holding(self, number: int) -> Holding:
        """The holding of a number that is in use."""
        holding = self.table[number]
        assert holding is not None
        return holding

    def number(self, run: Run) -> int:
        """The number of its holding of a run; an empty one is made."""
        number = self.by_run.get(run)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.table[number] = Holding(run)
            else:
                number = len(self.table)
                self.table.append(Holding(run))
            self.by_run[run] = number
        return number

    def enter(self, tier: int, hash_: int, number: int) -> None:
        """Note where a claim that is not there yet is found."""
        key = hash_ & FOLD
        shard = self.maps[tier][key >> SHARD_SHIFT]
        if key in shard:
            self.odd[tier][hash_] = number
        else:
            shard[key] = number

    def enter_all(self, tier: int, keys: Sequence[int], spans: Iterable[tuple[int, int]]) -> bool:
        """Note where claims are found, by folded hash: so many each in the holdings of these numbers.

        False when one of them is there already, or twice here; then none is noted.
        """
        if self.odd[tier]:
            return False
        shards = self.maps[tier]
        done = 0
        for number, n_keys in spans:
            for at, key in enumerate(keys[done : done + n_keys], done):
                shard = shards[key >> SHARD_SHIFT]
                if key in shard:
                    for entered in keys[:at]:
                        del shards[entered >> SHARD_SHIFT][entered]
                    return False
                shard[key] = number
            done += n_keys
        return True

    def forget(self, tier: int, hash_: int) -> None:
        """Note that a claim is gone."""
        if self.odd[tier].pop(hash_, None) is None:
            key = hash_ & FOLD
            del self.maps[tier][key >> SHARD_SHIFT][key]

    def free(self, holding: Holding) -> None:
        """Give up a holding that is empty. No-op for one that was given up."""
        number = self.by_run.get(holding.run)
        if number is not None and self.table[number] is holding:
            del self.by_run[holding.run]
            self.table[number] = None
            self._free.append(number)


def _shards() -> Shards:
    return tuple({} for _ in range(_N_SHARDS))


def fold(hashes: "array[int]") -> list[int]:
    """Hashes as keys of a holder's maps."""
    if len(hashes) < 16:
        return [hash_ & FOLD for hash_ in hashes]
    keys: list[int] = (np.frombuffer(hashes, np.uint64) & np.uint64(FOLD)).tolist()
    return keys
