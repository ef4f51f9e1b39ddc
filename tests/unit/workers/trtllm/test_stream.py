"""One leg on a worker, where the simulated engine cannot be brought to the moment in question."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import anyio
import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import Status
from slagate.workers.runtime import virtual_loop
from slagate.workers.trtllm.handoffs import Handoffs
from slagate.workers.trtllm.metrics import SILENT
from slagate.workers.trtllm.output import MAX_PROMPT_ENTRIES, HiddenStop, OutputForm, StopRule
from slagate.workers.trtllm.poll import Activity
from slagate.workers.trtllm.request import EngineRequest
from slagate.workers.trtllm.running import EngineRequests
from slagate.workers.trtllm.stream import EngineStream
from support.engine.result import Result
from support.worker.sinks import KeepingSink

END_ID = 128_001


def leg(kind: str, **form: Any) -> EngineRequest:
    sampling = SimpleNamespace(end_id=END_ID, max_tokens=None)
    handed_off = SimpleNamespace(first_gen_log_probs=form.pop("carried", None))
    return EngineRequest(
        "r", kind, [1, 2], sampling, OutputForm(**form), end_id=END_ID, disaggregated=handed_off
    )


def handoffs(abandoned: list[int]) -> Handoffs:
    def release(session_id: int) -> bool:
        abandoned.append(session_id)
        return True

    return Handoffs(backend="SHM", limit_s=60.0, release=release)


def play(
    kind: str, result: Any, *, cancel: bool = False, **form: Any
) -> tuple[KeepingSink, EngineStream, list[int]]:
    abandoned: list[int] = []

    async def main() -> tuple[KeepingSink, EngineStream, list[int]]:
        sink = KeepingSink()
        stream = EngineStream(sink, handoffs(abandoned))
        stream.start(result, leg(kind, **form), timeout_s=None)
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
    sink, stream, _ = play("context_only", Result(ctx_request_id=None, tokens=[3]))
    assert sink.events == ["token", "finished"]
    assert stream.parked_id is None


def test_a_decode_leg_is_not_aborted_before_its_first_result() -> None:
    """The KV transfer behind it cannot be interrupted; the abort waits for it."""
    result = Result(ctx_request_id=None, tokens=[3])
    aborts_at_cancel = []

    async def main() -> None:
        stream = EngineStream(KeepingSink(), handoffs([]))
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
        (8, oe.StopMatch(eos_token_id=8)),  # not the request's: the model has several
        ("bye", oe.StopMatch(stop_text="bye")),
    ],
)
def test_a_stop_says_what_it_was_also_at_the_end_of_text(
    stop_reason: int | str | None, match: oe.StopMatch
) -> None:
    result = Result(tokens=[3], finish_reason="stop", stop_reason=stop_reason)
    stops = (StopRule(7, (7,)), StopRule("bye", (1, 2)))
    sink, _, _ = play("context_and_generation", result, stops=stops)
    last = sink.messages[-1].finished
    assert last.reason == oe.FINISH_REASON_STOP
    assert last.stop_match == match


def test_an_end_by_length_matched_nothing() -> None:
    sink, _, _ = play("context_and_generation", Result(tokens=[3]))
    assert not sink.messages[-1].finished.HasField("stop_match")


class Steps(Result):
    """A result that changes in place: each step is what the outputs are at one yield."""

    def __init__(self, *steps: list[tuple[list[int], str | None]]) -> None:
        super().__init__(tokens=[], finish_reason=None)
        self._steps = steps

    async def __aiter__(self) -> AsyncIterator[Result]:
        for step in self._steps:
            self.outputs = [self.output(tokens, reason) for tokens, reason in step]
            yield self


def test_an_answer_without_an_end_is_an_error() -> None:
    sink, _, _ = play("context_and_generation", Steps([([3], None)]))
    assert sink.events == ["token", "error"]
    assert sink.messages[-1].error.code == oe.ERROR_CODE_INTERNAL
    assert sink.messages[-1].usage.completion_tokens == 1
    assert sink.code is grpc.StatusCode.OK


def test_a_yield_without_news_says_nothing() -> None:
    steps = Steps([([3], None)], [([3], None)], [([3], "length")])
    sink, _, _ = play("context_and_generation", steps)
    assert sink.events == ["token", "finished"]


def test_usage_is_on_the_last_message_of_several_outputs() -> None:
    """Also where several end in one yield, and nothing of an output follows its end."""
    steps = Steps(
        [([3], None), ([4], "stop")],
        [([3, 5], None), ([4], "stop")],
        [([3, 5, 6], "length"), ([4], "stop")],
    )
    sink, _, _ = play("context_and_generation", steps, n_outputs=2)
    of = [
        (m.WhichOneof("event"), m.token.output_index or m.finished.output_index)
        for m in sink.messages
    ]
    assert of == [
        ("token", 0), ("token", 1), ("finished", 1), ("token", 0), ("token", 0), ("finished", 0),
    ]  # fmt: skip
    assert [m.HasField("usage") for m in sink.messages] == [False] * 5 + [True]
    assert sink.messages[-1].usage.completion_tokens == 4


def test_too_many_prompt_logprobs_are_an_error_of_the_request() -> None:
    class Huge(Result):
        async def __aiter__(self) -> AsyncIterator[Result]:
            # One entry of the size is as good as a thousand of a thousand.
            self.outputs[0].prompt_logprobs = [dict.fromkeys(range(MAX_PROMPT_ENTRIES + 1), -1.0)]
            yield self

    sink, _, _ = play("context_and_generation", (result := Huge(tokens=[3])), prompt_top_n=1)
    assert sink.events == ["error"]
    assert sink.messages[0].error.code == oe.ERROR_CODE_INVALID_ARGUMENT
    assert result.n_aborts == 1


@pytest.mark.parametrize("carried", [None, [-5.0]])
@pytest.mark.parametrize(
    ("tokens", "reason", "stop_reason", "kept"),
    [
        ([5, 6, 9], "length", None, 2),  # cut here
        ([5, 6], "stop", 9, 2),  # cut by the engine, which leaves the log probability
        ([END_ID, 6], None, None, 1),  # ends at the token of the handoff
    ],
)
def test_w10_log_probabilities_one_behind_stay_so_when_the_first_result_is_cut(
    tokens: list[int],
    reason: str | None,
    stop_reason: int | None,
    kept: int,
    carried: list[float] | None,
) -> None:
    result = Result(tokens=tokens, finish_reason=reason, stop_reason=stop_reason)
    result.outputs[0].logprobs = [*(carried or []), -6.0, -9.0]
    sink, _, _ = play(
        "generation_only", result, carried=carried, top_n=0, end_id=END_ID,
        stops=(StopRule(9, (9,)),), hidden_stops=(HiddenStop("", (9,)),),
    )  # fmt: skip
    infos = [info for message in sink.messages for info in message.token.tokens]
    assert [info.token_id for info in infos] == tokens[:kept]
    assert infos[0].HasField("logprob") == (carried is not None)
    assert [info.logprob for info in infos[1:]] == [-6.0][: kept - 1]


def test_w10_results_of_another_shape_end_their_own_leg_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What leaves `pump` is taken for an error of the engine's, which ends the worker."""
    nameless = Result(tokens=[3], finish_reason="stop")
    del nameless.outputs[0].stop_reason
    sink, _, _ = play("context_and_generation", nameless, stops=(StopRule(7, (7,)),))
    assert sink.events == ["error"]
    sink, _, _ = play("context_only", Steps([]), cancel=True)
    assert sink.code is grpc.StatusCode.CANCELLED
    assert caplog.messages == ["leg.emit"] * 3


class BrokenSink(KeepingSink):
    def message(self, data: bytes, /) -> None:
        raise RuntimeError("nobody takes it")


@pytest.mark.parametrize("ends", [True, False])
def test_a_sink_that_takes_nothing_ends_its_own_leg_only(*, ends: bool) -> None:
    class Sink(BrokenSink):
        def finish(self, status: Status, /) -> None:
            super().finish(status)
            if not ends:
                raise RuntimeError("nor the end")

    async def main() -> None:
        sink, result = Sink(), Result(tokens=[3])
        stream = EngineStream(sink, handoffs([]))
        stream.start(result, leg("context_and_generation"), timeout_s=None)
        await stream.pump()
        assert sink.code is grpc.StatusCode.INTERNAL
        assert result.n_aborts == 1

    virtual_loop.run(main)


@pytest.mark.parametrize(
    ("text", "shown"), [("cannot open \udcff", "cannot open ?"), ("", "RuntimeError")]
)
def test_any_text_of_an_error_is_sent(text: str, shown: str) -> None:
    async def main() -> None:
        sink = KeepingSink()
        stream = EngineStream(sink, handoffs([]))
        stream.start(Result(tokens=[]), leg("context_and_generation"), timeout_s=None)
        stream.fail(RuntimeError(text))
        assert (sink.events, sink.messages[0].error.message) == (["error"], shown)
        assert sink.code is grpc.StatusCode.OK

    virtual_loop.run(main)


TRANSFER, WRONG = oe.ERROR_CODE_KV_TRANSFER_FAILED, oe.ERROR_CODE_INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("kind", "text", "code"),
    [
        ("context_only", "KV transfer failed: the pool is full", TRANSFER),
        ("context_only", "Error in kv cache transfer for context requests", TRANSFER),
        ("context_only", "a fault of its own", oe.ERROR_CODE_INTERNAL),
        ("generation_only", "KV transfer failed: no such session", TRANSFER),
        ("generation_only", "a peer is gone", TRANSFER),
        ("generation_only", "5999 tokens never fit a KV cache of 2048 tokens", WRONG),
        ("context_and_generation", "5999 tokens never fit a KV cache of 2048 tokens", WRONG),
        ("context_and_generation", "a fault of its own", oe.ERROR_CODE_INTERNAL),
    ],
)
def test_an_error_of_the_engine_is_what_its_words_say(
    kind: str, text: str, code: oe.ErrorCode.ValueType
) -> None:
    """Only what is about the transfer may go better with another worker."""

    async def main() -> None:
        sink = KeepingSink()
        stream = EngineStream(sink, handoffs([]))
        stream.start(Result(tokens=[]), leg(kind), timeout_s=None)
        stream.fail(RuntimeError(text))
        error = sink.messages[0].error
        assert (error.code, error.retryable) == (code, code == TRANSFER)

    virtual_loop.run(main)


class LateResult(Result):
    """One that takes a second."""

    async def __aiter__(self) -> AsyncIterator[Result]:
        await anyio.sleep(1)
        yield self


def test_everybody_who_waits_for_the_last_request_of_an_engine_is_told() -> None:
    fatal: list[Exception] = []

    async def main() -> None:
        stream = EngineStream(KeepingSink(), handoffs([]))
        stream.start(LateResult(tokens=[3]), leg("context_and_generation"), timeout_s=None)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                running = EngineRequests(
                    Activity(),
                    handoffs([]),
                    tasks=tasks,
                    request_error=ValueError,
                    on_fatal=fatal.append,
                    observer=SILENT,
                )
                running.start("r", stream)
                for _ in range(2):
                    tasks.start_soon(running.all_ended)

    virtual_loop.run(main)
    assert fatal == []


def test_w10_an_abort_that_the_engine_does_not_know_any_more_ends_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Gone(Result):
        def abort(self) -> None:
            raise AttributeError("'NoneType' object has no attribute 'abort_request'")

    sink, _, _ = play("context_and_generation", Gone(tokens=[3]), cancel=True)
    assert sink.status.code is grpc.StatusCode.CANCELLED
    assert "engine.abort_failed" in caplog.messages
