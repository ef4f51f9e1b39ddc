"""The client-facing side: the only module of the gateway that carries tokens to clients.

Generate is served here. Every other method goes, as it is, to the local server behind `local`.
"""

import asyncio
import logging
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import grpc
from anyio.abc import TaskGroup

from slagate.router.errors import INTERNAL
from slagate.router.forward import Forward
from slagate.router.generate import generate
from slagate.router.turn import ClientCall, Gateway
from slagate.workers.channel import GENERATE
from slagate.workers.grpc_wire import (
    CONTENT_TYPE,
    MessageReader,
    WireError,
    decode_timeout,
    prefix,
    status_headers,
    supported_encoding,
    to_metadata,
)
from slagate.workers.h2 import LOW_WATER_BYTES, H2Connection
from slagate.workers.h2_port import (
    CANCEL,
    Accept,
    Headers,
    Settings,
    Stream,
    StreamEnd,
    StreamHandler,
)
from slagate.workers.links import Links
from slagate.workers.listen import BACKLOG
from slagate.workers.rpc import MAX_MESSAGE_BYTES
from slagate.workers.tls import HANDSHAKE_LIMIT_S
from slagate.workers.worker import OK, Status

log = logging.getLogger(__name__)

FLUSH_S = 2.0
"""For a client to take the last of its answer, when the request itself took all its time."""

_PATH = GENERATE.encode()
_ANSWER = ((b":status", b"200"), (b"content-type", CONTENT_TYPE))
_EMPTY = Status(grpc.StatusCode.INTERNAL, "the call has no request message")
_SEVERAL = Status(grpc.StatusCode.INTERNAL, "the call has more than one request message")
_NOT_GRPC = ((b":status", b"415"),)


class Front:
    """Has the clients' connections. `tasks` owns the requests."""

    def __init__(self, gateway: Gateway, tasks: TaskGroup, local: Links) -> None:
        self.gateway = gateway
        self.tasks = tasks
        self.local = local
        self.clients: set[_Client] = set()
        self.server: asyncio.Server | None = None
        self._emptied = anyio.Event()

    def protocol(self) -> H2Connection:
        """The end of a new connection."""
        return _Client(self).connection

    def joined(self, client: "_Client") -> None:
        """A client is connected: with TLS, only once it has shown who it is."""
        self.clients.add(client)

    def retire(self) -> None:
        """Take nothing new; what runs goes on."""
        if self.server is not None:
            self.server.close()
        for client in list(self.clients):
            client.connection.retire()

    async def emptied(self) -> None:
        """Wait until no client is connected."""
        while self.clients:
            self._emptied = anyio.Event()
            await self._emptied.wait()

    def left(self, client: "_Client") -> None:
        """A client's connection is over."""
        self.clients.discard(client)
        self._emptied.set()

    def close(self) -> None:
        """End every connection."""
        for client in list(self.clients):
            client.connection.close("the gateway is shutting down")


class _Client:
    """One connection of a client: its `Owner`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.connection = _ClientConnection(self, Settings(), accept=self._accept)

    def _accept(self, stream: Stream, headers: Headers) -> StreamHandler:
        fields = dict(headers)
        if fields.get(b":path") == _PATH:
            return ClientStream(stream, headers, self._front, self.connection.peer)
        return Forward(stream, headers, self._front.local, peer=self.connection.peer)

    def connected(self) -> None:
        """The connection is made."""
        self._front.joined(self)

    def ready(self) -> None:
        """As `Owner.ready`."""

    def freed(self) -> None:
        """As `Owner.freed`."""

    def retiring(self, code: int, /) -> None:
        """As `Owner.retiring`."""

    def lost(self, reason: str, /) -> None:
        """As `Owner.lost`."""
        self._front.left(self)


class _ClientConnection(H2Connection):
    def __init__(self, client: _Client, settings: Settings, *, accept: Accept) -> None:
        super().__init__(client, settings, accept=accept)
        self._client = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client.connected()
        super().connection_made(transport)


class ClientStream:
    """One Generate call: its stream's handler, and the sink that its answer goes to.

    What the client does not take at once waits here, where it can be dropped: the engine is given a
    message only when little of the stream is unsent.
    """

    def __init__(self, stream: Stream, headers: Headers, front: Front, peer: str) -> None:
        self._stream = stream
        self._front = front
        self._peer = peer
        self._headers = headers
        self._loop = asyncio.get_running_loop()
        self._request: bytes | None = None
        self._refusal: Status | None = None
        self._reader = MessageReader(MAX_MESSAGE_BYTES)
        self._began_s = self._loop.time()
        self._timeout_s: float | None = None  # the client's
        self._scope = anyio.CancelScope()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._has_answered = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.status: Status | None = None
        self.discarded = False
        fields = dict(headers)
        try:
            self._reader = MessageReader(MAX_MESSAGE_BYTES, encoding=supported_encoding(headers))
            if b"grpc-timeout" in fields:
                self._timeout_s = decode_timeout(fields[b"grpc-timeout"])
        except WireError as error:
            self._refuse(error.status)
        except ValueError as error:
            self._refuse(Status(grpc.StatusCode.INTERNAL, str(error)))
        if not fields.get(b"content-type", b"").startswith(CONTENT_TYPE):
            self._refusal = _EMPTY
            stream.respond(_NOT_GRPC, last=True)

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"ClientStream({self.n_bytes} bytes wait, {self.status})"

    # --- as `StreamHandler`

    def headers(self, headers: Headers, /) -> None:
        """As `StreamHandler.headers`: none come to a server."""

    def data(self, data: bytes, /) -> None:
        """As `StreamHandler.data`."""
        if self._refusal is not None:
            return
        try:
            for message in self._reader.feed(data):
                if self._request is not None:
                    self._refuse(_SEVERAL)
                self._request = message
        except WireError as error:
            self._refuse(error.status)

    def trailers(self, headers: Headers, /) -> None:
        """As `StreamHandler.trailers`."""

    def ended(self) -> None:
        """As `StreamHandler.ended`: the request is whole."""
        if self._refusal is not None:
            return
        if self._request is None or self._reader.waiting_bytes:
            self._refuse(_EMPTY)
            return
        self._front.tasks.start_soon(self._serve, self._request)

    def writable(self) -> None:
        """As `StreamHandler.writable`."""
        self._pass_on()

    def closed(self, _end: StreamEnd, /) -> None:
        """As `StreamHandler.closed`: the client has its answer, or has left."""
        self._is_closed = True
        self._waiting.clear()
        self._waiting_bytes = 0
        self._scope.cancel()
        if self._timer is not None:
            self._timer.cancel()

    async def _serve(self, request: bytes) -> None:
        remaining_s = None
        if self._timeout_s is not None:
            remaining_s = max(self._began_s + self._timeout_s - self._loop.time(), 0.0)
        try:
            metadata = to_metadata(self._headers)
        except WireError as error:
            self.end(error.status)
            return
        call = ClientCall(
            data=request, metadata=metadata, peer=self._peer, timeout_s=remaining_s, out=self
        )
        with self._scope:
            try:
                await generate(call, self._front.gateway)
            except Exception:
                # A bug with one request must not end them all.
                log.exception("front.bug")
                self.end(INTERNAL)

    def _refuse(self, status: Status) -> None:
        if self._refusal is None:
            self._refusal = status
            self.end(status)

    # --- as `Outlet`

    @property
    def n_bytes(self) -> int:
        """As `Outlet.n_bytes`."""
        return self._waiting_bytes + self._stream.unsent_bytes

    def message(self, data: bytes, /) -> None:
        """As `Sink.message`."""
        if not self._has_answered:
            self._has_answered = True
            self._stream.respond(_ANSWER)
        if self._waiting or self._stream.unsent_bytes > LOW_WATER_BYTES:
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self._stream.tell_writable()
        else:
            self._stream.send(prefix(data) + data)

    def discard(self) -> None:
        """As `Outlet.discard`."""
        self.discarded = True
        self._waiting.clear()
        self._waiting_bytes = 0

    def end(self, status: Status = OK, /) -> None:
        """As `Sink.end`."""
        if self.status is not None:
            return
        self.status = status
        if self._is_closed:
            return
        limit_s = self._front.gateway.settings.default_timeout_s
        ends_at_s = self._began_s + (limit_s if self._timeout_s is None else self._timeout_s)
        flushed_s = max(ends_at_s, self._loop.time() + FLUSH_S)
        self._timer = self._loop.call_at(flushed_s, self._stream.reset, CANCEL)
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting and self._stream.unsent_bytes <= LOW_WATER_BYTES:
            data = self._waiting.popleft()
            self._waiting_bytes -= len(data)
            self._stream.send(prefix(data) + data)
        if self._waiting:
            self._stream.tell_writable()
        elif self.status is not None:
            trailers = status_headers(self.status)
            if self._has_answered:
                self._stream.end(trailers)
            else:
                self._stream.respond([*_ANSWER, *trailers], last=True)


@asynccontextmanager
async def serve_front(
    gateway: Gateway,
    listening: socket.socket,
    local: Links,
    *,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Front]:
    """Serve clients on this socket, in plaintext without `tls`, for the time of the block."""
    loop = asyncio.get_running_loop()
    async with anyio.create_task_group() as tasks:
        front = Front(gateway, tasks, local)
        front.server = await loop.create_server(
            front.protocol,
            sock=listening,
            backlog=BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_LIMIT_S,
        )
        try:
            yield front
        finally:
            front.retire()
            front.close()
            tasks.cancel_scope.cancel()
