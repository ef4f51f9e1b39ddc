"""A worker's streams over real HTTP/2 and any transport: the server's side, and a `Worker` that uses it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from slagate.proto import openengine_pb2 as oe
from slagate.proto.http2.connection import H2Connection, H2Stream
from slagate.proto.http2.interfaces import Headers, Http2Settings, StreamEnd
from slagate.proto.rpc.frames import MessageReader, prefix
from slagate.proto.rpc.headers import decode_timeout, status_headers, to_metadata
from slagate.proto.rpc.sinks import Call, Sink
from slagate.proto.rpc.status import Metadata, Status
from slagate.workers.client.client import WorkerClient
from slagate.workers.worker import GENERATE, Worker
from support.http2.memory_transport import Network
from support.http2.peer import ANSWER


class Http2Server:
    """Serves one worker's streams on every connection that is made to it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.connections: list[H2Connection] = []

    def protocol(self) -> H2Connection:
        connection = H2Connection(self, Http2Settings(), accept=self._accept)
        self.connections.append(connection)
        return connection

    def die(self) -> None:
        """Every connection is cut, in the middle of whatever it is."""
        for connection in self.connections:
            connection.abandon("the worker died")
        self.connections.clear()

    @property
    def n_streams(self) -> int:
        return sum(connection.n_streams for connection in self.connections)

    def _accept(self, stream: H2Stream, headers: Headers) -> "_Served":
        return _Served(stream, headers, self.worker)

    def ready(self) -> None: ...

    def freed(self) -> None: ...

    def retiring(self, code: int, about: bytes, /) -> None: ...

    def lost(self, reason: str, /) -> None: ...


class _Served:
    """One call: the handler of its stream, and the sink of the worker's answer."""

    def __init__(self, stream: H2Stream, headers: Headers, worker: Worker) -> None:
        self._stream = stream
        self._headers = headers
        self._worker = worker
        self._reader = MessageReader(64 << 20)
        self._messages: list[bytes] = []
        self._call: Call | None = None
        self._has_answered = False

    def headers(self, headers: Headers, /) -> None: ...

    def data(self, data: bytes, /) -> None:
        self._messages += self._reader.feed(data)

    def trailers(self, headers: Headers, /) -> None: ...

    def ended(self) -> None:
        fields = dict(self._headers)
        limit = fields.get(b"grpc-timeout")
        (request,) = self._messages
        generates = fields[b":path"] == GENERATE.encode()
        metadata = to_metadata(self._headers)
        if generates:
            timeout_s = None if limit is None else decode_timeout(limit)
            self._call = self._worker.generate(request, metadata, self, timeout_s=timeout_s)
        else:
            self._call = self._worker.kv_events(request, metadata, self)

    def writable(self) -> None: ...

    def closed(self, end: StreamEnd, /) -> None:
        if self._call is not None:
            self._call.cancel()

    def message(self, data: bytes, /) -> None:
        if not self._has_answered:
            self._has_answered = True
            self._stream.respond(ANSWER)
        self._stream.send(prefix(data) + data)

    def finish(self, status: Status, /) -> None:
        trailers = status_headers(status)
        if self._has_answered:
            self._stream.end_stream(trailers)
        else:
            self._stream.respond([*ANSWER, *trailers], last=True)


class Http2Worker:
    """A `Worker` whose streams go over a channel; the rest is asked directly, `latency_s` away."""

    def __init__(self, worker: Worker, channel: WorkerClient, latency_s: float) -> None:
        self._worker = worker
        self.channel = channel
        self._latency_s = latency_s
        self.is_dead = False

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        return self.channel.generate(request, metadata, sink, timeout_s=timeout_s)

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        return self.channel.kv_events(request, metadata, sink)

    async def kv_event_sources(
        self, request: oe.GetKvEventSourcesRequest
    ) -> oe.GetKvEventSourcesResponse:
        return await self._worker.kv_event_sources(request)

    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        await self._travel()
        return await self._worker.abort(request)

    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        await self._travel()
        return await self._worker.load(request)

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        await self._travel()
        return await self._worker.health(request)

    async def server_info(self) -> oe.ServerInfo:
        return await self._worker.server_info()

    async def model_info(self, model: str) -> oe.ModelInfo:
        return await self._worker.model_info(model)

    async def _travel(self) -> None:
        await anyio.sleep(self._latency_s)
        self.channel.pool.reachable()


@asynccontextmanager
async def over_http2(
    worker: Worker, network: Network, *, latency_s: float = 0.0
) -> AsyncIterator[Http2Worker]:
    """The worker as it is from the other end of the network."""
    async with anyio.create_task_group() as tasks:
        channel = WorkerClient("worker:1", tasks, dial=network.dial)
        try:
            yield Http2Worker(worker, channel, latency_s)
        finally:
            channel.close()
            tasks.cancel_scope.cancel()


def tapped(end: asyncio.Protocol, log: bytearray) -> asyncio.Protocol:
    """The same protocol, with what it is sent kept."""
    received = end.data_received

    def keep(data: bytes) -> None:
        log.extend(data)
        received(data)

    end.data_received = keep  # type: ignore[method-assign]
    return end
