"""The `slagate` command: all of its commands, and those that are a few lines."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slagate.router import client_cli
from slagate.router.bench_cli import bench
from slagate.router.command import (
    Policy,
    Transport,
    check_policy,
    check_transport,
    fail,
    run_to_exit,
)
from slagate.router.demo import run_demo, serve_demo
from slagate.router.grid_cli import grid
from slagate.router.profile_cli import profile
from slagate.router.receipts_cli import receipts, recompute
from slagate.router.reload_cli import reload
from slagate.router.serve_cli import serve
from slagate.router.settings import Settings
from slagate.router.tls_cli import dials
from slagate.router.worker_cli import worker
from slagate.workers.errors import UsageError
from slagate.workers.tls_files import TlsFiles

cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="SLA-aware global router gateway for TensorRT-LLM.",
)
cli.add_typer(grid, name="grid")
cli.add_typer(profile, name="profile")
cli.add_typer(worker, name="worker")
cli.command()(serve)
cli.command()(bench)
cli.command()(receipts)
cli.command()(recompute)
cli.command()(reload)


Target = Annotated[str, typer.Option(metavar="HOST:PORT", help="The gateway to call.")]
Admin = Annotated[str, typer.Option(metavar="HOST:PORT", help="The gateway's admin listener.")]
Tokens = Annotated[
    str | None, typer.Option(metavar="1,2,3|@FILE", help="Prompt token ids, or a file of them.")
]
Isl = Annotated[int | None, typer.Option(min=1, help="Or: a made-up prompt of this many tokens.")]
Model = Annotated[str | None, typer.Option(help="Model name; may be left out where one is served.")]
MaxTokens = Annotated[int | None, typer.Option(help="Output budget.")]
TtftMs = Annotated[str | None, typer.Option(help="TTFT target, ms.")]
ItlMs = Annotated[str | None, typer.Option(help="ITL target, ms.")]
Priority = Annotated[str | None, typer.Option(help="int32, higher is more important.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


@cli.command()
@dials
def generate(
    *,
    target: Target,
    tls: TlsFiles | None,
    tokens: Tokens = None,
    isl: Isl = None,
    model: Model = None,
    max_tokens: MaxTokens = None,
    ttft_ms: TtftMs = None,
    itl_ms: ItlMs = None,
    priority: Priority = None,
    receipt: Annotated[
        bool, typer.Option("--receipt", help="Print the receipt at the end.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(help="Deadline, seconds.")] = None,
) -> None:
    """Send one request and print its token ids as they come, then the receipt as JSON."""
    prompt = _prompt(tokens, isl)
    options = client_cli.RequestOptions(prompt, model, max_tokens, ttft_ms, itl_ms, priority)
    run_to_exit(
        lambda: client_cli.generate(target, options, tls=tls, receipt=receipt, timeout_s=timeout)
    )


@cli.command()
@dials
def explain(
    *,
    target: Admin,
    tls: TlsFiles | None,
    tokens: Tokens = None,
    isl: Isl = None,
    model: Model = None,
    max_tokens: MaxTokens = None,
    ttft_ms: TtftMs = None,
    itl_ms: ItlMs = None,
    priority: Priority = None,
    as_json: AsJson = False,
) -> None:
    """Show the decision for a request; nothing is sent to a worker."""
    prompt = _prompt(tokens, isl)
    options = client_cli.RequestOptions(prompt, model, max_tokens, ttft_ms, itl_ms, priority)
    run_to_exit(lambda: client_cli.explain(target, options, tls=tls, as_json=as_json))


@cli.command()
@dials
def pools(*, target: Admin, tls: TlsFiles | None, as_json: AsJson = False) -> None:
    """Show the pools and workers of a running gateway."""
    run_to_exit(lambda: client_cli.pools(target, tls=tls, as_json=as_json))


@cli.command()
def demo(
    *,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Of the sample; default: all of it.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("build/demo.json"),
    transport: Transport = "auto",
    policy: Policy = Settings.policy,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Replay nothing; serve clients of yours until SIGTERM."),
    ] = False,
) -> None:
    """Replay a real trace through a gateway and eight simulated workers on this machine."""
    check_transport(transport)
    check_policy(policy)
    if serve:
        if requests is not None:
            fail("--requests: --serve replays nothing")
        # What is on stdout is for programs.
        console = Console(stderr=True)
        run_to_exit(lambda: serve_demo(out, console, transport=transport, policy=policy))
    run_to_exit(lambda: run_demo(requests, out, Console(), transport=transport, policy=policy))


def _prompt(tokens: str | None, isl: int | None) -> list[int]:
    try:
        return client_cli.read_prompt(tokens, isl)
    except UsageError as error:
        fail(error)
