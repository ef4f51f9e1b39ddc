"""What a fleet file says beyond Dynamo's: uneven bands, names, spill lists, classes and costs."""

import json
from pathlib import Path
from typing import Any

import pytest

from slagate.pools.fleet_file.load import load_config, parse_config
from slagate.pools.grid.errors import ConfigError
from slagate.pools.grid.grid import Axis, PriorityRule, UnevenAxis
from slagate.router.cli.grid.commands import select_lines
from support.fleet.files import agg_file, disagg_file
from support.fleet.problems import AGG, DECODE, MAPPING, PREFILL, lines


def uneven_file(**more: Any) -> dict[str, Any]:
    """A prefill grid of three bands of ISL by two of TTFT."""
    content = disagg_file()
    content[PREFILL] = {
        "isl_edges": [0, 1000, 4000.5, 32000],
        "ttft_edges_ms": [50, 200, 1000],
        MAPPING: [[0, 1], [0, 1], [0, 0]],
        **more,
    }
    return content


# --- uneven bands ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "band"),
    [(-1, 0), (0, 0), (999, 0), (1000, 1), (4000, 1), (4000.5, 2), (32000, 2), (10**400, 2)],
)
def test_a_value_on_an_inner_edge_is_in_the_upper_band_and_outside_is_clamped(
    value: float, band: int
) -> None:
    axis = parse_config(uneven_file(), source="f").stages["prefill"].axes[0]
    assert isinstance(axis, UnevenAxis)
    assert axis.index(value) == band


def test_an_uneven_axis_has_ends_a_middle_and_a_number_of_bands() -> None:
    axis = UnevenAxis("ttft_ms", (50, 200, 1001))
    assert (axis.low, axis.high, axis.resolution, axis.midpoint) == (50, 1001, 2, 525.5)
    assert axis.index(None) == 1


def test_edges_at_equal_distances_are_the_bands_of_a_resolution() -> None:
    even, edges = Axis("isl", 0, 8000, 4), UnevenAxis("isl", (0, 2000, 4000, 6000, 8000))
    assert even.edges == edges.edges
    for value in range(-500, 9000, 125):
        assert even.index(value) == edges.index(value)


def test_every_axis_of_every_stage_may_be_uneven() -> None:
    content = uneven_file()
    content[DECODE] = {
        "context_length_edges": [0, 9000, 16000],
        "itl_edges_ms": [5, 45],
        "decode_pool_mapping": [[0], [1]],
    }
    decode = parse_config(content, source="f").stages["decode"]
    assert decode.select({"context_length": 9000}).pool == 1
    content = agg_file()
    content[AGG] = {
        "isl_edges": [0, 100, 1001],
        "ttft_edges_ms": [0, 10],
        "itl_edges_ms": [0, 10],
        "agg_pool_mapping": [[[0]], [[2]]],
    }
    agg = parse_config(content, source="f").stages["agg"]
    assert agg.select({"isl": 100}).index == (1, 0, 0)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"isl_min": 0},
            "isl_edges: is there beside isl_min: keep one or the other"
            " (got [0, 1000, 4000.5, 32000])",
        ),
        (
            {"ttft_min": 0, "ttft_resolution": 2},
            "ttft_edges_ms: is there beside ttft_min, ttft_resolution: keep one or the other"
            " (got [50, 200, 1000])",
        ),
        ({"isl_edges": [5]}, "isl_edges: must have at least 2 numbers, for one band (got [5])"),
        (
            {"isl_edges": [0, 7, 7, 6]},
            "isl_edges[2]: must be above the edge before it, which is 7 (got 7)",
        ),
        ({"isl_edges": [0, True, 7, 8]}, "isl_edges[1]: must be a finite number (got true)"),
        ({"isl_edges": [0, 1, 2, 1e999]}, "isl_edges[3]: must be a finite number (got Infinity)"),
        ({"isl_edges": 5}, "isl_edges: must be a list (got 5)"),
        ({"isl_edges": None}, "isl_edges: must not be null, leave the key out instead (got null)"),
        (
            {MAPPING: [[0, 1], [0, 1]]},
            f"{MAPPING}: must have 3 entries, as isl_edges says, and has 2: row 2, column 0 is"
            " missing (got [[0, 1], [0, 1]])",
        ),
    ],
)
def test_edges_that_make_no_bands_are_refused(more: dict[str, Any], line: str) -> None:
    assert f"{PREFILL}.{line}" in lines(uneven_file(**more))


# --- names and lists -------------------------------------------------------------------------------


def test_pools_go_by_number_or_name_in_cells_and_overrides() -> None:
    content = uneven_file(
        priority_overrides=[{"min_priority": 5, "max_priority": 9, "target_pool": "p-fast"}]
    )
    content[PREFILL][MAPPING] = [["p-bulk", 1], [0, "p-fast"], [["p-bulk", 0], [0]]]
    grid = parse_config(content, source="f").stages["prefill"]
    assert grid.cells == ((1,), (1,), (0,), (0,), (1, 0), (0,))
    assert grid.rules == (PriorityRule(5, 9, 0),)
    assert grid.pools_at((2, 0)) == (1, 0)


def test_a_cell_with_a_list_goes_to_its_pools_in_order_before_any_retry() -> None:
    content = disagg_file() | {"num_prefill_pools": 4, "prefill_pools": ["a", "b", "c", "d"]}
    content["prefill_pool_priorities"] = [0, 1, 2, 2]
    content[PREFILL][MAPPING] = [[["d", "c", "a"], 3], [0, 1]]
    content[PREFILL]["priority_overrides"] = [
        {"min_priority": 9, "max_priority": 9, "target_pool": "d"}
    ]
    grid = parse_config(content, source="f").stages["prefill"]
    cell = grid.select({"isl": 0, "ttft_ms": 0})
    assert (cell.base_pool, cell.pool, cell.spill) == (3, 3, (2, 0))
    assert grid.pool_order(cell) == (3, 2, 0, 1)
    overridden = grid.select({"isl": 0, "ttft_ms": 0}, 9)
    assert (overridden.base_pool, overridden.pool, overridden.spill) == (3, 3, ())
    assert grid.pool_order(overridden) == (3, 1, 0)
    content["enable_priority_retry"] = False
    grid = parse_config(content, source="f").stages["prefill"]
    assert grid.pool_order(grid.select({"isl": 0, "ttft_ms": 0})) == (3, 2, 0)


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("p-blk", '[0][0]: row 0, column 0: must be one of the pools "p-fast", "p-bulk" (got "p-b'),
        (
            "d-fast",
            "[0][0]: row 0, column 0: is a decode pool, and this grid is of prefill pools (got",
        ),
        ([], "[0][0]: row 0, column 0: must have a pool (got [])"),
        ([0, 2], "[0][0][1]: row 0, column 0: must be a pool number from 0 to 1 (got 2)"),
        (
            [0, "p-fast"],
            '[0][0][1]: row 0, column 0: is in this cell twice, first at [0] (got "p-fast")',
        ),
        ([0, [1]], "[0][0][1]: row 0, column 0: must be a pool number from 0 to 1 (got [1])"),
    ],
)
def test_a_cell_that_names_no_pool_is_refused(entry: object, line: str) -> None:
    content = disagg_file()
    content[PREFILL][MAPPING][0][0] = entry
    (found,) = lines(content)
    assert found.startswith(f"{PREFILL}.{MAPPING}{line}")


def test_a_pool_that_nothing_leads_to_is_reported_and_loads() -> None:
    content = disagg_file() | {"enable_priority_retry": False}
    content[PREFILL][MAPPING] = [[1, 1], [1, 1]]
    assert parse_config(content, source="f").warnings == (
        "prefill_pools[0]: no cell, override or retry leads to this pool",
    )
    content["enable_priority_retry"] = True
    assert parse_config(content, source="f").warnings == ()
    rule = {"min_priority": 1, "max_priority": 1, "target_pool": 0}
    content[PREFILL]["priority_overrides"] = [rule]
    content["enable_priority_retry"] = False
    assert parse_config(content, source="f").warnings == ()
    never = rule | {"min_priority": 2**31, "max_priority": 2**40}
    content[PREFILL]["priority_overrides"] = [never]
    assert parse_config(content, source="f").warnings != ()
    content[PREFILL]["priority_overrides"] = [rule | {"target_pool": 1}, rule]
    assert parse_config(content, source="f").warnings != ()


# --- classes and costs -----------------------------------------------------------------------------

OBJECTIVES = {"interactive": {"ttft_ms": 100, "priority": 5}, "*": {"ttft_ms": 120.5, "itl_ms": 9}}


def test_a_class_has_defaults_for_what_a_request_does_not_say() -> None:
    config = parse_config(disagg_file() | {"objectives": OBJECTIVES}, source="f")
    interactive = config.objectives["interactive"]
    assert (interactive.ttft_ms, interactive.itl_ms, interactive.priority) == (100, None, 5)
    assert config.objectives["*"].ttft_ms == 120.5


def test_select_applies_the_defaults_of_the_class_and_a_given_value_wins() -> None:
    content = disagg_file() | {"objectives": OBJECTIVES}
    content[PREFILL]["priority_overrides"] = [
        {"min_priority": 5, "max_priority": 5, "target_pool": 1}
    ]
    config = parse_config(content, source="f")
    asked = [
        {"isl": 1, "objective": "interactive"},
        {"isl": 1, "objective": "interactive", "ttft_ms": 900, "priority": 0},
        {"isl": 1, "objective": "batch"},
        {"isl": 1},
        {"isl": 1, "objective": None, "ttft_ms": 900},
        {"isl": 1, "objective": 5},
    ]
    found = select_lines(
        config.stages["prefill"], map(json.dumps, asked), objectives=config.objectives
    )
    answers = [json.loads(line) for line in found]
    assert [(a.get("col"), a.get("pool")) for a in answers] == [
        *[(0, 1), (1, 1), (0, 0), (0, 0), (1, 1)],
        (None, None),
    ]
    assert answers[-1] == {"error": "objective: must be a string (got 5)"}


@pytest.mark.parametrize(
    ("objectives", "line"),
    [
        ([], "objectives: must be an object (got [])"),
        (
            {"a": {"ttft_ms": -1}},
            "objectives.a.ttft_ms: must be a finite number, 0 or above (got -1)",
        ),
        (
            {"a": {"itl_ms": None}},
            "objectives.a.itl_ms: must not be null, leave the key out instead",
        ),
        (
            {"a": {"priority": 2**31}},
            "objectives.a.priority: must be at most 2147483647 (got 21474",
        ),
        ({"a": {"priority": 1.0}}, "objectives.a.priority: must be an integer (got 1.0)"),
        ({"a": {"ttft": 1}}, 'objectives.a.ttft: unknown key, did you mean "ttft_ms"? (got 1)'),
        ({"": {}}, 'objectives[""]: must be a class, or "*" for requests of none (got {})'),
    ],
)
def test_a_class_that_makes_no_defaults_is_refused(objectives: object, line: str) -> None:
    (found,) = lines(disagg_file() | {"objectives": objectives})
    assert found.startswith(line)


def test_a_worker_costs_what_is_said_or_its_tensor_parallel_size_or_one_gpu() -> None:
    pools = {"p-fast": {"cost": 2.5, "tp": 4}, "p-bulk": {"tp": 4}, "d-fast": {}}
    found = parse_config(disagg_file() | {"pools": pools}, source="f").pools
    assert [found[name].gpus for name in pools] == [2.5, 4, 1]


@pytest.mark.parametrize("cost", [0, -1, True, "2", None, float("nan")])
def test_a_cost_is_a_number_above_0(cost: object) -> None:
    (line,) = lines(disagg_file() | {"pools": {"p-fast": {"cost": cost}}})
    assert line.startswith("pools.p-fast.cost: must ")


# --- unknown keys and other sources ----------------------------------------------------------------


def test_lenient_leaves_unknown_keys_out_and_lists_them() -> None:
    content = disagg_file() | {"num_agg_pools": 3, "pools": {"p-fast": {"wrokers": []}}}
    content[PREFILL]["colour"] = "red"
    config = parse_config(content, source="f", lenient=True)
    places = (f"{PREFILL}.colour", "num_agg_pools", "pools.p-fast.wrokers")
    assert sorted(config.ignored) == sorted(places)
    assert sorted(config.warnings) == sorted(f"{place}: unknown key, ignored" for place in places)
    assert parse_config(json.loads(config.text), source="f").stages == config.stages


def test_the_key_an_editor_finds_the_schema_by_is_no_unknown_key() -> None:
    content = {"$schema": "fleet.schema.json", **disagg_file()}
    config = parse_config(content, source="f")
    assert config.text == parse_config(disagg_file(), source="f").text


WORKERS = {name: {"workers": [f"{name}:1"]} for name in ("p-fast", "p-bulk", "d-fast", "d-bulk")}


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_pools_come_from_the_file_a_second_file_and_options_and_the_later_wins(
    tmp_path: Path,
) -> None:
    fleet = write(
        tmp_path / "fleet.json",
        disagg_file() | {"pools": {"p-fast": {"workers": ["old:1"], "tp": 2}, "p-bulk": {"tp": 1}}},
    )
    pools = write(tmp_path / "pools.json", {"pools": WORKERS})
    config = load_config(fleet, pools=pools, workers={"p-bulk": ["a:1", "b:1"]}, serving=True)
    assert config.pools["p-fast"].workers == ("p-fast:1",)
    assert config.pools["p-fast"].tp == 2
    assert (config.pools["p-bulk"].workers, config.pools["p-bulk"].tp) == (("a:1", "b:1"), 1)
    again = parse_config(json.loads(config.text), source="f")
    assert again.pools == config.pools


def test_a_problem_names_the_source_of_the_value(tmp_path: Path) -> None:
    fleet = write(tmp_path / "fleet.json", disagg_file() | {"pools": {"p-fast": {"tp": 0}}})
    pools = write(
        tmp_path / "pools.json",
        {"pools": {"p-fast": {"workers": ["x"]}, "p-bulk": {"profile": "x"}, "a": 5}, "b": 1},
    )
    with pytest.raises(ConfigError) as caught:
        load_config(fleet, pools=pools, workers={"d-fast": ["here", "h:1"], "p-nowhere": ["h:2"]})
    assert [str(problem) for problem in caught.value.problems] == [
        f'{pools}: b: unknown key, a file of pools has the key "pools" (got 1)',
        f'{pools}: pools.p-fast.workers[0]: must be host:port with a port from 1 to 65535 (got "x")',
        "pools.p-fast.tp: must be at least 1 (got 0)",
        f"{pools}: pools.a: must be an object (got 5)",
        '--pool d-fast[0]: must be host:port with a port from 1 to 65535 (got "here")',
        f"{pools}: pools.p-bulk.tp: is required with profile (got nothing)",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[]", "$: must be an object (got [])"),
        ("{}", "pools: is required (got nothing)"),
        ('{"pools": 5}', "pools: must be an object (got 5)"),
        ("{", "$: is not JSON: "),
    ],
)
def test_a_file_of_pools_that_has_none_is_refused(tmp_path: Path, text: str, line: str) -> None:
    fleet = write(tmp_path / "fleet.json", disagg_file())
    pools = tmp_path / "pools.json"
    pools.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(fleet, pools=pools)
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"{pools}: {line}")


def test_unknown_keys_of_a_file_of_pools_are_told_in_its_order(tmp_path: Path) -> None:
    fleet = write(tmp_path / "fleet.json", disagg_file())
    keys = ["zebra", "b", "pools", "mode", "a", "yak", "n"]
    pools = write(tmp_path / "pools.json", {key: {} for key in keys})
    with pytest.raises(ConfigError) as caught:
        load_config(fleet, pools=pools)
    places = [problem.path for problem in caught.value.problems]
    assert places == [f"{pools}: {key}" for key in keys if key != "pools"]
    assert load_config(fleet, pools=pools, lenient=True).ignored == tuple(places)


def test_what_a_file_of_pools_gives_twice_is_told_with_its_name(tmp_path: Path) -> None:
    fleet = write(tmp_path / "fleet.json", disagg_file())
    pools = tmp_path / "pools.json"
    pools.write_text('{"pools": {"p-fast": {"tp": 1, "tp": 2}}}')
    config = load_config(fleet, pools=pools)
    assert config.warnings == (
        f"{pools}: pools.p-fast.tp: is given more than once, the last one counts",
    )
    assert config.pools["p-fast"].tp == 2


def test_serving_asks_for_workers_along_with_all_other_problems(tmp_path: Path) -> None:
    content = disagg_file() | {"extra": 1, "pools": {**WORKERS, "p-bulk": {"workers": []}}}
    del content["pools"]["d-bulk"]
    content["pools"]["d-fast"] = {"workers": ["P-FAST:1", 7]}
    fleet = write(tmp_path / "fleet.json", content)
    with pytest.raises(ConfigError) as caught:
        load_config(fleet, workers={"nowhere": ["h:1"]}, serving=True)
    assert [str(problem) for problem in caught.value.problems] == [
        "extra: unknown key (got 1)",
        "pools.d-fast.workers[1]: must be a string (got 7)",
        "pools.p-bulk.workers: must not be empty (got [])",
        "pools.d-bulk: is required, as a decode pool has this name (got nothing)",
        'pools.d-fast.workers[0]: is at pools.p-fast.workers[0] already (got "P-FAST:1")',
        '--pool nowhere: is not one of the pools p-fast, p-bulk, d-fast, d-bulk (got "nowhere")',
    ]
