"""A worker whose engine is not there yet: it answers, says so, and becomes the real one."""

import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, EndedCall, Sink
from slagate.proto.rpc.status import Metadata
from slagate.workers.errors import RequestRefused
from slagate.workers.worker import Worker


class StartingWorker:
    """The `Worker` port from the first moment of a process; `become` ends the start.

    Who asks for its health while a model loads gets STARTING and the phase, not a refused connection.
    """

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self._worker: Worker | None = None

    @property
    def why_not_ready(self) -> str:
        """What is still done before requests are taken; "" when they are."""
        return "" if self._worker is not None else f"the engine is starting: {self.phase}"

    def become(self, worker: Worker) -> None:
        """From now on, be this worker."""
        self._worker = worker

    def _there(self) -> Worker:
        if self._worker is None:
            raise RequestRefused(grpc.StatusCode.UNAVAILABLE, self.why_not_ready)
        return self._worker

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        """As `Worker.generate`."""
        try:
            return self._there().generate(request, metadata, sink, timeout_s=timeout_s)
        except RequestRefused as refused:
            sink.end(refused.status)
            return EndedCall()

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        """As `Worker.kv_events`."""
        try:
            return self._there().kv_events(request, metadata, sink)
        except RequestRefused as refused:
            sink.end(refused.status)
            return EndedCall()

    async def kv_event_sources(
        self, request: oe.GetKvEventSourcesRequest
    ) -> oe.GetKvEventSourcesResponse:
        """As `Worker.kv_event_sources`."""
        return await self._there().kv_event_sources(request)

    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        """As `Worker.abort`."""
        return await self._there().abort(request)

    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        """As `Worker.load`."""
        return await self._there().load(request)

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        """As `Worker.health`."""
        if self._worker is not None:
            return await self._worker.health(request)
        starting = oe.HEALTH_STATE_STARTING
        checks = [
            oe.HealthCheck(name="grpc", state=oe.HEALTH_STATE_READY),
            oe.HealthCheck(name="model", state=starting, message=self.why_not_ready),
        ]
        return oe.HealthResponse(state=starting, checks=checks)

    async def server_info(self) -> oe.ServerInfo:
        """As `Worker.server_info`."""
        return await self._there().server_info()

    async def model_info(self, model: str) -> oe.ModelInfo:
        """As `Worker.model_info`."""
        return await self._there().model_info(model)
