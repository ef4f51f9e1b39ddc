"""Policies that go by turns: round robin, and Dynamo's grid."""

from slagate.pools.grid.grid import Stage
from slagate.router.replay.policies.round_robin import RoundRobin
from slagate.router.replay.policies.static_grid import StaticGrid
from slagate.router.replay.policies.view import Pick
from support.peer_views import stage_view


def test_round_robin_takes_the_open_row_of_longest_ago() -> None:
    views = {
        Stage.PREFILL: stage_view(Stage.PREFILL, 3, since_lease=[0, 2, 1], prefill_s=[0, 99, 0]),
        Stage.DECODE: stage_view(
            Stage.DECODE, 3, since_lease=[2, 1, 0], is_open=[False, True, True]
        ),
    }
    assert RoundRobin().pick(views, 0.9) == {Stage.PREFILL: Pick(1), Stage.DECODE: Pick(1)}


def test_the_first_of_rows_that_had_none_yet_has_the_turn() -> None:
    view = stage_view(Stage.AGG, 3, since_lease=[0, 1, 1])
    assert RoundRobin().pick({Stage.AGG: view}, 0.9) == {Stage.AGG: Pick(1)}


def test_round_robin_waits_where_nobody_is_open() -> None:
    view = stage_view(Stage.AGG, 2, is_open=[False, False])
    assert RoundRobin().pick({Stage.AGG: view}, 0.0) == {Stage.AGG: Pick(None)}


def test_the_static_grid_waits_for_the_worker_whose_turn_it_is() -> None:
    def pick(is_open: list[bool], is_full: list[bool]) -> object:
        view = stage_view(Stage.DECODE, 3, since_lease=[2, 1, 0], is_open=is_open, is_full=is_full)
        return StaticGrid().pick({Stage.DECODE: view}, 0.0)

    assert pick([True, True, True], [False] * 3) == {Stage.DECODE: Pick(0)}
    assert pick([False, True, True], [True, False, False]) == {Stage.DECODE: Pick(None)}
    # It is down, not full.
    assert pick([False, True, True], [False] * 3) == {Stage.DECODE: Pick(1)}
    assert pick([False] * 3, [False] * 3) == {Stage.DECODE: Pick(None)}
