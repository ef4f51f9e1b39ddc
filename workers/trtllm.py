"""`TrtllmWorker`: the `Worker` port over TensorRT-LLM's `LLM` object, or over its double.

One engine request per leg, one task per request that turns the engine's cumulative, mutable result into
OpenEngine deltas. The rules that TensorRT-LLM imposes live here: which exceptions are the request's and
which are the engine's end, and that a decode leg is never aborted before its first result, because the
KV transfer behind it cannot be interrupted.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import anyio
import grpc
from anyio.abc import TaskGroup
from google.protobuf.message import DecodeError

from slagate.proto import openengine_pb2 as oe
from slagate.workers import trtllm_info
from slagate.workers.errors import Refused, WorkerError
from slagate.workers.trtllm_info import WorkerIdentity
from slagate.workers.trtllm_request import EngineApi, EngineRequest, parse_leg
from slagate.workers.trtllm_stream import EngineStream
from slagate.workers.worker import Call, Metadata, Sink, Status

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
        release_session: Callable[[int], bool] | None,
    ) -> None:
        """`release_session` frees a parked handoff by context request id; None where none can be."""
        self._llm = llm
        self._api = api
        self._identity = identity
        self._tasks = tasks
        self._release_session = release_session or _cannot_release
        self._frees_handoffs = release_session is not None
        self._live: dict[str, EngineStream] = {}
        self._finished: OrderedDict[str, int | None] = OrderedDict()  # id -> handoff it parked
        self._stats_row: dict[str, Any] | None = None
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
        stream = EngineStream(
            sink,
            backend=self._identity.transfer_backend,
            abandon=self._release_session,
        )
        try:
            leg = self._parse(request, metadata)
            stream.start(self._submit(leg, metadata), leg, timeout_s=timeout_s)
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
            window_tokens=trtllm_info.window_tokens(self._llm),
            end_id=self._identity.end_id,
        )

    def _submit(self, leg: EngineRequest, metadata: Metadata) -> Any:
        kwargs: dict[str, Any] = {"streaming": leg.kind != "context_only"}
        trace = {key: value for key, value in metadata if key in ("traceparent", "tracestate")}
        if trace:
            kwargs["trace_headers"] = trace
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

    async def _run(self, request_id: str, stream: EngineStream) -> None:
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
            self._finished[request_id] = stream.parked_id
            if len(self._finished) > REMEMBERED_IDS:
                self._finished.popitem(last=False)

    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        """As `Worker.abort`."""
        target = request.WhichOneof("target")
        if target == "request_id":
            return self._abort_request(request.request_id)
        if target == "kv_session" and not self._frees_handoffs:
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, "kv_session: this worker parks no handoff")
        if target == "kv_session":
            session_id = request.kv_session.session_id
            is_id = session_id.isascii() and session_id.isdigit()
            if is_id and self._release_session(int(session_id)):
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
            # The answer may not have reached a caller that gave up meanwhile: its handoff goes too.
            parked_id = self._finished[request_id]
            if parked_id is not None and self._release_session(parked_id):
                return oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED)
            return oe.AbortResponse(status=oe.ABORT_STATUS_ALREADY_FINISHED)
        raise Refused(grpc.StatusCode.NOT_FOUND, f"request_id: no request {request_id!r}")

    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        """As `Worker.load`."""
        # Reading empties the engine's queue, and an idle engine adds nothing to it: the last row is all
        # there is, although blocks that were freed since do not show in it.
        async for row in self._llm.get_stats_async(timeout=0):
            self._stats_row = row
        return trtllm_info.load(
            self._llm, self._identity, n_live=len(self._live), row=self._stats_row
        )

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
        return trtllm_info.server_info(
            self._llm, self._identity, frees_handoffs=self._frees_handoffs
        )

    async def model_info(self, model: str) -> oe.ModelInfo:
        """As `Worker.model_info`."""
        if model != self._identity.model:
            raise WorkerError(
                Status(grpc.StatusCode.NOT_FOUND, f"model: {model!r} is not served here")
            )
        return trtllm_info.model_info(self._llm, self._identity)


def _cannot_release(_session_id: int) -> bool:
    return False
