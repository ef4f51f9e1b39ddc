"""`WorkerClient`: the `Worker` port over gRPC, as the gateway holds it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.abc
import anyio.lowlevel
import grpc
import grpc.aio
from typing_extensions import override

from slagate.proto import openengine_pb2 as oe
from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.client_call import ServerStreamCall, call_headers
from slagate.proto.rpc.connection_pool import ConnectionPool, Dial, dial_tcp
from slagate.proto.rpc.headers import to_headers
from slagate.proto.rpc.sinks import Call, EndedCall, Sink
from slagate.proto.rpc.status import Metadata, Status
from slagate.workers.client.control import ControlChannel
from slagate.workers.errors import WorkerError
from slagate.workers.tls.reloading import ClientTls, closed_hint
from slagate.workers.worker import GENERATE, SUBSCRIBE_KV_EVENTS, Worker

CONTROL_TIMEOUT_S = 5.0
"""Limit of a control call: they answer from memory, so this only bounds a hung peer."""

PROBE_TIMEOUT_S = 35.0
"""Limit of a health check with an inference probe: the worker's own limit of it, and the way there."""

_CLOSING = Status(grpc.StatusCode.CANCELLED, "the channel is closing")

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class WorkerClient(Worker):
    """One worker at `address` (host:port): streams over our own HTTP/2, control calls over grpc.aio.

    Connections are made when there is something to send, and again when they were lost.
    """

    def __init__(
        self,
        address: str,
        tasks: anyio.abc.TaskGroup,
        *,
        settings: Http2Settings | None = None,
        dial: Dial = dial_tcp,
        tls: ClientTls | None = None,
    ) -> None:
        """`tasks` runs the connecting of streams, by `dial`, or by `tls` where that is given."""
        self.address = address
        self.control = ControlChannel(address, tls, tasks)
        self.pool = ConnectionPool(
            address,
            tasks,
            settings=settings or Http2Settings(),
            dial=dial if tls is None else tls.dial,
            hint=closed_hint(tls),
        )
        scheme = b"http" if tls is None else b"https"
        authority = address.encode(errors="replace")
        self._headers = {
            path: call_headers(path, authority, scheme=scheme)
            for path in (GENERATE, SUBSCRIBE_KV_EVENTS)
        }
        self._calls: set[ServerStreamCall] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"WorkerClient({len(self._calls)} calls, {self.pool})"

    @property
    def n_calls(self) -> int:
        """Streams that have not ended."""
        return len(self._calls)

    @override
    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        return self._start(GENERATE, request, metadata, sink, timeout_s)

    @override
    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        return self._start(SUBSCRIBE_KV_EVENTS, request, metadata, sink, None)

    def _start(
        self, path: str, request: bytes, metadata: Metadata, sink: Sink, timeout_s: float | None
    ) -> Call:
        try:
            headers = to_headers(metadata) if metadata else ()
        except ValueError as error:
            sink.finish(Status(grpc.StatusCode.INTERNAL, str(error)))
            return EndedCall()
        call = ServerStreamCall(
            self._headers[path],
            request,
            headers,
            sink,
            pool=self.pool,
            timeout_s=timeout_s,
            running=self._calls,
        )
        if self._is_closed:
            call.end_call(_CLOSING)
        else:
            self.pool.start(call)
        return call

    def close(self) -> None:
        """End every stream and every connection of streams; `control` has a `close` of its own."""
        self._is_closed = True
        for call in list(self._calls):
            call.end_call(_CLOSING)
        self.pool.close(_CLOSING.message)

    @override
    async def kv_event_sources(
        self, request: oe.GetKvEventSourcesRequest
    ) -> oe.GetKvEventSourcesResponse:
        return await self._ask(lambda stub: stub.GetKvEventSources, request)

    @override
    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        return await self._ask(lambda stub: stub.Abort, request)

    @override
    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        return await self._ask(lambda stub: stub.GetLoad, request)

    @override
    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        limit_s = PROBE_TIMEOUT_S if request.include_inference_probe else CONTROL_TIMEOUT_S
        return await self._ask(lambda stub: stub.Health, request, timeout_s=limit_s)

    @override
    async def server_info(self) -> oe.ServerInfo:
        return await self._ask(lambda stub: stub.GetServerInfo, oe.GetServerInfoRequest())

    @override
    async def model_info(self, model: str) -> oe.ModelInfo:
        return await self._ask(lambda stub: stub.GetModelInfo, oe.GetModelInfoRequest(model=model))

    async def _ask(
        self,
        method: Callable[[Any], Callable[..., Awaitable[_Response]]],
        request: _Request,
        *,
        timeout_s: float | None = None,
    ) -> _Response:
        limit_s = CONTROL_TIMEOUT_S if timeout_s is None else timeout_s
        with self.control.stub() as stub:
            try:
                answer = await unary(method(stub), request, timeout_s=limit_s)
            except WorkerError as error:
                status = self.control.explained(error.status)
                raise WorkerError(status, address=self.address) from error
        self.pool.reachable()
        return answer


async def unary(
    method: Callable[..., Awaitable[_Response]],
    request: _Request,
    *,
    timeout_s: float = CONTROL_TIMEOUT_S,
) -> _Response:
    """Make a control call. Raises `WorkerError`. Unlike grpc.aio's own, cancel scopes end it."""
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
) -> AsyncIterator[WorkerClient]:
    """Context manager that yields a `WorkerClient`, which is closed when it exits.

    `settings` are those of the connections that carry streams. Without `tls` all is plaintext.
    """
    async with anyio.create_task_group() as tasks:
        client = WorkerClient(address, tasks, settings=settings, tls=tls)
        try:
            yield client
        finally:
            client.close()
            await client.control.close()
            tasks.cancel_scope.cancel()
