"""The rows of a pool of one process of several: what the others have on a worker counts in a decision."""

import msgspec
import numpy as np

from slagate.pools.inflight.shared_counts import (
    N_COUNTS,
    NOBODY,
    OtherProcesses,
    PoolCell,
    RankCell,
    SharedCounts,
)
from slagate.pools.inflight.table import (
    BATCH,
    CONTEXT_TOKENS,
    DOWN,
    FOREIGN_S,
    INFLIGHT,
    LAST_CHOSEN,
    MAX_INFLIGHT,
    MAX_QUEUED_TOKENS,
    QUEUE_FULL,
    QUEUED_S,
    QUEUED_TOKENS,
    UNAVAILABLE,
    WIDTH,
    WORKER_INFLIGHT,
    Ints,
    LoadTable,
    Rows,
    Work,
)

_LIMITS = slice(MAX_INFLIGHT, MAX_QUEUED_TOKENS + 1)  # of `WORKER_INFLIGHT` and `QUEUED_TOKENS`


class SharedTable(LoadTable):
    """A table that shows the other processes what it has, and whose `rows` have what they have too.

    All else is only of this process. `name` is the same in all of them, and no other table's. What the
    process in whose place this one is had counted is in `totals`.
    """

    is_shared = True

    def __init__(self, name: str, shared: SharedCounts) -> None:
        super().__init__()
        self._name = name
        self._shared = shared
        self._slots: list[int] = []  # of its rows
        self._lines_of_others: Ints | None = None  # of the same in the other processes
        self._pool_slot = shared.claim_slot(f"pool {name}")
        self._oldest_s = 0.0
        self.totals = {total: shared.get(self._pool_slot, total) for total in self.totals}

    def free_pool(self) -> None:
        """Free the slot of the pool itself, which is gone; its rows were freed before."""
        self._shared.release_slot(self._pool_slot)
        self._pool_slot = NOBODY

    @property
    def is_freed(self) -> bool:
        """Whether its pool is gone."""
        return self._pool_slot == NOBODY

    def count(self, total: PoolCell) -> None:
        """Count one more, in `totals`."""
        super().count(total)
        self._shared.set(self._pool_slot, total, self.totals[total])

    def set_oldest_s(self, since_s: float) -> bool:
        """Since when the oldest request here waits for the pool; 0: none does. True when that is new."""
        is_new, self._oldest_s = since_s != self._oldest_s, since_s
        if is_new:
            self._shared.set_s(self._pool_slot, PoolCell.OLDEST_S, since_s)
        return is_new

    def oldest_elsewhere(self) -> list[tuple[int, float]]:
        """The same of each other process, with its number."""
        return self._shared.each_other_s(self._pool_slot, PoolCell.OLDEST_S)

    def add_row(self, address: str, rank: int | None) -> int:
        """A row with all figures 0 but for the turn of its last lease; its number."""
        row = super().add_row(address, rank)
        if row == len(self._slots):
            self._slots.append(NOBODY)
        self._lines_of_others = None
        # The first row of a worker is for rank 0, or for whichever the worker takes.
        slot = self._slots[row] = self._shared.claim_slot(f"{self._name} {address} {rank or 0}")
        self._int[LAST_CHOSEN][row] = self._shared.get(slot, RankCell.LAST_CHOSEN)
        return row

    def free_row(self, row: int) -> None:
        """Its worker has left."""
        super().free_row(row)
        self._shared.release_slot(self._slots[row])
        self._slots[row] = NOBODY
        self._lines_of_others = None

    def set(self, row: int, **figures: int) -> None:
        """Set figures of a row."""
        super().set(row, **figures)
        self._show(row, *range(N_COUNTS))
        self._show_chosen(row)

    def set_s(self, row: int, **seconds: float) -> None:
        """Set figures of a row that are seconds."""
        super().set_s(row, **seconds)
        self._show_queued_s(row)

    def add_lease(self, row: int, work: Work, *, number: int) -> None:
        """Add a lease, the pool's lease of that number, to a row."""
        super().add_lease(row, work, number=number)
        self._shared.set(self._pool_slot, PoolCell.REQUESTS, self.totals[PoolCell.REQUESTS])
        self._show_chosen(row)
        self._show(row, INFLIGHT, QUEUED_TOKENS, CONTEXT_TOKENS)
        self._show_queued_s(row)

    def end_prefill(self, row: int, work: Work) -> None:
        """Take a lease's prompt out of the queue of a row: it is processed, or given up."""
        super().end_prefill(row, work)
        self._show(row, QUEUED_TOKENS)
        self._show_queued_s(row)

    def end_lease(self, row: int, work: Work) -> None:
        """Take a lease off a row; its prefill has ended before."""
        super().end_lease(row, work)
        self._show(row, INFLIGHT, CONTEXT_TOKENS)

    def set_worker_inflight(self, rows: list[int], n_leases: int) -> None:
        """Set how many leases of this process there are on all rows of a worker."""
        super().set_worker_inflight(rows, n_leases)
        for row in rows:
            self._show(row, WORKER_INFLIGHT)

    def _show(self, row: int, *figures: int) -> None:
        """Tell the others some of the first `N_COUNTS` figures of a row; cells have the same numbers."""
        slot = self._slots[row]
        for figure in figures:
            self._shared.set(slot, figure, self._int[figure][row])

    def _show_queued_s(self, row: int) -> None:
        self._shared.set_s(self._slots[row], RankCell.QUEUED_S, self._float[QUEUED_S][row])

    def _show_chosen(self, row: int) -> None:
        self._shared.set(self._slots[row], RankCell.LAST_CHOSEN, self._int[LAST_CHOSEN][row])

    def elsewhere(self, rows: list[int]) -> tuple[int, int]:
        """Leases, and prompt tokens that wait, that other processes of the gateway have on some rows."""
        counts = self._others().counts[:, rows].sum(axis=1)
        return int(counts[INFLIGHT]), int(counts[QUEUED_TOKENS])

    def newest_lease(self) -> int:
        """The number of the newest lease, of whichever process of the gateway."""
        return max(super().newest_lease(), int(self._others().last_chosen.max(initial=0)))

    def _others(self) -> OtherProcesses:
        if self._lines_of_others is None:
            self._lines_of_others = self._shared.lines_of_others(
                np.array(self._slots, dtype=np.int64)
            )
        return self._shared.sum_of_others(self._lines_of_others)

    def rows(self) -> Rows:
        """All rows as they stand, with the leases of all processes."""
        rows, others = super().rows(), self._others()
        ints, floats = rows._ints, rows._floats
        ints[:N_COUNTS] += others.counts
        ints[BATCH : WIDTH + 1] += others.counts[INFLIGHT]
        np.maximum(rows.last_chosen, others.last_chosen, out=rows.last_chosen)
        floats[QUEUED_S] += others.queued_s
        np.add(floats[QUEUED_S], floats[FOREIGN_S], out=rows.load_s)
        # More leases make no row available again, so what this process alone has found is right already.
        at_limit = ints[WORKER_INFLIGHT : QUEUED_TOKENS + 1] >= ints[_LIMITS]
        if at_limit.any():
            ints[UNAVAILABLE] |= at_limit[0] * DOWN | at_limit[1] * QUEUE_FULL
            # All else that is counted is known of the workers, not what any process has there.
            n_unavailable = int(np.count_nonzero(ints[UNAVAILABLE]))
            counts = msgspec.structs.replace(rows.counts, n_unavailable=n_unavailable)
            rows = msgspec.structs.replace(rows, counts=counts)
        return rows
