"""The TensorRT-LLM double: when things happen, alone and batched, against its profile."""

import asyncio

import anyio
import pytest

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.request import RequestError, SamplingParams
from slagate.workers.sim.timing import EngineTiming, PrefillChunk
from support.engine.sim_llm import (
    PROFILE,
    Pair,
    expected,
    llm,
    n_timers,
    prompt_of,
    tokens_of,
    virtual_loop,
)


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


@pytest.mark.parametrize("max_num_tokens", [33, 1024, 2499, 2500, 8192])
def test_the_chunks_of_a_lone_prompt_add_up_to_its_whole(max_num_tokens: int) -> None:
    async def scenario() -> None:
        engine = llm(max_num_tokens=max_num_tokens)
        for n_prompt, cached in ((2500, 0), (2000, 1600)):
            start_s = asyncio.get_running_loop().time()
            prompt = prompt_of(1600, 2)[:cached] + prompt_of(n_prompt - cached, n_prompt)
            result = await engine.generate_async(prompt, SamplingParams(max_tokens=1))
            assert result.cached_tokens == cached
            elapsed_s = asyncio.get_running_loop().time() - start_s
            assert elapsed_s == pytest.approx(PROFILE.prefill_s(n_prompt - cached, cached))
            await engine.generate_async(prompt_of(1601, 2), SamplingParams(max_tokens=1))

    run(scenario)


def test_chunks_of_several_requests_are_averaged_by_new_tokens() -> None:
    chunks = [PrefillChunk(300, 0, 2000), PrefillChunk(100, 4000, 0)]
    seconds = EngineTiming(PROFILE).iteration_s(chunks, batch_size=0, context_tokens=0.0)
    due_s = PROFILE.prefill_s(1400, 1500) - PROFILE.prefill_s(1000, 1500)
    assert seconds == pytest.approx(due_s)


def test_without_chunked_prefill_a_prompt_runs_whole_and_nobody_overtakes_it() -> None:
    async def scenario() -> None:
        engine = llm(max_num_tokens=1000, enable_chunked_prefill=False)
        ends_s = {}

        async def measure(n_prompt: int) -> None:
            sampling = SamplingParams(max_tokens=1)
            await engine.generate_async(prompt_of(n_prompt, n_prompt), sampling)
            ends_s[n_prompt] = asyncio.get_running_loop().time()

        async with anyio.create_task_group() as tasks:
            for n_prompt in (600, 601, 300):
                tasks.start_soon(measure, n_prompt)
        first_s = PROFILE.prefill_s(600, 0)
        second_s = first_s + PROFILE.prefill_s(901, 0)
        assert ends_s == pytest.approx({600: first_s, 601: second_s, 300: second_s})

    run(scenario)


def test_a_whole_prompt_waits_until_the_decoding_requests_leave_it_room() -> None:
    async def scenario() -> None:
        engine = llm(max_num_tokens=100, enable_chunked_prefill=False)
        first = engine.generate_async(prompt_of(50), SamplingParams(max_tokens=5), streaming=True)
        await anext(first)
        second = engine.generate_async(prompt_of(100, 2), SamplingParams(max_tokens=1))
        await second
        assert first.outputs[0].length == 1
        await anext(first)
        assert first.finished
        decode_s = sum(PROFILE.itl_s(1, 50 + i) for i in range(4))
        due_s = PROFILE.prefill_s(50, 0) + decode_s + PROFILE.prefill_s(100, 0)
        assert asyncio.get_running_loop().time() == pytest.approx(due_s)

    run(scenario)


def test_blocks_that_come_back_from_the_host_take_the_time_of_the_link() -> None:
    async def scenario() -> None:
        host_bytes = 64 * 32 * PROFILE.kv_bytes_per_token
        engine = llm(kv_cache_blocks=34, kv_cache_config={"host_cache_size": host_bytes})
        sampling = SamplingParams(max_tokens=1)
        await engine.generate_async(prompt_of(1025), sampling)
        await engine.generate_async(prompt_of(1025, 2), sampling)
        start_s = asyncio.get_running_loop().time()
        result = await engine.generate_async([*prompt_of(1024), 1], sampling)
        assert result.cached_tokens == 1024
        (rank,) = engine._ranks
        assert rank.cache.n_onboarded_blocks >= 31
        moved_tokens = rank.cache.n_onboarded_blocks * 32
        due_s = PROFILE.prefill_s(1, 1024) + moved_tokens * PROFILE.kv_bytes_per_token / 25e9
        assert asyncio.get_running_loop().time() - start_s == pytest.approx(due_s)

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
        for context, before, after in ((65, 0, 999), (66, 999, 1500)):
            await anext(first)
            due_s += PROFILE.itl_s(1, context)
            due_s += PROFILE.prefill_s(after, 0) - PROFILE.prefill_s(before, 0)
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
