"""The TensorRT-LLM double: what ends a sequence, and what of it stays in the answer."""

from typing import Any

import pytest

from slagate.workers.sim.api import VERSIONS, sim_api
from slagate.workers.sim.outputs import CompletionOutput
from slagate.workers.sim.sampling import Stop, StopRules, StopWord
from slagate.workers.sim.tokenizer import SimTokenizer, SimVocabulary
from support.engine.sim_llm import expected, llm, prompt_of
from support.virtual_loop import run

every_version = pytest.mark.parametrize("api", VERSIONS)

PROMPT = prompt_of(40)
TOKENS = expected(PROMPT, 8)


def text(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def answer(api: str, **sampling: Any) -> CompletionOutput:
    """What an engine of this version generates after the prompt, at most 8 tokens."""
    found: list[CompletionOutput] = []

    async def scenario() -> None:
        parameters = sim_api(api).SamplingParams(max_tokens=8, **sampling)
        result = await llm(api=api).generate_async(PROMPT, parameters)
        found.extend(result.outputs)

    run(scenario)
    (output,) = found
    return output


@every_version
def test_a13_end_of_text_stays_in_the_answer_and_has_no_stop_reason(api: str) -> None:
    output = answer(api, end_id=TOKENS[3])
    assert output.token_ids == TOKENS[:4]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


@every_version
def test_a13_a_stop_token_is_removed_and_named(api: str) -> None:
    output = answer(api, stop_token_ids=[TOKENS[5], TOKENS[3]])
    assert output.token_ids == TOKENS[:3]
    assert output.text == text(TOKENS[:3])
    assert (output.finish_reason, output.stop_reason) == ("stop", TOKENS[3])


@every_version
@pytest.mark.parametrize("stop", ["a string", "a list"])
def test_a13_a_stop_string_of_several_tokens_is_removed_and_named(api: str, stop: str) -> None:
    word = text(TOKENS[2:4])
    output = answer(api, stop=word if stop == "a string" else ["<1>zz", word])
    assert output.token_ids == TOKENS[:2]
    assert output.text == text(TOKENS[:2])
    assert (output.finish_reason, output.stop_reason) == ("stop", word)


@every_version
def test_a13_a_stop_stays_when_it_is_asked_for(api: str) -> None:
    for sampling in ({"stop": text(TOKENS[2:4])}, {"stop_token_ids": [TOKENS[3]]}):
        output = answer(api, include_stop_str_in_output=True, **sampling)
        assert output.token_ids == TOKENS[:4]
        assert output.text == text(TOKENS[:4])
        assert output.stop_reason in (TOKENS[3], text(TOKENS[2:4]))


@every_version
def test_a13_a_stop_string_works_on_tokens_without_text_being_made(api: str) -> None:
    output = answer(api, stop=text(TOKENS[2:4]), detokenize=False)
    assert (output.token_ids, output.text) == (TOKENS[:2], "")
    assert output.stop_reason == text(TOKENS[2:4])


@every_version
def test_a13_ignoring_end_of_text_switches_stop_words_off_too(api: str) -> None:
    output = answer(
        api, end_id=TOKENS[3], stop_token_ids=[TOKENS[2]], stop=text(TOKENS[1:2]), ignore_eos=True
    )
    assert output.token_ids == TOKENS
    assert (output.finish_reason, output.stop_reason) == ("length", None)


@every_version
def test_a13_nothing_ends_the_first_min_tokens(api: str) -> None:
    assert answer(api, end_id=TOKENS[3], min_tokens=4).token_ids == TOKENS
    assert answer(api, end_id=TOKENS[3], min_tokens=3).token_ids == TOKENS[:4]


@every_version
def test_a13_a_stream_may_show_tokens_of_a_stop_word_and_take_them_back(api: str) -> None:
    seen: list[list[int]] = []

    async def scenario() -> None:
        parameters = sim_api(api).SamplingParams(max_tokens=8, stop=text(TOKENS[2:4]))
        async for result in llm(api=api).generate_async(PROMPT, parameters, streaming=True):
            seen.append(list(result.outputs[0].token_ids))
        assert result.outputs[0].token_ids_diff == []
        assert result.outputs[0].text_diff == ""

    run(scenario)
    assert seen == [TOKENS[:1], TOKENS[:2], TOKENS[:3], TOKENS[:2]]


@every_version
def test_the_last_token_of_the_tokenizer_ends_a_sequence_that_names_no_end(api: str) -> None:
    async def scenario() -> None:
        engine = llm(api=api, end_id=TOKENS[3])
        result = await engine.generate_async(PROMPT)
        assert result.outputs[0].token_ids == TOKENS[:4]
        assert result.outputs[0].text == text(TOKENS[:3])

    run(scenario)


def test_rules_prefer_end_of_text_and_match_whole_words_only() -> None:
    rules = StopRules(
        end_id=9, stop_token_ids=[9, 8], stop_words=[StopWord("x", (1, 2)), StopWord("", ())]
    )
    assert rules.check([9]) == Stop("stop", None, 0)
    assert rules.check([8]) == Stop("stop", 8, 1)
    assert rules.check([2]) is None
    assert rules.check([3, 2]) is None
    assert rules.check([1, 2]) == Stop("stop", "x", 2)
    assert rules.check([2, 1]) is None


def test_the_tokenizer_turns_numbers_into_text_and_back() -> None:
    tokenizer = SimTokenizer(SimVocabulary(vocab_size=500, eos_token_id=9))
    assert tokenizer.encode("<17><400>") == [17, 400]
    assert tokenizer.decode([17, 9, 400]) == "<17><400>"
    assert tokenizer.decode([17, 9], skip_special_tokens=False) == "<17><9>"
    assert tokenizer.encode("hé<3>!") == [104, 195, 169, 3, 33]
    assert (tokenizer.eos_token_id, len(tokenizer.tokenizer)) == (9, 500)
