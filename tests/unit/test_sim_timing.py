"""The TensorRT-LLM double: when things happen, alone and batched, against its profile."""

import asyncio

import pytest

from slagate.workers.sim_request import RequestError, SamplingParams
from support.sim_llm import (
    PROFILE,
    Pair,
    expected,
    llm,
    n_timers,
    prompt_of,
    tokens_of,
    virtual_loop,
)
from support.virtual_loop import run


def test_a_lone_request_takes_the_sum_of_its_profile_times() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        result = llm().generate_async(
            prompt_of(3000), SamplingParams(max_tokens=50), streaming=True
        )
        due_s = PROFILE.prefill_s(3000, 0)
        async for one in result:
            assert loop.time() == pytest.approx(due_s, rel=1e-9)
            due_s += PROFILE.itl_s(1, 3000 + one.outputs[0].length - 1)
        assert result.outputs[0].length == 50
        assert n_timers() == 0

    run(scenario)


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    async def scenario() -> None:
        engine = llm(max_num_tokens=1024)
        await engine.generate_async(prompt_of(2500), SamplingParams(max_tokens=1))
        due_s = sum(PROFILE.prefill_s(n, c) for n, c in ((1024, 0), (1024, 1024), (452, 2048)))
        assert asyncio.get_running_loop().time() == pytest.approx(due_s)

    run(scenario)


def test_a_decoding_request_is_slowed_by_prefill_chunks_that_leave_it_its_token() -> None:
    async def scenario() -> None:
        engine = llm(max_num_tokens=1000)
        first = engine.generate_async(prompt_of(64), SamplingParams(max_tokens=4), streaming=True)
        await anext(first)
        start_s = asyncio.get_running_loop().time()
        second = engine.generate_async(prompt_of(1500, 2), SamplingParams(max_tokens=1))
        # The iteration that is running cannot take it in any more.
        await anext(first)
        due_s = start_s + PROFILE.itl_s(1, 64)
        assert asyncio.get_running_loop().time() == pytest.approx(due_s)
        for context, new, cached in ((65, 999, 0), (66, 501, 999)):
            await anext(first)
            due_s += PROFILE.itl_s(1, context) + PROFILE.prefill_s(new, cached)
            assert asyncio.get_running_loop().time() == pytest.approx(due_s)
        await second

    run(scenario)


def test_time_scale_and_transfer_time_are_applied(pair: Pair) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        prompt = prompt_of(5000)
        params = await pair.hand_off(prompt)
        start_s = loop.time()
        assert start_s == pytest.approx(PROFILE.prefill_s(5000, 0))
        slow = llm(transport=pair.transports[1], time_scale=2.0, transfer_bytes_per_s=1e9)
        result = slow.generate_async(
            prompt, SamplingParams(max_tokens=2), streaming=True, disaggregated_params=params
        )
        await anext(result)
        moved_s = start_s + 2 * 5000 * PROFILE.kv_bytes_per_token / 1e9
        assert loop.time() == pytest.approx(moved_s)
        await anext(result)
        assert loop.time() == pytest.approx(moved_s + 2 * PROFILE.itl_s(1, 5000))

    run(scenario)


@pytest.mark.parametrize(("stall_s", "catches_up"), [(0.02, True), (1.0, False)])
def test_a_short_stall_of_the_loop_is_made_up_and_a_long_one_is_not(
    stall_s: float,
    catches_up: bool,  # noqa: FBT001
) -> None:
    async def scenario() -> None:
        result = llm().generate_async(prompt_of(64), SamplingParams(max_tokens=60), streaming=True)
        await anext(result)
        virtual_loop().stall(stall_s)
        due_s = PROFILE.prefill_s(64, 0) + sum(PROFILE.itl_s(1, 64 + i) for i in range(59))
        await result
        delay_s = asyncio.get_running_loop().time() - due_s
        if catches_up:
            assert delay_s == pytest.approx(0.0, abs=1e-9)
        else:
            assert delay_s == pytest.approx(stall_s - PROFILE.itl_s(1, 64))

    run(scenario)


def test_a_refused_handoff_does_not_change_the_pace_of_others(pair: Pair) -> None:
    async def scenario() -> None:
        params = await pair.hand_off(prompt_of(50))
        pair.prefill.shutdown()
        start_s = asyncio.get_running_loop().time()
        bad = pair.resume(prompt_of(50), params)
        good = pair.decode.generate_async(prompt_of(64), SamplingParams(max_tokens=9))
        with pytest.raises(RequestError, match="released"):
            await bad
        assert await tokens_of(good) == expected(prompt_of(64), 9)
        due_s = PROFILE.prefill_s(64, 0) + sum(PROFILE.itl_s(1, 64 + i) for i in range(8))
        assert asyncio.get_running_loop().time() - start_s == pytest.approx(due_s)

    run(scenario)
