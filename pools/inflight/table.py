"""The rows of a pool as they change: written one figure at a time, copied for each decision."""

from collections.abc import Iterable, Mapping, MutableSequence
from typing import cast

import numpy as np

from slagate.pools.inflight.rows import (
    BATCH,
    CAPACITY_TOKENS,
    CONTEXT_TOKENS,
    DOWN,
    FIGURE_INDEX,
    FLOAT_FIELDS,
    FOREIGN_REQUESTS,
    FOREIGN_S,
    FOREIGN_UNKNOWN,
    INFLIGHT,
    INT_FIELDS,
    LAST_CHOSEN,
    LEFT,
    LOAD_S,
    MAX_INFLIGHT,
    MAX_QUEUED_TOKENS,
    N_FLOATS,
    N_INTS,
    QUEUE_FULL,
    QUEUED_S,
    QUEUED_TOKENS,
    READY,
    STATE,
    STATES,
    SUSPECT,
    UNAVAILABLE,
    UNLIMITED,
    WIDTH,
    WORKER_INFLIGHT,
    Counts,
    Flags,
    Floats,
    Ints,
    Rows,
    RowView,
    State,
    Work,
)
from slagate.pools.inflight.shared_counts import PoolCell


class LoadTable:
    """The rows of one pool, and what the pool has counted. Members write to their own rows.

    A row keeps its number: leases and caches go by it. One that was given up is the next one's that is
    added; until then it stays among the others, as one that has left.
    """

    _ints: Ints  # i64[N_INTS, n_rows and room for more]
    _floats: Floats  # f64[N_FLOATS, as many]
    is_shared = False  # with other processes of the gateway

    def __init__(self) -> None:
        self.names: tuple[tuple[str, int | None], ...] = ()  # address and rank of each row
        self._row_models: list[frozenset[str]] = []
        self._resize(4)
        self._free: list[int] = []
        self._models: Mapping[frozenset[str], Flags] | None = None
        self._counts: Counts | None = None  # None: to be counted, something that counts has changed
        self.n_model_changes = 0  # times that a worker said what it serves, the same included
        self.totals = {PoolCell.REQUESTS: 0, PoolCell.RETRIES: 0, PoolCell.SPILLS: 0}

    def _resize(self, n_rows: int) -> None:
        ints = np.zeros((N_INTS, n_rows), dtype=np.int64)
        floats = np.zeros((N_FLOATS, n_rows), dtype=np.float64)
        if n_old := len(self.names):
            ints[:, :n_old], floats[:, :n_old] = self._ints, self._floats
        self._ints, self._floats = ints, floats
        # The same memory: single figures are read and written three times as fast this way.
        self._int = [cast("MutableSequence[int]", each.data) for each in ints]
        self._float = [cast("MutableSequence[float]", each.data) for each in floats]

    def __len__(self) -> int:
        return len(self.names)

    def free_pool(self) -> None:
        """Free what is allocated for the pool itself, which is gone; its rows were freed before."""

    def count(self, total: PoolCell) -> None:
        """Count one more, in `totals`."""
        self.totals[total] += 1

    def add_row(self, address: str, rank: int | None) -> int:
        """A row with all figures 0; its number."""
        row = self._free.pop() if self._free else self._appended()
        self._ints[:, row] = 0
        self._floats[:, row] = 0.0
        self._set_name(row, address, rank)
        self._derive(row)
        return row

    def free_row(self, row: int) -> None:
        """Its worker has left."""
        self._set_name(row, "", None)
        self.set_models(row, frozenset())
        self.set_state(row, State.LEFT, suspect=False)
        self.set_foreign(row, None)
        self._free.append(row)

    def _appended(self) -> int:
        row = len(self.names)
        if row == self._ints.shape[1]:
            self._resize(2 * row)
        self.names = (*self.names, ("", None))
        self._row_models.append(frozenset())
        self._models = None
        return row

    def _set_name(self, row: int, address: str, rank: int | None) -> None:
        self.names = (*self.names[:row], (address, rank), *self.names[row + 1 :])

    def is_up(self, row: int) -> bool:
        """Whether the row's worker is ready, and below its limit of requests."""
        return not self._int[UNAVAILABLE][row] & DOWN

    def rename(self, row: int, rank: int | None) -> None:
        """Another rank for a row: what it is turns out once the worker is reached."""
        self._set_name(row, self.names[row][0], rank)

    def set_state(self, row: int, state: State, *, suspect: bool) -> None:
        """Whether the row may take work."""
        self._int[STATE][row] = STATES.index(state)
        self._int[SUSPECT][row] = suspect
        self._derive(row)

    def set_models(self, row: int, models: frozenset[str]) -> None:
        """What the row's worker serves."""
        self.n_model_changes += 1
        if self._row_models[row] != models:
            self._row_models[row] = models
            self._models = None

    def get(self, name: str, row: int) -> int:
        """One figure of a row."""
        return self._int[FIGURE_INDEX[name]][row]

    def set(self, row: int, **figures: int) -> None:
        """Set figures of a row."""
        for name, value in figures.items():
            self._int[FIGURE_INDEX[name]][row] = value
        self._derive(row)

    def get_s(self, name: str, row: int) -> float:
        """One figure of a row that is seconds."""
        return self._float[FIGURE_INDEX[name]][row]

    def set_s(self, row: int, **seconds: float) -> None:
        """Set figures of a row that are seconds."""
        for name, value in seconds.items():
            self._float[FIGURE_INDEX[name]][row] = value
        self._derive(row)

    def set_foreign(self, row: int, load: tuple[int, float] | None) -> None:
        """Requests and predicted seconds on a row that others sent; None: nobody can tell now."""
        self._int[FOREIGN_UNKNOWN][row] = load is None
        requests, seconds = (0, 0.0) if load is None else load
        self._int[FOREIGN_REQUESTS][row] = requests
        self._float[FOREIGN_S][row] = seconds
        self._derive(row)

    def add_lease(self, row: int, work: Work, *, number: int) -> None:
        """Add a lease, the pool's lease of that number, to a row."""
        ints, floats = self._int, self._float
        self.totals[PoolCell.REQUESTS] += 1
        ints[LAST_CHOSEN][row] = number
        inflight = ints[INFLIGHT][row] = ints[INFLIGHT][row] + 1
        ints[CONTEXT_TOKENS][row] += work.context_tokens
        queued = ints[QUEUED_TOKENS][row] = ints[QUEUED_TOKENS][row] + work.prefill_tokens
        floats[QUEUED_S][row] += work.work_s
        floats[LOAD_S][row] = floats[QUEUED_S][row] + floats[FOREIGN_S][row]
        ints[WIDTH][row] = inflight + 1
        ints[BATCH][row] = min(inflight + 1 + ints[FOREIGN_REQUESTS][row], UNLIMITED)
        if queued >= ints[MAX_QUEUED_TOKENS][row]:
            self._derive_unavailable(row)

    def end_prefill(self, row: int, work: Work) -> None:
        """Take a lease's prompt out of the queue of a row: it is processed, or given up."""
        queued = self._int[QUEUED_TOKENS]
        left_tokens = queued[row] = queued[row] - work.prefill_tokens
        seconds = self._float[QUEUED_S]
        # Floats do not add up to zero again by themselves.
        left_s = seconds[row] = max(0.0, seconds[row] - work.work_s) if left_tokens else 0.0
        self._float[LOAD_S][row] = left_s + self._float[FOREIGN_S][row]
        if self._int[UNAVAILABLE][row]:
            self._derive_unavailable(row)

    def end_lease(self, row: int, work: Work) -> None:
        """Take a lease off a row; its prefill has ended before."""
        ints = self._int
        inflight = ints[INFLIGHT][row] = ints[INFLIGHT][row] - 1
        ints[CONTEXT_TOKENS][row] -= work.context_tokens
        ints[WIDTH][row] = inflight + 1
        ints[BATCH][row] = min(inflight + 1 + ints[FOREIGN_REQUESTS][row], UNLIMITED)

    def set_worker_inflight(self, rows: list[int], n_leases: int) -> None:
        """Set how many leases there are on all rows of a worker."""
        ints = self._int
        for row in rows:
            ints[WORKER_INFLIGHT][row] = n_leases
            if n_leases >= ints[MAX_INFLIGHT][row] or ints[UNAVAILABLE][row]:
                self._derive_unavailable(row)

    def _derive(self, row: int) -> None:
        """Bring all that follows from a row's figures in line with them; they may be any."""
        ints, floats = self._int, self._float
        floats[LOAD_S][row] = floats[QUEUED_S][row] + floats[FOREIGN_S][row]
        width = ints[WIDTH][row] = ints[INFLIGHT][row] + 1
        # What others sent is theirs to say, and a receipt to decide again from may be made up.
        ints[BATCH][row] = min(width + ints[FOREIGN_REQUESTS][row], UNLIMITED)
        self._derive_unavailable(row)
        self._counts = None

    def _derive_unavailable(self, row: int) -> None:
        ints = self._int
        is_down = ints[WORKER_INFLIGHT][row] >= ints[MAX_INFLIGHT][row] or ints[STATE][row] != READY
        bits = DOWN if is_down else 0
        if ints[QUEUED_TOKENS][row] >= ints[MAX_QUEUED_TOKENS][row]:
            bits |= QUEUE_FULL
        if ints[UNAVAILABLE][row] != bits:
            ints[UNAVAILABLE][row] = bits
            self._counts = None

    def _counted(self) -> Counts:
        n = len(self.names)
        ints = self._ints[:, :n]
        return Counts(
            int(np.count_nonzero(ints[UNAVAILABLE])),
            int(np.count_nonzero(ints[SUSPECT])),
            int(np.count_nonzero(ints[STATE] == LEFT)),
            int(np.count_nonzero(ints[FOREIGN_UNKNOWN])),
            int(ints[CAPACITY_TOKENS].min()) if n else UNLIMITED,
        )

    def elsewhere(self, rows: list[int]) -> tuple[int, int]:
        """Leases, and queued prompt tokens, that other processes of the gateway have on some rows."""
        return 0, 0

    def newest_lease(self) -> int:
        """The number of the newest lease, of whichever process of the gateway."""
        return int(self._ints[LAST_CHOSEN, : len(self.names)].max(initial=0))

    def rows(self) -> Rows:
        """All rows as they stand. A foreign load that is not known counts as the mean of the known ones."""
        n = len(self.names)
        ints, floats = self._ints[:, :n].copy(), self._floats[:, :n].copy()
        if self._counts is None:
            self._counts = self._counted()
        if self._models is None:
            self._models = _flags(self._row_models)
        if 0 < self._counts.n_foreign_unknown < n:
            unknown = ints[FOREIGN_UNKNOWN] != 0
            # An old report that says "idle" would draw everything to a worker nobody hears of.
            for figures in (ints[FOREIGN_REQUESTS], floats[FOREIGN_S]):
                if figures.any():
                    figures[unknown] = figures[~unknown].mean()
            np.add(floats[QUEUED_S], floats[FOREIGN_S], out=floats[LOAD_S])
            np.add(ints[WIDTH], ints[FOREIGN_REQUESTS], out=ints[BATCH])
        return Rows(
            self.names,
            self._counts,
            self._models,
            ints,
            floats,
            ints[LAST_CHOSEN],
            ints[BATCH],
            floats[LOAD_S],
        )


def rows_of(views: Iterable[RowView]) -> Rows:
    """The inverse of `Rows.view`, for decisions that are made again from what was written down."""
    table = LoadTable()
    for view in views:
        row = table.add_row(view.address, view.rank)
        table.set(row, **{name: getattr(view, name) for name in INT_FIELDS})
        table.set_s(row, **{name: getattr(view, name) for name in FLOAT_FIELDS})
        table.set_state(row, view.state, suspect=view.suspect)
        table.set_models(row, view.models)
    return table.rows()


def _flags(row_models: list[frozenset[str]]) -> Mapping[frozenset[str], Flags]:
    return {
        models: np.array([each == models for each in row_models], dtype=np.bool_)
        for models in set(row_models)
    }
