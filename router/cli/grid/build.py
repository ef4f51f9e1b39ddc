"""`slagate grid build`: a fleet file from pools and SLA axes.

Exit status 0: the file was written; 1: it was, and with --strict some of its cells cannot be met; 2: the
spec or one of its profiles cannot be used, and nothing was written.
"""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from slagate.pools.grid.errors import ConfigError, Problem
from slagate.pools.grid.json_text import ROOT, laid_out
from slagate.pools.grid_build.build import ALGORITHMS, Algorithm, build_fleet
from slagate.pools.grid_build.report import report_json, report_lines
from slagate.pools.grid_build.spec import BuildSpec, parse_spec
from slagate.router.cli.command import ending_on_usage_error, errors, fail

EXIT_GAPS = 1


def _share(value: float | None) -> float | None:
    if value is not None and not 0.0 <= value < 1.0:
        raise typer.BadParameter(f"must be at least 0 and below 1 (got {value:g})")
    return value


def build(
    spec: Annotated[Path, typer.Argument(help="Pools and axes, JSON; see docs/build.md.")],
    *,
    algorithm: Annotated[str, typer.Option(help=", ".join(ALGORITHMS))] = "slagate",
    out: Annotated[Path | None, typer.Option(help="The fleet file; default: stdout.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Why each cell has the pool it has, JSON.")
    ] = None,
    utilisation: Annotated[
        float | None, typer.Option(callback=_share, help="In place of the spec's: 0 to below 1.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option(callback=_share, help="In place of the spec's: 0 to below 1.")
    ] = None,
    spill: Annotated[
        bool, typer.Option("--spill", help="List the further pools that meet a cell in it.")
    ] = False,
    split: Annotated[
        bool, typer.Option(help="Part a band where another pool becomes the fastest.")
    ] = True,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit status 1 where a cell cannot be met.")
    ] = False,
) -> None:
    """Build a fleet file: for each cell the cheapest pool that meets it."""
    with ending_on_usage_error():
        chosen = _algorithm(algorithm)
        for option, path in (("--out", out), ("--report", report)):
            if path is not None and path.exists() and path.samefile(spec):
                fail(f"{option} {path}: is the spec, which it would replace")
        if strict and chosen != "slagate":
            fail(f"--strict: the algorithm {chosen} does not look for cells that cannot be met")
        read = _read(spec, utilisation, margin)
    try:
        fleet = build_fleet(read, str(spec), algorithm=chosen, spill=spill, split=split)
    except ConfigError as error:
        _refuse(error, has_margin=margin is not None)
    if report is not None:
        _write_text(report, laid_out(report_json(fleet, read, algorithm)))
    text = laid_out(fleet.content)
    if out is None:
        sys.stdout.write(text)
    else:
        _write_text(out, text)
    for line in report_lines(fleet, read):
        errors.print(f"slagate: {line}")
    raise typer.Exit(EXIT_GAPS if strict and fleet.has_gaps else 0)


def _refuse(error: ConfigError, *, has_margin: bool) -> NoReturn:
    """End the command with the problems of options and, apart from them, those of the spec."""
    options: list[Problem] = []
    others: list[Problem] = []
    for path, message in error.problems:
        name = "--margin" if path == "margin" and has_margin else path
        (options if name.startswith("--") else others).append(Problem(name, message))
    for problem in options[: None if others else -1]:
        errors.print(f"slagate: {problem}")
    fail(ConfigError(error.source, others) if others else options[-1])


def _algorithm(name: str) -> Algorithm:
    for algorithm in ALGORITHMS:
        if name == algorithm:
            return algorithm
    fail(f"--algorithm must be one of {', '.join(ALGORITHMS)} (got {name!r})")


def _read(path: Path, utilisation: float | None, margin: float | None) -> BuildSpec:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(str(path), [Problem(ROOT, f"cannot be read: {reason}")]) from error
    spec = parse_spec(text, str(path))
    given = {"utilisation": utilisation, "margin": margin}
    return spec.model_copy(update={key: value for key, value in given.items() if value is not None})


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{path}: cannot be written: {error.strerror}")
