"""`slagate grid`: the group, and its commands `select` and `schema`."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated

import typer

from slagate.pools.fleet_file.models import ANY_CLASS, Objective, default_for
from slagate.pools.fleet_file.schema import fleet_schema
from slagate.pools.grid.errors import SelectError
from slagate.pools.grid.grid import AXIS_FIELDS, StageGrid
from slagate.pools.grid.json_text import is_finite_number, read_json, short_path, shown
from slagate.router.cli.command import errors, fail
from slagate.router.cli.fleet_options import FleetFile, Lenient, PoolsFile, PoolWorkers, read_fleet
from slagate.router.cli.grid.build import build
from slagate.router.cli.grid.lint import lint
from slagate.router.cli.grid.show import show
from slagate.workers.runtime.usage import unknown_key

grid = typer.Typer(no_args_is_help=True, help="Make, check and show pool grids.")
grid.command()(lint)
grid.command()(show)
grid.command()(build)


_NUMBERS = (*AXIS_FIELDS, "priority")
_FIELDS = (*_NUMBERS, "objective")


@grid.command()
def select(
    config: FleetFile,
    *,
    stage: Annotated[str, typer.Option(help="prefill, decode or agg.")],
    lenient: Lenient = False,
    pools: PoolsFile = None,
    pool: PoolWorkers = None,
) -> None:
    """Read requests as JSON lines on stdin, write the cell and pool of each on stdout."""
    fleet = read_fleet(config, lenient=lenient, pools=pools, pool=pool)
    if stage not in fleet.stages:
        fail(f"--stage must be one of {', '.join(fleet.stages)} in this file (got {stage!r})")

    def note(name: str) -> None:
        counts = f'is not in objectives, it counts as "{ANY_CLASS}"'
        errors.print(f"slagate: note: class {shown(name)} {counts}")

    grid, objectives = fleet.stages[stage], fleet.objectives
    for line in select_lines(grid, sys.stdin, objectives=objectives, note=note):
        sys.stdout.write(line + "\n")


def select_lines(
    grid: StageGrid,
    lines: Iterable[str],
    *,
    objectives: Mapping[str, Objective] = MappingProxyType({}),
    note: Callable[[str], None] | None = None,
) -> Iterator[str]:
    """Yield one JSON object, without a line end, for each of `lines`: the cell and pool of that request.

    `lines` are those of a text file as iterating over it gives them, so the newline that ends the file
    starts no line, and an empty line elsewhere is one. A request without a cell gives `{"error": "..."}`;
    no content of a line raises. `note` is called once, with the first class that is not in `objectives` and
    so counts as "*".
    """
    is_noted = False
    for line in lines:
        unlisted: list[str] = []
        yield json.dumps(_answer(grid, line, objectives, unlisted))
        if unlisted and note is not None and not is_noted:
            note(unlisted[0])
            is_noted = True


def _answer(
    grid: StageGrid, line: str, objectives: Mapping[str, Objective], unlisted: list[str]
) -> dict[str, object]:
    if not line.strip():
        return {"error": "the line is empty"}
    request, problem, repeated = read_json(line)
    if problem is not None:
        return {"error": str(problem)}
    if not isinstance(request, dict):
        return {"error": f"a line must be an object (got {shown(request)})"}
    faults = [f"{short_path(path)}: is given more than once, keep one" for path in repeated]
    faults += [fault for key, value in request.items() if (fault := _fault(key, value))]
    if faults:
        return {"error": "; ".join(faults)}
    if grid.negative_is_none and (request.get("ttft_ms") or 0) <= 0:
        request["ttft_ms"] = None  # as in Go, where a target that is not given is 0
    name = request.pop("objective", None) or ""
    objective = default_for(objectives, name)
    if name and name not in objectives and objective is not None:
        unlisted.append(name)
    for key in ("ttft_ms", "itl_ms", "priority") if objective is not None else ():
        if request.get(key) is None:
            request[key] = getattr(objective, key)
    priority = request.pop("priority", None)
    try:
        cell = grid.select(request, priority)
    except SelectError as error:
        return {"error": str(error)}
    layer = {"layer": cell.index[0]} if len(cell.index) == 3 else {}
    return {
        **layer,
        "row": cell.row,
        "col": cell.col,
        "base_pool": cell.base_pool,
        "pool": cell.pool,
        "pool_name": grid.pool_names[cell.pool],
    }


def _fault(key: str, value: object) -> str | None:
    """Why `key` cannot have this value, also where this stage does not use it; None: it can."""
    if key not in _FIELDS:
        return f"{short_path((key,))}: {unknown_key(key, _FIELDS)} (got {shown(value)})"
    if key == "objective":
        fits, must = isinstance(value, str), "must be a string"
    else:
        fits, must = is_finite_number(value), "must be a finite number"
    return None if value is None or fits else f"{key}: {must} (got {shown(value)})"


@grid.command()
def schema() -> None:
    """Print the JSON schema of fleet files, for editors."""
    sys.stdout.write(json.dumps(fleet_schema(), indent=2) + "\n")
