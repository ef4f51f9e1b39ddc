"""Decisions of a gateway while one of its 64 workers bursts with a million KV events.

Everything is real but the engine and the clients: the worker streams over gRPC from another process, as
fast as it is taken; requests come from a third one through a pipe, as gRPC's own threads wake the loop.

Bounds: p99 of a decision at most 3 times that of the same process with nothing to follow, and the same for
what a request waits for its decision; lag under a second within 5 s, and memory that does not grow with the
burst (case KV-16, whose own bound is 5 times).

python -m bench.event_burst N    with so many events, as JSON
"""

import asyncio
import gc
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import uvloop

from bench.decisions import Scene, both_decisions, busy_fleet, in_us
from bench.event_source import BLOCK_TOKENS
from slagate.pools.event_view import EventView, Mode
from slagate.pools.follow import Follower
from slagate.pools.rank_follower import WAITING_BYTES
from slagate.pools.turns import Turns
from slagate.proto import openengine_pb2 as oe
from slagate.workers.client import connect_worker
from slagate.workers.clock import unix_s

N_WORKERS = 64
N_EVENTS = 1_000_000
IDLE_S = 5.0
SETTLE_S = 0.5
MAX_LAG_S = 1.0

BOUND_RATIO = 3.0
BOUND_CATCH_UP_S = 5.0
"""From the last event's publication until the lag stays below `MAX_LAG_S`."""

BOUND_GROWTH_BYTES = WAITING_BYTES + (24 << 20)
"""The queue, and as much of gRPC's buffers and of what is garbage for a while."""


def measure() -> dict[str, Any]:
    """Idle and burst side by side, and which bounds are missed."""
    command = [sys.executable, "-m", "bench.event_burst", str(N_EVENTS)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    checks = {
        f"p99 of a decision {figures['decision_p99_ratio']} times the idle one": (
            figures["decision_p99_ratio"] <= BOUND_RATIO
        ),
        f"p99 of a request's wait {figures['wait_p99_ratio']} times the idle one": (
            figures["wait_p99_ratio"] <= BOUND_RATIO
        ),
        f"{figures['caught_up_s']} s behind after the burst": (
            figures["caught_up_s"] <= BOUND_CATCH_UP_S
        ),
        f"grew by {figures['growth_bytes']} bytes": figures["growth_bytes"] <= BOUND_GROWTH_BYTES,
        f"{figures['n_events']} events came": figures["n_events"] >= N_EVENTS,
    }
    figures["missed"] = [f"event burst: {what}" for what, holds in checks.items() if not holds]
    return figures


class TimedTurns(Turns):
    """Remembers the longest turn."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0

    def _turn(self) -> None:
        started_s = time.perf_counter()
        super()._turn()
        self.longest_s = max(self.longest_s, time.perf_counter() - started_s)


class Requests:
    """Arrivals from another process, each decided when it is read."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._decide = both_decisions(scene)
        self.decision_s: list[float] = []
        self.wait_s: list[float] = []  # from the arrival until the decision is there

    def read(self, fd: int) -> None:
        arrivals = os.read(fd, 1 << 16)
        for at in range(0, len(arrivals), 8):
            started_ns = time.monotonic_ns()
            self._decide(self._scene.rng.choice(self._scene.prompts))
            ended_ns = time.monotonic_ns()
            arrived_ns = int.from_bytes(arrivals[at : at + 8], "little")
            self.decision_s.append((ended_ns - started_ns) / 1e9)
            self.wait_s.append((ended_ns - arrived_ns) / 1e9)

    def taken(self) -> dict[str, list[float]]:
        """What was measured since the last call."""
        found = {"decision": self.decision_s, "wait": self.wait_s}
        self.decision_s, self.wait_s = [], []
        return found


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
            idle = await _idle(requests)
            n_before, turns.longest_s = events.n_events, 0.0
            watch, began_s = Watch(events), time.monotonic()
            source.stdin.write("\n")
            source.stdin.flush()
            caught_up_s = await watch.until_taken(source)
            burst_s = time.monotonic() - began_s
            burst, longest_turn_s = requests.taken(), turns.longest_s
            for name, seconds in (await _idle(requests)).items():
                idle[name] += seconds
            asyncio.get_running_loop().remove_reader(arrivals)
            n_applied = events.n_events - n_before
    figures: dict[str, Any] = {
        "n_events": n_applied,
        "n_batches": told["n_batches"],
        "sent_bytes": told["n_bytes"],
        "burst_s": round(burst_s, 2),
        "events_per_s": round(n_applied / burst_s),
        "n_decisions": {"idle": len(idle["decision"]), "burst": len(burst["decision"])},
    }
    for name in idle:
        figures[f"idle_{name}_us"] = quiet = in_us([idle[name]])
        figures[f"burst_{name}_us"] = busy = in_us([burst[name]])
        figures[f"{name}_p99_ratio"] = round(busy["p99"] / quiet["p99"], 2)
    return figures | {
        "longest_turn_ms": round(longest_turn_s * 1e3, 2),
        "longest_lag_s": round(watch.longest_lag_s, 3),
        "caught_up_s": round(caught_up_s, 2),
        "most_waiting_bytes": watch.most_waiting_bytes,
        "growth_bytes": watch.growth_bytes,
        "n_resyncs": events.n_resyncs,
    }


async def _idle(requests: Requests) -> dict[str, list[float]]:
    """What is measured while nothing happens, once all has settled."""
    await anyio.sleep(SETTLE_S)
    requests.taken()
    await anyio.sleep(IDLE_S / 2)
    return requests.taken()


@asynccontextmanager
async def _following(scene: Scene, told: dict[str, Any], turns: Turns) -> AsyncIterator[EventView]:
    """All workers' events followed into the index that is decided by; yields those of the one that bursts."""
    overlaps = scene.pool.overlaps
    assert overlaps is not None
    views = []
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        for number in range(N_WORKERS):
            address = told["quiet"] if number else told["burst"]
            worker = await stack.enter_async_context(connect_worker(address))
            views.append(EventView(address, unix_s=unix_s))
            follower = Follower(
                worker,
                views[-1],
                index_of=overlaps.index_of,
                on_holder=lambda rank, holder: None,  # decisions are by prompts of before
                n_served=lambda: 0,
                turns=turns,
                rng=random.Random(number),
            )
            follower.identified(
                oe.ServerInfo(
                    instance_id=address,
                    capacity=oe.DeploymentCapacity(kv_block_size=BLOCK_TOKENS),
                )
            )
            tasks.start_soon(follower.run)
        while any(view.mode is not Mode.LIVE for view in views):
            await anyio.sleep(0.1)
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
