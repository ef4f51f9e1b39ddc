"""The fleet file of a command, and the options that add to it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from slagate.pools.fleet_file.load import FleetConfig, load_config
from slagate.router.cli.command import errors, fail, wrong_use_told

FleetFile = Annotated[
    Path,
    typer.Argument(help="Fleet file, or a configuration of Dynamo's router or endpoint picker."),
]
Lenient = Annotated[
    bool, typer.Option("--lenient", help="Leave out unknown keys of the fleet file, and list them.")
]
PoolsFile = Annotated[
    Path | None,
    typer.Option("--pools", metavar="FILE", help='Further pools: a JSON file {"pools": {...}}.'),
]
PoolWorkers = Annotated[
    list[str] | None,
    typer.Option("--pool", metavar="NAME=HOST:PORT,...", help="Workers of a pool; repeatable."),
]


def read_fleet(
    path: Path,
    *,
    lenient: bool,
    pools: Path | None,
    pool: Sequence[str] | None,
    untold: str | None = None,
) -> FleetConfig:
    """The fleet file with what the options add, to look at; see `checked`."""
    workers = pool_workers(pool or ())
    return checked(
        lambda: load_config(path, lenient=lenient, pools=pools, workers=workers), untold=untold
    )


def checked(read: Callable[[], FleetConfig], *, untold: str | None = None) -> FleetConfig:
    """What `read` returns, its warnings on stderr but for `untold`; a `ConfigError` ends the command."""
    with wrong_use_told():
        config = read()
    for warning in config.warnings:
        if untold is None or not warning.endswith(f": {untold}"):
            errors.print(f"slagate: warning: {warning}")
    return config


def pool_workers(options: Sequence[str]) -> dict[str, list[str]]:
    """Addresses by pool from options such as `fast=10.0.0.1:9000,10.0.0.2:9000`; others end the command."""
    workers: dict[str, list[str]] = {}
    for option in options:
        name, _, addresses = option.rpartition("=")  # a name may have a "=", an address has none
        if not name:
            fail(f"--pool must be NAME=HOST:PORT,... (got {option!r})")
        workers.setdefault(name, []).extend(addresses.split(","))
    return workers
