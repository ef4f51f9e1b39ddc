"""The contract of the `Worker` port: what an answer contains, from one token to logprobs and stops."""

import math

import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers.handoff.codec import LOGPROB_FLOOR
from slagate.workers.worker import Worker
from support.engine.workers import expected, request
from support.worker.contract import Play, Setup, ask, hand_off, resume
from support.worker.sinks import KeepingSink

PROMPT = list(range(1, 101))
TOKENS = expected(PROMPT, 20)


def plain(max_tokens: int = 8, request_id: str = "r") -> oe.GenerateRequest:
    return request(request_id, PROMPT, max_tokens)


def stopping_at(*texts: str, **options: bool) -> oe.GenerateRequest:
    made = plain(12)
    made.stopping.ignore_eos = False
    made.stopping.conditions.extend(oe.StopCondition(stop_text=text) for text in texts)
    for name, value in options.items():
        setattr(made.stopping, name, value)
    return made


def text_of(tokens: list[int]) -> str:
    """As the simulated tokenizer writes them."""
    return "".join(f"<{token}>" for token in tokens)


def texts(sink: KeepingSink) -> str:
    return "".join(message.token.text for message in sink.messages)


def test_parallel_sequences_are_told_apart_and_end_one_by_one(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            data = plain(9)
            data.sampling.num_sequences = 3
            sink = await ask(worker, data)
            of_index: dict[int, list[int]] = {0: [], 1: [], 2: []}
            finished: list[int] = []
            for message in sink.messages:
                event = message.token if message.HasField("token") else message.finished
                assert event.HasField("output_index")
                assert event.output_index not in finished
                if message.HasField("finished"):
                    finished.append(event.output_index)
                else:
                    of_index[event.output_index] += [t.token_id for t in message.token.tokens]
            assert of_index == {k: expected(PROMPT, 9, branch=k) for k in range(3)}
            assert sorted(finished) == [0, 1, 2]
            usages = [m.usage for m in sink.messages if m.HasField("usage")]
            assert [usages[0]] == [sink.messages[-1].usage]
            assert (usages[0].prompt_tokens, usages[0].completion_tokens) == (100, 27)

    play(scenario)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_handoff_of_several_sequences_is_refused_by_name(play: Play, role: str) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("prefill") as prefill, setup.worker("decode") as decode:
            several = plain()
            several.sampling.num_sequences = 2
            if role == "decode":
                sink = await resume(decode, several, await hand_off(prefill, plain()))
            else:
                several.extra["request_type"] = "context_only"
                sink = await ask(prefill, several)
            assert (sink.code, sink.messages) == (grpc.StatusCode.UNIMPLEMENTED, [])
            assert "sampling.num_sequences" in sink.status.message

    play(scenario)


@pytest.mark.parametrize("n_tokens", [1, 2])
def test_disagg_02_a_budget_counts_the_token_of_the_prefill(play: Play, n_tokens: int) -> None:
    """DISAGG-02: the token of the prefill leg is one of those asked for."""

    async def scenario(setup: Setup) -> None:
        async with setup.worker("prefill") as prefill, setup.worker("decode") as decode:
            session = await hand_off(prefill, plain(n_tokens))
            sink = await resume(decode, plain(n_tokens), session)
            assert sink.tokens == TOKENS[:n_tokens]
            assert sink.messages[-1].finished.reason == oe.FINISH_REASON_LENGTH
            assert sink.messages[-1].usage.completion_tokens == n_tokens

    play(scenario)


@pytest.mark.parametrize("form", ["dict", "flat", "dict_without_chosen"])
def test_logprobs_of_the_output(inside: Play, form: str) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg", sim_settings={"logprob_form": form}) as worker:
            data = plain(5)
            data.response.return_output_logprobs = True
            data.response.output_candidates.top_n = 3
            infos = infos_of(await ask(worker, data))
            assert [info.token_id for info in infos] == TOKENS[:5]
            for info in infos:
                ranks = [c.rank for c in info.candidates]
                assert ranks == ([] if form == "flat" else [1, 2, 3])
                assert info.HasField("logprob") == (form != "dict_without_chosen")
                assert info.HasField("rank") == (form == "dict")
                of_token = [c.logprob for c in info.candidates if c.token_id == info.token_id]
                assert of_token in ([], [info.logprob])
            data.response.ClearField("output_candidates")
            assert not any(info.candidates for info in infos_of(await ask(worker, data)))

    inside(scenario)


def test_the_first_tokens_logprob_survives_the_handoff(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        data = plain(3)
        data.response.return_output_logprobs = True
        async with setup.worker("agg") as agg:
            alone = infos_of(await ask(agg, data))
        async with setup.worker("prefill") as prefill, setup.worker("decode") as decode:
            session = await hand_off(prefill, data)
            infos = infos_of(await resume(decode, data, session))
        assert [info.token_id for info in infos] == TOKENS[:3]
        assert infos[1:] == alone[1:]
        if "first_gen_log_probs" in session.attributes_struct.fields:
            assert infos[0] == alone[0]
        assert all(math.isfinite(info.logprob) for info in infos)

    play(scenario)


@pytest.mark.parametrize("role", ["agg", "prefill"])
def test_logprobs_of_the_prompt_come_first_and_once(play: Play, role: str) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker(role) as worker:
            data = plain(3)
            data.response.return_prompt_logprobs = True
            data.response.prompt_candidates.top_n = 2
            if role == "prefill":
                data.extra["request_type"] = "context_only"
            sink = await ask(worker, data)
            assert sink.events[0] == "prompt"
            assert "prompt" not in sink.events[1:]
            first, *others = sink.messages[0].prompt.tokens
            assert [first.token_id, *(info.token_id for info in others)] == PROMPT
            assert first == oe.TokenInfo(token_id=PROMPT[0])
            for info in others:
                assert LOGPROB_FLOOR <= info.logprob < 0
                assert len(info.candidates) == 2

    play(scenario)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("response.prompt_logprob_start", {"prompt_logprob_start": 1}),
        ("response.output_candidates", {"output_candidates": {"all": {}}}),
        ("response.output_candidates", {"output_candidates": {"token_ids": {"ids": [1]}}}),
    ],
)
def test_other_selections_are_refused(play: Play, field: str, change: dict) -> None:  # type: ignore[type-arg]
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            data = plain()
            data.response.CopyFrom(oe.ResponseOptions(return_output_logprobs=True, **change))
            sink = await ask(worker, data)
            assert (sink.code, sink.messages) == (grpc.StatusCode.UNIMPLEMENTED, [])
            assert sink.status.message.startswith(field)

    play(scenario)


def test_a_stop_string_of_several_tokens_is_never_shown(play: Play) -> None:
    stop = text_of(TOKENS[4:7])
    begins_like_one = text_of([*TOKENS[1:3], TOKENS[0]])

    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg", skip_tokenizer_init=False) as worker:
            sink = await ask(worker, stopping_at(stop, begins_like_one))
            assert sink.tokens == TOKENS[:4]
            assert texts(sink) == text_of(TOKENS[:4])
            last = sink.messages[-1]
            assert last.finished.reason == oe.FINISH_REASON_STOP
            assert last.finished.stop_match.stop_text == stop
            assert last.usage.completion_tokens == 4

    play(scenario)


def test_what_only_began_like_a_stop_is_shown(play: Play) -> None:
    """At the end of the budget the beginning of a stop string is output like any other."""

    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg", skip_tokenizer_init=False) as worker:
            sink = await ask(worker, stopping_at(text_of([*TOKENS[10:12], 5])))
            assert sink.tokens == TOKENS[:12]
            assert texts(sink) == text_of(TOKENS[:12])
            assert sink.messages[-1].finished.reason == oe.FINISH_REASON_LENGTH

    play(scenario)


def test_a_stop_string_is_shown_where_that_is_asked_for(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg", skip_tokenizer_init=False) as worker:
            stop = stopping_at(text_of(TOKENS[4:7]), include_stop_in_output=True)
            sink = await ask(worker, stop)
            assert sink.tokens == TOKENS[:7]
            assert texts(sink) == text_of(TOKENS[:7])
            stop.extra["detokenize"] = False
            sink = await ask(worker, stop)
            assert (sink.tokens, texts(sink)) == (TOKENS[:7], "")

    play(scenario)


def test_a_stop_string_works_over_a_handoff(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with (
            setup.worker("prefill", skip_tokenizer_init=False) as prefill,
            setup.worker("decode", skip_tokenizer_init=False) as decode,
        ):
            data = stopping_at(text_of(TOKENS[:3]))
            assert (await split(prefill, decode, data)).tokens == []
            data = stopping_at(text_of(TOKENS[1:3]))
            assert (await split(prefill, decode, data)).tokens == TOKENS[:1]

    play(scenario)


async def split(prefill: Worker, decode: Worker, data: oe.GenerateRequest) -> KeepingSink:
    sink = await resume(decode, data, await hand_off(prefill, data))
    assert sink.messages[-1].finished.reason == oe.FINISH_REASON_STOP
    return sink


def infos_of(sink: KeepingSink) -> list[oe.TokenInfo]:
    return [token for message in sink.messages for token in message.token.tokens]


def test_a05_without_a_budget_the_answer_fills_the_context(inside: Play) -> None:
    """Older engines answer 32 tokens when they are not told how many."""

    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg", max_seq_len=200) as worker:
            unset = plain()
            unset.stopping.ClearField("max_tokens")
            too_many = plain(5000, "many")
            for data in (unset, too_many):
                sink = await ask(worker, data)
                assert sink.tokens == expected(PROMPT, 100)
                assert sink.messages[-1].finished.reason == oe.FINISH_REASON_LENGTH

    inside(scenario)


def test_engine_08_an_empty_prompt_never_reaches_the_engine(inside: Play) -> None:
    """ENGINE-08: refused by name."""

    async def scenario(setup: Setup) -> None:
        for role in ("agg", "prefill"):
            async with setup.engine(role) as made:
                data = request("r", [], 4)
                if role == "prefill":
                    data.extra["request_type"] = "context_only"
                sink = await ask(made.worker, data)
                assert sink.code is grpc.StatusCode.INVALID_ARGUMENT
                assert sink.status is not None
                assert sink.status.message.startswith("token_ids")
                assert made.llm.n_running + made.llm.n_queued == 0

    inside(scenario)
