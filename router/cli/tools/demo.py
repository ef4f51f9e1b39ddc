"""`slagate demo`: its options."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slagate.router.cli.command import Policy, check_choice, fail, run_to_exit
from slagate.router.cli.worker.engine_args import Transport, check_transport
from slagate.router.demo.demo import run_demo, serve_demo
from slagate.router.request.settings import POLICIES, Settings
from slagate.router.tables import stdout_console


def demo(
    *,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Of the sample; default: all of it.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("build/demo.json"),
    transport: Transport = "auto",
    policy: Policy = Settings.policy,
    grid_alone: Annotated[
        bool,
        typer.Option(
            "--grid-alone",
            help="To compare: load decides nothing between pools, nobody is refused.",
        ),
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Replay nothing; serve clients of yours until SIGTERM.")
    ] = False,
) -> None:
    """Replay a real trace through a gateway and eight simulated workers on this machine."""
    check_transport(transport)
    check_choice("--policy", policy, POLICIES)
    if serve:
        if requests is not None:
            fail("--requests: --serve replays nothing")
        # Stdout is for programs, which read the ready line.
        console = Console(stderr=True, markup=False, highlight=False)
        run_to_exit(
            lambda: serve_demo(
                out, console, transport=transport, policy=policy, grid_alone=grid_alone
            )
        )
    run_to_exit(
        lambda: run_demo(
            requests,
            out,
            stdout_console(),
            transport=transport,
            policy=policy,
            grid_alone=grid_alone,
        )
    )
