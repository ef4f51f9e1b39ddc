"""What serving costs a worker: 64 streams and 2 KV-event subscribers, beside engine and adapter alone.

Both ways run the same requests over and over at the engine's own pace, so the difference in CPU is what
the server takes: gRPC, flow control, encoding for the subscribers.
"""

import asyncio
import itertools
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import Status
from slagate.workers.client.client import connect_worker
from slagate.workers.worker import Worker
from support.engine.workers import sim
from support.gateway.processes import MODEL, Process, running, worker_arguments

STREAMS = 64
SUBSCRIBERS = 2
ROUNDS = 5
ROUND_S = 4.0
BOUND_CORES = 0.30
ISL_TOKENS = 500
OSL_TOKENS = 250


def measure(folder: Path) -> dict[str, Any]:
    """CPU of both ways in cores, interleaved; the server's share is the difference of the medians."""
    with running("worker", worker_arguments("agg"), folder) as process:
        cores = uvloop.run(_rounds(process))
    figures: dict[str, Any] = {"streams": STREAMS, "subscribers": SUBSCRIBERS, "rounds": ROUNDS}
    for way, values in cores.items():
        figures[f"{way}_cores"] = round(statistics.median(values), 3)
        figures[f"{way}_min_max"] = [round(min(values), 3), round(max(values), 3)]
    server = statistics.median(cores["served"]) - statistics.median(cores["direct"])
    figures["server_cores"] = round(server, 3)
    missed = server >= BOUND_CORES
    figures["missed"] = [f"worker: the server takes {server:.2f} cores"] if missed else []
    return figures


class _Sink:
    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.n_messages = 0

    def message(self, data: bytes, /) -> None:
        self.n_messages += 1

    def finish(self, status: Status, /) -> None:
        self.ended.set()


async def _rounds(process: Process) -> dict[str, list[float]]:
    cores: dict[str, list[float]] = {"served": [], "direct": []}
    for number in range(ROUNDS):
        cores["served"].append(await _served(process, f"s{number}"))
        cores["direct"].append(await _direct(f"d{number}"))
    return cores


async def _served(process: Process, name: str) -> float:
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(connect_worker(process.address))
        return await _loaded(worker, name, lambda: _cpu_s(process))


async def _direct(name: str) -> float:
    async with sim("agg", served=False) as worker:
        return await _loaded(worker, name, time.process_time)


async def _loaded(worker: Worker, name: str, cpu_s: Any) -> float:
    """Cores that the load takes, after a second to settle."""
    ids = itertools.count()

    async def stream() -> None:
        while True:
            sink = _Sink()
            number = next(ids)
            call = worker.generate(_request(f"{name}-{number}", number), (), sink, timeout_s=None)
            try:
                await sink.ended.wait()
            finally:
                call.cancel()

    subscribe = oe.SubscribeKvEventsRequest(include_snapshot=True).SerializeToString()
    subscriptions = [worker.kv_events(subscribe, (), _Sink()) for _ in range(SUBSCRIBERS)]
    streams = [asyncio.ensure_future(stream()) for _ in range(STREAMS)]
    await asyncio.sleep(1.0)
    before_s, started_s = cpu_s(), time.perf_counter()
    await asyncio.sleep(ROUND_S)
    used_s, wall_s = cpu_s() - before_s, time.perf_counter() - started_s
    for one in streams:
        one.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    for call in subscriptions:
        call.cancel()
    return float(used_s / wall_s)


def _request(request_id: str, number: int) -> bytes:
    return oe.GenerateRequest(
        request_id=request_id,
        model=MODEL,
        token_ids=oe.TokenIds(ids=[(number * 7919 + at) % 100_000 for at in range(ISL_TOKENS)]),
        stopping=oe.StoppingOptions(max_tokens=OSL_TOKENS, ignore_eos=True),
    ).SerializeToString()


def _cpu_s(process: Process) -> float:
    fields = Path(f"/proc/{process.popen.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100
