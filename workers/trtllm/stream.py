"""One leg on a worker: from the engine's cumulative, mutable result to OpenEngine deltas."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import anyio
import grpc
from typing_extensions import override

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, PauseGate, Sink
from slagate.proto.rpc.status import OK, Status
from slagate.workers.errors import cut
from slagate.workers.legs import CONTEXT_ONLY
from slagate.workers.trtllm.engine import abort, code_of_failure
from slagate.workers.trtllm.handoffs import Handoffs
from slagate.workers.trtllm.metrics import Outcome
from slagate.workers.trtllm.output import (
    MAX_PROMPT_ENTRIES,
    OutputCursor,
    ends_at_first_token,
    finished,
    n_prompt_entries,
    prompt_output,
    settle_end,
)
from slagate.workers.trtllm.request import GENERATION_ONLY, EngineRequest

log = logging.getLogger(__name__)

TURN_RESULTS = 16
"""A leg's first result, and then one in so many, wait for a turn of the loop: the engine is waited for."""

_OUTCOME_OF_CODE: dict[grpc.StatusCode, Outcome] = {
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
    grpc.StatusCode.INTERNAL: "failed",
}


class EngineStream(Call):
    """The call of one leg; `pump` is its task.

    Sent to the sink:  refused            finish(non-OK)
                       accepted           [prompt] token* finished* finish(OK), or
                                          [prompt] prefill_ready finish(OK)
                       failed             error finish(OK)
                       cancelled, expired finish(non-OK) at once; the engine's last result is awaited
    """

    def __init__(self, sink: Sink, handoffs: Handoffs) -> None:
        self._sink = sink
        self._handoffs = handoffs
        self.parked_id: int | None = None  # of the handoff in the answer
        self.outcome: Outcome = "ok"  # valid once it has ended
        self._ended = False
        self._gate = PauseGate()
        self._scope = anyio.CancelScope()
        self.result: Any = None  # the engine's; None where it did not take the leg
        self._timer: asyncio.TimerHandle | None = None
        self._cursors: list[OutputCursor] = []
        self._tokens = (
            oe.GenerateResponse()
        )  # made anew for each delta: its parts are costly to make
        self._has_sent = False
        self._abort_wanted = False
        self._may_abort = True

    def start(self, result: Any, leg: EngineRequest, *, timeout_s: float | None) -> None:
        """Begin with the result of a leg that the engine has accepted, and will fill."""
        self.result = result
        self._leg = leg
        self._tokens.request_id = leg.request_id
        # The KV transfer before a decode leg's first result cannot be interrupted.
        self._may_abort = leg.kind != GENERATION_ONLY
        # The log probabilities of the token in a handoff come with the handoff, or not at all.
        carried = getattr(leg.disaggregated, "first_gen_log_probs", None)
        n_lagging = int(leg.kind == GENERATION_ONLY and not carried)
        self._cursors = [
            OutputCursor(index, leg.form, n_lagging=n_lagging)
            for index in range(leg.form.n_outputs)
        ]
        if timeout_s is not None:
            expired = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded on the worker")
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._stop, expired)

    @override
    def cancel(self) -> None:
        self._stop(Status(grpc.StatusCode.CANCELLED, "cancelled"))

    @override
    def pause(self) -> None:
        if not self._ended:
            self._gate.pause()

    @override
    def resume(self) -> None:
        self._gate.resume()

    def fail_engine_gone(self, error: Exception) -> None:
        """End with this error and await no result: the engine or the worker is going away."""
        code = oe.ERROR_CODE_INTERNAL if self._may_abort else oe.ERROR_CODE_KV_TRANSFER_FAILED
        # Retryable, as another worker may be well.
        self._end_with(error, code, retryable=True)
        self._scope.cancel()

    def _stop(self, status: Status) -> None:
        if not self._ended:
            self.finish(status)
            self._abort_engine()

    def _abort_engine(self) -> None:
        """Abort the engine's request, now or at its first result."""
        self._abort_wanted = not self._may_abort
        if self._may_abort:
            abort(self.result)

    def finish(self, status: Status) -> None:
        """End the sink unless it has ended."""
        if self._ended:
            return
        self._ended = True
        if status.code is not grpc.StatusCode.OK:
            self.outcome = _OUTCOME_OF_CODE.get(status.code, "refused")
        self._gate.resume()
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._sink.finish(status)
        except Exception:
            # An error of one call's sink must not end the task group of all.
            log.exception("leg.end")

    async def pump(self, *, on_result: Callable[[], None] = lambda: None) -> None:
        """Send the engine's output to the sink until its last result. `on_result` is called for each."""
        n_results = 0
        with self._scope:
            async for _ in self.result:
                on_result()
                self._may_abort = True
                if self._abort_wanted:
                    self._abort_engine()
                if self._gate.is_closed or n_results % TURN_RESULTS == 0:
                    await self._gate.wait()
                n_results += 1
                if not self._ended:
                    self._run_or_give_up(self._emit)
                elif self._leg.kind == CONTEXT_ONLY:
                    self._run_or_give_up(self._release)
            is_settled = not self._leg.form.stops and all(one.finished for one in self._cursors)
            if self.parked_id is None and not is_settled:
                self._run_or_give_up(self._end_outputs)
            self.finish(OK)

    def _release(self) -> None:
        """Free what was parked just when the leg was cancelled: nobody will ever fetch it."""
        if _has_handoff(self._params()):
            self._handoffs.release(self._params().ctx_request_id)

    def _end_outputs(self) -> None:
        """End what the engine's last result left open, once it has ended any of the outputs.

        A stop text in one output ends the result of all of them. Its request may go on in the engine, which
        does not look at text.
        """
        outputs = self.result.outputs
        ended = [output for output in outputs if output.finish_reason == "stop"]
        if any(isinstance(output.stop_reason, str) for output in ended):
            abort(self.result)
        is_open = not all(cursor.finished for cursor in self._cursors)
        if is_open and any(cursor.finished for cursor in self._cursors):
            for output in outputs:
                if output.finish_reason is None:
                    settle_end(output, self._leg.form)
            self._emit()
        elif is_open:
            self.fail(RuntimeError("the engine's answer has no end"))

    def _params(self) -> Any:
        return self.result.outputs[0].disaggregated_params

    def _run_or_give_up(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            # A bug of this code ends this leg only; an error of the engine would end the worker.
            log.exception("leg.emit")
            self.fail(error, code=oe.ERROR_CODE_INTERNAL)
            self._abort_engine()

    def _emit(self) -> None:
        if not self._has_sent and self._leg.form.prompt_top_n is not None:
            self._emit_prompt(self.result.outputs[0].prompt_logprobs, self._leg.form.prompt_top_n)
        if self._ended:
            return
        if self._leg.kind == CONTEXT_ONLY and _has_handoff(self._params()):
            self.parked_id = self._params().ctx_request_id
            session = self._handoffs.park(self._params(), rank=self._leg.rank)
            self._send(usage=self._usage(), prefill_ready=oe.PrefillReady(kv_session=session))
            return
        form = self._leg.form
        if self._leg.kind == GENERATION_ONLY and not self._has_sent:
            budget = self._leg.sampling.max_tokens
            if ends_at_first_token(self.result.outputs[0], form, max_tokens=budget):
                self._abort_engine()
        for output, cursor in zip(self.result.outputs, self._cursors, strict=True):
            if cursor.finished:
                continue
            if form.stops and output.finish_reason is not None:
                settle_end(output, form)
            if cursor.take_delta(output, self._tokens.token):
                self._has_sent = True
                self._sink.message(self._tokens.SerializeToString())
            if output.finish_reason is not None:
                cursor.finished = True
                is_last = all(one.finished for one in self._cursors)
                self._send(
                    usage=self._usage() if is_last else None,
                    finished=finished(cursor.index, output, form, end_id=self._leg.end_id),
                )

    def _emit_prompt(self, entries: Any, top_n: int) -> None:
        if not entries:
            return
        if n_prompt_entries(entries, top_n) > MAX_PROMPT_ENTRIES:
            error = ValueError(f"prompt logprobs: over the limit of {MAX_PROMPT_ENTRIES} entries")
            self.fail(error, code=oe.ERROR_CODE_INVALID_ARGUMENT)
            self._abort_engine()
        else:
            self._send(prompt=prompt_output(self._leg.tokens, entries, top_n))

    def fail_request(self, error: Exception) -> None:
        """End with the error that the engine's result raised; the engine may go on with the request."""
        self.fail(error)
        if isinstance(error, AssertionError):
            abort(self.result)

    def fail(self, error: Exception, *, code: oe.ErrorCode.ValueType | None = None) -> None:
        """End the leg with an error event. Without `code` the text of the error decides what it means."""
        if code is None:
            code = code_of_failure(error, in_transfer=not self._may_abort)
        self._end_with(error, code, retryable=code == oe.ERROR_CODE_KV_TRANSFER_FAILED)

    def _end_with(self, error: Exception, code: oe.ErrorCode.ValueType, *, retryable: bool) -> None:
        """Send an error event and end. Does not raise, whatever the error's text and the sink are like."""
        if self._ended:
            return
        status = Status(grpc.StatusCode.INTERNAL, "the leg's error could not be sent")
        self.outcome = "failed"
        try:
            # After output, another worker would send the same output again.
            retryable = retryable and not self._has_sent
            message = cut(str(error) or type(error).__name__)
            failure = oe.EngineError(code=code, message=message, retryable=retryable)
            self._send(usage=self._usage(), error=failure)
            status = OK
        except Exception:
            log.exception("leg.fail")
        finally:
            self.finish(status)

    def _usage(self) -> oe.Usage:
        n_prompt = len(self._leg.tokens)
        n_output = sum(len(output.token_ids) for output in self.result.outputs)
        return oe.Usage(
            prompt_tokens=n_prompt,
            completion_tokens=n_output,
            total_tokens=n_prompt + n_output,
            cached_prompt_tokens=self.result.cached_tokens,
        )

    def _send(self, **event: Any) -> None:
        self._has_sent = True
        response = oe.GenerateResponse(request_id=self._leg.request_id, **event)
        self._sink.message(response.SerializeToString())


def _has_handoff(params: Any) -> bool:
    # The params begin as a copy of the request's, so that they are there proves nothing.
    return params is not None and params.ctx_request_id is not None
