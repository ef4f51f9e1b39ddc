"""What a built file leaves out: pools that no cell has, and bands that say the same."""

import json
from itertools import pairwise
from typing import Any

from slagate.pools.fleet_file.load import parse_config
from slagate.pools.fleet_file.models import Objective
from slagate.pools.grid_build.build import BuiltFleet, build_fleet
from slagate.pools.grid_build.report import report_json, report_lines
from slagate.pools.grid_build.spec import parse_spec

CLOSED = {"beyond": False}


def flat(name: str, cost: float, ms: float) -> dict[str, Any]:
    return {"name": name, "cost": cost, "ttft_curve": [[0, ms], [1, ms]]}


SLOW, MIDDLE, FAST = flat("slow", 1, 300), flat("middle", 9, 200), flat("fast", 2, 100)


def content(isl: dict[str, Any], ttft: dict[str, Any], *pools: dict[str, Any]) -> dict[str, Any]:
    decode = [{"name": "d", "itl_curve": [[0, 10], [1, 10]]}]
    axes = {"context_length": {"edges": [0, 10]}, "itl_ms": {"edges": [10, 20]}}
    return {
        "utilisation": 0,
        "prefill": {"isl": isl, "ttft_ms": ttft, "pools": list(pools)},
        "decode": {**axes, "pools": decode},
    }


def built(spec: dict[str, Any], **options: Any) -> tuple[BuiltFleet, dict[str, Any]]:
    fleet = build_fleet(parse_spec(json.dumps(spec), "spec"), "spec", **options)
    parse_config(fleet.content, source="built")
    strategy: Any = fleet.content["prefill_pool_selection_strategy"]
    return fleet, strategy


def test_a_pool_in_no_cell_is_left_out_and_the_others_are_numbered_without_it() -> None:
    isl = {"edges": [0, 1000], **CLOSED}
    spec = content(isl, {"edges": [100, 300, 500], **CLOSED}, MIDDLE, SLOW, FAST)
    fleet, strategy = built(spec)
    assert fleet.content["prefill_pool_dynamo_namespaces"] == ["slow", "fast"]
    assert fleet.content["num_prefill_pools"] == 2
    assert fleet.content["prefill_pool_priorities"] == [1, 0]
    assert list(fleet.content["pools"]) == ["slow", "fast", "d"]  # type: ignore[call-overload]
    assert strategy["prefill_pool_mapping"] == [[1, 0]]
    parsed = parse_spec(json.dumps(spec), "spec")
    lines = [line for line in report_lines(fleet, parsed) if "left out" in line]
    (line,) = lines
    assert line.startswith("prefill: middle is in no cell, and left out: what it meets")
    told: Any = report_json(fleet, parsed, "slagate")
    assert [pool["name"] for pool in told["stages"]["prefill"]["pools"]] == ["slow", "fast"]
    assert told["stages"]["prefill"]["left_out"].keys() == {"middle"}
    # In a spill list it has a place.
    fleet, strategy = built(spec, spill=True)
    assert fleet.content["prefill_pool_dynamo_namespaces"] == ["middle", "slow", "fast"]
    assert strategy["prefill_pool_mapping"] == [[2, [1, 2, 0]]]


def test_neighbours_of_uneven_edges_are_joined_and_the_outer_edges_stay() -> None:
    isl = {"edges": [0, 10, 50, 1000], **CLOSED}
    fleet, strategy = built(content(isl, {"edges": [100, 150, 300, 400, 500]}, SLOW, FAST))
    assert strategy == {
        "isl_edges": [0, 1000],
        "ttft_edges_ms": [100, 300, 500],
        "prefill_pool_mapping": [[1, 0]],
    }
    assert [cell.status for cell in fleet.stages["prefill"].cells] == ["met", "met"]


def test_even_bands_are_joined_where_they_stay_even() -> None:
    isl = {"min": 0, "max": 1000, "resolution": 7, **CLOSED}
    ttft = {"min": 100, "max": 500, "resolution": 4, **CLOSED}
    _, strategy = built(content(isl, ttft, SLOW, FAST))
    assert strategy == {
        "isl_min": 0,
        "isl_max": 1000,
        "isl_resolution": 1,
        "ttft_min_ms": 100,
        "ttft_max_ms": 500,
        "ttft_resolution": 2,
        "prefill_pool_mapping": [[1, 0]],
    }
    _, strategy = built(content(isl, {**ttft, "max": 400, "resolution": 3}, SLOW, FAST))
    assert strategy["prefill_pool_mapping"] == [[1, 1, 0]]


def test_a_joined_cell_is_met_only_where_all_of_it_is() -> None:
    """Below 100 ms nothing is met, and still the pool is the one that the next band has."""
    isl = {"edges": [0, 1000], **CLOSED}
    fleet, _ = built(content(isl, {"edges": [50, 100, 300, 400], **CLOSED}, SLOW, FAST))
    assert [(cell.status, cell.pools[:1]) for cell in fleet.stages["prefill"].cells] == [
        ("infeasible", (1,)),
        ("met", (0,)),
    ]
    assert fleet.has_gaps


def test_bands_that_were_parted_and_lie_beyond_in_part_are_joined_too() -> None:
    """Beyond 1000 tokens one pool is the fastest first, as before, and then the other."""
    steep = {"name": "steep", "ttft_curve": [[0, 10], [4000, 400]]}
    level = {"name": "level", "cost": 2, "ttft_curve": [[0, 150], [4000, 160]]}
    fleet, strategy = built(content({"edges": [0, 1000]}, {"edges": [110, 500]}, steep, level))
    size = fleet.stages["prefill"].size
    assert size is not None
    assert strategy["isl_edges"][0] == 0
    slices = list(map(str, strategy["prefill_pool_mapping"]))
    assert all(a != b for a, b in pairwise(slices))
    assert size.edges[1] > 1000
    cells = [cell for cell in fleet.stages["prefill"].cells if cell.index[0] == 0]
    assert {cell.status for cell in cells} <= {"beyond", "met"}


def test_dynamos_algorithms_leave_nothing_out_and_join_nothing() -> None:
    axes = {"min": 0, "max": 1000, "resolution": 4}, {"min": 100, "max": 500, "resolution": 4}
    for algorithm in ("dynamo", "dynamo-first"):
        spec = content(*axes, MIDDLE, SLOW, FAST)
        spec["decode"] |= {"context_length": axes[0], "itl_ms": axes[1]}
        fleet, strategy = built(spec, algorithm=algorithm)
        assert fleet.content["prefill_pool_dynamo_namespaces"] == ["middle", "slow", "fast"]
        assert [len(row) for row in strategy["prefill_pool_mapping"]] == [4] * 4


def test_what_is_contested_below_the_first_edge_is_told_where_that_has_no_band_of_its_own() -> None:
    agg = {
        "ttft_ms": {"edges": [700, 800]},
        "itl_ms": {"edges": [10, 20]},
        "pools": [
            {"name": "a", "ttft_curve": [[0, 60], [1, 60]], "itl_curve": [[0, 9], [1, 9]]},
            {"name": "b", "ttft_curve": [[0, 40], [1, 40]], "itl_curve": [[0, 15], [1, 15]]},
        ],
    }
    text = json.dumps({"mode": "agg", "utilisation": 0, "traffic": {"isl": 1}, "agg": agg})
    spec = parse_spec(text, "spec")
    fleet = build_fleet(spec, "spec")
    (cell,) = fleet.stages["agg"].cells
    assert (cell.pools[0], cell.status, cell.contested_tokens) == (0, "met", 1)
    assert cell.contested_beyond
    assert not fleet.has_gaps
    assert any("1 cell is contested beyond the range" in line for line in report_lines(fleet, spec))


def test_what_the_spec_says_for_any_class_stays_and_what_it_leaves_out_is_added_and_told() -> None:
    isl, ttft = {"edges": [0, 1000]}, {"min": 100, "max": 500, "resolution": 2}
    spec: dict[str, Any] = content(isl, ttft, SLOW, FAST)
    spec["objectives"] = {"batch": {"ttft_ms": 450}, "*": {"itl_ms": 12, "priority": 3}}
    fleet, _ = built(spec)
    objectives: Any = fleet.content["objectives"]
    assert objectives["batch"] == {"ttft_ms": 450}
    assert objectives["*"] == {"itl_ms": 12, "priority": 3, **fleet.assumed}
    assert fleet.assumed.keys() == {"ttft_ms"}
    parsed = parse_spec(json.dumps(spec), "spec")
    told = [line for line in report_lines(fleet, parsed) if "names no target" in line]
    assert len(told) == 1
    assert told[0].startswith("TTFT: ")
    assert report_json(fleet, parsed, "slagate")["assumed_targets"] == fleet.assumed
    spec["objectives"]["*"] = Objective(ttft_ms=450, itl_ms=12).model_dump(exclude_none=True)
    fleet, _ = built(spec)
    assert (fleet.assumed, fleet.content["objectives"]) == ({}, spec["objectives"])
