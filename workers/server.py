"""`WorkerServer`: any `Worker` behind the OpenEngine services, over gRPC."""

import contextlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from slagate.proto import openengine_pb2 as oe
from slagate.proto import openengine_pb2_grpc as oe_grpc
from slagate.workers.channel import GENERATE, MAX_MESSAGE_BYTES
from slagate.workers.errors import WorkerError, cut
from slagate.workers.listen import Address, bind
from slagate.workers.stream import BufferedSink
from slagate.workers.worker import Call, Status, Worker

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without a word is noticed, and a client that asks as often is not sent away.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Two servers on one port would silently share its connections.
    ("grpc.so_reuseport", 0),
)

HIGH_WATER_BYTES = 64 << 10
"""Where a reader is slow enough that the engine's stream is paused rather than buffered."""

_Response = TypeVar("_Response")


@asynccontextmanager
async def serve_worker(
    worker: Worker, listen: Address, *, grace_s: float
) -> AsyncIterator[Address]:
    """Serve on `listen` and yield the real address.

    At the end of the block no new call is taken, and running ones get `grace_s` to finish. Raises
    `OSError` when the address cannot be bound.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((_Inference(worker),))
    oe_grpc.add_ControlServicer_to_server(_Control(worker), server)
    address = bind(server, listen)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace_s)


class _Inference(grpc.GenericRpcHandler):
    """Generate on raw bytes: the worker parses, the server does not."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
            self._generate
        )

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        if handler_call_details.method == GENERATE:
            return self._handler
        return None

    async def _generate(
        self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        call: Call | None = None

        def pause_above(sink: BufferedSink) -> None:
            if sink.n_bytes > HIGH_WATER_BYTES and call is not None:
                call.pause()

        sink = BufferedSink(pause_above)
        call = self._worker.generate(
            request,
            tuple(context.invocation_metadata() or ()),
            sink,
            timeout_s=context.time_remaining(),
        )
        try:
            while (data := await sink.next()) is not None:
                await context.write(data)
                if sink.n_bytes <= HIGH_WATER_BYTES:
                    call.resume()
        finally:
            # Client cancel, deadline and disconnect all arrive here as a cancelled task.
            call.cancel()
        assert sink.status is not None
        if sink.status.code is not grpc.StatusCode.OK:
            # A call that its caller gave up meanwhile takes no status any more, and nobody waits for one.
            with contextlib.suppress(grpc.aio.InternalError):
                await context.abort(*_short(sink.status))


class _Control(oe_grpc.ControlServicer):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

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

    async def _unimplemented(self, request: Any, context: Any) -> NoReturn:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker does not serve this method")
        raise AssertionError("context.abort raises")

    LoadLora = UnloadLora = ListLoras = _unimplemented
    GetKvEventSources = _unimplemented
    SubscribeKvEvents = _unimplemented  # type: ignore[assignment]  # refuses before any event


async def _answer(answer: Awaitable[_Response], context: Any) -> _Response:
    try:
        return await answer
    except WorkerError as error:
        await context.abort(*_short(error.status))
        raise AssertionError("context.abort raises") from error


def _short(status: Status) -> Status:
    """A status that fits the headers it travels in: longer ones make the call fail with another code."""
    return status._replace(message=cut(status.message))
