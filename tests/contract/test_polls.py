"""An engine is polled for KV events and statistics in its version's way, and at nobody's cost."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import anyio
import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers.runtime import virtual_loop
from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.polls import PolledSource
from slagate.workers.trtllm.metrics import Observer
from slagate.workers.trtllm.poll import is_polled_by_call
from support.engine.sim_llm import prompt_of, until
from support.engine.workers import engine_worker, expected, request
from support.limits import HANG_S
from support.worker.contract import DIRECT, Setup, ask, start
from support.worker.sinks import KeepingSink

CALLED = tuple(setup for setup in DIRECT if setup.version != "1.1")

every_version = pytest.mark.parametrize("setup", DIRECT, ids=str)
every_called = pytest.mark.parametrize("setup", CALLED, ids=str)


class Reads(Observer):
    """What polls have brought, and when."""

    def __init__(self) -> None:
        self.iterations: list[int] = []
        self.events_at_s: list[float] = []

    def stats_polled(self, rows: list[Any]) -> None:
        # (The newest has a row of before its first iteration.)
        self.iterations += [row["iter"] for row in rows if row["iter"]]

    def events_polled(self, n_events: int) -> None:
        self.events_at_s.append(asyncio.get_running_loop().time())


@every_version
def test_w02_w04_whatever_an_engine_has_is_read_while_it_works(setup: Setup) -> None:
    """One request, long enough for its iterations to be slower than the polls."""
    n_tokens, reads = 200, Reads()

    async def scenario() -> None:
        options, slowly = {"observer": reads}, {"time_scale": 4.0}
        async with setup.engine("agg", worker_options=options, sim_settings=slowly) as at:
            await ask(at.worker, request("r1", prompt_of(64), n_tokens))
            ended_s = asyncio.get_running_loop().time()
            await until(ended_s + 0.2)
            assert reads.iterations == list(range(1, n_tokens + 1))
            assert max(reads.events_at_s) <= ended_s + 0.021
            # Polling has not ended with a first error.
            await ask(at.worker, request("r2", prompt_of(64, 2), 1))
            await until(asyncio.get_running_loop().time() + 0.2)
            assert reads.iterations[n_tokens:] == [n_tokens + 1]
            load = await at.worker.load(oe.GetLoadRequest())
            assert load.attributes["kv_event_poll_errors"] == 0

    virtual_loop.run(scenario)


@every_version
def test_w03_no_poll_takes_time_from_the_event_loop(setup: Setup) -> None:
    """Where a poll is a call, nobody waits for it; else the queue can still be read asynchronously."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_loop.VirtualLoop)
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            loop.stall(seconds)

        async with setup.engine("agg", sim_settings={"pause": pause}) as at:
            assert is_polled_by_call(at.llm) is (setup in CALLED)
            pauses.clear()  # of the constructor
            sink = await ask(at.worker, request("r1", prompt_of(64), 100))
            assert sink.tokens == expected(prompt_of(64), 100)
            await until(loop.time() + 0.5)  # by then there is nothing any more
            assert pauses == []

    virtual_loop.run(scenario)


class Gate:
    """Lets no poll of an engine return until it is opened."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._opened = threading.Event()
        self.n_entered = self.n_returned = 0
        self.changed = asyncio.Event()

    def around(self, poll: Callable[..., Any]) -> Callable[..., Any]:
        def gated(source: PolledSource, timeout_s: float | None) -> Any:
            self.n_entered += 1
            self._loop.call_soon_threadsafe(self.changed.set)
            self._opened.wait()
            self.n_returned += 1
            self._loop.call_soon_threadsafe(self.changed.set)
            return poll(source, timeout_s)

        return gated

    def open(self) -> None:
        self._opened.set()

    async def until(self, wanted: Callable[[], bool]) -> None:
        while not wanted():
            self.changed.clear()
            await self.changed.wait()


@every_called
def test_w03_streams_health_and_aborts_go_on_while_an_engine_answers_no_poll(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of its polls are stuck, for as long as this test wants."""

    async def scenario() -> None:
        gate = Gate(asyncio.get_running_loop())
        for name in ("poll", "poll_async"):
            monkeypatch.setattr(PolledSource, name, gate.around(getattr(PolledSource, name)))
        no_time = {"time_scale": 0.0}
        async with engine_worker("agg", version=setup.version, sim_settings=no_time) as at:
            try:
                await stuck(at.worker, gate)
            finally:
                gate.open()
            # Opened, the polls bring what has gathered.
            await gate.until(lambda: gate.n_returned >= 2)
            while not (await at.worker.load(oe.GetLoadRequest())).total_kv_blocks:
                await anyio.lowlevel.checkpoint()

    async def stuck(worker: Any, gate: Gate) -> None:
        await ask(worker, request("first", prompt_of(64)))
        await gate.until(lambda: gate.n_entered == 2)
        sinks = [KeepingSink() for _ in range(64)]
        for i, sink in enumerate(sinks):
            start(worker, request(f"r{i}", prompt_of(64, i)).SerializeToString(), sink)
        for i, sink in enumerate(sinks):
            await sink.done()
            assert sink.tokens == expected(prompt_of(64, i), 8)
        health = await worker.health(oe.HealthRequest(include_inference_probe=True))
        assert health.state == oe.HEALTH_STATE_READY
        endless = KeepingSink()
        start(worker, request("endless", prompt_of(64), 100_000).SerializeToString(), endless)
        await endless.at_least(1)
        aborted = await worker.abort(oe.AbortRequest(request_id="endless"))
        assert aborted.status == oe.ABORT_STATUS_ABORTED
        await endless.done()
        assert endless.code is grpc.StatusCode.CANCELLED
        assert (gate.n_entered, gate.n_returned) == (2, 0)

    async def limited() -> None:
        with anyio.fail_after(HANG_S):
            await scenario()

    anyio.run(limited)


@every_called
@pytest.mark.parametrize("error", [asyncio.CancelledError, concurrent.futures.CancelledError])
def test_a_poll_that_was_cancelled_is_an_error_and_cancels_nothing(
    setup: Setup, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an engine whose processes' futures are: it would end every task of the worker."""

    def cancelled(source: PolledSource, timeout_s: float | None) -> Any:
        raise error

    async def main() -> None:
        async with engine_worker(
            "agg", version=setup.version, sim_settings={"time_scale": 0.0}
        ) as at:
            monkeypatch.setattr(PolledSource, "poll", cancelled)
            for i in range(2):
                sink = await ask(at.worker, request(f"r{i}", prompt_of(64, i)))
                assert sink.tokens == expected(prompt_of(64, i), 8)
                while not (await at.worker.load(oe.GetLoadRequest())).attributes[
                    "kv_event_poll_errors"
                ]:
                    await anyio.lowlevel.checkpoint()

    anyio.run(main)


@every_version
@pytest.mark.parametrize("missing", [("events",), ("stats",), ("events", "stats")], ids="-".join)
def test_an_engine_without_events_or_statistics_still_serves(
    setup: Setup, missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are switched off, or the version has no such methods."""
    off: dict[str, Any] = {}
    if "stats" in missing:
        off["enable_iter_perf_stats"] = False
    if "events" in missing:
        off["kv_cache_config"] = {"event_buffer_max_size": 0}

    async def serves(**options: Any) -> None:
        async with setup.engine("agg", **options) as at:
            sink = await ask(at.worker, request("r", prompt_of(64)))
            assert sink.tokens == expected(prompt_of(64), 8)
            assert (await at.worker.health(oe.HealthRequest())).state == oe.HEALTH_STATE_READY
            sources = await at.worker.kv_event_sources(oe.GetKvEventSourcesRequest())
            assert (not sources.sources) is ("events" in missing)
            await at.worker.load(oe.GetLoadRequest())
            assert (await at.worker.server_info()).capacity.kv_block_size == 32

    virtual_loop.run(lambda: serves(**off))
    for kind, name in {"events": "get_kv_cache_events", "stats": "get_stats"}.items():
        if kind in missing:
            monkeypatch.delattr(SimLLM, name)
            monkeypatch.delattr(SimLLM, f"{name}_async")
    virtual_loop.run(serves)
