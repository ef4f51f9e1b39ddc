"""Scores the rows of one pool for one request, with numpy, since a pool may have hundreds.

A row is a worker and attention-DP rank. Its score is predicted seconds. Where targets do not decide (see
`targets`) the lowest wins:

    prefill   prefill seconds queued and not done + this prompt's, at the row's pace: what is cached costs
              nothing to compute, and what is cached on the host costs its way back to the device
    decode    ITL at the batch size with this request in it, times that batch size: the seconds of decode
              that one step of the worker then serves. Peak-EWMA balancers weigh latency by pending
              requests in the same way. ITL alone would not do: it is flat, and in real measurements not
              even monotone, at small batches. A cached prefix is of no use to decode: its KV is pulled.
    agg       the sum of the two, and where others are answered the decode steps that the prompt waits for

Among equals the row that was chosen longest ago wins, then chance. Short prompts are done before the next
one comes, so idle workers are equal often, and chance alone would spread a hundred requests over two
workers worse than 60 to 40 every few bursts. A row whose worker is suspect (ready, but its last probe or
leg failed) is chosen only if no other can be.

Predicted seconds see one request only: while its queue is short, the one worker that holds a popular prefix
would always win, and the others never get a copy of it. So a starved row goes first: one that had none of
its pool's last `STARVED_ROUNDS` x rows leases, is idle, and is not predicted to miss the request's TTFT.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.fleet_file.models import AdmissionMode
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.pair_key import PairKey
from slagate.pools.inflight.row_view import LEFT, READY, STATES, RowView, State
from slagate.pools.inflight.rows import QUEUE_FULL, Flags, Floats, Ints, Rows
from slagate.router.request.sla import Sla
from slagate.router.scheduling.pairs import (
    ALONE,
    CANNOT_TAKE_OVER,
    NO_TAKER,
    NOT_WHOLE,
    TAKERS_AT_LIMIT,
    Alone,
    Pairing,
)

STARVED_ROUNDS = 10

AT_LIMIT = "at its limit"
QUEUE_AT_LIMIT = "at its limit of queued prompt tokens"
KV_AT_LIMIT = "at its limit of KV cache"
YIELDS = "busy with what comes before a relegated request"
LIMITS = frozenset(
    {AT_LIMIT, QUEUE_AT_LIMIT, KV_AT_LIMIT, TAKERS_AT_LIMIT, YIELDS, State.JOINING.value}
)
"""Reasons that pass by themselves, so that it is worth waiting. A joining worker is known in a moment."""

_FEW = 12
"""So many points are interpolated faster one by one than by numpy."""

STEPS_AHEAD = 1.5
"""Decode steps that a prompt waits for where others are answered: half of the running one on average, and
the part of its own step that decodes."""

KV_TOO_SMALL = "its KV cache is too small for the prompt"
_FAILED = "failed this request"
OTHER_MODEL = "does not serve the model"
_REASONS = (
    "",
    *(s.value for s in STATES),
    _FAILED,
    OTHER_MODEL,
    KV_TOO_SMALL,
    AT_LIMIT,
    QUEUE_AT_LIMIT,
    KV_AT_LIMIT,
    NO_TAKER,
    TAKERS_AT_LIMIT,
    CANNOT_TAKE_OVER,
    NOT_WHOLE,
)
_CODES = {reason: code for code, reason in enumerate(_REASONS)}
_LEFT = _CODES[State.LEFT.value]
_IS_LIMIT = np.array([reason in LIMITS for reason in _REASONS])


class RoutingRequest(msgspec.Struct, frozen=True, gc=False):
    """A request as the policy sees it."""

    model: str
    isl_tokens: int
    sla: Sla
    excluded: frozenset[str] = frozenset()  # addresses of workers that failed this request already
    partner: PairKey | None = None  # a retry of one stage: the worker of the other one, which stays
    elapsed_s: float = 0.0  # since it arrived
    later_s: float = 0.0  # to the first token in stages that stay, behind those that are chosen
    by_targets: bool = True  # whether its targets decide between pools and between workers
    max_tokens: int | None = None  # of the answer, as the client says
    # That its answer will have at least, as most of its class do; 1: its client asks for no more.
    answer_tokens: float = 0.0
    # By which its context grows until its answer's middle. Batches have more of long answers than of short
    # ones, so of a batch this is about what `answer_tokens` says.
    growth_tokens: int = 0
    is_protected: bool = False  # room is kept for its class
    yields: bool = False  # rather than be late it waits until a worker has nothing else to do
    # In force; `learn`: it is on, but a pool of which too little is known learns from the request.
    admission_mode: AdmissionMode | Literal["learn"] = "off"


class ScoredRow(msgspec.Struct, frozen=True, gc=False):
    """One row with its score and predictions."""

    row: int  # its index in the pool's arrays
    number: int  # its place among the rows whose worker has not left
    view: RowView
    pool: str
    score_s: float
    predicted_ttft_s: float | None
    predicted_itl_s: float | None
    excluded: str  # why it may not be chosen; empty: it may


class ScoredPool(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The rows of one pool with predictions for one request, as arrays."""

    pool: PoolSnapshot
    stage: Stage
    ask: RoutingRequest
    work_s: Floats | None  # f64[n_rows], work of the prompt, before any correction; None for decode
    # f64[n_rows], predicted from the leg's start to its first response; None for decode, where only that
    # of the chosen row is needed: see `first_response_s`.
    ttft_s: Floats | None
    itl_s: Floats | None  # f64[n_rows], predicted; None for prefill
    pairing: Pairing | Alone | None = None  # None: any row goes with what the other stage has
    later_s: float = 0.0  # predicted from that response to the first token

    def __len__(self) -> int:
        return len(self.pool.rows) - self.pool.rows.counts.n_left

    @property
    def score_s(self) -> Floats:
        """The scores of the rows, f64[n_rows]; the lowest is the best."""
        if self.itl_s is None:
            assert self.ttft_s is not None
            return self.ttft_s
        decode_s: Floats = self.itl_s * self.pool.rows.batch
        return decode_s if self.ttft_s is None else self.ttft_s + decode_s

    def first_response_s(self, row: int) -> float:
        """Predicted seconds from the leg's start to its first response on a row."""
        if self.ttft_s is not None:
            return self.ttft_s.item(row)
        assert self.itl_s is not None
        estimator = self.pool.estimator
        return estimator.ttft_s(self.itl_s.item(row) + estimator.transfer_s(self.ask.isl_tokens))

    @property
    def is_open(self) -> Flags:
        """Whether each row may be chosen, bool[n_rows]."""
        flags: Flags = self._reasons == 0
        return flags

    @property
    def n_open(self) -> int:
        """The number of rows that may be chosen."""
        return int(np.count_nonzero(self.is_open))

    @property
    def reasons(self) -> set[str]:
        """Every reason for which some row may not be chosen."""
        return {_REASONS[code] for code in np.unique(self._reasons) if code not in (0, _LEFT)}

    @property
    def _reasons(self) -> npt.NDArray[np.int8]:
        return _reasons(self.stage, self.ask, self.pool, self.pairing)

    def candidates(self, rows: Iterable[int]) -> Iterator[ScoredRow]:
        """The rows with these indices as plain values, with the reasons why they may not be chosen."""
        reasons = self._reasons
        for row in rows:
            yield self.row_values(row, _REASONS[reasons[row]])

    def row_values(self, row: int, excluded: str = "") -> ScoredRow:
        """The row with this index as plain values; the caller says why it may not be chosen."""
        pool, estimator, itl_s = self.pool, self.pool.estimator, self.itl_s
        has_ttft = self.ttft_s is not None and estimator.predicts_prefill
        number = row
        if pool.rows.counts.n_left:
            number -= int(np.count_nonzero(self._has_left[:row]))
        return ScoredRow(
            row,
            number,
            pool.view(row),
            pool.name,
            self.score_s.item(row),
            self.first_response_s(row) + self.later_s if has_ttft else None,
            None if itl_s is None or not estimator.predicts_itl else itl_s.item(row),
            excluded,
        )

    def work(self, row: int) -> Work:
        """The tokens and seconds of work that the request would add to a row."""
        isl_tokens = self.ask.isl_tokens
        if self.work_s is None:
            return Work(context_tokens=isl_tokens + self.ask.growth_tokens)
        new_tokens = isl_tokens - self.pool.cached.cached_tokens.item(row)
        context_tokens = 0 if self.stage is Stage.PREFILL else isl_tokens + self.ask.growth_tokens
        return Work(new_tokens, self.work_s.item(row), context_tokens)

    def rate(self, row: int) -> float:
        """Seconds of the clock that a row takes for one of prefill work."""
        pool = self.pool
        return pool.estimator.coefficients.prefill_scale * pool.rows.pace.item(row)

    def waiting_s(self, row: int) -> float:
        """Seconds until a row could compute the prompt: its queue, decode steps, blocks from the host."""
        pool = self.pool
        waiting_s = pool.rows.load_s.item(row)
        if self.itl_s is not None and pool.rows.batch.item(row) > 1:
            waiting_s += STEPS_AHEAD * pool.estimator.work_of(self.itl_s.item(row))
        if pool.cached.has_host:
            waiting_s += pool.estimator.host_s(pool.cached.host_tokens.item(row))
        return waiting_s

    def decoding(self, row: int) -> tuple[int, float]:
        """The batch size on a row with this request in it, and that batch's mean context in tokens."""
        rows = self.pool.rows
        tokens = self.ask.isl_tokens + self.ask.growth_tokens
        return rows.batch.item(row), rows.mean_tokens(tokens).item(row)

    def pick(self, draw: float) -> tuple[int | None, bool]:
        """The index of the row to take, and whether it goes first as a starved one.

        The index is None if no row may be chosen. `draw` in [0, 1) chooses between equals.
        """
        open_ = self.open_rows()
        n_open = len(self.pool.rows) if open_ is None else len(open_)
        if not n_open:
            return None, False
        scores, last, has_starved = self.score_s, self.pool.rows.last_chosen, False
        starved_at = self.pool.n_leases - STARVED_ROUNDS * n_open
        may_starve = self.stage is not Stage.DECODE and n_open > 1 and starved_at >= 0
        if may_starve and last.item(last.argmin()) <= starved_at:
            starved = self._starved(open_, starved_at)
            if len(starved):
                has_starved, open_ = True, starved
        if open_ is not None:
            scores = scores[open_]
        best = (scores == scores.item(scores.argmin())).nonzero()[0]
        if open_ is not None:
            best = open_[best]
        if len(best) > 1:
            last = last[best]
            best = best[last == last.item(last.argmin())]
        return best.item(int(draw * len(best))), has_starved

    def open_rows(self) -> Ints | None:
        """Rows that may be chosen, without suspect ones if there are others; None: all may."""
        rows, pairing = self.pool.rows, self.pairing
        has_suspects = rows.counts.n_suspect > 0
        # A worker that decodes needs room in its KV cache, also where it computes the prompt too.
        stage = Stage.DECODE if pairing is ALONE else self.stage
        if not _all_open(stage, self.ask, self.pool):
            open_: Ints = (self._reasons == 0).nonzero()[0]  # i64[n_open]
        elif pairing is not None:
            open_ = pairing.fits(self.stage, rows).nonzero()[0]
        elif has_suspects:
            open_ = np.arange(len(rows))
        else:
            return None
        if has_suspects:
            healthy = open_[rows.suspects[open_] == 0]
            open_ = healthy if len(healthy) else open_
        return open_

    def _starved(self, open_: Ints | None, starved_at: int) -> Ints:
        of, ttft_ms = self.pool.rows, self.ask.sla.ttft_ms
        starved = (of.last_chosen <= starved_at) & (of.batch == 1)
        if ttft_ms is not None and self.ttft_s is not None:
            # A copy of the prefix there is for requests to come, not at the price of this one's target.
            starved &= (self.ttft_s + self.later_s + self.ask.elapsed_s) * 1000 <= ttft_ms
        rows: Ints = starved.nonzero()[0] if open_ is None else open_[starved[open_]]
        return rows

    def order(self) -> Ints:
        """Indices of rows, best first: those that may be chosen, then by health, score, last lease."""
        rows = self.pool.rows
        order = np.lexsort((rows.last_chosen, self.score_s, rows.suspects, self._reasons != 0))
        return order[~self._has_left[order]]

    @property
    def _has_left(self) -> Flags:
        has_left: Flags = self.pool.rows.states == LEFT
        return has_left


def score_pool(
    stage: Stage,
    ask: RoutingRequest,
    pool: PoolSnapshot,
    pairing: Pairing | Alone | None = None,
    later_s: float = 0.0,
) -> ScoredPool:
    """Score every row of a pool for one stage of a request, in predicted seconds."""
    rows, estimator = pool.rows, pool.estimator
    work_s = ttft_s = itl_s = None
    if stage is not Stage.PREFILL:
        tokens = rows.mean_tokens(ask.isl_tokens + ask.growth_tokens)
        itl_s = estimator.itl_of_batches(rows.batch, tokens)
        itl_s *= rows.pace
    if stage is not Stage.DECODE:
        work_s = _work_s(ask, pool)
        ttft_s = rows.load_s
        ttft_s += work_s * rows.pace
        if itl_s is not None:
            ttft_s += STEPS_AHEAD * estimator.work_of(itl_s) * (rows.batch > 1)
        ttft_s = estimator.ttft_many(ttft_s)
    return ScoredPool(pool, stage, ask, work_s, ttft_s, itl_s, pairing, later_s)


def open_and_awaited(
    stage: Stage, ask: RoutingRequest, pool: PoolSnapshot
) -> tuple[Rows, Flags, Flags]:
    """A pool's rows, those that may be chosen, and those worth waiting for, bool[n_rows] each."""
    if _all_open(stage, ask, pool):
        n_rows = len(pool.rows)
        return pool.rows, np.ones(n_rows, dtype=np.bool_), np.zeros(n_rows, dtype=np.bool_)
    reasons = _reasons(stage, ask, pool)
    return pool.rows, reasons == 0, _IS_LIMIT[reasons]


def _all_open(stage: Stage, ask: RoutingRequest, pool: PoolSnapshot) -> bool:
    """Whether counts of the pool are enough to tell that `_reasons` has none, pairings aside."""
    rows = pool.rows
    least_tokens = rows.counts.least_capacity_tokens
    if (
        ask.excluded
        or rows.counts.n_unavailable
        or least_tokens < ask.isl_tokens
        or rows.serving(ask.model) is not None
    ):
        return False
    if stage is not Stage.DECODE:
        return True
    # No: some row's KV cache may have no room for the prompt and its answer.
    tokens = rows.ints("context_tokens")
    most_tokens = tokens.item(tokens.argmax()) if len(tokens) else 0
    return most_tokens + ask.isl_tokens + ask.growth_tokens <= least_tokens


def _work_s(ask: RoutingRequest, pool: PoolSnapshot) -> Floats:
    """Seconds of `FrozenEstimator.work_s` that the prompt costs each row."""
    estimator, cached, isl_tokens = pool.estimator, pool.cached, ask.isl_tokens
    depths = cached.depths
    if len(depths) <= _FEW:
        each_s: Floats = np.array([estimator.work_s(isl_tokens - d, d) for d in depths])
    else:
        points = np.array(depths, np.float64)
        each_s = estimator.work_many(isl_tokens - points, points)
    work_s: Floats = each_s.take(cached.places)  # f64[n_rows]
    if cached.has_host:
        work_s += cached.host_tokens * estimator.host_s(1)
    return work_s


def _reasons(
    stage: Stage,
    ask: RoutingRequest,
    pool: PoolSnapshot,
    pairing: Pairing | Alone | None = None,
) -> npt.NDArray[np.int8]:
    """Why each row may not be chosen, as a place in `_REASONS`; the reason written last counts."""
    rows = pool.rows
    reasons = np.zeros(len(rows), dtype=np.int8)  # i8[n_rows], 0: it may be chosen
    if stage is Stage.DECODE or pairing is ALONE:
        # Not for agg: there prompts share cached blocks, and the engine itself lets a request wait.
        needed = rows.ints("context_tokens") + (ask.isl_tokens + ask.growth_tokens)
        full = (needed > rows.ints("capacity_tokens")) & (rows.ints("inflight") > 0)
        reasons[full] = _CODES[KV_AT_LIMIT]
    else:
        queue_full = rows.unavailable & QUEUE_FULL != 0
        reasons[queue_full] = _CODES[QUEUE_AT_LIMIT]
    reasons[rows.ints("worker_inflight") >= rows.ints("max_inflight")] = _CODES[AT_LIMIT]
    # Waiting would be of no use: the prompt never fits.
    reasons[rows.ints("capacity_tokens") < ask.isl_tokens] = _CODES[KV_TOO_SMALL]
    if pairing is not None:
        for reason, flags in pairing.excluded(stage, rows):
            reasons[flags] = _CODES[reason]
    serving = rows.serving(ask.model)
    if serving is not None:
        reasons[~serving] = _CODES[OTHER_MODEL]
    if ask.excluded:
        failed = [row for row, (address, _) in enumerate(rows.names) if address in ask.excluded]
        reasons[failed] = _CODES[_FAILED]
    down = rows.states != READY
    reasons[down] = rows.states[down] + 1
    return reasons
