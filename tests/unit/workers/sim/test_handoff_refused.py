"""The TensorRT-LLM double: handoffs that do not fit the request, the worker or their own bytes."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slagate.workers.runtime.cooperative import Slices
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.kv_cache.blocks import block_states, seed_state, token_bytes
from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.request import DisaggregatedParams, RequestError
from support.engine.sim_llm import MODEL, VOCAB, Pair, expected, llm, prompt_of, tokens_of


def test_a_replayed_handoff_is_refused(pair: Pair) -> None:
    async def scenario() -> None:
        prompt = prompt_of(50)
        params = await pair.hand_off(prompt)
        await pair.resume(prompt, params)
        assert "already consumed or released" in await pair.refused(prompt, params)
        assert (pair.decode.kv_transfer_failures, pair.decode.kv_verify_failures) == (1, 0)
        await pair.blocks_come_back()

    run(scenario)


def test_a_handoff_of_another_prompt_is_refused_before_its_blocks_are_used_up(pair: Pair) -> None:
    async def scenario() -> None:
        prompt = prompt_of(100)
        params = await pair.hand_off(prompt)
        for position in (0, 70, 99):
            other = prompt_of(100)
            other[position] += 1
            assert "it is of another prompt" in await pair.refused(other, params)
        assert (pair.decode.kv_transfer_failures, pair.decode.kv_verify_failures) == (3, 0)
        assert pair.prefill.n_parked == 1
        assert await tokens_of(pair.resume(prompt, params)) == expected(prompt, 32)
        await pair.blocks_come_back()

    run(scenario)


def test_a_handoff_of_another_cache_salt_is_refused(pair: Pair) -> None:
    async def scenario() -> None:
        prompt = prompt_of(100)
        params = await pair.hand_off(prompt)
        salted = pair.decode.generate_async(
            prompt, disaggregated_params=params, cache_salt="another"
        )
        with pytest.raises(RequestError, match="another prompt, model or cache salt"):
            await salted
        assert await tokens_of(pair.resume(prompt, params)) == expected(prompt, 32)
        await pair.blocks_come_back()

    run(scenario)


def passed_off(params: DisaggregatedParams, prompt: list[int], other: list[int]) -> Any:
    """The handoff of a prompt that says it is of another one."""
    assert params.opaque_state is not None
    of, wanted = (
        block_states(token_bytes(tokens), seed_state(MODEL), 32)[-1] for tokens in (prompt, other)
    )
    assert params.opaque_state.count(of) == 1
    return replace(params, opaque_state=params.opaque_state.replace(of, wanted))


def test_a_handoff_that_lies_about_its_prompt_is_refused_by_its_bytes(pair: Pair) -> None:
    async def scenario() -> None:
        other = prompt_of(100)
        other[70] += 1
        params = passed_off(await pair.hand_off(prompt_of(100)), prompt_of(100), other)
        message = await pair.refused(other, params)
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
        assert "corrupted" in await pair.refused(prompt, params)
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
            (prompts[0], replace(a, opaque_state=b""), "has no bytes"),
            (prompts[0], replace(a, opaque_state=None), "has no bytes"),
            (prompts[0][:-1], a, "50 prompt tokens, not 49"),
        ]
        for prompt, params, message in mixed:
            assert message in await pair.refused(prompt, params)
        assert pair.decode.kv_transfer_failures == len(mixed)
        assert pair.decode.kv_verify_failures == 0
        for prompt, params in zip(prompts, (a, b), strict=True):
            assert await tokens_of(pair.resume(prompt, params)) == expected(prompt, 32)
        await pair.blocks_come_back()

    run(scenario)


def test_every_flipped_bit_of_the_opaque_state_is_refused(pair: Pair) -> None:
    """Behind the four bytes by which it is recognised, without which nobody reads it."""

    async def scenario() -> None:
        prompt = prompt_of(50)
        params = await pair.hand_off(prompt)
        assert params.opaque_state is not None
        for i in range(4, len(params.opaque_state)):
            altered = bytearray(params.opaque_state)
            altered[i] ^= 1
            await pair.refused(prompt, replace(params, opaque_state=bytes(altered)))
        assert await tokens_of(pair.resume(prompt, params)) == expected(prompt, 32)
        await pair.blocks_come_back()

    run(scenario)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens_per_block": 64}, "32 tokens per block, here 64"),
        ({"vocab_size": VOCAB - 1, "end_id": 1}, "does not follow from the blocks"),
    ],
)
def test_workers_of_unequal_block_size_or_vocabulary_do_not_pair(
    pair: Pair, changed: dict[str, Any], message: str
) -> None:
    """With another vocabulary, the same blocks give another first token."""

    async def scenario() -> None:
        prompt = prompt_of(50)
        params = await pair.hand_off(prompt)
        other = llm(transport=pair.transports[1], **changed)
        with pytest.raises(RequestError, match=message):
            await other.generate_async(prompt, disaggregated_params=params)
        pair.prefill.shutdown()

    run(scenario)


BIG = {"kv_block_bytes": 65_536}
"""16 blocks, 512 tokens, make a slice."""


def check_of(engine: SimLLM) -> Slices:
    pulls = engine._engine.pulls
    assert pulls is not None
    return pulls._slices


async def turn() -> None:
    reached = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(reached.set_result, None)
    await reached


@pytest.mark.parametrize(("position", "message"), [(-1, "1 of 63"), (1000, "32 of 63")])
def test_a_wrong_block_is_found_in_a_later_slice_of_the_check(
    tmp_path: Path, position: int, message: str
) -> None:
    async def scenario() -> None:
        pair = Pair(tmp_path, **BIG)
        params = await pair.hand_off(prompt_of(2000))
        other = prompt_of(2000)
        other[position] += 1
        first = 62 if position == -1 else 31
        refused = await pair.refused(other, passed_off(params, prompt_of(2000), other))
        assert f"{message} blocks do not hold this prompt, first block {first}" in refused
        assert pair.decode.kv_verify_failures == 1
        await pair.blocks_come_back()

    run(scenario)


def test_others_run_between_the_slices_of_a_check_and_its_end_may_come_before(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        pair = Pair(tmp_path, **BIG)
        prompt = prompt_of(2000)
        result = pair.resume(prompt, await pair.hand_off(prompt))
        n_turns = 0
        while n_turns < 2:
            await turn()
            n_turns += bool(check_of(pair.decode)._waiting)
        assert pair.decode.inject_request_error(result.request_id, "bad weather")
        with pytest.raises(RequestError, match="bad weather"):
            await result
        assert not check_of(pair.decode)._waiting
        await pair.blocks_come_back()
        assert (pair.decode.kv_transfer_failures, pair.decode.used_blocks) == (0, 0)
        again = pair.resume(prompt, await pair.hand_off(prompt))
        assert await tokens_of(again) == expected(prompt, 32)
        await pair.blocks_come_back()

    run(scenario)
