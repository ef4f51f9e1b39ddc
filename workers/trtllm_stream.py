"""One leg on a worker: from the engine's cumulative, mutable result to OpenEngine deltas."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import anyio
import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.workers.codec import session_of_params
from slagate.workers.trtllm_request import EngineRequest
from slagate.workers.worker import OK, Sink, Status

log = logging.getLogger(__name__)


class EngineStream:
    """The `Call` of one leg; `pump` is its task.

    Sent to the sink:  refused            end(non-OK)
                       accepted           token* finished end(OK), or prefill_ready end(OK)
                       failed             error end(OK)
                       cancelled, expired end(non-OK) at once; the engine's last result is awaited
    """

    def __init__(self, sink: Sink, *, backend: str, abandon: Callable[[int], object]) -> None:
        self._sink = sink
        self._abandon = abandon
        self._backend = backend
        self.parked_id: int | None = None  # the handoff that was answered with
        self._ended = False
        self._open = anyio.Event()
        self._open.set()
        self._result: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._n_sent = 0
        self._abort_wanted = False
        self._may_abort = True

    def start(self, result: Any, leg: EngineRequest, *, timeout_s: float | None) -> None:
        """The engine has taken the leg; `result` is what it will fill."""
        self._result = result
        self._leg = leg
        self._may_abort = leg.kind != "generation_only"
        if timeout_s is not None:
            expired = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded on the worker")
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._stop, expired)

    def cancel(self) -> None:
        """As `Call.cancel`. The engine's last result is still awaited."""
        self._stop(Status(grpc.StatusCode.CANCELLED, "cancelled"))

    def pause(self) -> None:
        """As `Call.pause`."""
        if self._open.is_set() and not self._ended:
            self._open = anyio.Event()

    def resume(self) -> None:
        """As `Call.resume`."""
        self._open.set()

    def _stop(self, status: Status) -> None:
        if self._ended:
            return
        self.finish(status)
        self._abort_wanted = True
        self._abort_engine()

    def _abort_engine(self) -> None:
        if self._abort_wanted and self._may_abort:
            self._result.abort()

    def finish(self, status: Status) -> None:
        """End the sink unless it has ended."""
        if self._ended:
            return
        self._ended = True
        self._open.set()
        if self._timer is not None:
            self._timer.cancel()
        self._sink.end(status)

    async def pump(self) -> None:
        """Move the engine's output to the sink until the engine's last result."""
        async for _ in self._result:
            self._may_abort = True
            self._abort_engine()
            await self._open.wait()
            if not self._ended:
                self._emit_or_give_up()
            elif self._leg.kind == "context_only" and _has_handoff(
                self._result.outputs[0].disaggregated_params
            ):
                # Parked in the step in which the leg was given up: nobody will ever ask for it.
                self._abandon(self._result.outputs[0].disaggregated_params.ctx_request_id)
        self.finish(OK)

    def _emit_or_give_up(self) -> None:
        try:
            self._emit()
        except Exception as error:
            # Ours, not the engine's: it ends this leg, where an engine's own error ends the worker.
            log.exception("leg.emit")
            self.fail(error)
            self._abort_wanted = True
            self._abort_engine()

    def _emit(self) -> None:
        output = self._result.outputs[0]
        if self._leg.kind == "context_only" and _has_handoff(output.disaggregated_params):
            self.parked_id = output.disaggregated_params.ctx_request_id
            self._send(
                usage=self._usage(),
                prefill_ready=oe.PrefillReady(
                    kv_session=session_of_params(
                        output.disaggregated_params, transfer_backend=self._backend
                    )
                ),
            )
            return
        new = output.token_ids[self._n_sent :]
        if new:
            self._n_sent += len(new)
            self._send(
                token=oe.TokenOutput(
                    output_index=0, tokens=[oe.TokenInfo(token_id=token) for token in new]
                )
            )
        if output.finish_reason is not None:
            end_id = self._leg.sampling.end_id
            self._send(usage=self._usage(), finished=_finished(output, end_id))

    def fail(self, error: Exception) -> None:
        """The engine gave the request up: one terminal error event, then a clean end."""
        if self._ended:
            return
        # Before the first result of a decode leg there is nothing but the transfer to fail.
        in_transfer = self._leg.kind == "generation_only" and not self._may_abort
        code = oe.ERROR_CODE_KV_TRANSFER_FAILED if in_transfer else oe.ERROR_CODE_INTERNAL
        self._send(usage=self._usage(), error=oe.EngineError(code=code, message=str(error)))
        self.finish(OK)

    def _usage(self) -> oe.Usage:
        n_prompt, n_output = len(self._leg.tokens), len(self._result.outputs[0].token_ids)
        return oe.Usage(
            prompt_tokens=n_prompt,
            completion_tokens=n_output,
            total_tokens=n_prompt + n_output,
            cached_prompt_tokens=self._result.cached_tokens,
        )

    def _send(self, **event: Any) -> None:
        response = oe.GenerateResponse(request_id=self._leg.request_id, **event)
        self._sink.message(response.SerializeToString())


def _has_handoff(params: Any) -> bool:
    # The params start as a copy of the request's, so their presence proves nothing.
    return params is not None and params.ctx_request_id is not None


def _finished(output: Any, end_id: int) -> oe.GenerationFinished:
    finished = oe.GenerationFinished(output_index=0)
    if output.finish_reason == "stop":
        finished.reason = oe.FINISH_REASON_STOP
        if isinstance(output.stop_reason, int):
            finished.stop_match.stop_token_id = output.stop_reason
        elif isinstance(output.stop_reason, str):
            finished.stop_match.stop_text = output.stop_reason
        else:
            finished.stop_match.eos_token_id = end_id
    elif output.finish_reason in ("length", "not_finished"):
        finished.reason = oe.FINISH_REASON_LENGTH
    else:
        finished.reason = oe.FINISH_REASON_CANCELLED
        finished.message = str(output.finish_reason)
    return finished
