"""The client-facing side: the only module of the gateway that carries tokens to clients.

Generate is served here. Every other method goes, as it is, to the local server behind `local`.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager

import anyio
import grpc

from slagate.router.errors import INTERNAL
from slagate.router.forward import Forward
from slagate.router.live import Running
from slagate.router.turn import ClientCall
from slagate.workers.channel import GENERATE
from slagate.workers.grpc_wire import (
    CONTENT_TYPE,
    PREFIX_BYTES,
    MessageReader,
    WireError,
    decode_timeout,
    framed,
    is_one_message,
    status_headers,
    supported_encoding,
    to_metadata,
)
from slagate.workers.h2 import LOW_WATER_BYTES, H2Connection
from slagate.workers.h2_port import CANCEL, Headers, Settings, Stream, StreamEnd, StreamHandler
from slagate.workers.links import Links
from slagate.workers.listen import BACKLOG
from slagate.workers.rpc import MAX_MESSAGE_BYTES
from slagate.workers.worker import OK, Metadata, Status

log = logging.getLogger(__name__)

FLUSH_S = 2.0
"""For a client to take the last of its answer, when the request itself took all its time."""

SWEEP_S = 0.5
"""Between two looks at answers that clients have not taken."""

_PATH = GENERATE.encode()
_ANSWER = ((b":status", b"200"), (b"content-type", CONTENT_TYPE))
_EMPTY = Status(grpc.StatusCode.INTERNAL, "the call has no request message")
_SEVERAL = Status(grpc.StatusCode.INTERNAL, "the call has more than one request message")
_NOT_GRPC = ((b":status", b"415"),)


Serve = Callable[[ClientCall], Coroutine[object, object, None]]
"""Serves one Generate call; ends its `out`, whatever happens."""


class Front:
    """Has the clients' connections, and the requests that `serve` is at work on."""

    def __init__(self, serve: Serve, local: Links, *, limit_s: float) -> None:
        """`limit_s` is that of a request without one."""
        self.serve = serve
        self.limit_s = limit_s
        self.loop = asyncio.get_running_loop()
        self.requests: set[asyncio.Task[None]] = set()
        self.answered: dict[ClientStream, float] = {}  # and not taken yet, until when it may be
        self._will_sweep = False
        self.local = local
        self.clients: set[_Client] = set()
        self.server: asyncio.Server | None = None
        self._emptied = anyio.Event()

    def protocol(self) -> H2Connection:
        """The end of a new connection."""
        client = _Client(self)
        self.clients.add(client)
        return client.connection

    def wait_for_reader(self, stream: "ClientStream", until_s: float) -> None:
        """Its answer is complete; the client may take it until then, or for a moment."""
        self.answered[stream] = max(until_s, self.loop.time() + FLUSH_S)
        if not self._will_sweep:
            self._will_sweep = True
            self.loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        # One timer for all of them: nearly every answer is taken at once.
        now_s = self.loop.time()
        for stream in [each for each, until_s in self.answered.items() if until_s <= now_s]:
            del self.answered[stream]
            stream.give_up()
        self._will_sweep = bool(self.answered)
        if self._will_sweep:
            self.loop.call_later(SWEEP_S, self._sweep)

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
        """End every connection, and with it the requests of it."""
        for client in list(self.clients):
            client.connection.close("the gateway is shutting down")

    async def finished(self) -> None:
        """Wait until no request is being served."""
        while self.requests:
            await asyncio.wait(self.requests)


class _Client:
    """One connection of a client: its `Owner`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.connection = H2Connection(self, Settings(), accept=self._accept)

    def _accept(self, stream: Stream, headers: Headers) -> StreamHandler:
        fields = dict(headers)
        if fields.get(b":path") == _PATH:
            return ClientStream(stream, headers, fields, self._front, self.connection.peer)
        return Forward(stream, headers, self._front.local, peer=self.connection.peer)

    def ready(self) -> None:
        """As `Owner.ready`."""

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

    __slots__ = (
        "_began_s",
        "_front",
        "_has_answered",
        "_headers",
        "_is_closed",
        "_peer",
        "_reader",
        "_refusal",
        "_request",
        "_running",
        "_stream",
        "_timeout_s",
        "_waiting",
        "_waiting_bytes",
        "discarded",
        "status",
    )

    def __init__(
        self,
        stream: Stream,
        headers: Headers,
        fields: Mapping[bytes, bytes],
        front: Front,
        peer: str,
    ) -> None:
        """`fields` are the headers by name, as far as each is there once."""
        self._stream = stream
        self._front = front
        self._peer = peer
        self._headers = headers
        self._request: bytes | None = None
        self._refusal: Status | None = None
        self._reader: MessageReader | None = None
        self._began_s = front.loop.time()
        self._timeout_s: float | None = None  # the client's
        self._running = Running()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._has_answered = False
        self._is_closed = False
        self.status: Status | None = None
        self.discarded = False
        try:
            if b"grpc-encoding" in fields:
                encoding = supported_encoding(headers)
                self._reader = MessageReader(MAX_MESSAGE_BYTES, encoding=encoding)
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
        if self._reader is None:
            if self._request is None and is_one_message(data, MAX_MESSAGE_BYTES):
                self._request = data[PREFIX_BYTES:]
                return
            self._reader = MessageReader(MAX_MESSAGE_BYTES)
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
        if self._request is None or (self._reader is not None and self._reader.waiting_bytes):
            self._refuse(_EMPTY)
            return
        try:
            metadata = to_metadata(self._headers)
        except WireError as error:
            self._refuse(error.status)
            return
        front = self._front
        front.requests.add(front.loop.create_task(self._serve(self._request, metadata)))
        self._request = b""
        self._headers = ()

    def writable(self) -> None:
        """As `StreamHandler.writable`."""
        self._pass_on()

    def closed(self, _end: StreamEnd, /) -> None:
        """As `StreamHandler.closed`: the client has its answer, or has left."""
        self._is_closed = True
        self._waiting.clear()
        self._waiting_bytes = 0
        self._running.end()
        self._front.answered.pop(self, None)

    async def _serve(self, request: bytes, metadata: Metadata) -> None:
        remaining_s = None
        if self._timeout_s is not None:
            remaining_s = max(self._began_s + self._timeout_s - self._front.loop.time(), 0.0)
        call = ClientCall(request, metadata, self._peer, remaining_s, self, self._running)
        try:
            await self._front.serve(call)
        except Exception:
            log.exception("front.bug")
            self.end(INTERNAL)
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._front.requests.discard(task)

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
        self.batch([data])

    def batch(self, messages: list[bytes], /) -> None:
        """As `StreamSink.batch`."""
        stream = self._stream
        if not self._has_answered:
            self._has_answered = True
            stream.respond(_ANSWER)
        if self._waiting or stream.unsent_bytes > LOW_WATER_BYTES:
            self._waiting.extend(messages)
            self._waiting_bytes += sum(map(len, messages))
            stream.tell_writable()
        else:
            stream.send(framed(messages))

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
        limit_s = self._front.limit_s if self._timeout_s is None else self._timeout_s
        self._front.wait_for_reader(self, self._began_s + limit_s)
        self._pass_on()

    def give_up(self) -> None:
        """The client has not taken its answer."""
        self._waiting.clear()
        self._stream.reset(CANCEL)

    def _pass_on(self) -> None:
        while self._waiting and self._stream.unsent_bytes <= LOW_WATER_BYTES:
            data = self._waiting.popleft()
            self._waiting_bytes -= len(data)
            self._stream.send(framed([data]))
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
    serve: Serve, listening: socket.socket, local: Links, *, limit_s: float
) -> AsyncIterator[Front]:
    """Serve clients on this socket for the time of the block. `limit_s` as for `Front`."""
    loop = asyncio.get_running_loop()
    front = Front(serve, local, limit_s=limit_s)
    front.server = await loop.create_server(front.protocol, sock=listening, backlog=BACKLOG)
    try:
        yield front
    finally:
        front.retire()
        front.close()
        with anyio.CancelScope(shield=True):
            await front.finished()
