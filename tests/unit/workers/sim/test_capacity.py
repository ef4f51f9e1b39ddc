"""The TensorRT-LLM double: room in the batch and in the KV cache, and the reuse of blocks."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from slagate.workers.kv_transfer.shm import SharedMemoryTransport
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.request import RequestError, SamplingParams
from support.engine.sim_llm import CONTEXT_ONLY, PROFILE, llm, prompt_of, tokens_of, until


def test_requests_beyond_max_batch_size_wait_in_order() -> None:
    async def scenario() -> None:
        engine = llm(max_batch_size=2)
        results = [
            engine.generate_async(prompt_of(40, i), SamplingParams(max_tokens=n), streaming=True)
            for i, n in enumerate((5, 9, 9, 5))
        ]
        await anext(results[0])
        assert (engine.n_running, engine.n_queued) == (2, 2)
        await anext(results[2])
        assert (engine.n_running, engine.n_queued) == (2, 1)
        for result in results:
            await result
        assert (engine.n_running, engine.n_queued, engine.used_blocks) == (0, 0, 0)

    run(scenario)


def test_a_request_that_does_not_fit_the_cache_waits_for_room() -> None:
    """Room for all it may generate is reserved, so nothing that runs is ever evicted."""

    async def scenario() -> None:
        engine = llm(kv_cache_blocks=4)
        first = engine.generate_async(prompt_of(32, 1), SamplingParams(max_tokens=65))
        second = engine.generate_async(prompt_of(33, 2), SamplingParams(max_tokens=1))
        third = engine.generate_async(prompt_of(32, 3), SamplingParams(max_tokens=1))
        await until(0.001)
        assert (engine.n_running, engine.n_queued, engine.used_blocks) == (1, 2, 1)
        for result in (first, second, third):
            await result
        assert engine.used_blocks == 0

    run(scenario)


def test_a_request_that_can_never_fit_is_refused() -> None:
    async def scenario() -> None:
        engine = llm(kv_cache_blocks=3)
        assert len(await tokens_of(engine.generate_async([1], SamplingParams(max_tokens=96)))) == 96
        with pytest.raises(RequestError, match="never fit a KV cache of 96 tokens"):
            await engine.generate_async([1], SamplingParams(max_tokens=97))

    run(scenario)


def test_capacity_comes_from_the_profile_unless_given() -> None:
    assert llm(kv_cache_blocks=7).get_kv_cache_capacity() == {
        "maxNumBlocks": 7,
        "tokensPerBlock": 32,
        "maxNumTokens": 224,
        "kvEventsEnabled": False,
    }
    assert llm().get_kv_cache_capacity()["maxNumBlocks"] == PROFILE.kv_capacity_tokens // 32


def test_a_cached_prefix_is_not_computed_again() -> None:
    async def scenario() -> None:
        engine = llm()
        prompt = prompt_of(1024)
        await engine.generate_async(prompt, SamplingParams(max_tokens=1))
        start_s = asyncio.get_running_loop().time()
        result = await engine.generate_async(prompt, SamplingParams(max_tokens=1))
        # The last token is always computed; its block is copied in part.
        assert result.cached_tokens == 1023
        elapsed_s = asyncio.get_running_loop().time() - start_s
        assert elapsed_s == pytest.approx(PROFILE.prefill_s(1, 1023))

    run(scenario)


def test_a_prompt_of_n_tokens_is_reusable_up_to_n_minus_1_while_it_runs() -> None:
    async def scenario() -> None:
        engine = llm()
        prompt, longer = prompt_of(64), prompt_of(80)
        first = engine.generate_async(prompt, SamplingParams(max_tokens=20), streaming=True)
        await anext(first)
        second = await engine.generate_async(longer, SamplingParams(max_tokens=1))
        assert second.cached_tokens == 32
        await first

    run(scenario)


def test_generated_blocks_are_reused_by_the_next_turn() -> None:
    async def scenario() -> None:
        engine = llm()
        prompt = prompt_of(60)
        first = await engine.generate_async(prompt, SamplingParams(max_tokens=70))
        turn = prompt + first.outputs[0].token_ids + prompt_of(10, 3)
        # The newest token is never in the cache.
        assert (await engine.generate_async(turn)).cached_tokens == 129

    run(scenario)


def test_blocks_are_free_soon_after_the_pull_and_let_waiting_requests_in(tmp_path: Path) -> None:
    async def scenario() -> None:
        transports = [SharedMemoryTransport(tmp_path) for _ in range(2)]
        prefill = llm(transport=transports[0], kv_cache_blocks=2)
        first = await prefill.generate_async(prompt_of(50), disaggregated_params=CONTEXT_ONLY)
        second = prefill.generate_async(prompt_of(50, 2), disaggregated_params=CONTEXT_ONLY)
        await until(1.0)
        assert prefill.n_queued == 1
        params = first.disaggregated_params
        assert params is not None
        await llm(transport=transports[1]).generate_async(
            prompt_of(50), disaggregated_params=replace(params, request_type="generation_only")
        )
        await second
        prefill.shutdown()
        for transport in transports:
            transport.close()

    run(scenario)
