"""The TensorRT-LLM double: tokens, times, handoff, stopping, abort, errors, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from slagate.workers.kv_transfer import SharedMemoryTransport
from slagate.workers.profile import load_profile
from slagate.workers.sim_kv_cache import continuation
from slagate.workers.sim_llm import SimLLM
from slagate.workers.sim_request import (
    DisaggregatedParams,
    RequestError,
    RequestOutput,
    SamplingParams,
    SchedulingParams,
)
from support.virtual_loop import DeadlockError, VirtualLoop, run

MODEL = "m"
VOCAB = 5000
END = 4999
PROFILE = load_profile("llama-3.1-8b-h100").tp(1)
CONTEXT_ONLY = DisaggregatedParams(request_type="context_only")


def llm(**changed: Any) -> SimLLM:
    settings = {"profile": PROFILE, "vocab_size": VOCAB, "end_id": END, "kv_block_bytes": 64}
    return SimLLM(MODEL, **{**settings, **changed})


class Pair:
    """A prefill and a decode engine on one shared-memory root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.transports = [SharedMemoryTransport(root) for _ in range(2)]
        self.prefill = llm(transport=self.transports[0])
        self.decode = llm(transport=self.transports[1])

    async def hand_off(self, prompt: list[int], **sampling: Any) -> DisaggregatedParams:
        result = await self.prefill.generate_async(
            prompt, SamplingParams(**sampling), disaggregated_params=CONTEXT_ONLY
        )
        params = result.outputs[0].disaggregated_params
        assert params is not None
        return replace(params, request_type="generation_only")

    def resume(
        self, prompt: list[int], params: DisaggregatedParams, **sampling: Any
    ) -> RequestOutput:
        return self.decode.generate_async(
            prompt, SamplingParams(**sampling), streaming=True, disaggregated_params=params
        )

    async def blocks_come_back(self) -> None:
        while self.prefill.n_parked:
            await until(asyncio.get_running_loop().time() + 0.05)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    both = Pair(tmp_path)
    yield both
    for transport in both.transports:
        transport.close()


def prompt_of(n: int, first: int = 1) -> list[int]:
    return [(first * 7919 + i * 31) % VOCAB for i in range(n)]


def expected(prompt: list[int], n: int, salt: str = "") -> list[int]:
    return continuation(prompt, n, model=MODEL, block_tokens=32, vocab_size=VOCAB, cache_salt=salt)


async def until(time_s: float) -> None:
    """Wait for a point in virtual time."""
    loop = asyncio.get_running_loop()
    reached = loop.create_future()
    loop.call_at(time_s, reached.set_result, None)
    await reached


def virtual_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def n_timers() -> int:
    return virtual_loop().n_timers


async def tokens_of(result: RequestOutput) -> list[int]:
    await result.aresult()
    return result.outputs[0].token_ids


# --- tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_prompt", [1, 31, 32, 33, 64, 100])
def test_aggregated_disaggregated_and_resumed_runs_agree(pair: Pair, n_prompt: int) -> None:
    prompt = prompt_of(n_prompt)

    async def scenario() -> None:
        whole = await tokens_of(pair.decode.generate_async(prompt, SamplingParams(max_tokens=70)))
        assert whole == expected(prompt, 70)
        params = await pair.hand_off(prompt)
        result = pair.resume(prompt, params, max_tokens=70)
        assert await tokens_of(result) == whole
        assert result.cached_tokens == n_prompt
        for k in (1, 32, 69):
            resumed = pair.prefill.generate_async(
                prompt + whole[:k], SamplingParams(max_tokens=70 - k)
            )
            assert await tokens_of(resumed) == whole[k:]
        await pair.blocks_come_back()
        assert (pair.prefill.used_blocks, pair.decode.used_blocks, n_timers()) == (0, 0, 0)

    run(scenario)


def test_the_salt_reaches_the_tokens_and_keeps_caches_apart() -> None:
    prompt = prompt_of(100)

    async def scenario() -> None:
        engine = llm()
        for salt in ("", "a", "b"):
            result = engine.generate_async(prompt, cache_salt=salt)
            assert await tokens_of(result) == expected(prompt, 32, salt)
            assert result.cached_tokens == 0

    run(scenario)


def test_a_stream_yields_one_object_whose_diffs_add_up() -> None:
    async def scenario() -> None:
        result = llm().generate_async(prompt_of(40), SamplingParams(max_tokens=9), streaming=True)
        seen: list[int] = []
        n_yields = 0
        async for same in result:
            assert same is result
            assert same.finished == (same.outputs[0].finish_reason is not None)
            seen += same.outputs[0].token_ids_diff
            assert seen == same.outputs[0].token_ids
            n_yields += 1
        assert seen == expected(prompt_of(40), 9)
        assert n_yields == 9
        assert result.outputs[0].finish_reason == "length"

    run(scenario)


def test_a_late_reader_sees_a_change_only_at_its_next_yield() -> None:
    async def scenario() -> None:
        result = llm().generate_async(prompt_of(40), SamplingParams(max_tokens=9), streaming=True)
        await anext(result)
        await until(100.0)
        assert result.outputs[0].length == 1
        await anext(result)
        assert (result.outputs[0].length, len(result.outputs[0].token_ids_diff)) == (9, 8)
        with pytest.raises(StopAsyncIteration):
            await anext(result)

    run(scenario)


def test_without_streaming_there_is_one_yield() -> None:
    async def scenario() -> None:
        result = llm().generate_async(prompt_of(40), SamplingParams(max_tokens=9))
        assert [one.outputs[0].length async for one in result] == [9]

    run(scenario)


def test_prompts_may_be_a_dict_or_an_array() -> None:
    async def scenario() -> None:
        for inputs in ({"prompt_token_ids": [1, 2, 3]}, np.array([1, 2, 3], np.int32)):
            assert await tokens_of(llm().generate_async(inputs)) == expected([1, 2, 3], 32)

    run(scenario)


# --- time ------------------------------------------------------------------------------------------


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


def test_a_cached_prefix_is_not_computed_again() -> None:
    async def scenario() -> None:
        engine = llm()
        prompt = prompt_of(1024)
        await engine.generate_async(prompt, SamplingParams(max_tokens=1))
        start_s = asyncio.get_running_loop().time()
        result = await engine.generate_async(prompt, SamplingParams(max_tokens=1))
        # The last token is always computed, so the last full block is too.
        assert result.cached_tokens == 992
        elapsed_s = asyncio.get_running_loop().time() - start_s
        assert elapsed_s == pytest.approx(PROFILE.prefill_s(32, 992))

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
        assert (await engine.generate_async(turn)).cached_tokens == 128

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


# --- handoff ---------------------------------------------------------------------------------------


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


async def refused(pair: Pair, prompt: list[int], params: DisaggregatedParams) -> str:
    with pytest.raises(RequestError) as caught:
        await pair.resume(prompt, params)
    assert pair.decode.used_blocks == 0
    assert pair.decode.n_running == 0
    return str(caught.value)


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


def test_a_replayed_handoff_is_refused(pair: Pair) -> None:
    async def scenario() -> None:
        prompt = prompt_of(50)
        params = await pair.hand_off(prompt)
        await pair.resume(prompt, params)
        assert "already consumed or released" in await refused(pair, prompt, params)
        assert (pair.decode.kv_transfer_failures, pair.decode.kv_verify_failures) == (1, 0)
        await pair.blocks_come_back()

    run(scenario)


def test_a_handoff_of_another_prompt_is_refused_by_its_bytes(pair: Pair) -> None:
    async def scenario() -> None:
        params = await pair.hand_off(prompt_of(100))
        other = prompt_of(100)
        other[70] += 1
        message = await refused(pair, other, params)
        assert "2 of 4 blocks do not hold this prompt, first block 2" in message
        assert (pair.decode.kv_transfer_failures, pair.decode.kv_verify_failures) == (1, 1)
        await pair.blocks_come_back()

    run(scenario)


def test_bytes_changed_on_the_way_are_refused(pair: Pair) -> None:
    async def scenario() -> None:
        prompt = prompt_of(50)
        params = await pair.hand_off(prompt)
        (path,) = pair.root.rglob("*.kv")
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        assert "corrupted" in await refused(pair, prompt, params)
        assert (pair.decode.kv_transfer_failures, pair.decode.kv_verify_failures) == (1, 0)
        await pair.blocks_come_back()

    run(scenario)


def test_parts_of_two_handoffs_do_not_mix_and_the_right_one_still_works(pair: Pair) -> None:
    async def scenario() -> None:
        prompts = prompt_of(50), prompt_of(50, 2)
        a, b = [await pair.hand_off(prompt) for prompt in prompts]
        assert a.opaque_state is not None
        mixed = [
            (prompts[0], replace(a, opaque_state=b.opaque_state), "of session"),
            (prompts[0], replace(a, first_gen_tokens=b.first_gen_tokens), "first_gen_tokens"),
            (prompts[0], replace(a, first_gen_tokens=None), "first_gen_tokens"),
            (prompts[0], replace(a, opaque_state=a.opaque_state[:-1]), "truncated"),
            (prompts[0], replace(a, opaque_state=a.opaque_state[:9]), "truncated"),
            (prompts[0][:-1], a, "50 prompt tokens, not 49"),
        ]
        for prompt, params, message in mixed:
            assert message in await refused(pair, prompt, params)
        assert pair.decode.kv_transfer_failures == len(mixed)
        assert pair.decode.kv_verify_failures == 0
        for prompt, params in zip(prompts, (a, b), strict=True):
            assert await tokens_of(pair.resume(prompt, params)) == expected(prompt, 32)
        await pair.blocks_come_back()

    run(scenario)


def test_every_flipped_bit_of_the_opaque_state_is_refused(pair: Pair) -> None:
    async def scenario() -> None:
        prompt = prompt_of(50)
        params = await pair.hand_off(prompt)
        assert params.opaque_state is not None
        for i in range(len(params.opaque_state)):
            altered = bytearray(params.opaque_state)
            altered[i] ^= 1
            await refused(pair, prompt, replace(params, opaque_state=bytes(altered)))
        assert await tokens_of(pair.resume(prompt, params)) == expected(prompt, 32)
        await pair.blocks_come_back()

    run(scenario)


def test_workers_of_unequal_block_size_do_not_pair(pair: Pair) -> None:
    async def scenario() -> None:
        prompt = prompt_of(50)
        params = await pair.hand_off(prompt)
        other = llm(transport=pair.transports[1], tokens_per_block=64)
        with pytest.raises(RequestError, match="32 tokens per block, here 64"):
            await other.generate_async(prompt, disaggregated_params=params)
        pair.prefill.shutdown()

    run(scenario)


def test_a_first_token_that_this_model_would_not_give_is_refused(pair: Pair) -> None:
    async def scenario() -> None:
        prompt = prompt_of(50)
        params = await pair.hand_off(prompt)
        other = llm(transport=pair.transports[1], vocab_size=VOCAB - 1, end_id=1)
        with pytest.raises(RequestError, match="does not follow from the blocks"):
            await other.generate_async(prompt, disaggregated_params=params)
        pair.prefill.shutdown()

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
        assert "released" in await refused(pair, prompt, params)

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
        assert "released" in await refused(pair, prompt, params)

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


# --- stopping --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "n_kept", "reason", "names_stop"),
    [
        ({"stop_token_ids": True}, 4, "stop", True),
        ({"stop_token_ids": True, "include_stop_str_in_output": True}, 5, "stop", True),
        ({"end_id": True}, 5, "stop", False),
        ({"end_id": True, "stop_token_ids": True}, 5, "stop", False),
        ({"stop_token_ids": True, "ignore_eos": True}, 9, "length", False),
        ({"end_id": True, "ignore_eos": True}, 9, "length", False),
        ({"stop_token_ids": True, "min_tokens": 4}, 4, "stop", True),
        ({"stop_token_ids": True, "min_tokens": 5}, 9, "length", False),
        ({"max_tokens": 5, "stop_token_ids": True}, 4, "stop", True),
    ],
)
def test_stop_conditions(
    sampling: dict[str, Any],
    n_kept: int,
    reason: str,
    names_stop: bool,  # noqa: FBT001
) -> None:
    """The fifth token is the one that stops."""
    prompt = prompt_of(45)
    tokens = expected(prompt, 9)
    assert len(set(tokens)) == 9
    stop = tokens[4]
    real = {"max_tokens": 9, **sampling}
    if "end_id" in real:
        real["end_id"] = stop
    if "stop_token_ids" in real:
        real["stop_token_ids"] = [stop]

    async def scenario() -> None:
        engine = llm()
        for streaming in (False, True):
            result = await engine.generate_async(
                prompt, SamplingParams(**real), streaming=streaming
            )
            output = result.outputs[0]
            assert output.token_ids == tokens[:n_kept]
            assert output.finish_reason == reason
            assert output.stop_reason == (stop if names_stop else None)
        assert engine.used_blocks == 0

    run(scenario)


def test_max_tokens_is_cut_to_the_context_window() -> None:
    async def scenario() -> None:
        for asked in (None, 1000):
            result = llm(max_seq_len=50).generate_async(
                prompt_of(40), SamplingParams(max_tokens=asked)
            )
            assert await tokens_of(result) == expected(prompt_of(40), 10)

    run(scenario)


# --- abort -----------------------------------------------------------------------------------------


Stage = Callable[[Pair], Awaitable[RequestOutput]]


async def queued(pair: Pair) -> RequestOutput:
    return pair.decode.generate_async(prompt_of(50), streaming=True)


async def mid_prefill(pair: Pair) -> RequestOutput:
    result = pair.decode.generate_async(prompt_of(9000), streaming=True)
    await until(PROFILE.prefill_s(8192, 0) + 0.001)
    assert not result.outputs[0].token_ids
    return result


async def mid_transfer(pair: Pair) -> RequestOutput:
    result = pair.resume(prompt_of(5000), await pair.hand_off(prompt_of(5000)))
    transfer_s = 5000 * PROFILE.kv_bytes_per_token / 50e9
    await until(asyncio.get_running_loop().time() + transfer_s / 2)
    assert pair.decode.used_blocks == 157
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


@pytest.mark.parametrize(
    "stage", [queued, mid_prefill, mid_transfer, mid_decode, mid_remote_decode]
)
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
        pair.prefill.shutdown()
        assert n_timers() == 0
        assert await tokens_of(pair.decode.generate_async(prompt_of(7))) == expected(
            prompt_of(7), 32
        )

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


def test_abort_of_a_running_request_lets_a_waiting_one_in() -> None:
    async def scenario() -> None:
        engine = llm(max_batch_size=1)
        first = engine.generate_async(prompt_of(50), SamplingParams(max_tokens=1000))
        second = engine.generate_async(prompt_of(50, 2))
        await until(0.001)
        first.abort()
        assert await tokens_of(second) == expected(prompt_of(50, 2), 32)

    run(scenario)


def test_abort_of_the_one_being_prefilled_lets_the_next_one_go_on() -> None:
    """Both are admitted, but the first takes the whole token budget of the iteration."""

    async def scenario() -> None:
        engine = llm(max_num_tokens=512)
        first = engine.generate_async(prompt_of(1000))
        second = engine.generate_async(prompt_of(1000, 2))
        await until(0.001)
        first.abort()
        assert await tokens_of(second) == expected(prompt_of(1000, 2), 32)

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


# --- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inputs": "text"}, ValueError, "tokenizer"),
        ({"inputs": {"prompt": "text"}}, ValueError, "tokenizer"),
        ({"inputs": b"\1\2\3\4"}, TypeError, "not bytes"),
        ({"inputs": None}, TypeError, "not NoneType"),
        ({"inputs": []}, ValueError, "empty"),
        ({"inputs": [1, VOCAB]}, ValueError, "outside the vocabulary"),
        ({"inputs": [-1]}, ValueError, "token ids"),
        ({"sampling_params": {"max_tokens": 5}}, TypeError, "SamplingParams"),
        ({"scheduling_params": 3}, TypeError, "SchedulingParams"),
        ({"priority": 1.5}, ValueError, "priority"),
        ({"sampling_params": SamplingParams(stop="x")}, ValueError, "stop strings"),
        ({"sampling_params": SamplingParams(n=2, top_k=5)}, NotImplementedError, "n is not"),
        ({"sampling_params": SamplingParams(logprobs=1)}, NotImplementedError, "logprobs"),
        ({"lora_request": object()}, NotImplementedError, "lora"),
        ({"disaggregated_params": DisaggregatedParams()}, ValueError, "request_type"),
        (
            {"disaggregated_params": DisaggregatedParams(request_type="generation_only")},
            ValueError,
            "ctx_request_id",
        ),
        (
            {
                "disaggregated_params": DisaggregatedParams(
                    request_type="GENERATION_ONLY", disagg_request_id=1
                )
            },
            ValueError,
            "opaque_state",
        ),
    ],
)
def test_bad_arguments_are_refused_at_submit(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    async def scenario() -> None:
        with pytest.raises(error, match=message):
            llm().generate_async(**{"inputs": [1], **arguments})

    run(scenario)


def test_an_end_id_must_come_from_somewhere() -> None:
    async def scenario() -> None:
        engine = llm(end_id=None)
        with pytest.raises(ValueError, match="end_id"):
            engine.generate_async([1])
        await engine.generate_async(
            [1], SamplingParams(end_id=3), scheduling_params=SchedulingParams()
        )

    run(scenario)


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "message"),
    [(100, 1, "does not fit max_seq_len"), (10, 0, "max_tokens"), (10, -1, "max_tokens")],
)
def test_what_the_executor_refuses_is_raised_while_iterating(
    n_prompt: int, max_tokens: int, message: str
) -> None:
    async def scenario() -> None:
        engine = llm(max_seq_len=100)
        result = engine.generate_async(prompt_of(n_prompt), SamplingParams(max_tokens=max_tokens))
        with pytest.raises(RequestError, match=message):
            await result
        result.abort()
        assert engine._check_health()

    run(scenario)


def test_a_request_that_can_never_fit_is_refused() -> None:
    async def scenario() -> None:
        engine = llm(kv_cache_blocks=3)
        assert len(await tokens_of(engine.generate_async([1], SamplingParams(max_tokens=96)))) == 96
        with pytest.raises(RequestError, match="never fit a KV cache of 96 tokens"):
            await engine.generate_async([1], SamplingParams(max_tokens=97))

    run(scenario)


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


@pytest.mark.parametrize(
    "argument", [{"max_batch_size": 0}, {"kv_block_bytes": 17}, {"time_scale": -1.0}]
)
def test_a_bad_engine_argument_is_named(argument: dict[str, Any]) -> None:
    (name,) = argument
    with pytest.raises(ValueError, match=name):
        llm(**argument)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (SamplingParams, {"n": 2, "best_of": 1}, "best_of"),
        (SamplingParams, {"n": 2}, "greedy"),
        (SamplingParams, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (DisaggregatedParams, {"request_type": "both"}, "request_type"),
    ],
)
def test_parameters_check_themselves(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


# --- stats -----------------------------------------------------------------------------------------


def test_stats_are_empty_before_the_first_request_and_then_one_dict_an_iteration() -> None:
    async def scenario() -> None:
        engine = llm(kv_cache_blocks=100)
        assert [row async for row in engine.get_stats_async(timeout=5)] == []
        assert asyncio.get_running_loop().time() == 0
        first = engine.generate_async(prompt_of(64), SamplingParams(max_tokens=3), streaming=True)
        await anext(first)
        (row,) = [row async for row in engine.get_stats_async(timeout=0)]
        assert (row["iter"], row["numActiveRequests"], row["numQueuedRequests"]) == (1, 1, 0)
        assert row["iterLatencyMS"] == pytest.approx(PROFILE.prefill_s(64, 0) * 1000)
        assert row["kvCacheStats"]["usedNumBlocks"] == 2
        assert row["kvCacheStats"]["freeNumBlocks"] == 98
        batch = row["inflightBatchingStats"]
        assert (batch["numContextRequests"], batch["numCtxTokens"]) == (1, 64)
        await first
        rows = [row async for row in engine.get_stats_async(timeout=0.01)]
        assert [row["iter"] for row in rows] == [2, 3]
        assert rows[-1]["numActiveRequests"] == rows[-1]["kvCacheStats"]["usedNumBlocks"] == 0
        assert rows[-1]["numCompletedRequests"] == 1

    run(scenario)


def test_a_stats_reader_waits_for_the_next_iteration() -> None:
    async def scenario() -> None:
        engine = llm()
        result = engine.generate_async(prompt_of(64), SamplingParams(max_tokens=1))
        row = await anext(engine.get_stats_async(timeout=2))
        assert row["iter"] == 1
        await result
        assert n_timers() == 0

    run(scenario)


def test_capacity_comes_from_the_profile_unless_given() -> None:
    assert llm(kv_cache_blocks=7).get_kv_cache_capacity() == {
        "maxNumBlocks": 7,
        "tokensPerBlock": 32,
        "maxNumTokens": 224,
    }
    assert llm().get_kv_cache_capacity()["maxNumBlocks"] == PROFILE.kv_capacity_tokens // 32


# --- the virtual loop itself -----------------------------------------------------------------------


def test_a_lost_wake_up_is_an_error_not_a_hang() -> None:
    async def scenario() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError, match="no ready task and no timer"):
        run(scenario)


def test_an_hour_passes_at_once_and_a_failing_callback_fails_the_run() -> None:
    async def scenario() -> None:
        asyncio.get_running_loop().call_at(1.0, lambda: 1 // 0)
        await until(3600.0)
        assert asyncio.get_running_loop().time() == pytest.approx(3600.0)

    with pytest.raises(ZeroDivisionError):
        run(scenario)
