"""Whether a request is predicted to meet its targets on the rows of a pool, and which of them it gets.

    TTFT    since arrival + queue + own prompt + the next stage's first token   <= TTFT_SHARE x target
    ITL     a step with the request in the batch        <= ITL_SHARE (AGG_ITL_SHARE) x target

A row where it would break what was promised to others is none that it fits: their decode steps may not take
longer than their ITL targets allow, nor their answers wait longer for its prompt, nor may it join a step in
which a prompt would then be late. Nor is one that has to stay free for protected classes, see `KeptRoom`,
unless the request is of one.

Of the rows that fit, those where it costs no more than `SAME_WORK` times the least work are as good, and of
them the fullest is taken, so that room for large and urgent requests is left on the others. Where nothing
fits, the least late row is. A relegated request then takes a row with nothing else to do, or none.

Predictions of a pool that are off are calibrated, see `accuracy`: a row then fits only with time to spare.
Where none does the request goes to the least late one, and counts as late only if it is likely to be.
"""

import math
from collections.abc import Iterable

import msgspec
import numpy as np

from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.demand import KeptRoom, RoomKeeper
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.rows import Flags, Floats, Ints
from slagate.router.scheduling.score import ScoredPool

TTFT_SHARE, ITL_SHARE, AGG_ITL_SHARE = 0.95, 0.80, 0.85
"""Parts of the targets that predictions may fill, as they are not exact. Where prompts are computed beside
answers, what these wait for prompts is promised apart from their steps."""

SAME_WORK = 1.1

_LEAST_S = 1e-4
"""What is left of a target counts as no less: the late are compared by how late they are."""


class Judged(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The rows of one pool, judged for a request that has a target."""

    scored: ScoredPool
    late: Floats  # f64[n_rows], above 1 where it does not fit: how much of a target it takes
    hopes: Floats  # f64[n_rows], above 1 where it is likely to miss; `late`, unless calibrated
    open_rows: Ints | None  # indices of those that may be chosen; None: all may
    delays: Flags | None  # bool[n_rows], where it delays others much; None: nowhere
    harms: Flags | None  # bool[n_rows], where it breaks a promise or takes kept room; None: nowhere

    @property
    def is_open(self) -> bool:
        """Whether any row may be chosen."""
        return len(self.late if self.open_rows is None else self.open_rows) > 0

    @property
    def is_likely(self) -> bool:
        """Whether it is not likely to miss on some row that may be chosen."""
        return len(self._open(self.hopes <= 1.0)) > 0

    def fullest(self, draw: float) -> int | None:
        """The index of the row to take among those that fit; `draw` in [0, 1) chooses between equals."""
        fits, work_s = self.late <= 1.0, self.scored.work_s
        rows = self._open(fits if self.delays is None else fits > self.delays)
        if not len(rows):
            rows = self._open(fits)
            if not len(rows):
                return None
        # `take` is faster than a mask, `item(argmin())` than `min`.
        if work_s is not None:
            work_s = work_s.take(rows)
            most_s = SAME_WORK * work_s.item(work_s.argmin())
            rows = rows.take((work_s <= most_s).nonzero()[0])
        late = self.late.take(rows)
        return self._longest_ago(rows.take((late == late.item(late.argmax())).nonzero()[0]), draw)

    def least_late(self, draw: float) -> tuple[int | None, float]:
        """The index of the least late row, and its lateness, above 1 if late; None where it takes none."""
        rows = self._open(np.ones(len(self.late), dtype=np.bool_))
        if not len(rows):
            return None, math.inf
        if self.scored.ask.yields:
            likely = rows[self.hopes[rows] <= 1.0]
            rows = likely if len(likely) else self._idle(rows)
            if not len(rows):
                return None, math.inf
        late = self.hopes.take(rows)
        least: float = late.item(late.argmin())
        return self._longest_ago(rows.take((late == least).nonzero()[0]), draw), least

    def _open(self, flags: Flags) -> Ints:
        """Those of the flagged rows that may be chosen."""
        rows = self.open_rows
        found: Ints = (
            flags.nonzero()[0] if rows is None else rows.take(flags.take(rows).nonzero()[0])
        )
        return found

    def _idle(self, rows: Ints) -> Ints:
        """Those of some rows with nothing in their queues, where the request does no harm."""
        if self.harms is not None:
            rows = rows[~self.harms[rows]]
        if self.scored.work_s is not None:
            rows = rows[self.scored.pool.rows.load_s[rows] <= 0.0]
        return rows

    def _longest_ago(self, rows: Ints, draw: float) -> int:
        if len(rows) > 1:
            last = self.scored.pool.rows.last_chosen.take(rows)
            rows = rows.take((last == last.item(last.argmin())).nonzero()[0])
        return rows.item(int(draw * len(rows)))


def judged(scored: ScoredPool, *, alone: bool = False) -> Judged | None:
    """The rows of a pool judged for its request; None: it has no target there, or nothing is predicted.

    By a latency whose predictions in this pool are off (its basis is the grid) nothing is judged. `alone`:
    by its own targets and the room that is kept, but not by what was promised to others.
    """
    sla, estimator, late, hopes = scored.ask.sla, scored.pool.estimator, None, None
    has_ttft = scored.ttft_s is not None and sla.ttft_ms is not None
    has_ttft = has_ttft and estimator.ttft_basis != "grid" and estimator.predicts_prefill
    itl_s = scored.itl_s
    # One token has nothing between it and the next.
    has_itl = itl_s is not None and sla.itl_ms is not None and scored.ask.answer_tokens != 1.0
    has_itl = has_itl and estimator.itl_basis != "grid" and estimator.predicts_itl
    if estimator.ttft_calibration is not None or estimator.itl_calibration is not None:
        late, hopes, itl_s = _calibrated(scored, has_ttft=has_ttft, has_itl=has_itl)
    else:
        if has_ttft:
            assert scored.ttft_s is not None
            late = scored.ttft_s + scored.later_s
            late /= max(_LEAST_S, _left_s(scored))
        if has_itl:
            assert itl_s is not None
            assert sla.itl_ms is not None
            share = ITL_SHARE if scored.stage is Stage.DECODE else AGG_ITL_SHARE
            itl_late = itl_s / max(_LEAST_S, share * sla.itl_ms / 1000)
            late = itl_late if late is None else np.maximum(late, itl_late, out=late)
    if late is None:
        return None
    rows = scored.pool.rows
    delays: Flags | None = None
    harms: Flags | None = None
    if itl_s is not None and estimator.itl_basis != "grid" and not alone:
        of_others = itl_s / rows.floats("itl_limit_s")
        np.maximum(late, of_others, out=late)
        if hopes is not None:
            np.maximum(hopes, of_others, out=hopes)
        if scored.ask.yields:
            # Otherwise it is enough that it is late there.
            harms = of_others > 1.0
    if scored.work_s is not None and not alone:
        if np.count_nonzero(rows.ints("join_tokens")):
            joins, delays = _joins_s(scored) > rows.join_limits_s
            harms = joins if harms is None else harms | joins
        if scored.stage is Stage.AGG:
            stalls = scored.work_s > rows.floats("stall_room_s")
            harms = stalls if harms is None else harms | stalls
    if scored.pool.kept is not None and not scored.ask.is_protected:
        takes = _takes_kept(scored, scored.pool.kept)
        harms = takes if harms is None else harms | takes
    if harms is not None and np.count_nonzero(harms):
        more_s = scored.score_s if scored.work_s is None else scored.work_s
        late = np.where(harms, np.maximum(late, 1.0) + more_s, late)
        if hopes is not None:
            hopes = np.where(harms, np.maximum(hopes, 1.0) + more_s, hopes)
    return Judged(scored, late, late if hopes is None else hopes, scored.open_rows(), delays, harms)


def _calibrated(
    scored: ScoredPool, *, has_ttft: bool, has_itl: bool
) -> tuple[Floats | None, Floats | None, Floats | None]:
    """`late` and `hopes` by each latency that has a target, calibrated; and the ITL that is typical.

    A latency that is not calibrated counts for both as it is predicted. None of the arrays is of `scored`,
    but an ITL that is not calibrated.
    """
    sla, of, itl_s = scored.ask.sla, scored.pool.estimator, scored.itl_s
    parts: list[tuple[Floats, Floats]] = []
    if has_ttft:
        assert scored.ttft_s is not None
        assert sla.ttft_ms is not None
        seconds, left_s = scored.ttft_s + scored.later_s, _left_s(scored)
        if of.ttft_calibration is None:
            parts.append((seconds / max(_LEAST_S, left_s),) * 2)
        else:
            parts.append(of.ttft_calibration.parts(seconds, max(_LEAST_S, left_s)))
    if has_itl:
        assert itl_s is not None
        assert sla.itl_ms is not None
        limit_s = max(_LEAST_S, _itl_limit_s(scored, sla.itl_ms))
        if of.itl_calibration is None:
            parts.append((itl_s / limit_s,) * 2)
        else:
            parts.append(of.itl_calibration.parts(itl_s, limit_s))
    if itl_s is not None and of.itl_calibration is not None:
        itl_s = of.itl_calibration.typical_s(itl_s)
    if not parts:
        return None, None, itl_s
    late, hopes = (np.maximum(first, last) for first, last in zip(parts[0], parts[-1], strict=True))
    return late, hopes, itl_s


def is_unsure(scored: ScoredPool, row: int) -> bool:
    """Whether calibrated predictions do not tell if the request meets its targets on a row."""
    of_pool = judged(scored) if scored.ask.by_targets else None
    return of_pool is not None and of_pool.hopes.item(row) <= 1.0 < of_pool.late.item(row)


def fits_alone(scored: ScoredPool) -> bool:
    """Whether a request is likely to meet its targets on some row, whatever becomes of others there."""
    of_pool = judged(scored, alone=True)
    return of_pool is not None and of_pool.is_likely


def note_protected(scored: ScoredPool, room: RoomKeeper) -> None:
    """Tell the keeper of a pool's room what a protected request needs there."""
    sla, open_ = scored.ask.sla, scored.open_rows()
    rows: Ints | slice = slice(None) if open_ is None else open_
    pace = scored.pool.rows.pace[rows]
    if scored.work_s is not None and sla.ttft_ms is not None:
        own_s = (scored.work_s[rows] * pace).min(initial=math.inf)
        own_s *= scored.pool.estimator.coefficients.prefill_scale
        room.note_ttft(_left_s(scored) - scored.later_s, float(own_s))
    if scored.itl_s is not None and sla.itl_ms is not None:
        tokens = scored.ask.isl_tokens + scored.ask.growth_tokens
        alone_s = scored.pool.estimator.itl_s(1, tokens) * float(pace.min(initial=math.inf))
        room.note_itl(_itl_limit_s(scored, sla.itl_ms), alone_s)


def busy_s(scored: ScoredPool, row: int) -> float:
    """Seconds for which a request keeps a row busy: with its prompt, and with its part of a full batch."""
    found = 0.0
    if scored.work_s is not None:
        found = scored.work_s.item(row) * scored.rate(row)
    itl_ms = scored.ask.sla.itl_ms
    if scored.itl_s is not None and itl_ms is not None:
        limit_s, tokens = _itl_limit_s(scored, itl_ms), scored.ask.isl_tokens
        tokens += scored.ask.growth_tokens
        of = scored.pool.estimator
        alone_s = of.itl_s(1, tokens)
        each_s = max(_LEAST_S, of.itl_s(2, tokens) - alone_s)
        if alone_s < limit_s:  # Others may come where no room would help.
            full = 1.0 + (limit_s - alone_s) / each_s
            found += limit_s * scored.ask.answer_tokens / full
    return found


def promised(scored: ScoredPool, row: int, work: Work, now_s: float) -> Work:
    """The work of a request on a row where it is predicted to meet its targets, with what that promises."""
    sla, estimator = scored.ask.sla, scored.pool.estimator
    due_s = itl_limit_s = stall_s = math.inf
    has_ttft = scored.work_s is not None and estimator.ttft_basis != "grid"
    if has_ttft and sla.ttft_ms is not None:
        due_s = now_s + _left_s(scored) - scored.later_s
    has_itl = estimator.itl_basis != "grid" and scored.ask.answer_tokens != 1.0
    if has_itl and scored.itl_s is not None and sla.itl_ms is not None:
        share = ITL_SHARE if scored.stage is Stage.DECODE else AGG_ITL_SHARE
        itl_limit_s = share * sla.itl_ms / 1000
        whole = scored.pool.whole
        if scored.stage is Stage.AGG or whole is not None:
            gaps = max(1.0, scored.ask.answer_tokens - 1.0)
            room_s = max(0.0, itl_limit_s - scored.itl_s.item(row)) * gaps
            of_prompts = estimator if whole is None else whole
            rate = of_prompts.coefficients.prefill_scale * scored.pool.rows.pace.item(row)
            stall_s = room_s / max(_LEAST_S, rate)
    return Work(*work[:3], due_s, itl_limit_s, stall_s)


def drain_s(
    pools: Iterable[ScoredPool], takers: Iterable[ScoredPool], *, answer_tokens: float
) -> float:
    """Seconds until a row of these pools is predicted to fit a request that comes then; infinite: never.

    A queue has to become shorter by what makes the first token late. Of a batch so many answers have to end
    as make its step too long, one after the other, as those of `answer_tokens` do. Where only promises or
    kept room are in the way, all of the queue or one answer has to. `takers` are the next stage's pools.
    """
    idle_later_s = min(map(_idle_first_s, takers), default=0.0)
    found = math.inf
    for scored in pools:
        each_s, rows = _drains_s(scored, idle_later_s, answer_tokens), scored.open_rows()
        open_s = each_s if rows is None else each_s[rows]
        least_s = open_s.min(initial=math.inf)
        # Rows at their limits may fit later.
        found = min(found, float(least_s if least_s < math.inf else each_s.min(initial=math.inf)))
    return found


def _idle_first_s(scored: ScoredPool) -> float:
    """Predicted seconds to the first token on a decode worker that has no other request."""
    of, ask = scored.pool.estimator, scored.ask
    step_s = of.itl_s(1, ask.isl_tokens + ask.growth_tokens)
    return of.ttft_s(step_s + of.transfer_s(ask.isl_tokens))


def _drains_s(scored: ScoredPool, idle_later_s: float, answer_tokens: float) -> Floats:
    """`drain_s` of each row, f64[n_rows]."""
    rows, of, ask = scored.pool.rows, scored.pool.estimator, scored.ask
    drains_s = turns_s = np.zeros(len(rows))
    if scored.ttft_s is not None and scored.work_s is not None:
        turns_s = rows.load_s * of.coefficients.prefill_scale
        if ask.sla.ttft_ms is not None and of.ttft_basis != "grid" and of.predicts_prefill:
            late_s = scored.ttft_s + scored.later_s
            idle_s = of.ttft_many(scored.work_s * rows.pace) + idle_later_s
            if (line := of.ttft_calibration) is not None:
                late_s, idle_s = line.typical_s(late_s), line.typical_s(idle_s)
            limit_s = TTFT_SHARE * ask.sla.ttft_ms / 1000
            drains_s = np.where(idle_s > limit_s, math.inf, late_s - limit_s)
    if scored.itl_s is not None:
        itl_s, alone_s = scored.itl_s, rows.pace * of.itl_s(1, ask.isl_tokens + ask.growth_tokens)
        if (line := of.itl_calibration) is not None:
            itl_s, alone_s = line.typical_s(itl_s), line.typical_s(alone_s)
        n_others = np.maximum(1, rows.batch - 1)
        end_s = answer_tokens * itl_s / n_others
        turns_s = np.maximum(turns_s, end_s)
        is_judged = ask.sla.itl_ms is not None and ask.answer_tokens != 1.0
        if is_judged and of.itl_basis != "grid" and of.predicts_itl:
            assert ask.sla.itl_ms is not None
            limit_s = _itl_limit_s(scored, ask.sla.itl_ms)
            n_over = np.ceil((itl_s - limit_s) / np.maximum(1e-12, (itl_s - alone_s) / n_others))
            ends_s = np.minimum(n_over, n_others) * end_s
            drains_s = np.maximum(drains_s, np.where(alone_s > limit_s, math.inf, ends_s))
    found: Floats = np.where(drains_s > 0.0, drains_s, turns_s)
    return found


def _left_s(scored: ScoredPool) -> float:
    """Seconds that are left of the TTFT target."""
    sla = scored.ask.sla
    assert sla.ttft_ms is not None
    return TTFT_SHARE * sla.ttft_ms / 1000 - scored.ask.elapsed_s


def _itl_limit_s(scored: ScoredPool, itl_ms: float) -> float:
    """Seconds that a step may take by the target."""
    return (ITL_SHARE if scored.stage is Stage.DECODE else AGG_ITL_SHARE) * itl_ms / 1000


def _takes_kept(scored: ScoredPool, kept: KeptRoom) -> Flags:
    """Where the request would take room while no more than `kept.n_rows` rows have it, bool[n_rows]."""
    rows, of = scored.pool.rows, scored.pool.estimator
    has_room, takes = rows.unavailable == 0, np.zeros(len(rows), dtype=np.bool_)
    if scored.ttft_s is not None and of.ttft_basis != "grid":
        has_room &= rows.load_s * of.coefficients.prefill_scale <= kept.ttft_s
        takes |= scored.ttft_s > kept.ttft_s
    if scored.itl_s is not None and of.itl_basis != "grid":
        tokens = scored.ask.isl_tokens + scored.ask.growth_tokens
        more_s = of.itl_of_batches(rows.batch + 1, rows.mean_tokens(tokens))
        has_room &= scored.itl_s <= kept.itl_s
        takes |= more_s * rows.pace > kept.itl_s
    takes &= np.count_nonzero(has_room) - has_room < kept.n_rows
    return takes


def _joins_s(scored: ScoredPool) -> Floats:
    """Seconds by which the prompt makes the last step of each row's queue longer: 0 without room in it."""
    pool, rows = scored.pool, scored.pool.rows
    assert scored.work_s is not None
    scale = pool.estimator.coefficients.prefill_scale
    joins_s: Floats = scale / np.maximum(1, scored.ask.isl_tokens - pool.cached.cached_tokens)
    joins_s *= rows.ints("join_tokens")
    np.minimum(joins_s, scale, out=joins_s)
    joins_s *= scored.work_s
    joins_s *= rows.pace
    return joins_s
