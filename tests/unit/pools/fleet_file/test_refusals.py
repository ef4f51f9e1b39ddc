"""The fleet file: each value that makes no grid is refused once, at its path."""

from collections.abc import Callable
from typing import Any

import pytest

from slagate.pools.fleet_file.load import parse_config
from support.fleet.files import agg_file, disagg_file
from support.fleet.problems import AGG, DECODE, MAPPING, PREFILL, lines


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


def override(**rule: object) -> Edit:
    good = {"min_priority": 1, "max_priority": 2, "target_pool": 0}
    return put(PREFILL, "priority_overrides", value=[good, good | rule])


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
    (put("decode_pools", value=["d-fast", ["d-bulk"]]), "decode_pools[1]"),
    (put("decode_pools", value=["d-fast", float("nan")]), "decode_pools[1]"),
    (put("decode_pools", value=["1", 1]), "decode_pools[1]"),
    (put("decode_pools", value=["d-fast", "\ud800"]), "decode_pools[1]"),
    (put("decode_pools", value=["d-fast", "d-fast"]), "decode_pools[1]"),
    (put("decode_pools", value=["d-fast", "p-bulk"]), "decode_pools[1]"),
    (put("decode_pool_dynamo_namespaces", value=["a", "b"]), "decode_pools"),
    (put("prefill_pool_priorities", value=[0]), "prefill_pool_priorities"),
    (put("prefill_pool_priorities", value=[0, 1, 2]), "prefill_pool_priorities"),
    (put("prefill_pool_priorities", value=[0, True]), "prefill_pool_priorities[1]"),
    (put("prefill_pool_priorities", value=[0, 1.0]), "prefill_pool_priorities[1]"),
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
    (put(PREFILL, "priority_overrides", value={"a": 1}), f"{PREFILL}.priority_overrides"),
    (put(PREFILL, "priority_overrides", value=[5]), f"{PREFILL}.priority_overrides[0]"),
    (override(min_priority=3), f"{RULE}.min_priority"),
    (override(min_priority=True), f"{RULE}.min_priority"),
    (override(max_priority=float("nan")), f"{RULE}.max_priority"),
    (override(target_pool=2), f"{RULE}.target_pool"),
    (override(target_pool=-1), f"{RULE}.target_pool"),
    (override(target_pool=True), f"{RULE}.target_pool"),
    (override(target_pool=1.0), f"{RULE}.target_pool"),
]


@pytest.mark.parametrize(("edit", "path"), TABLE_OF_REFUSALS)
def test_one_fault_gives_one_problem_at_its_path(edit: Edit, path: str) -> None:
    content = disagg_file()
    edit(content)
    (line,) = lines(content)
    assert line.startswith(f"{path}: ")
    assert " (got " in line


LARGE = 17 * 10**307


@pytest.mark.parametrize(("low", "high"), [(0, 5e-324), (-LARGE, LARGE)])
def test_a_range_whose_bands_have_no_width_is_refused(low: float, high: float) -> None:
    """Each request would fail: the step is 0, or an int that no double can hold."""
    content = disagg_file()
    content[PREFILL] |= {"ttft_min_ms": low, "ttft_max_ms": high, "ttft_resolution": 1 + (low == 0)}
    content[PREFILL][MAPPING] = [[0] * (1 + (low == 0))] * 2
    (line,) = lines(content)
    assert line.startswith(f"{PREFILL}.ttft_max_ms: makes no grid with ttft_min_ms ")


@pytest.mark.parametrize(
    ("low", "high"), [(-1e308, 1e308), (1e308, 1.5e308), (-(10**308), 10**308)]
)
def test_a_range_as_wide_as_doubles_go_is_a_grid(low: float, high: float) -> None:
    content = disagg_file()
    content[PREFILL] |= {"ttft_min_ms": low, "ttft_max_ms": high}
    axis = parse_config(content, source="f").stages["prefill"].axes[1]
    assert low < axis.midpoint < high
    assert list(axis.edges) == sorted(axis.edges)
    assert [axis.index(value) for value in (-1.7e308, 0, None, 1.7e308)][-1] == 1
    assert axis.index(-1.7e308) == 0


@pytest.mark.parametrize("kept", ["isl_min", "isl_max", "isl_resolution"])
def test_the_isl_keys_of_agg_go_together(kept: str) -> None:
    content = agg_file()
    missing = [key for key in ("isl_min", "isl_max", "isl_resolution") if key != kept]
    for key in missing:
        del content[AGG][key]
    together = "is required: isl_min, isl_max, isl_resolution go together (got nothing)"
    assert lines(content) == [f"{AGG}.{key}: {together}" for key in missing]


def test_a_long_key_is_cut_as_a_long_value_is() -> None:
    content = disagg_file() | {
        "k" * 100_000: 1,
        "pools": {"p" * 61: {"cost": 0}, "p" * 60: {"cost": 0}},
    }
    assert lines(content) == [
        f'["{"k" * 57}..."]: unknown key (got 1)',
        f'pools["{"p" * 57}..."].cost: must be a finite number above 0 (got 0)',
        f"pools.{'p' * 60}.cost: must be a finite number above 0 (got 0)",
    ]


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
