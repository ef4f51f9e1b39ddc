"""One pool, scored for one request: numpy over its rows, since a pool may have hundreds.

A row is a worker and attention-DP rank. Its score is predicted seconds, lower wins:

    prefill   queued prefill seconds + this prompt's: what is cached costs nothing to compute, and what is
              cached on the host costs its way back to the device
    decode    ITL at the batch size with this request in it, times that batch size: the seconds of decode
              that one step of the worker then serves. Peak-EWMA balancers weigh latency by pending
              requests in the same way. ITL alone would not do: it is flat, and in real measurements not
              even monotone, at small batches. A cached prefix is of no use to decode: its KV is pulled.
    agg       the sum of the two

Among equals the one that was chosen longest ago wins, then chance. Short prompts are done before the next
one comes, so idle workers tie often, and chance alone spreads a hundred of them worse than 60 to 40 every
few bursts. A row whose worker is suspect is chosen only where no other can be.

Predicted seconds see one request only: while its queue is short, the one worker that holds a popular prefix
wins for ever, and the others never get a copy of it. So a row that had none of its pool's last
`STARVED_ROUNDS` x rows leases, is idle, and is not predicted to miss the request's TTFT target, goes first.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from slagate.pools.member import Stage
from slagate.pools.pool import PoolView
from slagate.pools.ranks import Work
from slagate.pools.table import LEFT, READY, STATES, Flags, Floats, Ints, RowView, State
from slagate.router.sla import Sla

STARVED_ROUNDS = 10

AT_LIMIT = "at its limit"
QUEUE_AT_LIMIT = "at its limit of queued prompt tokens"
KV_AT_LIMIT = "at its limit of KV cache"
LIMITS = frozenset({AT_LIMIT, QUEUE_AT_LIMIT, KV_AT_LIMIT, State.JOINING.value})
"""Reasons that pass by themselves, so that it is worth waiting; who joins is ready, or not, in a moment."""

_FEW = 12
"""Points that are interpolated faster one by one."""

_KV_TOO_SMALL = "its KV cache is too small for the prompt"
_FAILED = "failed this request"
_OTHER_MODEL = "does not serve the model"
_REASONS = (
    "",
    *(s.value for s in STATES),
    _FAILED,
    _OTHER_MODEL,
    _KV_TOO_SMALL,
    AT_LIMIT,
    QUEUE_AT_LIMIT,
    KV_AT_LIMIT,
)
_CODES = {reason: code for code, reason in enumerate(_REASONS)}
_LEFT = _CODES[State.LEFT.value]


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What the policy knows of a request."""

    model: str
    isl_tokens: int
    sla: Sla
    excluded: frozenset[str] = frozenset()  # workers that failed this request already


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One row, scored."""

    row: int
    number: int  # of the row among those whose worker has not left
    view: RowView
    pool: str
    score_s: float
    predicted_ttft_s: float | None
    predicted_itl_s: float | None
    excluded: str  # why it may not be chosen; empty: it may


class Scored(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The rows of one pool with their scores, as arrays; those that are shown become a `Candidate`."""

    pool: PoolView
    score_s: Floats
    _ttft_s: Floats | None
    _itl_s: Floats | None
    _reasons: npt.NDArray[np.int8]  # places in `_REASONS`

    def __len__(self) -> int:
        return len(self.score_s) - int(np.count_nonzero(self._has_left))

    @property
    def n_open(self) -> int:
        """Rows that may be chosen."""
        return int(np.count_nonzero(self._reasons == 0))

    @property
    def reasons(self) -> set[str]:
        """Why rows may not be chosen."""
        return {_REASONS[code] for code in np.unique(self._reasons) if code not in (0, _LEFT)}

    def candidate(self, row: int) -> Candidate:
        """One row."""
        pool, estimator = self.pool, self.pool.estimator
        return Candidate(
            row=row,
            number=row - int(np.count_nonzero(self._has_left[:row])),
            view=pool.view(row),
            pool=pool.name,
            score_s=float(self.score_s[row]),
            predicted_ttft_s=_at(self._ttft_s, row) if estimator.predicts_prefill else None,
            predicted_itl_s=_at(self._itl_s, row) if estimator.predicts_itl else None,
            excluded=_REASONS[self._reasons[row]],
        )

    def work(self, stage: Stage, ask: Ask, row: int) -> Work:
        """What the request puts on a row."""
        context_tokens = 0 if stage is Stage.PREFILL else ask.isl_tokens
        if stage is Stage.DECODE:
            return Work(context_tokens=context_tokens)
        estimator, cached = self.pool.estimator, int(self.pool.cached_tokens[row])
        new_tokens = ask.isl_tokens - cached
        work_s = estimator.work_s(new_tokens, cached)
        work_s += estimator.host_s(int(self.pool.host_tokens[row]))
        return Work(new_tokens, work_s, context_tokens)

    def pick(self, stage: Stage, ask: Ask, draw: float) -> tuple[int | None, bool]:
        """The row to take, and whether only because it was starved; None: there is no open one."""
        open_ = self._open()
        if not len(open_):
            return None, False
        last = self.pool.rows.ints("last_chosen")
        scores, has_starved = self.score_s, False
        starved_at = self.pool.n_leases - STARVED_ROUNDS * len(open_)
        may_starve = stage is not Stage.DECODE and len(open_) > 1 and starved_at >= 0
        if may_starve and last[last.argmin()] <= starved_at:
            starved = open_[self._is_starved(open_, starved_at, ask)]
            has_starved = bool(len(starved))
            open_ = starved if has_starved else open_
        if len(open_) < len(scores):
            scores = scores[open_]
        best = open_[scores == scores[scores.argmin()]]
        if len(best) > 1:
            last = last[best]
            best = best[last == last.min()]
        return int(best[int(draw * len(best))]), has_starved

    def _open(self) -> Ints:
        """Rows that may be chosen, without those of suspect workers where there are others."""
        reasons, suspects = self._reasons, self.pool.rows.suspects
        open_: Ints = (reasons == 0).nonzero()[0]
        if np.count_nonzero(suspects):
            healthy = open_[suspects[open_] == 0]
            open_ = healthy if len(healthy) else open_
        return open_

    def _is_starved(self, rows: Ints, starved_at: int, ask: Ask) -> Flags:
        of = self.pool.rows
        busy = of.ints("inflight")[rows] + of.ints("foreign_requests")[rows]
        starved: Flags = (of.ints("last_chosen")[rows] <= starved_at) & (busy == 0)
        if ask.sla.ttft_ms is not None and self._ttft_s is not None:
            # A turn is for the requests to come, and not at the price of this one's target.
            starved &= self._ttft_s[rows] * 1000 <= ask.sla.ttft_ms
        return starved

    def order(self) -> Ints:
        """Rows as they are preferred: the open ones first, none suspect, by score and last turn."""
        rows = self.pool.rows
        keys = (rows.ints("last_chosen"), self.score_s, rows.suspects, self._reasons != 0)
        order = np.lexsort(keys)
        return order[~self._has_left[order]]

    @property
    def _has_left(self) -> Flags:
        has_left: Flags = self.pool.rows.states == LEFT
        return has_left


def score_pool(stage: Stage, ask: Ask, pool: PoolView) -> Scored:
    """Score every row of a pool."""
    rows, estimator = pool.rows, pool.estimator
    score_s: Floats
    ttft_s = itl_s = None
    if stage is not Stage.DECODE:
        queued_s = rows.floats("queued_s") + rows.floats("foreign_s")
        score_s = ttft_s = estimator.ttft_s(queued_s + _work_s(ask, pool))
    if stage is not Stage.PREFILL:
        inflight = rows.ints("inflight")
        batch = (inflight + rows.ints("foreign_requests") + 1).astype(np.float64)
        # What the requests of others read is not known; theirs are taken to be like ours.
        mean_tokens = (rows.ints("context_tokens") + ask.isl_tokens) / (inflight + 1)
        itl_s = estimator.itl_many(batch, mean_tokens)
        decode_s = itl_s * batch
        score_s = decode_s if ttft_s is None else ttft_s + decode_s
    return Scored(pool, score_s, ttft_s, itl_s, _reasons(stage, ask, pool))


def _work_s(ask: Ask, pool: PoolView) -> Floats:
    """What the prompt costs each row, as `FrozenEstimator.work_s`."""
    estimator, cached = pool.estimator, pool.cached_tokens
    if not np.count_nonzero(cached):
        return np.full(len(cached), estimator.work_s(ask.isl_tokens, 0))
    # A prompt's rows share a few depths, and each costs an interpolation. `np.unique` takes twice as long.
    ordered = np.sort(cached)
    is_first = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    depths = ordered[is_first]
    at = depths.searchsorted(cached)
    work_s: Floats
    if len(depths) <= _FEW:
        each_s = [estimator.work_s(ask.isl_tokens - d, d) for d in depths.tolist()]
        work_s = np.array(each_s).take(at)
    else:
        new_tokens = (ask.isl_tokens - depths).astype(np.float64)
        work_s = estimator.work_many(new_tokens, depths.astype(np.float64))[at]
    if np.count_nonzero(pool.host_tokens):
        work_s = work_s + pool.host_tokens * estimator.host_s(1)
    return work_s


def _reasons(stage: Stage, ask: Ask, pool: PoolView) -> npt.NDArray[np.int8]:
    """Why each row may not be chosen, as a place in `_REASONS`; the ones written last count most."""
    rows = pool.rows
    reasons = np.zeros(len(rows), dtype=np.int8)
    at_limit = rows.ints("worker_inflight") >= rows.ints("max_inflight")
    down = rows.states != READY
    too_small = rows.ints("capacity_tokens") < ask.isl_tokens
    closed = at_limit | down | too_small
    full = queue_full = None
    if stage is Stage.DECODE:
        # Not for agg: there prompts share what is cached of them, and the engine itself lets them wait.
        needed = rows.ints("context_tokens") + ask.isl_tokens
        full = (needed > rows.ints("capacity_tokens")) & (rows.ints("inflight") > 0)
        closed |= full
    if stage is not Stage.DECODE:
        queue_full = rows.ints("queued_tokens") >= rows.ints("max_queued_tokens")
        closed |= queue_full
    serving = rows.serving(ask.model)
    if serving is None and not ask.excluded and not np.count_nonzero(closed):
        return reasons
    if full is not None:
        reasons[full] = _CODES[KV_AT_LIMIT]
    if queue_full is not None:
        reasons[queue_full] = _CODES[QUEUE_AT_LIMIT]
    reasons[at_limit] = _CODES[AT_LIMIT]
    # Whatever it waited for, it would never fit.
    reasons[too_small] = _CODES[_KV_TOO_SMALL]
    if serving is not None:
        reasons[~serving] = _CODES[_OTHER_MODEL]
    if ask.excluded:
        failed = [row for row, (address, _) in enumerate(rows.names) if address in ask.excluded]
        reasons[failed] = _CODES[_FAILED]
    reasons[down] = rows.states[down] + 1
    return reasons


def _at(seconds: Floats | None, row: int) -> float | None:
    return None if seconds is None else float(seconds[row])
