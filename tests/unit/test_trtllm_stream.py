"""One leg on a worker, where the simulated engine cannot be brought to the moment in question."""

from types import SimpleNamespace

import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers.trtllm_request import EngineRequest
from slagate.workers.trtllm_stream import EngineStream
from support import virtual_loop
from support.engine_result import Result
from support.sinks import KeepingSink

END_ID = 128_001


def leg(kind: str) -> EngineRequest:
    return EngineRequest("r", kind, [1, 2], SimpleNamespace(end_id=END_ID), None, None)


def play(kind: str, result: Result, *, cancel: bool) -> tuple[KeepingSink, EngineStream, list[int]]:
    abandoned: list[int] = []

    async def main() -> tuple[KeepingSink, EngineStream, list[int]]:
        sink = KeepingSink()
        stream = EngineStream(sink, backend="SHM", abandon=abandoned.append)
        stream.start(result, leg(kind), timeout_s=None)
        if cancel:
            stream.cancel()
        await stream.pump()
        return sink, stream, abandoned

    return virtual_loop.run(main)


def test_a_handoff_parked_while_its_leg_is_given_up_is_freed() -> None:
    sink, stream, abandoned = play(
        "context_only", Result(ctx_request_id=7, tokens=[3]), cancel=True
    )
    assert abandoned == [7]
    assert stream.parked_id is None
    assert (sink.messages, sink.code) == ([], grpc.StatusCode.CANCELLED)


def test_a_handoff_that_is_answered_with_is_kept() -> None:
    sink, stream, abandoned = play(
        "context_only", Result(ctx_request_id=7, tokens=[3]), cancel=False
    )
    assert abandoned == []
    assert stream.parked_id == 7
    assert sink.events == ["prefill_ready"]


def test_params_without_a_context_id_are_no_handoff() -> None:
    """The params of a result start as a copy of the request's, so their presence proves nothing."""
    sink, stream, _ = play("context_only", Result(ctx_request_id=None, tokens=[3]), cancel=False)
    assert sink.events == ["token", "finished"]
    assert stream.parked_id is None


def test_a_decode_leg_is_not_aborted_before_its_first_result() -> None:
    """The KV transfer behind it cannot be interrupted; the abort waits for it."""
    result = Result(ctx_request_id=None, tokens=[3])
    aborts_at_cancel = []

    async def main() -> None:
        stream = EngineStream(KeepingSink(), backend="SHM", abandon=aborts_at_cancel.append)
        stream.start(result, leg("generation_only"), timeout_s=None)
        stream.cancel()
        aborts_at_cancel.append(result.n_aborts)
        await stream.pump()

    virtual_loop.run(main)
    assert aborts_at_cancel == [0]
    assert result.n_aborts == 1


@pytest.mark.parametrize(
    ("stop_reason", "match"),
    [
        (None, oe.StopMatch(eos_token_id=END_ID)),
        (7, oe.StopMatch(stop_token_id=7)),
        ("bye", oe.StopMatch(stop_text="bye")),
    ],
)
def test_a_stop_says_what_it_was_also_at_the_end_of_text(
    stop_reason: int | str | None, match: oe.StopMatch
) -> None:
    result = Result(tokens=[3], finish_reason="stop", stop_reason=stop_reason)
    sink, _, _ = play("context_and_generation", result, cancel=False)
    last = sink.messages[-1].finished
    assert last.reason == oe.FINISH_REASON_STOP
    assert last.stop_match == match


def test_an_end_by_length_matched_nothing() -> None:
    sink, _, _ = play("context_and_generation", Result(tokens=[3]), cancel=False)
    assert not sink.messages[-1].finished.HasField("stop_match")
