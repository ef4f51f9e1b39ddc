"""One Generate call of a client: from its bytes to a request, and from a worker's answer to bytes."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping

import grpc
from typing_extensions import override

from slagate.proto.http2.connection import LOW_WATER_BYTES, H2Stream
from slagate.proto.http2.interfaces import CANCEL, NO_ERROR, Headers, StreamEnd, StreamHandler
from slagate.proto.rpc.connection_pool import ConnectionPool
from slagate.proto.rpc.frames import (
    PREFIX_BYTES,
    MessageReader,
    WireError,
    framed,
    is_one_message,
    supported_encoding,
)
from slagate.proto.rpc.headers import (
    CONTENT_TYPE,
    decode_timeout,
    is_grpc,
    status_headers,
    to_metadata,
)
from slagate.proto.rpc.sinks import ResponseWriter
from slagate.proto.rpc.status import OK, Metadata, Status
from slagate.router.front.limits import (
    EACH_BYTES,
    FLUSH_S,
    IncomingRequest,
    IncomingRequestLimit,
    PendingResponse,
    SlowReaderTimeouts,
    full,
)
from slagate.router.request.call import ClientCall
from slagate.router.request.errors import INTERNAL, GatewayError, Malformed, TooLarge
from slagate.router.request.running import CancelHandle
from slagate.router.request.settings import Settings

log = logging.getLogger(__name__)

READ_TIMES = 2
"""A request is read up to so many times its limit, to say which of its fields is too large."""

_ANSWER = ((b":status", b"200"), (b"content-type", CONTENT_TYPE))
_EMPTY = Status(grpc.StatusCode.INTERNAL, "the call has no request message")
_SEVERAL = Status(grpc.StatusCode.INTERNAL, "the call has more than one request message")
_NO_GRPC = Status(grpc.StatusCode.INVALID_ARGUMENT, "the content-type is not gRPC's")
_NOT_GRPC = ((b":status", b"415"),)

Serve = Callable[[ClientCall], Coroutine[object, object, None]]
"""Serves one Generate call; ends its `out`, whatever happens."""


class StreamContext:
    """What the streams of all clients share; `serve` is for Generate, `local` for every other method."""

    def __init__(self, serve: Serve, local: ConnectionPool, settings: Settings) -> None:
        limits = settings.clients
        self.serve = serve
        self.local = local
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.requests: set[asyncio.Task[None]] = set()  # that are being served
        self.intake = IncomingRequestLimit(
            max_bytes=limits.max_arriving_bytes, limit_s=limits.arrival_s
        )
        self.untaken = SlowReaderTimeouts()


class ClientStream(StreamHandler, ResponseWriter, PendingResponse, IncomingRequest):
    """One Generate call: handles its HTTP/2 stream, and is the writer of its response.

    What the client does not take at once waits here, where it can be dropped: the HTTP/2 engine is given a
    message only when little of the stream is unsent.
    """

    __slots__ = (
        "_began_s",
        "_front",
        "_has_answered",
        "_headers",
        "_is_closed",
        "_is_refused",
        "_is_served",
        "_is_whole",
        "_on_room",
        "_peer",
        "_reader",
        "_request",
        "_running",
        "_stream",
        "_timeout_s",
        "_waiting",
        "_waiting_bytes",
        "status",
    )

    def __init__(
        self,
        stream: H2Stream,
        headers: Headers,
        fields: Mapping[bytes, bytes],
        front: StreamContext,
        *,
        peer: str,
        refusal: GatewayError | None = None,
    ) -> None:
        """`fields` are the headers by name; a `refusal` is the error to end the call with at once."""
        self._stream = stream
        self._front = front
        self._peer = peer
        self._headers = headers
        self._request: bytes | None = None
        self._is_refused = False
        self._reader: MessageReader | None = None
        self._is_whole = False
        self._began_s = front.loop.time()
        self._timeout_s: float | None = None  # the client's
        self._running = CancelHandle()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._has_answered = False
        self._on_room: Callable[[], None] | None = None
        self._is_closed = False
        self._is_served = False
        self.status: Status | None = None
        if not is_grpc(fields.get(b"content-type", b"")):
            self._drop()
            self._finish(_NO_GRPC, _NOT_GRPC)
            return
        if refusal is not None:
            self.refuse(refusal)
            return
        if not front.intake.admit(self):
            self.refuse(full())
            return
        try:
            if b"grpc-encoding" in fields:
                encoding = supported_encoding(headers)
                max_bytes = READ_TIMES * front.settings.max_request_bytes
                self._reader = MessageReader(max_bytes, encoding=encoding)
            if b"grpc-timeout" in fields:
                self._timeout_s = decode_timeout(fields[b"grpc-timeout"])
        except WireError as error:
            self.refuse(self._error(error.status))
        except ValueError as error:
            self.refuse(Malformed(str(error), code=grpc.StatusCode.INTERNAL))

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"ClientStream({self.n_bytes} bytes wait, {self.status})"

    # --- as `StreamHandler`

    @override
    def data(self, data: bytes, /) -> None:
        if self._is_refused:
            return
        max_bytes = READ_TIMES * self._front.settings.max_request_bytes
        if self._reader is None:
            if self._request is None and is_one_message(data, max_bytes):
                self._request = data[PREFIX_BYTES:]
                if len(data) > EACH_BYTES:
                    self._count(len(data))
                return
            self._reader = MessageReader(max_bytes)
        try:
            for message in self._reader.feed(data):
                if self._request is not None:
                    self.refuse(self._error(_SEVERAL))
                    return
                self._request = message
        except WireError as error:
            self.refuse(self._error(error.status))
            return
        self._count(self._reader.waiting_bytes + len(self._request or b""))

    def _error(self, status: Status) -> GatewayError:
        if status.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Malformed(status.message, code=status.code)
        limit_bytes = self._front.settings.max_request_bytes
        return TooLarge("request", f"{status.message}; the limit is {limit_bytes}")

    def _count(self, n_bytes: int) -> None:
        if not self._front.intake.holds(self, n_bytes):
            self.refuse(full())

    @override
    def ended(self) -> None:
        """Parse the whole request's headers, and start the task that serves it."""
        self._is_whole = True
        if self._is_refused:
            return
        if self._request is None or (self._reader is not None and self._reader.waiting_bytes):
            self.refuse(self._error(_EMPTY))
            return
        try:
            metadata = to_metadata(self._headers)
        except WireError as error:
            self.refuse(self._error(error.status))
            return
        self._is_served = True
        front = self._front
        front.requests.add(front.loop.create_task(self._serve(self._request, metadata)))
        self._request = None
        self._headers = ()

    @override
    def writable(self) -> None:
        self._pass_on()
        if not self._waiting and self._on_room is not None:
            tell, self._on_room = self._on_room, None
            tell()

    @override
    def closed(self, _end: StreamEnd, /) -> None:
        """The client has its answer, or has left."""
        self._is_closed = True
        self._front.intake.done(self)
        self._front.untaken.discard(self)
        self._waiting.clear()
        self._waiting_bytes = 0
        self._on_room = None
        self._running.cancel()

    async def _serve(
        self, request: bytes, metadata: Metadata, refusal: GatewayError | None = None
    ) -> None:
        front = self._front
        front.intake.done(self)
        try:
            if self._is_closed and refusal is None:
                # Given up as soon as it came: no worker need hear of it.
                return
            remaining_s = None
            if self._timeout_s is not None:
                remaining_s = max(self._began_s + self._timeout_s - front.loop.time(), 0.0)
            await front.serve(
                ClientCall(request, metadata, self._peer, remaining_s, self, self._running, refusal)
            )
        except Exception:
            log.exception("front.bug")
            self.finish(INTERNAL)
        finally:
            task = asyncio.current_task()
            assert task is not None
            front.requests.discard(task)

    def refuse(self, error: GatewayError, /) -> None:
        """Drop the request and what is still to come of it, and end the call with `error`.

        It ends by way of `serve`, which records it like any other request.
        """
        if self._drop():
            front = self._front
            front.requests.add(front.loop.create_task(self._serve(b"", (), error)))

    def _drop(self) -> bool:
        """Drop the request. False: it is refused already, or is being served."""
        if self._is_refused or self._is_served:
            return False
        self._is_refused = True
        self._front.intake.done(self)
        self._reader = None
        self._request = None
        return True

    # --- as `ResponseWriter`

    @property
    @override
    def n_bytes(self) -> int:
        return self._waiting_bytes + self._stream.unsent_bytes

    @override
    def unsent(self) -> tuple[int, int]:
        """Bytes that wait here, and those that the connection must write before it can take more."""
        return self.n_bytes, self._stream.transport_bytes

    @override
    def message(self, data: bytes, /) -> None:
        self.batch([data])

    @override
    def batch(self, messages: list[bytes], /) -> None:
        if self.status is not None:
            return
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

    @override
    def discard(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    @override
    def on_room(self, tell: Callable[[], None], /) -> None:
        self._on_room = tell
        self._stream.tell_writable()

    @override
    def finish(self, status: Status = OK, /) -> None:
        if self.status is None:
            self._finish(status)

    def _finish(self, status: Status, answer: Headers | None = None) -> None:
        self.status = status
        if self._is_closed:
            return
        front = self._front
        limit_s = self._timeout_s
        if limit_s is None:
            limit_s = front.settings.default_timeout_s
        front.untaken.start_timeout(self, max(self._began_s + limit_s, front.loop.time() + FLUSH_S))
        if answer is None:
            self._pass_on()
        else:
            self._stream.respond(answer, last=True)
        if not self._is_whole:
            # Behind the answer, which a reset would overtake; RFC 9113, section 8.1.
            self._stream.reset_behind(NO_ERROR)

    @override
    def give_up(self) -> None:
        self._stream.reset(CANCEL)
        self.closed(StreamEnd(CANCEL, "the client has not taken its answer"))

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
                self._stream.end_stream(trailers)
            else:
                self._stream.respond([*_ANSWER, *trailers], last=True)
