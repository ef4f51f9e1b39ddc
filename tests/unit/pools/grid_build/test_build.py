"""Built fleets on real timings: they load, they lint clean, and no request goes to a pool that misses."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from slagate.pools.fleet_file.load import FleetConfig, load_config, parse_config
from slagate.pools.fleet_file.models import Scheduling
from slagate.pools.grid.json_text import laid_out
from slagate.pools.grid_build.build import BuiltFleet, build_fleet
from slagate.pools.grid_build.curve import (
    Load,
    mixed_curves,
    profile_decode,
    profile_prefill,
    queued_prefill,
)
from slagate.pools.grid_build.report import report_json, report_lines
from slagate.pools.grid_build.spec import parse_spec
from slagate.pools.grid_lint.lint import lint
from slagate.router.cli.grid.build import build
from slagate.workers.profiles.profile import load_profile
from support.seeds import n_in

QWEN = "qwen3-32b-fp8-h200"
SIZES = (1, 2, 4, 8)
PROFILE = load_profile(QWEN)
PROFILE_FILE = {
    "schema": 1,
    "model": "m",
    "system": "s",
    "engine": "e",
    "source": "t",
    "prefill_columns": ["new_tokens", "cached_tokens", "ms"],
    "decode_columns": ["batch_size", "context_tokens", "itl_ms"],
    "kv_bytes_per_token": 1,
}
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
    path.write_text(laid_out(fleet.content))
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


def test_scheduling_and_classes_of_the_spec_are_those_of_the_file(tmp_path: Path) -> None:
    classes = {"*": TARGETS["*"] | {"policy": "relegate"}, "chat": {"ttft_ms": 300, "weight": 2}}
    made = built(disagg(objectives=classes, scheduling={"admission": "shadow"}))
    assert made.content["scheduling"] == {"admission": "shadow"}
    fleet = loaded(made, tmp_path)
    assert fleet.scheduling == Scheduling(admission="shadow")
    assert (fleet.objectives["*"].policy, fleet.objectives["chat"].weight) == ("relegate", 2)
    assert "scheduling" not in built(disagg(objectives=TARGETS)).content


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
    n_tried = n_in(gate=1500, long=6000)
    for at in range(n_tried):
        # Uniformly over the grid, then over everything measured, then over short prompts.
        tokens = rng.randint(1, (longest, 131_072, 200)[at % 3])
        target_ms = rng.uniform(tightest, (loosest, loosest, loosest / 100)[at % 3])
        taken = [at_load(tp, tokens, stage=stage, batch=batch) for tp in SIZES]
        pool = fleet.stages[stage].used[grid.select({size: tokens, target: target_ms}).pool]
        if taken[pool] > target_ms:
            n_infeasible += 1
            # Where curves touch, pools differ by less than any clock can tell.
            assert min(taken) > target_ms * 0.9999, (seed, tokens, target_ms, taken, pool)
        else:
            n_met += 1
    assert min(n_met, n_infeasible) > n_tried / 12


def picked(fleet: BuiltFleet, stage: str, tokens: int, target_ms: float) -> int:
    """The number in the spec of the pool that such a request gets."""
    grid = parse_config(fleet.content, source="built").stages[stage]
    size, target = (axis.field for axis in grid.axes)
    return fleet.stages[stage].used[grid.select({size: tokens, target: target_ms}).pool]


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
            sizes, targets = ((1, 3000, 6000, 15_000), (9, 17, 21, 410, 900, 1500, 1900))
            changes = [
                [picked(fleet, stage, tokens, target_ms) for fleet in (plain, other)]
                for tokens in sizes
                for target_ms in targets
            ]
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


def attainable(margin: float, *pools_ms: tuple[float | None, ...]) -> tuple[list[str], Any]:
    """What the report says of a band that is not met, of pools with these times: lines, and JSON."""
    is_agg = len(pools_ms[0]) == 2
    keys = ("ttft_curve", "itl_curve") if is_agg else ("ttft_curve",)
    some_pools = [
        {"name": name, **{key: [[1, ms], [2, ms]] for key, ms in zip(keys, values, strict=True)}}
        for name, values in zip("abcd", pools_ms, strict=False)
    ]
    stage = {
        "isl": bands(0, 1000, 1, beyond=False),
        "ttft_ms": bands(100, 300, 2, beyond=False),
        "pools": some_pools,
    }
    content = disagg(utilisation=0, margin=margin) | {"prefill": stage}
    if is_agg:
        stage["itl_ms"] = bands(10, 30, 2, beyond=False)
        content = {"mode": "agg", "utilisation": 0, "margin": margin, "agg": stage}
    spec = parse_spec(json.dumps(content), "spec")
    fleet = build_fleet(spec, "spec")
    stages: Any = report_json(fleet, spec, "slagate")["stages"]
    lines = [line.split(": ", 2)[2] for line in report_lines(fleet, spec) if ": infeasible" in line]
    return lines, stages["agg" if is_agg else "prefill"]["attainable_from_ms"]


def test_the_targets_that_are_attainable_have_the_margin_on_top() -> None:
    assert attainable(0, (150,), (225,)) == (["TTFT targets below 150 ms"], [[[150]]])
    assert attainable(0.25, (150,), (225,)) == (["TTFT targets below 200 ms"], [[[200]]])
    assert attainable(0, (None,)) == (["every target"], [[]])


def test_of_two_targets_is_said_what_each_pool_meets_of_both() -> None:
    """The lowest TTFT of one pool and the lowest ITL of another are together what no pool meets."""
    lines, pairs = attainable(0.5, (75, 12.5), (125, 7.5), (130, 7.5), (75, None))
    assert lines == [
        "what no pool meets; a meets from TTFT 150 ms and ITL 25 ms",
        "what no pool meets; b meets from TTFT 250 ms and ITL 15 ms",
    ]
    assert pairs == [[[150, 25], [250, 15]]]
    assert attainable(0, (None, 5)) == (["every target"], [[]])


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
        assert fleet.content["prefill_pool_dynamo_namespaces"] == ["known"]
        report: Any = report_json(fleet, parse_spec(json.dumps(content), "spec"), "slagate")
        left_out = {"unknown": "each band has sizes for which no time of it is known"}
        assert report["stages"]["prefill"]["left_out"] == left_out


def test_equal_pools_the_cheaper_then_the_faster_then_the_first_gets_the_cell() -> None:
    def cell(*given: tuple[float, float]) -> int:
        content = disagg(utilisation=0)
        content["prefill"]["pools"] = [
            {"name": f"p{at}", "cost": cost, "ttft_curve": [[0, ms], [1, ms]]}
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
            for pool in (stage.used[number] for number in grid.pools_at(index)):
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
    fleet = built(content, algorithm="dynamo")  # which leaves no pool out
    assert loaded(fleet, tmp_path).stages["prefill"].pool_names == names


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


def test_the_command_names_options_as_options_and_takes_any_share(tmp_path: Path) -> None:
    spec, out = tmp_path / "spec.json", tmp_path / "fleet.json"
    content = disagg()
    content["prefill"]["isl"]["beyond"] = True
    spec.write_text(json.dumps(content))
    arguments = [str(spec), "--algorithm", "dynamo", "--margin", "0.1", "--spill"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    spill, margin, *others = result.stderr.splitlines()
    assert spill.startswith("slagate: --spill: does not go together")
    assert margin == "slagate: --margin: must be 0 with the algorithm dynamo (got 0.1)"
    assert others[0] == f"slagate: {spec}: 1 problem"
    assert others[1].startswith("  prefill.isl.beyond: must be")
    result = CliRunner().invoke(command, [str(spec), "--utilisation", "0.995", "--out", str(out)])
    assert (result.exit_code, "utilisation 0.995" in result.stderr) == (0, True)
    for share in ("1", "-0.1", "nan"):
        result = CliRunner().invoke(command, [str(spec), "--utilisation", share])
        assert (result.exit_code, result.stdout) == (2, "")
    spec.write_text(json.dumps(disagg(margin=0.1)))
    result = CliRunner().invoke(command, [str(spec), "--algorithm", "dynamo"])
    assert "  margin: must be 0 with the algorithm dynamo (got 0.1)" in result.stderr.splitlines()


def test_what_cannot_be_written_is_all_that_is_said(tmp_path: Path) -> None:
    spec, out = tmp_path / "spec.json", tmp_path / "none" / "fleet.json"
    spec.write_text(json.dumps(disagg()))
    result = CliRunner().invoke(command, [str(spec), "--out", str(out)])
    assert result.exit_code == 2
    assert result.stderr == f"slagate: {out}: cannot be written: No such file or directory\n"


def test_the_example_of_the_page_is_what_comes_out() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs/build.md").read_text(encoding="utf-8")
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


def test_an_itl_that_is_highest_between_two_rows_of_its_profile_is_seen(tmp_path: Path) -> None:
    """Contexts grow and the batch that has room shrinks: the product is bent, and most in the middle."""
    rows = [[1, 256, 10], [256, 256, 20], [1, 32768, 10], [256, 32768, 800]]
    size = {"kv_capacity_tokens": 200_000, "prefill": [[64, 0, 10]], "decode": rows}
    path = tmp_path / "bent.json"
    path.write_text(json.dumps(PROFILE_FILE | {"tp": {"1": size}}))
    load = Load(utilisation=0.5, replicas=1, batch=256)
    curve = profile_decode(load_profile(path).tp(1), load)
    in_band = [x for x in curve.knots if 1 < x < 16_384]
    peak_ms = max(curve.ms(n) for n in range(1, 16_384))
    level_ms = 0.99 * peak_ms
    assert max(curve.ms(x) for x in (1, 16_384, *in_band)) < 0.9 * level_ms
    content = disagg(utilisation=0.5)
    content["decode"] = {
        "context_length": {"edges": [0, 16_384], "beyond": False},
        "itl_ms": {"edges": [level_ms, 2 * level_ms], "beyond": False},
        "pools": [
            {"name": "bent", "cost": 1, "tp": 1, "profile": str(path)},
            {"name": "flat", "cost": 8, "itl_curve": [[0, level_ms], [1, level_ms]]},
        ],
    }
    (cell,) = built(content).stages["decode"].cells
    assert (cell.status, cell.pools) == ("met", (1,))


def test_where_nothing_is_met_under_the_planned_load_it_is_the_pool_that_is_fastest_idle() -> None:
    """At 90 % and 26,000 tokens TP 2 and TP 8 are the same, as each is full for its size."""
    content = disagg(utilisation=0.9)
    content["decode"]["context_length"] = {"min": 0, "max": 30_000, "resolution": 1}
    content["decode"]["itl_ms"] = {"edges": [8, 16, 40], "beyond": False}
    stage = built(content).stages["decode"]
    tight = [cell for cell in stage.cells if cell.index[1] == 0 and cell.index[0] > 0]
    assert tight
    assert {stage.pools[cell.pools[0]].name for cell in tight} == {"decode-tp8"}


def test_pool_priorities_go_by_the_sizes_asked_for() -> None:
    """The band for what lies beyond is slower with one of them by far."""
    content = disagg(utilisation=0)
    content["prefill"] = {
        "isl": {"edges": [0, 1000]},
        "ttft_ms": {"edges": [130, 230], "beyond": False},
        "pools": [
            {"name": "steep", "ttft_curve": [[0, 10], [1000, 100]]},
            {"name": "flat", "ttft_curve": [[0, 120], [1000, 120]]},
        ],
    }
    fleet = built(content)
    stage = fleet.stages["prefill"]
    assert stage.size is not None
    assert stage.size.edges == (0, 1000, 2000)
    assert [cell.pools[0] for cell in stage.cells] == [0, 1]
    assert fleet.content["prefill_pool_priorities"] == [0, 1]


@pytest.mark.parametrize(("batch", "max_inflight"), [(8, 64), (64, 8)])
def test_the_lower_of_two_limits_is_what_decodes_together(batch: int, max_inflight: int) -> None:
    content = disagg()
    content["decode"]["pools"] = pools("decode", batch=batch, max_inflight=max_inflight)
    curve = built(content).stages["decode"].pools[0].curves[0]
    assert curve.ms(2000) == at_load(1, 2000, stage="decode", batch=8)


def test_the_file_has_what_was_counted_with() -> None:
    """The number of workers only where they are not there to be counted."""
    addresses = [f"{name}:1" for name in "abc"]
    content = disagg()
    content["prefill"]["pools"] = pools("p", replicas=3, batch=512)
    content["decode"]["pools"] = pools("d", replicas=3, workers=addresses, max_inflight=32)
    entries: Any = built(content).content["pools"]
    prefill, decode = entries["p-tp8"], entries["d-tp8"]
    assert (prefill["replicas"], prefill["batch"]) == (3, 512)
    assert (decode["workers"], decode["max_inflight"]) == (addresses, 32)
    assert not {"replicas", "batch"} & decode.keys()
