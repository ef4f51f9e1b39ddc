"""A pool's live figures: one row for each worker and attention-DP rank, one array for each figure.

A decision looks at every row of a pool, and with hundreds of workers an object each would cost more than
all the rest of it; a snapshot is two copies of small arrays.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from slagate.pools.inflight.shared_counts import N_COUNTS, RankCell

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


class Work(NamedTuple):
    """What one lease puts on a row."""

    prefill_tokens: int = 0  # prompt tokens to prefill, until `Lease.prefill_done`
    work_s: float = 0.0  # the same as seconds of work, see `FrozenEstimator.work_s`
    context_tokens: int = 0  # tokens whose KV the request reads at each decode step


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
INT_FIELDS = _COUNTS + tuple(
    field.name
    for field in msgspec.structs.fields(RowView)
    if field.type is int and field.name not in ("device_tokens", "host_tokens", *_COUNTS)
)
FLOAT_FIELDS = tuple(field.name for field in msgspec.structs.fields(RowView) if field.type is float)
FIGURE_INDEX = {name: at for names in (INT_FIELDS, FLOAT_FIELDS) for at, name in enumerate(names)}
(
    INFLIGHT,  # the first `N_COUNTS` in the order of `RankCell`
    WORKER_INFLIGHT,
    QUEUED_TOKENS,
    CONTEXT_TOKENS,
    MAX_INFLIGHT,
    MAX_QUEUED_TOKENS,
    CAPACITY_TOKENS,
    FOREIGN_REQUESTS,
    LAST_CHOSEN,
) = range(len(INT_FIELDS))
QUEUED_S, FOREIGN_S = range(len(FLOAT_FIELDS))
# Not shown to anybody. Those behind `UNTOLD` follow from the others, see `Table._derive`.
STATE, SUSPECT, FOREIGN_UNKNOWN, UNAVAILABLE, BATCH, WIDTH = range(
    len(INT_FIELDS), len(INT_FIELDS) + 6
)
N_INTS = len(INT_FIELDS) + 6
LOAD_S = len(FLOAT_FIELDS)
N_FLOATS = len(FLOAT_FIELDS) + 1

DOWN, QUEUE_FULL = 1, 2
"""Bits of `Rows.unavailable`: not ready or at its limit of requests; at its limit of queued tokens."""


class Counts(msgspec.Struct, frozen=True, gc=False, eq=False):
    """What is known of all rows of a table together."""

    n_unavailable: int  # rows with a bit of `Rows.unavailable`
    n_suspect: int
    n_left: int
    n_foreign_unknown: int  # of which nobody can tell what others sent there
    least_capacity_tokens: int


class Rows(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A frozen copy of a table: what one decision is made from."""

    names: tuple[tuple[str, int | None], ...]
    counts: Counts
    _models: Mapping[frozenset[str], Flags]
    _ints: Ints  # i64[N_INTS, n_rows]
    _floats: Floats  # f64[N_FLOATS, n_rows]
    # Rows of these arrays that every decision reads.
    last_chosen: Ints  # i64[n_rows], `RowView.last_chosen`
    batch: Ints  # i64[n_rows], requests in the batch with one more, those of others included
    load_s: Floats  # f64[n_rows], seconds of prefill work that wait, ours and of others

    def __len__(self) -> int:
        return len(self.names)

    def ints(self, name: str) -> Ints:
        """The figures of all rows; `name` is a field of `RowView`."""
        figures: Ints = self._ints[FIGURE_INDEX[name]]
        return figures

    def floats(self, name: str) -> Floats:
        """As `ints`, for the fields that are seconds."""
        figures: Floats = self._floats[FIGURE_INDEX[name]]
        return figures

    @property
    def states(self) -> Ints:
        """Each row's place in `STATES`."""
        states: Ints = self._ints[STATE]
        return states

    @property
    def suspects(self) -> Ints:
        """1 for each row whose worker is suspect."""
        suspects: Ints = self._ints[SUSPECT]
        return suspects

    @property
    def unavailable(self) -> Ints:
        """Whether a row may take nothing now, whatever is asked: `DOWN` and `QUEUE_FULL`."""
        unavailable: Ints = self._ints[UNAVAILABLE]
        return unavailable

    def mean_tokens(self, more_tokens: int) -> Floats:
        """Mean context of our requests at each row, with one of `more_tokens` more."""
        # What the requests of others read is not known; theirs are taken to be like ours.
        mean: Floats = (self._ints[CONTEXT_TOKENS] + more_tokens) / self._ints[WIDTH]
        return mean

    def mean_tokens_at(self, row: int, more_tokens: int) -> float:
        """As `mean_tokens`, of one row."""
        tokens: int = self._ints.item(CONTEXT_TOKENS, row) + more_tokens
        width: int = self._ints.item(WIDTH, row)
        return tokens / width

    def serving(self, model: str) -> Flags | None:
        """Rows whose worker serves the model; None when all do."""
        found = [flags for models, flags in self._models.items() if model in models]
        if len(found) == len(self._models):
            return None
        return np.any(found, axis=0) if found else np.zeros(len(self), dtype=np.bool_)

    def view(self, row: int, *, device_tokens: int = 0, host_tokens: int = 0) -> RowView:
        """One row, as plain values."""
        address, rank = self.names[row]
        ints, floats = self._ints[:, row].tolist(), self._floats[:, row].tolist()
        models = [models for models, flags in self._models.items() if flags[row]]
        return RowView(
            address,
            rank,
            STATES[ints[STATE]],
            ints[SUSPECT] != 0,
            ints[INFLIGHT],
            ints[WORKER_INFLIGHT],
            ints[MAX_INFLIGHT],
            ints[QUEUED_TOKENS],
            ints[MAX_QUEUED_TOKENS],
            floats[QUEUED_S],
            ints[CONTEXT_TOKENS],
            ints[CAPACITY_TOKENS],
            ints[FOREIGN_REQUESTS],
            floats[FOREIGN_S],
            ints[LAST_CHOSEN],
            models[0],
            device_tokens,
            host_tokens,
        )
