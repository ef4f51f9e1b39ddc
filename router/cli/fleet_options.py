"""The fleet file of a command: the options that name it and add to it, and how it is read."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from slagate.pools.fleet_file.load import FleetConfig, load_config
from slagate.router.cli.command import ending_on_usage_error, errors, fail

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
    unreported: str | None = None,
) -> FleetConfig:
    """Read a fleet file with the options' pools and workers, not checked for serving; else as `checked`."""
    workers = pool_workers(pool or ())
    return checked(
        lambda: load_config(path, lenient=lenient, pools=pools, workers=workers),
        unreported=unreported,
    )


def checked(read: Callable[[], FleetConfig], *, unreported: str | None = None) -> FleetConfig:
    """What `read` returns; prints its warnings but `unreported`. A `ConfigError` ends the command."""
    with ending_on_usage_error():
        config = read()
    for warning in config.warnings:
        if unreported is None or not warning.endswith(f": {unreported}"):
            errors.print(f"slagate: warning: {warning}")
    return config


def pool_workers(options: Sequence[str]) -> dict[str, list[str]]:
    """Addresses by pool, of options `NAME=HOST:PORT,HOST:PORT`; one of another form ends the command."""
    workers: dict[str, list[str]] = {}
    for option in options:
        name, _, addresses = option.rpartition("=")  # a name may have a "=", an address has none
        if not name:
            fail(f"--pool must be NAME=HOST:PORT,... (got {option!r})")
        workers.setdefault(name, []).extend(addresses.split(","))
    return workers
