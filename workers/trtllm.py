"""`TrtllmWorker`: the `Worker` port over TensorRT-LLM's `LLM` object, or over its double.

One engine request per leg, one task per request that turns the engine's cumulative, mutable result into
OpenEngine deltas. The rules that TensorRT-LLM imposes live here: which exceptions are the request's and
which are the engine's end, and that a decode leg is never aborted before its first result, because the
KV transfer behind it cannot be interrupted.
"""

import asyncio
import logging
from collections import OrderedDict
from typing import Any

import anyio
import grpc
from anyio.abc import TaskGroup
from google.protobuf.message import DecodeError

from slagate.proto import openengine_pb2 as oe
from slagate.workers import trtllm_info
from slagate.workers.codec import session_of_params
from slagate.workers.errors import Refused, WorkerError
from slagate.workers.trtllm_info import WorkerIdentity
from slagate.workers.trtllm_request import EngineApi, EngineRequest, parse_leg
from slagate.workers.worker import OK, Call, Metadata, Sink, Status

log = logging.getLogger(__name__)

REMEMBERED_IDS = 1024
"""Finished request ids kept so that a late Abort is ALREADY_FINISHED rather than NOT_FOUND."""

PROBE_TIMEOUT_S = 30.0


class TrtllmWorker:
    """Serves one `LLM`. The task group that owns the request tasks is the caller's."""

    def __init__(
        self,
        llm: Any,  # (tensorrt_llm ships no types, and is not installed everywhere)
        *,
        api: EngineApi,
        identity: WorkerIdentity,
        tasks: TaskGroup,
    ) -> None:
        self._llm = llm
        self._api = api
        self._identity = identity
        self._tasks = tasks
        self._live: dict[str, _Stream] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self.fatal = anyio.Event()

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"TrtllmWorker({self._identity.role_name}, {len(self._live)} live)"

    @property
    def n_live(self) -> int:
        """Requests the engine has not finished, cancelled ones included."""
        return len(self._live)

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        """As `Worker.generate`."""
        stream = _Stream(sink, backend=self._identity.transfer_backend)
        try:
            leg = self._parse(request, metadata)
            stream.start(self._submit(leg), leg, timeout_s=timeout_s)
        except Refused as refused:
            stream.finish(refused.status)
            return stream
        self._live[leg.request_id] = stream
        self._tasks.start_soon(self._run, leg.request_id, stream)
        return stream

    def _parse(self, data: bytes, metadata: Metadata) -> EngineRequest:
        try:
            request = oe.GenerateRequest.FromString(data)
        except DecodeError:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT, "request: is not a GenerateRequest"
            ) from None
        if request.request_id in self._live:
            raise Refused(
                grpc.StatusCode.ALREADY_EXISTS, f"request_id: {request.request_id!r} is running"
            )
        return parse_leg(
            request,
            metadata,
            api=self._api,
            role=self._identity.role,
            model=self._identity.model,
            max_seq_len=self._llm.args.max_seq_len,
            end_id=self._identity.end_id,
        )

    def _submit(self, leg: EngineRequest) -> Any:
        kwargs: dict[str, Any] = {"streaming": leg.kind != "context_only"}
        if leg.disaggregated is not None:
            kwargs["disaggregated_params"] = leg.disaggregated
        if leg.cache_salt is not None:
            kwargs["cache_salt"] = leg.cache_salt
        try:
            return self._llm.generate_async(leg.tokens, sampling_params=leg.sampling, **kwargs)
        except (ValueError, TypeError, NotImplementedError, self._api.RequestError) as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"engine: {error}") from error
        except RuntimeError as error:
            raise Refused(grpc.StatusCode.UNAVAILABLE, f"engine: {error}") from error

    async def _run(self, request_id: str, stream: "_Stream") -> None:
        try:
            await stream.pump()
        except self._api.RequestError as error:
            stream.fail(error)
        except Exception as error:
            # Whatever is not the request's own error means that the engine is gone.
            log.exception("engine.fatal")
            stream.fail(error)
            self.fatal.set()
        finally:
            stream.finish(Status(grpc.StatusCode.UNAVAILABLE, "the worker is shutting down"))
            del self._live[request_id]
            self._finished[request_id] = None
            if len(self._finished) > REMEMBERED_IDS:
                self._finished.popitem(last=False)

    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        """As `Worker.abort`."""
        target = request.WhichOneof("target")
        if target == "request_id":
            return self._abort_request(request.request_id)
        if target == "kv_session":
            session_id = request.kv_session.session_id
            is_id = session_id.isascii() and session_id.isdigit()
            if is_id and self._llm.release_session(int(session_id)):
                return oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED)
            raise Refused(grpc.StatusCode.NOT_FOUND, f"kv_session: no session {session_id!r}")
        if target == "all_requests":
            for stream in list(self._live.values()):
                stream.cancel()
            return oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED)
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "target: none is given")

    def _abort_request(self, request_id: str) -> oe.AbortResponse:
        if request_id in self._live:
            self._live[request_id].cancel()
            return oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED)
        if request_id in self._finished:
            return oe.AbortResponse(status=oe.ABORT_STATUS_ALREADY_FINISHED)
        raise Refused(grpc.StatusCode.NOT_FOUND, f"request_id: no request {request_id!r}")

    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        """As `Worker.load`."""
        return await trtllm_info.load(self._llm, self._identity, n_live=len(self._live))

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        """As `Worker.health`."""
        probe = self._probe if request.include_inference_probe else None
        return await trtllm_info.health(self._llm, self._identity, request, probe=probe)

    async def _probe(self) -> None:
        """Raises when one token cannot be had: a full local run, which needs no peer in any role."""
        sampling = self._api.SamplingParams(
            end_id=self._identity.end_id, max_tokens=1, detokenize=False
        )
        params = self._api.DisaggregatedParams(request_type="context_and_generation")
        with anyio.fail_after(PROBE_TIMEOUT_S):
            await self._llm.generate_async(
                [1], sampling_params=sampling, disaggregated_params=params
            ).aresult()

    async def server_info(self) -> oe.ServerInfo:
        """As `Worker.server_info`."""
        return trtllm_info.server_info(self._llm, self._identity)

    async def model_info(self, model: str) -> oe.ModelInfo:
        """As `Worker.model_info`."""
        if model != self._identity.model:
            raise WorkerError(
                Status(grpc.StatusCode.NOT_FOUND, f"model: {model!r} is not served here")
            )
        return trtllm_info.model_info(self._llm, self._identity)


class _Stream:
    """One leg: the engine's result on one side, the sink on the other.

    Sent to the sink:  refused            end(non-OK)
                       accepted           token* finished end(OK), or prefill_ready end(OK)
                       failed             error end(OK)
                       cancelled, expired end(non-OK) at once; the engine's last result is awaited
    """

    def __init__(self, sink: Sink, *, backend: str) -> None:
        self._sink = sink
        self._backend = backend
        self._ended = False
        self._open = anyio.Event()
        self._open.set()
        self._result: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._n_sent = 0
        self._abort_wanted = False
        self._may_abort = True

    def start(self, result: Any, leg: EngineRequest, *, timeout_s: float | None) -> None:
        self._result = result
        self._leg = leg
        self._may_abort = leg.kind != "generation_only"
        if timeout_s is not None:
            expired = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded on the worker")
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._stop, expired)

    def cancel(self) -> None:
        self._stop(Status(grpc.StatusCode.CANCELLED, "cancelled"))

    def pause(self) -> None:
        if self._open.is_set() and not self._ended:
            self._open = anyio.Event()

    def resume(self) -> None:
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
                self._emit()
        self.finish(OK)

    def _emit(self) -> None:
        output = self._result.outputs[0]
        if self._leg.kind == "context_only" and _has_handoff(output.disaggregated_params):
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
            self._send(usage=self._usage(), finished=_finished(output))

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


def _finished(output: Any) -> oe.GenerationFinished:
    finished = oe.GenerationFinished(output_index=0)
    if output.finish_reason == "stop":
        finished.reason = oe.FINISH_REASON_STOP
        if isinstance(output.stop_reason, int):
            finished.stop_match.stop_token_id = output.stop_reason
        elif isinstance(output.stop_reason, str):
            finished.stop_match.stop_text = output.stop_reason
    elif output.finish_reason in ("length", "not_finished"):
        finished.reason = oe.FINISH_REASON_LENGTH
    else:
        finished.reason = oe.FINISH_REASON_CANCELLED
        finished.message = str(output.finish_reason)
    return finished
