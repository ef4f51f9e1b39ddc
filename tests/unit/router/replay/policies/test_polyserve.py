"""PolyServe on views worked out by hand."""

import pytest

from slagate.pools.grid.grid import Stage
from slagate.router.replay.policies.polyserve import PolyServe
from slagate.router.replay.policies.view import REFUSED, Pick, Picks, StageView
from support.peer_views import Column, stage_view


def pick(*views: StageView, policy: PolyServe | None = None, draw: float = 0.0) -> Picks | str:
    return (policy or PolyServe()).pick({view.stage: view for view in views}, draw)


def decode_row(
    policy: PolyServe,
    itl_s: float | None,
    *,
    inflight: Column = 0,
    step_s: Column = 0.010,
    growth_s: Column = 0.0,
    is_open: list[bool] | None = None,
) -> int | str | None:
    view = stage_view(
        Stage.DECODE,
        3,
        itl_s=itl_s,
        inflight=inflight,
        step_s=step_s,
        growth_s=growth_s,
        is_open=is_open,
    )
    picks = policy.pick({Stage.DECODE: view}, 0.0)
    return picks if isinstance(picks, str) else picks[Stage.DECODE].row


def test_prefill_takes_the_fullest_that_is_in_time_with_transfer_and_first_step() -> None:
    # 0.95 + 0.05 + 0.01 = 1.01 s is late, 0.94 + 0.06 is not.
    prefill = stage_view(Stage.PREFILL, 3, prefill_s=[0.1, 0.94, 0.95])
    decode = stage_view(Stage.DECODE, 1, transfer_s=0.05, step_s=0.010)
    picks = pick(prefill, decode)
    assert not isinstance(picks, str)
    assert picks[Stage.PREFILL].row == 1
    assert picks[Stage.PREFILL].ttft_s == pytest.approx(1.0)


def test_a_limit_below_the_target_leaves_room_for_errors() -> None:
    prefill = stage_view(Stage.PREFILL, 3, prefill_s=[0.1, 0.94, 0.95])
    decode = stage_view(Stage.DECODE, 1, transfer_s=0.05, step_s=0.010)
    picks = pick(prefill, decode, policy=PolyServe(ttft_limit=0.9))
    assert not isinstance(picks, str)
    assert picks[Stage.PREFILL].row == 0


def test_decode_is_admitted_by_the_step_that_it_grows_to() -> None:
    # After 100 tokens each the steps are 20, 21 and 11 ms.
    steps = {"step_s": [0.010, 0.011, 0.010], "growth_s": [1e-4, 1e-4, 1e-5]}
    assert decode_row(PolyServe(answer_tokens=100), 0.020, **steps) == 0
    assert decode_row(PolyServe(answer_tokens=0), 0.020, **steps) == 1
    assert decode_row(PolyServe(answer_tokens=1000), 0.020, **steps) == 2


def test_a_limit_of_itl_leaves_room_too() -> None:
    steps = {"step_s": [0.010, 0.017, 0.018], "growth_s": 0.0}
    assert decode_row(PolyServe(), 0.020, **steps) == 2
    assert decode_row(PolyServe(itl_limit=0.85), 0.020, **steps) == 1


def test_own_tier_before_a_tighter_one_before_an_idle_worker() -> None:
    policy = PolyServe(answer_tokens=0)
    assert decode_row(policy, 0.015, step_s=[0.010, 0.009, 0.009]) == 0
    assert decode_row(policy, 0.030, inflight=[1, 0, 0], step_s=[0.016, 0.02, 0.01]) == 1
    busy = [1, 1, 0]
    # The tier of 30 ms has the less full worker of both.
    assert decode_row(policy, 0.030, inflight=busy, step_s=[0.014, 0.012, 0.029]) == 1
    # It is full, and the worker of the tighter tier admits by its own 15 ms.
    assert decode_row(policy, 0.030, inflight=busy, step_s=[0.015, 0.031, 0.029]) == 0
    assert decode_row(policy, 0.030, inflight=busy, step_s=[0.016, 0.031, 0.029]) == 2


def test_a_looser_tier_takes_no_tighter_request() -> None:
    policy = PolyServe(answer_tokens=0)
    assert decode_row(policy, 0.100, step_s=[0.010, 0.2, 0.2]) == 0
    closed = [True, False, False]
    assert decode_row(policy, 0.015, inflight=[1, 0, 0], is_open=closed) == REFUSED


def test_a_worker_leaves_its_tier_when_it_is_idle() -> None:
    policy = PolyServe(answer_tokens=0)
    assert decode_row(policy, 0.100, step_s=[0.010, 0.2, 0.2]) == 0
    assert decode_row(policy, 0.015, step_s=[0.010, 0.2, 0.2]) == 0
    # It is of the tighter tier now, where a step of 20 ms admits nobody.
    assert decode_row(policy, 0.100, inflight=[1, 0, 0], step_s=[0.020, 0.2, 0.2]) == REFUSED


def test_an_aggregated_worker_has_to_meet_all_three() -> None:
    def row(prefill_s: list[float], step_s: list[float], growth_s: float = 0.0) -> int | str | None:
        view = stage_view(Stage.AGG, prefill_s=prefill_s, step_s=step_s, growth_s=growth_s)
        picks = pick(view, policy=PolyServe(answer_tokens=100))
        return picks if isinstance(picks, str) else picks[Stage.AGG].row

    # The fuller is the one nearer to either target: 0.9 of TTFT, 0.5 of TPOT.
    assert row([0.9, 0.2], [0.010, 0.010]) == 0
    assert row([0.4, 0.2], [0.010, 0.012]) == 1
    assert row([1.1, 0.2], [0.010, 0.010]) == 1
    assert row([0.9, 0.2], [0.021, 0.010]) == 1
    # The second token would come after 1.02 s.
    assert row([1.0, 0.2], [0.0205, 0.010]) == 1
    assert row([0.9, 0.2], [0.010, 0.010], growth_s=2e-4) == REFUSED


def test_who_is_admitted_by_nobody_is_refused_or_goes_to_the_least_late() -> None:
    prefill = stage_view(Stage.PREFILL, 3, prefill_s=[5.0, 3.0, 4.0])
    decode = stage_view(Stage.DECODE, 3, step_s=[0.04, 0.03, 0.05], transfer_s=0.1)
    assert pick(prefill, decode) == REFUSED
    picks = pick(prefill, decode, policy=PolyServe(late="least"))
    assert not isinstance(picks, str)
    assert [each.row for each in picks.values()] == [1, 1]
    assert picks[Stage.PREFILL].ttft_s == pytest.approx(3.13)


def test_without_targets_everybody_is_admitted() -> None:
    views = [
        stage_view(stage, prefill_s=9.0, step_s=1.0, ttft_s=None, itl_s=None)
        for stage in (Stage.PREFILL, Stage.DECODE)
    ]
    assert pick(*views, draw=0.9) != REFUSED


def test_equals_are_drawn() -> None:
    views = [stage_view(stage, prefill_s=0.5, step_s=0.01) for stage in Stage if stage != Stage.AGG]
    for draw, row in ((0.0, 0), (0.9, 1)):
        picks = pick(*views, draw=draw)
        assert not isinstance(picks, str)
        assert [each.row for each in picks.values()] == [row, row]


def test_a_stage_with_nobody_open_is_a_wait() -> None:
    prefill = stage_view(Stage.PREFILL, prefill_s=[9.0, 8.0])
    decode = stage_view(Stage.DECODE, is_open=[False, False])
    assert pick(prefill, decode) == {Stage.PREFILL: Pick(1), Stage.DECODE: Pick(None)}
