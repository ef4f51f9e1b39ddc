"""The contract of the `Worker` port: what an answer contains, from one token to logprobs and stops."""

import math
from typing import Any

import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers.handoff.codec import LOGPROB_FLOOR
from slagate.workers.legs import prefill_leg
from slagate.workers.worker import Worker
from support.engine.workers import MODEL, expected, request
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
            if setup.version in ("1.1", "1.2"):
                for sink in (
                    await ask(prefill, prefill_leg(data.SerializeToString(), "p")),
                    await resume(decode, data, await hand_off(prefill, plain(3))),
                ):
                    assert (sink.code, sink.messages) == (grpc.StatusCode.UNIMPLEMENTED, [])
                    assert sink.status.message.startswith("response.return_output_logprobs")
                models = [await worker.model_info(MODEL) for worker in (prefill, decode)]
                assert not any(m.generation.output_logprobs.supported for m in models)
                return
            infos = infos_of(await resume(decode, data, await hand_off(prefill, data)))
            behind = infos_of(await resume(decode, data, await hand_off(prefill, plain(3))))
        assert [info.token_id for info in infos] == TOKENS[:3]
        assert infos == alone
        assert all(math.isfinite(info.logprob) for info in infos)
        # A prefill worker that was not asked for them leaves none of the first token.
        assert behind == [oe.TokenInfo(token_id=TOKENS[0]), *alone[1:]]

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


@pytest.mark.parametrize("detokenize", [False, True])
def test_w06_stop_text_goes_with_an_end_id(inside: Play, detokenize: bool) -> None:  # noqa: FBT001
    async def scenario(setup: Setup) -> None:
        options = {"skip_tokenizer_init": False, "end_id": TOKENS[5]}
        async with setup.worker("agg", **options) as worker:
            data = stopping_at(text_of(TOKENS[2:4]))
            data.extra["detokenize"] = detokenize
            sink = await ask(worker, data)
            assert sink.tokens == TOKENS[:2]
            assert sink.messages[-1].finished.stop_match.stop_text == text_of(TOKENS[2:4])
            data = stopping_at(text_of(TOKENS[7:9]))
            data.extra["detokenize"] = detokenize
            sink = await ask(worker, data)
            assert sink.tokens == TOKENS[:6]
            assert sink.messages[-1].finished.stop_match.eos_token_id == TOKENS[5]

    inside(scenario)


@pytest.mark.parametrize("knows_end", [False, True])
@pytest.mark.parametrize("detokenize", [False, True])
def test_w10_stops_end_an_answer_that_ignores_the_end_of_text(
    inside: Play,
    knows_end: bool,  # noqa: FBT001
    detokenize: bool,  # noqa: FBT001
) -> None:
    async def scenario(setup: Setup) -> None:
        options = {"skip_tokenizer_init": False, "engine_knows_end": knows_end}
        settings = {"end_id": TOKENS[1]}
        async with setup.worker(
            "agg", end_id=TOKENS[1], sim_settings=settings, **options
        ) as worker:
            for stops, match in (
                ([{"stop_text": text_of(TOKENS[4:6])}], {"stop_text": text_of(TOKENS[4:6])}),
                ([{"stop_token_id": TOKENS[4]}], {"stop_token_id": TOKENS[4]}),
                (
                    [{"stop_token_id": TOKENS[4]}, {"stop_text": text_of(TOKENS[5:7])}],
                    {"stop_token_id": TOKENS[4]},
                ),
            ):
                data = plain(12)
                data.stopping.conditions.extend(oe.StopCondition(**one) for one in stops)
                data.extra["detokenize"] = detokenize
                sink = await ask(worker, data)
                assert sink.tokens == TOKENS[:4]
                assert sink.messages[-1].finished.stop_match == oe.StopMatch(**match)

    inside(scenario)


def test_t2_3_a_stop_with_the_last_token_of_the_budget_is_a_stop(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg", skip_tokenizer_init=False) as worker:
            data = plain(6)
            data.stopping.ignore_eos = False
            data.stopping.conditions.add(stop_token_id=TOKENS[5])
            for stop in ("token", "text"):
                if stop == "text":
                    data.stopping.conditions[0].stop_text = text_of(TOKENS[4:6])
                sink = await ask(worker, data)
                n_tokens = 5 if stop == "token" else 4
                assert sink.tokens == TOKENS[:n_tokens]
                assert texts(sink) == text_of(TOKENS[:n_tokens])
                last = sink.messages[-1]
                assert last.finished.reason == oe.FINISH_REASON_STOP
                assert last.usage.completion_tokens == n_tokens

    play(scenario)


def by_index(sink: KeepingSink) -> dict[int, tuple[list[int], oe.GenerationFinished]]:
    """The tokens and the end of each output."""
    tokens: dict[int, list[int]] = {}
    ends = {}
    for message in sink.messages:
        if message.HasField("token"):
            tokens.setdefault(message.token.output_index, []).extend(
                info.token_id for info in message.token.tokens
            )
        if message.HasField("finished"):
            ends[message.finished.output_index] = message.finished
    return {index: (tokens.get(index, []), end) for index, end in ends.items()}


def test_w07_each_of_several_outputs_has_its_own_end(play: Play) -> None:
    """Before 1.3 only the last one has one of the engine's."""
    branches = [expected(PROMPT, 9, branch=k) for k in range(3)]

    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            data = plain(9)
            data.stopping.ignore_eos = False
            data.sampling.num_sequences = 3
            data.stopping.conditions.add(stop_token_id=branches[1][2])
            for is_shown in (False, True):
                data.stopping.include_stop_in_output = is_shown
                sink = await ask(worker, data)
                found = by_index(sink)
                assert found[0] == (branches[0], found[0][1])
                assert found[1][0] == branches[1][: 3 if is_shown else 2]
                assert found[2] == (branches[2], found[2][1])
                reasons = [found[k][1].reason for k in range(3)]
                length, stop = oe.FINISH_REASON_LENGTH, oe.FINISH_REASON_STOP
                assert reasons == [length, stop, length]
                assert found[1][1].stop_match.stop_token_id == branches[1][2]
                n_tokens = 18 + (3 if is_shown else 2)
                assert sink.messages[-1].usage.completion_tokens == n_tokens

    play(scenario)


def test_w07_a_stop_text_in_one_of_several_outputs_ends_all(inside: Play) -> None:
    branches = [expected(PROMPT, 50, branch=k) for k in range(3)]
    # Spelt so that only a search in the text finds it.
    stop = f"{branches[1][2]}>"

    async def scenario(setup: Setup) -> None:
        async with setup.engine("agg", skip_tokenizer_init=False) as (worker, inner, llm):
            data = plain(50)
            data.stopping.ignore_eos = False
            data.sampling.num_sequences = 3
            data.stopping.conditions.add(stop_text=stop)
            sink = await ask(worker, data)
            found = by_index(sink)
            assert sorted(found) == [0, 1, 2]
            assert found[1][1].stop_match.stop_text == stop
            for k in range(3):
                tokens = found[k][0]
                assert tokens == branches[k][: len(tokens)]
            assert {found[k][1].reason for k in (0, 2)} == {oe.FINISH_REASON_LENGTH}
            assert sink.status.code is grpc.StatusCode.OK
            # The engine does not go on with what nobody reads.
            assert (llm.n_running, inner.n_live) == (0, 0)

    inside(scenario)


def test_several_tokens_a_step_are_streamed_counted_and_stopped_at(inside: Play) -> None:
    """Speculative decoding: a response of the engine brings several tokens."""

    async def scenario(setup: Setup) -> None:
        drafts = {"speculative_config": {"max_draft_len": 3}}
        settings = {"tokens_per_step": 4}
        options = {"skip_tokenizer_init": False, "sim_settings": settings, **drafts}
        async with setup.worker("agg", **options) as worker:
            data = plain(12)
            data.response.return_output_logprobs = True
            sink = await ask(worker, data)
            assert (sink.tokens, texts(sink)) == (TOKENS[:12], text_of(TOKENS[:12]))
            assert sink.messages[-1].usage.completion_tokens == 12
            assert all(info.HasField("logprob") for info in infos_of(sink))
            counts = [len(m.token.tokens) for m in sink.messages if m.HasField("token")]
            assert max(counts) > 1
            sink = await ask(worker, stopping_at(text_of(TOKENS[3:5])))
            assert (sink.tokens, texts(sink)) == (TOKENS[:3], text_of(TOKENS[:3]))
            assert sink.messages[-1].usage.completion_tokens == 3
            data = plain(3)
            data.stopping.conditions.add(stop_token_id=TOKENS[2])
            sink = await ask(worker, data)
            assert (sink.tokens, texts(sink)) == (TOKENS[:2], text_of(TOKENS[:2]))
            several = plain(7)
            several.sampling.num_sequences = 2
            found = by_index(await ask(worker, several))
            assert [found[k][0] for k in range(2)] == [
                expected(PROMPT, 7, branch=k) for k in range(2)
            ]
        async with (
            setup.worker("prefill") as prefill,
            setup.worker("decode", **options) as decode,
        ):
            sink = await resume(decode, plain(12), await hand_off(prefill, plain(12)))
            assert sink.tokens == TOKENS[:12]

    inside(scenario)


@pytest.mark.parametrize("what", ["budget", "end", "minimum", "stop", "text"])
def test_t2_4_a_decode_leg_ends_at_the_first_token_if_that_is_the_last(
    inside: Play, what: str
) -> None:
    """The engine does not look at the token that comes with the handoff."""

    async def scenario(setup: Setup) -> None:
        options: dict[str, Any] = {"skip_tokenizer_init": False}
        if what in ("end", "minimum"):
            options["end_id"] = TOKENS[0]
        async with (
            setup.worker("prefill", skip_tokenizer_init=False) as prefill,
            setup.engine("decode", **options) as (decode, inner, llm),
        ):
            session = await hand_off(prefill, plain(5))
            data = plain(1 if what in ("budget", "text") else 5)
            data.stopping.ignore_eos = what == "budget"
            if what == "stop":
                data.stopping.conditions.add(stop_token_id=TOKENS[0])
            elif what == "text":
                data.stopping.conditions.add(stop_text="<")
            elif what == "minimum":
                data.stopping.min_tokens = 5
            sink = await resume(decode, data, session)
            n_tokens = {"stop": 0, "minimum": 5}.get(what, 1)
            shown = 0 if what == "text" else n_tokens
            assert (sink.tokens, texts(sink)) == (TOKENS[:n_tokens], text_of(TOKENS[:shown]))
            last = sink.messages[-1]
            is_stop = last.finished.reason == oe.FINISH_REASON_STOP
            assert is_stop == (what in ("end", "stop", "text"))
            assert last.usage.completion_tokens == n_tokens
            assert (inner.n_live, llm.n_running, llm.used_blocks) == (0, 0, 0)

    inside(scenario)


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
