"""Serves any `Worker` as the OpenEngine services, over gRPC."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio

from slagate.proto import openengine_pb2 as oe
from slagate.proto import openengine_pb2_grpc as oe_grpc
from slagate.proto.rpc.address import Address
from slagate.proto.rpc.client_call import MAX_MESSAGE_BYTES
from slagate.proto.rpc.sinks import BufferedSink, Call, Sink
from slagate.proto.rpc.status import Status, abort
from slagate.workers.errors import WorkerError, cut
from slagate.workers.runtime.listen import bind, given_by
from slagate.workers.tls.reloading import ServerTls
from slagate.workers.worker import GENERATE, SUBSCRIBE_KV_EVENTS, Worker

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished is noticed, and a client that pings as often is not disconnected for it.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Two servers on one port would silently share its connections.
    ("grpc.so_reuseport", 0),
)

HIGH_WATER_BYTES = 64 << 10
"""A stream with so many bytes unread is paused until its reader has caught up."""

_Response = TypeVar("_Response")
_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


@asynccontextmanager
async def serve_worker(
    worker: Worker, listen: Address, *, grace_s: float, tls: ServerTls | None = None
) -> AsyncIterator[Address]:
    """Context manager: serve on `listen`, in plaintext without `tls`; yields the bound address.

    When it exits, no new call is accepted, and running ones get `grace_s` seconds to finish.
    Raises `OSError` when the address cannot be bound.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    control = _Control(worker)
    streams = _Streams(worker)
    # These replace the generated SubscribeKvEvents, which would parse and serialise every message: the
    # first generic handler that knows a method wins, and registered handlers, of which the last wins,
    # before all.
    server.add_generic_rpc_handlers((streams,))
    oe_grpc.add_ControlServicer_to_server(control, server)
    for path, handler in streams.handlers.items():
        _, service, method = path.split("/")
        server.add_registered_method_handlers(service, {method: handler})
    credentials = None if tls is None else tls.grpc_credentials()
    with given_by("--listen"):
        address = control.address = bind(server, listen, credentials)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace_s)


class _Streams(grpc.GenericRpcHandler):
    """Generate and SubscribeKvEvents on raw bytes: the worker parses them, the server does not."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            GENERATE: grpc.unary_stream_rpc_method_handler(self._generate),
            SUBSCRIBE_KV_EVENTS: grpc.unary_stream_rpc_method_handler(self._kv_events),
        }

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        return self.handlers.get(handler_call_details.method)

    async def _generate(self, request: bytes, context: _Context) -> None:
        metadata = tuple(context.invocation_metadata() or ())
        timeout_s = context.time_remaining()
        await _write(
            context,
            lambda sink: self._worker.generate(request, metadata, sink, timeout_s=timeout_s),
        )

    async def _kv_events(self, request: bytes, context: _Context) -> None:
        metadata = tuple(context.invocation_metadata() or ())
        await _write(context, lambda sink: self._worker.kv_events(request, metadata, sink))


async def _write(context: _Context, start: Callable[[Sink], Call]) -> None:
    """Write the messages of one stream to its client, and pause the stream while the client is slow."""
    call: Call | None = None

    def pause_above(sink: BufferedSink) -> None:
        if sink.n_bytes > HIGH_WATER_BYTES and call is not None:
            call.pause()

    sink = BufferedSink(pause_above)
    call = start(sink)
    # For what the worker sent before it returned the call.
    pause_above(sink)
    try:
        while (data := await sink.next()) is not None:
            await context.write(data)
            if sink.n_bytes <= HIGH_WATER_BYTES:
                call.resume()
    except grpc.aio.InternalError:
        # The call was cancelled while a write waited for its reader.
        return
    finally:
        # A cancel, a deadline and a disconnect of the client all cancel this task.
        call.cancel()
    assert sink.status is not None
    if sink.status.code is not grpc.StatusCode.OK:
        # grpc.aio refuses a status for a call that was cancelled meanwhile; no client waits for one.
        with contextlib.suppress(grpc.aio.InternalError):
            await _abort(context, sink.status)


class _Control(oe_grpc.ControlServicer):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.address: Address | None = None  # where it is served

    async def GetServerInfo(self, request: Any, context: Any) -> oe.ServerInfo:
        return await _answer(self._worker.server_info(), context)

    async def GetModelInfo(self, request: Any, context: Any) -> oe.ModelInfo:
        return await _answer(self._worker.model_info(request.model), context)

    async def GetLoad(self, request: Any, context: Any) -> oe.LoadInfo:
        return await _answer(self._worker.load(request), context)

    async def Health(self, request: Any, context: Any) -> oe.HealthResponse:
        return await _answer(self._worker.health(request), context)

    async def Abort(self, request: Any, context: Any) -> oe.AbortResponse:
        return await _answer(self._worker.abort(request), context)

    async def GetKvEventSources(self, request: Any, context: Any) -> oe.GetKvEventSourcesResponse:
        response = await _answer(self._worker.kv_event_sources(request), context)
        # With a wildcard only the caller knows the address: grpc.aio does not say where a call came in.
        if self.address is not None and not _is_wildcard(self.address.host):
            for source in response.sources:
                source.endpoint_addr.host, source.endpoint_addr.port = self.address
                source.endpoint_addr.protocol = "grpc"
        return response

    async def _unimplemented(self, request: Any, context: Any) -> NoReturn:
        reason = "this worker does not serve this method"
        await abort(context, grpc.StatusCode.UNIMPLEMENTED, reason)

    LoadLora = UnloadLora = ListLoras = _unimplemented
    SubscribeKvEvents = _unimplemented  # type: ignore[assignment]  # `_Streams` comes first


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


async def _answer(answer: Awaitable[_Response], context: Any) -> _Response:
    try:
        return await answer
    except WorkerError as error:
        await _abort(context, error.status)


async def _abort(context: Any, status: Status) -> NoReturn:
    """End a call. A message too long for the headers would change the code, so it is cut."""
    await abort(context, status.code, cut(status.message), status.trailers)
