"""`GrpcWorker`: the `Worker` port over one gRPC channel, as the gateway holds it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import grpc
import grpc.aio

from slagate.proto import openengine_pb2 as oe
from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.sinks import Call, Sink
from slagate.proto.rpc.status import Metadata, Status
from slagate.workers.client.control import ControlChannel
from slagate.workers.client.streams import StreamChannel
from slagate.workers.errors import WorkerError
from slagate.workers.tls.reloading import ClientTls

CONTROL_TIMEOUT_S = 5.0
"""Limit of a control call: they answer from memory, so this only bounds a hung peer."""

PROBE_TIMEOUT_S = 35.0
"""Limit of a health check with an inference probe: the worker's own limit of it, and the way there."""

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class GrpcWorker:
    """One worker at `address` (host:port). Made by `connect_worker`, which owns its tasks."""

    def __init__(self, address: str, control: ControlChannel, streams: StreamChannel) -> None:
        self.address = address
        self._control = control
        self._streams = streams

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        """As `Worker.generate`."""
        return self._streams.generate(request, metadata, sink, timeout_s=timeout_s)

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        """As `Worker.kv_events`."""
        return self._streams.kv_events(request, metadata, sink)

    async def kv_event_sources(
        self, request: oe.GetKvEventSourcesRequest
    ) -> oe.GetKvEventSourcesResponse:
        """As `Worker.kv_event_sources`."""
        return await self._ask(lambda stub: stub.GetKvEventSources, request)

    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        """As `Worker.abort`."""
        return await self._ask(lambda stub: stub.Abort, request)

    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        """As `Worker.load`."""
        return await self._ask(lambda stub: stub.GetLoad, request)

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        """As `Worker.health`."""
        limit_s = PROBE_TIMEOUT_S if request.include_inference_probe else CONTROL_TIMEOUT_S
        return await self._ask(lambda stub: stub.Health, request, timeout_s=limit_s)

    async def server_info(self) -> oe.ServerInfo:
        """As `Worker.server_info`."""
        return await self._ask(lambda stub: stub.GetServerInfo, oe.GetServerInfoRequest())

    async def model_info(self, model: str) -> oe.ModelInfo:
        """As `Worker.model_info`."""
        return await self._ask(lambda stub: stub.GetModelInfo, oe.GetModelInfoRequest(model=model))

    async def _ask(
        self,
        method: Callable[[Any], Callable[..., Awaitable[_Response]]],
        request: _Request,
        *,
        timeout_s: float | None = None,
    ) -> _Response:
        limit_s = CONTROL_TIMEOUT_S if timeout_s is None else timeout_s
        with self._control.stub() as stub:
            try:
                answer = await unary(method(stub), request, timeout_s=limit_s)
            except WorkerError as error:
                status = self._control.explained(error.status)
                raise WorkerError(status, address=self.address) from error
        self._streams.reachable()
        return answer


async def unary(
    method: Callable[..., Awaitable[_Response]],
    request: _Request,
    *,
    timeout_s: float = CONTROL_TIMEOUT_S,
) -> _Response:
    """One control call. Raises `WorkerError`; safe inside a cancel scope, which grpc.aio's own is not."""
    try:
        return await method(request, timeout=timeout_s)
    except asyncio.CancelledError:
        # grpc.aio raises one of its own making, which no cancel scope takes for its: it would pass
        # through the scope that asked for it and end the whole task. This raises the scope's.
        await anyio.lowlevel.checkpoint_if_cancelled()
        raise
    except grpc.aio.AioRpcError as error:
        raise WorkerError(Status(error.code(), error.details() or "")) from error


@asynccontextmanager
async def connect_worker(
    address: str, *, settings: Http2Settings | None = None, tls: ClientTls | None = None
) -> AsyncIterator[GrpcWorker]:
    """A `GrpcWorker` for the time of the block; connects lazily and reconnects by itself.

    `settings` are those of the connections that carry streams. Without `tls` all of it is plaintext.
    """
    async with anyio.create_task_group() as tasks:
        control = ControlChannel(address, tls, tasks)
        streams = StreamChannel(address, tasks, settings=settings, tls=tls)
        try:
            yield GrpcWorker(address, control, streams)
        finally:
            streams.close()
            await control.close()
            tasks.cancel_scope.cancel()
