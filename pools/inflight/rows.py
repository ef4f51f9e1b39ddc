"""A pool's rows as one decision sees them: frozen copies of a table's arrays."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from slagate.pools.inflight.pair_key import RowPairs
from slagate.pools.inflight.row_view import FIGURE_INDEX, FLOAT_FIELDS, INT_FIELDS, STATES, RowView

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_CONTEXT_TOKENS, _QUEUED_S, _FOREIGN_S, _JOIN_SLACK_S = (
    FIGURE_INDEX[name] for name in ("context_tokens", "queued_s", "foreign_s", "join_slack_s")
)
# These are internal. Those behind `FOREIGN_UNKNOWN` are derived, see `LoadTable._derive`.
STATE, SUSPECT, FOREIGN_UNKNOWN, UNAVAILABLE, BATCH, WIDTH = range(
    len(INT_FIELDS), len(INT_FIELDS) + 6
)
N_INTS = len(INT_FIELDS) + 6

DOWN, QUEUE_FULL = 1, 2
"""Bits of `Rows.unavailable`: not ready, or at its limit of requests; at its limit of queued tokens."""


class Counts(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Counts over all rows of a table."""

    n_unavailable: int  # rows with a bit of `Rows.unavailable`
    n_suspect: int
    n_left: int
    n_foreign_unknown: int  # rows whose foreign load is not known
    least_capacity_tokens: int


class Rows(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A frozen copy of a table: what one decision is made from."""

    names: tuple[tuple[str, int | None], ...]  # address and rank by row
    counts: Counts
    pairs: RowPairs
    _models: Mapping[frozenset[str], Flags]
    _ints: Ints  # i64[N_INTS, n_rows]
    _floats: Floats  # f64[len(FLOAT_FIELDS), n_rows]
    # What every decision reads of these arrays.
    last_chosen: Ints  # i64[n_rows], `RowView.last_chosen`
    batch: Ints  # i64[n_rows], requests in the batch with one more, foreign ones included
    pace: Floats  # f64[n_rows], `RowView.pace`

    def __len__(self) -> int:
        return len(self.names)

    def ints(self, name: str) -> Ints:
        """One figure of all rows, i64[n_rows]; `name` is a field of `RowView`."""
        figures: Ints = self._ints[FIGURE_INDEX[name]]
        return figures

    def floats(self, name: str) -> Floats:
        """One figure of all rows, f64[n_rows]; `name` is a float field of `RowView`."""
        figures: Floats = self._floats[FIGURE_INDEX[name]]
        return figures

    @property
    def join_limits_s(self) -> Floats:
        """`join_slack_s` and `join_quiet_s` of all rows, f64[2, n_rows]."""
        limits_s: Floats = self._floats[_JOIN_SLACK_S : _JOIN_SLACK_S + 2]
        return limits_s

    @property
    def states(self) -> Ints:
        """The index in `STATES` of each row, i64[n_rows]."""
        states: Ints = self._ints[STATE]
        return states

    @property
    def suspects(self) -> Ints:
        """1 for each row whose worker is suspect, i64[n_rows]."""
        suspects: Ints = self._ints[SUSPECT]
        return suspects

    @property
    def unavailable(self) -> Ints:
        """Why a row may take no request at all now: bits `DOWN` and `QUEUE_FULL`, i64[n_rows]."""
        unavailable: Ints = self._ints[UNAVAILABLE]
        return unavailable

    @property
    def load_s(self) -> Floats:
        """Seconds of prefill work queued, at each row's pace, with foreign work, f64[n_rows]."""
        load_s: Floats = self._floats[_QUEUED_S] * self.pace
        load_s += self._floats[_FOREIGN_S]
        return load_s

    def mean_tokens(self, more_tokens: int) -> Floats:
        """Mean context of our requests at each row, if one of `more_tokens` joins, f64[n_rows]."""
        # The contexts of foreign requests are not known; they are taken to be like ours.
        mean: Floats = (self._ints[_CONTEXT_TOKENS] + more_tokens) / self._ints[WIDTH]
        return mean

    def serving(self, model: str) -> Flags | None:
        """Rows whose worker serves the model, bool[n_rows]; None when all do."""
        if len(self._models) == 1 and model in next(iter(self._models)):
            return None
        found = [flags for models, flags in self._models.items() if model in models]
        if len(found) == len(self._models):
            return None
        return np.any(found, axis=0) if found else np.zeros(len(self), dtype=np.bool_)

    def view(self, row: int, *, device_tokens: int = 0, host_tokens: int = 0) -> RowView:
        """One row, as plain values."""
        address, rank = self.names[row]
        ints, floats = self._ints[:, row].tolist(), self._floats[:, row].tolist()
        figures: dict[str, Any] = dict(zip(INT_FIELDS, ints, strict=False))
        figures.update(zip(FLOAT_FIELDS, floats, strict=False))
        return RowView(
            address=address,
            rank=rank,
            state=STATES[ints[STATE]],
            suspect=ints[SUSPECT] != 0,
            models=next(models for models, flags in self._models.items() if flags[row]),
            pair=self.pairs.keys[self.pairs.ids.item(row)],
            device_tokens=device_tokens,
            host_tokens=host_tokens,
            **figures,
        )
