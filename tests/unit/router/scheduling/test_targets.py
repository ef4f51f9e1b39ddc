"""The choice by targets: which rows and pools a request fits in, and which of them it gets."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from slagate.pools.estimator.accuracy import CAREFUL, HOPEFUL, Calibration
from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.grid.grid import PriorityRule, Stage, StageGrid
from slagate.pools.inflight.demand import KeptRoom
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.pair_key import PairKey
from slagate.pools.inflight.row_view import RowView, State
from slagate.router.request.sla import Sla
from slagate.router.scheduling.policy import Decision, StageChoice, choose, choose_stage
from slagate.router.scheduling.score import YIELDS, score_pool
from slagate.router.scheduling.targets import (
    AGG_ITL_SHARE,
    TTFT_SHARE,
    fits_alone,
    is_unsure,
    judged,
    promised,
)
from slagate.router.scheduling.words import explained
from support.builders import ask, one_cell, pool_view, profiled, rng, view

SPEED = profiled()
ISL = 1000
IDLE_S = (
    score_pool(Stage.PREFILL, ask(isl_tokens=ISL), pool_view("p", [view()], speed=SPEED))
    .ttft_s[0]
    .item()
)
"""TTFT of the prompts here on an idle worker."""


def fits(more_s: float) -> Sla:
    """A target that is just met with so many seconds in front."""
    return Sla(ttft_ms=1000 * (IDLE_S + more_s + 1e-6) / TTFT_SHARE)


def chosen(
    views: list[RowView], sla: Sla, *, stage: Stage = Stage.PREFILL, seed: int = 1, **more: Any
) -> StageChoice:
    """The choice in one pool of these workers."""
    pools = {"p": pool_view("p", views, speed=SPEED)}
    asked = ask(isl_tokens=ISL, sla=sla, **more)
    return choose_stage(stage, asked, one_cell(stage, "p"), pools, draw=rng(seed).random())


def queued(*seconds: float, **figures: Any) -> list[RowView]:
    return [view(f"w{at}:1", queued_s=each, **figures) for at, each in enumerate(seconds)]


def test_of_the_rows_that_fit_the_fullest_is_taken() -> None:
    choice = chosen(queued(0.0, 0.05, 0.1, 5.0), fits(0.1))
    assert (choice.row, choice.is_met) == (2, True)
    choice = chosen(queued(0.0, 0.05, 0.1, 5.0), fits(0.0999))
    assert (choice.row, choice.is_met) == (1, True)


def test_without_a_target_the_one_with_the_least_to_do_is_taken() -> None:
    choice = chosen(queued(0.1, 0.0, 0.05), Sla())
    assert (choice.row, choice.is_met) == (1, None)


@pytest.mark.parametrize(("cached", "row"), [(950, 1), (300, 1), (32, 0)])
def test_more_than_a_tenth_of_work_is_not_done_again_to_fill_a_worker(
    cached: int, row: int
) -> None:
    views = [view("w0:1", queued_s=0.1), view("w1:1", device_tokens=cached)]
    assert chosen(views, fits(1.0)).row == row


def test_nobody_is_made_late_by_a_prompt_that_joins_while_it_fits_elsewhere() -> None:
    full = view("w0:1", queued_s=0.1, join_tokens=4000, join_slack_s=0.001)
    assert chosen([full, view("w1:1")], fits(1.0)).row == 1
    alone = chosen([full], fits(1.0))
    assert (alone.row, alone.is_met) == (0, False)
    for harmless in ({"join_slack_s": 1.0}, {"join_tokens": 0}, {"join_slack_s": math.inf}):
        other = view(
            "w0:1", queued_s=0.1, **{"join_tokens": 4000, "join_slack_s": 0.001} | harmless
        )
        assert chosen([other, view("w1:1")], fits(1.0)).row == 0, harmless


def test_of_those_that_fit_one_where_nobody_is_delayed_much_is_taken() -> None:
    noisy = view("w0:1", queued_s=0.1, join_tokens=4000, join_quiet_s=0.001)
    quiet = view("w1:1", queued_s=0.05, join_tokens=4000, join_quiet_s=1.0)
    assert chosen([noisy, quiet], fits(1.0)).row == 1
    only = chosen([noisy], fits(1.0))
    assert (only.row, only.is_met) == (0, True)


def test_steps_get_no_longer_than_was_promised_while_it_fits_elsewhere() -> None:
    views = [view("w0:1", inflight=3, itl_limit_s=0.001), view("w1:1")]
    for stage in (Stage.DECODE, Stage.AGG):
        choice = chosen(views, Sla(itl_ms=1000.0), stage=stage)
        assert (choice.row, choice.is_met) == (1, True)
        alone = chosen(views[:1], Sla(itl_ms=1000.0), stage=stage)
        assert (alone.row, alone.is_met) == (0, False)


def test_answers_of_an_aggregated_worker_wait_no_longer_than_they_can_bear() -> None:
    views = [view("w0:1", inflight=3, stall_room_s=0.001), view("w1:1")]
    assert chosen(views, fits(1.0), stage=Stage.AGG).row == 1
    assert chosen(views[:1], fits(1.0), stage=Stage.AGG).is_met is False
    assert chosen(views[:1], fits(1.0)).is_met is True, "a prefill worker has no answers"
    views[0] = view("w0:1", inflight=3, stall_room_s=1.0)
    assert chosen(views, fits(1.0), stage=Stage.AGG).row == 0


def test_where_nothing_fits_the_least_late_row_is_taken_but_no_suspect_one() -> None:
    choice = chosen(queued(5.0, 3.0, 4.0), fits(0.1))
    assert (choice.row, choice.is_met) == (1, False)
    views = [view("w0:1", queued_s=5.0), view("w1:1", suspect=True)]
    choice = chosen(views, fits(0.1))
    assert (choice.row, choice.is_met) == (0, False)


@pytest.mark.parametrize("seconds", [0.0, 5.0], ids=["fits", "late"])
def test_equal_rows_take_turns_and_new_ones_are_drawn(seconds: float) -> None:
    views = [view(f"w{at}:1", queued_s=seconds, last_chosen=at) for at in (3, 1, 2)]
    assert chosen(views, fits(0.1)).row == 1
    equal = queued(*[seconds] * 4)
    assert {chosen(equal, fits(0.1), seed=seed).row for seed in range(40)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("stage", "sla", "is_met"),
    [
        (Stage.PREFILL, Sla(itl_ms=50.0), None),
        (Stage.PREFILL, Sla(ttft_ms=900.0), True),
        (Stage.DECODE, Sla(ttft_ms=900.0), None),
        (Stage.DECODE, Sla(itl_ms=50.0), True),
        (Stage.DECODE, Sla(itl_ms=0.001), False),
        (Stage.DECODE, Sla(itl_ms=0.0), False),
        (Stage.PREFILL, Sla(ttft_ms=0.0), False),
        (Stage.AGG, Sla(), None),
        (Stage.AGG, Sla(ttft_ms=900.0), True),
        (Stage.AGG, Sla(ttft_ms=900.0, itl_ms=0.001), False),
        (Stage.AGG, Sla(ttft_ms=0.001, itl_ms=50.0), False),
    ],
)
def test_a_stage_is_judged_by_the_targets_that_are_its_own(
    stage: Stage, sla: Sla, *, is_met: bool | None
) -> None:
    assert chosen([view()], sla, stage=stage).is_met is is_met


def test_what_has_passed_of_a_requests_time_is_not_left() -> None:
    views = queued(0.0, 0.05, 0.1)
    assert [chosen(views, fits(0.1), elapsed_s=at).row for at in (0.0, 0.04, 0.06)] == [2, 1, 0]
    late = chosen(views, fits(0.1), elapsed_s=10.0)
    assert (late.row, late.is_met) == (0, False)


def pools_with(seconds: Mapping[str, float]) -> dict[str, PoolSnapshot]:
    return {
        name: pool_view(name, [view(f"{name}:1", queued_s=each)], speed=SPEED)
        for name, each in seconds.items()
    }


def spilling(spill: str, **more: Any) -> StageGrid:
    """The cell has c, then b; a is the cheapest, b the dearest."""
    grid = one_cell(Stage.PREFILL, "a", "b", "c")
    return replace(grid, cells=((2, 1),), spill=spill, costs=(1, 4, 2), **more)


@pytest.mark.parametrize(
    ("spill", "seconds", "pool", "is_met"),
    [
        ("none", (0.0, 0.0, 9.0), "c", False),
        ("listed", (0.0, 0.0, 0.0), "c", True),
        ("listed", (0.0, 0.0, 9.0), "b", True),
        ("listed", (0.0, 8.0, 9.0), "b", False),
        ("listed", (0.0, 9.0, 8.0), "c", False),
        ("any", (0.0, 0.0, 0.0), "a", True),
        ("any", (9.0, 0.0, 0.0), "c", True),
        ("any", (9.0, 0.0, 9.0), "b", True),
        ("any", (7.0, 9.0, 8.0), "a", False),
    ],
)
def test_load_decides_among_the_pools_that_a_request_may_spill_to(
    spill: str, seconds: tuple[float, ...], pool: str, *, is_met: bool
) -> None:
    pools = pools_with(dict(zip("abc", seconds, strict=True)))
    asked = ask(isl_tokens=ISL, sla=fits(0.1))
    choice = choose_stage(Stage.PREFILL, asked, spilling(spill), pools, draw=rng().random())
    assert (choice.pool, choice.is_met) == (pool, is_met)
    assert choice.worker == f"{pool}:1"


@pytest.mark.parametrize("spill", ["none", "listed", "any"])
def test_whom_a_rule_has_placed_does_not_spill(spill: str) -> None:
    pools = pools_with({"a": 0.0, "b": 9.0, "c": 0.0})
    grid = spilling(spill, rules=(PriorityRule(5, 9, 1),))
    asked = ask(isl_tokens=ISL, sla=Sla(ttft_ms=fits(0.1).ttft_ms, priority=7))
    choice = choose_stage(Stage.PREFILL, asked, grid, pools, draw=rng().random())
    assert (choice.pool, choice.is_met) == ("b", False)


class Looked(dict[str, PoolSnapshot]):
    """Pools that note which of them were looked at."""

    def __init__(self, pools: Mapping[str, PoolSnapshot]) -> None:
        super().__init__(pools)
        self.names: list[str] = []

    def __getitem__(self, name: str) -> PoolSnapshot:
        self.names.append(name)
        return super().__getitem__(name)


@pytest.mark.parametrize(
    ("spill", "seconds", "looked_at", "would_meet"),
    [
        ("none", (0.0, 0.0, 0.0), "c", ""),
        ("none", (0.0, 9.0, 9.0), "cab", "a"),
        ("none", (0.0, 0.0, 9.0), "cab", "ab"),
        ("listed", (0.0, 0.0, 9.0), "cb", ""),
        ("listed", (9.0, 9.0, 9.0), "cba", ""),
        ("any", (9.0, 9.0, 9.0), "acb", ""),
    ],
)
def test_only_where_it_is_missed_is_asked_which_other_pool_would_meet_it(
    spill: str, seconds: tuple[float, ...], looked_at: str, would_meet: str
) -> None:
    pools = Looked(pools_with(dict(zip("abc", seconds, strict=True))))
    asked = ask(isl_tokens=ISL, sla=fits(0.1))
    choice = choose_stage(Stage.PREFILL, asked, spilling(spill), pools, draw=rng().random())
    assert "".join(pools.names) == looked_at
    assert "".join(choice.would_meet) == would_meet
    assert set(choice.would_meet) & {scored.pool.name for scored in choice.scored} == set()


def test_pools_that_cost_the_same_are_tried_in_the_order_of_the_cell() -> None:
    grid = replace(spilling("any"), costs=())
    asked = ask(isl_tokens=ISL, sla=fits(0.1))
    for seconds, pool in (((0, 0, 0), "c"), ((0, 0, 9), "b"), ((0, 9, 9), "a")):
        pools = pools_with(dict(zip("abc", map(float, seconds), strict=True)))
        choice = choose_stage(Stage.PREFILL, asked, grid, pools, draw=rng().random())
        assert (choice.pool, choice.is_met) == (pool, True)


def test_without_a_target_a_request_goes_where_the_grid_says() -> None:
    pools = pools_with({"a": 0.0, "b": 0.0, "c": 9.0})
    choice = choose_stage(
        Stage.PREFILL, ask(isl_tokens=ISL), spilling("any"), pools, draw=rng().random()
    )
    assert (choice.pool, choice.is_met) == ("c", None)


def test_a_pool_without_a_profile_is_chosen_as_the_grid_says() -> None:
    blind = pool_view("c", [view("c0:1", queued_s=9.0), view("c1:1", queued_s=8.0)])
    pools = pools_with({"a": 0.0, "b": 0.0}) | {"c": blind}
    asked = ask(isl_tokens=ISL, sla=fits(0.1))
    choice = choose_stage(Stage.PREFILL, asked, spilling("listed"), pools, draw=rng().random())
    assert (choice.pool, choice.row, choice.is_met) == ("c", 1, None)


def off(pool: PoolSnapshot, **bases: str | Calibration) -> PoolSnapshot:
    """The pool, in which predictions have fallen back, or are calibrated."""
    return structs.replace(pool, estimator=structs.replace(pool.estimator, **bases))


def chosen_of(pools: Mapping[str, PoolSnapshot], spill: str) -> tuple[str, bool | None, str]:
    """The pool of a request that has to be served at once, whether it is met, and the choice in words."""
    asked = ask(isl_tokens=ISL, sla=fits(0.0))
    choice = choose_stage(Stage.PREFILL, asked, spilling(spill), pools, draw=rng().random())
    return choice.pool, choice.is_met, explained(Decision(asked, (choice,)))


def test_where_predictions_are_off_the_pool_is_used_as_without_a_target() -> None:
    pools = pools_with({"a": 9.0, "b": 0.0, "c": 9.0})
    right = pools["c"]
    pools["c"] = off(right, ttft_basis="grid")
    pool, is_met, text = chosen_of(pools, "listed")
    assert (pool, is_met) == ("c", None)
    assert "Predictions of TTFT in pool c are off: no target decides there by them." in text
    assert chosen_of(pools, "any")[:2] == ("c", None)
    pools["c"] = off(right, ttft_basis="profile")
    pool, is_met, text = chosen_of(pools, "listed")
    assert (pool, is_met) == ("b", True)
    assert "What was learnt of TTFT in pool c is off: the profile alone predicts it." in text
    pools["c"] = off(right, itl_basis="grid")
    assert chosen_of(pools, "listed")[:2] == ("b", True), "of another latency"


def test_nobody_spills_to_where_predictions_are_off_nor_is_refused_for_it() -> None:
    pools = pools_with({"a": 0.0, "b": 9.0, "c": 9.0})
    assert chosen_of(pools, "listed")[:2] == ("c", False)
    pools["b"] = off(pools["b"], ttft_basis="grid")
    assert chosen_of(pools, "listed")[:2] == ("c", None), "as the grid says"
    pools = pools_with({"a": 0.0, "b": 0.0, "c": 9.0})
    pools["a"] = off(pools["a"], ttft_basis="grid")
    assert chosen_of(pools, "any")[:2] == ("b", True)


def test_what_is_calibrated_fits_with_time_to_spare_and_is_late_where_it_is_likely_to_be() -> None:
    """Requests take twice as long as predicted, half of them between 1.6 and 2.5 times as long."""
    line = Calibration(math.log(2), 1.0, 0.3, -9.0, 9.0)
    pools = {
        name: off(
            pool_view(name, [view(f"{name}:1", queued_s=s)], speed=SPEED), ttft_calibration=line
        )
        for name, s in (("c", 0.2), ("b", 0.0))
    }

    def told(times: float) -> tuple[str, bool | None]:
        """The pool, and whether it is met, with so many times the time that is predicted for `b`."""
        asked = ask(isl_tokens=ISL, sla=Sla(ttft_ms=1000 * times * IDLE_S / TTFT_SHARE))
        choice = choose_stage(Stage.PREFILL, asked, spilling("listed"), pools, draw=rng().random())
        assert choice.row is not None
        assert is_unsure(choice.won, choice.row) is (choice.is_met is None)
        return choice.pool, choice.is_met

    pools["a"] = pools["b"]
    careful, hopeful = (2 * math.exp(n * line.spread) for n in (CAREFUL, HOPEFUL))
    in_c = (IDLE_S + 0.2) / IDLE_S
    assert told(1.001 * careful * in_c) == ("c", True)
    assert told(0.999 * careful * in_c) == ("b", True)
    assert told(1.001 * careful) == ("b", True)
    assert told(0.999 * careful) == ("b", None), "it is the least late, and not likely to be missed"
    assert told(1.001 * hopeful) == ("b", None)
    assert told(0.999 * hopeful) == ("b", False)
    assert "are off: they are corrected by how long" in chosen_of(pools, "listed")[2]


def test_steps_of_others_are_calibrated_like_ones_own() -> None:
    line = Calibration(math.log(2), 1.0, 0.0, -9.0, 9.0)
    sla = Sla(itl_ms=1000.0)
    step_s = SPEED.frozen.itl_s(2, ISL)
    for limit_s, is_met in ((2.01 * step_s, True), (1.99 * step_s, False)):
        views = [view(inflight=1, context_tokens=ISL, itl_limit_s=limit_s)]
        pool = off(pool_view("p", views, speed=SPEED), itl_calibration=line)
        grid, asked = one_cell(Stage.DECODE, "p"), ask(isl_tokens=ISL, sla=sla)
        choice = choose_stage(Stage.DECODE, asked, grid, {"p": pool}, draw=rng().random())
        assert choice.is_met is is_met


def test_an_aggregated_pool_is_judged_by_the_latency_whose_predictions_are_right() -> None:
    pool = off(pool_view("p", [view()], speed=SPEED), ttft_basis="grid")
    for itl_ms, is_met in ((1000.0, True), (0.001, False)):
        asked = ask(isl_tokens=ISL, sla=Sla(ttft_ms=0.001, itl_ms=itl_ms))
        grid = one_cell(Stage.AGG, "p")
        choice = choose_stage(Stage.AGG, asked, grid, {"p": pool}, draw=rng().random())
        assert choice.is_met is is_met
        scored = score_pool(Stage.AGG, asked, pool)
        assert promised(scored, 0, scored.work(0), 0.0).due_s == math.inf
    pool = off(pool, itl_basis="grid")
    choice = choose_stage(Stage.AGG, asked, grid, {"p": pool}, draw=rng().random())
    assert choice.is_met is None


def test_steps_that_are_predicted_wrong_break_no_promise_and_take_no_kept_room() -> None:
    sla = Sla(ttft_ms=1000.0, itl_ms=50.0)
    views = [view(inflight=3, itl_limit_s=0.001)]
    for kept in (None, KeptRoom(1, math.inf, 0.001)):
        pools = kept_pool(views, kept)
        grid, asked = one_cell(Stage.AGG, "p"), ask(isl_tokens=ISL, sla=sla)
        choice = choose_stage(Stage.AGG, asked, grid, pools, draw=rng().random())
        assert choice.is_met is False
        pools["p"] = off(pools["p"], itl_basis="grid")
        choice = choose_stage(Stage.AGG, asked, grid, pools, draw=rng().random())
        assert choice.is_met is True


@pytest.mark.parametrize("stage", [Stage.DECODE, Stage.AGG])
def test_an_answer_of_one_token_cannot_miss_its_itl(stage: Stage) -> None:
    grid, pools = one_cell(stage, "p"), {"p": pool_view("p", [view()], speed=SPEED)}
    for max_tokens, is_met in ((2, False), (1, True if stage is Stage.AGG else None)):
        sla = Sla(ttft_ms=900.0, itl_ms=0.001)
        asked = ask(isl_tokens=ISL, sla=sla, answer_tokens=float(max_tokens))
        choice = choose_stage(stage, asked, grid, pools, draw=rng().random())
        assert choice.is_met is is_met
    assert choice.row is not None
    assert promised(choice.won, choice.row, Work(), 0.0).itl_limit_s == math.inf


def test_others_stand_in_the_way_only_of_who_is_likely_to_meet_his_targets() -> None:
    """By the latencies that are judged, calibrated where they are."""
    sla, line = Sla(ttft_ms=2000 * IDLE_S), Calibration(math.log(3), 1.0, 0.05, -9.0, 9.0)
    views = [view(join_tokens=4000, join_slack_s=1e-6)]
    pool = pool_view("p", views, speed=SPEED)
    asked = ask(isl_tokens=ISL, sla=sla)
    for told, fits in ((pool, True), (off(pool, ttft_calibration=line), False)):
        scored = score_pool(Stage.PREFILL, asked, told)
        of_pool = judged(scored)
        assert of_pool is not None
        assert of_pool.fullest(0.5) is None
        assert fits_alone(scored) is fits
    kept = kept_pool([view()], KeptRoom(1, 0.0, math.inf))["p"]
    assert not fits_alone(score_pool(Stage.PREFILL, asked, kept)), "room is kept for long"
    for answer_tokens, fits in ((1.0, True), (2.0, False)):
        sla = Sla(ttft_ms=2000 * IDLE_S, itl_ms=0.001)
        asked = ask(isl_tokens=ISL, sla=sla, answer_tokens=answer_tokens)
        assert fits_alone(score_pool(Stage.AGG, asked, pool)) is fits
        assert fits_alone(score_pool(Stage.AGG, asked, off(pool, itl_basis="grid")))


def test_a_full_pool_leaves_the_request_to_the_next_one() -> None:
    full = view("c:1", inflight=1, max_inflight=1)
    pools = pools_with({"a": 0.0, "b": 0.0}) | {"c": pool_view("c", [full], speed=SPEED)}
    asked = ask(isl_tokens=ISL, sla=fits(0.1))
    choice = choose_stage(Stage.PREFILL, asked, spilling("listed"), pools, draw=rng().random())
    assert (choice.pool, choice.is_met) == ("b", True)
    choice = choose_stage(Stage.PREFILL, asked, spilling("none"), pools, draw=rng().random())
    assert (choice.pool, choice.is_met) == ("b", True), "its list is for want of workers, too"
    late = ask(isl_tokens=ISL, sla=fits(-0.001))
    choice = choose_stage(Stage.PREFILL, late, spilling("none"), pools, draw=rng().random())
    assert (choice.pool, choice.is_met) == ("b", False)


def decided(sla: Sla, *, pace: float = 1.0) -> Decision:
    grids = {stage: one_cell(stage, stage.value) for stage in (Stage.PREFILL, Stage.DECODE)}
    pools = {
        "prefill": pool_view("prefill", [view("p:1")], speed=SPEED),
        "decode": pool_view("decode", [view("d:1", pace=pace)], speed=SPEED),
    }
    return choose(ask(isl_tokens=ISL, sla=sla), grids, pools, rng=rng())


def test_the_first_token_of_the_decode_worker_is_part_of_ttft() -> None:
    for pace in (1.0, 4.0):
        choice = decided(fits(10.0), pace=pace).stage(Stage.DECODE)
        assert choice.row is not None
        first_s = choice.won.first_response_s(choice.row)
        assert first_s > 0.001
        short = decided(fits(first_s - 0.0005), pace=pace)
        enough = decided(fits(first_s), pace=pace)
        assert (short.is_met, enough.is_met) == (False, True)
        assert short.stage(Stage.PREFILL).won.later_s == first_s


def test_a_decision_is_met_where_each_stage_that_was_judged_is() -> None:
    assert decided(Sla()).is_met is None
    assert decided(Sla(ttft_ms=900.0)).is_met is True
    assert decided(Sla(itl_ms=50.0)).is_met is True
    assert decided(Sla(ttft_ms=900.0, itl_ms=0.001)).is_met is False
    assert decided(Sla(ttft_ms=0.001, itl_ms=50.0)).is_met is False


def test_what_is_promised_is_what_the_request_was_judged_by() -> None:
    sla = Sla(ttft_ms=900.0, itl_ms=50.0)
    choice = chosen([view()], sla, stage=Stage.AGG, elapsed_s=0.1, answer_tokens=101.0)
    assert choice.row == 0
    scored = choice.won
    assert scored.itl_s is not None
    work = promised(scored, 0, scored.work(0), 7.0)
    assert work.due_s == pytest.approx(7.0 + TTFT_SHARE * 0.9 - 0.1)
    assert work.itl_limit_s == pytest.approx(AGG_ITL_SHARE * 0.05)
    room_s = 100 * (AGG_ITL_SHARE * 0.05 - scored.itl_s.item(0))
    assert work.stall_s == pytest.approx(room_s / scored.rate(0))
    without = chosen([view()], Sla(), stage=Stage.AGG).won
    plain = promised(without, 0, scored.work(0), 7.0)
    assert (plain.due_s, plain.itl_limit_s, plain.stall_s) == (math.inf, math.inf, math.inf)


def test_a_pair_fits_also_where_the_pool_that_was_looked_at_last_is_not_the_one_that_won() -> None:
    """The least late row is in the first of two pools, and its worker fits no decode worker."""
    ucx, nixl = PairKey(transport="ucx"), PairKey(transport="nixl")
    pools = {
        "a": pool_view("a", [view("a:1", queued_s=5.0, pair=ucx)], speed=SPEED),
        "b": pool_view("b", [view("b:1", queued_s=9.0, pair=nixl)], speed=SPEED),
        "d": pool_view("d", [view("d:1", pair=nixl)], speed=SPEED),
    }
    prefill = replace(one_cell(Stage.PREFILL, "a", "b"), cells=((0, 1),))
    grids = {Stage.PREFILL: prefill, Stage.DECODE: one_cell(Stage.DECODE, "d")}
    decision = choose(ask(isl_tokens=ISL, sla=fits(0.1)), grids, pools, rng=rng())
    assert [choice.worker for choice in decision.stages] == ["b:1", "d:1"]
    assert decision.is_met is False


def kept_pool(views: list[RowView], kept: KeptRoom | None) -> dict[str, PoolSnapshot]:
    return {"p": structs.replace(pool_view("p", views, speed=SPEED), kept=kept)}


def row_of(
    pools: Mapping[str, PoolSnapshot], sla: Sla, stage: Stage = Stage.PREFILL, **more: Any
) -> tuple[int | None, bool | None]:
    asked = ask(isl_tokens=ISL, sla=sla, **more)
    choice = choose_stage(stage, asked, one_cell(stage, "p"), pools, draw=0.5)
    return choice.row, choice.is_met


def test_others_leave_room_for_protected_requests_on_so_many_rows() -> None:
    views = queued(0.3, 0.1, 0.1, 0.4)
    room = IDLE_S + 0.15  # so two of them have room, also with one more of these prompts
    at_any = fits(5.0)
    assert row_of(kept_pool(views, None), at_any) == (3, True)
    assert row_of(kept_pool(views, KeptRoom(2, room, math.inf)), at_any) == (3, True)
    row, is_met = row_of(kept_pool(views, KeptRoom(3, room, math.inf)), at_any)
    assert row in (1, 2), "while too few rows have room, others make no queue longer"
    pools = kept_pool(queued(0.3, 0.1, 0.1, 0.1), KeptRoom(4, room, math.inf))
    row, is_met = row_of(pools, at_any)
    assert row in (1, 2, 3), "it leaves the room"
    assert is_met is True
    assert row_of(pools, at_any, is_protected=True) == (0, True)
    row, is_met = row_of(kept_pool(queued(0.3, 0.3), KeptRoom(2, IDLE_S, math.inf)), at_any)
    assert is_met is False, "it would take room of the last rows that have it, so it is a miss"


def test_others_leave_room_in_the_batch_of_protected_requests() -> None:
    views = [view("w0:1", inflight=20, worker_inflight=20), view("w1:1", inflight=2)]
    sla = Sla(itl_ms=1000.0)
    of = SPEED.frozen
    kept_s = of.itl_s(10, ISL)
    room = KeptRoom(1, math.inf, kept_s)
    assert row_of(kept_pool(views, None), sla, Stage.DECODE) == (0, True)
    assert row_of(kept_pool(views, room), sla, Stage.DECODE) == (0, True)
    pools = kept_pool(views, KeptRoom(2, math.inf, kept_s))
    assert row_of(pools, sla, Stage.DECODE) == (1, True)
    assert row_of(pools, sla, Stage.DECODE, is_protected=True) == (0, True)


def test_a_relegated_request_that_is_late_takes_an_idle_row_or_waits() -> None:
    late = Sla(ttft_ms=0.001)
    views = queued(0.3, 0.0, 0.1)
    assert row_of(kept_pool(views, None), late, yields=True) == (1, False)
    assert row_of(kept_pool(queued(0.3, 0.1), None), late, yields=True) == (None, False)
    # Not at the price of room that is kept.
    room = KeptRoom(1, IDLE_S / 2, math.inf)
    assert row_of(kept_pool(views, room), late, yields=True) == (None, False)
    assert row_of(kept_pool(views, None), fits(0.2), yields=True) == (2, True)
    nobody = [view("w0:1", state=State.DRAINING)]
    assert row_of(kept_pool(nobody, None), late, yields=True) == (None, None)


def test_whom_a_relegated_request_waits_for_is_said() -> None:
    pools = kept_pool(queued(0.3, 0.1), None)
    asked = ask(isl_tokens=ISL, sla=Sla(ttft_ms=0.001), yields=True)
    stages = {Stage.PREFILL: one_cell(Stage.PREFILL, "p")}
    decision = choose(asked, stages, pools, rng=rng(1))
    assert decision.stages[0].reasons == {YIELDS}
    assert YIELDS in explained(decision)


def test_what_neither_fits_nor_is_likely_to_miss_is_not_judged_relegated_or_not() -> None:
    line = Calibration(math.log(2), 1.0, 0.6, -9.0, 9.0)
    pools = {"p": off(pool_view("p", [view()], speed=SPEED), ttft_calibration=line)}
    sla = Sla(ttft_ms=1000 * 2 * IDLE_S / TTFT_SHARE)
    for yields in (False, True):
        asked = ask(isl_tokens=ISL, sla=sla, yields=yields)
        grid = one_cell(Stage.PREFILL, "p")
        choice = choose_stage(Stage.PREFILL, asked, grid, pools, draw=rng().random())
        assert (choice.row, choice.is_met) == (0, None)
        decision = Decision(asked, (choice,))
        assert decision.is_met is None
        text = explained(decision)
        assert "Whether it meets its TTFT target of" in text
        assert "there cannot be told." in text
        assert "next in the order" not in text
