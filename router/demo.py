"""`slagate demo`: a fleet of simulated workers and a gateway on this machine, under a real trace.

Every process is its own, every call goes over gRPC, every handoff over shared memory. Each stream is
compared with what the model would have said (`sim_kv_cache.continuation`).
"""

import json
import random
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio
import grpc
import grpc.aio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from slagate.pools.grid_config import FleetConfig, parse_config
from slagate.pools.member import Stage
from slagate.proto import gateway_pb2 as gw
from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.proto import openengine_pb2 as oe
from slagate.router.cluster import Child, Cluster, ClusterError, http_status
from slagate.router.demo_report import Row, build_report, example, table
from slagate.router.loadgen import LoadRequest, Progress, Served, mismatch, run_load
from slagate.router.replay import Arrival, arrivals, load_trace, prompt_tokens
from slagate.router.sla import ITL, OBJECTIVE, RECEIPT, SESSION_ID, TTFT
from slagate.workers.client import CHANNEL_OPTIONS, GrpcWorker, connect_worker
from slagate.workers.errors import WorkerError
from slagate.workers.listen import stopped
from slagate.workers.sim_kv_cache import continuation

WORKERS_PER_POOL = {"prefill-tp1": 2, "prefill-tp2": 1, "decode-tp1": 2, "decode-tp2": 1}
"""For the pools of `configs/grids/demo.json`."""

SEED = 2025
COMPRESSION = 12.0
"""Twenty minutes of the trace in about 100 s: eight processes share as little as two cores, and at the
resulting 650 tokens/s they are never the bottleneck, so what is measured is the simulated GPUs."""

VOCAB_SIZE = 128_256
"""Of Llama 3.1, and what a worker simulates; with any other number every stream would be a mismatch."""

CHANNELS = 4
"""Connections to the gateway, as several clients would have."""

READY_LIMIT_S = 60.0
REQUEST_LIMIT_S = 120.0
POLL_S = 0.1
INTERRUPTED = 130

_T = TypeVar("_T")


class DemoError(Exception):
    """The demo cannot go on; the text is for the person at the console."""


class Reference(NamedTuple):
    """What decides the reference continuation of a prompt."""

    model: str
    block_tokens: int


class Address(NamedTuple):
    """Where the gateway's listeners are."""

    listen: str
    admin: str
    http: str


def run_demo(requests: int | None, out: Path, console: Console) -> int:
    """Run the demo, write the report to `out`, and return the exit status.

    `requests` None replays the whole sample. 0: every request was answered with the right tokens.
    Raises nothing that a user could cause; SIGINT and SIGTERM end it and every process it started.
    """
    trace = load_trace()
    wanted = len(trace) if requests is None else requests
    if not 1 <= wanted <= len(trace):
        console.print(
            f"--requests: must be from 1 to {len(trace)}, the size of the sample", style="red"
        )
        return 2
    replay = list(islice(arrivals(trace, compression=COMPRESSION, rng=random.Random(SEED)), wanted))
    out.parent.mkdir(parents=True, exist_ok=True)
    # A report must not outlive the run after it.
    out.unlink(missing_ok=True)
    return anyio.run(
        _until_signal, replay, out, console, backend_options={"use_uvloop": sys.platform != "win32"}
    )


async def _until_signal(replay: Sequence[Arrival], out: Path, console: Console) -> int:
    status = INTERRUPTED
    async with stopped() as signalled, anyio.create_task_group() as tasks:

        async def watch() -> None:
            await signalled.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        status = await _demo(replay, out, console)
        tasks.cancel_scope.cancel()
    if status == INTERRUPTED:
        console.print("Interrupted; every process was ended.", style="red")
    return status


async def _demo(replay: Sequence[Arrival], out: Path, console: Console) -> int:
    cluster = Cluster(out.parent / "demo-logs")
    try:
        return await _run(cluster, replay, out, console)
    except (ClusterError, DemoError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    finally:
        with anyio.CancelScope(shield=True):
            killed = await cluster.stop()
            if killed:
                console.print(f"Killed, as SIGTERM did not end them: {', '.join(killed)}")


async def _run(cluster: Cluster, replay: Sequence[Arrival], out: Path, console: Console) -> int:
    fleet, workers = await _start_workers(cluster, out.with_name("demo-fleet.json"), console)
    gateway = await _start_gateway(cluster, out.with_name("demo-fleet.json"), console)
    reference = await _reference(gateway, workers[0])

    started_s = anyio.current_time()
    served = await cluster.during(lambda: _replay(gateway, replay, reference, console))
    wall_s = anyio.current_time() - started_s

    rows = [
        Row(arrival, one, mismatch(one, _expected(arrival, len(one.tokens), reference)))
        for arrival, one in zip(replay, served, strict=True)
    ]
    pools = [(stage, name) for stage, grid in _stages(fleet) for name in grid]
    report = build_report(rows, pools) | {
        "kv_verify_failures": sum([await _verify_failures(child) for child in workers]),
        "transport": ", ".join(sorted({child.ready["kv_transport"] for child in workers})),
        "wall_s": round(wall_s, 3),
        "seed": SEED,
        "compression": COMPRESSION,
    }
    return _conclude(report, rows, out, console)
