"""The TensorRT-LLM double: a fatal error and a shutdown end every request and the engine."""

import pytest

from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.request import RequestError, SamplingParams
from support.engine.sim_llm import (
    CONTEXT_ONLY,
    Pair,
    expected,
    llm,
    n_timers,
    prompt_of,
    tokens_of,
    virtual_loop,
)
from support.virtual_loop import run


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
        with pytest.raises(RuntimeError, match="bus error"):
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
