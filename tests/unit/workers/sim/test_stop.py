"""The TensorRT-LLM double: what ends a sequence, and what of it stays in the answer."""

from typing import Any

import pytest

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.api import VERSIONS, sim_api
from slagate.workers.sim.outputs import CompletionOutput
from slagate.workers.sim.request import RequestError
from slagate.workers.sim.sampling import Stop, StopRules, StopWord
from slagate.workers.sim.tokenizer import SimTokenizer, SimVocabulary
from support.engine.sim_llm import expected, llm, prompt_of

every_version = pytest.mark.parametrize("api", VERSIONS)

PROMPT = prompt_of(40)
TOKENS = expected(PROMPT, 8)


def text(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def answer(api: str, **sampling: Any) -> CompletionOutput:
    """What an engine of this version generates after the prompt, at most 8 tokens."""
    (output,) = outputs_of(api, sim_api(api).SamplingParams(max_tokens=8, **sampling))
    return output


def outputs_of(api: str, parameters: Any, **changed: Any) -> list[CompletionOutput]:
    """The outputs of one request; `changed` are arguments of `llm`."""
    found: list[CompletionOutput] = []

    async def scenario() -> None:
        result = await llm(api=api, **changed).generate_async(PROMPT, parameters)
        found.extend(result.outputs)

    run(scenario)
    return found


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
def test_w10_ignoring_end_of_text_switches_stop_words_off_too_from_1_3_on(api: str) -> None:
    output = answer(api, end_id=TOKENS[3], stop_token_ids=[TOKENS[5]], ignore_eos=True)
    drops = api not in ("1.1", "1.2")
    assert output.token_ids == (TOKENS if drops else TOKENS[:5])
    assert output.finish_reason == ("length" if drops else "stop")


@every_version
def test_w10_a_stop_text_is_found_in_the_text_also_when_the_executor_was_not_told(api: str) -> None:
    asked = {"stop": text(TOKENS[2:4]), "ignore_eos": True}
    output = answer(api, **asked)
    assert (output.finish_reason, output.stop_reason) == ("stop", text(TOKENS[2:4]))
    assert output.text == text(TOKENS[:2])
    drops = api not in ("1.1", "1.2")
    assert output.token_ids == (TOKENS if drops else TOKENS[:2])
    assert answer(api, **asked, detokenize=False).finish_reason == ("length" if drops else "stop")


@every_version
def test_w06_with_an_end_id_stop_texts_have_no_tokens_and_the_request_fails(api: str) -> None:
    with pytest.raises(RequestError, match="is not processed by tokenizer"):
        answer(api, end_id=TOKENS[3], stop=text(TOKENS[2:4]))
    if api in ("1.1", "1.2"):
        return
    # The executor does not ask for them; the search in the text does, outside of what is the request's.
    with pytest.raises(RuntimeError) as caught:
        answer(api, end_id=TOKENS[3], stop=text(TOKENS[2:4]), ignore_eos=True)
    assert type(caught.value) is RuntimeError


@every_version
def test_w06_set_up_by_its_caller_a_stop_text_goes_with_an_end_id(api: str) -> None:
    tokenizer = SimTokenizer(SimVocabulary(vocab_size=5000, eos_token_id=9))
    for end_id, n_tokens in ((TOKENS[1], 2), (TOKENS[5], 2), (-1, 2)):
        parameters = sim_api(api).SamplingParams(end_id=end_id, stop=text(TOKENS[2:4]))
        parameters._setup(tokenizer, None, None)
        (output,) = outputs_of(api, parameters)
        assert output.token_ids == TOKENS[:n_tokens]
        assert output.stop_reason == (None if end_id == TOKENS[1] else text(TOKENS[2:4]))


@every_version
def test_every_end_of_the_generation_config_is_a_stop_token_from_1_3_on(api: str) -> None:
    (output,) = outputs_of(
        api, sim_api(api).SamplingParams(max_tokens=8), model_end_ids=TOKENS[3:4]
    )
    stops = api not in ("1.1", "1.2")
    assert output.token_ids == (TOKENS[:3] if stops else TOKENS)
    assert output.stop_reason == (TOKENS[3] if stops else None)


@every_version
def test_t2_3_a_stop_that_ends_with_the_budget_is_an_end_by_length(api: str) -> None:
    output = answer(api, stop_token_ids=[TOKENS[7]])
    assert (output.token_ids, output.finish_reason) == (TOKENS, "length")


@every_version
def test_a13_min_tokens_hold_off_the_end_of_text_and_count_the_prompt_before_1_4(api: str) -> None:
    counted = 0 if api == "1.4rc" else len(PROMPT)
    end = {"end_id": TOKENS[3]}
    assert answer(api, **end, min_tokens=counted + 4).token_ids == TOKENS
    assert answer(api, **end, min_tokens=counted + 3).token_ids == TOKENS[:4]
    assert len(answer(api, **end, min_tokens=4).token_ids) == (4 if counted else 8)
    # It is not drawn, so it is part of no stop either, and does not go over the budget.
    banned = {"min_tokens": counted + 8, "stop_token_ids": [TOKENS[3]]}
    assert answer(api, **end, **banned).token_ids == TOKENS
    assert answer(api, end_id=TOKENS[7], **{**banned, "stop_token_ids": None}).token_ids == TOKENS


@every_version
def test_a13_stops_end_an_answer_below_min_tokens(api: str) -> None:
    for stop in ({"stop_token_ids": [TOKENS[3]]}, {"stop": text(TOKENS[3:4])}):
        output = answer(api, **stop, min_tokens=len(PROMPT) + 8)
        assert (output.token_ids, output.finish_reason) == (TOKENS[:3], "stop")


@every_version
def test_a13_a_stream_may_show_tokens_of_a_stop_word_and_take_them_back(api: str) -> None:
    seen: list[list[int]] = []

    async def scenario() -> None:
        parameters = sim_api(api).SamplingParams(max_tokens=8, stop=text(TOKENS[2:4]))
        async for result in llm(api=api).generate_async(PROMPT, parameters, streaming=True):
            seen.append(list(result.outputs[0].token_ids))
        assert result.outputs[0].token_ids_diff == []
        # What was made text of stays, so the text has more than the tokens.
        assert (result.outputs[0].text, result.outputs[0].text_diff) == (text(TOKENS[:3]), "")

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
    words = [StopWord(9, (9,)), StopWord(8, (8,)), StopWord("x", (1, 2)), StopWord("", ())]
    rules = StopRules(end_id=9, stop_words=words)
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
