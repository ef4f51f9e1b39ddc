"""llm-d's headroom: weights worked out by hand, and which draws fall to which pair."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from slagate.pools.grid.grid import Stage
from slagate.router.replay.policies.llmd_headroom import LlmdHeadroom
from slagate.router.replay.policies.view import Pick, StageView
from support.peer_views import stage_view

SURE = LlmdHeadroom(explore=0.0, p90_ratio=1.0, ttft_weight=0.75)
"""Without exploring and spread; at the default weight of 0.8 rounding would decide some of these cases."""


def rows(policy: LlmdHeadroom, *views: StageView, draw: float) -> tuple[int | None, ...]:
    picks = policy.pick({view.stage: view for view in views}, draw)
    assert not isinstance(picks, str)
    return tuple(pick.row for pick in picks.values())


def shares(policy: LlmdHeadroom, *views: StageView, n: int = 1000) -> Counter[tuple[int, ...]]:
    """How many of `n` draws fall to each pair."""
    drawn = [rows(policy, *views, draw=(i + 0.5) / n) for i in range(n)]
    return Counter(tuple(row for row in each if row is not None) for each in drawn)


def test_least_headroom_is_the_likeliest() -> None:
    # Headroom of TTFT: 0.9, 0.4 and 0.1 s, so n = 1, 0.375 and 0; no difference of ITL, so 0.5. Combined
    # 0.875, 0.406 and 0.125: weights int(100 * 0.125) + 1 = 13, 60 and 88 of 161.
    view = stage_view(Stage.AGG, 3, prefill_s=[0.1, 0.6, 0.9], step_s=0.010)
    assert shares(SURE, view, n=161) == {(0,): 13, (1,): 60, (2,): 88}


def test_most_headroom_is_the_likeliest() -> None:
    view = stage_view(Stage.AGG, 3, prefill_s=[0.1, 0.6, 0.9], step_s=0.010)
    most = replace(SURE, strategy="most")
    assert shares(most, view, n=142) == {(0,): 88, (1,): 41, (2,): 13}


def test_itl_has_the_rest_of_the_weight() -> None:
    # n of TTFT is 0.5 for both; of ITL 1 and 0: combined 0.625 and 0.375, weights 38 and 63.
    view = stage_view(Stage.AGG, prefill_s=0.5, step_s=[0.010, 0.015])
    assert shares(SURE, view, n=101) == {(0,): 38, (1,): 63}


def test_a_pair_has_the_seconds_of_both_workers() -> None:
    # 0.5 + 0.2 + 0.01 and 0.5 + 0.4 + 0.01 are in time, with the other prefill worker 0.9 + 0.2 is not.
    prefill = stage_view(Stage.PREFILL, prefill_s=[0.5, 0.9])
    decode = stage_view(Stage.DECODE, transfer_s=[0.2, 0.4], step_s=0.010)
    assert set(shares(SURE, prefill, decode)) == {(0, 0), (0, 1)}
    picks = SURE.pick({Stage.PREFILL: prefill, Stage.DECODE: decode}, 0.0)
    assert not isinstance(picks, str)
    assert picks[Stage.PREFILL].ttft_s == pytest.approx(0.71)


def test_the_p90_has_to_be_in_time() -> None:
    view = stage_view(Stage.AGG, prefill_s=[0.9, 0.5], step_s=0.010)
    assert set(shares(LlmdHeadroom(explore=0.0), view)) == {(1,)}


def test_one_draw_in_a_hundred_explores_those_that_miss() -> None:
    view = stage_view(Stage.AGG, 3, prefill_s=[2.0, 0.5, 3.0], step_s=0.010)
    # The less late one is the likelier: badness 0 and 0.75, weights 81 and 21 of 102.
    found = shares(replace(SURE, explore=0.01), view, n=10_200)
    assert found == {(0,): 81, (1,): 10_098, (2,): 21}


def test_of_those_that_miss_the_ones_without_a_request_come_first() -> None:
    view = stage_view(Stage.AGG, 3, prefill_s=[2.0, 3.0, 4.0], step_s=0.01, inflight=[1, 0, 0])
    assert shares(SURE, view, n=102) == {(1,): 81, (2,): 21}


def test_those_that_miss_one_target_are_weighed_apart() -> None:
    # One misses TTFT by 1 s, two miss ITL by 10 and 20 ms; alone in its kind the first is the best of it.
    view = stage_view(
        Stage.AGG, 3, prefill_s=[2.0, 0.5, 0.5], step_s=[0.01, 0.03, 0.04], inflight=1
    )
    assert shares(SURE, view, n=223) == {(0,): 81, (1,): 81, (2,): 61}


def test_without_targets_all_are_late_by_what_they_take() -> None:
    view = stage_view(Stage.AGG, prefill_s=[0.1, 0.2], step_s=0.01, ttft_s=None, itl_s=None)
    assert shares(SURE, view, n=102) == {(0,): 81, (1,): 21}


def test_every_draw_finds_an_open_pair() -> None:
    prefill = stage_view(Stage.PREFILL, is_open=[True, False], prefill_s=0.5)
    decode = stage_view(Stage.DECODE, is_open=[False, True], step_s=0.01)
    for draw in (0.0, 0.005, 0.01, 0.5, 1 - 2**-53):
        assert rows(LlmdHeadroom(), prefill, decode, draw=draw) == (0, 1)


def test_draws_are_used_in_order() -> None:
    view = stage_view(Stage.AGG, 3, prefill_s=[0.1, 0.6, 0.9], step_s=0.010)
    found = [rows(SURE, view, draw=i / 50)[0] for i in range(50)]
    assert all(a is not None and b is not None and a <= b for a, b in pairwise(found))


def test_a_stage_with_nobody_open_is_a_wait() -> None:
    prefill = stage_view(Stage.PREFILL, prefill_s=[0.2, 0.1])
    decode = stage_view(Stage.DECODE, is_open=[False, False])
    picks = SURE.pick({Stage.PREFILL: prefill, Stage.DECODE: decode}, 0.0)
    assert picks == {Stage.PREFILL: Pick(1), Stage.DECODE: Pick(None)}
