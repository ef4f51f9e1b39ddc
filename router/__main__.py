"""The `slagate` command."""

import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn

import anyio
import typer
from rich.console import Console

from slagate.pools.errors import ConfigError
from slagate.pools.grid_config import FleetConfig, load_config
from slagate.router import app as gateway_app
from slagate.router import client_cli
from slagate.router.demo import run_demo
from slagate.router.grid_select import select_lines
from slagate.router.settings import Settings
from slagate.workers import run
from slagate.workers.channel import MAX_MESSAGE_BYTES
from slagate.workers.errors import UsageError
from slagate.workers.listen import Address, parse_address
from slagate.workers.logs import log_to_stderr
from slagate.workers.profile import ProfileError

EXIT_USAGE = 2

cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="SLA-aware global router gateway for TensorRT-LLM.",
)
grid_cli = typer.Typer(no_args_is_help=True, help="Look at pool grids, offline.")
cli.add_typer(grid_cli, name="grid")

errors = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


def main() -> None:
    """Entry point of the console script and of `python -m slagate.router`."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # Closed by whoever started us: the next file opened would take its number, and its output.
            os.open(os.devnull, os.O_RDWR)
    cli()


def _fail(message: object) -> NoReturn:
    errors.print(f"slagate: {message}")
    raise typer.Exit(EXIT_USAGE)


def _address(text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _run(main_coroutine: Callable[[], Coroutine[Any, Any, int]]) -> None:
    """Run to the end on the fastest loop there is and leave with its status."""
    use_uvloop = sys.platform != "win32"
    try:
        status = anyio.run(main_coroutine, backend_options={"use_uvloop": use_uvloop})
    except Exception as error:
        cause: BaseException = error
        # Task groups wrap what went wrong inside; Python 3.10 has no name for the wrapper.
        while inner := getattr(cause, "exceptions", None):
            cause = inner[0]
        if isinstance(cause, ConfigError | ProfileError | UsageError | OSError):
            _fail(cause)
        raise
    raise typer.Exit(status)


def _config(path: Path) -> FleetConfig:
    try:
        config = load_config(path)
    except ConfigError as error:
        _fail(error)
    for warning in config.warnings:
        errors.print(f"slagate: warning: {warning}")
    return config


Listen = Annotated[
    Address, typer.Option(parser=_address, metavar="HOST:PORT", help="Port 0: the kernel chooses.")
]
Target = Annotated[str, typer.Option(metavar="HOST:PORT", help="The gateway to call.")]
Admin = Annotated[str, typer.Option(metavar="HOST:PORT", help="The gateway's admin listener.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
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
def worker(
    *,
    role: Annotated[str, typer.Option(help="prefill, decode or agg.")],
    listen: Listen,
    engine: Annotated[str, typer.Option(help="sim or trtllm.")] = "sim",
    profile: Annotated[
        str, typer.Option(help="Timing profile: a packaged name, or a file.")
    ] = "llama-3.1-8b-h100",
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size.")] = 1,
    model: Annotated[str | None, typer.Option(help="Served name; default: the profile's.")] = None,
    time_scale: Annotated[
        float, typer.Option(min=0.0, help="Engine times are multiplied by this.")
    ] = 1.0,
    kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks; default: the profile's capacity.")
    ] = None,
    kv_block_bytes: Annotated[
        int, typer.Option(min=16, help="Real bytes of a simulated KV block.")
    ] = 4096,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Requests a step may run.")] = 256,
    max_seq_len: Annotated[int, typer.Option(min=2, help="Context window, tokens.")] = 131_072,
    drain: Annotated[
        float, typer.Option(min=0.0, help="Seconds for running requests after SIGTERM.")
    ] = 10.0,
    log_level: LogLevel = "info",
) -> None:
    """Run one worker until SIGTERM."""
    if role not in run.ROLES:
        _fail(f"--role must be one of {', '.join(run.ROLES)} (got {role!r})")
    if engine not in ("sim", "trtllm"):
        _fail(f"--engine must be sim or trtllm (got {engine!r})")
    if engine == "trtllm":
        _fail("--engine trtllm is not available in this version; use --engine sim")
    _log(log_level)
    options = run.SimOptions(
        role=role,
        profile=profile,
        tp=tp,
        model=model,
        time_scale=time_scale,
        kv_blocks=kv_blocks,
        kv_block_bytes=kv_block_bytes,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
    )
    _run(lambda: run.run_sim_worker(options, listen, drain_s=drain))


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
    client_receipts: Annotated[
        bool,
        typer.Option(
            "--receipts/--no-receipts",
            help="Whether clients may see pools and workers in receipts.",
        ),
    ] = Settings.client_receipts,
    log_level: LogLevel = "info",
) -> None:
    """Run the gateway until SIGTERM."""
    fleet = _config(config)
    _log(log_level)
    settings = Settings(
        max_request_bytes=max_request_bytes,
        default_timeout_s=default_timeout,
        drain_s=drain,
        max_attempts=max_attempts,
        client_receipts=client_receipts,
    )

    async def main_coroutine() -> int:
        await gateway_app.serve(fleet, settings, listen=listen, admin=admin, http=http)
        return 0

    _run(main_coroutine)


@cli.command()
def generate(
    *,
    target: Target,
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
    _run(lambda: client_cli.generate(target, options, receipt=receipt, timeout_s=timeout))


@cli.command()
def explain(
    *,
    target: Admin,
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
    _run(lambda: client_cli.explain(target, options, as_json=as_json))


@cli.command()
def pools(*, target: Admin, as_json: AsJson = False) -> None:
    """Show the pools and workers of a running gateway."""
    _run(lambda: client_cli.pools(target, as_json=as_json))


@grid_cli.command("select")
def grid_select(
    config: Annotated[Path, typer.Argument(help="Fleet file, or a Dynamo global-router JSON.")],
    *,
    stage: Annotated[str, typer.Option(help="prefill, decode or agg.")],
) -> None:
    """Read requests as JSON lines on stdin, write the cell and pool of each on stdout."""
    fleet = _config(config)
    if stage not in fleet.stages:
        _fail(f"--stage must be one of {', '.join(fleet.stages)} in this file (got {stage!r})")
    for line in select_lines(fleet.stages[stage], sys.stdin):
        sys.stdout.write(line + "\n")


@cli.command()
def demo(
    *,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Of the sample; default: all of it.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("build/demo.json"),
) -> None:
    """Replay a real trace through a gateway and six simulated workers on this machine."""
    _run(lambda: run_demo(requests, out, Console()))


def _prompt(tokens: str | None, isl: int | None) -> list[int]:
    try:
        return client_cli.read_prompt(tokens, isl)
    except UsageError as error:
        _fail(error)


def _log(level: str) -> None:
    try:
        log_to_stderr(level)
    except ValueError:
        _fail(f"--log-level must be debug, info, warning or error (got {level!r})")


if __name__ == "__main__":
    main()
