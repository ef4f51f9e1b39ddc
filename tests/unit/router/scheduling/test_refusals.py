"""Admission: who is refused for a prediction, and promises, which end with their leases."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
from typing_extensions import override

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet.pool import Lease
from slagate.pools.fleet_file.load import parse_config
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.demand import OWN_PROMPTS, RoomKeeper
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.row_view import State
from slagate.pools.inflight.worker_rows import Limits
from slagate.proto import openengine_pb2 as oe
from slagate.router.metrics import Metrics
from slagate.router.receipts.record import Record
from slagate.router.request.errors import RETRY_PUSHBACK, GatewayError, Outcome, Overloaded
from slagate.router.request.sla import Sla
from slagate.router.scheduling.dispatcher import MAX_PATIENT, Dispatcher
from slagate.router.scheduling.peers import PeerGateways
from slagate.router.scheduling.policy import NO_CONFIG, Decision
from slagate.router.scheduling.targets import AGG_ITL_SHARE, ITL_SHARE, TTFT_SHARE, drain_s
from slagate.router.scheduling.wait_queue import Assignment
from slagate.router.scheduling.words import explained
from slagate.workers.runtime.clock import monotonic_s
from support.builders import MODEL, PROFILE, ask, config, fleet, model_info, put_in, rng, take_now
from support.fleet.files import disagg_file

SPEED = {"profile": PROFILE, "tp": 1}
MISSED = 0.001
"""A TTFT target, milliseconds, that no worker meets."""

CLASSES = {
    "shed": {"ttft_ms": MISSED},
    "kept": {"ttft_ms": MISSED, "policy": "protect"},
    "behind": {"ttft_ms": MISSED, "policy": "relegate"},
    "easy": {"ttft_ms": 60_000},
    "untargeted": {},
}


def dispatcher(
    mode: str = "disagg",
    *,
    admission: str = "on",
    classes: object = None,
    now_s: Callable[[], float] = monotonic_s,
) -> Dispatcher:
    stages = ("prefill", "decode") if mode == "disagg" else ("agg",)
    made = fleet(
        mode,
        pools=dict.fromkeys(stages, SPEED),
        objectives=CLASSES if classes is None else classes,
        scheduling={"admission": admission},
    )
    return Dispatcher(made, rng=rng(), now_s=now_s)


def outcome(d: Dispatcher, sla: Sla) -> Assignment | GatewayError:
    with d.submit(ask(sla=sla), None) as ticket:
        assert ticket.outcome is not None
        return ticket.outcome


def inflight(of: Fleet) -> int:
    return sum(member.ranks.inflight for member in of.members())


@pytest.mark.parametrize("mode", ["disagg", "agg"])
def test_with_admission_on_who_is_shed_is_refused_and_holds_nothing(mode: str) -> None:
    d = dispatcher(mode)
    refused = outcome(d, Sla(objective="shed"))
    assert isinstance(refused, Overloaded)
    assert refused.status().code.name == "RESOURCE_EXHAUSTED"
    stage, only = ("prefill", "prefill") if mode == "disagg" else ("agg", "agg")
    assert str(refused) == (
        f"{stage}: it is predicted to miss its TTFT target of 0.001 ms"
        f" in every pool that it may use ({only}); no worker there would meet it with nothing else to do,"
        " so a retry is of no use"
    )
    assert inflight(d.fleet) == 0
    assert d.n_waiting == 0


def two_pools(*, spill: str, ttft_ms: int, policy: str = "shed", **more: Any) -> Dispatcher:
    """A grid whose cells have p-bulk, which has all of these seconds queued, beside p-fast."""
    content = disagg_file() | {
        "objectives": {
            "own": {"ttft_ms": ttft_ms, "policy": policy},
            "zero": {"ttft_ms": 0, "itl_ms": 0},
        },
        "scheduling": {"admission": "on", "spill": spill},
    }
    names = ("p-fast", "p-bulk", "d-fast", "d-bulk")
    content["pools"] = {name: {"workers": [f"{name}:1"], **SPEED} for name in names}
    content["prefill_pool_selection_strategy"] |= more
    made = Fleet(prepare(parse_config(content, source="f", serving=True)))
    for each in made.members():
        each.set_models({MODEL: model_info()})
        each.probe_ok()
    made.pools["p-bulk"].lease(0, Work(1000, 5.0, 0), None)
    return Dispatcher(made, rng=rng())


def full(d: Dispatcher, *names: str) -> None:
    """Put the workers of these pools at their limits."""
    for name in names:
        for member in d.fleet.pools[name].members.values():
            member.set_limits(Limits(max_inflight=0))
            member.set_server_info(oe.ServerInfo())


@pytest.mark.parametrize("policy", ["shed", "protect", "relegate"])
def test_a_pool_that_is_next_for_a_limit_is_judged_too(policy: str) -> None:
    """`p-fast` is next in the order of the cell, though load does not choose it."""
    d = two_pools(spill="none", ttft_ms=800, policy=policy)
    assert d.explain(ask(sla=Sla(objective="own"))).stages[0].scored[0].pool.name == "p-bulk"
    full(d, "p-bulk")
    taken = outcome(d, Sla(objective="own"))
    assert isinstance(taken, Assignment)
    choice = taken.decision.stages[0]
    assert (choice.pool, choice.is_met, taken.decision.admission) == ("p-fast", True, "")
    assert taken.leases[Stage.PREFILL].work.due_s < math.inf
    d.fleet.pools["p-fast"].lease(0, Work(1000, 60.0, 0), None)
    with d.submit(ask(sla=Sla(objective="own")), None) as ticket:
        choice = ticket.decision.stages[0]
        assert choice.is_met is False
        if policy == "shed":
            assert "in every pool that it may use (p-bulk, p-fast)" in str(ticket.outcome)
        elif policy == "protect":
            assert isinstance(ticket.outcome, Assignment)
            assert (choice.pool, ticket.decision.admission) == ("p-fast", "served")
        else:
            assert ticket.outcome is None
            assert ticket.decision.admission == "relegated"


def test_a_pool_that_is_next_for_a_limit_keeps_its_promises_and_its_room() -> None:
    d = two_pools(spill="none", ttft_ms=20_000)
    full(d, "p-bulk")
    pool = d.fleet.pools["p-fast"]
    pool.room = RoomKeeper()
    pool.room.note_ttft(2.0, 0.1)
    pool.room.add_busy(1000.0, pool._now_s())
    pool.lease(0, Work(1000, 5.0, 0), None)
    assert d.explain(ask(sla=Sla(objective="own"))).admission == "refused"


def test_pools_behind_those_with_room_are_not_looked_at() -> None:
    """Where a worker is below its limits load does not leave the pools that it chooses among."""
    d = two_pools(spill="none", ttft_ms=800)
    choice = d.explain(ask(sla=Sla(objective="own"))).stages[0]
    assert ([each.pool.name for each in choice.scored], choice.is_met) == (["p-bulk"], False)


def test_a_pool_that_is_next_for_a_limit_is_logged_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for spill, is_full, n_logged in (("none", True, 1), ("any", True, 1), ("any", False, 0)):
        d = two_pools(spill=spill, ttft_ms=800)
        if is_full:
            full(d, "p-bulk")
        caplog.clear()
        taken = outcome(d, Sla(objective="own"))
        assert isinstance(taken, Assignment)
        assert taken.decision.stages[0].pool == "p-fast"
        logged = [each.getMessage() for each in caplog.records]
        assert logged.count("request.spilled") == n_logged


BY_PRIORITY = [{"min_priority": 5, "max_priority": 9, "target_pool": 1}]


@pytest.mark.parametrize(
    ("spill", "priority", "why"),
    [
        ("none", None, "scheduling.spill is none"),
        ("listed", None, "its cell does not list that one, and scheduling.spill is listed"),
        ("any", 7, "a priority override has placed it"),
    ],
)
def test_who_is_refused_is_told_which_pool_would_meet_its_target(
    spill: str, priority: int | None, why: str
) -> None:
    d = two_pools(spill=spill, ttft_ms=800, priority_overrides=BY_PRIORITY)
    sla = Sla(objective="own", priority=priority)
    decision = d.explain(ask(sla=sla))
    choice = decision.stages[0]
    assert (choice.would_meet, choice.is_met, choice.pool) == (("p-fast",), False, "p-bulk")
    missed = (
        "t is predicted to miss its TTFT target of 800 ms in every pool that it may use (p-bulk);"
        f" pool p-fast would meet it, but {why}"
    )
    assert f"I{missed}." in explained(decision)
    refused = outcome(d, sla)
    assert isinstance(refused, Overloaded)
    assert str(refused) == f"prefill: i{missed}"


def test_where_no_pool_would_meet_it_that_is_said() -> None:
    d = two_pools(spill="none", ttft_ms=800)
    d.fleet.pools["p-fast"].lease(0, Work(1000, 5.0, 0), None)
    refused = outcome(d, Sla(objective="own"))
    assert "(p-bulk), and no other pool of the stage is predicted to meet it" in str(refused)
    anywhere = two_pools(spill="any", ttft_ms=800)
    anywhere.fleet.pools["p-fast"].lease(0, Work(1000, 5.0, 0), None)
    assert str(outcome(anywhere, Sla(objective="own"))).endswith("(p-bulk, p-fast)")


def test_a_target_of_0_is_admitted_by_the_upper_edge_of_its_cell() -> None:
    """The tightest cells of that file end at 500 ms and 25 ms, which an idle worker meets."""
    for sla in (Sla(ttft_ms=0.0, itl_ms=0.0), Sla(objective="zero")):
        d = two_pools(spill="listed", ttft_ms=800)
        taken = outcome(d, sla)
        assert isinstance(taken, Assignment)
        prefill, decode = taken.decision.stages
        assert [(each.cell.index, each.pool) for each in (prefill, decode)] == [
            ((0, 0), "p-fast"),
            ((0, 0), "d-fast"),
        ]
        assert [(each.targets[0].ms, each.is_met) for each in (prefill, decode)] == [
            (500.0, True),
            (25.0, True),
        ]
        source = "of its class " if sla.objective else ""
        told = f"TTFT target {source}0 (judged as 500 ms, the upper edge of its cell)"
        assert told in explained(taken.decision)
        d.fleet.pools["p-fast"].lease(0, Work(1000, 0.6, 0), None)
        assert "TTFT target of 500 ms" in str(outcome(d, sla))


def test_a_target_of_0_is_judged_so_on_an_aggregated_worker_too() -> None:
    made = fleet("agg", pools={"agg": SPEED}, scheduling={"admission": "on"})
    taken = outcome(Dispatcher(made, rng=rng()), Sla(ttft_ms=0.0, itl_ms=0.0))
    assert isinstance(taken, Assignment)
    (choice,) = taken.decision.stages
    assert [target.ms for target in choice.targets] == [900.0, 45.0]
    assert taken.decision.is_met is True


def test_a_retry_is_served_late_rather_than_refused() -> None:
    d = dispatcher()
    assert isinstance(outcome(d, Sla(objective="shed")), Overloaded)
    retried = outcome(d, Sla(ttft_ms=MISSED, objective="shed", is_final=True))
    assert isinstance(retried, Assignment)
    assert retried.decision.admission == "served"


def test_a_retry_does_not_change_what_became_of_the_arrival() -> None:
    d = dispatcher()
    met = outcome(d, Sla(objective="easy"))
    missed = outcome(d, Sla(ttft_ms=MISSED, objective="shed", is_final=True))
    assert isinstance(met, Assignment)
    assert isinstance(missed, Assignment)
    assert (met.decision.admission, missed.decision.admission) == ("", "served")
    met.adopt(missed)
    assert (met.decision.is_met, met.decision.admission) == (False, "")


@pytest.mark.parametrize("objective", ["kept", "behind", "easy", "untargeted"])
def test_no_other_class_is_refused(objective: str) -> None:
    assert isinstance(outcome(dispatcher(), Sla(objective=objective)), Assignment)


@pytest.mark.parametrize("admission", ["off", "shadow"])
def test_in_another_mode_nobody_is_refused(admission: str) -> None:
    d = dispatcher(admission=admission)
    assert isinstance(outcome(d, Sla(objective="shed")), Assignment)
    d.set_admission("on")
    assert isinstance(outcome(d, Sla(objective="shed")), Overloaded)
    d.set_admission("off")
    assert isinstance(outcome(d, Sla(objective="shed")), Assignment)


@pytest.mark.parametrize("mode", ["disagg", "agg"])
def test_an_idle_pool_to_which_nobody_is_sent_is_sent_one_of_those_that_it_refuses(
    mode: str,
) -> None:
    """Its profile may be of a slower machine, and from refusals nothing is learnt."""
    now = [0.0]
    d = dispatcher(mode, now_s=lambda: now[0])
    told = []
    for at in range(0, 60, 2):
        now[0] = float(at)
        explained_as = d.explain(ask(sla=Sla(objective="shed"))).admission
        found = outcome(d, Sla(objective="shed"))
        assert explained_as == ("served" if isinstance(found, Assignment) else "refused")
        if isinstance(found, Assignment):
            told.append(at)
            assert found.decision.ask.admission_mode == "learn"
            assert "too few requests to learn from" in explained(found.decision)
            found.release()
    # Each time it is refused first, and then for as long as nobody is sent there.
    assert told == [10, 22, 34, 46, 58]
    # Not while others are sent there.
    for at in range(100, 160, 4):
        now[0] = float(at)
        easy = outcome(d, Sla(objective="easy"))
        assert isinstance(easy, Assignment)
        easy.release()
        assert isinstance(outcome(d, Sla(objective="shed")), Overloaded)


def test_a_busy_worker_is_sent_nobody_that_it_refuses() -> None:
    now = [0.0]
    d = one_worker(now_s=lambda: now[0])
    busy = outcome(d, Sla(objective="easy"))
    assert isinstance(busy, Assignment)
    for at in (0.0, 20.0, 40.0):
        now[0] = at
        assert isinstance(outcome(d, Sla(objective="shed")), Overloaded)


def test_a_target_of_its_own_is_judged_as_its_class_says_or_else_shed() -> None:
    d = dispatcher()
    assert isinstance(outcome(d, Sla(ttft_ms=MISSED)), Overloaded)
    assert isinstance(outcome(d, Sla(ttft_ms=MISSED, objective="kept")), Assignment)
    assert isinstance(outcome(d, Sla(ttft_ms=60_000.0, objective="shed")), Assignment)
    any_class = dispatcher(classes={"*": {"policy": "protect"}})
    assert isinstance(outcome(any_class, Sla(ttft_ms=MISSED)), Assignment)
    assert isinstance(outcome(any_class, Sla()), Assignment)


def test_what_is_only_explained_is_not_refused() -> None:
    decision = dispatcher().explain(ask(sla=Sla(objective="shed")))
    assert decision.is_met is False


def promises(lease: Lease) -> dict[str, float]:
    table = lease.member.ranks.table
    names = ("itl_limit_s", "stall_room_s", "join_slack_s", "join_quiet_s", "queued_s")
    figures = {name: table.get_s(name, lease.row) for name in names}
    return figures | {"join_tokens": table.get("join_tokens", lease.row)}


NOTHING = {
    "itl_limit_s": math.inf,
    "stall_room_s": math.inf,
    "join_slack_s": math.inf,
    "join_quiet_s": math.inf,
    "queued_s": 0.0,
    "join_tokens": 0,
}


@pytest.mark.parametrize("mode", ["disagg", "agg"])
@pytest.mark.parametrize("prefilled", [0, 1, 2], ids=["during prefill", "after it", "said twice"])
@pytest.mark.parametrize("n_releases", [1, 2])
def test_a_promise_ends_with_its_lease(mode: str, prefilled: int, n_releases: int) -> None:
    d = dispatcher(mode)
    for member in d.fleet.members():
        for row in member.ranks.rows:
            member.ranks.table.set_step_tokens(row, 8192)
    assignment = take_now(d, ask(sla=Sla(ttft_ms=60_000.0, itl_ms=50.0)))
    assert assignment.decision.is_met is True
    leases = list(assignment.leases.values())
    first, last = promises(leases[0]), promises(leases[-1])
    assert first["join_slack_s"] < math.inf
    assert first["queued_s"] > 0.0
    share = AGG_ITL_SHARE if mode == "agg" else ITL_SHARE
    assert last["itl_limit_s"] == pytest.approx(share * 0.05)
    assert (last["stall_room_s"] < math.inf) == (mode == "agg")
    for lease in leases:
        for _ in range(prefilled if lease.member.stage is not Stage.DECODE else 0):
            lease.prefill_done()
        for _ in range(n_releases):
            lease.release()
        assert promises(lease) == NOTHING
    assert inflight(d.fleet) == 0


def test_who_is_predicted_to_miss_is_promised_nothing() -> None:
    d = dispatcher("agg", admission="off")
    assignment = take_now(d, ask(sla=Sla(ttft_ms=MISSED, itl_ms=0.001)))
    (lease,) = assignment.leases.values()
    assert (lease.work.due_s, lease.work.itl_limit_s, lease.work.stall_s) == (math.inf,) * 3


def one_worker(*, now_s: Callable[[], float] = monotonic_s, **more: Any) -> Dispatcher:
    """The same with one prefill worker and one decode worker."""
    only = {"prefill": ["p1:1"], "decode": ["d1:1"]}
    limits = {"max_inflight": more.pop("max_inflight")} if "max_inflight" in more else {}
    pools = {stage: {**SPEED, **limits, "workers": workers} for stage, workers in only.items()}
    made = fleet(pools=pools, **({"objectives": CLASSES, "scheduling": {"admission": "on"}} | more))
    return Dispatcher(made, rng=rng(), now_s=now_s)


def test_a_relegated_request_waits_until_a_worker_has_nothing_else_to_do() -> None:
    d = one_worker()
    first, second = outcome(d, Sla(objective="easy")), None
    assert isinstance(first, Assignment)
    with d.submit(ask(sla=Sla(objective="behind")), None) as ticket:
        assert ticket.outcome is None
        assert d.n_waiting == 1
        # All others go first, and nothing is kept from them.
        second = outcome(d, Sla(objective="easy"))
        assert isinstance(second, Assignment)
        first.release()
        assert ticket.outcome is None
        second.release()
        assert isinstance(ticket.outcome, Assignment)
        assert ticket.decision.admission == "relegated"
        assert "waits until a worker has nothing else to do" in explained(ticket.decision)
        ticket.outcome.release()
    assert d.n_waiting == 0


def at_rest(
    mode: str = "disagg", now_s: Callable[[], float] = lambda: 0.0, **classes: dict[str, object]
) -> Dispatcher:
    """Where the clock stands still, so that queues stay as they are; or is the test's for who waits."""
    stages = ("prefill", "decode") if mode == "disagg" else ("agg",)
    modes = {"admission": "on"}
    file = config(mode, pools=dict.fromkeys(stages, SPEED), objectives=classes, scheduling=modes)
    made = Fleet(prepare(file), now_s=lambda: 0.0)
    for each in made.members():
        each.set_models({MODEL: model_info()})
        each.probe_ok()
    return Dispatcher(made, rng=rng(), now_s=now_s)


def hints(d: Dispatcher, sla: Sla, n: int = 20, **more: Any) -> list[int]:
    """The retry delays of as many refusals, milliseconds."""
    found = []
    for _ in range(n):
        with d.submit(ask(sla=sla, **more), None) as ticket:
            assert isinstance(ticket.outcome, Overloaded)
            found.append(int(dict(ticket.outcome.status().trailers)[RETRY_PUSHBACK]))
    return found


def check_spread(found: list[int], about_s: float) -> None:
    """Within a quarter of it, on both sides, and hardly any two alike."""
    assert 0.75 * about_s <= min(found) / 1000 + 1e-3
    assert min(found) < 1000 * about_s < max(found) <= 1250 * about_s
    assert len(set(found)) > len(found) / 2


@pytest.mark.parametrize("queued_s", [0.05, 0.5, 5.0, 25.0, 60.0, 1000.0])
def test_a_retry_delay_is_when_the_shortest_queue_fits(queued_s: float) -> None:
    """Also at its bounds, of 0.1 s and 30 s, those who were refused do not come back at once."""
    idle = at_rest(own={"ttft_ms": 60_000}).explain(ask(sla=Sla(objective="own")))
    own_s = idle.stages[0].first_token_s
    d = at_rest(own={"ttft_ms": 1010 * own_s / TTFT_SHARE})
    for row, more_s in enumerate([queued_s, 2 * queued_s]):
        d.fleet.pools["prefill"].lease(row, Work(10_000, 0.01 * own_s + more_s, 0))
    check_spread(hints(d, Sla(objective="own")), min(max(queued_s, 0.1), 30.0))


def test_a_retry_delay_for_itl_is_when_so_many_answers_have_ended_that_it_fits() -> None:
    d = at_rest(own={"itl_ms": 12})
    of = d.fleet.pools["decode"]
    leases = [of.lease(row, Work(0, 0.0, 4000)) for row in (0, 1) for _ in range(60)]
    choice = d.explain(ask(sla=Sla(objective="own"))).stages[-1]
    itl_s, n_tokens = choice.won.itl_s, d.fleet.answers.short_tokens("")
    assert itl_s is not None
    n_ended = 0
    while d.explain(ask(sla=Sla(objective="own"))).is_met is False:
        leases[n_ended].release()
        n_ended += 1
    assert n_ended > 5
    for number in range(n_ended):
        of.lease(0, leases[number].work)
    # All 60 end in the time of one answer; by batches steps become longer about as on a straight line.
    about_s = drain_s(choice.scored, (), answer_tokens=n_tokens)
    assert about_s == pytest.approx(n_ended / 60 * n_tokens * itl_s.item(0), rel=0.1)
    check_spread(hints(d, Sla(objective="own")), about_s)


def test_a_retry_delay_is_that_of_the_stage_that_takes_longest() -> None:
    d = at_rest(own={"ttft_ms": 500, "itl_ms": 12})
    for row in (0, 1):
        for _ in range(60):
            d.fleet.pools["decode"].lease(row, Work(0, 0.0, 4000))
    before = hints(d, Sla(objective="own"))
    assert max(before) < 5000
    for row in (0, 1):
        d.fleet.pools["prefill"].lease(row, Work(10_000, 20.0, 0))
    assert min(hints(d, Sla(objective="own"))) > 10_000


def test_room_that_is_kept_is_waited_for_until_a_queue_or_an_answer_ends() -> None:
    d = at_rest(own={"ttft_ms": 10_000, "itl_ms": 50})
    prefill, decode = d.fleet.pools["prefill"], d.fleet.pools["decode"]
    prefill.room, decode.room = RoomKeeper(), RoomKeeper()
    prefill.room.note_ttft(2.0, 0.1)
    prefill.room.add_busy(100.0, 0.0)
    for row, queued_s in enumerate([4.0, 7.0]):
        prefill.lease(row, Work(10_000, queued_s, 0))
    check_spread(hints(d, Sla(objective="own")), 4.0)
    prefill.room = None
    itl_s = d.explain(ask(sla=Sla(objective="own"))).stages[-1].won.itl_s
    assert itl_s is not None
    decode.room.note_itl(0.5 * itl_s.item(0), 0.0)
    decode.room.add_busy(100.0, 0.0)
    check_spread(hints(d, Sla(objective="own")), d.fleet.answers.short_tokens("") * itl_s.item(0))


@pytest.mark.parametrize(
    "targets", [{"ttft_ms": 10.0}, {"itl_ms": 0.1}, {"ttft_ms": 10.0, "itl_ms": 50.0}], ids=str
)
@pytest.mark.parametrize("mode", ["disagg", "agg"])
def test_who_would_fit_on_no_idle_worker_is_told_not_to_come_back(
    mode: str, targets: dict[str, float]
) -> None:
    """By a negative pushback, as gRPC has it; also where others are served."""
    d = at_rest(mode)
    assert set(hints(d, Sla(**targets), isl_tokens=7000)) == {-1}
    for pool in d.fleet.pools.values():
        for row in (0, 1):
            pool.lease(row, Work(1000, 1.0, 4000))
    assert set(hints(d, Sla(**targets), isl_tokens=7000)) == {-1}
    refused = d.submit(ask(isl_tokens=7000, sla=Sla(**targets)), None).outcome
    assert str(refused).endswith("with nothing else to do, so a retry is of no use")


def test_who_would_fit_on_idle_decode_workers_is_told_to_come_back() -> None:
    """What it waits for there is the first decode step."""
    idle = at_rest(own={"ttft_ms": 60_000}).explain(ask(sla=Sla(objective="own")))
    d = at_rest(own={"ttft_ms": 1001 * idle.stages[0].first_token_s / TTFT_SHARE})
    for row in (0, 1):
        for _ in range(100):
            d.fleet.pools["decode"].lease(row, Work(0, 0.0, 4000))
    assert min(hints(d, Sla(objective="own"))) > 0


def with_limit(stage: str, clock: list[float], **more: Any) -> Dispatcher:
    """With one request that holds the only worker of a stage, below whose limit there is no more."""
    names = {"prefill": "p", "decode": "d"} if stage != "agg" else {"agg": "a"}
    pools = {name: SPEED | {"workers": [f"{at}:1"]} for name, at in names.items()}
    pools[stage] |= {"max_inflight": 1}
    mode = "agg" if stage == "agg" else "disagg"
    classes = {"own": {"ttft_ms": 300}, "bulk": {"ttft_ms": 300, "policy": "relegate"}}
    classes["kept"] = {"ttft_ms": 300, "policy": "protect"}
    modes = more.pop("scheduling", {"admission": "on"})
    made = Fleet(
        prepare(config(mode, pools=pools, objectives=classes, scheduling=modes, **more)),
        now_s=lambda: clock[0],
    )
    for each in made.members():
        each.set_models({MODEL: model_info()})
        each.probe_ok()
    return Dispatcher(made, rng=rng(), now_s=lambda: clock[0])


def test_a_miss_is_refused_whatever_another_stage_waits_for() -> None:
    clock = [0.0]
    d = with_limit("decode", clock)
    held = d.fleet.pools["decode"].lease(0, Work(0, 0.0, 4000))
    for _ in range(2):  # the second time with somebody before it
        queued = d.fleet.pools["prefill"].lease(0, Work(10_000, 60.0, 0))
        assert d.explain(ask(sla=Sla(objective="own"))).admission == "refused"
        refused = outcome(d, Sla(objective="own"))
        assert isinstance(refused, Overloaded)
        assert "prefill: it is predicted to miss" in str(refused)
        queued.release()
        d.submit(ask(sla=Sla()), None)
    assert d.n_waiting == 2
    held.release()
    assert d.n_waiting == 1


LARGE = 60_000
"""Tokens of a prompt that makes others late whose step it joins; its class has time."""


def all_promised(now_s: Callable[[], float] = lambda: 0.0) -> tuple[Dispatcher, list[Lease]]:
    """A dispatcher, and a lease on each prefill worker of who has no time for a longer step."""
    d = at_rest(now_s=now_s, own={"ttft_ms": 60_000}, gold={"ttft_ms": 9000, "policy": "protect"})
    prefill = d.fleet.pools["prefill"]
    set_limits(d)
    return d, [prefill.lease(row, Work(100, 0.01, 0, 0.02)) for row in (0, 1)]


def set_limits(d: Dispatcher, max_inflight: int | None = None) -> None:
    """Of prefill workers, which compute 8,192 tokens in a step."""
    for member in d.fleet.pools["prefill"].members.values():
        member.set_limits(Limits(max_inflight=max_inflight))
        member.set_server_info(
            oe.ServerInfo(capacity=oe.DeploymentCapacity(max_batched_tokens=8192))
        )


def test_who_would_only_harm_others_waits_until_it_does_not() -> None:
    d, (first, _) = all_promised()
    with d.submit(ask(isl_tokens=LARGE, sla=Sla(objective="own")), None) as ticket:
        assert (ticket.outcome, d.n_waiting) == (None, 1)
        assert ticket.decision.admission == d.explain(ticket.ask).admission == "waits"
        assert "It waits while it would make others late" in explained(ticket.decision)
        for name in ("own", "gold"):
            small = outcome(d, Sla(objective=name))
            assert isinstance(small, Assignment), "nothing is kept from those behind it"
            small.release()
        first.release()
        assert isinstance(ticket.outcome, Assignment)
        assert (ticket.outcome.decision.admission, d.n_waiting) == ("", 0)


def test_it_waits_no_longer_than_it_can_meet_its_target() -> None:
    now = [0.0]
    d, leases = all_promised(now_s=lambda: now[0])
    with d.submit(ask(isl_tokens=LARGE, sla=Sla(objective="own")), None) as ticket:
        for at, has_time in ((5.0, True), (30.0, True), (56.9, False)):
            now[0] = at
            d.step()
            assert (ticket.outcome is None) is has_time
        assert isinstance(ticket.outcome, Overloaded)
        assert ticket.decision.admission == "refused"
    assert d.n_waiting == 0
    for lease in leases:
        lease.release()


@pytest.mark.parametrize("mode", ["off", "shadow"])
def test_nobody_waits_so_where_nobody_is_refused(mode: Any) -> None:
    d, _ = all_promised()
    d.set_admission(mode)
    found = d.submit(ask(isl_tokens=LARGE, sla=Sla(objective="own")), None).outcome
    assert isinstance(found, Assignment)
    assert found.decision.admission == "served", "it would not be refused either"


def test_who_has_no_ttft_target_or_misses_it_anyway_is_refused_at_once() -> None:
    d, _ = all_promised()
    assert isinstance(outcome(d, Sla(ttft_ms=1.0)), Overloaded)
    only_itl = at_rest("agg", own={"itl_ms": 1000})
    pool = only_itl.fleet.pools["agg"]
    for row in (0, 1):
        pool.lease(row, Work(0, 0.0, 100, itl_limit_s=0.0001))
    assert isinstance(outcome(only_itl, Sla(objective="own")), Overloaded)


def test_so_many_wait_not_to_harm_others_also_after_another_mode_or_limit() -> None:
    d, _ = all_promised()
    set_limits(d, 1)
    with ExitStack() as stack:
        tickets = [
            stack.enter_context(d.submit(ask(isl_tokens=LARGE, sla=Sla(objective="own")), None))
            for _ in range(MAX_PATIENT + 10)
        ]
        assert d.n_waiting == len(tickets)
        d.set_admission("shadow")
        set_limits(d)
        assert d.n_waiting == 0, "in shadow all are served"
    for ticket in tickets:
        assert isinstance(ticket.outcome, Assignment)
        ticket.outcome.release()
    d, _ = all_promised()
    with ExitStack() as stack:
        for _ in range(MAX_PATIENT):
            stack.enter_context(d.submit(ask(isl_tokens=LARGE, sla=Sla(objective="own")), None))
        file = config(
            pools=dict.fromkeys(("prefill", "decode"), SPEED),
            objectives={"own": {"ttft_ms": 60_000}},
            scheduling={"admission": "on"},
        )
        d.put_in_force(prepare(file), NO_CONFIG)
        assert d.n_waiting == MAX_PATIENT
        over = d.submit(ask(isl_tokens=LARGE, sla=Sla(objective="own")), None)
        assert isinstance(over.outcome, Overloaded)
        assert over.decision.admission == "refused"
        assert "so it is refused" in explained(over.decision)
    assert d.n_waiting == 0


@pytest.mark.parametrize("n_large", [1, 2, 3])
def test_who_waits_for_a_limit_and_then_not_to_harm_others_keeps_nobody_behind_it(
    n_large: int,
) -> None:
    d, _ = all_promised()
    set_limits(d, 1)
    with ExitStack() as stack:
        *large, small = (
            stack.enter_context(d.submit(ask(isl_tokens=n, sla=Sla(objective="own")), None))
            for n in [LARGE] * n_large + [10]
        )
        assert d.n_waiting == n_large + 1
        set_limits(d)
        assert {(each.outcome, each.decision.admission) for each in large} == {(None, "waits")}
        assert isinstance(small.outcome, Assignment)
        small.outcome.release()
        gold = outcome(d, Sla(objective="gold"))
        assert isinstance(gold, Assignment)


def test_who_waits_is_refused_once_it_is_predicted_to_miss() -> None:
    clock = [0.0]
    d = with_limit("decode", clock)
    held = d.fleet.pools["decode"].lease(0, Work(0, 0.0, 4000))
    waits = d.submit(ask(sla=Sla(objective="own")), None)
    other = d.submit(ask(sla=Sla()), None)
    assert waits.outcome is other.outcome is None
    d.fleet.pools["prefill"].lease(0, Work(10_000, 60.0, 0))
    d.step()
    assert isinstance(waits.outcome, Overloaded)
    assert (other.outcome, d.n_waiting) == (None, 1)
    held.release()
    assert isinstance(other.outcome, Assignment)


@pytest.mark.parametrize("stage", ["prefill", "decode", "agg"])
@pytest.mark.parametrize("objective", ["own", "kept", "bulk"])
def test_who_waits_is_refused_once_its_time_to_the_first_token_has_passed(
    stage: str, objective: str
) -> None:
    """Where no worker is below its limit nothing is predicted, but this is certain."""
    clock = [0.0]
    d = with_limit(stage, clock)
    lease = d.fleet.pools[stage].lease(0, Work(0, 0.0, 4000))
    tickets = [d.submit(ask(sla=Sla(objective=objective)), None) for _ in range(3)]
    for clock[0] in (0.1, 0.2):
        d.step()
        assert [each.outcome for each in tickets] == [None] * 3
    clock[0] = 0.301
    d.step()
    if objective == "own":
        assert all(isinstance(each.outcome, Overloaded) for each in tickets)
        assert {each.decision.admission for each in tickets} == {"refused"}
        assert d.n_waiting == 0
        for each in tickets:
            assert "is predicted to miss its TTFT target of 300 ms" in str(each.outcome)
            assert isinstance(each.outcome, Overloaded)
            assert each.outcome.retry_after_ms >= 750
        return
    assert [each.outcome for each in tickets] == [None] * 3
    became = "served" if objective == "kept" else "relegated"
    assert tickets[0].decision.admission == became
    lease.release()
    assert isinstance(tickets[0].outcome, Assignment)


def test_so_is_who_waits_behind_others_and_each_is_decided_for_that_once() -> None:
    clock, decided = [0.0], [0]
    d = with_limit("prefill", clock)
    lease = d.fleet.pools["prefill"].lease(0, Work(0, 0.0, 4000))
    names = ["", "own", "kept", "own", "kept", ""]
    tickets = [d.submit(ask(sla=Sla(objective=name)), None) for name in names]
    choose = d._choose_workers

    def counted(*args: Any, **more: Any) -> Decision:
        decided[0] += 1
        return choose(*args, **more)

    d._choose_workers = counted
    clock[0] = 0.301
    for n_decided in (5, 6, 7):  # the first of the line each time
        d.step()
        assert decided[0] == n_decided
        refused = [isinstance(each.outcome, Overloaded) for each in tickets]
        assert refused == [name == "own" for name in names]
        assert d.n_waiting == 4
    assert [each.decision.admission for each in tickets[1:5]] == ["refused", "served"] * 2
    lease.release()
    assert isinstance(tickets[0].outcome, Assignment)
    assert tickets[2].outcome is None


@pytest.mark.parametrize("admission", ["off", "shadow"])
def test_without_admission_who_waits_is_not_refused(admission: str) -> None:
    clock = [0.0]
    d = with_limit("prefill", clock, scheduling={"admission": admission})
    lease = d.fleet.pools["prefill"].lease(0, Work(0, 0.0, 4000))
    ticket = d.submit(ask(sla=Sla(objective="own")), None)
    clock[0] = 1.0
    d.step()
    assert ticket.outcome is None
    lease.release()
    assert isinstance(ticket.outcome, Assignment)


def test_refusals_of_who_waits_do_not_count_as_turns() -> None:
    """The next one is told how fast workers get free, not how fast others gave up."""
    clock = [0.0]
    d = with_limit("prefill", clock)
    queue = d._queue
    lease = d.fleet.pools["prefill"].lease(0, Work(0, 0.0, 4000))
    served = [d.submit(ask(sla=Sla()), None) for _ in range(8)]
    for at in range(6):
        clock[0] = 2.0 * at
        lease.release()
        found = served[at].outcome
        assert isinstance(found, Assignment)
        lease = found.leases[Stage.PREFILL]
    assert queue.turn_s(served[-1]) == pytest.approx(2.0 * 3)
    late = [d.submit(ask(sla=Sla(objective="own")), None) for _ in range(8)]
    for each in served[6:]:
        with each:
            pass
    clock[0] += 1.0
    d.step()
    assert all(isinstance(each.outcome, Overloaded) for each in late)
    with d.submit(ask(sla=Sla()), None) as last:
        assert queue.turn_s(last) == pytest.approx(2.0 * 2)


def test_a_relegated_request_is_counted_also_where_it_ends_while_it_waits() -> None:
    d = one_worker()
    assert isinstance(outcome(d, Sla(objective="easy")), Assignment)
    with d.submit(ask(sla=Sla(objective="behind")), None) as ticket:
        assert ticket.outcome is None
    assert d.n_waiting == 0
    assert (ticket.decision.admission, ticket.decision.class_name) == ("relegated", "behind")
    metrics, record = Metrics(), Record(0.0, decision=ticket.decision)
    metrics.measure(record, Outcome.CANCELLED, record.latencies())
    labels = {"class": "behind", "admission": "relegated"}
    name = "slagate_predicted_misses_total"
    assert metrics.registry.get_sample_value(name, labels) == 1.0


class Elsewhere(PeerGateways):
    """Another gateway, in which so many wait, and so many of them are relegated."""

    def __init__(self, n_waiting: int, n_relegated: int) -> None:
        super().__init__()
        self.waits, self.waits_last = n_waiting, n_relegated
        self.shown = (0, 0)

    @property
    @override
    def n_waiting(self) -> int:
        return self.waits

    @property
    @override
    def n_relegated(self) -> int:
        return self.waits_last

    @override
    def show_waiting(self, n_requests: int, n_last: int, oldest_s: Mapping[str, float]) -> None:
        self.shown = (n_requests, n_last)


@pytest.mark.parametrize("elsewhere", [(0, 0), (2, 0), (5, 5), (4, 3)])
def test_relegated_requests_take_no_place_of_others_that_wait(elsewhere: tuple[int, int]) -> None:
    """As many of both may wait."""
    only = {"prefill": ["p1:1"], "decode": ["d1:1"]}
    pools = {stage: SPEED | {"workers": workers} for stage, workers in only.items()}
    pools["decode"] |= {"max_inflight": 1}
    peers = Elsewhere(*elsewhere)
    peers.n_peers = 1
    d = Dispatcher(
        fleet(pools=pools, objectives=CLASSES, scheduling={"admission": "on"}),
        rng=rng(),
        max_waiting=6,
        peers=peers,
    )
    assert isinstance(outcome(d, Sla(objective="easy")), Assignment)
    n_all, n_relegated = elsewhere
    with ExitStack() as stack:

        def wait(objective: str) -> GatewayError | Assignment | None:
            sla = Sla(objective=objective)
            return stack.enter_context(d.submit(ask(sla=sla), None)).outcome

        for _ in range(6 - n_relegated):
            assert wait("behind") is None
        assert "and 6 requests wait already" in str(wait("behind"))
        for _ in range(6 - (n_all - n_relegated)):
            assert wait("easy") is None
        assert "and 6 requests wait already" in str(wait("kept"))
        assert peers.shown == (12 - n_all, 6 - n_relegated)
    assert peers.shown == (0, 0)


@pytest.mark.parametrize("admission", ["off", "shadow"])
def test_without_admission_a_relegated_request_is_served_at_once(admission: str) -> None:
    d = one_worker(scheduling={"admission": admission})
    assert isinstance(outcome(d, Sla(objective="easy")), Assignment)
    behind = outcome(d, Sla(objective="behind"))
    assert isinstance(behind, Assignment)
    assert behind.decision.admission == "served"


def test_a_relegated_request_that_has_failed_waits_no_more() -> None:
    d = one_worker()
    assert isinstance(outcome(d, Sla(objective="easy")), Assignment)
    again = outcome(d, Sla(ttft_ms=MISSED, objective="behind", is_final=True))
    assert isinstance(again, Assignment)
    assert again.decision.admission == "served"


def test_who_waits_as_relegated_is_served_once_admission_is_off() -> None:
    d = one_worker()
    assert isinstance(outcome(d, Sla(objective="easy")), Assignment)
    with d.submit(ask(sla=Sla(objective="behind")), None) as ticket:
        assert ticket.outcome is None
        d.set_admission("off")
        assert isinstance(ticket.outcome, Assignment)
        ticket.outcome.release()


def test_the_pools_learn_what_a_protected_request_needs() -> None:
    classes = {"gold": {"ttft_ms": 60_000, "itl_ms": 50, "policy": "protect"}, "easy": {}}
    d = one_worker(objectives=classes)
    assert all(pool.room is None for pool in d.fleet.pools.values())
    assert isinstance(outcome(d, Sla(objective="easy")), Assignment)
    assert all(pool.room is None for pool in d.fleet.pools.values())
    with d.submit(ask(isl_tokens=50_000, sla=Sla(objective="gold"))) as ticket:
        assert isinstance(ticket.outcome, Assignment)
    prefill, decode = (pool.snapshot().kept for pool in d.fleet.pools.values())
    assert prefill is not None
    assert decode is not None
    assert prefill.n_rows == decode.n_rows == 1
    assert 50.0 < prefill.ttft_s < 60.0 * TTFT_SHARE
    assert decode.itl_s == pytest.approx(0.05 * ITL_SHARE)
    assert prefill.itl_s == decode.ttft_s == math.inf


def test_a_retry_keeps_no_more_room_than_the_request_did() -> None:
    d = one_worker(objectives={"gold": {"ttft_ms": 60_000, "policy": "protect"}})

    def kept_after(sla: Sla) -> list[tuple[float, float, float]]:
        with d.submit(ask(isl_tokens=50_000, sla=sla)) as ticket:
            assert isinstance(ticket.outcome, Assignment)
            ticket.outcome.release()
            sla = ticket.decision.ask.sla
        rooms = [pool.room for pool in d.fleet.pools.values()]
        return [(r._busy_s, r._ttft_s, r._itl_s) for r in rooms if r is not None]

    learnt = kept_after(Sla(objective="gold"))
    assert learnt
    assert kept_after(Sla(ttft_ms=60_000, objective="gold", is_final=True)) == learnt


@pytest.mark.parametrize("state", [State.NOT_READY, State.LEFT])
def test_room_is_kept_by_the_speed_of_workers_that_can_be_chosen(state: State) -> None:
    d = dispatcher("agg", classes={"gold": {"ttft_ms": 60_000, "policy": "protect"}})
    pool = d.fleet.pools["agg"]
    fast, _ = pool.members.values()
    pool.table.set_s(0, pace=0.25)
    if state is State.LEFT:
        pool.drain(fast.address)
    else:
        put_in(fast, state)
    with d.submit(ask(isl_tokens=50_000, sla=Sla(objective="gold"))) as ticket:
        assert isinstance(ticket.outcome, Assignment)
        own_s = ticket.decision.stages[0].won.work_s
    assert own_s is not None
    assert pool.room is not None
    room_s = 60.0 * TTFT_SHARE - OWN_PROMPTS * own_s.item(1)
    assert pool.room._ttft_s == pytest.approx(room_s)


def test_a_relegated_request_is_served_once_the_load_of_others_has_passed() -> None:
    """No lease of this gateway ends then: what a worker reports is the only sign."""
    d = one_worker()
    pool = d.fleet.pools["prefill"]
    (member,) = pool.members.values()
    pool.set_foreign_load(member, (1, 500))
    with d.submit(ask(sla=Sla(objective="behind")), None) as ticket:
        assert ticket.outcome is None
        pool.set_foreign_load(member, (0, 0))
        assert isinstance(ticket.outcome, Assignment)
        ticket.outcome.release()


@pytest.mark.parametrize("others", ["easy", "kept", "untargeted"])
def test_admission_that_is_switched_on_puts_nobody_behind_a_relegated_request(others: str) -> None:
    d = one_worker(scheduling={"admission": "off"}, max_inflight=2)
    first, second = outcome(d, Sla(objective="easy")), outcome(d, Sla(objective="easy"))
    assert isinstance(first, Assignment)
    assert isinstance(second, Assignment)
    with d.submit(ask(sla=Sla(objective="behind")), None) as behind:
        with d.submit(ask(sla=Sla(objective=others)), None) as other:
            assert behind.outcome is other.outcome is None
            d.set_admission("on")
            first.release()
            assert behind.outcome is None
            assert isinstance(other.outcome, Assignment)
            other.outcome.release()
        second.release()
        assert isinstance(behind.outcome, Assignment)
        behind.outcome.release()


def test_a_relegated_request_breaks_no_promise_of_decode_steps() -> None:
    of = one_worker().fleet.pools["decode"].snapshot().estimator
    limit_s = 1.0001 * max(of.itl_s(batch, 100) for batch in range(1, 4))
    classes = {
        "tight": {"ttft_ms": 60_000, "itl_ms": 1000 * limit_s / ITL_SHARE},
        "behind": {"ttft_ms": 60_000, "itl_ms": 1.0, "policy": "relegate"},
    }
    d = one_worker(objectives=classes)
    assert isinstance(outcome(d, Sla(objective="tight")), Assignment)
    n_served = 1
    for _ in range(60):
        with d.submit(ask(sla=Sla(objective="behind")), None) as ticket:
            if isinstance(ticket.outcome, Assignment):
                n_served += 1
    assert 3 <= n_served < 60
    assert of.itl_s(n_served, 100) <= limit_s
