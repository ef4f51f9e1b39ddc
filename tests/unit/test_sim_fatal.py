"""The TensorRT-LLM double: a fatal error and a shutdown end every request and the engine."""

import pytest

from support.sim_llm import Pair, llm, n_timers, prompt_of
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
