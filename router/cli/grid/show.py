"""`slagate grid show`: grids in the terminal or as pictures, of a file or of a gateway with its traffic."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from slagate.pools.fleet_file.load import FleetConfig, parse_config
from slagate.proto import gateway_pb2 as gw
from slagate.router.cli.command import errors, fail, run_to_exit, server
from slagate.router.cli.fleet_options import Lenient, PoolsFile, PoolWorkers, read_fleet
from slagate.router.cli.tls import Insecure, TlsCa, TlsKey, TlsName, TlsOwnCert, dial_tls
from slagate.router.client import admin_at
from slagate.router.grid_view.picture import missing_glyphs, write_picture
from slagate.router.grid_view.terminal import print_stage
from slagate.router.grid_view.view import (
    StageGridView,
    Traffic,
    printable,
    stage_view,
    with_escapes,
)
from slagate.router.receipts.attainment import CellTraffic
from slagate.router.receipts.messages import STAGE_OF_WIRE
from slagate.router.tables import stdout_console
from slagate.workers.runtime.usage import UsageError
from slagate.workers.tls.files import TlsFiles

PIPED_COLUMNS = 120
"""Width of the output where stdout is no terminal."""

TIMEOUT_S = 10.0
"""Limit of a call. The gateway has the answer at hand: one that takes longer does not answer at all."""


class ShowOptions(NamedTuple):
    """The options that say what is shown, and where."""

    stage: str | None  # None: all there are
    svg: Path | None
    png: Path | None
    width: int | None  # of the terminal, in columns; None: as it is


def show(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="Fleet file, or a Dynamo global-router JSON; not needed with --target."
        ),
    ] = None,
    *,
    stage: Annotated[
        str | None, typer.Option(help="prefill, decode or agg; default: all there are.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    width: Annotated[
        int | None, typer.Option(min=40, max=1000, help="Columns of the terminal.")
    ] = None,
    target: Annotated[
        str | None, server("A gateway's admin listener: its live traffic, too.")
    ] = None,
    lenient: Lenient = False,
    pools: PoolsFile = None,
    pool: PoolWorkers = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsOwnCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    insecure: Insecure = False,
) -> None:
    """Show pool grids: a table in the terminal, or with --svg and --png pictures."""
    tls = None
    if target is not None:
        tls = dial_tls(tls_ca, tls_cert, tls_key, tls_name, insecure=insecure)
    fleet = None
    if config is not None:
        fleet = read_fleet(config, lenient=lenient, pools=pools, pool=pool)
    elif target is None:
        fail("give a CONFIG, or --target for that of a running gateway")
    run_to_exit(lambda: show_grids(fleet, target, ShowOptions(stage, svg, png, width), tls=tls))


async def show_grids(
    config: FleetConfig | None, target: str | None, options: ShowOptions, *, tls: TlsFiles | None
) -> int:
    """Show the grids of `config`, or of the gateway at `target` with its traffic; returns the exit status.

    Raises `UsageError` for a stage that is not there, a file of another grid than the gateway's, and a
    picture that cannot be made.
    """
    traffic = None
    if target is not None:
        async with admin_at(target, tls) as gateway:
            cells = await gateway.ListCells(gw.ListCellsRequest(), timeout=TIMEOUT_S)
        config, traffic = with_cells(config, cells, target), cell_traffic(cells)
    assert config is not None
    show_stages(config, traffic, options)
    return 0


def with_cells(config: FleetConfig | None, cells: gw.ListCellsResponse, target: str) -> FleetConfig:
    """The configuration of a gateway's cells, or `config` if given. Raises `UsageError` for other grids."""
    live = parse_config(
        json.loads(cells.fleet), source=f"{target} (version {cells.config_version})"
    )
    if config is None:
        return live
    if config.stages != live.stages:
        raise UsageError(
            f"{config.source}: has other grids than {live.source}; to see those leave the file out"
        )
    return replace(config, source=f"{config.source} at {live.source}")


def cell_traffic(cells: gw.ListCellsResponse) -> Traffic:
    """The counts of a gateway's cells, by stage and index of the cell."""
    return {
        (STAGE_OF_WIRE[each.stage].value, tuple(each.cell)): CellTraffic(
            each.requests, each.met, each.judged, each.failed
        )
        for each in cells.cells
    }


def show_stages(config: FleetConfig, traffic: Traffic | None, options: ShowOptions) -> None:
    """Print the grids or, with `--svg` or `--png`, write pictures of them. Raises `UsageError`."""
    if options.stage is not None and options.stage not in config.stages:
        known = ", ".join(config.stages)
        raise UsageError(f"--stage must be one of {known} in this file (got {options.stage!r})")
    for kind, path in (("svg", options.svg), ("png", options.png)):
        if path is not None and path.suffix.lower() in {".svg", ".png"} - {f".{kind}"}:
            raise UsageError(f"--{kind} {path}: has the name of another kind of picture")
    stages = config.stages if options.stage is None else (options.stage,)
    views = [stage_view(config, stage, traffic) for stage in stages]
    if options.svg is not None:
        write_picture(views, options.svg, kind="svg")
        sys.stdout.write(f"{options.svg}: written\n")
    if options.png is not None:
        write_picture(_png_views(views), options.png, kind="png")
        sys.stdout.write(f"{options.png}: written\n")
    if options.svg is None and options.png is None:
        console = stdout_console(piped=PIPED_COLUMNS, width=options.width)
        for view in views:
            print_stage(console, view)


def _png_views(views: Sequence[StageGridView]) -> Sequence[StageGridView]:
    """The stages with characters escaped that the font of PNG files lacks; prints on stderr which."""
    missing = missing_glyphs(views)
    if missing:
        errors.print(
            f"slagate: the font has no glyphs for {printable(missing)};"
            " PNG has numbers and escapes, SVG keeps the text"
        )
    return [with_escapes(view, missing) for view in views]
