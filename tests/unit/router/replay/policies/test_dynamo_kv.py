"""Costs of Dynamo's KV router, in blocks of 32 tokens, worked out from its formula."""

import pytest

from slagate.pools.grid.grid import Stage
from slagate.router.replay.policies.dynamo_kv import DynamoKv
from slagate.router.replay.policies.view import Pick, StageView
from support.peer_views import stage_view


def picked(view: StageView, policy: DynamoKv | None = None, draw: float = 0.0) -> int | None:
    picks = (policy or DynamoKv()).pick({view.stage: view}, draw)
    assert not isinstance(picks, str)
    pick = picks[view.stage]
    assert pick == Pick(pick.row), "it predicts no TTFT"
    return pick.row


def test_prefill_is_what_waits_and_this_prompt_less_what_is_cached() -> None:
    # 3200 + 640 - 0 = 120 blocks; 3200 + 3200 - 3200 = 100; 3200 + 0 - 0 = 100 blocks
    view = stage_view(Stage.PREFILL, 3, isl_tokens=3200, queued=[640, 3200, 0], cached=[0, 3200, 0])
    assert picked(view, draw=0.0) == 1
    assert picked(view, draw=0.99) == 2


def test_context_is_no_cost_of_prefill_and_prompts_are_none_of_decode() -> None:
    prefill = stage_view(Stage.PREFILL, context=[99_000, 0], queued=[0, 32])
    assert picked(prefill) == 0
    decode = stage_view(Stage.DECODE, context=[320, 352], queued=[9000, 0], cached=[0, 1000])
    assert picked(decode) == 0


def test_an_aggregated_worker_has_both() -> None:
    # 1000 + 3200 = 131.25 blocks, and 100 + 31.25 of context; 131.25 - 31.25, and 320 + 1000 = 41.25
    view = stage_view(Stage.AGG, queued=[3200, 3200], cached=[0, 1000], context=[2200, 320])
    assert picked(view) == 1


@pytest.mark.parametrize(("scale", "row"), [(1.0, 0), (0.5, 1)])
def test_the_scale_of_prefill(scale: float, row: int) -> None:
    # Blocks of prefill and context: 110 + 160 and 200 + 100, or 55 + 160 and 100 + 100.
    view = stage_view(
        Stage.AGG, isl_tokens=3200, queued=[320, 3200], context=[1920, 0], capacity=10**6
    )
    assert picked(view, DynamoKv(prefill_load_scale=scale)) == row


def test_blocks_on_the_host_count_three_quarters() -> None:
    # Credits of 96 * 0.75 = 72 and 73 blocks.
    view = stage_view(
        Stage.PREFILL, isl_tokens=6400, cached=[3072, 2336], device=[0, 2336], queued=0
    )
    assert picked(view) == 1
    # With half of the credit for the device 36.5.
    assert picked(view, DynamoKv(overlap_score_credit=0.5)) == 0


def test_the_credit_decays_with_the_queue_beyond_the_least_loaded() -> None:
    # The prompt's 100 blocks are all cached on the first, which has 100 more of them to do than the second:
    # its credit is 100, so the costs are 100 and 100 + 1; at a decay of 1 it is 50.
    view = stage_view(
        Stage.PREFILL, isl_tokens=3200, queued=[6400, 3232], cached=[3200, 0], since_lease=0
    )
    assert picked(view) == 0
    assert picked(view, DynamoKv(overlap_score_credit_decay=1.0)) == 1


def test_active_requests_cost_blocks_only_with_a_weight() -> None:
    view = stage_view(Stage.DECODE, context=[320, 640], inflight=[4, 1])
    assert picked(view) == 0
    assert picked(view, DynamoKv(decode_active_request_weight=8.0)) == 1


def test_nobody_open_is_a_wait() -> None:
    assert picked(stage_view(Stage.PREFILL, is_open=[False, False])) is None
