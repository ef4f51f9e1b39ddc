"""`slagate replay`: its options, the progress, the table."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import rich.progress
import typer
from rich.console import Console
from rich.table import Table

from slagate.router.bench.picture import kind_of
from slagate.router.cli.command import (
    EXIT_FAILED,
    check_writable,
    ending_on_usage_error,
    errors,
    fail,
    whole_numbers,
)
from slagate.router.output import INTERRUPTED
from slagate.router.replay.classes import load_classes
from slagate.router.replay.jobs import JobFailed
from slagate.router.replay.out import OutFile, Row
from slagate.router.replay.plot import write_plots
from slagate.router.replay.suite import Suite, load_suite, parse_suite
from slagate.router.replay.sweep import keys_of, missing, run_sweep, setup_of, tuned
from slagate.router.replay.trace import digest, read_rows
from slagate.router.replay.tune import best_first, points_table, write_parameters
from slagate.router.tables import print_table, stdout_console
from slagate.workers.runtime.usage import UsageError

EXPECTED_PER_CPU_S = 30
"""Requests that a core plays each second, to say beforehand how long it will take."""

_OF_A_SUITE = ["config", "trace", "classes", "policy", "load", "requests", "skip", "seed", "ideal"]
"""Options whose place a suite takes."""


def replay(
    ctx: typer.Context,
    *,
    config: Annotated[Path | None, typer.Option(help="The fleet file.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Mooncake's JSON lines, CSV of Azure's LLM traces, or receipts."),
    ] = None,
    classes: Annotated[
        Path | None, typer.Option(help="JSON: shares and targets of the classes of requests.")
    ] = None,
    policy: Annotated[str, typer.Option(metavar="P,P,...", help="See docs/replay.md.")] = "prefix",
    load: Annotated[str, typer.Option(metavar="X,X,...", help="1 is the trace's own speed.")] = "1",
    requests: Annotated[int, typer.Option(min=1, help="Rows of the trace.")] = 800,
    skip: Annotated[int, typer.Option(min=0, help="Rows before those.")] = 0,
    seed: Annotated[str, typer.Option(metavar="S,S,...", help="Each is a run of its own.")] = "1",
    suite: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="All of that in a file, or sla-small or sla."),
    ] = None,
    traces: Annotated[Path | None, typer.Option(help="The folder of a suite's traces.")] = None,
    out: Annotated[
        Path, typer.Option(help="The rows; a second run goes on where it ended.")
    ] = Path("replay.json"),
    plot: Annotated[
        Path | None, typer.Option(help="Pictures, .png or .svg; a second one goes beside it.")
    ] = None,
    ideal: Annotated[
        bool, typer.Option("--ideal", help="A fleet exactly like its profiles, and known lengths.")
    ] = False,
    tune: Annotated[
        str | None, typer.Option(metavar="P", help="Look for a policy's parameters, on other rows.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="At once; default: one for each core.")
    ] = None,
) -> None:
    """Play a trace against a simulated fleet, by our policies and others, and count who met the targets."""
    with ending_on_usage_error():
        check_writable("--out", out)
        if plot is not None:
            check_writable("--plot", plot)
            kind_of(plot)  # so that another ending is told before the runs
        if suite is not None:
            for option in _OF_A_SUITE:
                if (by := ctx.get_parameter_source(option)) and by.name == "COMMANDLINE":
                    fail(f"--{option}: is not taken with --suite, whose file says it")
            plan = load_suite(suite, traces)
        else:
            for option, given in (("config", config), ("trace", trace), ("classes", classes)):
                if given is None:
                    fail(f"--{option}: is needed without --suite")
                if not given.is_file():
                    fail(f"--{option} {given}: is no file")
            assert classes is not None
            plan = parse_suite(
                {
                    "traces": [str(trace)],
                    "fleets": [str(config)],
                    "classes": [each._asdict() for each in load_classes(classes)],
                    "policies": policy.split(","),
                    "loads": numbers("--load", load),
                    "seeds": list(whole_numbers("--seed", seed, least=0)),
                    "requests": requests,
                    "skip": skip,
                    "ideal": ideal,
                },
                source="slagate replay",
            )
        digests = {}
        for path in plan.traces:
            read = read_rows(path, skip=plan.skip, n_rows=plan.requests, note=errors.print)
            digests[Path(path).stem] = digest(read)
        if tune is not None:
            raise typer.Exit(_tune(plan, tune, suite, processes or os.cpu_count() or 1))
        setup, parameters = setup_of(plan), plan.parameters
        file = OutFile(out, keys_of(plan), setup=setup, parameters=parameters, traces=digests)
        status = _run(plan, file, processes or os.cpu_count() or 1)
    rows = file.rows
    if rows:
        print_table(stdout_console(), _table(rows), n_keys=4)
    if plot is not None and rows:
        targets = {each.name: (each.ttft_ms, each.itl_ms) for each in plan.classes}
        with ending_on_usage_error():
            for written in write_plots(rows, targets, plot, kind_of(plot)):
                errors.print(f"slagate: wrote {written}")
    raise typer.Exit(status)


def _run(plan: Suite, file: OutFile, n_processes: int) -> int:
    """Play what is missing; the exit status."""
    todo = missing(plan, file)
    if n_kept := len(keys_of(plan)) - len(todo):
        errors.print(f"slagate: {n_kept} rows are there already")
    if not todo:
        return 0
    n_runs = sum(key.policy != "oracle" for key in todo)
    seconds = n_runs * plan.requests / EXPECTED_PER_CPU_S / n_processes
    errors.print(
        f"slagate: {n_runs} runs of {plan.requests} requests, about {_duration(seconds)} on"
        f" {n_processes} {'processes' if n_processes > 1 else 'process'}"
    )
    try:
        with _sigterm_as_ctrl_c(), _progress(len(todo)) as (on_progress, note):
            for row in run_sweep(plan, file, n_processes=n_processes, on_progress=on_progress):
                note(row)
    except KeyboardInterrupt:
        errors.print(f"slagate: interrupted at {len(file.rows)} rows; run it again to go on")
        return INTERRUPTED
    except JobFailed as error:
        errors.print(f"slagate: {error}")
        return EXIT_FAILED
    return 0


def _tune(plan: Suite, policy: str, suite: str | None, n_processes: int) -> int:
    """Search, print all points, write the best into the suite file if there is one; the exit status."""
    try:
        with _sigterm_as_ctrl_c(), _progress(0) as (on_progress, _):
            points = tuned(plan, policy, n_processes=n_processes, on_progress=on_progress)
    except KeyboardInterrupt:
        errors.print("slagate: interrupted")
        return INTERRUPTED
    except JobFailed as error:
        errors.print(f"slagate: {error}")
        return EXIT_FAILED
    print_table(stdout_console(), points_table(policy, points))
    if suite is not None and Path(suite).is_file():
        write_parameters(Path(suite), policy, best_first(points)[0].parameters)
        errors.print(f"slagate: wrote the best into {suite}")
    return 0


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Within the `with`, SIGTERM raises `KeyboardInterrupt` too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(n_rows: int) -> Iterator[Any]:
    """A line of progress on stderr, with the time left; where that is no terminal, a line for each row."""
    columns = (
        rich.progress.TextColumn("{task.fields[rows]} of " + f"{n_rows} rows"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("left"),
        rich.progress.TimeRemainingColumn(elapsed_when_finished=False),
    )
    console = Console(stderr=True)
    n_done = 0
    with rich.progress.Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=300,
    ) as bar:
        task = bar.add_task("", rows=0, total=None)

        def on_progress(n_ended: int, n_requests: int) -> None:
            bar.update(task, completed=n_ended, total=n_requests)

        def note(row: Row) -> None:
            nonlocal n_done
            n_done += 1
            bar.update(task, rows=n_done)
            if not console.is_terminal:
                left_s = bar.tasks[0].time_remaining
                left = "" if left_s is None else f", about {_duration(left_s)} left"
                errors.print(
                    f"slagate: {n_done} of {n_rows}: {row['policy']} load {row['load']:g} seed"
                    f" {row['seed']}: {row['both_met']:.3f}{left}"
                )

        yield on_progress, note


def _duration(seconds: float) -> str:
    """Seconds, minutes or hours, for people.

    >>> _duration(40), _duration(400), _duration(8000)
    ('40 s', '7 min', '2.2 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


_SHOWN = (
    ("both met", "both_met"),
    ("of feasible", "both_met_feasible"),
    ("TTFT met", "ttft_met"),
    ("ITL met", "itl_met"),
    ("refused", "refused"),
    ("met/s/GPU", "goodput_per_gpu"),
    ("GPU s/met", "gpu_s_per_met"),
    ("prefix hit", "prefix_hit"),
    ("TTFT MdAPE", "predict_ttft_mdape"),
)


def _table(rows: Sequence[Row]) -> Table:
    """The means over seeds, with the spread of the first figure."""
    table = Table(title_justify="left")
    for name in ("trace", "fleet", "policy"):
        table.add_column(name)
    table.add_column("load", justify="right")
    for name, _ in _SHOWN:
        table.add_column(name, justify="right")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        load = "found" if row["find_rate"] is not None else f"{row['load']:g}"
        groups.setdefault((row["trace"], row["fleet"], row["policy"], load), []).append(row)
    for key, of_seeds in groups.items():
        cells = []
        for _, figure in _SHOWN:
            values = [row[figure] for row in of_seeds if row.get(figure) is not None]
            cells.append(_cell(values, with_spread=figure == "both_met"))
        table.add_row(*key, *cells)
    return table


def _cell(values: Sequence[float], *, with_spread: bool) -> str:
    if not values:
        return "-"
    mean = sum(values) / len(values)
    text = f"{mean:.3f}"
    if with_spread and len(values) > 1:
        text += f" ({min(values):.2f}-{max(values):.2f})"
    return text


def numbers(option: str, text: str) -> list[float]:
    """The numbers of `--option 0.5,1,2`. Raises `UsageError`; `parse_suite` says which may be."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"{option}: must be numbers with commas between (got {text!r})") from None
