"""Which logits processors a worker has, how they are made, and the two that come with it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from slagate.router.commands import cli
from slagate.workers.logits.examples import MIN_TEMPERATURE, ForcedResponse, Temperature
from slagate.workers.logits.processors import (
    LogitsError,
    LogitsProcessors,
    RequestedProcessor,
    requested_of,
)
from slagate.workers.runtime.usage import UsageError


class Recording:
    """Remembers what its factory was called with."""

    def __init__(
        self, *, end_id: int, n_prompt_tokens: int, vocab_size: int | None, word: str = "x"
    ) -> None:
        if not word:
            raise ValueError("word must not be empty")
        self.given = (end_id, n_prompt_tokens, vocab_size, word)

    def __call__(self, input_ids: Sequence[int], logits: Any, /) -> None: ...


def broken(size: int = 1) -> Any:
    if size > 1:
        raise RuntimeError("a bug")
    return size


FACTORIES = {"recording": Recording, "broken": broken}


def processors(*every: RequestedProcessor, allowed: Sequence[str] = ()) -> LogitsProcessors:
    return LogitsProcessors(every, allowed, load=FACTORIES.__getitem__)


def made(offered: LogitsProcessors, *asked: RequestedProcessor) -> list[tuple[str, Any]]:
    return offered.of_request(asked, end_id=9, n_prompt_tokens=3, vocab_size=10)


def test_each_request_has_new_ones_the_workers_first() -> None:
    offered = processors(RequestedProcessor("recording", {"word": "a"}), allowed=["recording"])
    first = made(
        offered, RequestedProcessor("recording", {"word": "b"}), RequestedProcessor("recording", {})
    )
    assert [name for name, _ in first] == ["recording"] * 3
    assert [one.given for _, one in first] == [
        (9, 3, 10, "a"),
        (9, 3, 10, "b"),
        (9, 3, 10, "x"),
    ]
    assert made(offered)[0][1] is not first[0][1]
    assert offered.is_used
    assert not LogitsProcessors().is_used
    assert made(LogitsProcessors()) == []


@pytest.mark.parametrize(
    ("asked", "field", "reason"),
    [
        (
            RequestedProcessor("temperature", {}),
            "[1].name",
            "'temperature' is not enabled on this worker",
        ),
        (
            RequestedProcessor("recording", {"size": 1}),
            "[1].params.size",
            "is no parameter of this processor",
        ),
        (
            RequestedProcessor("recording", {"end_id": 1}),
            "[1].params.end_id",
            "is given by the worker",
        ),
        (
            RequestedProcessor("recording", {"vocab_size": 1}),
            "[1].params.vocab_size",
            "is given by the worker",
        ),
        (RequestedProcessor("recording", {"word": ""}), "[1].params", "word must not be empty"),
        (
            RequestedProcessor("broken", {"size": 2}),
            "[1].name",
            "its factory failed with RuntimeError",
        ),
        (
            RequestedProcessor("broken", {}),
            "[1].name",
            "its factory made nothing that can be called",
        ),
    ],
)
def test_what_cannot_be_had_is_named(asked: RequestedProcessor, field: str, reason: str) -> None:
    offered = processors(allowed=["recording", "broken"])
    with pytest.raises(LogitsError) as error:
        made(offered, RequestedProcessor("recording", {}), asked)
    assert (error.value.field, error.value.reason) == (field, reason)


def test_what_is_for_every_request_is_not_for_asking() -> None:
    with pytest.raises(LogitsError, match="not enabled"):
        made(processors(RequestedProcessor("recording", {})), RequestedProcessor("recording", {}))


def test_wrong_options_are_found_at_the_start() -> None:
    with pytest.raises(UsageError, match=r"^--logits-processor broken: name: its factory made"):
        processors(RequestedProcessor("broken", {}))
    with pytest.raises(
        UsageError, match=r"^--logits-processor temperature: params\.temperature: is miss"
    ):
        LogitsProcessors([RequestedProcessor("temperature", {})])
    with pytest.raises(
        UsageError,
        match=r"^--allow-logits-processor nobody: is not installed; there are: forced_response, temp",
    ):
        LogitsProcessors(allowed=["nobody"])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("temperature", RequestedProcessor("temperature", {})),
        ('a={"b": [1], "c": "="}', RequestedProcessor("a", {"b": [1], "c": "="})),
    ],
)
def test_an_option_is_a_name_with_or_without_parameters(
    text: str, wanted: RequestedProcessor
) -> None:
    assert requested_of(text) == wanted


@pytest.mark.parametrize("text", ["", "={}", "a=", "a={", "a=1", "a=[]"])
def test_other_options_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--logits-processor"):
        requested_of(text)


def test_the_examples_are_installed() -> None:
    offered = LogitsProcessors(
        [RequestedProcessor("temperature", {"temperature": 2.0})],
        ["forced_response", "temperature"],
    )
    one, other = made(offered, RequestedProcessor("forced_response", {"token_ids": [5, 6]}))
    assert isinstance(one[1], Temperature)
    assert isinstance(other[1], ForcedResponse)


def test_a_temperature_divides_in_place() -> None:
    logits = np.array([1.0, -4.0], dtype=np.float32)
    Temperature(2)([1], logits)
    assert logits.tolist() == [0.5, -2.0]
    for bad in (0, -1, math.nan, math.inf, True, "1", 1e-320, 0.0099, 10**400):
        with pytest.raises(ValueError, match="temperature must be"):
            Temperature(bad)  # type: ignore[arg-type]


def test_the_lowest_temperature_leaves_numbers() -> None:
    logits = np.array([-100.0, 100.0], dtype=np.float16)
    Temperature(MIN_TEMPERATURE)([1], logits)
    assert np.isfinite(logits).all()


def test_a_forced_response_goes_by_where_the_answer_is() -> None:
    """Also one that begins in the middle, as on a decode worker."""

    def next_token(processor: ForcedResponse, n_said: int) -> int:
        logits = np.arange(10, dtype=np.float32)
        processor([1] * (3 + n_said), logits)
        return int(logits.argmax())

    forced = ForcedResponse([5, 6], end_id=9, n_prompt_tokens=3, vocab_size=10)
    assert [next_token(forced, n) for n in range(5)] == [5, 6, 9, 9, 9]
    resumed = ForcedResponse([5, 6], end_id=9, n_prompt_tokens=3, vocab_size=10)
    assert [next_token(resumed, n) for n in range(1, 4)] == [6, 9, 9]
    for bad in ("56", [5, -1], [5.0], [True], None, [5, 10]):
        with pytest.raises(ValueError, match="token_ids"):
            ForcedResponse(bad, end_id=9, n_prompt_tokens=3, vocab_size=10)  # type: ignore[arg-type]


def test_what_is_outside_the_vocabulary_is_found_once_its_size_is_known() -> None:
    offered = LogitsProcessors([RequestedProcessor("forced_response", {"token_ids": [5, 10]})])
    offered.check(end_id=9, vocab_size=None)
    offered.check(end_id=9, vocab_size=11)
    with pytest.raises(
        UsageError,
        match=r"^--logits-processor forced_response: params: token_ids: 10 is outside the vocab",
    ):
        offered.check(end_id=9, vocab_size=10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--logits-processor", "nobody"], "--logits-processor nobody: is not installed"),
        (["--logits-processor", "temperature={"], "--logits-processor temperature: its parameters"),
        (
            ["--logits-processor", 'temperature={"temperature": 0}'],
            "--logits-processor temperature: params: temperature must be a finite number, 0.01 or "
            "more: 0",
        ),
        (
            ["--logits-processor", 'forced_response={"token_ids": [999999999]}'],
            "--logits-processor forced_response: params: token_ids: 999999999 is outside",
        ),
        (
            ["--allow-logits-processor", "nobody"],
            "--allow-logits-processor nobody: is not installed",
        ),
    ],
)
def test_a_wrong_option_ends_the_command(arguments: list[str], message: str) -> None:
    started = ["worker", "sim", "--role", "agg", "--listen", "127.0.0.1:0", "--insecure"]
    result = CliRunner().invoke(cli, [*started, *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
