"""Built fleets on real timings: they load, they lint clean, and no request goes to a pool that misses."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from slagate.pools.curve import Load, mixed_curves, profile_decode, profile_prefill, queued_prefill
from slagate.pools.grid_build import BuiltFleet, build_fleet
from slagate.pools.grid_build_report import report_json, report_lines
from slagate.pools.grid_build_spec import parse_spec
from slagate.pools.grid_config import FleetConfig, load_config, parse_config
from slagate.pools.grid_lint import lint
from slagate.router.grid_build_cli import build, fleet_text
from slagate.workers.profile import load_profile

QWEN = "qwen3-32b-fp8-h200"
SIZES = (1, 2, 4, 8)
PROFILE = load_profile(QWEN)
command = typer.Typer()
command.command()(build)
TARGETS = {"*": {"ttft_ms": 600, "itl_ms": 19}}


def bands(low: float, high: float, resolution: int, **more: object) -> dict[str, object]:
    return {"min": low, "max": high, "resolution": resolution, **more}


def pools(stage: str, **more: object) -> list[dict[str, object]]:
    return [{"name": f"{stage}-tp{tp}", "tp": tp, "profile": QWEN, **more} for tp in SIZES]


def disagg(**more: object) -> dict[str, Any]:
    return {
        "utilisation": 0.7,
        "prefill": {
            "isl": bands(0, 8192, 4),
            "ttft_ms": bands(400, 2000, 4),
            "pools": pools("prefill"),
        },
        "decode": {
            "context_length": bands(0, 16384, 2),
            "itl_ms": bands(8, 24, 4),
            "pools": pools("decode", max_inflight=32),
        },
        **more,
    }


def agg(**more: object) -> dict[str, Any]:
    stage = {
        "isl": bands(0, 8192, 2),
        "ttft_ms": bands(400, 2000, 2),
        "itl_ms": bands(10, 50, 2),
        "pools": pools("agg", max_inflight=32),
    }
    return {"mode": "agg", "agg": stage, **more}


def built(content: dict[str, Any], **options: Any) -> BuiltFleet:
    return build_fleet(parse_spec(json.dumps(content), "spec"), "spec", **options)


def loaded(fleet: BuiltFleet, tmp_path: Path) -> FleetConfig:
    path = tmp_path / "fleet.json"
    path.write_text(fleet_text(fleet.content))
    return load_config(path)


def findings(fleet: FleetConfig) -> list[str]:
    profiles = {name: PROFILE.tp(spec.tp or 0) for name, spec in fleet.pools.items()}
    return [f"{finding.code} {finding.message}" for finding in lint(fleet, profiles=profiles)]


def test_a_fleet_on_the_qwen_profile_loads_and_lints_clean(tmp_path: Path) -> None:
    fleet = loaded(built(disagg(objectives=TARGETS)), tmp_path)
    assert (fleet.warnings, fleet.ignored, findings(fleet)) == ((), (), [])
    assert {name: spec.gpus for name, spec in fleet.pools.items()} == {
        f"{stage}-tp{tp}": tp for stage in ("prefill", "decode") for tp in SIZES
    }
    assert fleet.stages["prefill"].priorities == (3, 2, 1, 0)
    # All four sizes have cells: neither everything fast nor everything cheap.
    assert {cell[0] for cell in fleet.stages["prefill"].cells} == {0, 1, 2, 3}
    assert {cell[0] for cell in fleet.stages["decode"].cells} == {0, 1, 2, 3}


def at_load(tp: int, tokens: float, *, stage: str, batch: int) -> float:
    """Milliseconds of a pool at the load of these specs."""
    load = Load(utilisation=0.7, replicas=1, batch=batch)
    if stage == "prefill":
        return queued_prefill(profile_prefill(PROFILE.tp(tp)), load).ms(tokens)
    return profile_decode(PROFILE.tp(tp), load).ms(tokens)


@pytest.mark.parametrize("batch", [32, 256])
@pytest.mark.parametrize(
    ("stage", "size", "target"),
    [("prefill", "isl", "ttft_ms"), ("decode", "context_length", "itl_ms")],
)
def test_over_all_sizes_and_targets_no_pool_is_picked_that_misses_where_another_meets(
    stage: str, size: str, target: str, batch: int
) -> None:
    """Up to the longest prompt measured, and from targets that nothing meets to those that all do."""
    content = disagg()
    content["decode"]["pools"] = pools("decode", max_inflight=batch)
    fleet = built(content)
    assert not fleet.stages[stage].contested
    grid = parse_config(fleet.content, source="built").stages[stage]
    seed = 11
    rng = random.Random(seed)
    longest = {"isl": 8192, "context_length": 16384}[size]
    tightest, loosest = {"ttft_ms": (1, 3000), "itl_ms": (1, 60)}[target]
    n_met = n_infeasible = 0
    for at in range(6000):
        # Uniformly over the grid, then over everything measured, then over short prompts.
        tokens = rng.randint(1, (longest, 131_072, 200)[at % 3])
        target_ms = rng.uniform(tightest, (loosest, loosest, loosest / 100)[at % 3])
        taken = [at_load(tp, tokens, stage=stage, batch=batch) for tp in SIZES]
        picked = grid.select({size: tokens, target: target_ms}).pool
        if taken[picked] > target_ms:
            n_infeasible += 1
            # Where curves touch, pools differ by less than any clock can tell.
            assert min(taken) > target_ms * 0.9999, (seed, tokens, target_ms, taken, picked)
        else:
            n_met += 1
    assert min(n_met, n_infeasible) > 500


def test_margin_and_utilisation_only_ever_ask_for_faster_pools() -> None:
    def closed(**more: float) -> BuiltFleet:
        content = disagg(**more)
        for stage, axes in (
            ("prefill", ("isl", "ttft_ms")),
            ("decode", ("context_length", "itl_ms")),
        ):
            for axis in axes:
                content[stage][axis]["beyond"] = False
        return built(content)

    plain = closed(utilisation=0.3)
    for other in (closed(utilisation=0.3, margin=0.3), closed(utilisation=0.8)):
        for stage in plain.stages:
            pairs = zip(plain.stages[stage].cells, other.stages[stage].cells, strict=True)
            changes = [(a.pools[0], b.pools[0]) for a, b in pairs]
            assert all(a <= b for a, b in changes)
            assert any(a < b for a, b in changes)


def test_more_replicas_wait_less_and_so_do_with_cheaper_pools() -> None:
    one, four = (
        built(disagg() | {"prefill": disagg()["prefill"] | {"pools": pools("p", replicas=n)}})
        for n in (1, 4)
    )
    gpus = [
        sum(stage.pools[cell.pools[0]].gpus for cell in stage.cells)
        for stage in (one.stages["prefill"], four.stages["prefill"])
    ]
    assert gpus[1] < gpus[0]


def test_a_target_that_nothing_meets_is_said_and_never_silent() -> None:
    """A first column from 0 ms: Dynamo's builder filled it without a word."""
    content = disagg()
    content["prefill"]["ttft_ms"] = bands(0, 2000, 4)
    spec = parse_spec(json.dumps(content), "spec")
    fleet = build_fleet(spec, "spec")
    assert fleet.has_gaps
    stage = fleet.stages["prefill"]
    assert [cell.index[1] for cell in stage.cells_of("infeasible")][:4] == [0, 0, 0, 0]
    lines = list(report_lines(fleet, spec))
    assert "prefill: ISL bands were parted at 91: curves cross there" in lines
    limit = at_load(8, 8192, stage="prefill", batch=32)
    wanted = f"prefill: infeasible for ISL 6144 to 8192: TTFT targets below {limit:.4g} ms"
    assert wanted in lines
    report: Any = json.loads(json.dumps(report_json(fleet, spec, "slagate")))
    cells = report["stages"]["prefill"]["cells"]
    assert {cell["status"] for cell in cells} == {"met", "infeasible", "beyond"}
    assert cells[0]["worst_ms"].keys() == {f"prefill-tp{tp}" for tp in SIZES}
    assert cells[-1]["worst_ms"]["prefill-tp8"][0] > limit


def test_a_pool_without_a_time_is_never_picked_while_another_has_one() -> None:
    """Dynamo's builder took a missing time for 0 ms."""
    for missing in (None, 0, -5):
        content = disagg()
        content["prefill"]["pools"] = [
            {"name": "unknown", "cost": 1, "ttft_curve": [[0, missing], [10_000, missing]]},
            {"name": "known", "cost": 8, "ttft_curve": [[0, 50], [10_000, 500]]},
        ]
        fleet = built(content)
        assert {cell.pools for cell in fleet.stages["prefill"].cells} == {(1,)}
        assert fleet.content["prefill_pool_priorities"] == [1, 0]


def test_equal_pools_the_cheaper_then_the_faster_then_the_first_gets_the_cell() -> None:
    def cell(*given: tuple[float, float]) -> int:
        content = disagg(utilisation=0)
        content["prefill"]["pools"] = [
            {"name": f"p{at}", "cost": cost, "ttft_curve": [[0, ms]]}
            for at, (cost, ms) in enumerate(given)
        ]
        return built(content).stages["prefill"].cells[-1].pools[0]

    assert cell((2, 10), (1, 100)) == 1
    assert cell((1, 100), (1, 10)) == 1
    assert cell((1, 10), (1, 10)) == 0


def test_a_spill_list_has_the_pools_that_meet_the_cell_in_order_of_cost() -> None:
    fleet = built(disagg(), spill=True, split=False)
    grid = parse_config(fleet.content, source="built").stages["prefill"]
    assert grid.pools_at((0, 4)) == (0, 1, 2, 3)
    assert grid.pools_at((4, 4))[0] == 3
    cells = fleet.stages["prefill"].cells
    assert {len(cell.pools) for cell in cells if cell.status != "met"} == {1}


def test_an_agg_grid_meets_both_targets_with_what_each_phase_takes_from_the_other(
    tmp_path: Path,
) -> None:
    fleet = built(agg(), spill=True)
    grid = loaded(fleet, tmp_path).stages["agg"]
    stage = fleet.stages["agg"]
    load = Load(utilisation=0.7, replicas=1, batch=32)
    curves = [mixed_curves(PROFILE.tp(tp), load) for tp in SIZES]
    seed = 3
    rng = random.Random(seed)
    n_met = 0
    for _ in range(2000):
        values = {
            "isl": rng.randint(1, 8191),
            "ttft_ms": rng.uniform(1, 3000),
            "itl_ms": rng.uniform(1, 70),
        }
        index = grid.select(values).index
        cell = next(cell for cell in stage.cells if cell.index == index)
        taken = [[curve.ms(values["isl"]) for curve in pool] for pool in curves]
        if cell.status == "met":
            n_met += 1
            for pool in grid.pools_at(index):
                assert taken[pool][0] <= values["ttft_ms"], (seed, values)
                assert taken[pool][1] <= values["itl_ms"], (seed, values)
    assert n_met > 200
    # Prefills between its steps make a batch slower, and the steps between its chunks a prompt.
    assert curves[0][1].ms(4096) > profile_decode(PROFILE.tp(1), load).ms(4096 + 128)
    assert curves[0][0].ms(4096) > profile_prefill(PROFILE.tp(1)).ms(4096)


def test_an_agg_grid_without_sizes_is_for_the_typical_prompt() -> None:
    content = agg(traffic={"isl": 2048})
    del content["agg"]["isl"]
    fleet = built(content)
    grid = parse_config(fleet.content, source="built").stages["agg"]
    assert [axis.field for axis in grid.axes] == ["ttft_ms", "itl_ms"]
    spec = parse_spec(json.dumps(content), "spec")
    cells: Any = report_json(fleet, spec, "slagate")["stages"]
    assert all(len(cell["index"]) == 2 for cell in cells["agg"]["cells"])
    assert math.isclose(
        fleet.stages["agg"].cells[0].worst_ms[0][1],
        mixed_curves(PROFILE.tp(1), Load(0.7, 1, 32, isl_tokens=2048))[1].ms(2048),
    )


def test_the_command_writes_file_and_report_and_says_what_is_infeasible(tmp_path: Path) -> None:
    spec, out, report = (tmp_path / name for name in ("spec.json", "fleet.json", "report.json"))
    content = disagg()
    content["prefill"]["ttft_ms"] = bands(0, 2000, 4)
    spec.write_text(json.dumps(content))
    arguments = [str(spec), "--out", str(out), "--report", str(report), "--margin", "0.1"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert "infeasible for ISL 6144 to 8192" in result.stderr
    assert load_config(out).stages.keys() == {"prefill", "decode"}
    assert json.loads(report.read_text())["margin"] == 0.1
    assert "    [3, 0, 0, 0]" in out.read_text()
    assert CliRunner().invoke(command, [*arguments, "--strict"]).exit_code == 1
    to_stdout = CliRunner().invoke(command, [str(spec), "--margin", "0.1"])
    assert to_stdout.stdout == out.read_text()


def test_names_come_through_the_layout_of_the_file_unchanged(tmp_path: Path) -> None:
    names = ("two  blanks", "[a  b]", "{x}\n[ y ]", "ü")
    content = disagg()
    content["prefill"]["pools"] = [{**pools("p")[0], "name": name} for name in names]
    assert loaded(built(content), tmp_path).stages["prefill"].pool_names == names


def test_the_command_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text('{"margin": 2}')
    result = CliRunner().invoke(command, [str(spec)])
    assert result.exit_code == 2
    assert "margin: must be below 1 (got 2)" in result.stderr
    assert "prefill: is required" in result.stderr
    missing = CliRunner().invoke(command, [str(tmp_path / "none")])
    assert (missing.exit_code, "cannot be read" in missing.stderr) == (2, True)
    other = CliRunner().invoke(command, [str(spec), "--algorithm", "best"])
    assert (other.exit_code, "--algorithm must be one of" in other.stderr) == (2, True)


def test_the_example_of_the_page_is_what_comes_out() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/build.md").read_text(encoding="utf-8")
    spec = parse_spec(page.split("```json\n")[1].split("```")[0], "spec")
    fleet = build_fleet(spec, "spec")
    for line in report_lines(fleet, spec):
        assert f"slagate: {line}\n" in page
    rows = fleet.content["prefill_pool_selection_strategy"]["prefill_pool_mapping"]  # type: ignore[index]
    table = page.split("isl_edges 0, ")[1].split("```")[0].splitlines()[2:]
    shown = [[word for word in line.split() if word.startswith("tp")] for line in table]
    assert shown == [[f"tp{SIZES[at]}" for at in row] for row in rows]
    cell = next(c for c in fleet.stages["prefill"].cells if c.index == (3, 1))
    assert [round(values[0]) for values in cell.worst_ms] == [923, 557, 357, 249]


def test_a_crossing_that_matters_only_between_two_sizes_looked_at_is_found() -> None:
    """From 850 to 899 tokens one pool meets targets above 109 ms that the faster one at the end misses."""
    content = disagg(utilisation=0)
    content["prefill"] |= {
        "isl": {"edges": [0, 100_000], "beyond": False},
        "ttft_ms": {"edges": [109, 200], "beyond": False},
        "pools": [
            {"name": "steep", "ttft_curve": [[0, 83], [100_000, 3083]]},
            {"name": "flat", "ttft_curve": [[0, 92], [100_000, 2092]]},
        ],
    }
    (cell,) = built(content, split=False).stages["prefill"].cells
    assert cell.pools == (1,)
    assert cell.contested_tokens is not None
    parted = built(content).stages["prefill"]
    assert parted.added_edges == (901,)
    assert [cell.pools for cell in parted.cells] == [(0,), (1,)]
    assert not parted.contested
