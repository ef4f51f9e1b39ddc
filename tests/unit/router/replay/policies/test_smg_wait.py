"""Waits that SMG expects, worked out by hand: tokens at 10,000/s, and 0.15 s * k / (1 - k)."""

import msgspec
import numpy as np
import pytest

from slagate.pools.grid.grid import Stage
from slagate.router.replay.policies.smg_wait import SmgWait
from slagate.router.replay.policies.view import Pick, StageView
from support.peer_views import stage_view


def pick(policy: SmgWait, view: StageView, draw: float = 0.0) -> Pick:
    picks = policy.pick({view.stage: view}, draw)
    assert not isinstance(picks, str)
    return picks[view.stage]


def test_prefill_waits_for_queued_tokens_at_the_workers_speed() -> None:
    # 0.5 s and 0.4 s; then this prompt's 1000 - 500 tokens
    view = stage_view(
        Stage.PREFILL, queued=[5000, 16_000], tokens_per_s=[10_000, 40_000], cached=[0, 500]
    )
    found = pick(SmgWait(), view)
    assert found.row == 1
    assert found.ttft_s == pytest.approx(0.4 + 500 / 40_000)


def test_decode_waits_for_kv_cache_alone() -> None:
    view = stage_view(Stage.DECODE, context=[50_000, 40_000], queued=[0, 9000])
    assert pick(SmgWait(), view) == Pick(1)
    both = {Stage.PREFILL: stage_view(Stage.PREFILL), Stage.DECODE: view}
    picks = SmgWait().pick(both, 0.0)
    assert not isinstance(picks, str)
    assert picks[Stage.PREFILL].ttft_s == pytest.approx(1000 / 10_000 + 0.15 * 0.4 / 0.6)


def test_an_aggregated_worker_has_both_terms() -> None:
    # 0.1 + 0.15 * 0.75 / 0.25 = 0.55 s, and 0.5 s
    view = stage_view(Stage.AGG, queued=[1000, 5000], context=[75_000, 0])
    assert pick(SmgWait(), view).row == 1
    assert pick(SmgWait(kv_weight=0.13), view).row == 0


def test_what_was_sent_since_the_report_counts_until_the_next() -> None:
    policy = SmgWait()

    def at(now_s: float, queued: list[int]) -> int | None:
        return pick(policy, stage_view(Stage.PREFILL, now_s=now_s, queued=queued, cached=900)).row

    assert at(10.0, [0, 900]) == 0
    # 1000 tokens were sent to the first, cached or not; that its queue is empty again is not known yet.
    assert at(10.5, [0, 900]) == 1
    assert at(10.9, [0, 0]) == 0
    assert at(11.0, [0, 900]) == 0


def test_a_report_is_no_view_of_the_present() -> None:
    policy = SmgWait(report_s=10.0)
    first = stage_view(Stage.PREFILL, now_s=0.0, queued=[0, 5000])
    assert pick(policy, first).row == 0
    later = msgspec.structs.replace(first, now_s=9.0, queued_tokens=np.array([9000, 0]))
    assert pick(policy, later).row == 0
    assert pick(policy, msgspec.structs.replace(later, now_s=10.0)).row == 1


def test_without_an_interval_each_report_is_new() -> None:
    policy = SmgWait(report_s=0.0)
    for now_s in (1.0, 1.25, 1.5):
        view = stage_view(Stage.PREFILL, now_s=now_s, queued=[0, 500])
        assert pick(policy, view).row == 0


def test_a_worker_with_eight_waiting_is_passed_over_while_another_has_fewer() -> None:
    # One of nine is computed.
    view = stage_view(Stage.PREFILL, inflight=[9, 8], queued=[0, 5000])
    assert pick(SmgWait(), view).row == 1
    both = stage_view(Stage.PREFILL, inflight=[9, 9], queued=[0, 5000])
    assert pick(SmgWait(), both).row == 0


def test_those_sent_since_the_report_wait_too() -> None:
    policy = SmgWait(max_waiting=2)
    view = stage_view(Stage.DECODE, context=[0, 50_000])
    assert [pick(policy, view).row for _ in range(5)] == [0, 0, 1, 1, 0]


def test_a_full_kv_cache_is_passed_over_while_another_is_not() -> None:
    # 0.15 * 4 = 0.6 s and 1 s
    view = stage_view(Stage.AGG, context=[80_000, 0], queued=[0, 10_000])
    assert pick(SmgWait(), view).row == 1
    assert pick(SmgWait(max_kv_share=1.0), view).row == 0
    both = stage_view(Stage.AGG, context=[99_999, 100_000])
    assert pick(SmgWait(), both, 0.9).row == 1, "at 0.999 both are alike"


def test_nobody_open_is_a_wait() -> None:
    assert pick(SmgWait(), stage_view(Stage.DECODE, is_open=[False, False])).row is None
