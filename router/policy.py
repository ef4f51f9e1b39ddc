"""The policy: which pool, which worker. Pure, and every decision explains itself.

`choose(ask, stages, pools, rng)` filters, scores and picks on a frozen snapshot; the same snapshot, ask
and generator state give the same decision.

Pool: the grid's cell, then priority overrides, then the retry order of the configuration.
Worker: the lowest predicted load in seconds,

    prefill   queued prefill seconds + this prompt's prefill seconds
    decode    ITL at the batch size with this request in it, times that batch size: the seconds of decode
              that one step of the worker then serves. Peak-EWMA balancers weigh latency by pending
              requests in the same way. ITL alone would not do: it is flat, and in real measurements not
              even monotone, at small batches.
    agg       the sum of the two

and among equals the one that was chosen longest ago, then by chance. Short prompts are done before the next
one comes, so idle workers tie often, and chance alone spreads a hundred of them worse than 60 to 40 every
few bursts. A worker whose last probe failed is chosen only where no other can be.
"""

import random
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from slagate.pools.estimator import Estimator
from slagate.pools.grid import Cell, StageGrid
from slagate.pools.member import MemberView, Stage, State, Work
from slagate.pools.pool import PoolView
from slagate.router.sla import Sla

AT_LIMIT = "at its limit"


class Ask(NamedTuple):
    """What the policy knows of a request."""

    model: str
    isl_tokens: int
    sla: Sla
    excluded: frozenset[str] = frozenset()  # workers that failed this request already


class Candidate(NamedTuple):
    """One worker, scored."""

    view: MemberView
    pool: str
    score_s: float
    predicted_ttft_s: float | None
    predicted_itl_s: float | None
    excluded: str  # why it may not be chosen; empty: it may


class Target(NamedTuple):
    """A latency that was looked up in the grid."""

    field: str
    ms: float
    is_default: bool


class StageChoice(NamedTuple):
    """The choice for one stage; `winner` is None when nobody may take the request."""

    stage: Stage
    cell: Cell
    base_pool: str
    pool: str  # where the winner is; without one, the pool to blame
    pool_order: tuple[str, ...]
    targets: tuple[Target, ...]  # one for each latency axis of the grid
    winner: Candidate | None
    scored: tuple[Candidate, ...]  # of every pool that was looked at, as its members stand
    work: Work
    draw: float  # in [0, 1), the one chance that was taken: it told equals apart

    @property
    def candidates(self) -> list[Candidate]:
        """The winner, then the others as they are preferred; sorted when asked, since few are."""
        return sorted(
            self.scored, key=lambda c: (c is not self.winner, bool(c.excluded), preference(c))
        )

    @property
    def overridden(self) -> bool:
        """Whether a priority override replaced the grid's pool."""
        return self.cell.pool != self.cell.base_pool


class Decision(NamedTuple):
    """One choice a stage, in the order of the stages."""

    ask: Ask
    stages: tuple[StageChoice, ...]

    def stage(self, stage: Stage) -> StageChoice:
        """The choice for one stage."""
        return next(choice for choice in self.stages if choice.stage is stage)

    def replace(self, choice: StageChoice) -> "Decision":
        """The decision with another choice for one stage."""
        stages = tuple(choice if old.stage is choice.stage else old for old in self.stages)
        return self._replace(stages=stages)

    def explain(self) -> str:
        """The decision in words, one paragraph a stage."""
        return "\n".join(_explain(self.ask, choice) for choice in self.stages)


def choose(
    ask: Ask,
    stages: Mapping[Stage, StageGrid],
    pools: Mapping[str, PoolView],
    *,
    rng: random.Random,
) -> Decision:
    """Choose a worker for each stage."""
    return Decision(
        ask, tuple(choose_stage(stage, ask, grid, pools, rng=rng) for stage, grid in stages.items())
    )


def choose_stage(
    stage: Stage,
    ask: Ask,
    grid: StageGrid,
    pools: Mapping[str, PoolView],
    *,
    rng: random.Random,
) -> StageChoice:
    """Choose a worker for one stage."""
    values = {
        "isl": ask.isl_tokens,
        "context_length": ask.isl_tokens,
        "ttft_ms": ask.sla.ttft_ms,
        "itl_ms": ask.sla.itl_ms,
    }
    cell = grid.select(values, ask.sla.priority)
    order = tuple(grid.pool_names[index] for index in grid.retry_order(cell.pool))
    # Drawn once whatever the number of ties, so that a receipt is enough to decide again.
    draw = rng.random()
    candidates: list[Candidate] = []
    winner = None
    for name in order:
        pool = pools[name]
        work = _work(stage, ask, pool.estimator)
        scored = [_score(stage, ask, work, view, pool) for view in pool.members]
        candidates += scored
        winner = _pick(scored, draw)
        if winner is not None:
            break
    targets = tuple(
        Target(axis.field, axis.midpoint if given is None else given, given is None)
        for axis in grid.axes
        if not axis.required
        for given in [values[axis.field]]
    )
    return StageChoice(
        stage=stage,
        cell=cell,
        base_pool=grid.pool_names[cell.base_pool],
        pool=order[0] if winner is None else winner.pool,
        pool_order=order,
        targets=targets,
        winner=winner,
        scored=tuple(candidates),
        work=work,
        draw=draw,
    )


def _work(stage: Stage, ask: Ask, estimator: Estimator) -> Work:
    if stage is Stage.DECODE:
        return Work(context_tokens=ask.isl_tokens)
    prefill_s = estimator.prefill_s(ask.isl_tokens, 0)
    context_tokens = ask.isl_tokens if stage is Stage.AGG else 0
    return Work(ask.isl_tokens, prefill_s, context_tokens)


def _score(stage: Stage, ask: Ask, work: Work, view: MemberView, pool: PoolView) -> Candidate:
    estimator = pool.estimator
    ttft_s = itl_s = None
    score_s = 0.0
    if stage is not Stage.DECODE:
        ttft_s = view.queued_s + work.prefill_s
        score_s += ttft_s
    if stage is not Stage.PREFILL:
        batch = view.inflight + 1
        itl_s = estimator.itl_s(batch, (view.context_tokens + ask.isl_tokens) / batch)
        score_s += itl_s * batch
    if not estimator.predicts:
        ttft_s = itl_s = None
    return Candidate(view, pool.name, score_s, ttft_s, itl_s, _excluded(ask, view))


def _excluded(ask: Ask, view: MemberView) -> str:
    if view.state is not State.READY:
        return str(view.state.value)
    if view.address in ask.excluded:
        return "failed this request"
    if ask.model not in view.models:
        return "does not serve the model"
    if view.inflight >= view.max_inflight:
        return AT_LIMIT
    return ""


def _pick(candidates: Iterable[Candidate], draw: float) -> Candidate | None:
    open_ = [candidate for candidate in candidates if not candidate.excluded]
    if not open_:
        return None
    ranks = [preference(candidate) for candidate in open_]
    best = min(ranks)
    ties = [candidate for candidate, rank in zip(open_, ranks, strict=True) if rank == best]
    return ties[int(draw * len(ties))]


def preference(candidate: Candidate) -> tuple[bool, float, int]:
    """What is compared between workers that can take the request; the least wins."""
    return candidate.view.suspect, candidate.score_s, candidate.view.last_chosen


def _in_words(target: Target) -> str:
    name = target.field.removesuffix("_ms").upper()
    if target.is_default:
        return f"no {name} target (so the middle of the grid, {target.ms:g} ms)"
    return f"{name} target {target.ms:g} ms"


def _explain(ask: Ask, choice: StageChoice) -> str:
    inputs = [f"{ask.isl_tokens} prompt tokens", *map(_in_words, choice.targets)]
    cell = "".join(f"[{index}]" for index in choice.cell.index)
    lines = [
        f"{choice.stage.value}: {' and '.join(inputs)} fall in cell {cell},"
        f" which is pool {choice.base_pool}."
    ]
    if choice.overridden:
        lines.append(
            f"Priority {ask.sla.priority} overrides that with pool {choice.pool_order[0]}."
        )
    if choice.winner is None:
        reasons = sorted({candidate.excluded for candidate in choice.scored})
        lines.append(f"No worker can take it: {', '.join(reasons) or 'the pool is empty'}.")
        return " ".join(lines)
    if choice.pool != choice.pool_order[0]:
        lines.append(f"No worker there can take it; pool {choice.pool} is next in the retry order.")
    n_open = sum(not candidate.excluded for candidate in choice.scored)
    best = choice.winner
    who = f"{best.view.address} is the only worker that can take it"
    if n_open > 1:
        who = f"Of {n_open} workers that can take it {best.view.address} has the least load"
    lines.append(
        f"{who}: predicted load {best.score_s:.4f} s, with {best.view.inflight} in flight and"
        f" {best.view.queued_tokens} prompt tokens queued."
    )
    for label, seconds in (("TTFT", best.predicted_ttft_s), ("ITL", best.predicted_itl_s)):
        if seconds is not None:
            lines.append(f"Predicted {label} {seconds * 1000:.1f} ms.")
    return " ".join(lines)
