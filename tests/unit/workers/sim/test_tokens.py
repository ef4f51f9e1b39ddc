"""The TensorRT-LLM double: which tokens come, how a result gives them, and what stops it."""

from typing import Any

import numpy as np
import pytest

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.request import SamplingParams
from support.engine.sim_llm import Pair, expected, llm, n_timers, prompt_of, tokens_of, until


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
        ({"stop_token_ids": True, "min_tokens": 5}, 4, "stop", True),
        ({"end_id": True, "min_tokens": 5}, 9, "length", False),
        ({"max_tokens": 5, "stop_token_ids": True}, 5, "length", False),
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
