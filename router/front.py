"""The client-facing side: the only module of the gateway that carries tokens to clients.

Generate is served here. Every other method goes, as it is, to the local server behind `local`.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import grpc
from anyio.abc import TaskGroup

from slagate.router.errors import INTERNAL
from slagate.router.forward import Forward
from slagate.router.generate import generate
from slagate.router.intake import FULL, Intake
from slagate.router.overdue import Overdue
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
    NO_ERROR,
    Headers,
    Settings,
    Stream,
    StreamEnd,
    StreamHandler,
)
from slagate.workers.links import Links
from slagate.workers.listen import BACKLOG
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
        self.limits = gateway.settings.clients
        self.intake = Intake(
            max_bytes=self.limits.max_arriving_bytes, limit_s=self.limits.arrival_s
        )
        self.silent: Overdue[_Client] = Overdue(
            self.limits.handshake_s, lambda client: client.connection.close("it said nothing")
        )
        self.http2 = Settings(
            max_streams=self.limits.max_streams,
            max_header_bytes=self.limits.max_header_bytes,
            resets=self.limits.resets,
            chatter=self.limits.chatter,
        )
        self.max_message_bytes = gateway.settings.max_request_bytes
        self._untold: set[_Client] = set()  # may send something new, though it was asked not to
        self._is_leaving = False
        self._changed = anyio.Event()

    def protocol(self) -> asyncio.Protocol:
        """The end of a new connection."""
        if self._is_leaving or len(self.clients) >= self.limits.max_connections:
            return TurnedAway()
        client = _Client(self)
        self.clients.add(client)
        self.silent.add(client)
        return client.connection

    def retire(self) -> None:
        """Ask for nothing new; what runs, or was on its way, goes on. Idempotent."""
        if self._is_leaving:
            return
        self._is_leaving = True
        if self.server is not None:
            self.server.close()
        self._untold = set(self.clients)
        for client in list(self.clients):
            client.connection.retire(partial(self._told, client))

    async def settled(self) -> None:
        """After `retire`: wait until every request that was on its way has arrived."""
        while self._untold:
            self._changed = anyio.Event()
            await self._changed.wait()
        await self.intake.emptied()

    async def emptied(self) -> None:
        """Wait until no client is connected."""
        while self.clients:
            self._changed = anyio.Event()
            await self._changed.wait()

    def left(self, client: "_Client") -> None:
        """A client's connection is over."""
        self.clients.discard(client)
        self.silent.discard(client)
        self._changed.set()

    def _told(self, client: "_Client") -> None:
        self._untold.discard(client)
        self._changed.set()

    def close(self) -> None:
        """End every connection."""
        for client in list(self.clients):
            client.connection.close("the gateway is shutting down")
        self.silent.close()
        self.intake.close()


class TurnedAway(asyncio.Protocol):
    """The end of a connection that comes too late, or is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As `asyncio.Protocol`."""
        transport.close()


class _Client:
    """One connection of a client: its `Owner`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.connection = H2Connection(self, front.http2, accept=self._accept)

    def _accept(self, stream: Stream, headers: Headers) -> StreamHandler:
        fields = dict(headers)
        if fields.get(b":path") == _PATH:
            return ClientStream(stream, headers, self._front, self.connection.peer)
        return Forward(stream, headers, self._front.local, peer=self.connection.peer)

    def ready(self) -> None:
        """As `Owner.ready`."""
        self._front.silent.discard(self)

    def freed(self) -> None:
        """As `Owner.freed`."""

    def retiring(self, code: int, /) -> None:
        """As `Owner.retiring`."""

    def lost(self, reason: str, /) -> None:
        """As `Owner.lost`."""
        self._front.left(self)


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
        self._reader = MessageReader(front.max_message_bytes)
        self._is_whole = False
        self._began_s = self._loop.time()
        self._timeout_s: float | None = None  # the client's
        self._scope = anyio.CancelScope()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._has_answered = False
        self._on_room: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.status: Status | None = None
        self.discarded = False
        fields = dict(headers)
        if not front.intake.begin(self):
            self.refuse(FULL)
            return
        try:
            self._reader = MessageReader(
                front.max_message_bytes, encoding=supported_encoding(headers)
            )
            if b"grpc-timeout" in fields:
                self._timeout_s = decode_timeout(fields[b"grpc-timeout"])
        except WireError as error:
            self.refuse(error.status)
        except ValueError as error:
            self.refuse(Status(grpc.StatusCode.INTERNAL, str(error)))
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
                    self.refuse(_SEVERAL)
                self._request = message
        except WireError as error:
            self.refuse(error.status)
            return
        if not self._front.intake.holds(
            self, self._reader.waiting_bytes + len(self._request or b"")
        ):
            self.refuse(FULL)

    def trailers(self, headers: Headers, /) -> None:
        """As `StreamHandler.trailers`."""

    def ended(self) -> None:
        """As `StreamHandler.ended`: the request is whole."""
        self._is_whole = True
        if self._refusal is not None:
            return
        if self._request is None or self._reader.waiting_bytes:
            self.refuse(_EMPTY)
            return
        self._front.tasks.start_soon(self._serve, self._request)

    def writable(self) -> None:
        """As `StreamHandler.writable`."""
        self._pass_on()
        if not self._waiting and self._on_room is not None:
            tell, self._on_room = self._on_room, None
            tell()

    def closed(self, _end: StreamEnd, /) -> None:
        """As `StreamHandler.closed`: the client has its answer, or has left."""
        self._is_closed = True
        self._front.intake.done(self)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._scope.cancel()
        if self._timer is not None:
            self._timer.cancel()

    async def _serve(self, request: bytes) -> None:
        self._front.intake.done(self)
        if self._is_closed:
            # Given up as soon as it came: no worker need hear of it.
            return
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

    def refuse(self, status: Status, /) -> None:
        """As `Arriving.refuse`: nothing of the request is kept, and nothing more of it is wanted."""
        if self._refusal is not None:
            return
        self._refusal = status
        self._front.intake.done(self)
        self._reader = MessageReader(0)
        self._request = None
        self.end(status)
        if not self._is_whole:
            # When the answer is written, which a reset would overtake; RFC 9113, section 8.1.
            self._loop.call_soon(self._stream.reset, NO_ERROR)

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

    def on_room(self, tell: Callable[[], None], /) -> None:
        """As `Outlet.on_room`."""
        self._on_room = tell
        self._stream.tell_writable()

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
    gateway: Gateway, listening: socket.socket, local: Links
) -> AsyncIterator[Front]:
    """Serve clients on this socket for the time of the block."""
    loop = asyncio.get_running_loop()
    async with anyio.create_task_group() as tasks:
        front = Front(gateway, tasks, local)
        front.server = await loop.create_server(front.protocol, sock=listening, backlog=BACKLOG)
        try:
            yield front
        finally:
            front.retire()
            front.close()
            tasks.cancel_scope.cancel()
