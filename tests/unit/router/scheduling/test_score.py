"""The load-balance cases of the failure bank, at the level of policy and dispatch."""

from collections import Counter

import numpy as np
import pytest

from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.row_view import State
from slagate.pools.prefix.overlap import Prompt
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.policy import choose_stage
from slagate.router.scheduling.wait_queue import Assignment
from support.builders import PROFILE, ask, fleet, one_cell, pool_view, profiled, rng, take_now, view

PROFILED = {"profile": PROFILE, "tp": 1}


def assign(dispatcher: Dispatcher, *, isl_tokens: int = 100) -> Assignment:
    return take_now(dispatcher, ask(isl_tokens=isl_tokens), None)


def spread(dispatcher: Dispatcher, stage: str) -> Counter[str]:
    members = dispatcher.fleet.pools[stage].members.values()
    return Counter({member.address: member.ranks.inflight for member in members})


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
            assert (
                member.ranks.queued_tokens,
                member.ranks.queued_s,
                member.ranks.context_tokens,
            ) == (0, 0.0, 0)


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
    assert all(member.ranks.inflight == 0 for member in dispatcher.fleet.members())


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
            choice = choose_stage(stage, ask(), grid, pools, draw=rng(seed).random())
            assert choice.winner is not None
            assert choice.winner.view.address == "w2:1"


def test_score_04_fifty_requests_go_to_the_one_worker_below_its_limit() -> None:
    workers = [f"a{i}:1" for i in range(4)]
    of = fleet("agg", pools={"agg": {"workers": workers, "max_inflight": 60}})
    for row in range(3):
        for _ in range(60):
            of.pools["agg"].lease(row, Work())
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


def test_score_07_a_worker_that_does_not_report_is_unknown_and_not_idle() -> None:
    """w1's last report is old; w2 and w3 are half busy with what others sent. 30 requests."""
    workers = ["a1:1", "a2:1", "a3:1"]
    of = fleet("agg", pools={"agg": {"workers": workers, **PROFILED}})
    pool = of.pools["agg"]
    stale, *fresh = pool.members.values()
    pool.set_foreign_load(stale, None)
    for member in fresh:
        pool.set_foreign_load(member, (32, 0))
    assert [pool.snapshot().view(row).foreign_requests for row in range(3)] == [32, 32, 32]
    dispatcher = Dispatcher(of, rng=rng())
    for _ in range(30):
        assign(dispatcher, isl_tokens=1000)
    assert set(spread(dispatcher, "agg").values()) == {10}


def test_score_07_where_nobody_reports_only_our_own_requests_count() -> None:
    of = fleet("agg")
    pool = of.pools["agg"]
    one, two = pool.members.values()
    for member in (one, two):
        pool.set_foreign_load(member, None)
    pool.lease(0, Work(100, 0.1, 100))
    assert {assign(Dispatcher(of, rng=rng())).members[0] for _ in range(1)} == {two}


@pytest.mark.parametrize("seed", range(5))
def test_score_08_gateways_that_know_nothing_of_each_other_do_not_pile_up(seed: int) -> None:
    """Four gateways, each with its own fleet state and generator, 50 requests each at once."""
    total: Counter[str] = Counter()
    for gateway in range(4):
        dispatcher = Dispatcher(fleet("agg", pools={"agg": PROFILED}), rng=rng(10 * seed + gateway))
        for _ in range(50):
            assign(dispatcher, isl_tokens=1000)
        total += spread(dispatcher, "agg")
    assert sum(total.values()) == 200
    assert max(total.values()) <= 120


def prompt(n_tokens: int) -> Prompt:
    return Prompt(np.arange(n_tokens, dtype="<u4").tobytes())


def test_score_09_work_is_what_is_not_cached() -> None:
    of = fleet("disagg", pools={"prefill": PROFILED})
    pool = of.pools["prefill"]
    assert pool.overlaps is not None
    index = pool.overlaps.index_of(32)
    holder = index.join()
    pool.overlaps.set_holder(0, holder, block_tokens=32)
    index.stored(holder, range(1, 25), None, prompt(768).tokens)
    dispatcher = Dispatcher(of, rng=rng())
    warm = take_now(dispatcher, ask(isl_tokens=1024), prompt(1024))
    assert warm.leases[Stage.PREFILL].row == 0
    assert warm.leases[Stage.PREFILL].work.prefill_tokens == 256
    excluded = ask(isl_tokens=1024, excluded=frozenset({"p1:1"}))
    cold = take_now(dispatcher, excluded, prompt(1024))
    assert cold.leases[Stage.PREFILL].work.prefill_tokens == 1024


def test_score_11_decode_gets_no_credit_for_a_prompt_it_served() -> None:
    of = fleet("disagg")
    dispatcher = Dispatcher(of, rng=rng())
    first = take_now(dispatcher, ask(isl_tokens=1024), prompt(1024))
    prefill, decode = first.members
    first.leases[Stage.PREFILL].prefill_done()
    first.release()
    decision = dispatcher.explain(ask(isl_tokens=1024), prompt(1024))
    by_worker = [
        {c.view.address: c.view.cached_tokens for c in choice.top()} for choice in decision.stages
    ]
    assert by_worker[0][prefill.address] == 1023  # the last token is always computed
    assert sum(by_worker[0].values()) == 1023
    assert set(by_worker[1].values()) == {0}
    assert decision.stages[0].winner is not None
    assert decision.stages[0].winner.view.address == prefill.address
    # By load alone: it is the other one's turn.
    assert decision.stages[1].winner is not None
    assert decision.stages[1].winner.view.address != decode.address
