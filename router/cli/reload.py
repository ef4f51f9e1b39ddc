"""`slagate reload`: puts another configuration in force on a running gateway, or the one before."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from slagate.proto import gateway_pb2 as gw
from slagate.router.cli.client import to_dict
from slagate.router.cli.command import EXIT_USAGE, Admin, fail, run_to_exit
from slagate.router.cli.tls import Insecure, TlsCa, TlsKey, TlsName, TlsOwnCert, dial_tls
from slagate.router.client import admin_at
from slagate.workers.tls.files import TlsFiles

TIMEOUT_S = 60.0
"""The gateway reads and checks the whole file first, which takes seconds for a large one, and other reloads
may be ahead."""


def reload(
    *,
    target: Admin,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A fleet file of this machine; default: the gateway reads its own again."
        ),
    ] = None,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Go back to what was in force before.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would change.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsOwnCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    insecure: Insecure = False,
) -> None:
    """Have a running gateway take over a changed fleet file, and show what changed.

    A file with problems changes nothing: all of them are listed, and the exit status is 2.
    """
    tls = dial_tls(tls_ca, tls_cert, tls_key, tls_name, insecure=insecure)
    if rollback and config is not None:
        fail("--rollback goes back to what was in force before, so give no --config with it")
    request = gw.ReloadRequest(rollback=rollback, dry_run=dry_run)
    if config is not None:
        try:
            request.fleet = config.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            fail(f"{config}: {getattr(error, 'strerror', None) or 'is not UTF-8'}")
    run_to_exit(lambda: _reload(target, request, tls=tls, as_json=as_json))


async def _reload(
    target: str, request: gw.ReloadRequest, *, tls: TlsFiles | None, as_json: bool
) -> int:
    async with admin_at(target, tls) as gateway:
        answer = await gateway.Reload(request, timeout=TIMEOUT_S)
    if as_json:
        print(json.dumps(to_dict(answer), indent=2))
    else:
        _show(answer, dry_run=request.dry_run)
    return EXIT_USAGE if answer.problems else 0


def _show(answer: gw.ReloadResponse, *, dry_run: bool) -> None:
    for warning in answer.warnings:
        sys.stderr.write(f"slagate: warning: {warning}\n")
    if answer.problems:
        n_problems = len(answer.problems)
        count = "1 problem" if n_problems == 1 else f"{n_problems} problems"
        sys.stderr.write(f"slagate: refused, {count}; {answer.version} stays in force\n")
        for problem in answer.problems:
            sys.stderr.write(f"  {problem.path}: {problem.reason}\n")
        return
    if answer.proposed_version == answer.previous_version:
        print(f"{answer.version} is in force already, nothing changes")
        return
    would = "would go" if dry_run else "went"
    print(f"{would} from {answer.previous_version} to {answer.proposed_version}")
    for line in answer.changes or ["nothing but the order of things, or how they are written"]:
        print(f"  {line}")
