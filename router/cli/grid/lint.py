"""`slagate grid lint`: reports what is probably a mistake in a fleet file that loads.

Exit status 0: no findings; 1: findings; 2: the file, one of its profiles or the trace cannot be read.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from slagate.pools.fleet_file.load import UNREACHED, FleetConfig
from slagate.pools.fleet_file.rules import read_profiles
from slagate.pools.grid.errors import ConfigError, Problem
from slagate.pools.grid.json_text import json_path, shown
from slagate.pools.grid_lint.lint import CODES
from slagate.pools.grid_lint.lint import lint as findings_of
from slagate.router.cli.command import (
    EXIT_FINDINGS,
    FindingsAsJson,
    IgnoredCodes,
    ShownFinding,
    codes_to_ignore,
    ending_on_usage_error,
    print_findings,
)
from slagate.router.cli.fleet_options import FleetFile, Lenient, PoolsFile, PoolWorkers, read_fleet
from slagate.router.loadgen.trace import load_trace
from slagate.workers.findings import Finding
from slagate.workers.profiles.profile import TpProfile


def lint(
    config: FleetFile,
    *,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Requests, JSON Lines: do the bands fit their sizes?"),
    ] = None,
    ignore: IgnoredCodes = None,
    as_json: FindingsAsJson = False,
    lenient: Lenient = False,
    pools: PoolsFile = None,
    pool: PoolWorkers = None,
) -> None:
    """Report what is probably not meant in a fleet file; exit status 1 where something is found."""
    ignored = codes_to_ignore(ignore, CODES, page="docs/lint.md")
    fleet = read_fleet(config, lenient=lenient, pools=pools, pool=pool, unreported=UNREACHED)
    with ending_on_usage_error():
        traffic = [] if trace is None else [request.isl_tokens for request in load_trace(trace)]
        found = findings_of(fleet, profiles=pool_profiles(fleet), traffic=traffic)
    kept = [finding for finding in found if finding.code not in ignored]
    print_findings(
        map(_shown, kept), _summary(kept, n_ignored=len(found) - len(kept)), as_json=as_json
    )
    raise typer.Exit(EXIT_FINDINGS if kept else 0)


def pool_profiles(config: FleetConfig) -> dict[str, TpProfile]:
    """The timing profile, for the pool's own TP size, of each pool that names one; by pool.

    Raises `ConfigError` listing those that cannot be read, or do not have the size.
    """
    named = {
        name: (spec.profile, spec.tp)
        for name, spec in config.pools.items()
        if spec.profile is not None
    }
    profiles, faults = read_profiles(named)
    if faults:
        problems = [
            Problem(json_path(fault.path), f"{fault.reason} (got {shown(fault.got)})")
            for fault in faults
        ]
        raise ConfigError(config.source, problems)
    return profiles


def _shown(finding: Finding) -> ShownFinding:
    code, _, path, message, advice = finding
    # Each message begins with a word of ours, never with a name.
    sentence = f"{message[:1].upper()}{message[1:]}"
    fields = {"code": code, "path": path, "message": message, "advice": advice}
    return ShownFinding(f"{code}  {path}", sentence, advice, fields)


def _summary(found: Sequence[Finding], *, n_ignored: int) -> str:
    """How many findings there are, and of which codes."""
    ignored = f" ({n_ignored} ignored)" if n_ignored else ""
    if not found:
        return f"no findings{ignored}"
    counts = Counter(finding.code for finding in found)
    listed = ", ".join(f"{code} x{n}" if n > 1 else code for code, n in counts.items())
    return f"{len(found)} finding{'s' * (len(found) > 1)}{ignored}: {listed}"
