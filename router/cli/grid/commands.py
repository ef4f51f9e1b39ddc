"""`slagate grid ...`: pool grids, made, checked and looked at."""

import json
import sys
from typing import Annotated

import typer

from slagate.pools.fleet_file.models import ANY_CLASS
from slagate.pools.fleet_file.schema import fleet_schema
from slagate.pools.grid.json_text import shown
from slagate.router.cli.command import errors, fail
from slagate.router.cli.fleet_options import FleetFile, Lenient, PoolsFile, PoolWorkers, read_fleet
from slagate.router.cli.grid.build import build
from slagate.router.cli.grid.lint import lint
from slagate.router.cli.grid.select import select_lines
from slagate.router.cli.grid.show import show

grid = typer.Typer(no_args_is_help=True, help="Make, check and show pool grids.")
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
    lines = select_lines(
        fleet.stages[stage], sys.stdin, objectives=fleet.objectives, note=_note_class
    )
    for line in lines:
        sys.stdout.write(line + "\n")


def _note_class(name: str) -> None:
    errors.print(
        f'slagate: note: class {shown(name)} is not in objectives, it counts as "{ANY_CLASS}"'
    )


@grid.command()
def schema() -> None:
    """Print the JSON schema of fleet files, for editors."""
    sys.stdout.write(json.dumps(fleet_schema(), indent=2) + "\n")
