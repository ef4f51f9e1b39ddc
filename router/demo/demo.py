"""`slagate demo`: a fleet of simulated workers and a gateway on this machine, under a real trace.

All are processes of their own. Every call goes over gRPC, every handoff over NIXL, or over shared memory
where there is no NIXL or the user says so. Each stream is compared with the answer of the simulated model
(`continuation` in `workers/sim/kv_cache/blocks.py`).
"""

import json
import os
import random
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path

import anyio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from slagate.proto import openengine_pb2 as oe
from slagate.router.children import ChildError, Cluster
from slagate.router.demo.fleet import DemoFleet, kv_verify_failures, start_fleet
from slagate.router.demo.report import DemoRow, build_report, class_table, example, table
from slagate.router.loadgen.loadgen import LoadRequest, Progress, ServedRequest, mismatch, run_load
from slagate.router.loadgen.trace import Arrival, arrivals, load_trace, prompt_tokens
from slagate.router.output import INTERRUPTED
from slagate.router.request.metadata import ITL, OBJECTIVE, RECEIPT, SESSION_ID, TTFT
from slagate.router.tables import print_table
from slagate.workers.client.client import connect_worker
from slagate.workers.runtime.listen import ready_line, unless_stopped
from slagate.workers.runtime.usage import UsageError
from slagate.workers.sim.args import VOCAB_SIZE
from slagate.workers.sim.kv_cache.blocks import continuation

SEED = 2025

COMPRESSION = 20.0
"""Twenty minutes of the trace in about 60 s. The processes may share as little as two cores; at the
resulting 1,100 tokens/s they keep up, so that the simulated GPUs are measured and not this machine."""

CHANNELS = 4
"""Connections to the gateway: as many as several clients would have."""

REQUEST_LIMIT_S = 120.0


async def run_demo(
    requests: int | None,
    out: Path,
    console: Console,
    *,
    transport: str = "auto",
    policy: str = "slagate",
    grid_alone: bool = False,
) -> int:
    """Run the demo, write the report to `out`, and return the exit status.

    `requests` is how many of the sample are replayed (None: all), `transport` auto, nixl or shm, `policy`
    one of `settings.POLICIES`; with `grid_alone` load does not decide between pools, and nobody is refused.
    The status is 0 if every request was answered with the right tokens, or refused by admission, and got a
    receipt, and every handoff was intact. SIGINT and SIGTERM end the demo and every process that it
    started. Raises `UsageError` for more requests than there are, `OSError` when `out` cannot be written.
    """
    replay = _plan(requests)
    _remove_old_report(out)

    async def run(cluster: Cluster, fleet: DemoFleet) -> int:
        return await _run(cluster, fleet, replay, out, console)

    status = await _with_fleet(
        out, console, run, transport=transport, policy=policy, grid_alone=grid_alone
    )
    if status is None:
        console.print("Interrupted; every process that was started has ended.")
        return INTERRUPTED
    return status


async def serve_demo(
    out: Path,
    console: Console,
    *,
    transport: str = "auto",
    policy: str = "slagate",
    grid_alone: bool = False,
) -> int:
    """Run the demo's fleet, beside `out`, until SIGINT or SIGTERM, and replay nothing; the exit status.

    A ready line on stdout has the gateway's addresses; the console gets commands to try. The status is 1
    when a process of the fleet ends by itself.
    """
    out.parent.mkdir(parents=True, exist_ok=True)

    async def serve(cluster: Cluster, fleet: DemoFleet) -> int:
        for line in _what_to_try(fleet):
            console.print(line, soft_wrap=True)
        ready_line(listen=fleet.gateway, admin=fleet.admin, http=fleet.http, model=fleet.model)
        await cluster.during(anyio.sleep_forever)
        raise AssertionError("nothing but a signal ends it")

    status = await _with_fleet(
        out, console, serve, transport=transport, policy=policy, grid_alone=grid_alone
    )
    return status or 0


def _what_to_try(fleet: DemoFleet) -> Iterator[str]:
    """Commands to copy, with every address of the fleet."""
    insecure = "--insecure --target"
    yield f"slagate generate {insecure} {fleet.gateway} --isl 1000 --max-tokens 8 --receipt"
    yield f"slagate bench {insecure} {fleet.gateway} --admin {fleet.admin} --concurrency 1,4"
    yield f"slagate explain {insecure} {fleet.admin} --isl 1000 --ttft-ms 500"
    yield f"slagate pools {insecure} {fleet.admin}"
    yield f"curl http://{fleet.http}/metrics"
    yield f"workers: {', '.join(fleet.workers)}"


def _plan(requests: int | None) -> list[Arrival]:
    trace = load_trace()
    wanted = len(trace) if requests is None else requests
    if not 1 <= wanted <= len(trace):
        raise UsageError(
            f"requests: the sample has 1 to {len(trace)} of them to replay (got {wanted})"
        )
    return list(islice(arrivals(trace, compression=COMPRESSION, rng=random.Random(SEED)), wanted))


def _remove_old_report(out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(out) and not stat.S_ISREG(out.lstat().st_mode):
        raise UsageError(f"--out {out}: is there, and is not a regular file")
    # It must not pass for the report of this run.
    out.unlink(missing_ok=True)


async def _with_fleet(
    out: Path,
    console: Console,
    work: Callable[[Cluster, DemoFleet], Awaitable[int]],
    *,
    transport: str,
    policy: str,
    grid_alone: bool,
) -> int | None:
    """The result of `work` on a running fleet, or None after SIGINT or SIGTERM; no process is left then."""
    cluster = Cluster(out.parent / "demo-logs")

    async def whole() -> int:
        try:
            with console.status(
                "Starting five prefill workers, three decode workers and the gateway"
            ):
                fleet = await start_fleet(
                    cluster,
                    out.with_name("demo-fleet.json"),
                    transport=transport,
                    policy=policy,
                    grid_alone=grid_alone,
                )
            return await work(cluster, fleet)
        except ChildError as error:
            console.print(str(error), style="red", soft_wrap=True)
            return 1
        finally:
            with anyio.CancelScope(shield=True):
                killed = await cluster.stop()
            if killed:
                console.print(f"Killed, because SIGTERM did not end them: {', '.join(killed)}")

    return await unless_stopped(whole, again=cluster.kill)


async def _run(
    cluster: Cluster, fleet: DemoFleet, replay: Sequence[Arrival], out: Path, console: Console
) -> int:
    started_s = anyio.current_time()
    served = await cluster.during(lambda: _replay(fleet, replay, console))
    wall_s = anyio.current_time() - started_s
    rows = [
        DemoRow(arrival, one, mismatch(one, _reference(arrival, fleet)))
        for arrival, one in zip(replay, served, strict=True)
    ]
    report = build_report(rows, [(pool.stage, pool.name) for pool in fleet.pools]) | {
        "kv_verify_failures": await kv_verify_failures(fleet.workers),
        "transport": fleet.transport,
        "policy": fleet.policy,
        "scheduling": dict(fleet.scheduling),
        "wall_s": round(wall_s, 3),
        "seed": SEED,
        "compression": COMPRESSION,
    }
    await anyio.Path(out).write_text(json.dumps(report, indent=2) + "\n")
    _show(report, example(rows), console)
    counts = ("failed", "token_mismatches", "kv_verify_failures", "receipts_missing")
    wrong = [f"{name} {report[name]}" for name in counts if report[name]]
    console.print(f"{out}: {'NOT OK: ' + ', '.join(wrong) if wrong else 'ok'}", soft_wrap=True)
    return 1 if wrong else 0


async def _replay(
    fleet: DemoFleet, replay: Sequence[Arrival], console: Console
) -> list[ServedRequest]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    started_s = anyio.current_time()
    async with AsyncExitStack() as stack:
        targets = [
            await stack.enter_async_context(connect_worker(fleet.gateway)) for _ in range(CHANNELS)
        ]
        bar = stack.enter_context(ProgressBar(*columns, console=console))
        line = bar.add_task("Replaying", total=len(replay), state="")

        def show(progress: Progress) -> None:
            tokens_per_s = progress.n_tokens / max(anyio.current_time() - started_s, 1e-3)
            state = (
                f"{progress.n_sent - progress.n_done} in flight, {progress.n_failed} refused or failed, "
                f"{tokens_per_s:.0f} tokens/s"
            )
            bar.update(line, completed=progress.n_done, state=state)

        return await run_load(
            targets, _requests(fleet, replay), timeout_s=REQUEST_LIMIT_S, on_change=show
        )


def _requests(fleet: DemoFleet, replay: Sequence[Arrival]) -> Iterator[LoadRequest]:
    for number, arrival in enumerate(replay):
        request_id = f"demo-{number:04d}"
        message = oe.GenerateRequest(
            request_id=request_id,
            model=fleet.model,
            token_ids=oe.TokenIds(ids=prompt_tokens(arrival.trace, VOCAB_SIZE).tolist()),
            # So that the answer is as long as in the trace.
            stopping=oe.StoppingOptions(max_tokens=arrival.trace.osl_tokens, ignore_eos=True),
        )
        metadata = (
            (TTFT, str(arrival.sla.ttft_ms)),
            (ITL, str(arrival.sla.itl_ms)),
            (OBJECTIVE, arrival.sla.name),
            (SESSION_ID, f"conversation-{arrival.trace.conversation}"),
            (RECEIPT, "1"),
        )
        yield LoadRequest(arrival.arrival_s, request_id, message.SerializeToString(), metadata)


def _reference(arrival: Arrival, fleet: DemoFleet) -> list[int]:
    return continuation(
        prompt_tokens(arrival.trace, VOCAB_SIZE).tolist(),
        arrival.trace.osl_tokens,
        model=fleet.model,
        block_tokens=fleet.block_tokens,
        vocab_size=VOCAB_SIZE,
    )


def _show(report: dict[str, object], told: DemoRow | None, console: Console) -> None:
    pools = table("Pools: latency in ms as the client saw it, targets met", report["pools"])
    print_table(console, pools)
    classes = "Classes: the same, and both targets met; what is refused has missed them"
    print_table(console, class_table(classes, report["classes"]))
    if told is not None and told.served.receipt is not None:
        decision = told.served.receipt.decision
        console.print(f"Why {decision.request_id} ({told.arrival.sla.name}) went where it went:")
        console.print(decision.text, soft_wrap=True)
    names = (
        "completed",
        "refused",
        "failed",
        "both_met",
        "token_mismatches",
        "kv_verify_failures",
        "transport",
        "wall_s",
    )
    console.print(", ".join(f"{name} {report[name]}" for name in names), soft_wrap=True)
    for error in report["errors"] if isinstance(report["errors"], list) else []:
        console.print(f"  {error}", style="red", soft_wrap=True)
