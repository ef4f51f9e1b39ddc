"""What TensorRT-LLM does with those who poll it, by version: `workers/sim/polls.py` has the sources."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.api import VERSIONS
from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.polls import REFETCH_S, MixedSyncAsyncAPIError
from slagate.workers.sim.request import SamplingParams12
from support.engine.sim_llm import llm, polled, prompt_of

QUEUED, CALLED = VERSIONS[:1], VERSIONS[1:]
every_version = pytest.mark.parametrize("api", VERSIONS)
every_queued = pytest.mark.parametrize("api", QUEUED)
every_called = pytest.mark.parametrize("api", CALLED)
either_source = pytest.mark.parametrize("source", ["get_stats", "get_kv_cache_events"])


def engine_of(api: str, pauses: list[float] | None = None) -> SimLLM:
    """One with both sources on; `pauses` gets how long each poll of a called one has blocked its caller."""
    pause = (lambda _: None) if pauses is None else pauses.append
    return llm(api=api, kv_cache_config={"event_buffer_max_size": 1000}, pause=pause)


def asynchronously(engine: SimLLM, source: str, timeout_s: float) -> Any:
    return getattr(engine, f"{source}_async")(timeout=timeout_s)


@every_version
@either_source
def test_w02_an_empty_queue_is_an_error_of_a_poll_that_does_not_wait(api: str, source: str) -> None:
    async def scenario() -> None:
        engine = engine_of(api)
        await engine.generate_async(prompt_of(65))
        assert await polled(asynchronously(engine, source, 0))
        for _ in range(2):
            with pytest.raises(asyncio.QueueEmpty):
                await anext(asynchronously(engine, source, 0))

    run(scenario)


@every_queued
@either_source
def test_w04_an_iterator_that_has_ended_stays_ended_until_the_next_request(
    api: str, source: str
) -> None:
    async def scenario() -> None:
        engine = engine_of(api)
        sampling = SamplingParams12(max_tokens=100, ignore_eos=True)
        running = engine.generate_async(prompt_of(65), sampling, streaming=True)
        await anext(running)
        # Each iteration takes longer than what is waited for here.
        first = asynchronously(engine, source, 0.0001)
        assert [one async for one in first]
        await running
        again = asynchronously(engine, source, 0.0001)
        assert again is first
        assert [one async for one in again] == []
        again.mark_undone()
        assert [one async for one in again]

    run(scenario)


@every_queued
def test_w04_the_next_request_lets_it_go_on(api: str) -> None:
    async def scenario() -> None:
        engine = engine_of(api)
        await engine.generate_async(prompt_of(65))
        assert [row async for row in engine.get_stats_async(timeout=0.01)]
        await engine.generate_async(prompt_of(65, 2))
        assert [row async for row in engine.get_stats_async(timeout=0.01)]

    run(scenario)


@every_queued
def test_w03_a_queue_that_was_read_synchronously_cannot_be_read_asynchronously(api: str) -> None:
    async def scenario() -> None:
        engine = engine_of(api)
        assert not hasattr(engine._executor, "rpc_client")
        await engine.generate_async([1])
        assert engine.get_stats(0)
        with pytest.raises(MixedSyncAsyncAPIError):
            await anext(engine.get_stats_async(timeout=0))

    run(scenario)


@every_queued
def test_a_queue_is_there_from_the_first_request_on(api: str) -> None:
    async def scenario() -> None:
        engine = engine_of(api)
        assert engine.get_stats(0) == []
        assert [row async for row in engine.get_stats_async(timeout=5)] == []
        for ask in (engine.get_kv_cache_events_async, engine.get_kv_cache_events):
            with pytest.raises(AssertionError):
                ask(0)
        await engine.generate_async([1])
        assert engine.get_kv_cache_events(0)

    run(scenario)


@every_called
@either_source
@pytest.mark.parametrize(
    ("timeout_s", "blocked"), [(0, []), (None, []), (0.01, [REFETCH_S]), (0.25, [REFETCH_S] * 3)]
)
def test_w03_a_call_that_finds_nothing_blocks_its_caller(
    api: str, source: str, timeout_s: float | None, blocked: list[float]
) -> None:
    async def scenario() -> None:
        pauses: list[float] = []
        engine = engine_of(api, pauses)
        pauses.clear()  # of the constructor
        assert hasattr(engine._executor, "rpc_client")
        await engine.generate_async([1])
        getattr(engine, source)(0)
        getattr(engine, source)(timeout_s)
        assert pauses == blocked
        asynchronously(engine, source, timeout_s)  # type: ignore[arg-type]
        assert pauses == blocked * 2

    run(scenario)


@every_called
@either_source
def test_w03_a_call_needs_neither_a_loop_nor_a_request_before_it(api: str, source: str) -> None:
    engine = engine_of(api)
    with ThreadPoolExecutor(1) as thread:
        before = thread.submit(getattr(engine, source), 0).result()
    assert [event["data"]["type"] for event in before if "data" in event] in ([], ["created"])
