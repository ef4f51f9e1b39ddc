"""One leg on a worker, where the simulated engine cannot be brought to the moment in question."""

from collections.abc import AsyncIterator
from types import SimpleNamespace

import grpc

from slagate.workers.trtllm_request import EngineRequest
from slagate.workers.trtllm_stream import EngineStream
from support import virtual_loop
from support.sinks import KeepingSink


class Result:
    """An engine's result that is there at once."""

    def __init__(self, *, ctx_request_id: int | None, tokens: list[int]) -> None:
        params = SimpleNamespace(
            ctx_request_id=ctx_request_id,
            opaque_state=b"state",
            first_gen_tokens=tokens,
            draft_tokens=None,
            disagg_request_id=None,
            ctx_dp_rank=None,
            ctx_info_endpoint=None,
        )
        output = SimpleNamespace(
            token_ids=tokens, finish_reason="length", stop_reason=None, disaggregated_params=params
        )
        self.outputs = [output]
        self.cached_tokens = 0
        self.n_aborts = 0

    def abort(self) -> None:
        self.n_aborts += 1

    async def __aiter__(self) -> AsyncIterator["Result"]:
        yield self


def leg(kind: str) -> EngineRequest:
    return EngineRequest("r", kind, [1, 2], None, None, None)


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
