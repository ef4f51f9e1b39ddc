"""The TensorRT-LLM double: a fatal error and a shutdown end every request and the engine."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from slagate.workers.kv_transfer.shm import SharedMemoryTransport
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.api import NEWEST, VERSIONS, sim_api
from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.outputs import RequestOutput
from slagate.workers.sim.request import EngineDeadError, RequestError, SamplingParams
from support.engine.sim_llm import (
    CONTEXT_ONLY,
    Pair,
    expected,
    llm,
    n_timers,
    prompt_of,
    tokens_of,
    until,
    virtual_loop,
)


def test_a_fatal_error_ends_every_request_and_the_engine(pair: Pair) -> None:
    async def scenario() -> None:
        await pair.hand_off(prompt_of(50))
        engine = pair.prefill
        results = [engine.generate_async(prompt_of(50, i), streaming=True) for i in range(2)]
        await anext(results[0])
        results.append(engine.generate_async(prompt_of(50, 9)))
        engine.inject_fatal(OSError("bus error"))
        for result in results:
            with pytest.raises(OSError, match="bus error"):
                await result
        assert not engine._check_health()
        assert engine._executor is not None
        assert isinstance(engine._executor._fatal_error, OSError)
        with pytest.raises(RuntimeError, match="shutting down"):
            engine.generate_async([1])
        assert (engine.used_blocks, engine.n_parked, n_timers()) == (0, 0, 0)

    run(scenario)


def fails(*_: object) -> None:
    raise LookupError("no such thing")


def ended(engine: SimLLM) -> bool:
    """Whether it says that it is dead and holds nothing; forgets that the loop was told of it."""
    (failure,) = virtual_loop().failures
    assert isinstance(failure["exception"], LookupError)
    virtual_loop().failures.clear()
    return not engine._check_health() and (engine.n_running, n_timers()) == (0, 0)


def test_an_unexpected_error_in_a_handoff_ends_the_engine_and_not_in_silence(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = pair.prefill
        other = engine.generate_async(prompt_of(50), streaming=True)
        await anext(other)
        monkeypatch.setattr(pair.transports[0], "export", fails)
        result = engine.generate_async(prompt_of(50, 2), disaggregated_params=CONTEXT_ONLY)
        for each in (result, other):
            with pytest.raises(LookupError, match="no such thing"):
                await each
        assert ended(engine)

    run(scenario)


def test_an_unexpected_error_at_admission_ends_the_engine_too(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        prompt = prompt_of(50)
        params = await pair.hand_off(prompt)
        monkeypatch.setattr(pair.transports[1], "pull", fails)
        with pytest.raises(LookupError, match="no such thing"):
            await pair.resume(prompt, params)
        assert pair.prefill.release_session(params.ctx_request_id or 0)
        assert ended(pair.decode)

    run(scenario)


def test_shutdown_is_final_and_may_be_repeated() -> None:
    async def scenario() -> None:
        engine = llm()
        result = engine.generate_async([1])
        engine.shutdown()
        engine.shutdown()
        with pytest.raises(RuntimeError, match="shut down"):
            await result
        with pytest.raises(RuntimeError, match="shutting down"):
            engine.generate_async([1])
        assert not engine._check_health()

    run(scenario)


def test_an_injected_error_fails_one_request_and_no_other(pair: Pair) -> None:
    async def scenario() -> None:
        engine = pair.decode
        handed_off = pair.resume(prompt_of(5000), await pair.hand_off(prompt_of(5000)))
        results = [engine.generate_async(prompt_of(50, i), streaming=True) for i in range(3)]
        await anext(results[0])
        results.append(engine.generate_async(prompt_of(50, 9)))
        for result in (handed_off, results[1], results[3]):
            assert engine.inject_request_error(result.request_id, "bad weather")
            with pytest.raises(RequestError, match="bad weather"):
                await result
            assert not engine.inject_request_error(result.request_id, "again")
        for i in (0, 2):
            assert await tokens_of(results[i]) == expected(prompt_of(50, i), 32)
        assert engine._check_health()
        assert (engine.used_blocks, engine.n_unsafe_aborts) == (0, 0)
        pair.prefill.shutdown()
        assert n_timers() == 0

    run(scenario)


def test_an_injected_error_fails_every_output_of_a_request() -> None:
    async def scenario() -> None:
        engine = llm()
        sampling = SamplingParams(n=3, top_k=50, max_tokens=500)
        result = engine.generate_async(prompt_of(50), sampling, streaming=True)
        await anext(result)
        assert engine.inject_request_error(result.request_id, "bad weather")
        with pytest.raises(RequestError, match="bad weather"):
            await result
        assert (engine.n_running, engine.n_queued, engine.used_blocks, n_timers()) == (0, 0, 0, 0)

    run(scenario)


OLD = ("1.1", "1.2")
KILLERS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "prefill-without-transceiver": (
        {},
        {"request_type": "context_only"},
        AssertionError,
        "cache_transceiver_config",
    ),
    "decode-without-transceiver": (
        {},
        {"request_type": "generation_only", "ctx_request_id": 2, "opaque_state": b""},
        AssertionError,
        "cache_transceiver_config",
    ),
    "malformed-state": (
        {"transport": SharedMemoryTransport},
        {"request_type": "generation_only", "ctx_request_id": 2, "opaque_state": b"\1garbage"},
        RuntimeError,
        "opaque_state",
    ),
    "no-id": (
        {"transport": SharedMemoryTransport},
        {"request_type": "generation_only", "opaque_state": b""},
        TypeError,
        "request id",
    ),
    "overlap": (
        {"transport": SharedMemoryTransport, "disable_overlap_scheduler": False},
        {"request_type": "context_only"},
        ValueError,
        "disable_overlap_scheduler",
    ),
    "rank": (
        {"tensor_parallel_size": 2, "enable_attention_dp": True},
        {"attention_dp_rank": 2},
        IndexError,
        "attention_dp_rank 2",
    ),
}
"""What the engine is like, what the request is, and what its process dies of."""

KILLED = [
    (version, name)
    for version in VERSIONS
    for name in KILLERS
    if name != "overlap" or version in OLD
]


def killer(engine: SimLLM, version: str, given: dict[str, Any]) -> RequestOutput:
    """The result of the request that kills the engine."""
    api = sim_api(version)
    kind = api.SchedulingParams if "attention_dp_rank" in given else api.DisaggregatedParams
    name = "scheduling_params" if kind is api.SchedulingParams else "disaggregated_params"
    return engine.generate_async(prompt_of(8), **{name: kind(**given)})


@pytest.mark.parametrize(("version", "name"), KILLED)
def test_w05_an_error_of_its_process_before_the_try_block_ends_the_engine(
    version: str, name: str, tmp_path: Path
) -> None:
    """Who learns of it, and when, is different in each version."""
    engine_args, given, error, words = KILLERS[name]
    transport = {key: make(tmp_path) for key, make in engine_args.items() if key == "transport"}

    async def scenario() -> None:
        engine = llm(api=version, **{**engine_args, **transport})
        running = engine.generate_async(prompt_of(50), streaming=True)
        await anext(running)
        result = killer(engine, version, given)
        executor = engine._executor
        assert executor is not None
        assert not executor.mpi_futures[0].done(), "its process finds that later"
        for pending in (result, running):
            if version == NEWEST:
                with pytest.raises(EngineDeadError, match=words):
                    await pending
            else:
                with anyio.move_on_after(1.0) as scope:
                    await pending
                assert scope.cancelled_caught, "nobody tells it"
        assert isinstance(executor.mpi_futures[0].exception(), error)
        assert hasattr(executor, "_fatal_error") is (version not in OLD)
        assert not executor.is_shutdown(), "nobody has noticed"
        # What the process died of, whatever that is, and for a request that is none of its.
        with pytest.raises(EngineDeadError if version == NEWEST else error, match=words):
            engine.generate_async([1])
        if version == NEWEST:
            assert not engine._check_health()
            assert isinstance(executor._fatal_error, error)
        with pytest.raises(RuntimeError, match="shutting down"):
            engine.generate_async([1])

    run(scenario)


@pytest.mark.parametrize("version", [each for each in VERSIONS if each not in OLD])
@pytest.mark.parametrize("is_asked", [True, False])
def test_w05_a_dead_process_is_noticed_by_a_health_check_or_within_5_s(
    version: str, *, is_asked: bool
) -> None:
    async def scenario() -> None:
        engine = llm(api=version)
        executor = engine._executor
        assert executor is not None
        engine.inject_death(RuntimeError("rank 0 died"))
        await until(4.9)
        assert executor._fatal_error is None
        if is_asked:
            assert not engine._check_health()
        else:
            await until(5.0)
        assert str(executor._fatal_error) == "rank 0 died"
        assert executor.is_shutdown()

    run(scenario)


def test_t2_3_the_error_of_a_dead_engine_is_no_requests_error() -> None:
    """A sibling of it, in the newest version only."""
    names = [hasattr(sim_api(version), "EngineDeadError") for version in VERSIONS]
    assert names == [False, False, False, True]
    assert issubclass(EngineDeadError, RuntimeError)
    assert not issubclass(EngineDeadError, RequestError)


@pytest.mark.parametrize("version", VERSIONS)
def test_w05_a_prefill_without_overlap_scheduler_and_a_local_request_are_well(version: str) -> None:
    async def scenario() -> None:
        api = sim_api(version)
        engine = llm(api=version, disable_overlap_scheduler=False)
        local = api.DisaggregatedParams(request_type="context_and_generation")
        assert await tokens_of(engine.generate_async([1], disaggregated_params=local))

    run(scenario)
