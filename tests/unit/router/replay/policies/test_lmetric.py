"""Products of LMetric, worked out by hand."""

from slagate.pools.grid.grid import Stage
from slagate.router.replay.policies.lmetric import LMetric
from slagate.router.replay.policies.view import Pick, Picks, StageView
from support.peer_views import stage_view


def pick(*views: StageView, draw: float = 0.0) -> Picks:
    return LMetric().pick({view.stage: view for view in views}, draw)


def test_prompt_tokens_times_requests_in_prefill_requests_alone_in_decode() -> None:
    # (1000 - 900) * 6 = 600, (1000 + 200) * 1 = 1200 and (1000 - 500 + 100) * 2 = 1200
    prefill = stage_view(
        Stage.PREFILL, 3, cached=[900, 0, 500], queued=[0, 200, 100], inflight=[5, 0, 1]
    )
    decode = stage_view(Stage.DECODE, 3, inflight=[3, 2, 4], context=[0, 50_000, 0])
    assert pick(prefill, decode) == {Stage.PREFILL: Pick(0), Stage.DECODE: Pick(1)}


def test_an_aggregated_worker_has_both() -> None:
    view = stage_view(Stage.AGG, cached=[900, 0], queued=[0, 0], inflight=[9, 0])
    assert pick(view, draw=0.0) == {Stage.AGG: Pick(0)}
    assert pick(view, draw=0.9) == {Stage.AGG: Pick(1)}  # 100 * 10 = 1000 * 1


def test_a_closed_row_is_passed_over() -> None:
    view = stage_view(Stage.PREFILL, inflight=[0, 9], is_open=[False, True])
    assert pick(view) == {Stage.PREFILL: Pick(1)}
    nobody = stage_view(Stage.PREFILL, is_open=[False, False])
    assert pick(nobody) == {Stage.PREFILL: Pick(None)}
