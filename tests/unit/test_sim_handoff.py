"""The TensorRT-LLM double: prefill hands off, decode goes on, and what nobody collects ends."""

import asyncio
from dataclasses import replace

import anyio
import pytest

from slagate.workers.sim_request import DisaggregatedParams, RequestError, SamplingParams
from support.sim_llm import CONTEXT_ONLY, Pair, expected, llm, n_timers, prompt_of, tokens_of, until
from support.virtual_loop import run


def test_context_only_gives_one_token_and_the_handoff(pair: Pair) -> None:
    async def scenario() -> None:
        prompt = prompt_of(100)
        result = pair.prefill.generate_async(
            prompt, SamplingParams(max_tokens=500), disaggregated_params=CONTEXT_ONLY
        )
        assert [one.outputs[0].finish_reason async for one in result] == ["length"]
        params = result.outputs[0].disaggregated_params
        assert params is not None
        assert result.disaggregated_params is params
        assert params.request_type == "context_only"
        assert params.first_gen_tokens == result.outputs[0].token_ids == expected(prompt, 1)
        assert params.ctx_request_id == result.request_id < 1 << 40
        assert params.disagg_request_id is not None
        assert 1 << 40 <= params.disagg_request_id < 1 << 63
        assert isinstance(params.opaque_state, bytes)
        assert CONTEXT_ONLY.ctx_request_id is None
        assert (pair.prefill.n_parked, pair.prefill.used_blocks) == (1, 4)
        pair.prefill.shutdown()

    run(scenario)


def test_global_ids_are_distinct_and_a_given_one_is_kept(pair: Pair) -> None:
    async def scenario() -> None:
        ids = [(await pair.hand_off(prompt_of(8, i))).disagg_request_id for i in range(5)]
        assert len(set(ids)) == 5
        given = replace(CONTEXT_ONLY, disagg_request_id=1 << 50)
        result = await pair.prefill.generate_async(prompt_of(8), disaggregated_params=given)
        assert result.disaggregated_params is not None
        assert result.disaggregated_params.disagg_request_id == 1 << 50
        pair.prefill.shutdown()

    run(scenario)


def test_a_first_token_that_ends_the_request_leaves_no_handoff(pair: Pair) -> None:
    async def scenario() -> None:
        prompt = prompt_of(50)
        (first,) = expected(prompt, 1)
        for stop in ({"end_id": first}, {"stop_token_ids": [first]}):
            params = await pair.hand_off(prompt, **stop)
            assert params.ctx_request_id is None
            assert params.opaque_state is None
        assert (pair.prefill.n_parked, pair.prefill.used_blocks) == (0, 0)
        for go_on in ({"ignore_eos": True}, {"min_tokens": 1}):
            params = await pair.hand_off(prompt, end_id=first, **go_on)
            assert params.first_gen_tokens == [first]
        pair.prefill.shutdown()

    run(scenario)


@pytest.mark.parametrize("n_tokens", [1, 2])
def test_decode_counts_the_token_that_prefill_made(pair: Pair, n_tokens: int) -> None:
    """DISAGG-02: max_tokens bounds the whole output, the first token included."""

    async def scenario() -> None:
        prompt = prompt_of(50)
        result = pair.resume(prompt, await pair.hand_off(prompt), max_tokens=n_tokens)
        assert await tokens_of(result) == expected(prompt, n_tokens)
        assert result.outputs[0].finish_reason == "length"
        await pair.blocks_come_back()

    run(scenario)


def test_an_uncollected_handoff_expires(pair: Pair) -> None:
    """DISAGG-09: its clock starts when it is parked."""

    async def scenario() -> None:
        prompt = prompt_of(50)
        params = await pair.hand_off(prompt)
        parked_s = asyncio.get_running_loop().time()
        await until(parked_s + 59.9)
        assert (pair.prefill.n_parked, pair.prefill.used_blocks) == (1, 2)
        await until(parked_s + 60.1)
        assert (pair.prefill.n_parked, pair.prefill.used_blocks) == (0, 0)
        assert (pair.prefill.n_expired, n_timers()) == (1, 0)
        assert "released" in await pair.refused(prompt, params)

    run(scenario)


def test_a_parked_session_can_be_released_once(pair: Pair) -> None:
    async def scenario() -> None:
        prompt = prompt_of(50)
        params = await pair.hand_off(prompt)
        assert params.ctx_request_id is not None
        assert not pair.prefill.release_session(params.ctx_request_id + 1)
        assert pair.prefill.release_session(params.ctx_request_id)
        assert not pair.prefill.release_session(params.ctx_request_id)
        assert (pair.prefill.used_blocks, n_timers()) == (0, 0)
        assert "released" in await pair.refused(prompt, params)

    run(scenario)


def test_an_engine_without_transceiver_fails_disaggregated_requests_while_iterating() -> None:
    async def scenario() -> None:
        decode = DisaggregatedParams(
            request_type="generation_only", ctx_request_id=2, opaque_state=b"x"
        )
        for params in (CONTEXT_ONLY, decode):
            result = llm().generate_async(prompt_of(8), disaggregated_params=params)
            with pytest.raises(RequestError, match="cache_transceiver_config"):
                await result
        local = DisaggregatedParams(request_type="context_and_generation")
        result = llm().generate_async(prompt_of(8), disaggregated_params=local)
        assert await tokens_of(result) == expected(prompt_of(8), 32)

    run(scenario)


def test_an_engine_knows_when_the_last_of_its_handoffs_was_collected(pair: Pair) -> None:
    async def scenario() -> None:
        await pair.prefill.handoffs_collected()
        prompts = [prompt_of(40, first) for first in (1, 2)]
        first, second = [await pair.hand_off(prompt) for prompt in prompts]
        collected = anyio.Event()

        async def wait() -> None:
            await pair.prefill.handoffs_collected()
            collected.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await tokens_of(pair.resume(prompts[0], first, max_tokens=2))
            await until(asyncio.get_running_loop().time() + 1.0)
            assert (pair.prefill.n_parked, collected.is_set()) == (1, False)
            assert second.ctx_request_id is not None
            assert pair.prefill.release_session(second.ctx_request_id)
            await collected.wait()
        assert pair.prefill.n_parked == 0

    run(scenario)
