"""The policy: which pool and which worker a request goes to. It is pure; `words` explains decisions.

`choose` filters, scores and picks on a frozen snapshot; the same snapshot, request and state of the random
generator give the same decision.

The grid says which pools a request may use, and load decides among them: it goes to the first one in which
it is predicted to meet its targets, see `targets`, else where it is the least late. A request without
targets goes to the first pool with a worker that can take it, in this order: the cell's pool, or that of a
priority override, the pools that the cell lists, the retry order of the configuration; there the worker and
rank with the least predicted seconds win, see `score`.
"""

import math
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import msgspec
from msgspec.structs import replace

from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.fleet_file.models import ANY_CLASS, Objective, default_for
from slagate.pools.grid.grid import AnyAxis, Cell, Placement, Stage, StageGrid
from slagate.pools.inflight.pair_key import PairKey, all_fit
from slagate.proto import gateway_pb2 as gw
from slagate.router.request.sla import Sla
from slagate.router.scheduling.pairs import ALONE, Alone, Pairing, partners, with_worker
from slagate.router.scheduling.score import (
    LIMITS,
    YIELDS,
    RoutingRequest,
    ScoredPool,
    ScoredRow,
    open_and_awaited,
    score_pool,
)
from slagate.router.scheduling.targets import fits_alone, judged

NO_CONFIG = gw.GatewayConfig()

MISSES = ("refused", "shadow", "served", "relegated", "waits")
"""What becomes of a request that is predicted to miss its targets; `shadow`: served, counted as refused."""

TARGETS = ("ttft_ms", "itl_ms")
"""The axes of a grid that are latencies."""


class LatencyTarget(msgspec.Struct, frozen=True, gc=False):
    """The latency target that placed a request on one axis of a grid."""

    field: str  # one of `TARGETS`
    ms: float
    source: str  # request, objective (the default of its class), or grid (the middle of the axis)


class StageChoice(msgspec.Struct, frozen=True, gc=False, eq=False, kw_only=True):
    """The worker chosen for one stage of a request, with all that the choice was made from."""

    stage: Stage
    ask: RoutingRequest  # a retry's has more workers excluded than the decision's
    grid: StageGrid
    cell: Cell
    pool_order: tuple[str, ...]
    pool: str  # the winner's; without a winner, the first of `pool_order`
    scored: tuple[ScoredPool, ...]  # every pool that was looked at
    won: ScoredPool  # the winner's pool; without a winner, the last one of `scored`
    row: int | None  # the winner's index in it; None: no row may take the request
    starved: bool  # the winner goes first because it had no request for long
    draw: float  # in [0, 1), the one random number that was drawn: it chose between equals
    config: gw.GatewayConfig  # in force when the choice was made
    is_met: bool | None = None  # whether targets are predicted to be met; None: not judged
    pairing: Pairing | Alone | None = None  # None: the other stage left every row open
    pool_stage: Stage  # of the chosen pool; for a bypass `DECODE`, where `stage` is `AGG`
    would_meet: tuple[str, ...] = ()
    """Of what is predicted to miss: names of the pools that would meet the targets, but are not for it."""

    @property
    def base_pool(self) -> str:
        """The name of the cell's pool, before priority overrides."""
        return self.grid.pool_names[self.cell.base_pool]

    @property
    def targets(self) -> tuple[LatencyTarget, ...]:
        """The target on each latency axis of the grid; in a bypass TTFT's besides."""
        sla, axes = self.ask.sla, self.grid.axes
        found = tuple(_target(axis, sla) for axis in axes if axis.field in TARGETS)
        if not self.is_bypass or sla.ttft_ms is None:
            return found
        return (LatencyTarget("ttft_ms", sla.ttft_ms, _source("ttft_ms", sla)), *found)

    @property
    def is_bypass(self) -> bool:
        """Whether it is of a decode worker that is to compute the prompt too, in stage `AGG`."""
        return self.pool_stage is not self.stage

    @property
    def first_token_s(self) -> float:
        """Predicted seconds to the first token, if this is the first stage and has a worker."""
        assert self.row is not None
        return self.won.first_response_s(self.row) + self.won.later_s

    @property
    def worker(self) -> str | None:
        """The address of the chosen worker; None: no row may take the request."""
        return None if self.row is None else self.won.pool.rows.names[self.row][0]

    @property
    def winner(self) -> ScoredRow | None:
        """The row that was chosen; None: no row may take the request."""
        return None if self.row is None else self.won.row_values(self.row)

    @property
    def pair_keys(self) -> tuple[PairKey, ...]:
        """What the chosen worker says of its handoffs; without one, what any that was looked at says."""
        if self.row is not None:
            keys, ids = self.won.pool.rows.pairs
            return (keys[ids.item(self.row)],)
        return tuple(key for scored in self.scored for key in scored.pool.rows.pairs.keys)

    @property
    def reasons(self) -> set[str]:
        """Every reason for which some row, of any pool that was looked at, may not be chosen."""
        found = set().union(*(each.reasons for each in self.scored))
        if self.ask.yields and self.row is None and self.is_met is False:
            found.add(YIELDS)
        return found

    def top(self, n: int | None = None) -> list[ScoredRow]:
        """The winner, then the other rows of all pools looked at, best first; at most `n`, None: all."""
        winner = self.winner
        found = [] if winner is None else [winner]
        others = [
            other
            for each in self.scored
            for other in each.candidates(each.order()[: None if n is None else n + 1].tolist())
            if winner is None or (other.pool, other.row) != (winner.pool, winner.row)
        ]
        if len(self.scored) > 1:
            others.sort(key=lambda c: (bool(c.excluded), c.view.suspect, c.score_s))
        return (found + others)[:n]

    @property
    def is_hopeless(self) -> bool:
        """Whether no row may take the request, and none will by itself."""
        return self.row is None and not self.reasons & LIMITS

    @property
    def overridden(self) -> bool:
        """Whether a priority override replaced the grid's pool."""
        return self.cell.pool != self.cell.base_pool


class Decision(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The choice of a worker for each stage of a request, in the order of the stages."""

    ask: RoutingRequest
    stages: tuple[StageChoice, ...]
    admission: str = ""
    """Of what is predicted to miss its targets as it comes: one of `MISSES`; empty: it is not."""
    class_name: str = ANY_CLASS  # with `admission`: the class as the configuration lists it
    # Where a bypass was tried: the way that was not taken, the bypass or the choices of both stages.
    untaken: tuple[StageChoice, ...] = ()

    def stage(self, stage: Stage) -> StageChoice:
        """The choice for one stage. Raises `KeyError` for a stage that was not decided."""
        for choice in self.stages:
            if choice.stage is stage:
                return choice
        raise KeyError(stage)

    @property
    def is_bypass(self) -> bool:
        """Whether a decode worker is to serve the request alone."""
        return self.stages[0].is_bypass

    @property
    def is_met(self) -> bool | None:
        """Whether all targets are predicted to be met; None: none was judged."""
        found: bool | None = None
        for choice in self.stages:
            if choice.is_met is False:
                return False
            found = found or choice.is_met
        return found

    def replace(self, choice: StageChoice) -> "Decision":
        """A copy of the decision with this choice for its stage; `admission` stays that of the arrival."""
        stages = tuple(choice if old.stage is choice.stage else old for old in self.stages)
        return Decision(self.ask, stages, self.admission, self.class_name)

    def replaced_by(self, other: "Decision") -> "Decision":
        """A copy of the decision with the choices of the other one."""
        return replace(self, stages=other.stages, untaken=other.untaken)

    def with_admission(self, objectives: Mapping[str, Objective]) -> "Decision":
        """A copy that says what becomes of a request that is predicted to miss, by the policy of its class.

        Nothing does where a stage has nobody that it would be worth waiting for. A retry is never refused.
        """
        if self.is_met is not False or any(choice.is_hopeless for choice in self.stages):
            return self
        sla, mode = self.ask.sla, self.ask.admission_mode
        objective = default_for(objectives, sla.objective)
        if self.ask.yields:
            admission = "relegated"
        elif mode in ("off", "learn") or sla.is_final or (objective and objective.policy != "shed"):
            admission = "served"
        elif sla.ttft_ms is not None and all(map(_only_harms, self.stages)):
            admission = "waits" if mode == "on" else "served"
        else:
            admission = "refused" if mode == "on" else "shadow"
        known = sla.objective in objectives
        return replace(self, admission=admission, class_name=sla.objective if known else ANY_CLASS)


def _only_harms(choice: StageChoice) -> bool:
    """Whether a prompt would meet its targets where it is computed, and only others stand in the way.

    A decode worker's promises last as long as answers do, so they are not waited for.
    """
    if choice.is_met is not False:
        return True
    return choice.stage is not Stage.DECODE and any(map(fits_alone, choice.scored))


class Choose(Protocol):
    """A policy: `choose`, or another one that decides from the same."""

    def __call__(
        self,
        ask: RoutingRequest,
        stages: Mapping[Stage, StageGrid],
        pools: Mapping[str, PoolSnapshot],
        *,
        rng: random.Random,
        config: gw.GatewayConfig,
    ) -> Decision:
        """Decide for these stages from pool snapshots by name. May raise `Overloaded`."""


def choose(
    ask: RoutingRequest,
    stages: Mapping[Stage, StageGrid],
    pools: Mapping[str, PoolSnapshot],
    *,
    rng: random.Random,
    config: gw.GatewayConfig = NO_CONFIG,
    by_targets: bool = True,
) -> Decision:
    """Choose a worker for each stage from pool snapshots by name; `config` is recorded in each choice.

    The workers of prefill and decode fit each other, or there are none that do.
    """
    if not by_targets:
        ask = replace(ask, by_targets=False)
    found: list[StageChoice] = []
    later_s = ask.later_s
    # The last stage first: what it takes to the first token is part of TTFT.
    for stage in reversed(list(stages)):
        # Drawn once whatever the number of ties, so that a receipt is enough to decide again.
        draw = rng.random()
        choice = choose_stage(
            stage, ask, stages[stage], pools, draw=draw, config=config, later_s=later_s
        )
        found.insert(0, choice)
        if choice.row is not None and len(found) < len(stages):
            later_s += choice.won.first_response_s(choice.row)
    choices = tuple(found)
    if not _go_together(ask, choices):
        choices = _as_pair(ask, choices, stages, pools)
    return Decision(ask, choices)


choose_by_load: Choose = partial(choose, by_targets=False)
"""`choose` for requests whose targets do no more than place them in the grid."""


def _go_together(ask: RoutingRequest, choices: tuple[StageChoice, ...]) -> bool:
    """Whether the workers that were chosen one by one can hand over to each other.

    For a stage that has none: whether that has nothing to do with the workers of the other stage.
    """
    if ask.partner is None:
        if len(choices) != 2:
            return True
        prefill, decode = choices
        if prefill.row is not None and decode.row is not None:
            # Most often all workers say the same.
            keys = prefill.won.pool.rows.pairs.keys
            if len(keys) == 1 and keys == decode.won.pool.rows.pairs.keys:
                return True
    first, last = choices[0].pair_keys, choices[-1].pair_keys
    if ask.partner is not None:
        is_prefill = choices[0].stage is Stage.PREFILL
        first, last = (first, (ask.partner,)) if is_prefill else ((ask.partner,), last)
    return all_fit(first, last)


def _as_pair(
    ask: RoutingRequest,
    choices: tuple[StageChoice, ...],
    stages: Mapping[Stage, StageGrid],
    pools: Mapping[str, PoolSnapshot],
) -> tuple[StageChoice, ...]:
    """The choices again, with workers that fit each other; first with those that are known to."""
    if ask.partner is not None:
        (choice,) = choices
        again = _choose_again(choice, stages, pools, with_worker(ask.partner, strict=True))
        if again.row is None:
            again = _choose_again(choice, stages, pools, with_worker(ask.partner, strict=False))
        return (again,)
    prefill, decode = choices
    takers = partners(
        open_and_awaited(Stage.DECODE, ask, pools[name]) for name in decode.pool_order
    )
    for strict in (True, False):
        giver = _choose_again(prefill, stages, pools, Pairing(takers, strict))
        if giver.row is None:
            continue
        (pair,) = giver.pair_keys
        taker = _choose_again(decode, stages, pools, with_worker(pair, strict=strict))
        if taker.row is None:
            return giver, taker  # it yields there
        later_s = ask.later_s + taker.won.first_response_s(taker.row)
        if later_s != giver.won.later_s:
            # It was judged with the first token of another decode worker.
            (pair,) = taker.pair_keys
            pairing = with_worker(pair, strict=strict)
            giver = _choose_again(giver, stages, pools, pairing, later_s=later_s)
        return giver, taker
    return giver, decode


def _choose_again(
    choice: StageChoice,
    stages: Mapping[Stage, StageGrid],
    pools: Mapping[str, PoolSnapshot],
    pairing: Pairing,
    *,
    later_s: float | None = None,
) -> StageChoice:
    """The same choice, of the rows that a pairing leaves open; with another `later_s`, if one is given."""
    return choose_stage(
        choice.stage,
        choice.ask,
        stages[choice.stage],
        pools,
        draw=choice.draw,
        config=choice.config,
        pairing=pairing,
        later_s=choice.won.later_s if later_s is None else later_s,
        known=choice.scored,
    )


def choose_stage(
    stage: Stage,
    ask: RoutingRequest,
    grid: StageGrid,
    pools: Mapping[str, PoolSnapshot],
    *,
    draw: float,
    config: gw.GatewayConfig = NO_CONFIG,
    pairing: Pairing | Alone | None = None,
    later_s: float = 0.0,
    says_elsewhere: bool = True,
    known: tuple[ScoredPool, ...] = (),
) -> StageChoice:
    """Choose a worker for one stage; `draw` in [0, 1) chooses between equals.

    With `pairing` only rows that fit what the other stage has may be chosen. `later_s` are predicted
    seconds from the stage's first response to the first token. Without `says_elsewhere` no pools are looked
    at for `would_meet`, which the choice does not need. `known` pools were scored for the same already.
    """
    place = _place(ask, grid)
    scored: dict[str, ScoredPool] = {}
    name, row, is_met, starved = place.order[0], None, None, False
    would_meet: tuple[str, ...] = ()
    score = partial(score_pool, stage, ask, pairing=pairing, later_s=later_s)
    score = partial(_known_or, known, score) if known else score
    has_target = (ask.sla.ttft_ms is not None and stage is not Stage.DECODE) or (
        ask.sla.itl_ms is not None and stage is not Stage.PREFILL
    )
    if has_target and ask.by_targets:
        name, row, is_met = _by_targets(place, pools, score, scored, draw)
        if is_met is False and row is not None and says_elsewhere:
            would_meet = _would_meet(grid, pools, score, scored)
    if row is None and is_met is None:
        # Nothing is predicted, or no row may be chosen.
        for name in place.order:
            if name not in scored:
                scored[name] = score(pools[name])
            row, starved = scored[name].pick(draw)
            if row is not None:
                break
        if row is None and has_target and ask.by_targets and _has_passed(ask, stage):
            is_met = False
    return StageChoice(
        stage=stage,
        ask=ask,
        grid=grid,
        cell=place.cell,
        pool_order=place.order,
        pool=place.order[0] if row is None else name,
        scored=tuple(scored.values()),
        won=scored[name],
        row=row,
        starved=starved,
        draw=draw,
        config=config,
        is_met=is_met,
        pairing=pairing,
        pool_stage=Stage.DECODE if pairing is ALONE else stage,
        would_meet=would_meet,
    )


def _has_passed(ask: RoutingRequest, stage: Stage) -> bool:
    """Whether all of the TTFT target was over before a worker of the stage could be had."""
    ttft_ms = ask.sla.ttft_ms
    return stage is not Stage.DECODE and ttft_ms is not None and 1000 * ask.elapsed_s > ttft_ms


def _place(ask: RoutingRequest, grid: StageGrid) -> Placement:
    sla, isl_tokens = ask.sla, ask.isl_tokens
    values: dict[str, float | None] = {
        "isl": isl_tokens,
        "context_length": isl_tokens,
        "ttft_ms": sla.ttft_ms,
        "itl_ms": sla.itl_ms,
    }
    for name in sla.as_fast:
        values[name] = 0
    return grid.place(values, sla.priority)


def _known_or(
    known: tuple[ScoredPool, ...], score: "partial[ScoredPool]", pool: PoolSnapshot
) -> ScoredPool:
    """The rows of a pool with the scores that are known of them, else as `score` finds them."""
    for each in known:
        if each.pool is pool:
            return replace(each, **{name: score.keywords[name] for name in ("pairing", "later_s")})
    return score(pool)


def _would_meet(
    grid: StageGrid,
    pools: Mapping[str, PoolSnapshot],
    score: Callable[[PoolSnapshot], ScoredPool],
    scored: Mapping[str, ScoredPool],
) -> tuple[str, ...]:
    """Names of the other pools of the stage that are predicted to meet the targets."""
    looked_at = [judged(score(pools[name])) for name in grid.pool_names if name not in scored]
    return tuple(
        of_pool.scored.pool.name
        for of_pool in looked_at
        if of_pool is not None and of_pool.fullest(0.0) is not None
    )


def _by_targets(
    place: Placement,
    pools: Mapping[str, PoolSnapshot],
    score: Callable[[PoolSnapshot], ScoredPool],
    scored: dict[str, ScoredPool],
    draw: float,
) -> tuple[str, int | None, bool | None]:
    """The first pool of its spill in which the request is predicted to meet its targets, and its row.

    Where no row there may be chosen, so for the rest of its order. Else the pool and row where it is least
    late; no row where it waits instead. The last value says which of both it is. None: nothing is predicted
    in the order's first pool, or in another one while it misses in the rest; with a row, calibrated
    predictions do not tell. What is looked at is added to `scored`.
    """
    least_late, late_name, late_row = math.inf, place.order[0], None
    is_judged, is_open = True, False
    for at, name in enumerate((*place.spill, *place.order)):
        if at >= len(place.spill) and (is_open or not is_judged):
            break
        if name in scored:
            continue
        scored[name] = score(pools[name])
        of_pool = judged(scored[name])
        if of_pool is None:
            if name == place.order[0]:
                return name, None, None
            is_judged = False
            continue
        row = of_pool.fullest(draw)
        if row is not None:
            return name, row, True
        is_open |= of_pool.is_open
        row, late = of_pool.least_late(draw)
        if late < least_late:
            least_late, late_name, late_row = late, name, row
    if late_row is None or not is_judged:
        waits = is_judged and is_open and scored[late_name].ask.yields
        return late_name, None, False if waits else None
    return late_name, late_row, None if least_late <= 1.0 else False


def _target(axis: AnyAxis, sla: Sla) -> LatencyTarget:
    given_ms = sla.ttft_ms if axis.field == "ttft_ms" else sla.itl_ms
    if given_ms is None:
        return LatencyTarget(axis.field, axis.midpoint, "grid")
    return LatencyTarget(axis.field, given_ms, _source(axis.field, sla))


def _source(field: str, sla: Sla) -> str:
    return "objective" if field in sla.by_objective else "request"
