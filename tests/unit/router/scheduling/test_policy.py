import random

import pytest
from msgspec import structs

from slagate.pools.estimator.estimator import Coefficients
from slagate.pools.fleet_file.load import parse_config
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.row_view import RowView, State
from slagate.router.request.sla import Sla
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.policy import (
    Decision,
    LatencyTarget,
    StageChoice,
    choose,
    choose_stage,
)
from slagate.router.scheduling.score import (
    AT_LIMIT,
    KV_AT_LIMIT,
    LIMITS,
    QUEUE_AT_LIMIT,
    RoutingRequest,
    score_pool,
)
from slagate.router.scheduling.words import explained
from support.builders import ask, fleet, one_cell, pool_view, profiled, rng, take_now, view, work_of
from support.fleet.files import disagg_file

STAGES = list(Stage)


def chosen(stage: Stage, *views: RowView, asked: RoutingRequest | None = None) -> StageChoice:
    pools = {"only": pool_view("only", views)}
    return choose_stage(stage, asked or ask(), one_cell(stage, "only"), pools, draw=rng().random())


def winner(choice: StageChoice) -> str:
    return "" if choice.winner is None else choice.winner.view.address


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (view("bad:1", state=State.CONNECTING), "connecting"),
        (view("bad:1", state=State.NOT_READY), "not_ready"),
        (view("bad:1", state=State.REFUSED), "refused"),
        (view("bad:1", models=["other"]), "does not serve the model"),
        (view("bad:1", inflight=3, max_inflight=3), AT_LIMIT),
        (view("failed:1"), "failed this request"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_worker_that_may_not_serve_is_never_chosen_and_says_why(
    stage: Stage, bad: RowView, reason: str
) -> None:
    asked = ask(excluded=frozenset({"failed:1"}))
    busy = view("good:1", inflight=50, queued_s=99.0, queued_tokens=9999, context_tokens=99999)
    choice = chosen(stage, bad, busy, asked=asked)
    assert winner(choice) == "good:1"
    assert [c.excluded for c in choice.top()] == ["", reason]
    alone = chosen(stage, bad, asked=asked)
    assert alone.winner is None
    assert alone.pool == "only"


@pytest.mark.parametrize("stage", STAGES)
def test_equals_are_chosen_by_chance_and_fairly(stage: Stage) -> None:
    pools = {"only": pool_view("only", [view("a:1"), view("b:1")])}
    source = random.Random(1)
    grid = one_cell(stage, "only")
    wins = [
        winner(choose_stage(stage, ask(), grid, pools, draw=source.random())) for _ in range(400)
    ]
    assert 160 < wins.count("a:1") < 240


def test_prefill_goes_where_the_queue_is_shortest_in_seconds() -> None:
    one = view("one:1", inflight=1, queued_s=2.0, queued_tokens=40_000)
    many = view("many:1", inflight=9, queued_s=0.5, queued_tokens=10_000)
    assert winner(chosen(Stage.PREFILL, one, many)) == "many:1"


def test_decode_weighs_the_batch_and_its_context() -> None:
    assert winner(chosen(Stage.DECODE, view("a:1", inflight=2), view("b:1", inflight=1))) == "b:1"
    long, short = view("a:1", inflight=2, context_tokens=10**7), view("b:1", inflight=2)
    assert winner(chosen(Stage.DECODE, long, short)) == "b:1"


def test_prefill_ignores_decode_load_and_decode_ignores_the_prefill_queue() -> None:
    queued = view("q:1", queued_s=5.0, queued_tokens=100_000)
    reading = view("c:1", inflight=3, context_tokens=100_000)
    assert winner(chosen(Stage.PREFILL, queued, reading)) == "c:1"
    assert winner(chosen(Stage.DECODE, queued, reading)) == "q:1"


def test_what_a_request_puts_on_its_worker() -> None:
    seconds = 100 / 20_000
    assert work_of(chosen(Stage.PREFILL, view())) == Work(100, seconds, 0)
    assert work_of(chosen(Stage.DECODE, view())) == Work(0, 0.0, 100)
    assert work_of(chosen(Stage.AGG, view())) == Work(100, seconds, 100)


def test_an_answer_to_come_makes_the_context_longer_and_takes_room_in_the_cache() -> None:
    asked = ask(answer_tokens=900.0, growth_tokens=900)
    assert work_of(chosen(Stage.DECODE, view(), asked=asked)) == Work(0, 0.0, 1000)
    assert work_of(chosen(Stage.AGG, view(), asked=asked)).context_tokens == 1000
    assert work_of(chosen(Stage.PREFILL, view(), asked=asked)).context_tokens == 0
    pools = {"only": pool_view("only", [view()], speed=profiled())}
    choice = choose_stage(Stage.DECODE, asked, one_cell(Stage.DECODE, "only"), pools, draw=0.5)
    itl_s = profiled().frozen.itl_s(1, 1000)
    assert choice.top()[0].predicted_itl_s == pytest.approx(itl_s, rel=1e-12)
    busy = view(capacity_tokens=9999, context_tokens=9000, inflight=1)
    assert chosen(Stage.DECODE, busy).reasons == set()
    assert chosen(Stage.DECODE, busy, asked=asked).reasons == {KV_AT_LIMIT}
    # Alone it may grow: how long answers are is a guess.
    assert chosen(Stage.DECODE, view(capacity_tokens=500), asked=asked).winner is not None


def test_predictions_are_shown_only_where_the_pool_has_a_profile() -> None:
    nominal = chosen(Stage.AGG, view()).top()[0]
    assert (nominal.predicted_ttft_s, nominal.predicted_itl_s) == (None, None)
    pools = {"only": pool_view("only", [view(queued_s=1.0)], speed=profiled())}
    choice = choose_stage(Stage.AGG, ask(), one_cell(Stage.AGG, "only"), pools, draw=rng().random())
    candidate = choice.top()[0]
    assert candidate.predicted_ttft_s == 1.0 + profiled().frozen.prefill_s(100, 0)
    itl_s = profiled().frozen.itl_s(1, 100)
    assert candidate.predicted_itl_s == pytest.approx(itl_s, rel=1e-12)


def test_another_pool_is_asked_only_when_the_configuration_says_so() -> None:
    pools = {
        "fast": pool_view("fast", [view("f:1")]),
        "bulk": pool_view("bulk", [view("b:1", state=State.NOT_READY)]),
    }
    for retry, wanted in ((True, "f:1"), (False, "")):
        grid = one_cell(Stage.PREFILL, "fast", "bulk", retry=retry)
        choice = choose_stage(Stage.PREFILL, ask(), grid, pools, draw=rng().random())
        assert winner(choice) == wanted
        assert choice.base_pool == "bulk"
        assert choice.pool == ("fast" if retry else "bulk")


def test_a_worker_at_its_limit_spills_to_the_faster_pool() -> None:
    full = view("b:1", inflight=1, max_inflight=1)
    pools = {"fast": pool_view("fast", [view("f:1")]), "bulk": pool_view("bulk", [full])}
    grid = one_cell(Stage.DECODE, "fast", "bulk", retry=True)
    choice = choose_stage(Stage.DECODE, ask(), grid, pools, draw=rng().random())
    assert winner(choice) == "f:1"
    assert "pool fast is next in the order" in choose_text(choice)


def choose_text(choice: StageChoice) -> str:
    return explained(Decision(ask(), (choice,)))


def test_the_cell_comes_from_prompt_and_targets_and_a_priority_overrides_it() -> None:
    content = disagg_file()
    rule = {"min_priority": 10, "max_priority": 20, "target_pool": 0}
    content["prefill_pool_selection_strategy"]["priority_overrides"] = [rule]
    grids = {Stage(k): g for k, g in parse_config(content, source="f").stages.items()}
    pools = {n: pool_view(n, [view(f"{n}:1")]) for g in grids.values() for n in g.pool_names}

    def pools_of(sla: Sla, isl_tokens: int = 100) -> tuple[str, ...]:
        decision = choose(RoutingRequest("llama", isl_tokens, sla), grids, pools, rng=rng())
        return tuple(choice.pool for choice in decision.stages)

    assert pools_of(Sla(ttft_ms=150, itl_ms=5)) == ("p-fast", "d-fast")
    assert pools_of(Sla(ttft_ms=800, itl_ms=40)) == ("p-bulk", "d-bulk")
    assert pools_of(Sla(ttft_ms=150, itl_ms=40)) == ("p-fast", "d-bulk")
    assert pools_of(Sla(ttft_ms=0, itl_ms=0)) == ("p-fast", "d-fast")
    assert pools_of(Sla(ttft_ms=800, priority=15)) == ("p-fast", "d-bulk")


def test_cfg_01_a_missing_target_is_the_middle_of_the_grid_and_said_to_be_a_default() -> None:
    content = disagg_file()
    grids = {Stage(k): g for k, g in parse_config(content, source="f").stages.items()}
    pools = {n: pool_view(n, [view(f"{n}:1")]) for g in grids.values() for n in g.pool_names}
    prefill, decode = choose(ask(), grids, pools, rng=rng()).stages
    assert (prefill.targets, prefill.pool) == (
        (LatencyTarget("ttft_ms", 500, source="grid"),),
        "p-bulk",
    )
    assert (decode.targets, decode.pool) == (
        (LatencyTarget("itl_ms", 25, source="grid"),),
        "d-bulk",
    )
    prefill = choose(ask(sla=Sla(ttft_ms=500)), grids, pools, rng=rng()).stages[0]
    assert (prefill.targets, prefill.pool) == (
        (LatencyTarget("ttft_ms", 500, source="request"),),
        "p-bulk",
    )


def test_a_decision_explains_itself_in_words() -> None:
    idle, busy = view("idle:1"), view("busy:1", queued_s=3.0, queued_tokens=9, inflight=2)
    pools = {"only": pool_view("only", [busy, idle], speed=profiled())}
    stages = {Stage.PREFILL: one_cell(Stage.PREFILL, "only")}
    text = explained(choose(ask(sla=Sla(ttft_ms=40)), stages, pools, rng=rng()))
    for part in (
        "prefill: 100 prompt tokens",
        "TTFT target 40 ms",
        "pool only",
        "idle:1",
        "Of 2 that can take it idle:1 is the fullest where it fits",
    ):
        assert part in text
    text = explained(choose(ask(sla=Sla(ttft_ms=1)), stages, pools, rng=rng()))
    assert "predicted to miss its TTFT target of 1 ms in every pool that it may use (only)." in text
    assert "idle:1 is the least late" in text
    text = explained(choose(ask(), stages, pools, rng=rng()))
    assert "Of 2 that can take it idle:1 has the least to do" in text
    down = {"only": pool_view("only", [view("w:1", state=State.REFUSED)])}
    text = explained(choose(ask(), stages, down, rng=rng()))
    assert "no TTFT target" in text
    assert "No worker can take it: refused." in text


def test_the_best_candidate_comes_first_and_excluded_ones_last() -> None:
    views = [view(f"w{i}:1", queued_s=float(9 - i), queued_tokens=1) for i in range(5)]
    choice = chosen(Stage.PREFILL, view("x:1", state=State.REFUSED), *views)
    assert [c.view.address for c in choice.top()] == [
        "w4:1", "w3:1", "w2:1", "w1:1", "w0:1", "x:1",
    ]  # fmt: skip


def test_score_01_idle_workers_take_turns() -> None:
    """Short prompts are done before the next one comes, so every choice is between equals."""
    of = fleet("agg")
    dispatcher = Dispatcher(of, rng=rng(1))
    served: list[str] = []
    for _ in range(100):
        assignment = take_now(dispatcher, ask(isl_tokens=5))
        served.append(assignment.leases[Stage.AGG].member.address)
        assignment.release()
    assert abs(served.count("a1:1") - served.count("a2:1")) <= 1


def test_a_worker_whose_last_probe_failed_is_chosen_only_where_no_other_can_be() -> None:
    of = fleet("agg")
    suspect, other = of.pools["agg"].members.values()
    suspect.probe_failed("slow")
    dispatcher = Dispatcher(of, rng=rng(1))
    taken = [take_now(dispatcher, ask(), None) for _ in range(20)]
    assert {one.leases[Stage.AGG].member for one in taken} == {other}
    other.refuse("gone")
    assert take_now(dispatcher, ask(), None).leases[Stage.AGG].member is suspect


def pick(stage: Stage, *views: RowView, n_leases: int = 0) -> StageChoice:
    pools = {"only": pool_view("only", views, speed=profiled(), n_leases=n_leases)}
    return choose_stage(
        stage, ask(isl_tokens=9000), one_cell(stage, "only"), pools, draw=rng().random()
    )


def test_a_cached_prefix_wins_until_the_queue_outweighs_it() -> None:
    cold = view("cold:1")
    for queued_s, wanted in ((0.0, "warm:1"), (0.01, "warm:1"), (10.0, "cold:1")):
        warm = view("warm:1", device_tokens=8192, queued_s=queued_s, inflight=1)
        assert winner(pick(Stage.PREFILL, warm, cold)) == wanted
    # A full cache does not attract a request that it does not shorten.
    assert winner(pick(Stage.PREFILL, view("busy:1", queued_s=0.1, inflight=1), cold)) == "cold:1"


def test_what_is_on_the_host_costs_its_way_back() -> None:
    device = view("device:1", device_tokens=8192)
    host = view("host:1", host_tokens=8192)
    choice = pick(Stage.PREFILL, host, view("cold:1"), device)
    assert [c.view.address for c in choice.top()] == ["device:1", "host:1", "cold:1"]
    frozen = profiled().frozen
    assert choice.top()[1].predicted_ttft_s == pytest.approx(
        frozen.ttft_s(frozen.work_s(9000 - 8192, 8192) + frozen.host_s(8192))
    )
    assert work_of(pick(Stage.PREFILL, host)).prefill_tokens == 9000 - 8192


def test_decode_ignores_what_is_cached() -> None:
    warm, idle = view("warm:1", device_tokens=8192, inflight=1), view("idle:1")
    assert winner(pick(Stage.DECODE, warm, idle)) == "idle:1"


@pytest.mark.parametrize("stage", [Stage.PREFILL, Stage.AGG])
def test_an_idle_row_that_had_no_turn_for_long_goes_first(stage: Stage) -> None:
    warm = view("warm:1", device_tokens=8192, last_chosen=40)
    for last, foreign, inflight, wanted in (
        (21, 0, 0, "warm:1"),
        (20, 0, 0, "cold:1"),
        (20, 1, 0, "warm:1"),
        (20, 0, 1, "warm:1"),
    ):
        cold = view("cold:1", last_chosen=last, foreign_requests=foreign, inflight=inflight)
        choice = pick(stage, warm, cold, n_leases=40)
        assert winner(choice) == wanted
        assert choice.starved == (wanted == "cold:1")
    cold = view("cold:1", last_chosen=0)
    assert not pick(stage, cold, n_leases=1000).starved
    assert "had no request for longest" in choose_text(pick(stage, warm, cold, n_leases=40))
    suspect = view("cold:1", suspect=True)
    assert winner(pick(stage, warm, suspect, n_leases=1000)) == "warm:1"


def test_decode_needs_no_turns() -> None:
    busy = view("busy:1", last_chosen=900, inflight=1)
    idle = view("idle:1", last_chosen=0)
    assert not pick(Stage.DECODE, busy, idle, n_leases=1000).starved


@pytest.mark.parametrize(
    ("stages", "full", "reason"),
    [
        (
            [Stage.PREFILL, Stage.AGG],
            {"queued_tokens": 20, "max_queued_tokens": 20},
            QUEUE_AT_LIMIT,
        ),
        (
            [Stage.DECODE],
            {"capacity_tokens": 9999, "context_tokens": 1000, "inflight": 1},
            KV_AT_LIMIT,
        ),
        (STAGES, {"worker_inflight": 4, "max_inflight": 4}, AT_LIMIT),
    ],
)
def test_a_limit_excludes_a_row_where_it_applies(
    stages: list[Stage], full: dict[str, int], reason: str
) -> None:
    for stage in STAGES:
        choice = pick(stage, view("full:1", **full), view("far:1", queued_s=99.0, inflight=200))
        reasons = {c.view.address: c.excluded for c in choice.top()}
        assert reasons["full:1"] == (reason if stage in stages else "")
    idle = view("w:1", capacity_tokens=9999, context_tokens=1000)
    assert winner(pick(Stage.DECODE, idle)) == "w:1"


@pytest.mark.parametrize("stage", STAGES)
def test_a_prompt_that_no_cache_would_ever_hold_is_not_worth_waiting(stage: Stage) -> None:
    choice = pick(stage, view("w:1", capacity_tokens=8999))
    assert choice.reasons == {"its KV cache is too small for the prompt"}
    assert not choice.reasons & LIMITS


def test_requests_of_others_are_in_the_batch_and_their_prompts_in_the_queue() -> None:
    shared, own = view("shared:1", foreign_requests=9, foreign_s=1.0), view("own:1", inflight=3)
    assert winner(pick(Stage.DECODE, shared, own)) == "own:1"
    choice = pick(Stage.PREFILL, shared, own)
    assert winner(choice) == "own:1"
    seen = {c.view.address: c.predicted_ttft_s for c in choice.top()}
    assert seen["shared:1"] == pytest.approx((seen["own:1"] or 0) + 1.0)


def test_a_prompt_waits_for_decode_steps_where_others_are_answered() -> None:
    choice = pick(Stage.AGG, view("idle:1"), view("busy:1", inflight=2))
    idle, busy = (choice.won.row_values(row) for row in (0, 1))
    estimator = choice.won.pool.estimator
    step_s = estimator.itl_s(*choice.won.decoding(1))
    assert busy.predicted_ttft_s == pytest.approx((idle.predicted_ttft_s or 0) + 1.5 * step_s)
    assert choice.won.waiting_s(0) == 0.0
    assert choice.won.waiting_s(1) == pytest.approx(1.5 * step_s)
    # Whatever the scales are that were learnt.
    slow = structs.replace(estimator, coefficients=Coefficients(5.0, 0.0, 0.5))
    pool = structs.replace(choice.won.pool, estimator=slow)
    ttft_s, itl_s = (getattr(score_pool(Stage.AGG, ask(), pool), n) for n in ("ttft_s", "itl_s"))
    assert ttft_s[1] - ttft_s[0] == pytest.approx(1.5 * itl_s[1])
    # Others that are answered do not hold up a prefill worker.
    assert pick(Stage.PREFILL, view("idle:1"), view("busy:1", inflight=2)).won.waiting_s(1) == 0.0
