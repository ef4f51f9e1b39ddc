"""One output as deltas: against an engine that cuts excluded stops off at the end."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slagate.proto import openengine_pb2 as oe
from slagate.workers.handoff.codec import LOGPROB_FLOOR
from slagate.workers.trtllm.output import (
    HiddenStop,
    OutputCursor,
    OutputForm,
    StopOverlap,
    StopRule,
    ends_at_first_token,
    prompt_output,
    settle_end,
    token_info,
)

LETTERS = "ab"


def text_of(tokens: list[int]) -> str:
    """Token 0 is "a", 1 is "b", 2 is " a": a stop's tokens may decode to more than its text."""
    return "".join((*LETTERS, " a")[token] for token in tokens)


def output(tokens: list[int], reason: str | None = None, **more: Any) -> SimpleNamespace:
    values: dict[str, Any] = {"logprobs": [], "finish_reason": reason, **more}
    if "text" not in values:
        values["text"] = text_of(tokens)
    return SimpleNamespace(token_ids=tokens, **values)


class Answer(NamedTuple):
    tokens: list[int]
    text: str


def delta_of(cursor: OutputCursor, step: SimpleNamespace) -> oe.TokenOutput | None:
    """What is new with a result. The message of the one before is used again, with all that was in it."""
    made = oe.TokenOutput(output_index=9, text="old", tokens=[oe.TokenInfo(token_id=9)])
    before = made.SerializeToString()
    if cursor.take_delta(step, made):
        return made
    assert made.SerializeToString() == before
    return None


def streamed(steps: list[SimpleNamespace], form: OutputForm) -> Answer:
    cursor = OutputCursor(0, form)
    deltas = [delta for step in steps if (delta := delta_of(cursor, step)) is not None]
    assert {delta.output_index for delta in deltas} <= {0}
    assert all(delta.tokens or delta.text for delta in deltas)
    tokens = [info.token_id for delta in deltas for info in delta.tokens]
    return Answer(tokens, "".join(delta.text for delta in deltas))


words = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@given(
    generated=st.lists(st.integers(0, 2), max_size=12),
    stops=st.lists(words, min_size=1, max_size=3),
    every=st.integers(1, 3),
)
def test_nothing_is_shown_that_the_last_result_takes_back(
    generated: list[int], stops: list[list[int]], every: int
) -> None:
    """As an engine: it ends where the newest tokens are a stop, and cuts that off."""
    hidden = tuple(HiddenStop(text_of(stop).strip(), tuple(stop)) for stop in stops)
    form = OutputForm(has_text=True, hidden_stops=hidden)
    steps = []
    final = generated
    for n in range(1, len(generated) + 1):
        ended = [stop for stop in stops if generated[:n][-len(stop) :] == stop]
        if ended:
            final = generated[: n - len(ended[0])]
            break
        if n % every == 0:
            steps.append(output(generated[:n]))
    steps.append(output(final, "stop"))
    assert streamed(steps, form) == Answer(final, text_of(final))


@given(
    generated=st.lists(st.integers(0, 2), max_size=12),
    stops=st.lists(words, min_size=1, max_size=3),
)
def test_t2_3_text_that_a_stream_keeps_of_a_stop_is_not_shown(
    generated: list[int], stops: list[list[int]]
) -> None:
    """Text only grows: the last result's tokens are without the stop, and its text has the stop's start."""
    hidden = tuple(HiddenStop(text_of(stop).strip(), tuple(stop)) for stop in stops)
    form = OutputForm(has_text=True, hidden_stops=hidden)
    steps, final, seen = [], generated, ""
    for n in range(1, len(generated) + 1):
        ended = [stop for stop in stops if generated[:n][-len(stop) :] == stop]
        if ended:
            final = generated[: n - len(ended[0])]
            break
        seen = text_of(generated[:n])
        steps.append(output(generated[:n]))
    steps.append(output(final, "stop", text=seen))
    assert streamed(steps, form) == Answer(final, text_of(final))


@pytest.mark.parametrize(
    ("tokens", "reason", "cause", "settled"),
    [
        ([0, 1], None, None, ([0, 1], "length", None)),
        ([0, 9], None, None, ([0, 9], "stop", None)),
        ([0, 7], None, None, ([0], "stop", 7)),
        ([0, 1, 2], None, None, ([0], "stop", "b a")),
        ([0, 1, 2], "length", None, ([0], "stop", "b a")),
        ([0, 1, 2], "stop", "b a", ([0], "stop", "b a")),
        ([0, 7], "stop", "b a", ([0, 7], "stop", "b a")),
        ([0, 7], "stop", None, ([0, 7], "stop", None)),
        ([0, 7], "cancelled", None, ([0, 7], "cancelled", None)),
        ([], None, None, ([], "length", None)),
    ],
)
@pytest.mark.parametrize("is_hidden", [False, True])
def test_w07_an_output_without_a_reason_has_the_one_that_its_tokens_say(
    tokens: list[int],
    reason: str | None,
    cause: Any,
    settled: tuple[list[int], str, Any],
    is_hidden: bool,  # noqa: FBT001
) -> None:
    rules = (StopRule(7, (7,)), StopRule("b a", (1, 2)))
    hidden = (HiddenStop("", (7,)), HiddenStop("b a", (1, 2))) if is_hidden else ()
    ended = output(tokens, reason, text="", stop_reason=cause)
    settle_end(ended, OutputForm(stops=rules, hidden_stops=hidden, end_id=9))
    kept, *why = settled
    assert ended.token_ids == (kept if is_hidden else tokens)
    assert [ended.finish_reason, ended.stop_reason] == why


def test_t2_3_text_of_a_stop_that_is_cut_off_at_the_budget_goes_with_it() -> None:
    """Also where the first result is the last one, as with drafts."""
    form = OutputForm(
        has_text=True,
        stops=(StopRule(1, (1,)),),
        hidden_stops=(HiddenStop("", (1,)),),
        decode=text_of,
    )
    ended = output([0, 2, 1], "length")
    settle_end(ended, form)
    assert streamed([ended], form) == Answer([0, 2], "a a")


@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        output([2], "stop", stop_reason="a", text=" "),
        output([2, 1]),
        output([2, 1], "stop", stop_reason="ab", text=" "),
    ],
)
def test_t2_4_a_stop_in_the_text_of_a_last_first_token_ends_it(
    given: SimpleNamespace,
    is_hidden: bool,  # noqa: FBT001
) -> None:
    """As on one worker, which has made no more text."""
    hidden = (HiddenStop("ab", (0, 1)), HiddenStop("a", (0,))) if is_hidden else ()
    rules = (StopRule("ab", (0, 1)), StopRule("a", (0,)))
    form = OutputForm(has_text=True, stops=rules, hidden_stops=hidden, decode=text_of)
    ended = SimpleNamespace(**vars(given))
    assert ends_at_first_token(ended, form, max_tokens=1)
    assert (ended.token_ids, ended.text) == ([2], " " if is_hidden else " a")
    assert (ended.finish_reason, ended.stop_reason) == ("stop", "a")


@pytest.mark.parametrize(
    ("token", "min_tokens", "ends"), [(9, 0, True), (9, 6, False), (7, 6, True)]
)
def test_a_minimum_holds_off_the_end_of_text_at_the_first_token_and_no_stop(
    token: int, min_tokens: int, *, ends: bool
) -> None:
    form = OutputForm(end_id=9, stops=(StopRule(7, (7,)), StopRule(9, (9,))), min_tokens=min_tokens)
    assert ends_at_first_token(output([token], text=""), form, max_tokens=8) == ends


def test_w10_log_probabilities_one_behind_belong_to_the_tokens_after_the_first() -> None:
    cursor = OutputCursor(0, OutputForm(top_n=0), n_lagging=1)
    infos = []
    for tokens, numbers in (
        ([5], []),
        ([5, 6, 7], [-1.0, -2.0]),
        ([5, 6, 7, 8], [-1.0, -2.0, -3.0]),
    ):
        delta = delta_of(cursor, output(tokens, text="", logprobs=numbers))
        assert delta is not None
        infos += delta.tokens
    assert [info.HasField("logprob") for info in infos] == [False, True, True, True]
    assert [info.logprob for info in infos[1:]] == [-1.0, -2.0, -3.0]


def test_only_what_may_become_a_stop_is_held_back() -> None:
    form = OutputForm(hidden_stops=(HiddenStop("bb", (1, 1)),))
    cursor = OutputCursor(0, form)

    def shown(tokens: list[int]) -> list[int]:
        delta = delta_of(cursor, output(tokens))
        return [] if delta is None else [info.token_id for info in delta.tokens]

    assert [shown([0]), shown([0, 1]), shown([0, 1, 0]), shown([0, 1, 0, 0])] == [
        [0],
        [],
        [1, 0],
        [0],
    ]


@given(st.text("ab", min_size=1, max_size=8), st.lists(st.text("ab", max_size=4), max_size=12))
def test_an_overlap_is_the_longest_beginning_of_a_stop(stop: str, parts: list[str]) -> None:
    overlap, text = StopOverlap(stop), ""
    for part in parts:
        text += part
        lengths = [n for n in range(len(stop) + 1) if text.endswith(stop[:n])]
        assert overlap.follow(text) == max(lengths)


class Counted(str):
    """A character that counts how often it is compared."""

    __slots__ = ()
    __hash__ = str.__hash__
    n_compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.n_compared += 1
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


@pytest.mark.parametrize("stop", ["a" * 1000 + "c", "b" + "a" * 1000, ("a" * 9 + "b") * 100])
def test_what_a_stop_costs_does_not_grow_with_its_length(stop: str) -> None:
    """However alike the answer and the stop are: a few comparisons a character."""
    Counted.n_compared = 0
    overlap = StopOverlap([Counted(one) for one in stop])
    text = ["a"] * 3000
    for n in range(1, len(text) + 1):
        overlap.follow(text[:n])
    assert 0 < Counted.n_compared < 4 * (len(text) + len(stop))


def test_half_a_character_is_waited_for() -> None:
    steps = [
        output([0], text="a\ufffd"),
        output([0, 1], text="a\ufffd\ufffd"),
        output([0, 1, 2], text="aé", reason="length"),
    ]
    assert streamed(steps, OutputForm(has_text=True)) == Answer([0, 1, 2], "aé")


class Logprob(NamedTuple):
    logprob: float
    rank: int | None = None


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (None, oe.TokenInfo(token_id=7)),
        (-0.5, oe.TokenInfo(token_id=7, logprob=-0.5)),
        (float("-inf"), oe.TokenInfo(token_id=7, logprob=LOGPROB_FLOOR)),
        ({7: Logprob(-0.5, 1)}, oe.TokenInfo(token_id=7, logprob=-0.5, rank=1)),
        ({7: Logprob(float("nan"))}, oe.TokenInfo(token_id=7, logprob=LOGPROB_FLOOR)),
        ({7: -0.5}, oe.TokenInfo(token_id=7, logprob=-0.5)),
        ({8: Logprob(-0.5, 1)}, oe.TokenInfo(token_id=7)),
        ({}, oe.TokenInfo(token_id=7)),
    ],
)
def test_every_form_of_a_logprob_is_read(entry: Any, expected: oe.TokenInfo) -> None:
    assert token_info(7, entry, 0) == expected


def test_candidates_are_the_best_and_no_more_than_asked_for() -> None:
    entry = {7: Logprob(-3.0, 4), 1: Logprob(-2.0, 2), 2: Logprob(-1.0, 1), 3: Logprob(-2.5, 3)}
    info = token_info(7, entry, 2)
    assert [(c.token_id, c.logprob, c.rank) for c in info.candidates] == [
        (2, -1.0, 1),
        (1, -2.0, 2),
    ]
    assert (info.logprob, info.rank) == (-3.0, 4)


def test_logprobs_stay_with_their_tokens_when_some_are_held_back() -> None:
    form = OutputForm(top_n=0, hidden_stops=(HiddenStop("bb", (1, 1)),))
    cursor = OutputCursor(0, form)
    assert delta_of(cursor, output([1], logprobs=[-1.0])) is None
    delta = delta_of(cursor, output([1, 0], logprobs=[-1.0, -2.0]))
    assert delta is not None
    assert [(info.token_id, info.logprob) for info in delta.tokens] == [(1, -1.0), (0, -2.0)]


@pytest.mark.parametrize("entries", [[-9.0, -1.0, -2.0], [-1.0, -2.0], [None, -1.0, -2.0]])
def test_the_first_prompt_token_has_no_logprob(entries: list[Any]) -> None:
    """Engines give it an entry that means nothing, or None, or leave it out."""
    tokens = prompt_output([5, 6, 7], entries, 0).tokens
    assert list(tokens) == [
        oe.TokenInfo(token_id=5),
        oe.TokenInfo(token_id=6, logprob=-1.0),
        oe.TokenInfo(token_id=7, logprob=-2.0),
    ]
