"""Counts of what the processes of one gateway have in flight, in a file that all of them map.

    header   64 bytes; the first 8 count the slots that were ever used
    keys     N_SLOTS x 16 bytes: a digest of the name of the slot's owner; zeros: the slot is free
    held     processes x N_SLOTS bytes: 1 while the process has claimed the slot
    cells    processes x N_SLOTS x 8 x 64 bits: a cache line for each process and slot

Each rank of a worker, each pool and the gateway as a whole has a slot, under a name that is the same in all
processes: none of them assigns slots to others, and a reload may reach them one after the other. A cell has
one writer, the process whose row it is in, and is stored whole, so readers take no lock. Claiming and
releasing a slot take it, for microseconds; a slot that no process has claimed is written under it only.
"""

import fcntl
import hashlib
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

N_SLOTS = 1 << 14
"""Enough for two thousand workers of eight ranks, in a mebibyte for each process."""

NO_SLOT = N_SLOTS - 1
"""The slot of claims for which there was no room: it is never written, so it adds nothing."""

GATEWAY = "gateway"
"""The name of the gateway's slot."""

N_CELLS, N_IN_FLIGHT = 8, 5
"""Cells of a line, and how many of the first are cleared when a process has ended."""

N_COUNTS = 4
"""The first cells of a rank's line, in the order of `RankCell`."""

_HEADER_BYTES, _KEY_BYTES, _CELL_BYTES = 64, 16, 8


class RankCell(IntEnum):
    """The cells in the line of a worker's rank."""

    INFLIGHT = 0  # the first of the `N_COUNTS` that are summed over processes
    WORKER_INFLIGHT = 1
    QUEUED_TOKENS = 2
    CONTEXT_TOKENS = 3
    QUEUED_S = 4  # a float
    LAST_CHOSEN = 5


class PoolCell(IntEnum):
    """The cells in the line of a pool."""

    OLDEST_S = 4  # a float: when the oldest request came that waits for it; 0: none does
    REQUESTS = 5  # legs that the pool was given
    RETRIES = 6  # legs of the pool that were tried again on another worker
    SPILLS = 7  # legs that went past the pools before it in their order


class GatewayCell(IntEnum):
    """The cells in the line of the gateway."""

    RUNNING = 0  # requests that have begun and not ended
    WAITING = 1  # those of them that wait for a worker
    RELEGATED = 2  # those of these that are behind all others
    SEEN_S = 4  # a float: when the process last showed that it is alive
    RECEIPTS = 5  # requests that have ended


class OtherCounts(NamedTuple):
    """What all other processes of the gateway have on some slots."""

    counts: Ints  # i64[N_COUNTS, n_slots], the sums of the first cells
    queued_s: Floats
    last_chosen: Ints  # i64[n_slots], the highest


def create(path: Path, n_processes: int) -> None:
    """Make the file at `path`, all zeros. Raises `OSError`, also if it exists.

    The zeros are written, so that no process is killed later for want of a page.
    """
    with path.open("xb") as file:
        file.write(bytes(_size(n_processes)))


class SharedCounts:
    """The memory as one process sees it, which writes row `number`; None: the parent, which has no row."""

    def __init__(self, path: Path, number: int | None, *, n_processes: int) -> None:
        self.number = number
        self.n_processes = n_processes
        self._others = [n for n in range(n_processes) if n != number]
        self._file = path.open("r+b")
        self._memory = memory = mmap.mmap(self._file.fileno(), _size(n_processes))
        at = _HEADER_BYTES
        self._keys = np.frombuffer(memory, np.int64, 2 * N_SLOTS, at).reshape(N_SLOTS, 2)
        at += _KEY_BYTES * N_SLOTS
        held = np.frombuffer(memory, np.int8, n_processes * N_SLOTS, at)
        self._held = held.reshape(n_processes, N_SLOTS)
        at += n_processes * N_SLOTS
        cells = np.frombuffer(memory, np.int64, n_processes * N_SLOTS * N_CELLS, at)
        self._cells = cells.reshape(n_processes, N_SLOTS, N_CELLS)
        self._lines = cells.reshape(n_processes * N_SLOTS, N_CELLS)
        # A store through one of these views writes eight aligned bytes at once.
        row = memoryview(memory)[at + (number or 0) * N_SLOTS * N_CELLS * _CELL_BYTES :]
        self._ints = row.cast("q")
        self._floats = row.cast("d")
        self._n_given = memoryview(memory)[:8].cast("q")

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"SharedCounts(row {self.number}, {self._n_given[0]} slots)"

    def close(self) -> None:
        """Close the file: no slot can be claimed or released any more. The memory stays mapped."""
        self._file.close()

    def claim_slot(self, name: str) -> int:
        """Claim the slot of that name for this process.

        It has what an earlier process of this number counted there and did not release. When all slots are
        taken the result is `NO_SLOT`, and logged: other processes do not see what this one has there.
        """
        assert self.number is not None, "the parent has no row"
        key = _key(name)
        with self._locked():
            slot = self._find(key)
            if slot is None:
                slot = self._unused()
                if slot == NO_SLOT:
                    log.error("counts.full", extra={"slot_name": name, "slots": N_SLOTS})
                    return slot
                self._cells[:, slot] = 0
                self._keys[slot] = key
            self._held[self.number, slot] = 1
        return slot

    def release_slot(self, slot: int) -> None:
        """Release a slot: this process has nothing there. The last process to do so frees it."""
        assert self.number is not None, "the parent has no row"
        if slot == NO_SLOT:
            return
        with self._locked():
            self._cells[self.number, slot] = 0
            self._held[self.number, slot] = 0
            if not self._held[:, slot].any():
                self._keys[slot] = 0

    def clear(self, number: int) -> None:
        """Clear what a process that has ended had in flight. Its totals stay, for the next one."""
        n_given = self._n_given[0]
        with self._locked():
            self._cells[number, :n_given, :N_IN_FLIGHT] = 0
            self._held[number, :n_given] = 0

    def set(self, slot: int, cell: int, value: int) -> None:
        """Store one figure of this process; for `NO_SLOT` nothing is done."""
        if slot != NO_SLOT:
            self._ints[slot * N_CELLS + cell] = value

    def set_s(self, slot: int, cell: int, seconds: float) -> None:
        """Store one figure of this process that is a float; for `NO_SLOT` nothing is done."""
        if slot != NO_SLOT:
            self._floats[slot * N_CELLS + cell] = seconds

    def get(self, slot: int, cell: int) -> int:
        """One figure of this process."""
        return self._ints[slot * N_CELLS + cell]

    def lines_of_others(self, slots: Ints) -> Ints:
        """The indices of the other processes' lines of these slots, i64[n_others, n_slots]."""
        firsts = np.array(self._others, dtype=np.int64) * N_SLOTS
        return firsts[:, None] + slots

    def sum_of_others(self, places: Ints) -> OtherCounts:
        """Per slot of a rank the sums over the other processes; `places` is `lines_of_others`."""
        found = self._lines.take(places, axis=0)
        queued_s = found.view(np.float64)[:, :, RankCell.QUEUED_S]
        if len(found) == 1:
            line = found[0].T
            return OtherCounts(line[:N_COUNTS], queued_s[0], line[RankCell.LAST_CHOSEN])
        return OtherCounts(
            found[:, :, :N_COUNTS].sum(axis=0).T,
            queued_s.sum(axis=0),
            found[:, :, RankCell.LAST_CHOSEN].max(axis=0, initial=0),
        )

    def each_other(self, slot: int, cell: int) -> list[tuple[int, int]]:
        """(process number, figure) of each other process, for one cell of a slot."""
        return [(number, int(self._cells[number, slot, cell])) for number in self._others]

    def each_other_s(self, slot: int, cell: int) -> list[tuple[int, float]]:
        """(process number, figure) of each other process, for a cell of a slot that is a float."""
        cells = self._cells.view(np.float64)
        return [(number, float(cells[number, slot, cell])) for number in self._others]

    def each(self, name: str, cell: int) -> list[int]:
        """A figure of every process, by number; empty where no process has claimed the name."""
        slot = self._find(_key(name))
        return [] if slot is None else [int(value) for value in self._cells[:, slot, cell]]

    def total(self, name: str, cell: int) -> int:
        """The sum of a figure over all processes; 0 where no process has claimed the name."""
        return sum(self.each(name, cell))

    def _find(self, key: Ints) -> int | None:
        keys = self._keys[: self._n_given[0]]
        found = np.flatnonzero((keys[:, 0] == key[0]) & (keys[:, 1] == key[1]))
        return int(found[0]) if len(found) else None

    def _unused(self) -> int:
        """A free slot. To be called with the lock."""
        n_given = self._n_given[0]
        free = np.flatnonzero(self._keys[:n_given, 0] == 0)
        if len(free):
            return int(free[0])
        if n_given < NO_SLOT:
            self._n_given[0] = n_given + 1
            return n_given
        # Slots that are left from processes which ended without releasing them.
        left = np.flatnonzero(~self._held[:, :NO_SLOT].any(axis=0))
        return int(left[0]) if len(left) else NO_SLOT

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # A lock of the process, so that it is released when the process dies, wherever that is.
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def _key(name: str) -> Ints:
    digest = hashlib.blake2b(name.encode(), digest_size=_KEY_BYTES).digest()
    key: Ints = np.frombuffer(digest, np.int64).copy()
    key[0] |= 1  # never zeros, which mean a free slot
    return key


def _size(n_processes: int) -> int:
    per_process = N_SLOTS * (1 + N_CELLS * _CELL_BYTES)
    whole = _HEADER_BYTES + _KEY_BYTES * N_SLOTS + n_processes * per_process
    return whole + -whole % os.sysconf("SC_PAGE_SIZE")
