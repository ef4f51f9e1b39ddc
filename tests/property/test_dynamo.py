"""The oracle: every file and input gives the pool and the order that Dynamo's own code gives.

The closed list of docs/grid.md, what Dynamo serves and slagate refuses, is `CLOSED` here.
"""

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slagate.pools.fleet_file.load import FleetConfig, load_config
from slagate.pools.grid.errors import ConfigError
from slagate.pools.grid.grid import Axis, StageGrid
from support.fleet.dynamo_router import Answer, Router, write
from support.fleet.random_fleets import AXES, damage, inputs, probes, random_file
from support.gateway.processes import run_here
from support.seeds import n_in

N_FILES = n_in(gate=60, long=1500)
N_INPUTS = 100  # of each file
N_DAMAGED = n_in(gate=400, long=4000)
SEED = 20260901

NO_INTEGER = r"\(got (true|false|NaN|-?Infinity|(?!-?\d+\))-?\d[\d.e+-]*)\)"
NO_NUMBER = r"\(got (true|false|NaN|-?Infinity)\)"
CLOSED = [
    r".*: unknown key.*",
    rf".*: (row|layer) .*: must be a pool number from 0.* {NO_INTEGER}",
    rf".*\.target_pool: must be a pool number or the name of a pool {NO_INTEGER}",
    rf"(num_\w+_pools|.*_resolution): must be an integer {NO_INTEGER}",
    rf".*_(min|max|min_ms|max_ms|priority): must be a finite number {NO_NUMBER}",
    r'.*_namespaces\[\d+\]: must not be empty \(got ""\)',
    r".*_namespaces\[\d+\]: is in this list twice, first at .*",
    r".*_namespaces\[\d+\]: is a \w+ pool already, and a pool has one role .*",
    r".*_namespaces\[\d+\]: must be a string \(got (NaN|-?Infinity)\)",
]


def is_closed(error: ConfigError) -> bool:
    return all(
        any(re.fullmatch(pattern, str(problem), re.DOTALL) for pattern in CLOSED)
        for problem in error.problems
    )


def values_of(
    stage: str, grid: StageGrid, rng: random.Random
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Inputs for a grid: each axis at its own touchy places, with and without a priority."""
    by_axis = {}
    for axis in grid.axes:
        assert isinstance(axis, Axis)
        by_axis[axis.field] = inputs(axis.low, axis.high, axis.resolution, rng)
    ends = [end for rule in grid.rules for end in (rule.low, rule.high)]
    optional = {axis.field for axis in grid.axes if axis.field != "isl" or stage == "agg"}
    optional.discard("context_length")
    while True:
        request = {
            field: None if field in optional and rng.random() < 0.1 else next(source)
            for field, source in by_axis.items()
        }
        priority = rng.choice(
            [None, 0, -1, rng.randint(-30, 130), *ends, *[end + 1 for end in ends]]
        )
        yield request, priority


def compare(path: Path, content: dict[str, Any], rng: random.Random) -> int:
    """Ask both for the answers to many inputs; how many could be compared."""
    dynamo, ours = Router(write(path, content)), load_config(path)
    assert tuple(ours.stages) == dynamo.stages
    compared = 0
    for stage, grid in ours.stages.items():
        for _, (request, priority) in zip(
            range(N_INPUTS), values_of(stage, grid, rng), strict=False
        ):
            cell = grid.select(request, priority)
            try:
                wanted = dynamo.select(stage, request, priority)
            except OverflowError:
                continue  # Dynamo has no answer to compare with
            found = Answer(cell.pool, grid.pool_order(cell))
            assert found == wanted, (
                f"{stage}: {request}, priority {priority}: {found}, not {wanted}"
            )
            compared += 1
    return compared


def test_random_files_and_inputs_get_dynamos_pool_and_order(tmp_path: Path) -> None:
    """200,000 of them in `make test-long`."""
    compared = 0
    for number in range(N_FILES):
        rng = random.Random(f"{SEED}-{number}")
        content = random_file(rng)
        try:
            compared += compare(tmp_path / "file.json", content, rng)
        except Exception as error:
            raise AssertionError(f"file {number} of seed {SEED}: {content}") from error
    assert compared >= N_FILES * N_INPUTS * 4 / 3


def served(path: Path, content: dict[str, Any]) -> dict[str, list[Answer]] | None:
    """Dynamo's answers to the probes of each stage; None when it does not load or does not serve."""
    try:
        router = Router(path)
        return {
            stage: [
                router.select(stage, request, priority)
                for request in probes(bounds(content, stage))
                for priority in (None, 0, 5, -7, 200)
            ]
            for stage in router.stages
        }
    except Exception:  # noqa: BLE001 - whatever it is, it would be a request's
        return None


def bounds(content: dict[str, Any], stage: str) -> dict[str, tuple[Any, Any]]:
    strategy = content[f"{stage}_pool_selection_strategy"]
    found = {}
    for field, name, unit in AXES[stage]:
        low, high = (
            strategy.get(f"{name}_{end}{unit}", strategy.get(f"{name}_{end}"))
            for end in ("min", "max")
        )
        found[field] = (0, 1) if low is None else (low, high)
    return found


def test_what_dynamo_serves_loads_or_is_in_the_closed_list(tmp_path: Path) -> None:
    n_served = n_refused = 0
    for number in range(N_DAMAGED):
        rng = random.Random(f"{SEED}-damage-{number}")
        content = random_file(rng)
        for _ in range(rng.choice([1, 1, 2])):
            damage(content, rng)
        path = write(tmp_path / "file.json", content)
        wanted = served(path, content)
        try:
            config = load_config(path)
        except ConfigError as error:
            n_refused += 1
            if wanted is not None and not is_closed(error):
                raise AssertionError(f"file {number} of seed {SEED}: {content}") from error
            continue
        if wanted is not None:
            n_served += 1
            assert answers(config, content) == wanted, f"file {number} of seed {SEED}: {content}"
    assert n_served > 0.075 * N_DAMAGED
    assert n_refused > 0.075 * N_DAMAGED


def answers(config: FleetConfig, content: dict[str, Any]) -> dict[str, list[Answer]]:
    return {
        stage: [
            Answer(cell.pool, grid.pool_order(cell))
            for request in probes(bounds(content, stage))
            for priority in (None, 0, 5, -7, 200)
            for cell in [grid.select(request, priority)]
        ]
        for stage, grid in config.stages.items()
    }


@pytest.mark.parametrize("number", range(4))
def test_the_command_gives_the_same_pools(tmp_path: Path, number: int) -> None:
    rng = random.Random(f"{SEED}-command-{number}")
    content = copy.deepcopy(random_file(rng))
    path = write(tmp_path / "file.json", content)
    stage, grid = next(iter(load_config(path).stages.items()))
    asked = [each for _, each in zip(range(1000), values_of(stage, grid, rng), strict=False)]
    lines = [json.dumps(request | {"priority": priority}) for request, priority in asked]
    ended = run_here("grid", "select", str(path), "--stage", stage, stdin="\n".join(lines))
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(found) == len(asked)
    dynamo = Router(path)
    for (request, priority), answer in zip(asked, found, strict=True):
        try:
            wanted = dynamo.select(stage, request, priority)
        except OverflowError:
            continue
        assert answer["pool"] == wanted.pool, (
            f"seed {SEED}, command {number}: {request}, {priority}"
        )
