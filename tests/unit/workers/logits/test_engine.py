"""Logits processors as the engine calls them: shapes, streams, and what is wrong with one contained."""

import logging
import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import numpy as np
import pytest

from slagate.workers.logits import engine as trtllm_logits
from slagate.workers.logits.engine import LOG_EVERY_S, Failures, adapted, external_stream
from slagate.workers.logits.examples import Temperature
from slagate.workers.sim.request import SimLogitsProcessor


def add_one(input_ids: Sequence[int], logits: Any, /) -> str:
    logits += 1
    return "what is returned is ignored"


def adapter(processor: Any, on_stream: Any = external_stream) -> Any:
    return adapted(SimLogitsProcessor, "mine", processor, on_stream)


def logits_of(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_a_processor_gets_the_tokens_and_one_dimension_of_logits() -> None:
    calls = []

    def processor(input_ids: Sequence[int], logits: Any, /) -> None:
        calls.append((input_ids, logits.shape))
        logits[2] = 9

    logits = logits_of(1, 1, 4)
    adapter(processor)(7, logits, [[1, 2, 3]], None, None)
    assert calls == [([1, 2, 3], (4,))]
    assert logits.tolist() == [[[0, 1, 9, 3]]]


def test_an_adapter_is_one_of_the_engines_with_its_parameters() -> None:
    """The engine counts the parameters of what it is to call."""
    made = adapter(add_one)
    assert isinstance(made, SimLogitsProcessor)
    assert len(signature(made).parameters) == 5
    assert type(made) is type(adapter(Temperature(2)))


def test_it_works_on_the_engines_stream() -> None:
    entered: list[Any] = []
    inside: list[bool] = []

    @contextmanager
    def on_stream(address: Any) -> Iterator[None]:
        entered.append(address)
        inside.append(True)
        yield
        inside.pop()

    def processor(input_ids: Sequence[int], logits: Any, /) -> None:
        assert inside
        logits += 1

    logits = logits_of(1, 1, 2)
    adapter(processor, on_stream)(7, logits, [[1]], 4711, 8)
    assert (entered, inside, logits.tolist()) == ([4711], [], [[[1, 2]]])
    assert isinstance(external_stream(None), nullcontext)


def test_adapters_travel_to_the_processes_of_an_engine() -> None:
    made = pickle.loads(pickle.dumps(adapter(Temperature(2))))
    logits = logits_of(1, 1, 4)
    made(7, logits, [[1]], None, None)
    assert logits.tolist() == [[[0, 0.5, 1, 1.5]]]
    assert type(made) is type(adapter(add_one))


class TensorLike:
    """Copied by `clone` alone, as a tensor is: what copy makes of one shares its memory."""

    def __init__(self, values: Any) -> None:
        self.values = values
        self.shape = values.shape

    def __getitem__(self, index: Any) -> "TensorLike":
        return TensorLike(self.values[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[index] = value.values if isinstance(value, TensorLike) else value

    def clone(self) -> "TensorLike":
        return TensorLike(self.values.copy())


@pytest.mark.parametrize("kind", [lambda array: array, TensorLike])
def test_a_processor_that_raises_halfway_has_changed_nothing(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def halfway(input_ids: Sequence[int], logits: Any, /) -> None:
        logits[:2] = -1
        raise IndexError("token 9 is outside")

    trtllm_logits._failures.cache_clear()
    logits = logits_of(1, 1, 4)
    before = logits.copy()
    for _ in range(3):
        adapter(halfway)(7, kind(logits), [[1]], None, None)
    assert logits.tolist() == before.tolist()
    (record,) = caplog.records
    assert (record.message, record.__dict__["processor"]) == ("logits_processor.failed", "mine")
    assert record.exc_info is not None


@pytest.mark.parametrize(
    ("shape", "ids"),
    [((2, 1, 4), [[1]]), ((1, 2, 4), [[1], [2]]), ((1, 4), [[1]]), ((1, 1, 4), [[1], [2]])],
)
def test_beams_and_other_shapes_are_left_alone(shape: tuple[int, ...], ids: Any) -> None:
    logits = logits_of(*shape)
    before = logits.copy()
    adapter(add_one)(7, logits, ids, None, None)
    assert logits.tolist() == before.tolist()


def test_a_stream_that_cannot_be_had_is_a_failure_of_the_processor() -> None:
    def no_stream(address: Any) -> AbstractContextManager[object]:
        raise RuntimeError("no CUDA")

    logits = logits_of(1, 1, 2)
    adapter(add_one, no_stream)(7, logits, [[1]], 1, None)
    assert logits.tolist() == [[[0, 1]]]


def test_failures_are_logged_once_in_a_while_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = Failures("mine")
    with caplog.at_level(logging.ERROR):
        for now_s in (0.0, 1.0, LOG_EVERY_S - 1, LOG_EVERY_S + 1, LOG_EVERY_S + 2):
            failures.count_failure(now_s)
    counts = [(r.__dict__["failures"], r.__dict__["failures_so_far"]) for r in caplog.records]
    assert counts == [(1, 1), (3, 4)]
