"""Dynamo's two grid builders: the reference vectors, and what they refuse."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from slagate.pools.fleet_file.load import parse_config
from slagate.pools.grid.errors import ConfigError
from slagate.pools.grid_build.build import build_fleet
from slagate.pools.grid_build.curve import Function
from slagate.pools.grid_build.dynamo import Range, Version, dynamo_mapping
from slagate.pools.grid_build.spec import parse_spec
from slagate.router.cli.grid.build import build

LINES = ((50, 0.05), (40, 0.03), (30, 0.02))
COSTS = (1, 2, 4)
CURVES = [lambda x, a=a, b=b: a + b * x for a, b in LINES]  # type: ignore[misc]

TWO = Range(0, 4000, 2), Range(100, 500, 2)
FOUR = Range(0, 4000, 4), Range(0, 400, 4)
VECTORS: list[tuple[Version, tuple[Range, Range], list[list[int]]]] = [
    ("dynamo-first", TWO, [[0, 0], [0, 0]]),
    ("dynamo", TWO, [[1, 0], [2, 0]]),
    ("dynamo-first", FOUR, [[0, 0, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [2, 1, 0, 0]]),
    ("dynamo", FOUR, [[2, 0, 0, 0], [2, 1, 0, 0], [2, 2, 0, 0], [2, 2, 1, 0]]),
]


def spec_text(size: Range, latency: Range, **changed: object) -> str:
    points = [
        {"name": f"p{at}", "cost": cost, "ttft_curve": [[0, a], [1000, a + 1000 * b]]}
        for at, ((a, b), cost) in enumerate(zip(LINES, COSTS, strict=True))
    ]
    bands = [{"min": r.low, "max": r.high, "resolution": r.resolution} for r in (size, latency)]
    decode = {
        "context_length": bands[0],
        "itl_ms": bands[1],
        "pools": [{"name": "d", "itl_curve": [[0, 10], [1, 10]]}],
    }
    prefill = {"isl": bands[0], "ttft_ms": bands[1], "pools": points}
    return json.dumps({"prefill": prefill, "decode": decode, **changed})


@pytest.mark.parametrize(("version", "axes", "mapping"), VECTORS)
def test_a_reference_vector(
    version: Version, axes: tuple[Range, Range], mapping: list[list[int]]
) -> None:
    size, latency = axes
    built = dynamo_mapping(CURVES, COSTS, size=size, latency=latency, version=version)
    assert built == mapping


@pytest.mark.parametrize(("version", "axes", "mapping"), VECTORS)
def test_a_reference_vector_through_a_spec_whose_file_loads(
    version: Version, axes: tuple[Range, Range], mapping: list[list[int]]
) -> None:
    spec = parse_spec(spec_text(*axes), "spec")
    content = build_fleet(spec, "spec", algorithm=version).content
    assert content["prefill_pool_selection_strategy"] == {
        "isl_min": axes[0].low,
        "isl_max": axes[0].high,
        "isl_resolution": axes[0].resolution,
        "ttft_min_ms": axes[1].low,
        "ttft_max_ms": axes[1].high,
        "ttft_resolution": axes[1].resolution,
        "prefill_pool_mapping": mapping,
    }
    assert parse_config(content, source="built").pools["p2"].gpus == 4


def test_what_the_builders_refuse() -> None:
    size, latency = TWO
    for version in ("dynamo", "dynamo-first"):
        with pytest.raises(ValueError, match="must not be empty"):
            dynamo_mapping([], [], size=size, latency=latency, version=version)
        with pytest.raises(ValueError, match="3 curves and 2 costs"):
            dynamo_mapping(CURVES, [1, 2], size=size, latency=latency, version=version)
    for wrong in (Range(0, 4000, 0), Range(4000, 4000, 2), Range(5, 4, 2)):
        with pytest.raises(ValueError, match="size"):
            dynamo_mapping(CURVES, COSTS, size=wrong, latency=latency, version="dynamo")
        with pytest.raises(ValueError, match="latency"):
            dynamo_mapping(CURVES, COSTS, size=size, latency=wrong, version="dynamo")


def test_equal_costs_and_latencies_go_to_the_first_pool() -> None:
    flat = [lambda _x: 10.0, lambda _x: 10.0]
    for low in (0, 20):  # none qualifies in the first column, both qualify
        built = dynamo_mapping(
            flat, [3, 3], size=Range(0, 10, 1), latency=Range(low, 40, 1), version="dynamo"
        )
        assert built == [[0]]


def test_a_latency_that_is_no_number_never_meets_and_wins_the_fallback_only_as_the_first() -> None:
    curves = [lambda _x: math.nan, lambda _x: 10.0]

    def built(curves: list[Function], low: int) -> list[list[int]]:
        latency = Range(low, 40, 1)
        return dynamo_mapping(
            curves, [1, 2], size=Range(0, 10, 1), latency=latency, version="dynamo"
        )

    assert built(curves, 20) == [[1]]
    assert built(curves, 0) == [[0]]
    assert built(curves[::-1], 0) == [[0]]


def test_dynamos_algorithms_take_no_margin_no_edges_and_no_agg_grid() -> None:
    spec = parse_spec(spec_text(*TWO, margin=0.1), "spec")
    with pytest.raises(ConfigError) as caught:
        build_fleet(spec, "spec", algorithm="dynamo")
    assert [problem.path for problem in caught.value.problems] == ["margin"]
    text = spec_text(*TWO).replace(
        '"ttft_ms": {"min": 100, "max": 500, "resolution": 2}', '"ttft_ms": {"edges": [100, 500]}'
    )
    with pytest.raises(ConfigError, match=r"prefill\.ttft_ms\.edges: must be min, max"):
        build_fleet(parse_spec(text, "spec"), "spec", algorithm="dynamo-first")
    agg = {"ttft_ms": {"edges": [1, 2]}, "itl_ms": {"edges": [1, 2]}, "pools": []}
    agg["pools"] = [{"name": "a", "ttft_curve": [[0, 1], [1, 1]], "itl_curve": [[0, 1], [1, 1]]}]
    text = json.dumps({"mode": "agg", "agg": agg, "traffic": {"isl": 10}})
    with pytest.raises(ConfigError, match="mode: must be disagg"):
        build_fleet(parse_spec(text, "spec"), "spec", algorithm="dynamo")


def test_what_dynamos_algorithms_would_ignore_is_refused_all_of_it_at_once() -> None:
    text = spec_text(*TWO).replace('"resolution": 2}', '"resolution": 2, "beyond": true}', 1)
    with pytest.raises(ConfigError) as caught:
        build_fleet(parse_spec(text, "s"), "s", algorithm="dynamo", spill=True, split=False)
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["--spill", "--no-split", "prefill.isl.beyond"]
    alike = parse_spec(text.replace('"beyond": true', '"beyond": false'), "s")
    assert build_fleet(alike, "s", algorithm="dynamo").stages["prefill"].cells == ()


def test_the_command_says_what_dynamos_algorithms_do_not_look_for(tmp_path: Path) -> None:
    command = typer.Typer()
    command.command()(build)
    spec, report = tmp_path / "spec.json", tmp_path / "report.json"
    spec.write_text(spec_text(*TWO))
    arguments = [str(spec), "--algorithm", "dynamo", "--utilisation", "0.9"]
    result = CliRunner().invoke(command, [*arguments, "--report", str(report)])
    assert result.exit_code == 0, result.output
    (line,) = result.stderr.splitlines()
    assert "do not look for cells that no pool meets; utilisation 0.9 counts for the ITL" in line
    told: Any = json.loads(report.read_text())
    assert told.keys() == {"algorithm", "utilisation", "stages"}
    assert told["stages"]["prefill"].keys() == {"axes", "pools"}
    strict = CliRunner().invoke(command, [*arguments, "--strict"])
    assert (strict.exit_code, strict.stdout) == (2, "")
    assert strict.stderr.startswith("slagate: --strict: the algorithm dynamo")


def test_utilisation_makes_the_batch_that_an_itl_is_of() -> None:
    def mapping(utilisation: float) -> object:
        content = json.loads(spec_text(*TWO, utilisation=utilisation))
        content["decode"] = {
            "context_length": {"min": 0, "max": 16384, "resolution": 2},
            "itl_ms": {"min": 8, "max": 24, "resolution": 4},
            "pools": [
                {"name": f"d{tp}", "tp": tp, "profile": "qwen3-32b-fp8-h200", "batch": 64}
                for tp in (1, 2, 4, 8)
            ],
        }
        built = build_fleet(parse_spec(json.dumps(content), "s"), "s", algorithm="dynamo").content
        strategy: Any = built["decode_pool_selection_strategy"]
        return strategy["decode_pool_mapping"]

    assert mapping(0.1) != mapping(0.9)
