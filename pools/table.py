"""A pool's live figures: one row for each worker and attention-DP rank, one array for each figure.

A decision looks at every row of a pool, and with hundreds of workers an object each would cost more than
all the rest of it; a snapshot is two copies of small arrays.
"""

from collections.abc import Iterable, Mapping
from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt

from slagate.pools.shared_counts import N_COUNTS, NOBODY, Others, RankCell, SharedCounts

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

UNLIMITED = 1 << 62


class State(Enum):
    """Whether a worker may take work; only `READY` may.

    `JOINING` until it was looked at once. `DRAINING` ends what it has, as the configuration has no place
    for it any more; then it has `LEFT`.
    """

    JOINING = "joining"
    CONNECTING = "connecting"
    READY = "ready"
    NOT_READY = "not_ready"
    REFUSED = "refused"
    DRAINING = "draining"
    LEFT = "left"


STATES = tuple(State)
READY, LEFT = STATES.index(State.READY), STATES.index(State.LEFT)


class RowView(msgspec.Struct, frozen=True, gc=False):
    """One worker and rank as the policy sees it, with what it has cached of one prompt."""

    address: str
    rank: int | None  # None: the worker itself chooses between its ranks, or has but one
    state: State
    suspect: bool  # ready, but its last probe or leg failed
    inflight: int  # leases on the rank
    worker_inflight: int  # leases on all ranks of the worker
    max_inflight: int  # of the worker
    queued_tokens: int  # prompt tokens leased and not prefilled yet, less what was cached
    max_queued_tokens: int
    queued_s: float  # the same as seconds of work, before the estimator's corrections
    context_tokens: int  # tokens whose KV its requests read at each decode step
    capacity_tokens: int  # tokens its KV cache holds
    foreign_requests: int  # running there that this gateway did not send
    foreign_s: float  # work of prompts waiting there that it did not send, likewise
    last_chosen: int  # number of the pool's last lease on it; 0: none yet
    models: frozenset[str]
    device_tokens: int = 0  # leading prompt tokens cached on the device
    host_tokens: int = 0  # tokens behind those that are cached, but not all on the device

    @property
    def cached_tokens(self) -> int:
        """Leading prompt tokens that need no compute."""
        return self.device_tokens + self.host_tokens


_COUNTS = tuple(cell.name.lower() for cell in RankCell)[:N_COUNTS]
_INTS = _COUNTS + tuple(
    field.name
    for field in msgspec.structs.fields(RowView)
    if field.type is int and field.name not in ("device_tokens", "host_tokens", *_COUNTS)
)
_FLOATS = tuple(field.name for field in msgspec.structs.fields(RowView) if field.type is float)
_AT = {name: at for names in (_INTS, _FLOATS) for at, name in enumerate(names)}
_STATE, _SUSPECT, _UNTOLD = range(len(_INTS), len(_INTS) + 3)
_N_INTS = len(_INTS) + 3
_FOREIGN = _AT["foreign_requests"], _AT["foreign_s"]
_CELLS = {cell.name.lower(): int(cell) for cell in RankCell}
_QUEUED_S, _LAST_CHOSEN = _AT["queued_s"], _AT["last_chosen"]


class Rows(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A frozen copy of a table: what one decision is made from."""

    names: tuple[tuple[str, int | None], ...]
    _models: Mapping[frozenset[str], Flags]
    _ints: Ints
    _floats: Floats

    def __len__(self) -> int:
        return len(self.names)

    def ints(self, name: str) -> Ints:
        """The figures of all rows; `name` is a field of `RowView`."""
        figures: Ints = self._ints[_AT[name]]
        return figures

    def floats(self, name: str) -> Floats:
        """As `ints`, for the fields that are seconds."""
        figures: Floats = self._floats[_AT[name]]
        return figures

    @property
    def states(self) -> Ints:
        """Each row's place in `STATES`."""
        states: Ints = self._ints[_STATE]
        return states

    @property
    def suspects(self) -> Ints:
        """1 for each row whose worker is suspect."""
        suspects: Ints = self._ints[_SUSPECT]
        return suspects

    def serving(self, model: str) -> Flags | None:
        """Rows whose worker serves the model; None when all do."""
        found = [flags for models, flags in self._models.items() if model in models]
        if len(found) == len(self._models):
            return None
        return np.any(found, axis=0) if found else np.zeros(len(self), dtype=np.bool_)

    def view(self, row: int, *, device_tokens: int = 0, host_tokens: int = 0) -> RowView:
        """One row, as plain values."""
        address, rank = self.names[row]
        values: dict[str, object] = {
            name: self._ints[at, row].item() for at, name in enumerate(_INTS)
        }
        values |= {name: self._floats[at, row].item() for at, name in enumerate(_FLOATS)}
        return RowView(
            address=address,
            rank=rank,
            state=STATES[self._ints[_STATE, row]],
            suspect=bool(self._ints[_SUSPECT, row]),
            models=next((m for m, flags in self._models.items() if flags[row]), frozenset()),
            device_tokens=device_tokens,
            host_tokens=host_tokens,
            **values,  # type: ignore[arg-type]
        )


class Table:
    """The rows of one pool. Members write to their own.

    A row keeps its number: leases and caches go by it. One that was given up is the next one's that is
    added; until then it stays among the others, as one that has left.

    With `shared`, `rows` has what every process of the gateway has on the workers; all else is only of this
    one. `name` is the same in all of them, and no other table's.
    """

    def __init__(self, name: str = "", *, shared: SharedCounts | None = None) -> None:
        self._name = name
        self._shared = shared
        self._slots: list[int] = []  # of its rows
        self._places: Ints | None = None  # of the same in the other processes
        self._names: list[tuple[str, int | None]] = []
        self._row_models: list[frozenset[str]] = []
        self._ints = np.zeros((_N_INTS, 4), dtype=np.int64)
        self._floats = np.zeros((len(_FLOATS), 4), dtype=np.float64)
        self._free: list[int] = []
        self._frozen_names: tuple[tuple[str, int | None], ...] = ()
        self._models: Mapping[frozenset[str], Flags] | None = None
        # Times that somebody said what is served, the same as before included.
        self.n_model_changes = 0

    def __len__(self) -> int:
        return len(self._names)

    def add(self, address: str, rank: int | None) -> int:
        """A row with all figures 0; its number."""
        row = self._free.pop() if self._free else self._appended()
        self._ints[:, row] = 0
        self._floats[:, row] = 0.0
        self._names[row] = (address, rank)
        self._frozen_names = tuple(self._names)
        if self._shared is not None:
            # The first row of a worker is for rank 0, or for whichever the worker takes.
            self._places = None
            slot = self._slots[row] = self._shared.claim(f"{self._name} {address} {rank or 0}")
            self._ints[_LAST_CHOSEN, row] = self._shared.get(slot, RankCell.LAST_CHOSEN)
        return row

    def give_up(self, row: int) -> None:
        """Its worker has left."""
        self._names[row] = ("", None)
        self._frozen_names = tuple(self._names)
        self.set_models(row, frozenset())
        self.set_state(row, State.LEFT, suspect=False)
        self.set_foreign(row, None)
        self._free.append(row)
        if self._shared is not None:
            self._shared.give_up(self._slots[row])
            self._slots[row] = NOBODY
            self._places = None

    def _appended(self) -> int:
        row = len(self._names)
        if row == self._ints.shape[1]:
            self._ints = np.pad(self._ints, ((0, 0), (0, row)))
            self._floats = np.pad(self._floats, ((0, 0), (0, row)))
        self._names.append(("", None))
        self._slots.append(NOBODY)
        self._row_models.append(frozenset())
        self._models = None
        return row

    def name(self, row: int) -> tuple[str, int | None]:
        """The address of a row's worker, and the rank."""
        return self._names[row]

    def rename(self, row: int, rank: int | None) -> None:
        """Another rank for a row: what it is turns out once the worker is reached."""
        self._names[row] = (self._names[row][0], rank)
        self._frozen_names = tuple(self._names)

    def set_state(self, row: int, state: State, *, suspect: bool) -> None:
        """Whether the row may take work."""
        self._ints[_STATE, row] = STATES.index(state)
        self._ints[_SUSPECT, row] = suspect

    def set_models(self, row: int, models: frozenset[str]) -> None:
        """What the row's worker serves."""
        self.n_model_changes += 1
        if self._row_models[row] != models:
            self._row_models[row] = models
            self._models = None

    def get(self, name: str, row: int) -> int:
        """One figure of a row."""
        return int(self._ints[_AT[name], row])

    def set(self, row: int, **figures: int) -> None:
        """Set figures of a row."""
        for name, value in figures.items():
            self._ints[_AT[name], row] = value
            if self._shared is not None and name in _CELLS:
                self._shared.set(self._slots[row], _CELLS[name], value)

    def add_to(self, row: int, **figures: int) -> None:
        """Add to figures of a row."""
        for name, value in figures.items():
            self._ints[_AT[name], row] += value
            if self._shared is not None and name in _CELLS:
                self._shared.set(self._slots[row], _CELLS[name], int(self._ints[_AT[name], row]))

    def get_s(self, name: str, row: int) -> float:
        """One figure of a row that is seconds."""
        return float(self._floats[_AT[name], row])

    def set_s(self, row: int, **seconds: float) -> None:
        """Set figures of a row that are seconds."""
        for name, value in seconds.items():
            self._floats[_AT[name], row] = value
            if self._shared is not None and name in _CELLS:
                self._shared.set_s(self._slots[row], _CELLS[name], value)

    def set_foreign(self, row: int, load: tuple[int, float] | None) -> None:
        """Requests and predicted seconds on a row that others sent; None: nobody can tell now."""
        self._ints[_UNTOLD, row] = load is None
        requests, seconds = (0, 0.0) if load is None else load
        self._ints[_FOREIGN[0], row], self._floats[_FOREIGN[1], row] = requests, seconds

    def elsewhere(self, rows: list[int]) -> tuple[int, int]:
        """Leases, and prompt tokens that wait, that other processes of the gateway have on some rows."""
        if self._shared is None:
            return 0, 0
        counts = self._others(self._shared).counts[:, rows].sum(axis=1)
        return int(counts[RankCell.INFLIGHT]), int(counts[RankCell.QUEUED_TOKENS])

    @property
    def last_turn(self) -> int:
        """The highest `last_chosen`, of whichever process of the gateway."""
        last = self._ints[_LAST_CHOSEN, : len(self._names)]
        if self._shared is not None:
            last = np.maximum(last, self._others(self._shared).last_chosen)
        return int(last.max(initial=0))

    def _others(self, shared: SharedCounts) -> Others:
        if self._places is None:
            self._places = shared.places(np.array(self._slots, dtype=np.int64))
        return shared.others(self._places)

    def rows(self) -> Rows:
        """All rows as they stand; where nobody can tell what others sent, it is what the rest have."""
        n = len(self._names)
        if self._models is None:
            self._models = _flags(self._row_models)
        ints, floats = self._ints[:, :n].copy(), self._floats[:, :n].copy()
        if self._shared is not None:
            others = self._others(self._shared)
            ints[:N_COUNTS] += others.counts
            floats[_QUEUED_S] += others.queued_s
            last = ints[_LAST_CHOSEN]
            np.maximum(last, others.last_chosen, out=last)
        untold = ints[_UNTOLD] != 0
        if 0 < np.count_nonzero(untold) < n:
            # An old report that says "idle" would draw everything to a worker nobody hears of.
            for figures in (ints[_FOREIGN[0]], floats[_FOREIGN[1]]):
                if figures.any():
                    figures[untold] = figures[~untold].mean()
        return Rows(self._frozen_names, self._models, ints, floats)


def rows_of(views: Iterable[RowView]) -> Rows:
    """The inverse of `Rows.view`, for decisions that are made again from what was written down."""
    table = Table()
    for view in views:
        row = table.add(view.address, view.rank)
        table.set(row, **{name: getattr(view, name) for name in _INTS})
        table.set_s(row, **{name: getattr(view, name) for name in _FLOATS})
        table.set_state(row, view.state, suspect=view.suspect)
        table.set_models(row, view.models)
    return table.rows()


def _flags(row_models: list[frozenset[str]]) -> Mapping[frozenset[str], Flags]:
    return {
        models: np.array([each == models for each in row_models], dtype=np.bool_)
        for models in set(row_models)
    }
