"""Bypass of prefill workers: when a decode worker gets a request alone, and what that leaves to others."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet.pool import Lease
from slagate.pools.grid.grid import PriorityRule, Stage
from slagate.pools.inflight.demand import FIRST_SHARE, FIRST_TOKENS
from slagate.pools.inflight.engine_queue import Work
from slagate.proto import openengine_pb2 as oe
from slagate.router.receipts.feedback import _estimator
from slagate.router.request.errors import NoWorker, Overloaded
from slagate.router.request.sla import Sla
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.policy import Decision, choose_by_load
from slagate.router.scheduling.score import RoutingRequest
from slagate.router.scheduling.targets import AGG_ITL_SHARE
from slagate.router.scheduling.wait_queue import Assignment
from slagate.router.scheduling.words import explained
from support.builders import PROFILE, ask, config, fleet, rng, take_now

PROFILED = {"profile": PROFILE, "tp": 1}
ONLY_PROFILES = {"prefill": PROFILED, "decode": PROFILED}
BOTH = Sla(ttft_ms=400.0, itl_ms=30.0)
ISL = 1000


def worker(info: Mapping[str, bool] | None = None) -> oe.ServerInfo:
    """What a decode worker says that takes requests without a handoff, or says in `info`."""
    made = oe.ServerInfo()
    made.extra.update({"slagate_takes_whole_requests": True} if info is None else info)
    return made


def bypassing(
    mode: str = "auto",
    *,
    info: Mapping[str, bool] | None = None,
    decode: Mapping[str, Any] = PROFILED,
    prefill: Mapping[str, Any] | None = None,
    admission: str = "off",
) -> Fleet:
    """A fleet of two prefill and two decode workers with profiles."""
    pools = {"prefill": {**PROFILED, **(prefill or {})}, "decode": decode}
    made = fleet(pools=pools, scheduling={"bypass": mode, "admission": admission})
    for member in made.pools["decode"].members.values():
        member.set_server_info(worker(info))
    return made


def dispatcher(of: Fleet, **more: Any) -> Dispatcher:
    return Dispatcher(of, rng=rng(), now_s=lambda: 0.0, **more)


def asked(sla: Sla = BOTH, **more: Any) -> RoutingRequest:
    return ask(isl_tokens=ISL, sla=sla, **more)


def fill(of: Fleet, pool: str, work: Work) -> list[Lease]:
    """Put this work on every worker of a pool."""
    return [of.pools[pool].lease(row, work) for row in range(2)]


def stages(decision: Decision) -> list[tuple[str, str]]:
    return [(choice.stage.value, choice.pool) for choice in decision.stages]


ALONE = [("agg", "decode")]
BOTH_WAYS = [("prefill", "prefill"), ("decode", "decode")]
BUSY = Work(50_000, 3.0, 0)


def test_a_request_that_prefill_workers_would_miss_goes_to_a_decode_worker_alone() -> None:
    of = bypassing()
    fill(of, "prefill", BUSY)
    decision = dispatcher(of).explain(asked())
    assert stages(decision) == ALONE
    assert (decision.is_bypass, decision.is_met, decision.admission) == (True, True, "")
    assert [choice.stage for choice in decision.untaken] == [Stage.PREFILL, Stage.DECODE]
    assert decision.untaken[0].is_met is False
    text = explained(decision)
    assert (
        "It is predicted to meet its TTFT target of 400 ms and ITL target of 30 ms there." in text
    )
    why = "by prefill and decode it is predicted to miss its targets."
    assert text.endswith(f"It is a decode worker that computes the prompt too: {why}")


def test_with_bypass_off_nobody_goes_there() -> None:
    of = bypassing("off")
    fill(of, "prefill", BUSY)
    decision = dispatcher(of).explain(asked())
    assert (stages(decision), decision.untaken) == (BOTH_WAYS, ())


def test_where_both_ways_meet_the_targets_the_sooner_first_token_decides() -> None:
    of = bypassing()
    first = dispatcher(of).explain(asked())
    assert stages(first) == ALONE, "there is no transfer"
    assert first.stages[0].first_token_s < first.untaken[0].first_token_s
    assert "a TTFT of" in explained(first)
    fill(of, "decode", Work(1000, 0.1, 1000))
    second = dispatcher(of).explain(asked())
    assert stages(second) == BOTH_WAYS
    assert [choice.is_met for choice in (*second.stages, *second.untaken)] == [True] * 3
    assert second.untaken[0].first_token_s > second.stages[0].first_token_s


@pytest.mark.parametrize(
    "sla",
    [Sla(), Sla(ttft_ms=400.0), Sla(itl_ms=30.0), Sla(ttft_ms=400.0, itl_ms=0.1)],
    ids=["no target", "TTFT only", "ITL only", "ITL missed"],
)
def test_it_is_for_requests_with_both_targets_that_meet_both_there(sla: Sla) -> None:
    of = bypassing()
    fill(of, "prefill", BUSY)
    assert stages(dispatcher(of).explain(asked(sla))) == BOTH_WAYS


@pytest.mark.parametrize(
    "info", [{}, {"slagate_takes_whole_requests": False}], ids=["not known", "no"]
)
def test_a_worker_gets_none_that_does_not_say_it_takes_them(info: Mapping[str, bool]) -> None:
    of = bypassing(info=info)
    fill(of, "prefill", BUSY)
    decision = dispatcher(of).explain(asked())
    assert stages(decision) == BOTH_WAYS
    (alone,) = decision.untaken
    assert alone.row is None
    assert alone.reasons == {"does not say that it takes requests without a handoff"}


def test_of_workers_those_that_take_it_are_chosen_from_without_excluded_and_full_ones() -> None:
    of = bypassing()
    first, second = of.pools["decode"].members.values()
    fill(of, "prefill", BUSY)
    first.set_server_info(worker({}))
    assert dispatcher(of).explain(asked()).stages[0].worker == second.address
    excluded = asked(excluded=frozenset({second.address}))
    assert stages(dispatcher(of).explain(excluded)) == BOTH_WAYS
    second.ranks.table.set(1, capacity_tokens=1500)
    of.pools["decode"].lease(1, Work(context_tokens=1000))
    assert stages(dispatcher(of).explain(asked())) == BOTH_WAYS, "its KV cache has no room"


def test_a_pool_without_a_profile_serves_none_alone() -> None:
    of = bypassing(decode={})
    fill(of, "prefill", BUSY)
    assert stages(dispatcher(of).explain(asked())) == BOTH_WAYS


def test_whom_an_override_has_placed_in_a_prefill_pool_goes_there() -> None:
    of = bypassing()
    fill(of, "prefill", BUSY)
    grid = of.grids[Stage.PREFILL]
    rules = (PriorityRule(5, 9, 0),)
    of.grids = {**of.grids, Stage.PREFILL: dataclasses.replace(grid, rules=rules)}
    for priority, wanted in ((1, ALONE), (7, BOTH_WAYS)):
        sla = Sla(ttft_ms=400.0, itl_ms=30.0, priority=priority)
        assert stages(dispatcher(of).explain(asked(sla))) == wanted


def test_a_policy_that_goes_by_load_does_not_bypass() -> None:
    of = bypassing()
    fill(of, "prefill", BUSY)
    assert stages(dispatcher(of, choose=choose_by_load).explain(asked())) == BOTH_WAYS


def test_it_is_tried_before_a_request_is_refused() -> None:
    of = bypassing(admission="on")
    fill(of, "prefill", BUSY)
    taken = take_now(dispatcher(of), asked())
    assert list(taken.leases) == [Stage.AGG]
    fill(of, "decode", BUSY)
    with pytest.raises(Overloaded, match="prefill: it is predicted to miss its TTFT target"):
        take_now(dispatcher(of), asked())


def test_it_is_served_alone_where_no_prefill_worker_is_ready() -> None:
    of = bypassing()
    for member in of.pools["prefill"].members.values():
        for _ in range(5):
            member.probe_failed("gone")
    decision = dispatcher(of).explain(asked())
    assert stages(decision) == ALONE
    assert "no prefill worker can take it" in explained(decision)
    with pytest.raises(NoWorker):
        take_now(dispatcher(of), asked(Sla()))


def test_a_lease_counts_as_that_of_an_aggregated_worker_and_is_promised_both() -> None:
    of = bypassing()
    fill(of, "prefill", BUSY)
    taken = take_now(dispatcher(of), asked())
    (lease,) = taken.leases.values()
    work, rows = lease.work, of.pools["decode"].snapshot().rows
    answer_tokens = int(FIRST_TOKENS * FIRST_SHARE)
    assert (work.prefill_tokens, work.context_tokens) == (ISL, ISL + answer_tokens)
    assert work.work_s > 0.0
    assert work.due_s == pytest.approx(0.95 * 0.4)
    assert work.itl_limit_s == pytest.approx(AGG_ITL_SHARE * 0.030)
    assert 0.0 < work.stall_s < math.inf
    assert rows.floats("stall_room_s")[lease.row] == pytest.approx(work.stall_s)
    taken.release()
    rows = of.pools["decode"].snapshot().rows
    assert rows.floats("stall_room_s").tolist() == [math.inf, math.inf]
    assert (rows.load_s == 0.0).all()


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_answers_of_handed_over_requests_are_promised_how_long_prompts_may_stall_them(
    mode: str,
) -> None:
    of = bypassing(mode, info={})
    taken = take_now(dispatcher(of), asked())
    assert (taken.leases[Stage.DECODE].work.stall_s < math.inf) is (mode == "auto")


def test_no_prompt_goes_where_answers_could_not_bear_it() -> None:
    of = bypassing()
    fill(of, "prefill", BUSY)
    short = fill(of, "decode", Work(context_tokens=100, itl_limit_s=1.0, stall_s=0.001))
    decision = dispatcher(of).explain(asked())
    assert stages(decision) == BOTH_WAYS
    assert decision.untaken[0].is_met is False
    short[1].release()
    assert dispatcher(of).explain(asked()).stages[0].worker == short[1].member.address


def test_what_waits_for_a_prefill_worker_may_go_to_a_decode_worker_once_that_has_room() -> None:
    of = bypassing(prefill={"max_inflight": 1})
    fill(of, "prefill", Work(100, 0.01, 0))
    busy = fill(of, "decode", Work(50_000, 3.0, 100))
    with dispatcher(of).submit(asked()) as ticket:
        assert ticket.outcome is None
        assert not ticket.decision.is_bypass
        busy[0].release()
        assert isinstance(ticket.outcome, Assignment)
        assert list(ticket.outcome.leases) == [Stage.AGG]


def test_a_bypass_takes_no_decode_worker_that_an_older_request_waits_for() -> None:
    of = bypassing(decode={**PROFILED, "max_inflight": 1})
    fill(of, "prefill", BUSY)
    busy = fill(of, "decode", Work(context_tokens=100))
    of_both = dispatcher(of)
    with of_both.submit(asked(Sla())) as older, of_both.submit(asked()) as newer:
        assert (older.outcome, newer.outcome) == (None, None)
        busy[0].release()
        assert isinstance(older.outcome, Assignment)
        assert newer.outcome is None
        busy[1].release()
        assert isinstance(newer.outcome, Assignment)
        assert list(newer.outcome.leases) == [Stage.AGG]


def test_a_bypass_whose_pool_is_reserved_waits_for_both_stages() -> None:
    of = bypassing()
    fill(of, "prefill", BUSY)
    of_both = dispatcher(of)
    with of_both.submit(asked()) as ticket:
        assert isinstance(ticket.outcome, Assignment)
        ticket.outcome.release()
        ticket.outcome = None
        of_both._decide_again(ticket, {"decode"})
        assert ticket.outcome is None
        assert stages(ticket.decision) == BOTH_WAYS
        of_both._decide_again(ticket, set())
        assert isinstance(ticket.outcome, Assignment)
        assert stages(ticket.decision) == ALONE


def test_a_reload_switches_it_and_a_pool_of_the_same_profile_keeps_what_it_has_learnt() -> None:
    of = bypassing()
    pool = of.pools["decode"]
    whole = pool.whole
    assert whole is not None
    pool.set_estimator(pool.estimator, bypassed=True)
    assert pool.whole is whole
    pool.set_estimator(pool.estimator, bypassed=False)
    assert (pool.whole, pool.snapshot().whole) == (None, None)


@pytest.mark.parametrize("modes", [["auto"], ["off", "auto"], ["auto", "off", "auto"]])
def test_what_serves_whole_requests_learns_from_them_however_often_it_was_switched(
    modes: list[str],
) -> None:
    of = bypassing(modes[0])
    for mode in modes[1:]:
        of.apply(prepare(config(pools=ONLY_PROFILES, scheduling={"bypass": mode})))
    fill(of, "prefill", BUSY)
    choice = dispatcher(of).explain(asked()).stages[0]
    assert (choice.stage, choice.pool_stage) == (Stage.AGG, Stage.DECODE)
    pool, whole = of.pools["decode"], of.pools["decode"].whole
    assert whole is not None
    assert _estimator(choice, pool, of_prompt=True) is whole
    assert _estimator(choice, pool) is pool.estimator
