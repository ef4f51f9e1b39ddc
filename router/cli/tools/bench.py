"""`slagate bench`: its options, and the results that it writes at the end."""

import random
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from slagate.router.bench.bench import (
    BenchPlan,
    FixedPrompts,
    Measured,
    Prompts,
    TracePrompts,
    progress_line,
    run_bench,
)
from slagate.router.bench.picture import kind_of, write_pareto
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
    ending_on_usage_error,
    errors,
    fail,
    finite,
    run_to_exit,
    server,
    whole_numbers,
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


Concurrency = Annotated[
    str, typer.Option(metavar="N,N,...", help="Requests at once, of each level.")
]
Requests = Annotated[
    int | None,
    typer.Option(min=1, help=f"Of each level; default: {PER_CALLER} times its concurrency."),
]
Seconds = Annotated[
    float | None, seconds_option("Or: how long each level begins requests.", least=0.1)
]
Isl = Annotated[int | None, typer.Option(min=1, help=f"Prompt tokens; default: {ISL_TOKENS}.")]
Osl = Annotated[int | None, typer.Option(min=1, help=f"Output tokens; default: {OSL_TOKENS}.")]
Trace = Annotated[
    str | None,
    typer.Option(metavar="sample|FILE", help="Or: prompts and lengths of a Mooncake trace."),
]
TtftMs = Annotated[
    float | None,
    typer.Option(min=0.0, max=1e9, callback=finite, help="TTFT target, sent and judged by."),
]
ItlMs = Annotated[
    float | None,
    typer.Option(min=0.0, max=1e9, callback=finite, help="ITL target, sent and judged by."),
]
Model = Annotated[str | None, typer.Option(help="Model name; may be left out where one is served.")]
AdminToo = Annotated[
    str | None, server("The gateway's admin listener: wait for every worker, throughput of each.")
]
Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs of the fleet: throughput of each.")]
Warmup = Annotated[
    int | None,
    typer.Option(min=0, help="Requests before; default: as many as the highest concurrency."),
]
Timeout = Annotated[float, seconds_option("Deadline of a request, seconds.", least=0.1)]
Seed = Annotated[int | None, typer.Option(help="Of the prompts; default: another one each time.")]
Csv = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures here.")]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the Pareto picture, .png or .svg.")
]


class Outputs(NamedTuple):
    """The results of a run besides the table, and their labels."""

    gpus: int | None  # of the fleet, where throughput is to be that of each
    csv: Path | None
    plot: Path | None
    title: str | None  # of the picture; None: the model


def bench(
    *,
    target: Annotated[str, server("The gateway to measure (slagate serve --listen).")],
    concurrency: Concurrency = "1,2,4,8,16,32",
    requests: Requests = None,
    seconds: Seconds = None,
    isl: Isl = None,
    osl: Osl = None,
    trace: Trace = None,
    ttft_ms: TtftMs = None,
    itl_ms: ItlMs = None,
    model: Model = None,
    admin: AdminToo = None,
    gpus: Gpus = None,
    warmup: Warmup = None,
    wait: Annotated[float, seconds_option("Seconds to wait for health.")] = 60.0,
    timeout: Timeout = 300.0,
    seed: Seed = None,
    csv: Csv = None,
    plot: Plot = None,
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
    with ending_on_usage_error():
        prompts = _prompts(isl, osl, trace)
        _check_files(csv, plot)
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
    outputs = Outputs(gpus, csv, plot, title)
    run_to_exit(lambda: _measure(target, admin, plan, outputs, tls=tls))


def _check_files(csv: Path | None, plot: Path | None) -> None:
    """Raises `UsageError` where one cannot be written; removes what an earlier run left there."""
    for option, path in (("--csv", csv), ("--plot", plot)):
        if path is not None:
            check_writable(option, path)
            if path.is_file():
                path.unlink()  # it must not pass for this run's
    if plot is not None:
        kind_of(plot)


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
    target: str, admin: str | None, plan: BenchPlan, outputs: Outputs, *, tls: TlsFiles | None
) -> int:
    """Measure and write the results; the exit status. SIGINT and SIGTERM end the measurement early."""
    measured = Measured()
    with progress_line() as progress:
        why_not = await unless_stopped(
            lambda: run_bench(target, admin, plan, measured, progress, tls=tls)
        )
        if why_not:
            progress.note(why_not)
    is_written = not measured.levels or _write_results(plan, measured, outputs)
    if why_not is None:
        return INTERRUPTED
    answered = any(problem(one) is None for level in measured.levels for one in level.served)
    return EXIT_FAILED if why_not or not (answered and is_written) else 0


def _write_results(plan: BenchPlan, measured: Measured, outputs: Outputs) -> bool:
    """Print the table and write the files; False, with an error on stderr, if one cannot be written."""
    share = ThroughputUnit("fleet")
    if outputs.gpus is not None:
        share = ThroughputUnit("gpu", outputs.gpus)
    elif measured.n_workers:
        share = ThroughputUnit("worker", measured.n_workers)
    rows = [figures(level, targets=plan.targets, share=share) for level in measured.levels]
    about: dict[str, Figure] = {
        "model": measured.model,
        "prompts": str(plan.prompts),
        "seed": plan.seed,
    }
    print_table(stdout_console(), table(rows, f"{measured.model}, {plan.prompts}"))
    is_written = True
    try:
        if outputs.csv is not None:
            outputs.csv.write_text(csv_text(rows, about), encoding="utf-8")
    except OSError as error:
        errors.print(f"slagate: --csv {outputs.csv}: cannot be written: {error.strerror}")
        is_written = False
    try:
        if outputs.plot is not None:
            title = outputs.title or measured.model
            write_pareto(rows, outputs.plot, title=title, subtitle=_subtitle(plan, share))
    except UsageError as error:
        errors.print(f"slagate: {error}")
        is_written = False
    return is_written


def _subtitle(plan: BenchPlan, share: ThroughputUnit) -> str:
    said = [str(plan.prompts)]
    if share.unit != "fleet":
        unit = {"gpu": "GPU", "worker": "worker"}[share.unit]
        said.append(f"{share.n} {unit}{'s' * (share.n > 1)}")
    judged = any(target is not None for target in plan.targets)
    said.append("points: requests at once" + (" (share that met the targets)" if judged else ""))
    return "; ".join(said)
