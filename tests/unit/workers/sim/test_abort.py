"""The TensorRT-LLM double: an abort at any stage frees everything and disturbs nobody else."""

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import pytest

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.outputs import RequestOutput
from slagate.workers.sim.request import SamplingParams
from support.engine.sim_llm import (
    PROFILE,
    Pair,
    expected,
    llm,
    n_timers,
    prompt_of,
    tokens_of,
    until,
)

Stage = Callable[[Pair], Awaitable[RequestOutput]]


async def queued(pair: Pair) -> RequestOutput:
    return pair.decode.generate_async(prompt_of(50), streaming=True)


async def mid_prefill(pair: Pair) -> RequestOutput:
    result = pair.decode.generate_async(prompt_of(9000), streaming=True)
    await until(PROFILE.prefill_s(8192, 0) + 0.001)
    assert not result.outputs[0].token_ids
    return result


async def mid_decode(pair: Pair) -> RequestOutput:
    result = pair.decode.generate_async(prompt_of(50), streaming=True)
    for _ in range(5):
        await anext(result)
    return result


async def mid_remote_decode(pair: Pair) -> RequestOutput:
    result = pair.resume(prompt_of(50), await pair.hand_off(prompt_of(50)))
    await anext(result)
    await anext(result)
    return result


@pytest.mark.parametrize("stage", [queued, mid_prefill, mid_decode, mid_remote_decode])
def test_abort_at_each_stage_frees_everything(pair: Pair, stage: Stage) -> None:
    async def scenario() -> None:
        result = await stage(pair)
        result.abort()
        result.abort()
        assert result.aborted()
        yields = [one.outputs[0].finish_reason async for one in result]
        assert yields == ["cancelled"]
        assert (pair.decode.used_blocks, pair.decode.n_running, pair.decode.n_queued) == (0, 0, 0)
        assert not result.outputs[0].token_ids_diff
        assert pair.decode.n_unsafe_aborts == 0
        pair.prefill.shutdown()
        assert n_timers() == 0
        assert await tokens_of(pair.decode.generate_async(prompt_of(7))) == expected(
            prompt_of(7), 32
        )

    run(scenario)


async def mid_transfer(pair: Pair) -> RequestOutput:
    """A decode leg whose blocks are on their way: the one place where nobody may abort."""
    result = pair.resume(prompt_of(5000), await pair.hand_off(prompt_of(5000)))
    transfer_s = 5000 * PROFILE.kv_bytes_per_token / 50e9
    await until(asyncio.get_running_loop().time() + transfer_s / 2)
    assert pair.decode.used_blocks == 157
    return result


def test_an_abort_before_the_first_result_of_a_handoff_loses_its_blocks_for_good(
    pair: Pair,
) -> None:
    """In TensorRT-LLM the prefill worker may still write into them."""

    async def scenario() -> None:
        result = await mid_transfer(pair)
        result.abort()
        result.abort()
        yields = [one.outputs[0].finish_reason async for one in result]
        assert yields == ["cancelled"]
        await until(100.0)
        engine = pair.decode
        assert (engine.used_blocks, engine.n_running, engine.n_unsafe_aborts) == (157, 0, 1)
        assert await tokens_of(engine.generate_async(prompt_of(7))) == expected(prompt_of(7), 32)
        assert engine.used_blocks == 157
        pair.prefill.shutdown()
        assert n_timers() == 0

    run(scenario)


def test_an_abort_of_a_handoff_that_is_still_queued_counts_as_unsafe_too(pair: Pair) -> None:
    """The caller cannot know that its transfer has not begun."""

    async def scenario() -> None:
        params = await pair.hand_off(prompt_of(50))
        pair.resume(prompt_of(50), params).abort()
        assert (pair.decode.used_blocks, pair.decode.n_unsafe_aborts) == (0, 1)
        pair.prefill.shutdown()

    run(scenario)


def test_abort_of_one_request_leaves_the_others_alone() -> None:
    async def scenario() -> None:
        engine = llm()
        results = [engine.generate_async(prompt_of(50, i), streaming=True) for i in range(3)]
        await anext(results[1])
        results[1].abort()
        for i in (0, 2):
            assert await tokens_of(results[i]) == expected(prompt_of(50, i), 32)
        assert results[1].outputs[0].finish_reason is None
        await results[1]
        assert results[1].outputs[0].finish_reason == "cancelled"
        assert engine.used_blocks == 0

    run(scenario)


@pytest.mark.parametrize(
    ("limit", "n_prompt"),
    [
        pytest.param({"max_batch_size": 1}, 50, id="the next one waits for its place"),
        # Both are admitted, but the first takes the whole token budget of the iteration.
        pytest.param({"max_num_tokens": 512}, 1000, id="the next one waits for tokens"),
    ],
)
def test_abort_of_a_running_request_lets_the_next_one_go_on(
    limit: dict[str, int], n_prompt: int
) -> None:
    async def scenario() -> None:
        engine = llm(**limit)
        first = engine.generate_async(prompt_of(n_prompt), SamplingParams(max_tokens=1000))
        second = engine.generate_async(prompt_of(n_prompt, 2))
        await until(0.001)
        first.abort()
        assert await tokens_of(second) == expected(prompt_of(n_prompt, 2), 32)

    run(scenario)


def test_a_late_abort_is_harmless() -> None:
    async def scenario() -> None:
        result = await llm().generate_async(prompt_of(50))
        result.abort()
        assert result.aborted()
        assert result.outputs[0].finish_reason == "length"

    run(scenario)


def test_a_cancelled_reader_does_not_disturb_the_engine() -> None:
    async def scenario() -> None:
        engine = llm()
        result = engine.generate_async(prompt_of(50), streaming=True)
        with anyio.move_on_after(0.001) as scope:
            await result
        assert scope.cancelled_caught
        await until(10.0)
        assert await tokens_of(result) == expected(prompt_of(50), 32)

    run(scenario)
