"""`GrpcWorker`: the `Worker` port over one gRPC channel, as the gateway holds it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import anyio.lowlevel
import grpc
import grpc.aio

from slagate.proto import openengine_pb2 as oe
from slagate.proto import openengine_pb2_grpc as oe_grpc
from slagate.workers.channel import StreamChannel
from slagate.workers.errors import WorkerError
from slagate.workers.h2_port import Settings
from slagate.workers.rpc import MAX_MESSAGE_BYTES
from slagate.workers.worker import Call, Metadata, Sink, Status

CONTROL_TIMEOUT_S = 5.0
"""Limit of a control call: they answer from memory, so this only bounds a hung peer."""

PROBE_TIMEOUT_S = 35.0
"""Limit of a health check with an inference probe: the worker's own limit of it, and the way there."""

CHANNEL_OPTIONS = (
    # Each hop has its own receive limit, and the default of 4 MiB would cut long prompts and outputs.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A worker that restarts must be found again in seconds, not after grpc's two minutes.
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),
    # Else a connection whose host has vanished would be kept until TCP gives up. Workers permit pings every
    # 10 s while a call is in flight. grpc waits a minute for an unanswered ping, whatever the keepalive
    # timeout, unless it is told otherwise.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # The loopback or fleet network is never behind the proxy of the environment.
    ("grpc.enable_http_proxy", 0),
)

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class GrpcWorker:
    """One worker at `address` (host:port). Made by `connect_worker`, which owns its tasks."""

    def __init__(self, address: str, control: grpc.aio.Channel, streams: StreamChannel) -> None:
        self.address = address
        self._control = oe_grpc.ControlStub(control)
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
        return await self._ask(self._control.GetKvEventSources, request)

    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        """As `Worker.abort`."""
        return await self._ask(self._control.Abort, request)

    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        """As `Worker.load`."""
        return await self._ask(self._control.GetLoad, request)

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        """As `Worker.health`."""
        limit_s = PROBE_TIMEOUT_S if request.include_inference_probe else CONTROL_TIMEOUT_S
        return await self._ask(self._control.Health, request, timeout_s=limit_s)

    async def server_info(self) -> oe.ServerInfo:
        """As `Worker.server_info`."""
        return await self._ask(self._control.GetServerInfo, oe.GetServerInfoRequest())

    async def model_info(self, model: str) -> oe.ModelInfo:
        """As `Worker.model_info`."""
        return await self._ask(self._control.GetModelInfo, oe.GetModelInfoRequest(model=model))

    async def _ask(
        self,
        method: Callable[..., Awaitable[_Response]],
        request: _Request,
        *,
        timeout_s: float | None = None,
    ) -> _Response:
        limit_s = CONTROL_TIMEOUT_S if timeout_s is None else timeout_s
        answer = await unary(method, request, timeout_s=limit_s)
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
    address: str, *, settings: Settings | None = None
) -> AsyncIterator[GrpcWorker]:
    """A `GrpcWorker` for the time of the block; connects lazily and reconnects by itself.

    `settings` are those of the connections that carry streams.
    """
    async with (
        grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel,
        anyio.create_task_group() as tasks,
    ):
        streams = StreamChannel(address, tasks, settings=settings)
        try:
            yield GrpcWorker(address, channel, streams)
        finally:
            streams.close()
            tasks.cancel_scope.cancel()
