"""The table of a pool whose workers other processes of the gateway use too: their leases count in it."""

import msgspec
import numpy as np
from typing_extensions import override

from slagate.pools.inflight.engine_queue import Held, Work
from slagate.pools.inflight.rows import BATCH, DOWN, QUEUE_FULL, UNAVAILABLE, WIDTH, Ints, Rows
from slagate.pools.inflight.shared_counts import (
    N_COUNTS,
    NO_SLOT,
    OtherCounts,
    PoolCell,
    RankCell,
    SharedCounts,
)
from slagate.pools.inflight.table import (
    INFLIGHT,
    LAST_CHOSEN,
    MAX_INFLIGHT,
    MAX_QUEUED_TOKENS,
    QUEUED_S,
    QUEUED_TOKENS,
    WORKER_INFLIGHT,
    LoadTable,
)

_LIMITS = slice(MAX_INFLIGHT, MAX_QUEUED_TOKENS + 1)  # of `WORKER_INFLIGHT` and `QUEUED_TOKENS`


class SharedTable(LoadTable):
    """A table that shows its leases to the other processes, and whose `rows` include theirs.

    The others see of a row how many leases it has here, the tokens and seconds of work queued, and the
    number of the newest lease. A prompt counts there whole until it has ended: what is done of it is
    predicted only in the process that has its lease. That one takes the engine to work for nobody else, so
    with prompts of other processes between its own it takes what comes first of them to be done early.
    Promises and room in the last step are of this process alone, so a prompt may make late one that another
    process has placed. So are paces, which each process learns from its own requests.

    `name` is unique to the table, and the same in all processes. Its `totals` go on from those of an
    earlier process of this number.
    """

    is_shared = True

    def __init__(self, name: str, shared: SharedCounts) -> None:
        super().__init__()
        self._name = name
        self._shared = shared
        self._slots: list[int] = []  # of its rows
        self._lines_of_others: Ints | None = None  # i64[n_others, n_rows]; None: to be found
        self._pool_slot = shared.claim_slot(f"pool {name}")
        self._oldest_s = 0.0
        self.totals = {total: shared.get(self._pool_slot, total) for total in self.totals}

    @override
    def free_pool(self) -> None:
        self._shared.release_slot(self._pool_slot)
        self._pool_slot = NO_SLOT

    @property
    def is_freed(self) -> bool:
        """Whether `free_pool` was called: the pool is gone."""
        return self._pool_slot == NO_SLOT

    @override
    def count(self, total: PoolCell) -> None:
        super().count(total)
        self._shared.set(self._pool_slot, total, self.totals[total])

    def set_oldest_s(self, since_s: float) -> bool:
        """Set when the oldest request that waits here for the pool came; 0: none. True if that changed."""
        is_new, self._oldest_s = since_s != self._oldest_s, since_s
        if is_new:
            self._shared.set_s(self._pool_slot, PoolCell.OLDEST_S, since_s)
        return is_new

    def oldest_elsewhere(self) -> list[tuple[int, float]]:
        """(number, when its oldest request for the pool came; 0: none) of each other process."""
        return self._shared.each_other_s(self._pool_slot, PoolCell.OLDEST_S)

    @override
    def add_row(self, address: str, rank: int | None) -> int:
        row = super().add_row(address, rank)
        if row == len(self._slots):
            self._slots.append(NO_SLOT)
        self._lines_of_others = None
        # The first row of a worker is for rank 0, or for whichever the worker takes.
        slot = self._slots[row] = self._shared.claim_slot(f"{self._name} {address} {rank or 0}")
        self._int[LAST_CHOSEN][row] = self._shared.get(slot, RankCell.LAST_CHOSEN)
        return row

    @override
    def free_row(self, row: int) -> None:
        super().free_row(row)
        self._shared.release_slot(self._slots[row])
        self._slots[row] = NO_SLOT
        self._lines_of_others = None

    @override
    def set(self, row: int, **figures: int) -> None:
        super().set(row, **figures)
        self._show(row)

    @override
    def set_s(self, row: int, **seconds: float) -> None:
        super().set_s(row, **seconds)
        self._show(row)

    @override
    def add_lease(self, row: int, work: Work, *, number: int) -> Held:
        held = super().add_lease(row, work, number=number)
        self._shared.set(self._pool_slot, PoolCell.REQUESTS, self.totals[PoolCell.REQUESTS])
        self._show(row)
        return held

    @override
    def end_prefill(self, row: int, held: Held, *, is_computed: bool = False) -> None:
        # Between prompts of others the rate of the worker cannot be told.
        is_computed = is_computed and not self._others().counts[QUEUED_TOKENS][row]
        super().end_prefill(row, held, is_computed=is_computed)
        self._show(row)

    @override
    def end_lease(self, row: int, held: Held) -> None:
        super().end_lease(row, held)
        self._show(row)

    @override
    def set_worker_inflight(self, rows: list[int], n_leases: int) -> None:
        super().set_worker_inflight(rows, n_leases)
        for row in rows:
            self._shared.set(self._slots[row], RankCell.WORKER_INFLIGHT, n_leases)

    def _show(self, row: int) -> None:
        """Show the figures of a row to the other processes; cells of counts have the same numbers."""
        slot = self._slots[row]
        for figure in range(N_COUNTS):
            self._shared.set(slot, figure, self._int[figure][row])
        self._shared.set_s(slot, RankCell.QUEUED_S, self._float[QUEUED_S][row])
        self._shared.set(slot, RankCell.LAST_CHOSEN, self._int[LAST_CHOSEN][row])

    @override
    def elsewhere(self, rows: list[int]) -> tuple[int, int]:
        counts = self._others().counts[:, rows].sum(axis=1)
        return int(counts[INFLIGHT]), int(counts[QUEUED_TOKENS])

    @override
    def newest_lease(self) -> int:
        return max(super().newest_lease(), int(self._others().last_chosen.max(initial=0)))

    def _others(self) -> OtherCounts:
        if self._lines_of_others is None:
            self._lines_of_others = self._shared.lines_of_others(
                np.array(self._slots, dtype=np.int64)
            )
        return self._shared.sum_of_others(self._lines_of_others)

    @override
    def rows(self) -> Rows:
        rows, others = super().rows(), self._others()
        ints, floats = rows._ints, rows._floats
        ints[:N_COUNTS] += others.counts
        ints[BATCH : WIDTH + 1] += others.counts[INFLIGHT]
        np.maximum(rows.last_chosen, others.last_chosen, out=rows.last_chosen)
        floats[QUEUED_S] += others.queued_s
        # More leases make no row available again, so what this process alone has found is right already.
        at_limit = ints[WORKER_INFLIGHT : QUEUED_TOKENS + 1] >= ints[_LIMITS]
        if at_limit.any():
            ints[UNAVAILABLE] |= at_limit[0] * DOWN | at_limit[1] * QUEUE_FULL
            # The other counts are about the workers, and the same in all processes.
            n_unavailable = int(np.count_nonzero(ints[UNAVAILABLE]))
            counts = msgspec.structs.replace(rows.counts, n_unavailable=n_unavailable)
            rows = msgspec.structs.replace(rows, counts=counts)
        return rows
