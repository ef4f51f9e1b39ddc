"""The TensorRT-LLM double: prefill hands off, decode goes on, and what nobody collects ends."""

import asyncio
from dataclasses import replace

import anyio
import pytest

from slagate.workers.kv_transfer.transport import Blocks, Done, KvTransferError, KvTransport
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.request import RequestError, SamplingParams
from support.engine.sim_llm import (
    CONTEXT_ONLY,
    PROFILE,
    Pair,
    expected,
    llm,
    n_timers,
    prompt_of,
    tokens_of,
    until,
)


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


@pytest.mark.parametrize(("asked", "n_tokens"), [(1, 2), (2, 2), (3, 3)])
def test_t2_4_decode_counts_the_token_that_prefill_made_but_does_not_end_at_it(
    pair: Pair, asked: int, n_tokens: int
) -> None:
    """DISAGG-02: max_tokens bounds the whole output, with the first token, but one gives two."""

    async def scenario() -> None:
        prompt = prompt_of(50)
        result = pair.resume(prompt, await pair.hand_off(prompt), max_tokens=asked)
        assert await tokens_of(result) == expected(prompt, n_tokens)
        assert result.outputs[0].finish_reason == "length"
        # Nor is it a stop.
        stops = {"max_tokens": 3, "end_id": expected(prompt, 1)[0]}
        result = pair.resume(prompt, await pair.hand_off(prompt), **stops)
        assert await tokens_of(result) == expected(prompt, 3)
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


def test_each_handoff_expires_in_its_own_time(pair: Pair) -> None:
    async def scenario() -> None:
        start_s = asyncio.get_running_loop().time()
        for i in range(4):
            await until(start_s + 10.0 * i)
            await pair.hand_off(prompt_of(50, i))
        for n_expired in range(5):
            await until(start_s + 55.0 + 10.0 * n_expired)
            assert (pair.prefill.n_expired, pair.prefill.n_parked) == (n_expired, 4 - n_expired)

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


class SlowTransport:
    """A transport whose pulls give their outcome `delay_s` seconds later."""

    name = "SHM"

    def __init__(self, inner: KvTransport, delay_s: float) -> None:
        self._inner = inner
        self._delay_s = delay_s
        self.n_done = 0

    def pull(self, descriptor: bytes, done: Done) -> None:
        def deliver(outcome: Blocks | KvTransferError) -> None:
            self.n_done += 1
            done(outcome)

        loop = asyncio.get_running_loop()
        loop.call_later(self._delay_s, self._inner.pull, descriptor, deliver)

    def export(self, session_id: int, blocks: Blocks) -> bytes:
        return self._inner.export(session_id, blocks)

    def acks(self) -> list[int]:
        return self._inner.acks()

    def release(self, session_id: int) -> None:
        self._inner.release(session_id)

    def close(self) -> None:
        self._inner.close()

    def problem(self) -> str:
        return self._inner.problem()

    def counters(self) -> dict[str, int]:
        return self._inner.counters()


@pytest.mark.parametrize(("delay_s", "waits_for"), [(0.001, "time"), (0.5, "bytes")])
def test_decode_starts_when_the_bytes_are_there_and_their_time_is_over(
    pair: Pair, delay_s: float, waits_for: str
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        prompt = prompt_of(5000)
        params = await pair.hand_off(prompt)
        transfer_s = 5000 * PROFILE.kv_bytes_per_token / 50e9
        assert 0.001 < transfer_s < 0.5
        pair.decode = llm(transport=SlowTransport(pair.transports[1], delay_s))
        start_s = loop.time()
        result = pair.resume(prompt, params)
        await anext(result)
        due_s = transfer_s if waits_for == "time" else delay_s
        assert loop.time() - start_s == pytest.approx(due_s)
        assert await tokens_of(result) == expected(prompt, 32)
        await pair.blocks_come_back()

    run(scenario)


def test_others_decode_while_a_pull_waits_and_its_late_failure_is_its_own(pair: Pair) -> None:
    async def scenario() -> None:
        params = await pair.hand_off(prompt_of(50))
        pair.prefill.shutdown()
        pair.decode = llm(transport=SlowTransport(pair.transports[1], 5.0))
        bad = pair.resume(prompt_of(50), params)
        good = pair.decode.generate_async(prompt_of(64), SamplingParams(max_tokens=9))
        assert await tokens_of(good) == expected(prompt_of(64), 9)
        assert (pair.decode.n_running, pair.decode.used_blocks) == (1, 2)
        with pytest.raises(RequestError, match="released"):
            await bad
        assert asyncio.get_running_loop().time() >= 5.0
        assert (pair.decode.n_running, pair.decode.used_blocks, n_timers()) == (0, 0, 0)
        assert pair.decode.kv_transfer_failures == 1

    run(scenario)


def test_bytes_that_arrive_after_the_end_of_their_request_are_thrown_away(pair: Pair) -> None:
    async def scenario() -> None:
        prompt = prompt_of(50)
        params = await pair.hand_off(prompt)
        slow = SlowTransport(pair.transports[1], 1.0)
        pair.decode = llm(transport=slow)
        result = pair.resume(prompt, params)
        await until(asyncio.get_running_loop().time() + 0.5)
        assert pair.decode.inject_request_error(result.request_id, "bad weather")
        with pytest.raises(RequestError, match="bad weather"):
            await result
        assert pair.decode.used_blocks == 0
        await pair.blocks_come_back()
        assert slow.n_done == 1
        assert (pair.decode.kv_transfer_failures, pair.decode.used_blocks) == (0, 0)

    run(scenario)


def test_a_prompt_beyond_the_transfer_buffer_never_starts_and_stops_nobody_else(
    pair: Pair,
) -> None:
    """TensorRT-LLM hangs on it without an error when `max_tokens_in_buffer` is too small."""

    async def scenario() -> None:
        config = {"backend": "DEFAULT", "max_tokens_in_buffer": 64}
        pair.decode = llm(transport=pair.transports[1], cache_transceiver_config=config)
        prompts = prompt_of(65), prompt_of(64, 2)
        long, short = [await pair.hand_off(prompt) for prompt in prompts]
        stuck = pair.resume(prompts[0], long)
        assert await tokens_of(pair.resume(prompts[1], short)) == expected(prompts[1], 32)
        local = pair.decode.generate_async(prompt_of(65))
        assert await tokens_of(local) == expected(prompt_of(65), 32)
        with anyio.move_on_after(1000.0) as scope:
            await anext(stuck)
        assert scope.cancelled_caught
        assert (pair.decode.n_queued, pair.decode.used_blocks, n_timers()) == (1, 0, 0)
        stuck.abort()
        assert (pair.decode.n_queued, pair.decode.n_unsafe_aborts) == (0, 1)

    run(scenario)
