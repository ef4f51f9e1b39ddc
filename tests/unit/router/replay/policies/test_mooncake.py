"""Mooncake's algorithm on views worked out by hand."""

import pytest

from slagate.pools.grid.grid import Stage
from slagate.router.replay.policies.mooncake import Mooncake
from slagate.router.replay.policies.view import REFUSED, Pick, Picks, StageView
from support.peer_views import stage_view


def pick(*views: StageView, policy: Mooncake | None = None, draw: float = 0.0) -> Picks | str:
    return (policy or Mooncake()).pick({view.stage: view for view in views}, draw)


def fleet(
    prefill_s: list[float],
    step_s: list[float],
    *,
    transfer_s: float = 0.05,
    ttft_s: float | None = 1.0,
    itl_s: float | None = 0.020,
) -> tuple[StageView, StageView]:
    targets = {"ttft_s": ttft_s, "itl_s": itl_s}
    return (
        stage_view(Stage.PREFILL, len(prefill_s), prefill_s=prefill_s, **targets),
        stage_view(Stage.DECODE, len(step_s), step_s=step_s, transfer_s=transfer_s, **targets),
    )


def test_the_least_ttft_and_the_least_step() -> None:
    picks = pick(*fleet([0.6, 0.4], [0.010, 0.015]))
    assert not isinstance(picks, str)
    assert picks[Stage.PREFILL].row == 1
    assert picks[Stage.PREFILL].ttft_s == pytest.approx(0.4 + 0.05 + 0.010)
    assert picks[Stage.DECODE] == Pick(0)


def test_equals_are_drawn() -> None:
    for draw, row in ((0.0, 0), (0.5, 1), (0.99, 1)):
        picks = pick(*fleet([0.4, 0.4], [0.010, 0.010]), draw=draw)
        assert not isinstance(picks, str)
        assert [each.row for each in picks.values()] == [row, row]


def test_refused_where_transfer_and_the_first_step_make_it_late() -> None:
    assert pick(*fleet([0.94], [0.010])) != REFUSED
    assert pick(*fleet([0.9401], [0.010])) == REFUSED
    assert pick(*fleet([0.9401], [0.010]), policy=Mooncake(ttft_limit=1.1)) != REFUSED
    assert pick(*fleet([0.9401], [0.010], ttft_s=None)) != REFUSED


def test_refused_where_the_step_is_too_long() -> None:
    assert pick(*fleet([0.1], [0.020])) != REFUSED
    assert pick(*fleet([0.1], [0.0201])) == REFUSED
    assert pick(*fleet([0.1], [0.0201]), policy=Mooncake(itl_limit=1.1)) != REFUSED
    assert pick(*fleet([0.1], [0.0201], itl_s=None)) != REFUSED


def test_an_aggregated_worker_by_its_ttft_and_its_step() -> None:
    def agg(step_s: list[float]) -> StageView:
        return stage_view(Stage.AGG, prefill_s=[0.99, 0.98], step_s=step_s)

    assert pick(agg([0.010, 0.015])) == {Stage.AGG: Pick(1, 0.98)}
    assert pick(agg([0.010, 0.021])) == REFUSED


def test_a_stage_with_nobody_open_is_a_wait_and_no_refusal() -> None:
    prefill, _ = fleet([5.0, 4.0], [0.010])
    full = stage_view(Stage.DECODE, is_open=[False, False])
    assert pick(prefill, full) == {Stage.PREFILL: Pick(1), Stage.DECODE: Pick(None)}


def test_a_retry_of_one_stage() -> None:
    prefill, decode = fleet([0.5], [0.010])
    assert pick(decode) == {Stage.DECODE: Pick(0)}
    assert pick(prefill) == {Stage.PREFILL: Pick(0, 0.5)}
