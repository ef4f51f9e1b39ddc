"""What the processes of one gateway have under way, in a file that all of them map.

    header   64 bytes; the first 8 count the slots that were ever given out
    keys     N_SLOTS x 16 bytes: whose slot it is, a digest of its name; zeros: nobody's
    held     processes x N_SLOTS bytes: 1 while the process has the slot
    cells    processes x N_SLOTS x 8 x 64 bits: a cache line for each process and slot

A worker's rank, a pool and the gateway as a whole have a slot each, under a name that is the same in every
process: nobody hands slots out, and a reload may reach the processes one after the other. A cell has one
writer, the process whose row it is in, and is stored whole, so readers take no lock. Only who claims a slot
or gives it up does, for microseconds. A slot that nobody holds has no writer: it is for who has the lock.
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
"""Two thousand workers of eight ranks, in a mebibyte for each process."""

NOBODY = N_SLOTS - 1
"""The slot of those that found none: never written, so it adds nothing."""

GATEWAY = "gateway"
"""The name of the gateway's slot."""

N_CELLS, N_IN_FLIGHT = 8, 5
"""Cells of a line, and how many of the first a process leaves no trace in when it has ended."""

N_COUNTS = 4
"""The first cells of a rank's line, in the order of `RankCell`."""

_HEADER_BYTES, _KEY_BYTES, _CELL_BYTES = 64, 16, 8


class RankCell(IntEnum):
    """The line of a worker's rank."""

    INFLIGHT = 0  # of `N_COUNTS` that are summed
    WORKER_INFLIGHT = 1
    QUEUED_TOKENS = 2
    CONTEXT_TOKENS = 3
    QUEUED_S = 4  # a float
    LAST_CHOSEN = 5


class PoolCell(IntEnum):
    """The line of a pool."""

    OLDEST_S = 4  # a float: when the oldest request came that waits for it; 0: none does
    REQUESTS = 5  # legs that the pool was given
    RETRIES = 6  # legs of the pool that were tried again on another worker
    SPILLS = 7  # legs that the pool got because the pools before it had no worker for them


class GatewayCell(IntEnum):
    """The line of the gateway."""

    RUNNING = 0
    WAITING = 1
    SEEN_S = 4  # a float: when the process last said that it is alive
    RECEIPTS = 5  # requests that have ended


class OtherProcesses(NamedTuple):
    """What all other processes have on some slots."""

    counts: Ints  # the first `N_COUNTS` cells, one row each
    queued_s: Floats
    last_chosen: Ints  # the highest


def create(path: Path, n_processes: int) -> None:
    """Make the file, all zeros. Raises `OSError`.

    They are written, so that no process ends later for want of a page.
    """
    with path.open("xb") as file:
        file.write(bytes(_size(n_processes)))


class SharedCounts:
    """The memory as one process sees it: it writes row `number`. The parent, who has no row, is None."""

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
        # A store through one of these is one of eight aligned bytes.
        row = memoryview(memory)[at + (number or 0) * N_SLOTS * N_CELLS * _CELL_BYTES :]
        self._ints = row.cast("q")
        self._floats = row.cast("d")
        self._n_given = memoryview(memory)[:8].cast("q")

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"SharedCounts(row {self.number}, {self._n_given[0]} slots)"

    def close(self) -> None:
        """Nothing is claimed or given up any more. The memory goes when nobody looks at it."""
        self._file.close()

    def claim_slot(self, name: str) -> int:
        """The slot of that name, from now on held by this process.

        What the process left there when it ended, and did not give up, is there again. When all are taken
        it is `NOBODY`, which the log says: the others do not see what this one has there.
        """
        assert self.number is not None, "the parent has no row"
        key = _key(name)
        with self._locked():
            slot = self._find(key)
            if slot is None:
                slot = self._unused()
                if slot == NOBODY:
                    log.error("counts.full", extra={"slot_name": name, "slots": N_SLOTS})
                    return slot
                self._cells[:, slot] = 0
                self._keys[slot] = key
            self._held[self.number, slot] = 1
        return slot

    def release_slot(self, slot: int) -> None:
        """This process has nothing there any more; the last one frees the slot."""
        assert self.number is not None, "the parent has no row"
        if slot == NOBODY:
            return
        with self._locked():
            self._cells[self.number, slot] = 0
            self._held[self.number, slot] = 0
            if not self._held[:, slot].any():
                self._keys[slot] = 0

    def clear(self, number: int) -> None:
        """Take out what a process that has ended had in flight. What it counted stays, for the next."""
        n_given = self._n_given[0]
        with self._locked():
            self._cells[number, :n_given, :N_IN_FLIGHT] = 0
            self._held[number, :n_given] = 0

    def set(self, slot: int, cell: int, value: int) -> None:
        """Store one figure of this process."""
        if slot != NOBODY:
            self._ints[slot * N_CELLS + cell] = value

    def set_s(self, slot: int, cell: int, seconds: float) -> None:
        """As `set`, for a cell that is a float."""
        if slot != NOBODY:
            self._floats[slot * N_CELLS + cell] = seconds

    def get(self, slot: int, cell: int) -> int:
        """One figure of this process."""
        return self._ints[slot * N_CELLS + cell]

    def lines_of_others(self, slots: Ints) -> Ints:
        """Where the other processes have their lines of these slots; for `others`."""
        firsts = np.array(self._others, dtype=np.int64) * N_SLOTS
        return firsts[:, None] + slots

    def sum_of_others(self, places: Ints) -> OtherProcesses:
        """What the other processes have on the slots of ranks."""
        found = self._lines.take(places, axis=0)
        queued_s = found.view(np.float64)[:, :, RankCell.QUEUED_S]
        if len(found) == 1:
            line = found[0].T
            return OtherProcesses(line[:N_COUNTS], queued_s[0], line[RankCell.LAST_CHOSEN])
        return OtherProcesses(
            found[:, :, :N_COUNTS].sum(axis=0).T,
            queued_s.sum(axis=0),
            found[:, :, RankCell.LAST_CHOSEN].max(axis=0, initial=0),
        )

    def each_other(self, slot: int, cell: int) -> list[tuple[int, int]]:
        """One figure of each other process, with its number."""
        return [(number, int(self._cells[number, slot, cell])) for number in self._others]

    def each_other_s(self, slot: int, cell: int) -> list[tuple[int, float]]:
        """As `each_other`, for a cell that is a float."""
        cells = self._cells.view(np.float64)
        return [(number, float(cells[number, slot, cell])) for number in self._others]

    def each(self, name: str, cell: int) -> list[int]:
        """A figure of every process, by number; empty where nobody has claimed the name."""
        slot = self._find(_key(name))
        return [] if slot is None else [int(value) for value in self._cells[:, slot, cell]]

    def total(self, name: str, cell: int) -> int:
        """The sum of a figure over all processes; 0 where nobody has claimed the name."""
        return sum(self.each(name, cell))

    def _find(self, key: Ints) -> int | None:
        keys = self._keys[: self._n_given[0]]
        found = np.flatnonzero((keys[:, 0] == key[0]) & (keys[:, 1] == key[1]))
        return int(found[0]) if len(found) else None

    def _unused(self) -> int:
        """A slot that nobody has. To be called with the lock."""
        n_given = self._n_given[0]
        free = np.flatnonzero(self._keys[:n_given, 0] == 0)
        if len(free):
            return int(free[0])
        if n_given < NOBODY:
            self._n_given[0] = n_given + 1
            return n_given
        # Those that only processes had that ended without giving them up.
        left = np.flatnonzero(~self._held[:, :NOBODY].any(axis=0))
        return int(left[0]) if len(left) else NOBODY

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Of the process, so that it goes when the process does, wherever that was.
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def _key(name: str) -> Ints:
    digest = hashlib.blake2b(name.encode(), digest_size=_KEY_BYTES).digest()
    key: Ints = np.frombuffer(digest, np.int64).copy()
    key[0] |= 1  # never that of nobody
    return key


def _size(n_processes: int) -> int:
    per_process = N_SLOTS * (1 + N_CELLS * _CELL_BYTES)
    whole = _HEADER_BYTES + _KEY_BYTES * N_SLOTS + n_processes * per_process
    return whole + -whole % os.sysconf("SC_PAGE_SIZE")
