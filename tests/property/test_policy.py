"""What holds for every fleet state: the pick is feasible, repeatable, and load never attracts load."""

import random
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slagate.pools.estimator.estimator import Estimator
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.row_view import RowView, State
from slagate.router.scheduling.policy import StageChoice, choose_stage
from slagate.router.scheduling.score import ScoredRow, score_pool
from support.builders import MODEL, ask, one_cell, pool_view, profiled, view

ESTIMATORS = {"nominal": Estimator(), "profile": profiled()}
SPEEDS = st.sampled_from(list(ESTIMATORS.values()))
ISL = st.integers(1, 130_000)


@st.composite
def views(draw: st.DrawFn, address: str = "w") -> RowView:
    """A worker in a state that leases and probes can really produce."""
    prompts = draw(st.lists(st.integers(1, 60_000), max_size=12))
    queued = draw(st.integers(0, len(prompts)))
    return view(
        address,
        state=draw(st.sampled_from([State.READY, State.READY, State.READY, State.NOT_READY])),
        inflight=len(prompts),
        max_inflight=draw(st.sampled_from([4, 1 << 30])),
        queued_tokens=sum(prompts[:queued]),
        queued_s=sum(tokens * 5e-5 for tokens in prompts[:queued]),
        context_tokens=sum(prompts),
        models=draw(st.sampled_from([(MODEL,), (MODEL, "b"), ("b",)])),
    )


FLEETS = st.lists(views(), max_size=6).map(
    lambda found: [replace(each, address=f"w{at}:1") for at, each in enumerate(found)]
)
STAGES = st.sampled_from(list(Stage))


def choice_of(
    stage: Stage, members: list[RowView], speed: Estimator, isl_tokens: int, *, seed: int = 0
) -> StageChoice:
    pools = {"only": pool_view("only", members, speed=speed)}
    grid = one_cell(stage, "only")
    return choose_stage(
        stage, ask(isl_tokens=isl_tokens), grid, pools, draw=random.Random(seed).random()
    )


@given(STAGES, FLEETS, SPEEDS, ISL)
def test_i3_the_pick_is_feasible_and_nobody_feasible_is_better(
    stage: Stage, members: list[RowView], speed: Estimator, isl_tokens: int
) -> None:
    choice = choice_of(stage, members, speed, isl_tokens)
    feasible = [
        m
        for m in members
        if m.state is State.READY and MODEL in m.models and m.inflight < m.max_inflight
    ]
    assert len(choice.top()) == len(members)
    if not feasible:
        assert choice.winner is None
        return
    assert choice.winner is not None
    assert choice.winner.view in feasible
    scores = {c.view.address: c.score_s for c in choice.top()}
    assert choice.winner.score_s == min(scores[m.address] for m in feasible)


@given(STAGES, FLEETS, SPEEDS, ISL, st.randoms(use_true_random=False), st.integers(0, 9))
def test_the_order_of_the_workers_does_not_matter_when_scores_differ(
    stage: Stage,
    members: list[RowView],
    speed: Estimator,
    isl_tokens: int,
    order: random.Random,
    seed: int,
) -> None:
    first = choice_of(stage, members, speed, isl_tokens)
    shuffled = list(members)
    order.shuffle(shuffled)
    second = choice_of(stage, shuffled, speed, isl_tokens, seed=seed)
    open_scores = [c.score_s for c in first.top() if not c.excluded]
    if len(set(open_scores)) == len(open_scores):
        assert (first.winner and first.winner.view) == (second.winner and second.winner.view)
    else:
        assert first.winner is not None
        assert second.winner is not None
        assert first.winner.score_s == second.winner.score_s


@given(STAGES, FLEETS, SPEEDS, ISL, st.integers())
def test_i4_the_same_snapshot_request_and_generator_state_give_the_same_decision(
    stage: Stage, members: list[RowView], speed: Estimator, isl_tokens: int, seed: int
) -> None:
    first, second = random.Random(seed), random.Random(seed)
    pools = {"only": pool_view("only", members, speed=speed)}
    grid, asked = one_cell(stage, "only"), ask(isl_tokens=isl_tokens)
    for _ in range(3):
        one, two = (
            choose_stage(stage, asked, grid, pools, draw=r.random()) for r in (first, second)
        )
        assert (one.winner, one.draw, one.top()) == (two.winner, two.draw, two.top())
    assert first.getstate() == second.getstate()


def score(stage: Stage, member: RowView, speed: Estimator, isl_tokens: int) -> float:
    (candidate,) = choice_of(stage, [member], speed, isl_tokens).top()
    assert isinstance(candidate, ScoredRow)
    return candidate.score_s


@settings(max_examples=200)
@given(
    inflight=st.integers(0, 400),
    mean_tokens=st.integers(1, 60_000),
    isl_tokens=ISL,
    added_tokens=st.integers(1, 60_000),
    queued=st.booleans(),
)
@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("stage", list(Stage))
def test_one_more_request_never_makes_a_worker_look_less_loaded(
    stage: Stage,
    name: str,
    inflight: int,
    mean_tokens: int,
    isl_tokens: int,
    added_tokens: int,
    *,
    queued: bool,
) -> None:
    """In one corner only almost: 64 requests or more with a mean context below 32 tokens.

    The measurements behind the profile fall there with the batch size, by half a percent at most.
    """
    speed = ESTIMATORS[name]
    member = view(inflight=inflight, context_tokens=inflight * mean_tokens)
    more = replace(
        member, inflight=inflight + 1, context_tokens=member.context_tokens + added_tokens
    )
    if queued:
        more = replace(
            more, queued_tokens=added_tokens, queued_s=speed.frozen.work_s(added_tokens, 0)
        )
    before, after = (score(stage, each, speed, isl_tokens) for each in (member, more))
    mean = (member.context_tokens + isl_tokens) / (inflight + 1)
    slack = 0.01 if inflight + 1 >= 64 and mean < 32 else 1e-12
    assert after >= before * (1 - slack)


CAUSES: list[dict[str, Any]] = [
    {},
    {"suspect": True},
    {"max_queued_tokens": 100, "queued_tokens": 100},
    {"capacity_tokens": 99},
    {"capacity_tokens": 1000, "context_tokens": 901, "inflight": 1},
    {"capacity_tokens": 1000, "context_tokens": 901, "inflight": 0},
    {"capacity_tokens": 1000, "context_tokens": 900, "inflight": 1},
    {"worker_inflight": 4, "max_inflight": 4},
    {"models": frozenset({"b"})},
    *[{"state": state} for state in State if state is not State.READY],
]


@pytest.mark.parametrize("stage", Stage)
def test_rows_that_are_open_are_those_without_a_reason(stage: Stage) -> None:
    """What is looked at to choose is less than what is told: for each pair of causes."""
    for first, second, excluded in product(CAUSES, CAUSES, [(), ("w0:1",)]):
        causes = ({}, first, second)
        rows = [replace(view(f"w{at}:1"), **cause) for at, cause in enumerate(causes)]
        asked = ask(isl_tokens=100, excluded=frozenset(excluded))
        scored = score_pool(stage, asked, pool_view("only", rows))
        told = list(scored.candidates(range(len(rows))))
        feasible = [each for each in told if not each.excluded]
        healthy = [each for each in feasible if not each.view.suspect] or feasible
        open_ = scored.open_rows()
        found = range(len(rows)) if open_ is None else open_.tolist()
        assert list(found) == [each.row for each in healthy], (causes, excluded)
        assert scored.n_open == len(feasible)
        assert (scored.pick(0.0)[0] is None) is (not feasible)
