"""`slagate grid ...`: pool grids, offline."""

import json
import sys
from typing import Annotated

import typer

from slagate.pools.grid_schema import fleet_schema
from slagate.router.command import FleetFile, Lenient, PoolsFile, PoolWorkers, fail, read_fleet
from slagate.router.grid_build_cli import build
from slagate.router.grid_lint_cli import lint
from slagate.router.grid_select import select_lines
from slagate.router.grid_show import show

grid = typer.Typer(no_args_is_help=True, help="Look at pool grids, offline.")
grid.command()(lint)
grid.command()(show)
grid.command()(build)


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
    for line in select_lines(fleet.stages[stage], sys.stdin, objectives=fleet.objectives):
        sys.stdout.write(line + "\n")


@grid.command()
def schema() -> None:
    """Print the JSON schema of fleet files, for editors."""
    sys.stdout.write(json.dumps(fleet_schema(), indent=2) + "\n")
