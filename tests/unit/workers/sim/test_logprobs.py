"""The TensorRT-LLM double: forms of log probabilities, and that they are of the context."""

import math
from typing import Any

import pytest

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.api import NEWEST, VERSIONS, sim_api
from slagate.workers.sim.outputs import CompletionOutput
from slagate.workers.sim.sampling import Logprob, LogprobMaker
from support.engine.sim_llm import Pair, expected, llm, prompt_of

every_version = pytest.mark.parametrize("api", VERSIONS)

PROMPT = prompt_of(70)
TOKENS = expected(PROMPT, 6)


def answer(
    api: str, prompt: list[int] = PROMPT, *, form: str = "dict", **sampling: Any
) -> CompletionOutput:
    """What an engine of this version generates after the prompt, 6 tokens."""
    found: list[CompletionOutput] = []

    async def scenario() -> None:
        parameters = sim_api(api).SamplingParams(max_tokens=6, ignore_eos=True, **sampling)
        engine = llm(api=api, logprob_form=form)
        result = await engine.generate_async(prompt, parameters)
        found.extend(result.outputs)

    run(scenario)
    (output,) = found
    return output


@every_version
def test_a14_without_being_asked_there_are_none(api: str) -> None:
    output = answer(api)
    assert output.logprobs == output.prompt_logprobs == []
    assert output.cumulative_logprob is None


@every_version
@pytest.mark.parametrize("n_top", [0, 1, 4])
def test_a14_each_token_has_the_most_likely_ones_and_itself(api: str, n_top: int) -> None:
    output = answer(api, logprobs=n_top)
    assert len(output.logprobs) == len(output.token_ids) == 6
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert token in entry
        assert {*range(1, n_top + 1)} <= {one.rank for one in entry.values()}
        assert n_top <= len(entry) <= n_top + 1
        by_rank = sorted(entry.values(), key=lambda one: one.rank)
        numbers = [one.logprob for one in by_rank]
        assert numbers == sorted(numbers, reverse=True)
        assert all(number < 0 for number in numbers)
    chosen = [entry[token] for token, entry in zip(TOKENS, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(one.logprob for one in chosen))
    assert len({one.rank for one in chosen}) > 1, "a sampled token is not always the likeliest"


@every_version
def test_a14_the_flat_form_is_the_chosen_tokens_number(api: str) -> None:
    full = answer(api, logprobs=2)
    flat = answer(api, logprobs=2, form="flat")
    chosen = [entry[token].logprob for token, entry in zip(TOKENS, full.logprobs, strict=True)]
    assert flat.logprobs == chosen
    assert flat.cumulative_logprob == full.cumulative_logprob


def test_a14_the_newest_version_can_be_asked_for_the_flat_form() -> None:
    output = answer(NEWEST, logprobs=2, logprobs_simple_format=True, prompt_logprobs=1)
    assert all(isinstance(one, float) for one in output.logprobs)
    assert all(isinstance(one, dict) for one in output.prompt_logprobs)
    output = answer(NEWEST, prompt_logprobs=1, prompt_logprobs_simple_format=True)
    assert all(isinstance(one, float) for one in output.prompt_logprobs)


@every_version
def test_a14_the_chosen_token_may_be_missing(api: str) -> None:
    output = answer(api, logprobs=3, form="dict_without_chosen")
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert token not in entry
        assert [one.rank for one in entry.values()] == [1, 2, 3]


@every_version
def test_a14_prompt_logprobs_are_those_of_the_same_tokens_when_generated(api: str) -> None:
    generated = answer(api, logprobs=2).logprobs
    prompted = answer(api, PROMPT + TOKENS, prompt_logprobs=2)
    assert prompted.logprobs == []
    assert len(prompted.prompt_logprobs) == 76
    assert prompted.prompt_logprobs[-6:] == generated


@every_version
def test_a14_a_stream_adds_logprobs_with_the_tokens_and_keeps_those_of_a_stop_word(
    api: str,
) -> None:
    async def scenario() -> None:
        parameters = sim_api(api).SamplingParams(logprobs=1, stop_token_ids=[TOKENS[3]])
        diffs: list[Any] = []
        async for result in llm(api=api).generate_async(PROMPT, parameters, streaming=True):
            (output,) = result.outputs
            assert len(output.logprobs) == output.length + (output.finish_reason == "stop")
            diffs += output.logprobs_diff
        assert output.logprobs == diffs
        assert output.token_ids == TOKENS[:3]

    run(scenario)


@every_version
def test_w10_the_first_tokens_logprobs_come_with_the_handoff_or_not_at_all(
    api: str, tmp_path: Any
) -> None:
    pair = Pair(tmp_path, api=api)
    whole = answer(api, logprobs=2).logprobs

    async def scenario() -> None:
        params = await pair.hand_off(PROMPT, logprobs=2)
        if api in ("1.1", "1.2"):
            assert not hasattr(params, "first_gen_log_probs")
        else:
            assert params.first_gen_log_probs == whole[:1]
        sampling = {"max_tokens": 6, "logprobs": 2, "ignore_eos": True}
        if api in ("1.1", "1.2"):
            with pytest.raises(AssertionError, match="logprobs length"):
                await pair.resume(PROMPT, params, **sampling)
            return
        result = await pair.resume(PROMPT, params, **sampling)
        assert result.outputs[0].logprobs == whole
        await pair.blocks_come_back()
        # A prefill leg that was not asked for them leaves none: entries belong to all tokens but the first.
        result = await pair.resume(PROMPT, await pair.hand_off(PROMPT), **sampling)
        assert (result.outputs[0].length, result.outputs[0].logprobs) == (6, whole[1:])
        await pair.blocks_come_back()

    run(scenario)
    for transport in pair.transports:
        transport.close()


def test_a_tiny_vocabulary_has_no_more_entries_than_tokens() -> None:
    maker = LogprobMaker(10, "dict", 3)
    for token in range(3):
        for byte in range(256):
            entry = maker.of(token, bytes([byte] * 16))
            assert {*entry} <= {0, 1, 2}
            assert token in entry
            assert all(math.exp(one.logprob) < 1 for one in entry.values())
    assert Logprob(-1.0).rank is None
