"""The load-balance cases of the failure bank, at the level of policy and dispatch."""

from collections import Counter

import pytest

from slagate.pools.member import Stage, State
from slagate.router.dispatch import Assignment, Dispatcher
from slagate.router.policy import choose_stage
from support.builders import PROFILE, ask, fleet, one_cell, pool_view, profiled, rng, view

PROFILED = {"profile": PROFILE, "tp": 1}


def assign(dispatcher: Dispatcher, *, isl_tokens: int = 100) -> Assignment:
    return dispatcher.take(dispatcher.decide(ask(isl_tokens=isl_tokens)))


def spread(dispatcher: Dispatcher, stage: str) -> Counter[str]:
    members = dispatcher.fleet.pools[stage].members.values()
    return Counter({member.address: member.inflight for member in members})


@pytest.mark.parametrize("extra", [{}, PROFILED], ids=["no profile", "profile"])
@pytest.mark.parametrize("mode", ["disagg", "agg"])
def test_score_01_a_hundred_unrelated_requests_over_two_equal_workers(
    mode: str, extra: dict[str, object]
) -> None:
    stages = ("prefill", "decode") if mode == "disagg" else ("agg",)
    sizes = rng(3)
    for seed in range(5):
        dispatcher = Dispatcher(fleet(mode, pools=dict.fromkeys(stages, extra)), rng=rng(seed))
        held = [assign(dispatcher, isl_tokens=sizes.randint(900, 1100)) for _ in range(100)]
        for stage in stages:
            counts = spread(dispatcher, stage)
            assert sum(counts.values()) == 100
            assert 40 <= min(counts.values()) <= max(counts.values()) <= 60
        for assignment in held:
            assignment.release()
        for stage in stages:
            assert set(spread(dispatcher, stage).values()) == {0}
        for member in dispatcher.fleet.members():
            assert (member.queued_tokens, member.queued_s, member.context_tokens) == (0, 0.0, 0)


@pytest.mark.parametrize("mode", ["disagg", "agg"])
def test_score_02_forty_over_four_and_every_stage_counts(mode: str) -> None:
    stages = ("prefill", "decode") if mode == "disagg" else ("agg",)
    workers = {s: {"workers": [f"{s[0]}{i}:1" for i in range(4)], **PROFILED} for s in stages}
    dispatcher = Dispatcher(fleet(mode, pools=workers), rng=rng())
    held = [assign(dispatcher, isl_tokens=1000) for _ in range(40)]
    for stage in stages:
        assert max(spread(dispatcher, stage).values()) <= 15
        assert sum(spread(dispatcher, stage).values()) == 40
    for assignment in held:
        assignment.release()
    assert all(member.inflight == 0 for member in dispatcher.fleet.members())


@pytest.mark.parametrize("speed", [None, profiled()], ids=["no profile", "profile"])
@pytest.mark.parametrize("stage", list(Stage))
def test_score_03_an_idle_worker_beats_an_overloaded_one_that_comes_first(
    stage: Stage, speed: None
) -> None:
    busy = view("w1:1", inflight=40, queued_tokens=40_000, queued_s=2.0, context_tokens=40_000)
    for members in ([busy, view("w2:1")], [view("w2:1"), busy]):
        pools = {"only": pool_view("only", members, speed=speed)}
        grid = one_cell(stage, "only")
        for seed in range(20):
            choice = choose_stage(stage, ask(), grid, pools, rng=rng(seed))
            assert choice.winner is not None
            assert choice.winner.view.address == "w2:1"


def test_score_04_fifty_requests_go_to_the_one_worker_below_its_limit() -> None:
    workers = [f"a{i}:1" for i in range(4)]
    of = fleet("agg", pools={"agg": {"workers": workers, "max_inflight": 60}})
    for address in workers[:3]:
        of.pools["agg"].members[address].inflight = 60
    dispatcher = Dispatcher(of, rng=rng())
    chosen = {assign(dispatcher).members[0].address for _ in range(50)}
    assert chosen == {"a3:1"}


def test_a_worker_that_comes_back_is_used_again() -> None:
    dispatcher = Dispatcher(fleet("agg"), rng=rng())
    member = next(dispatcher.fleet.members())
    for _ in range(3):
        member.probe_failed("slow")
    assert member.state is State.NOT_READY
    assert {assign(dispatcher).members[0].address for _ in range(6)} == {"a2:1"}
    member.probe_ok()
    member.probe_ok()
    assert assign(dispatcher).members[0] is member
