import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from slagate.pools.errors import ConfigError, SelectError
from slagate.pools.grid import Axis, PriorityRule, StageGrid
from slagate.pools.grid_config import FleetConfig, load_config, parse_config, require_workers
from support.fleet_files import agg_file, disagg_file

PREFILL = "prefill_pool_selection_strategy"
DECODE = "decode_pool_selection_strategy"
AGG = "agg_pool_selection_strategy"
MAPPING = "prefill_pool_mapping"


def lines(content: object) -> list[str]:
    """The problems of a file, one line each; the file must have some."""
    with pytest.raises(ConfigError) as caught:
        parse_config(content, source="fleet.json")
    assert str(caught.value).splitlines()[1:] == [f"  {p}" for p in caught.value.problems]
    return [str(problem) for problem in caught.value.problems]


def load(tmp_path: Path, text: str) -> FleetConfig:
    path = tmp_path / "fleet.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return load_config(path)


def grid(*, priorities: tuple[int, ...] = (0, 1, 2), **changes: Any) -> StageGrid:
    """One row and one column over three pools, so that only rules and retries decide."""
    axes = (Axis("isl", 0, 8000, 1), Axis("ttft_ms", 100, 900, 1))
    names = tuple(f"pool-{at}" for at in range(len(priorities)))
    return StageGrid(axes, cells=(0,), pool_names=names, priorities=priorities, **changes)


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


# --- the file --------------------------------------------------------------------------------------


def test_both_stages_come_out_with_their_orientation() -> None:
    """Rows are sizes and columns are targets: a transposed read gives other pools."""
    content = disagg_file()
    content[PREFILL][MAPPING] = [[0, 1], [1, 0]]
    content[DECODE]["decode_pool_mapping"] = [[0, 0], [1, 1]]
    config = parse_config(content, source="f")
    assert (config.mode, config.enable_priority_retry, config.warnings) == ("disagg", True, ())
    assert config.stages.keys() == {"prefill", "decode"}
    assert config.stages["prefill"].pool_names == ("p-fast", "p-bulk")
    cell = config.stages["prefill"].select({"isl": 100, "ttft_ms": 800})
    assert (cell.index, cell.row, cell.col, cell.pool) == ((0, 1), 0, 1, 1)
    decode = config.stages["decode"]
    assert decode.select({"context_length": 9000, "itl_ms": 5}).pool == 1
    assert decode.select({"context_length": 100, "itl_ms": 40}).pool == 0


def test_a_grid_of_three_axes_is_isl_then_ttft_then_itl() -> None:
    agg = parse_config(agg_file(), source="f").stages["agg"]
    mapping = agg_file()[AGG]["agg_pool_mapping"]
    for layer, isl in enumerate((0, 3000)):
        for row, ttft_ms in enumerate((0, 100, 250)):
            for col, itl_ms in enumerate((0, 30)):
                cell = agg.select({"isl": isl, "ttft_ms": ttft_ms, "itl_ms": itl_ms})
                assert (cell.index, cell.row, cell.col) == ((layer, row, col), row, col)
                assert cell.pool == mapping[layer][row][col]


def test_an_agg_grid_without_isl_has_two_axes() -> None:
    content = agg_file()
    for key in ("isl_min", "isl_max", "isl_resolution"):
        del content[AGG][key]
    content[AGG]["agg_pool_mapping"] = [[0, 1], [0, 1], [1, 2]]
    cell = parse_config(content, source="f").stages["agg"].select({"ttft_ms": 250, "itl_ms": 30})
    assert (cell.index, cell.pool) == ((2, 1), 2)


def test_the_mode_is_disagg_when_the_file_does_not_say() -> None:
    content = disagg_file()
    del content["mode"]
    assert parse_config(content, source="f").mode == "disagg"


def test_bounds_keep_their_type_so_that_large_ints_stay_exact() -> None:
    content = disagg_file()
    content[PREFILL] |= {"isl_min": 2**60, "isl_max": 2**60 + 4}
    axis = parse_config(content, source="f").stages["prefill"].axes[0]
    assert (axis.low, axis.step, axis.index(2**60 + 1), axis.index(2**60 + 2)) == (2**60, 2, 0, 1)


def test_long_and_short_names_of_the_pool_lists_mean_the_same() -> None:
    content = disagg_file()
    for stage in ("prefill", "decode"):
        content[f"{stage}_pool_dynamo_namespaces"] = content.pop(f"{stage}_pools")
    long = parse_config(content, source="f")
    assert long.stages == parse_config(disagg_file(), source="f").stages


def test_cfg_09_old_latency_keys_load_with_one_warning_each() -> None:
    content = disagg_file()
    strategy = content[PREFILL]
    strategy["ttft_min"] = strategy.pop("ttft_min_ms")
    strategy["ttft_max"] = strategy.pop("ttft_max_ms")
    config = parse_config(content, source="f")
    assert config.stages == parse_config(disagg_file(), source="f").stages
    assert config.warnings == (
        f"{PREFILL}.ttft_min: deprecated, write ttft_min_ms",
        f"{PREFILL}.ttft_max: deprecated, write ttft_max_ms",
    )


def test_cfg_09_the_new_key_wins_and_the_old_one_is_reported() -> None:
    content = disagg_file()
    content[PREFILL]["ttft_min"] = 1
    config = parse_config(content, source="f")
    assert config.stages["prefill"].axes[1].low == 100
    assert config.warnings == (f"{PREFILL}.ttft_min: ignored, ttft_min_ms is there too",)


def test_cfg_09_agg_has_old_keys_for_both_targets() -> None:
    content = agg_file()
    for key in ("ttft_min", "ttft_max", "itl_min", "itl_max"):
        content[AGG][key] = content[AGG].pop(f"{key}_ms")
    config = parse_config(content, source="f")
    assert [warning.split(":")[0] for warning in config.warnings] == [
        f"{AGG}.{key}" for key in ("ttft_min", "ttft_max", "itl_min", "itl_max")
    ]


def test_problems_name_keys_as_the_file_spells_them() -> None:
    content = disagg_file()
    content["prefill_pools"] = ["p-fast", " "]
    content[PREFILL]["ttft_max"] = "900"
    del content[PREFILL]["ttft_max_ms"]
    assert lines(content) == [
        'prefill_pools[1]: must not be empty (got " ")',
        f'{PREFILL}.ttft_max: must be a finite number (got "900")',
    ]


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"ttft_min_ms": 900},
            "ttft_min_ms: must be below ttft_max_ms, which is 900 (got 900)",
        ),
        ({"isl_min": 9000}, "isl_min: must be below isl_max, which is 8000 (got 9000)"),
    ],
)
def test_cfg_05_an_axis_without_width_is_refused_with_both_numbers(
    changes: dict[str, object], line: str
) -> None:
    content = disagg_file()
    content[PREFILL] |= changes
    assert lines(content) == [f"{PREFILL}.{line}"]


def test_cfg_05_the_two_numbers_go_by_the_old_names_where_the_file_uses_them() -> None:
    content = disagg_file()
    content[DECODE] |= {"itl_min": 50, "itl_max": 45}
    del content[DECODE]["itl_min_ms"], content[DECODE]["itl_max_ms"]
    assert lines(content) == [f"{DECODE}.itl_min: must be below itl_max, which is 45 (got 50)"]


@pytest.mark.parametrize(
    ("mapping", "found"),
    [
        (
            [[0, 1]],
            [
                ": must have 2 entries, as isl_resolution says, and has 1: row 1, column 0 is missing"
            ],
        ),
        (
            [[0, 1], [0]],
            ["[1]: must have 2 entries, as ttft_resolution says, and has 1: row 1, column 1 is"],
        ),
        ([[0, 1], [1, 2]], ["[1][1]: row 1, column 1: must be a pool number from 0 to 1 (got 2)"]),
        (
            [[0, -1], [0, 1]],
            ["[0][1]: row 0, column 1: must be a pool number from 0 to 1 (got -1)"],
        ),
        (
            [[0, 1], [0, 1.0]],
            ["[1][1]: row 1, column 1: must be a pool number from 0 to 1 (got 1.0)"],
        ),
        (
            [[0, True], [0, 1]],
            ["[0][1]: row 0, column 1: must be a pool number from 0 to 1 (got tr"],
        ),
        (
            [[0, 1, 1], [None, 1]],
            [
                "[0]: must have 2 entries, as ttft_resolution says, and has 3: row 0, column 2 is too",
                "[1][0]: row 1, column 0: must be a pool number from 0 to 1 (got null)",
            ],
        ),
        ([[0, 1], 5], ["[1]: row 1: must be a list (got 5)"]),
        ("01", [': must be a list (got "01")']),
    ],
)
def test_cfg_06_a_mapping_that_does_not_fit_is_refused_with_row_column_and_value(
    mapping: object, found: list[str]
) -> None:
    content = disagg_file()
    content[PREFILL][MAPPING] = mapping
    problems = lines(content)
    assert len(problems) == len(found)
    for line, start in zip(problems, found, strict=True):
        assert line.startswith(f"{PREFILL}.{MAPPING}{start}")
        assert " (got " in line


def test_cfg_06_a_mapping_of_three_axes_names_the_layer() -> None:
    content = agg_file()
    content[AGG]["agg_pool_mapping"] = [[[0, 1], [1, 1], [1, 3]], [[0, 0], [0, 1]]]
    assert lines(content) == [
        f"{AGG}.agg_pool_mapping[0][2][1]: layer 0, row 2, column 1: must be a pool number from 0 to 2"
        " (got 3)",
        f"{AGG}.agg_pool_mapping[1]: must have 3 entries, as ttft_resolution says, and has 2:"
        " layer 1, row 2, column 0 is missing (got [[0, 0], [0, 1]])",
    ]


@pytest.mark.parametrize(
    ("place", "key", "line"),
    [
        ((PREFILL,), "ttft_resoluton", 'unknown key, did you mean "ttft_resolution"? (got 4)'),
        ((), "ttft_resolution", f"unknown key at this level, it belongs in {PREFILL} (got 4)"),
        ((PREFILL,), "itl_min_ms", f"unknown key at this level, it belongs in {DECODE} (got 4)"),
        ((PREFILL,), "mode", "unknown key at this level, it belongs at the top level (got 4)"),
        ((), "workers", "unknown key at this level, it belongs in an entry of pools (got 4)"),
        (
            (),
            "target_pool",
            "unknown key at this level, it belongs in an entry of priority_overrides (got 4)",
        ),
        ((), "num_agg_pools", 'unknown key in mode "disagg", it belongs to mode "agg" (got 4)'),
        ((), "prefil_pools", 'unknown key, did you mean "prefill_pools"? (got 4)'),
        ((), "zzz", "unknown key (got 4)"),
        (("pools", "p-fast"), "worker", 'unknown key, did you mean "workers"? (got 4)'),
    ],
)
def test_cfg_10_an_unknown_key_is_refused_by_path_with_what_was_meant(
    place: tuple[str, ...], key: str, line: str
) -> None:
    content = disagg_file() | {"pools": {"p-fast": {}}}
    at = content
    for part in place:
        at = at[part]
    at[key] = 4
    assert lines(content) == [f"{'.'.join((*place, key))}: {line}"]


def test_cfg_10_a_key_of_an_override_rule_is_checked_too() -> None:
    content = disagg_file()
    rule = {"min_priority": 1, "max_priority": 2, "target_pool": 0, "max_prioritty": 3}
    content[PREFILL]["priority_overrides"] = [rule]
    assert lines(content) == [
        f"{PREFILL}.priority_overrides[0].max_prioritty: unknown key, did you mean"
        ' "max_priority"? (got 3)'
    ]


Edit = Callable[[dict[str, Any]], object]


def put(*path: str | int, value: object) -> Edit:
    def edit(content: dict[str, Any]) -> None:
        at: Any = content
        for part in path[:-1]:
            at = at[part]
        at[path[-1]] = value

    return edit


def drop(*path: str) -> Edit:
    def edit(content: dict[str, Any]) -> None:
        at: Any = content
        for part in path[:-1]:
            at = at[part]
        del at[path[-1]]

    return edit


def pool(**spec: object) -> Edit:
    return put("pools", value={"p-fast": spec})


def override(**rule: object) -> Edit:
    good = {"min_priority": 1, "max_priority": 2, "target_pool": 0}
    return put(PREFILL, "priority_overrides", value=[good, good | rule])


WORKER = "pools.p-fast.workers[0]"
RULE = f"{PREFILL}.priority_overrides[1]"
TABLE_OF_REFUSALS: list[tuple[Edit, str]] = [
    (put("mode", value="aggregated"), "mode"),
    (put("mode", value=None), "mode"),
    (put("mode", value=["disagg"]), "mode"),
    (drop("num_prefill_pools"), "num_prefill_pools"),
    (put("num_prefill_pools", value=True), "num_prefill_pools"),
    (put("num_prefill_pools", value=2.0), "num_prefill_pools"),
    (put("num_prefill_pools", value="2"), "num_prefill_pools"),
    (put("num_prefill_pools", value=0), "num_prefill_pools"),
    (put("num_prefill_pools", value=None), "num_prefill_pools"),
    (drop("decode_pools"), "decode_pool_dynamo_namespaces"),
    (put("decode_pools", value="d-fast"), "decode_pools"),
    (put("decode_pools", value=["d-fast"]), "decode_pools"),
    (put("decode_pools", value=["d-fast", ""]), "decode_pools[1]"),
    (put("decode_pools", value=["d-fast", 7]), "decode_pools[1]"),
    (put("decode_pools", value=["d-fast", "\ud800"]), "decode_pools[1]"),
    (put("decode_pools", value=["d-fast", "d\nbulk"]), "decode_pools[1]"),
    (put("decode_pools", value=["d-fast", "d-fast"]), "decode_pools[1]"),
    (put("decode_pools", value=["d-fast", "p-bulk"]), "decode_pools[1]"),
    (put("decode_pool_dynamo_namespaces", value=["a", "b"]), "decode_pools"),
    (put("prefill_pool_priorities", value=[0]), "prefill_pool_priorities"),
    (put("prefill_pool_priorities", value=[0, 1, 2]), "prefill_pool_priorities"),
    (put("prefill_pool_priorities", value=[0, True]), "prefill_pool_priorities[1]"),
    (put("prefill_pool_priorities", value=[0, 1.0]), "prefill_pool_priorities[1]"),
    (put("prefill_pool_priorities", value=None), "prefill_pool_priorities"),
    (put("enable_priority_retry", value=1), "enable_priority_retry"),
    (put("enable_priority_retry", value="true"), "enable_priority_retry"),
    (put("enable_priority_retry", value=None), "enable_priority_retry"),
    (drop(PREFILL), PREFILL),
    (put(PREFILL, value=[]), PREFILL),
    (put(PREFILL, value=None), PREFILL),
    (drop(PREFILL, MAPPING), f"{PREFILL}.{MAPPING}"),
    (drop(PREFILL, "isl_min"), f"{PREFILL}.isl_min"),
    (put(PREFILL, "isl_resolution", value=0), f"{PREFILL}.isl_resolution"),
    (put(PREFILL, "isl_resolution", value=-2), f"{PREFILL}.isl_resolution"),
    (put(PREFILL, "isl_resolution", value=2.0), f"{PREFILL}.isl_resolution"),
    (put(PREFILL, "isl_resolution", value=True), f"{PREFILL}.isl_resolution"),
    (put(PREFILL, "isl_resolution", value="2"), f"{PREFILL}.isl_resolution"),
    (put(PREFILL, "isl_min", value=False), f"{PREFILL}.isl_min"),
    (put(PREFILL, "isl_min", value="0"), f"{PREFILL}.isl_min"),
    (put(PREFILL, "isl_min", value=None), f"{PREFILL}.isl_min"),
    (put(PREFILL, "isl_max", value=float("nan")), f"{PREFILL}.isl_max"),
    (put(PREFILL, "isl_max", value=float("inf")), f"{PREFILL}.isl_max"),
    (put(PREFILL, "isl_min", value=float("-inf")), f"{PREFILL}.isl_min"),
    (put(PREFILL, "isl_max", value=10**400), f"{PREFILL}.isl_max"),
    (put(PREFILL, "isl_max", value=10**5000), f"{PREFILL}.isl_max"),
    (put(PREFILL, "isl_max", value=5e-324), f"{PREFILL}.isl_max"),  # a step of 0
    (put(PREFILL, "priority_overrides", value=None), f"{PREFILL}.priority_overrides"),
    (put(PREFILL, "priority_overrides", value={}), f"{PREFILL}.priority_overrides"),
    (put(PREFILL, "priority_overrides", value=[5]), f"{PREFILL}.priority_overrides[0]"),
    (override(min_priority=3), f"{RULE}.min_priority"),
    (override(min_priority=True), f"{RULE}.min_priority"),
    (override(max_priority=float("nan")), f"{RULE}.max_priority"),
    (override(target_pool=2), f"{RULE}.target_pool"),
    (override(target_pool=-1), f"{RULE}.target_pool"),
    (override(target_pool=True), f"{RULE}.target_pool"),
    (override(target_pool=1.0), f"{RULE}.target_pool"),
    (put("pools", value=[]), "pools"),
    (put("pools", value=None), "pools"),
    (put("pools", value={"a.b": 1}), 'pools["a.b"]'),
    (pool(workers="127.0.0.1:9000"), "pools.p-fast.workers"),
    (pool(workers=["127.0.0.1"]), WORKER),
    (pool(workers=["127.0.0.1:"]), WORKER),
    (pool(workers=[":9000"]), WORKER),
    (pool(workers=["h:0"]), WORKER),
    (pool(workers=["h:65536"]), WORKER),
    (pool(workers=["h:09000"]), WORKER),
    (pool(workers=["h:+9000"]), WORKER),
    (pool(workers=["h:9000 "]), WORKER),
    (pool(workers=["h:9000\n"]), WORKER),
    (pool(workers=["http://h:9000"]), WORKER),
    (pool(workers=["h:٣٣"]), WORKER),
    (pool(workers=["::1:9000"]), WORKER),
    (pool(workers=["[::1]"]), WORKER),
    (pool(workers=["[10.0.0.1]:9000"]), WORKER),
    (pool(workers=[9000]), WORKER),
    (pool(profile="qwen3-32b-fp8-h200"), "pools.p-fast.tp"),
    (pool(profile="", tp=1), "pools.p-fast.profile"),
    (pool(profile=None, tp=1), "pools.p-fast.profile"),
    (pool(tp=0), "pools.p-fast.tp"),
    (pool(tp=True), "pools.p-fast.tp"),
    (pool(max_inflight=0), "pools.p-fast.max_inflight"),
    (pool(max_inflight=1.5), "pools.p-fast.max_inflight"),
]


@pytest.mark.parametrize(("edit", "path"), TABLE_OF_REFUSALS)
def test_one_fault_gives_one_problem_at_its_path(edit: Edit, path: str) -> None:
    content = disagg_file()
    edit(content)
    (line,) = lines(content)
    assert line.startswith(f"{path}: ")
    assert " (got " in line


@pytest.mark.parametrize(
    ("low", "high"),
    [(-1e308, 1e308), (1e308, 1.5e308), (0, 5e-324), (-(10**308), 10**308)],
)
def test_a_range_whose_step_or_middle_is_no_usable_number_is_refused(
    low: float, high: float
) -> None:
    content = disagg_file()
    content[PREFILL] |= {"ttft_min_ms": low, "ttft_max_ms": high}
    if high == 10**308:  # ints do not overflow where floats do
        assert parse_config(content, source="f").stages["prefill"].axes[1].step == 1e308
    else:
        (line,) = lines(content)
        assert line.startswith(f"{PREFILL}.ttft_max_ms: makes no grid with ttft_min_ms {low}")


@pytest.mark.parametrize("kept", ["isl_min", "isl_max", "isl_resolution"])
def test_the_isl_keys_of_agg_go_together(kept: str) -> None:
    content = agg_file()
    missing = [key for key in ("isl_min", "isl_max", "isl_resolution") if key != kept]
    for key in missing:
        del content[AGG][key]
    together = "is required: isl_min, isl_max, isl_resolution go together (got nothing)"
    assert lines(content) == [f"{AGG}.{key}: {together}" for key in missing]


def test_everything_that_is_wrong_is_reported_at_once() -> None:
    content = disagg_file()
    content["mode"] = "disag"
    content["prefill_pools"] = ["p-fast", "", "p-fast"]
    content["extra"] = 1
    content[PREFILL] |= {"isl_min": 8000, "ttft_resolution": "2", MAPPING: [[0, 1], [0, 9]]}
    content[DECODE]["priority_overrides"] = [{"min_priority": 5, "max_priority": 1}]
    content["pools"] = {"p-fast": {"workers": ["nowhere"], "profile": "x"}}
    assert {line.split(": ")[0] for line in lines(content)} == {
        "mode",
        "prefill_pools",
        "prefill_pools[1]",
        "prefill_pools[2]",
        "extra",
        f"{PREFILL}.isl_min",
        f"{PREFILL}.ttft_resolution",
        f"{PREFILL}.{MAPPING}[1][1]",
        f"{DECODE}.priority_overrides[0].min_priority",
        f"{DECODE}.priority_overrides[0].target_pool",
        "pools.p-fast.workers[0]",
        "pools.p-fast.tp",
    }


@pytest.mark.parametrize(
    "content", [None, 1, "x", [], {"\ud800": 1}, {1: 2}, {None: 1, ("a", "b"): 2}, {"mode": {}}]
)
def test_content_that_is_no_fleet_file_at_all_is_a_config_error(content: object) -> None:
    assert lines(content)


# --- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "$: is not JSON: Expecting value"),
        ("{", "$: is not JSON: "),
        ("null", "$: must be an object (got null)"),
        ("NaN", "$: must be a finite number (got NaN)"),
        ("[" * 200_000, "$: is not JSON: nested too deeply"),
        ("\ufeff{}", "$: is not JSON: "),
        ("\ud800", "$: cannot be read: "),
    ],
)
def test_text_that_is_not_a_json_object_is_a_config_error(
    tmp_path: Path, text: str, line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    (problem,) = caught.value.problems
    assert str(problem).startswith(line)
    assert caught.value.source == str(tmp_path / "fleet.json")


@pytest.mark.parametrize("name", ["absent.json", ".", "nul\0.json"])
def test_a_path_that_cannot_be_read_is_a_config_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"\$: cannot be read: "):
        load_config(tmp_path / name)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "9" * 5000])
def test_a_number_that_is_not_finite_is_reported_once_at_its_path(
    tmp_path: Path, number: str
) -> None:
    text = json.dumps(disagg_file()).replace('"isl_max": 8000', f'"isl_max": {number}')
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"{PREFILL}.isl_max: must be a finite number (got ")


def test_a_number_that_is_not_finite_is_refused_even_where_it_would_be_ignored(
    tmp_path: Path,
) -> None:
    text = json.dumps(disagg_file()).replace('"isl_max"', '"ttft_min": NaN, "isl_max"')
    with pytest.raises(ConfigError, match=f"{PREFILL}.ttft_min: must be a finite number"):
        load(tmp_path, text)


def test_keys_given_twice_are_refused_wherever_they_are(tmp_path: Path) -> None:
    text = json.dumps(disagg_file() | {"pools": {"p-fast": {}}})
    text = text.replace('"p-fast": {}', '"p-fast": {"tp": 1}, "p-fast": {"tp": 1, "tp": 2}')
    text = text.replace('"isl_max"', '"isl_max": 7, "isl_max"')
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    twice = "is given more than once, keep one"
    assert sorted(map(str, caught.value.problems)) == [
        f"pools.p-fast.tp: {twice}",
        f"pools.p-fast: {twice}",
        f"{PREFILL}.isl_max: {twice}",
    ]


def test_a_file_loads_as_its_content_parses(tmp_path: Path) -> None:
    loaded = load(tmp_path, json.dumps(disagg_file()))
    assert loaded.stages == parse_config(disagg_file(), source="f").stages
    assert loaded.source == str(tmp_path / "fleet.json")


# --- workers ---------------------------------------------------------------------------------------


def test_pools_say_where_workers_are() -> None:
    spec = {"workers": ["h:1", "[::1]:65535"], "profile": "x", "tp": 2, "max_inflight": 8}
    config = parse_config(disagg_file() | {"pools": {"p-fast": spec}}, source="f")
    found = config.pools["p-fast"]
    assert (found.workers, found.profile) == (("h:1", "[::1]:65535"), "x")
    assert (found.tp, found.max_inflight) == (2, 8)


def test_workers_are_required_of_exactly_the_pools_of_the_grids() -> None:
    pools = {
        "p-fast": {"workers": ["h:1"]},
        "p-bulk": {},
        "d-fast": {"workers": ["h:2", "h:3", "h:2"]},
        "d-bluk": {"workers": ["H:1"]},
    }
    config = parse_config(disagg_file() | {"pools": pools}, source="fleet.json")
    with pytest.raises(ConfigError) as caught:
        require_workers(config)
    assert caught.value.source == "fleet.json"
    assert [str(problem) for problem in caught.value.problems] == [
        "pools.p-bulk.workers: must not be empty (got [])",
        "pools.d-bulk: is required, as a decode pool has this name (got nothing)",
        'pools.d-fast.workers[2]: is at pools.d-fast.workers[0] already (got "h:2")',
        'pools.d-bluk: is not one of the pools p-fast, p-bulk, d-fast, d-bulk (got "d-bluk")',
        'pools.d-bluk.workers[0]: is at pools.p-fast.workers[0] already (got "H:1")',
    ]


@pytest.mark.parametrize(
    ("name", "stages"),
    [("example-disagg", ["prefill", "decode"]), ("example-agg", ["agg"])],
)
def test_the_shipped_examples_load_without_warnings_and_have_workers(
    name: str, stages: list[str]
) -> None:
    path = files("slagate.configs") / "grids" / f"{name}.json"
    config = load_config(str(path))
    require_workers(config)
    assert (list(config.stages), config.warnings) == (stages, ())


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
