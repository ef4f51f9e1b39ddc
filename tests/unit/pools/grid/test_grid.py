"""The grid: which band a value falls in, which pool a cell and a priority give, and the retry order."""

from importlib.resources import files
from typing import Any

import pytest

from slagate.pools.fleet_file.load import load_config, parse_config
from slagate.pools.grid.errors import SelectError
from slagate.pools.grid.grid import Axis, PriorityRule, StageGrid
from support.fleet.files import disagg_file
from support.fleet.problems import PREFILL


def grid(*, priorities: tuple[int, ...] = (0, 1, 2), **changes: Any) -> StageGrid:
    """One row and one column over three pools, so that only rules and retries decide."""
    axes = (Axis("isl", 0, 8000, 1), Axis("ttft_ms", 100, 900, 1))
    names = tuple(f"pool-{at}" for at in range(len(priorities)))
    return StageGrid(axes, cells=((0,),), pool_names=names, priorities=priorities, **changes)


def repr_of(value: object) -> str:
    """A test id, also for ints of more digits than Python prints."""
    return f"{value.bit_length()} bits" if isinstance(value, int) else repr(value)


# --- the arithmetic --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("isl", "row"), [(0, 0), (1999, 0), (2000, 1), (7999, 3), (8000, 3), (50000, 3), (-5, 0)]
)
def test_cfg_02_a_size_on_an_edge_is_in_the_upper_band_and_outside_is_clamped(
    isl: int, row: int
) -> None:
    assert Axis("isl", 0, 8000, 4).index(isl) == row


@pytest.mark.parametrize(
    ("ttft_ms", "column"), [(None, 1), (0, 0), (100, 0), (499, 0), (500, 1), (900, 1), (5000, 1)]
)
def test_cfg_02_a_missing_target_is_the_middle_and_zero_is_the_tightest(
    ttft_ms: int | None, column: int
) -> None:
    assert Axis("ttft_ms", 100, 900, 2).index(ttft_ms) == column


def test_cfg_02_a_missing_target_is_the_same_as_an_absent_one() -> None:
    prefill = parse_config(disagg_file(), source="f").stages["prefill"]
    assert prefill.select({"isl": 1}) == prefill.select({"isl": 1, "ttft_ms": None})


@pytest.mark.parametrize(
    ("itl_ms", "column"),
    [(4.8, 2), (9.6, 5), (11.2, 6), (2.4, 1), (3.2, 2), (16, 9), (15.999, 9)],
)
def test_cfg_03_edges_fall_where_dividing_by_the_step_puts_them(itl_ms: float, column: int) -> None:
    """Parity: 4.8, 9.6 and 11.2 are edges 3, 6 and 7 on paper, and 2, 5 and 6 in Dynamo."""
    assert Axis("itl_ms", 0, 16, 10).index(itl_ms) == column


def test_cfg_03_multiplying_first_would_differ() -> None:
    assert Axis("ttft_ms", 10, 500, 50).index(255) == 24
    assert int((255 - 10) * 50 / (500 - 10)) == 25


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "size", [10**400, 1 << 20_000, 1e308, 1.7976931348623157e308, 5e-324, 2**64], ids=repr_of
)
@pytest.mark.parametrize(
    "axis",
    [
        Axis("isl", 0, 8000, 4),
        Axis("isl", -1e308, 7e307, 4),
        Axis("isl", -(10**308), 7 * 10**307, 4),
        Axis("isl", 0, 3e-310, 4),
    ],
)
def test_cfg_04_any_finite_number_has_a_band(axis: Axis, size: float, sign: int) -> None:
    value = sign * size
    if value >= axis.high:
        assert axis.index(value) == 3
    elif value <= axis.low:
        assert axis.index(value) == 0
    else:
        assert 0 <= axis.index(value) <= 3


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf"), "fast", True, False, [], {}, 1j]
)
@pytest.mark.parametrize("field", ["isl", "ttft_ms", "priority"])
def test_cfg_04_what_is_not_a_finite_number_is_refused_by_name(field: str, value: Any) -> None:
    request: dict[str, Any] = {"isl": 1, "ttft_ms": 200, "priority": 5, field: value}
    priority = request.pop("priority")
    with pytest.raises(SelectError, match=f"^{field}: must be a finite number") as caught:
        grid().select(request, priority)
    assert caught.value.field == field


def test_a_missing_size_is_refused_by_name() -> None:
    for request in ({"ttft_ms": 200}, {"isl": None, "ttft_ms": 200}):
        with pytest.raises(SelectError, match=r"^isl: is required$"):
            grid().select(request)


def test_a_misspelt_field_is_refused_and_not_read_as_a_missing_target() -> None:
    with pytest.raises(
        SelectError, match=r"^ttft: is not one of isl, context_length, ttft_ms, itl"
    ):
        grid().select({"isl": 1, "ttft": 200})


def test_values_for_other_stages_are_allowed() -> None:
    everything = {"isl": 9000, "context_length": None, "ttft_ms": 200, "itl_ms": 5}
    assert grid().select(everything) == grid().select({"isl": 9000, "ttft_ms": 200})


# --- rules and retries -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("priority", "pool"),
    [(None, 0), (9, 0), (10, 1), (55, 1), (100, 1), (101, 0), (100.5, 0), (9.999, 0), (10**400, 0)],
)
def test_cfg_07_the_first_matching_rule_wins_ends_included(
    priority: float | None, pool: int
) -> None:
    ruled = grid(rules=(PriorityRule(10, 100, 1), PriorityRule(50, 60, 2)))
    cell = ruled.select({"isl": 1}, priority)
    assert (cell.base_pool, cell.pool) == (0, pool)


def test_cfg_07_zero_and_negative_priorities_are_priorities() -> None:
    ruled = grid(rules=(PriorityRule(-2, 0, 2),))
    assert [ruled.select({"isl": 1}, p).pool for p in (None, -3, -2, 0, 1)] == [0, 0, 2, 2, 0]


def test_cfg_07_rules_come_from_the_file_in_order() -> None:
    content = disagg_file() | {"num_prefill_pools": 3, "prefill_pools": ["a", "b", "c"]}
    del content["prefill_pool_priorities"]
    content[PREFILL]["priority_overrides"] = [
        {"min_priority": 10, "max_priority": 100, "target_pool": 1},
        {"min_priority": 50, "max_priority": 60.5, "target_pool": 2},
    ]
    prefill = parse_config(content, source="f").stages["prefill"]
    assert prefill.rules == (PriorityRule(10, 100, 1), PriorityRule(50, 60.5, 2))
    assert prefill.select({"isl": 1, "ttft_ms": 100}, 55).pool == 1


@pytest.mark.parametrize(
    ("retry", "chosen", "order"),
    [(True, 4, (4, 0, 2, 3, 1)), (True, 1, (1,)), (False, 4, (4,)), (True, 2, (2, 1))],
)
def test_cfg_08_a_retry_goes_through_strictly_faster_pools_slowest_first(
    *, retry: bool, chosen: int, order: tuple[int, ...]
) -> None:
    assert grid(priorities=(2, 0, 1, 1, 3), retry=retry).retry_order(chosen) == order


def test_cfg_08_without_a_list_the_pool_order_is_the_order_of_speed() -> None:
    content = disagg_file()
    del content["prefill_pool_priorities"]
    config = parse_config(content, source="f")
    assert config.stages["prefill"].priorities == (0, 1)
    assert config.stages["prefill"].retry_order(1) == (1, 0)
    del content["enable_priority_retry"]
    assert parse_config(content, source="f").stages["prefill"].retry_order(1) == (1,)


def test_the_worked_example_of_the_grid_page_is_true() -> None:
    """docs/grid.md walks through these numbers with configs/grids/example-disagg.json."""
    stages = load_config(str(files("slagate.configs") / "grids" / "example-disagg.json")).stages
    prefill = stages["prefill"].select({"isl": 6000, "ttft_ms": 700}, 95)
    assert (prefill.index, prefill.base_pool, prefill.pool) == ((1, 1), 0, 0)
    prefill = stages["prefill"].select({"isl": 6000})
    assert (prefill.index, stages["prefill"].pool_names[prefill.pool]) == ((1, 2), "prefill-tp1")
    assert stages["prefill"].select({"isl": 6000}, 95).pool == 0
    decode = stages["decode"].select({"context_length": 6000, "itl_ms": 30})
    assert (decode.index, stages["decode"].pool_names[decode.pool]) == ((0, 2), "decode-tp2")
    assert stages["prefill"].retry_order(1) == (1, 0)


def test_a_place_that_was_found_before_is_that_of_its_bands_and_rule() -> None:
    fast_for_3 = PriorityRule(3, 3, 1)
    axes = (Axis("isl", 0, 200, 2), Axis("ttft_ms", 100, 900, 1))
    of = StageGrid(axes, ((0, 1), (2,)), ("a", "b", "c"), (1, 2, 0), (fast_for_3,), retry=True)
    for _ in range(2):
        for isl, priority, names in (
            (50, None, ("a", "b", "c")),
            (50, 3, ("b", "a", "c")),
            (150, None, ("c",)),
            (150, 4, ("c",)),
            (150, 3, ("b", "a", "c")),
        ):
            cell, order, spill = of.place({"isl": isl}, priority)
            assert (order, cell) == (names, of.select({"isl": isl}, priority))
            assert cell.base_pool == (2 if isl == 150 else 0)
            assert cell.pool == of.pool_names.index(names[0])
            assert cell.by_rule == (priority == 3)
            assert spill == (names[:1] if cell.by_rule else names[: 1 + len(cell.spill)])


def test_load_decides_among_the_pools_that_the_grid_lists_or_among_all_the_cheapest_first() -> None:
    only_b = PriorityRule(3, 3, 1)
    axes = (Axis("isl", 0, 200, 2), Axis("ttft_ms", 100, 900, 1))

    def spill(mode: str, isl: int, priority: int | None = None) -> tuple[str, ...]:
        of = StageGrid(
            axes,
            ((0, 2), (3,)),
            ("a", "b", "c", "d"),
            (0, 1, 2, 3),
            (only_b,),
            spill=mode,
            costs=(4, 1, 2, 1),
        )
        place = of.place({"isl": isl}, priority)
        assert set(place.spill) <= set(place.order)
        assert place.order[0] == of.pool_names[place.cell.pool]
        return place.spill

    assert [spill(mode, 50) for mode in ("none", "listed")] == [("a",), ("a", "c")]
    assert [spill(mode, 150) for mode in ("none", "listed")] == [("d",), ("d",)]
    assert spill("any", 50) == ("b", "d", "c", "a"), "of b and d neither is in the cell"
    assert spill("any", 150) == ("d", "b", "c", "a"), "d is the cell's"
    assert [spill(mode, 50, 3) for mode in ("none", "listed", "any")] == [("b",)] * 3
