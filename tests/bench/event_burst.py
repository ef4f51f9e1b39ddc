"""Decisions of a gateway while one of its 64 workers bursts with a million KV events.

Everything is real but the engine and the clients: the worker streams over gRPC from another process, as
fast as it is taken; requests come from a third one through a pipe, as gRPC's own threads wake the loop.

Bounds: p99 of a decision at most 3 times that of the same process before and after; lag under a second
within 5 s, and memory that does not grow with the burst (case KV-16, whose own bound is 5 times). What a
request waits for its decision is beside it, by the clock: other processes on the machine are in it.

python -m bench.event_burst N    with so many events, as JSON
"""

import asyncio
import gc
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import uvloop

from bench.decisions import Scene, Taken, both_decisions, busy_fleet, in_us, percentiles_us
from bench.event_source import BLOCK_TOKENS
from slagate.pools.kv_events.follower import WAITING_BYTES, WorkerFollower
from slagate.pools.kv_events.view import EventMode, EventView
from slagate.proto import openengine_pb2 as oe
from slagate.workers.client.client import connect_worker
from slagate.workers.runtime.clock import unix_s
from slagate.workers.runtime.cooperative import CooperativeScheduler

N_WORKERS = 64
N_EVENTS = 1_000_000
RUNS = 3
IDLE_S = 5.0
SETTLE_S = 0.5
MAX_LAG_S = 1.0

BOUNDS = {
    "decision_p99_ratio": 3.0,  # by CPU time
    "late_s": 5.0,  # how long the lag is `MAX_LAG_S` or more, once all has been sent
    # The queue, gRPC's buffers, and what is garbage for a while.
    "growth_bytes": WAITING_BYTES + (24 << 20),
}


def measure(folder: Path) -> dict[str, Any]:
    """Idle and burst side by side, in several processes one after the other, and their median."""
    del folder
    command = [sys.executable, "-m", "bench.event_burst", str(N_EVENTS)]
    runs: list[dict[str, Any]] = [
        json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        for _ in range(RUNS)
    ]
    names = (*BOUNDS, "wait_p99_ratio", "longest_turn_ms")
    typical = {name: statistics.median(run[name] for run in runs) for name in names}
    missed = [
        f"burst: {name} {typical[name]}, bound {bound}"
        for name, bound in BOUNDS.items()
        if typical[name] > bound
    ]
    missed += [
        f"burst: {run['n_events']} events of {N_EVENTS} came"
        for run in runs
        if run["n_events"] != N_EVENTS
    ]
    return {**typical, "runs": runs, "missed": missed}


class TimedTurns(CooperativeScheduler):
    """Remembers the longest turn, in CPU time."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0

    def _turn(self) -> None:
        started_s = time.thread_time()
        super()._turn()
        self.longest_s = max(self.longest_s, time.thread_time() - started_s)


class Requests:
    """Arrivals from another process, each decided when it is read."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._decide = both_decisions(scene)
        self.start()

    def start(self) -> None:
        """Measure from now on."""
        self.decisions = Taken()
        self.waits_s: list[float] = []  # from the arrival until the decision is there

    def read(self, fd: int) -> None:
        """Decide what has come."""
        arrivals = os.read(fd, 1 << 16)
        for at in range(0, len(arrivals), 8):
            self.decisions.time(self._decide, self._scene.rng.choice(self._scene.prompts))
            arrived_ns = int.from_bytes(arrivals[at : at + 8], "little")
            self.waits_s.append((time.monotonic_ns() - arrived_ns) / 1e9)


class Phase:
    """What requests met in a time, or in several."""

    def __init__(self) -> None:
        self.decisions: list[Taken] = []
        self.waits_s: list[float] = []

    def add(self, requests: Requests) -> None:
        """What has been measured since it was started."""
        self.decisions.append(requests.decisions)
        self.waits_s += requests.waits_s
        requests.start()

    def figures(self, name: str) -> dict[str, Any]:
        """Microseconds."""
        return {
            f"{name}_decision_us": in_us(self.decisions),
            f"{name}_wait_us": percentiles_us(self.waits_s),
            f"n_{name}_decisions": len(self.waits_s),
        }


class Watch:
    """The worst that was seen of a worker's events and of the process, looked at now and then."""

    def __init__(self, events: EventView) -> None:
        self._events = events
        self._began_bytes = _resident_bytes()
        self.growth_bytes = 0
        self.longest_lag_s = 0.0
        self.most_waiting_bytes = 0

    async def until_taken(self, source: "subprocess.Popen[str]") -> float:
        """Until the worker has sent all and all is applied; how long the lag outlasted the sending."""
        assert source.stdout is not None
        sent = asyncio.ensure_future(asyncio.to_thread(source.stdout.readline))
        sent_at_s = late_at_s = 0.0
        while not sent_at_s or self._events.n_waiting_bytes:
            await anyio.sleep(0.05)
            now_s, lag_s = time.monotonic(), self._events.lag_s
            if sent.done() and not sent_at_s:
                sent_at_s = now_s
            if lag_s >= MAX_LAG_S:
                late_at_s = now_s
            self.longest_lag_s = max(self.longest_lag_s, lag_s)
            self.growth_bytes = max(self.growth_bytes, _resident_bytes() - self._began_bytes)
            waiting_bytes = self._events.n_waiting_bytes
            self.most_waiting_bytes = max(self.most_waiting_bytes, waiting_bytes)
        return max(0.0, late_at_s - sent_at_s)


async def _run(n_events: int) -> dict[str, Any]:
    scene = busy_fleet(N_WORKERS, 8192)
    turns, requests = TimedTurns(), Requests(scene)
    with _child("burst", str(n_events)) as source, _child("arrivals") as clock:
        assert source.stdout is not None
        assert source.stdin is not None
        assert clock.stdout is not None
        told = json.loads(await asyncio.to_thread(source.stdout.readline))
        async with _following(scene, told, turns) as events:
            # As the gateway does once it serves.
            gc.collect()
            gc.freeze()
            arrivals = clock.stdout.fileno()
            os.read(arrivals, 1 << 20)  # these have waited for long
            asyncio.get_running_loop().add_reader(arrivals, requests.read, arrivals)
            idle, burst = Phase(), Phase()
            await _rest(requests, idle)
            n_before, turns.longest_s = events.n_events, 0.0
            watch, began_s = Watch(events), time.monotonic()
            source.stdin.write("\n")
            source.stdin.flush()
            late_s = await watch.until_taken(source)
            burst_s = time.monotonic() - began_s
            burst.add(requests)
            longest_turn_s = turns.longest_s
            await _rest(requests, idle)
            asyncio.get_running_loop().remove_reader(arrivals)
            n_applied = events.n_events - n_before
    figures: dict[str, Any] = {
        "n_events": n_applied,
        "n_batches": told["n_batches"],
        "sent_bytes": told["n_bytes"],
        "burst_s": round(burst_s, 2),
        "events_per_s": round(n_applied / burst_s),
        **idle.figures("idle"),
        **burst.figures("burst"),
    }
    quiet, busy = (figures[f"{name}_decision_us"]["p99_on_cpu"] for name in ("idle", "burst"))
    quiet_wait, busy_wait = (figures[f"{name}_wait_us"]["p99"] for name in ("idle", "burst"))
    return figures | {
        "decision_p99_ratio": round(busy / quiet, 2),
        "wait_p99_ratio": round(busy_wait / quiet_wait, 2),
        "longest_turn_ms": round(longest_turn_s * 1e3, 2),
        "longest_lag_s": round(watch.longest_lag_s, 3),
        "late_s": round(late_s, 2),
        "most_waiting_bytes": watch.most_waiting_bytes,
        "growth_bytes": watch.growth_bytes,
        "n_resyncs": events.n_resyncs,
    }


async def _rest(requests: Requests, idle: Phase) -> None:
    """A time in which nothing bursts, measured once all has settled."""
    await anyio.sleep(SETTLE_S)
    requests.start()
    await anyio.sleep(IDLE_S / 2)
    idle.add(requests)


@asynccontextmanager
async def _following(
    scene: Scene, told: dict[str, Any], turns: CooperativeScheduler
) -> AsyncIterator[EventView]:
    """All workers followed, into the index that is decided by; yields the events of the one that bursts."""
    overlaps = scene.pool.overlaps
    assert overlaps is not None
    views = []
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        for number in range(N_WORKERS):
            address = told["quiet"] if number else told["burst"]
            worker = await stack.enter_async_context(connect_worker(address))
            views.append(EventView(address, unix_s=unix_s))
            follower = WorkerFollower(
                worker,
                views[-1],
                index_of=overlaps.index_of,
                on_holder=lambda rank, holder: None,  # decisions are by prompts of before
                n_served=lambda: 0,
                scheduler=turns,
                rng=random.Random(number),
            )
            follower.identified(
                oe.ServerInfo(
                    instance_id=address,
                    capacity=oe.DeploymentCapacity(kv_block_size=BLOCK_TOKENS),
                )
            )
            tasks.start_soon(follower.run)
        while True:
            await anyio.sleep(0.1)
            if all(view.mode is EventMode.LIVE for view in views):
                break
        yield views[0]
        tasks.cancel_scope.cancel()


@contextmanager
def _child(*args: str) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-m", "bench.event_source", *args]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    print(json.dumps(uvloop.run(_run(int(sys.argv[1])))))
