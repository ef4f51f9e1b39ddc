"""`slagate bench`: the options, and what is written at the end."""

import random
from pathlib import Path
from typing import Annotated

import typer

from slagate.router.bench.bench import BenchPlan, Measured, run_bench
from slagate.router.bench.load import FixedPrompts, Prompts, TracePrompts
from slagate.router.bench.picture import kind_of, write_pareto
from slagate.router.bench.progress import shown
from slagate.router.bench.report import (
    Figure,
    Targets,
    ThroughputUnit,
    csv_text,
    figures,
    problem,
    table,
)
from slagate.router.cli.command import (
    EXIT_FAILED,
    check_writable,
    errors,
    fail,
    finite,
    run_to_exit,
    server,
    whole_numbers,
    wrong_use_told,
)
from slagate.router.cli.command import seconds as seconds_option
from slagate.router.cli.tls import Insecure, TlsCa, TlsKey, TlsName, TlsOwnCert, dial_tls
from slagate.router.loadgen.trace import load_trace
from slagate.router.output import INTERRUPTED
from slagate.router.tables import print_table, stdout_console
from slagate.workers.runtime.listen import unless_stopped
from slagate.workers.runtime.usage import UsageError
from slagate.workers.tls.files import TlsFiles

SAMPLE = "sample"
ISL_TOKENS, OSL_TOKENS = 1024, 128
PER_CALLER = 10
MAX_CONCURRENCY = 4096


def bench(
    *,
    target: Annotated[str, server("The gateway to measure (slagate serve --listen).")],
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="Requests at once, of each level.")
    ] = "1,2,4,8,16,32",
    requests: Annotated[
        int | None,
        typer.Option(min=1, help=f"Of each level; default: {PER_CALLER} times its concurrency."),
    ] = None,
    seconds: Annotated[
        float | None,
        seconds_option("Or: how long each level begins requests.", least=0.1),
    ] = None,
    isl: Annotated[
        int | None, typer.Option(min=1, help=f"Prompt tokens; default: {ISL_TOKENS}.")
    ] = None,
    osl: Annotated[
        int | None, typer.Option(min=1, help=f"Output tokens; default: {OSL_TOKENS}.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="sample|FILE", help="Or: prompts and lengths of a Mooncake trace."),
    ] = None,
    ttft_ms: Annotated[
        float | None,
        typer.Option(min=0.0, max=1e9, callback=finite, help="TTFT target, sent and judged by."),
    ] = None,
    itl_ms: Annotated[
        float | None,
        typer.Option(min=0.0, max=1e9, callback=finite, help="ITL target, sent and judged by."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name; may be left out where one is served.")
    ] = None,
    admin: Annotated[
        str | None,
        server("The gateway's admin listener: wait for every worker, throughput of each."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of the fleet: throughput of each.")
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(min=0, help="Requests before; default: as many as the highest concurrency."),
    ] = None,
    wait: Annotated[
        float,
        seconds_option("Seconds to wait for health."),
    ] = 60.0,
    timeout: Annotated[
        float,
        seconds_option("Deadline of a request, seconds.", least=0.1),
    ] = 300.0,
    seed: Annotated[
        int | None, typer.Option(help="Of the prompts; default: another one each time.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the figures here.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the Pareto picture, .png or .svg."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the picture.")] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsOwnCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    insecure: Insecure = False,
) -> None:
    """Measure throughput and latency of a running gateway at several levels of concurrency."""
    tls = dial_tls(tls_ca, tls_cert, tls_key, tls_name, insecure=insecure)
    levels = whole_numbers("--concurrency", concurrency, least=1)
    _check_sizes(levels, requests, seconds)
    with wrong_use_told():
        prompts = _prompts(isl, osl, trace)
        for option, path in (("--csv", csv), ("--plot", plot)):
            if path is not None:
                check_writable(option, path)
                if path.is_file():
                    path.unlink()  # what an earlier run left must not pass for this one's
        if plot is not None:
            kind_of(plot)
    plan = BenchPlan(
        levels=levels,
        prompts=prompts,
        targets=Targets(ttft_ms, itl_ms),
        n_requests=requests,
        seconds=seconds,
        per_caller=PER_CALLER,
        n_warmup=max(levels) if warmup is None else warmup,
        wait_s=wait,
        timeout_s=timeout,
        seed=random.SystemRandom().getrandbits(31) if seed is None else seed,
        model=model,
    )
    measured = Measured()

    async def main_coroutine() -> int:
        status = await _measure(target, admin, plan, measured, tls=tls)
        is_left = not measured.levels or _leave(
            plan, measured, gpus=gpus, csv=csv, plot=plot, title=title
        )
        answered = any(problem(one) is None for level in measured.levels for one in level.served)
        return status if (answered and is_left) or status else EXIT_FAILED

    run_to_exit(main_coroutine)


def _check_sizes(levels: tuple[int, ...], requests: int | None, seconds: float | None) -> None:
    if max(levels) > MAX_CONCURRENCY:
        fail(f"--concurrency must be at most {MAX_CONCURRENCY} (got {max(levels)})")
    if requests is not None and seconds is not None:
        fail("give either --requests or --seconds")
    if requests is not None and requests < max(levels):
        fail(f"--requests {requests}: are too few for {max(levels)} at once (--concurrency)")


def _prompts(isl: int | None, osl: int | None, trace: str | None) -> Prompts:
    if trace is None:
        return FixedPrompts(isl or ISL_TOKENS, osl or OSL_TOKENS)
    if isl is not None or osl is not None:
        raise UsageError(
            f"--trace has sizes of its own: give no {'--osl' if isl is None else '--isl'}"
        )
    if trace == SAMPLE:
        return TracePrompts(SAMPLE, load_trace())
    try:
        return TracePrompts(Path(trace).name, load_trace(trace))
    except UsageError as error:
        raise UsageError(f"--trace {error}") from error


async def _measure(
    target: str, admin: str | None, plan: BenchPlan, measured: Measured, *, tls: TlsFiles | None
) -> int:
    """Fill `measured`; the exit status. SIGINT and SIGTERM end it early."""
    with shown() as listener:
        why_not = await unless_stopped(
            lambda: run_bench(target, admin, plan, measured, listener, tls=tls)
        )
        if why_not:
            listener.note(why_not)
    return INTERRUPTED if why_not is None else EXIT_FAILED if why_not else 0


def _leave(
    plan: BenchPlan,
    measured: Measured,
    *,
    gpus: int | None,
    csv: Path | None,
    plot: Path | None,
    title: str | None,
) -> bool:
    """Print the table and write the files; False where one could not be written, which is told."""
    share = ThroughputUnit("fleet")
    if gpus is not None:
        share = ThroughputUnit("gpu", gpus)
    elif measured.n_workers:
        share = ThroughputUnit("worker", measured.n_workers)
    rows = [figures(level, targets=plan.targets, share=share) for level in measured.levels]
    about: dict[str, Figure] = {
        "model": measured.model,
        "prompts": str(plan.prompts),
        "seed": plan.seed,
    }
    what = f"{measured.model}, {plan.prompts}"
    print_table(stdout_console(), table(rows, what))
    is_left = True
    try:
        if csv is not None:
            csv.write_text(csv_text(rows, about), encoding="utf-8")
    except OSError as error:
        errors.print(f"slagate: --csv {csv}: cannot be written: {error.strerror}")
        is_left = False
    try:
        if plot is not None:
            write_pareto(rows, plot, title=title or measured.model, subtitle=_subtitle(plan, share))
    except UsageError as error:
        errors.print(f"slagate: {error}")
        is_left = False
    return is_left


def _subtitle(plan: BenchPlan, share: ThroughputUnit) -> str:
    said = [str(plan.prompts)]
    if share.unit != "fleet":
        unit = {"gpu": "GPU", "worker": "worker"}[share.unit]
        said.append(f"{share.n} {unit}{'s' * (share.n > 1)}")
    judged = any(target is not None for target in plan.targets)
    said.append("points: requests at once" + (" (share that met the targets)" if judged else ""))
    return "; ".join(said)
