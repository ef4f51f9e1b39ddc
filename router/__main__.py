"""The `slagate` command."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slagate.router import app as gateway_app
from slagate.router import client_cli
from slagate.router.bench_cli import bench
from slagate.router.command import (
    Lenient,
    Listen,
    LogLevel,
    PoolsFile,
    PoolWorkers,
    Transport,
    check_transport,
    checked,
    fail,
    pool_workers,
    run_to_exit,
    start_log,
)
from slagate.router.config_source import FleetSource
from slagate.router.demo import run_demo
from slagate.router.grid_cli import grid
from slagate.router.process import config_in_force, own_place
from slagate.router.processes import MAX_PROCESSES, serve_processes
from slagate.router.profile_cli import profile
from slagate.router.receipts_cli import receipts, recompute
from slagate.router.reload import ignore_hangups
from slagate.router.reload_cli import reload
from slagate.router.settings import POLICIES, Settings
from slagate.router.tls_cli import (
    Insecure,
    TlsCert,
    TlsClientCa,
    TlsKey,
    dial_tls,
    dials,
    listener_tls,
)
from slagate.router.worker_cli import worker
from slagate.workers.errors import UsageError
from slagate.workers.rpc import MAX_MESSAGE_BYTES
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
cli.command()(bench)
cli.command()(receipts)
cli.command()(recompute)
cli.command()(reload)


def main() -> None:
    """Entry point of the console script and of `python -m slagate.router`."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # Closed by whoever started us: the next file opened would take its number, and its output.
            os.open(os.devnull, os.O_RDWR)
    cli()


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
Policy = Annotated[str, typer.Option(help=f"How workers are chosen: {' or '.join(POLICIES)}.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


@cli.command()
def serve(
    *,
    config: Annotated[Path, typer.Option(help="Fleet file: pool grid and workers, JSON.")],
    listen: Listen,
    admin: Listen,
    http: Listen,
    max_request_bytes: Annotated[
        int, typer.Option(min=1, max=MAX_MESSAGE_BYTES // 2, help="Limit of one request.")
    ] = Settings.max_request_bytes,
    default_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds for a request without a deadline.")
    ] = Settings.default_timeout_s,
    drain: Annotated[
        float, typer.Option(min=0.0, help="Seconds for running requests after SIGTERM.")
    ] = Settings.drain_s,
    max_attempts: Annotated[
        int, typer.Option(min=1, help="Workers that one stage of a request may try.")
    ] = Settings.max_attempts,
    policy: Policy = Settings.policy,
    max_waiting: Annotated[
        int,
        typer.Option(min=0, help="Requests that may wait while all workers are at their limits."),
    ] = Settings.max_waiting,
    client_receipts: Annotated[
        bool,
        typer.Option(
            "--receipts/--no-receipts",
            help="Whether clients may see pools and workers in receipts.",
        ),
    ] = Settings.client_receipts,
    lenient: Lenient = False,
    pools: PoolsFile = None,
    pool: PoolWorkers = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Reload when a file of the configuration changes.")
    ] = Settings.watch_config,
    processes: Annotated[
        int,
        typer.Option(min=1, max=MAX_PROCESSES, help="Processes that share the clients' port."),
    ] = 1,
    worker_drain: Annotated[
        float, typer.Option(min=0.0, help="Seconds for requests on workers that a reload removed.")
    ] = Settings.worker_drain_s,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    insecure: Insecure = False,
    worker_tls_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CAs (PEM) that workers' certificates are of."),
    ] = None,
    worker_tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate (PEM) to show to workers.")
    ] = None,
    worker_tls_key: TlsKey = None,
    worker_tls_name: Annotated[
        str, typer.Option(help="Name in workers' certificates, if not their addresses' hosts.")
    ] = "",
    worker_insecure: Annotated[
        bool, typer.Option("--worker-insecure", help="Plaintext to workers instead of TLS.")
    ] = False,
    log_level: LogLevel = "info",
) -> None:
    """Run the gateway until SIGTERM."""
    ignore_hangups()  # until there is something that can reload
    _check_policy(policy)
    tls = listener_tls(tls_cert, tls_key, tls_client_ca, insecure=insecure)
    worker_tls = dial_tls(
        tls_ca=worker_tls_ca,
        tls_cert=worker_tls_cert,
        tls_key=worker_tls_key,
        tls_name=worker_tls_name,
        insecure=worker_insecure,
        prefix="worker-",
    )
    source = FleetSource(config, lenient, pools, pool_workers(pool or ()))
    stamp = source.stamp()
    place = own_place()
    if place is None:
        fleet = checked(source.read)
        start_log(log_level)
    else:
        fleet = config_in_force(place)
        start_log(log_level, process_number=place.number)
    settings = Settings(
        max_request_bytes=max_request_bytes,
        default_timeout_s=default_timeout,
        drain_s=drain,
        worker_drain_s=worker_drain,
        watch_config=watch,
        max_attempts=max_attempts,
        policy=policy,
        max_waiting=max_waiting,
        client_receipts=client_receipts,
    )

    is_parent = processes > 1 and place is None
    listeners = {"listen": listen, "admin": admin, "http": http}

    async def main_coroutine() -> int:
        if is_parent:
            return await serve_processes(
                source,
                fleet,
                settings,
                stamp=stamp,
                n_processes=processes,
                arguments=sys.argv[1:],
                tls=tls,
                **listeners,
            )
        await gateway_app.serve(
            source,
            fleet,
            settings,
            stamp=stamp,
            place=place,
            tls=tls,
            worker_tls=worker_tls,
            **listeners,
        )
        return 0

    run_to_exit(main_coroutine, starts_processes=is_parent)


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
) -> None:
    """Replay a real trace through a gateway and eight simulated workers on this machine."""
    check_transport(transport)
    _check_policy(policy)
    run_to_exit(lambda: run_demo(requests, out, Console(), transport=transport, policy=policy))


def _check_policy(policy: str) -> None:
    if policy not in POLICIES:
        fail(f"--policy must be one of {', '.join(POLICIES)} (got {policy!r})")


def _prompt(tokens: str | None, isl: int | None) -> list[int]:
    try:
        return client_cli.read_prompt(tokens, isl)
    except UsageError as error:
        fail(error)


if __name__ == "__main__":
    main()
