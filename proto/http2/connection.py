"""HTTP/2 over one asyncio transport, client or server: a connection, and a stream of it.

    transport ──bytes──▶ engine ──events──▶ handlers of the streams
    transport ◀──bytes── engine ◀── streams: collected, one write for each turn of the loop

libnghttp2 does framing, HPACK, validation and flow control. The windows are our policy. The connection's
window is opened again as bytes arrive, so that no stream stalls the others. So is a stream's, unless the
stream is paused: then its peer can send what is left of the window, and no more.

A connection goes through these states from top to bottom, and may leave out any but the last:

    state        it begins with                         we open streams    the peer's new streams
    STARTING     the transport                          no                 are accepted
    OPEN         the peer's first SETTINGS              up to its limit    are accepted
    RETIRING     the peer's GOAWAY, or no ids are left  no                 are accepted
    LEAVING      `retire`: GOAWAY in two steps          no                 are accepted up to the last word
    TURNED_AWAY  too many resets by the peer: GOAWAY    no                 get REFUSED_STREAM
    LOST         `close`, `abandon`, an error, or the   no                 do not come; no handler is told
                 end of the transport                                      anything any more
"""

import asyncio
from collections.abc import Callable
from enum import IntEnum
from typing import Any, cast
from weakref import WeakKeyDictionary

from typing_extensions import override

from slagate.proto.http2.engine import (
    ConnectionClosed,
    DataReceived,
    EngineError,
    Event,
    GoAwayReceived,
    PingAcknowledged,
    PingReceived,
    RequestReceived,
    ResponseReceived,
    Setting,
    SettingsReceived,
    StreamClosed,
    StreamReset,
    TrailersReceived,
    begin,
    new_engine,
)
from slagate.proto.http2.goaway import LINGER_S, ClosingTransport, GracefulGoaway, close_in_time
from slagate.proto.http2.interfaces import (
    CANCEL,
    ENHANCE_YOUR_CALM,
    NO_ERROR,
    REFUSED_STREAM,
    RESET_NAMES,
    ConnectionCallbacks,
    Headers,
    Http2Settings,
    StreamEnd,
    StreamHandler,
)
from slagate.proto.http2.keepalive import Keepalive
from slagate.proto.http2.token_bucket import TokenBucket

WRITE_BYTES = 256 << 10
"""Given to the transport at once; what it does not take stays in the engine, where it is counted."""

LOW_WATER_BYTES = 16 << 10
"""Unsent of a stream: little enough that it is worth having more."""

_UNLIMITED = (1 << 31) - 1

_RESET_WITHOUT_ERROR = StreamEnd(NO_ERROR, "the peer reset the stream: NO_ERROR")


class ConnectionState(IntEnum):
    """How far a connection has come; see the table of this module."""

    STARTING = 0
    OPEN = 1
    RETIRING = 2
    LEAVING = 3
    TURNED_AWAY = 4
    LOST = 5


class H2Stream:
    """One stream, as its user drives it. Only `flush_to` raises; a closed stream ignores calls.

    What is to be sent is collected here and given to the engine in one piece before the next write: to
    call it for each message would cost more than all the rest of a short stream.
    """

    __slots__ = (
        "_answer",
        "_connection",
        "_parts",
        "_trailers",
        "handler",
        "id",
        "is_paused",
        "is_queued",
        "parts_bytes",
        "unsent_bytes",
    )

    def __init__(
        self, connection: "H2Connection", stream_id: int, handler: StreamHandler | None
    ) -> None:
        """`handler` is None only until a server's `Accept` has returned one."""
        self._connection = connection
        self._answer: Headers | None = None
        self._parts: list[bytes] = []
        self._trailers: Headers | None = None  # empty: our direction ends without any
        self.handler = handler
        self.id = stream_id
        self.is_paused = False
        self.is_queued = False
        self.parts_bytes = 0  # of the body, not given to the engine yet
        self.unsent_bytes = 0  # of the body, not taken by the peer's windows and the transport yet

    @property
    def transport_bytes(self) -> int:
        """Bytes of all streams in the transport's buffer while it is full; else 0."""
        return self._connection.blocked_bytes

    def respond(self, headers: Headers, *, last: bool = False) -> None:
        """Send the headers of a response; the body follows, unless `last` ends our direction."""
        self._answer = headers
        if last:
            self._trailers = ()
        if not self.is_queued:
            self._connection.queue(self)

    def send(self, data: bytes) -> None:
        """Queue bytes of the body."""
        self._parts.append(data)
        self.parts_bytes += len(data)
        self.unsent_bytes += len(data)
        if not self.is_queued:
            self._connection.queue(self)

    def end_stream(self, trailers: Headers = ()) -> None:
        """End our direction of the stream behind what is queued, with these trailers if any."""
        self._trailers = trailers
        if not self.is_queued:
            self._connection.queue(self)

    def flush_to(self, engine: Any) -> None:
        """Give the engine what was collected. Raises its error where it has closed the stream."""
        stream_id, parts, trailers = self.id, self._parts, self._trailers
        self.is_queued = False
        is_last = trailers is not None and not trailers
        if self._answer is not None:
            engine.send_response(stream_id, self._answer, end_stream=is_last and not parts)
            is_last = is_last and bool(parts)
            self._answer = None
        if parts:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            self._parts = []
            self.parts_bytes = 0
            engine.send_data(stream_id, data, end_stream=is_last)
        elif is_last:
            engine.end_stream(stream_id)
        if trailers:
            engine.send_trailers(stream_id, trailers)
        self._trailers = None

    def drop_unsent(self) -> None:
        """Forget what is unsent: the stream is closed."""
        self._parts = []
        self.is_queued = False
        self.parts_bytes = self.unsent_bytes = 0

    def tell_closed(self, end: StreamEnd) -> None:
        """Call `closed` of the handler, and drop it: the two refer to each other."""
        self.drop_unsent()
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.closed(end)

    def reset(self, code: int = CANCEL) -> None:
        """Reset the stream now with an HTTP/2 error code. Its handler is not called any more."""
        if self._connection.forget(self):
            self.drop_unsent()
            self.handler = None
            self._connection.submit(self._connection.engine.reset_stream, self.id, code)

    def reset_behind(self, code: int) -> None:
        """Reset it when what was sent so far is written; then its handler's `closed` is called."""
        self._connection.reset_behind(self, code)

    def tell_writable(self) -> None:
        """Have `StreamHandler.writable` called once at most `LOW_WATER_BYTES` are unsent."""
        self._connection.tell_writable(self)

    def pause(self) -> None:
        """Let the peer send what its window still permits, and no more until `resume`. Idempotent."""
        if not self.is_paused:
            self.is_paused = True
            self.apply_window()

    def resume(self) -> None:
        """Open the window again. Idempotent."""
        if self.is_paused:
            self.is_paused = False
            self.apply_window()

    def apply_window(self) -> None:
        """Set the stream's receive window: 0 while it is paused."""
        connection = self._connection
        window_bytes = 0 if self.is_paused else connection.settings.stream_window_bytes
        connection.submit(connection.engine.set_local_window_size, window_bytes, stream_id=self.id)


Accept = Callable[[H2Stream, Headers], StreamHandler]
"""Takes a request that a client has begun, and may answer at once."""


class WriteCoalescer:
    """Delays each connection's write by one turn of the event loop.

    What is read from one connection wakes tasks that write to others, such as trailers. Those
    tasks run in the loop's next turn, and the delayed writes in that turn behind them: so one
    write carries it all.
    """

    def __init__(self) -> None:
        self.n_reading = 0  # connections in the middle of a read
        self.held: list[Callable[[], None]] = []  # writes that wait for the end of those reads

    def soon(self, loop: asyncio.AbstractEventLoop, write: Callable[[], None]) -> None:
        """Call `write` in the loop's next turn; `loop` is the same one in every call."""
        if self.n_reading:
            self.held.append(write)
        else:
            loop.call_soon(write)

    def release(self, loop: asyncio.AbstractEventLoop) -> None:
        """Schedule the held writes for the next turn: what was read has been handed over."""
        held, self.held = self.held, []
        for write in held:
            loop.call_soon(write)


_coalescers: WeakKeyDictionary[asyncio.AbstractEventLoop, WriteCoalescer] = WeakKeyDictionary()


def write_coalescer(loop: asyncio.AbstractEventLoop) -> WriteCoalescer:
    """The coalescer that all connections of a loop share."""
    found = _coalescers.get(loop)
    if found is None:
        found = _coalescers[loop] = WriteCoalescer()
    return found


class H2Connection(asyncio.Protocol):
    """One connection. With `accept` it is a server's, and the peer opens streams; else a client's."""

    def __init__(
        self, owner: ConnectionCallbacks, settings: Http2Settings, *, accept: Accept | None = None
    ) -> None:
        self.settings = settings
        self.engine = new_engine(settings, is_server=accept is not None)
        self.state = ConnectionState.STARTING
        self.peer = ""  # the other end's address, empty where it has none
        self.is_broken = False  # ended for what the peer did, or did not do
        self._owner = owner
        self._accept = accept
        self._loop = asyncio.get_running_loop()
        self._coalescer = write_coalescer(self._loop)
        self._transport: asyncio.Transport | None = None
        self._closing: ClosingTransport | None = None  # for a peer to take our last words
        self._lost_by = ""
        self._is_blocked = False  # by the transport
        self._will_flush = False
        self._max_streams: int | None = None  # that we may open; None until the peer has said
        self._streams: dict[int, H2Stream] = {}  # the open ones, by number
        self._n_forgotten = 0  # streams that were forgotten here, and the engine has not closed yet
        self._queued: list[H2Stream] = []  # that have something for the engine
        self._behind: set[H2Stream] = set()  # of which the engine has something unsent
        self._watched: set[H2Stream] = set()  # to be told when they are writable
        self._last_words: dict[H2Stream, int] = {}  # to be reset with this code when all is written
        self._control_frames = TokenBucket(*settings.control_frames)
        self._resets = TokenBucket(*settings.resets)
        # Runs until a peer that was turned away can have been told so.
        self._unread_timer: asyncio.TimerHandle | None = None
        self._keepalive = Keepalive(
            settings.ping_after_s,
            settings.ping_limit_s,
            wanted=lambda: bool(self._streams),
            ping=lambda: self.submit(self.engine.ping),
            dead=lambda: self._abort(f"no answer to a ping in {settings.ping_limit_s:g} s"),
        )
        self._goaway = GracefulGoaway(
            notice=lambda: self.submit(self.engine.send_shutdown_notice),
            ping=lambda about: self.submit(self.engine.ping, about),
            last_word=lambda: self.submit(self.engine.send_goaway),
        )

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        state = f"lost: {self._lost_by}" if self._lost_by else self.state.name.lower()
        return f"H2Connection({self.n_streams} streams, {state})"

    @property
    def is_retiring(self) -> bool:
        """Whether we can open no more streams on it: either end has said so, or it is lost."""
        return self.state >= ConnectionState.RETIRING

    @property
    def n_streams(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    @property
    def room(self) -> int:
        """How many more streams the peer permits us to open."""
        if self._max_streams is None or self.state >= ConnectionState.RETIRING:
            return 0
        return self._max_streams - len(self._streams) - self._n_forgotten

    @property
    def blocked_bytes(self) -> int:
        """Bytes in the transport's buffer while it is full; else 0."""
        if self._transport is None or not self._is_blocked or self.state is ConnectionState.LOST:
            return 0
        return self._transport.get_write_buffer_size()

    def open(self, headers: Headers, handler: StreamHandler) -> H2Stream | None:
        """Open a stream with a request's headers; the body follows. None: none can be opened."""
        try:
            stream_id = self.engine.send_request(headers)
        except EngineError:
            # It is closing, which we are about to be told, or it has used up its numbers.
            self._enter(ConnectionState.RETIRING)
            return None
        self.flush_soon()
        return self._opened(stream_id, handler)

    def retire(self, on_retired: Callable[[], None] = lambda: None) -> None:
        """Ask a client for no new streams; open ones go on, and the connection ends with them.

        `on_retired` is called, once, when no new one can come any more.
        """
        if self.state >= ConnectionState.LEAVING:
            on_retired()
            return
        self._enter(ConnectionState.LEAVING)
        self._goaway.start(on_retired)

    def close(self, reason: str, code: int = NO_ERROR) -> None:
        """Send GOAWAY with `code`, close the transport, and close open streams for `reason`."""
        self.is_broken = self.is_broken or code != NO_ERROR
        if self.state is not ConnectionState.LOST and self._transport is not None:
            # What was said before goes out before.
            self._flush()
        if self.state is not ConnectionState.LOST and self._transport is not None:
            self.submit(self.engine.terminate_connection, code)
            self._flush()
            self._close_transport(self._transport)
        self._lose(reason)

    def abandon(self, reason: str) -> None:
        """Close without a GOAWAY: the transport may be gone already."""
        self._abort(reason)
        self.is_broken = False

    # --- what the streams call

    def submit(self, action: Callable[..., None], *args: Any, **options: Any) -> None:
        """Call a method of the engine, and send what it queues."""
        try:
            action(*args, **options)
        except EngineError:
            # The engine is ahead of what was told: the stream or the connection is closed in there, and
            # the event that says so is on its way.
            return
        self.flush_soon()

    def forget(self, stream: H2Stream) -> bool:
        """Call the stream's handler no more; it takes `room` until closed. False: it is closed."""
        if self._streams.pop(stream.id, None) is None:
            return False
        self._n_forgotten += 1
        return True

    def queue(self, stream: H2Stream) -> None:
        """Have `H2Stream.flush_to` called once, before the next write."""
        stream.is_queued = True
        self._queued.append(stream)
        if not self._will_flush:
            self._will_flush = True
            self._coalescer.soon(self._loop, self._flush)

    def reset_behind(self, stream: H2Stream, code: int) -> None:
        """Reset a stream when its unsent bytes are written: a reset would overtake them."""
        self._last_words[stream] = code
        self.flush_soon()

    def tell_writable(self, stream: H2Stream) -> None:
        """Have `writable` of its handler called once at most `LOW_WATER_BYTES` are unsent."""
        if stream.id in self._streams:
            self._watched.add(stream)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Write what is queued in the next turn of the loop, with what else is queued until then."""
        if not self._will_flush:
            self._will_flush = True
            self._coalescer.soon(self._loop, self._flush)

    # --- what the transport calls

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.peer = f"{name[0]}:{name[1]}"
        begin(self.engine, self.settings, is_server=self._accept is not None)
        self._flush()

    @override
    def data_received(self, data: bytes) -> None:
        if self.state is ConnectionState.LOST:
            return
        keepalive, coalescer = self._keepalive, self._coalescer
        keepalive.heard_s = keepalive.now_s()
        keepalive.n_heard += 1
        coalescer.n_reading += 1
        try:
            broken: Exception | None = None
            try:
                self.engine.receive_data(data)
            except (EngineError, ValueError) as error:
                broken = error
            # Also what came before the peer broke the protocol.
            self._take(self.engine.events())
            if broken is not None:
                self._abort(f"the peer broke HTTP/2: {broken}")
            elif self.engine.want_write:
                # Acknowledgements and windows; what the streams say goes out with them.
                self.flush_soon()
        finally:
            coalescer.n_reading -= 1
            if coalescer.held and not coalescer.n_reading:
                coalescer.release(self._loop)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._closing is not None:
            self._closing.transport_closed()
        self._lose("the peer closed the connection" if exc is None else str(exc))

    @override
    def pause_writing(self) -> None:
        self._is_blocked = True

    @override
    def resume_writing(self) -> None:
        self._is_blocked = False
        self._flush()

    # --- events of the engine

    def _take(self, events: list[Any]) -> None:
        """Pass events on, in order; what they bring of one stream's body as one piece.

        Each message comes in a frame of its own, between those of other streams, and to hand a frame over
        costs more than all that is done with the message in it.
        """
        bodies: dict[int, list[bytes]] = {}
        for event in events:
            if self.state is ConnectionState.LOST:
                return
            kind = type(event)
            if kind is DataReceived:
                stream_id = event.stream_id
                if stream_id in bodies:
                    bodies[stream_id].append(event.data)
                else:
                    bodies[stream_id] = [event.data]
                if event.end_stream:
                    self._give_bodies({stream_id: bodies.pop(stream_id)})
                    self._peer_ended(stream_id)
            elif kind in _STREAM_EVENTS:
                if event.stream_id in bodies:
                    self._give_bodies({event.stream_id: bodies.pop(event.stream_id)})
                _STREAM_EVENTS[kind](self, event)
            elif kind in _CONNECTION_EVENTS:
                self._give_bodies(bodies)
                bodies.clear()
                _CONNECTION_EVENTS[kind](self, event)
        if bodies:
            self._give_bodies(bodies)

    def _give_bodies(self, bodies: dict[int, list[bytes]]) -> None:
        for stream_id, parts in bodies.items():
            if self.state is ConnectionState.LOST:
                return
            stream = self._streams.get(stream_id)
            if stream is not None and stream.handler is not None:
                stream.handler.data(parts[0] if len(parts) == 1 else b"".join(parts))

    def _request(self, event: RequestReceived) -> None:
        assert self._accept is not None
        stream = self._opened(event.stream_id, None)
        if self.state is ConnectionState.TURNED_AWAY:
            # Sent before the peer could know: with what crossed the limit, or without reading.
            stream.reset(REFUSED_STREAM)
            return
        stream.handler = self._accept(stream, event.headers)
        if event.end_stream:
            self._peer_ended(event.stream_id)

    def _response(self, event: ResponseReceived) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None or stream.handler is None:
            return
        if stream.is_paused:
            # It may have been paused when the engine did not know the stream yet.
            stream.apply_window()
        stream.handler.headers(event.headers)
        if event.end_stream:
            self._peer_ended(event.stream_id)

    def _trailers(self, event: TrailersReceived) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None and stream.handler is not None:
            stream.handler.trailers(event.headers)
            self._peer_ended(event.stream_id)

    def _peer_ended(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None and stream.handler is not None:
            stream.handler.ended()

    def _stream_closed(self, event: StreamClosed) -> None:
        stream = self._streams.pop(event.stream_id, None)
        if stream is None:
            self._n_forgotten -= 1
        elif event.error_code == NO_ERROR and event.local_error is None:
            stream.tell_closed(_RESET_WITHOUT_ERROR)
        else:
            name = RESET_NAMES.get(event.error_code, str(event.error_code))
            reason = event.local_error or f"the peer reset the stream: {name}"
            # The peer's, or one that it made the engine send (CVE-2025-8671).
            self._count_reset()
            stream.tell_closed(StreamEnd(event.error_code, str(reason)))
        self._owner.freed()

    def _stream_reset(self, event: StreamReset) -> None:
        if event.error_code == NO_ERROR:
            self._count_reset()  # any other one shows in how the stream is closed

    def _count_reset(self) -> None:
        # A server may reset what a client has asked it for as often as it likes.
        if self._accept is None or self.state is ConnectionState.TURNED_AWAY:
            return
        if not self._resets.take_token(self._loop.time()):
            self._enter(ConnectionState.TURNED_AWAY)
            self.submit(self.engine.send_goaway, ENHANCE_YOUR_CALM)
            # A peer that reads nothing is never told, and would go on.
            unread = "it was turned away, and does not read so"
            self._unread_timer = self._loop.call_later(LINGER_S, self._abort, unread)

    def _control_frame(self, event: Event) -> None:
        """A frame that libnghttp2 does not count, as it does empty and unknown ones and resets."""
        if not self._control_frames.take_token(self._loop.time()):
            self.close("the peer talks too much", ENHANCE_YOUR_CALM)
        elif isinstance(event, SettingsReceived):
            self._permitted(event)
        elif isinstance(event, GoAwayReceived):
            self._enter(ConnectionState.RETIRING)
            self._owner.retiring(event.error_code, event.debug_data)
        elif isinstance(event, PingAcknowledged):
            self._goaway.ping_acked(event.opaque_data)

    def _permitted(self, event: SettingsReceived) -> None:
        said = event.settings.get(Setting.MAX_CONCURRENT_STREAMS)
        if self._max_streams is None:
            self._max_streams = _UNLIMITED if said is None else said
            self._enter(ConnectionState.OPEN)
            self._owner.ready()
        else:
            self._max_streams = self._max_streams if said is None else said
            self._owner.freed()

    def _connection_ended(self, event: ConnectionClosed) -> None:
        """Both sides are done, or one broke the protocol."""
        name = RESET_NAMES.get(event.error_code, str(event.error_code))
        about = event.debug_data[:200].decode(errors="replace")
        self.is_broken = self.is_broken or event.error_code != NO_ERROR
        if self._transport is not None:
            # The event may come before the last bytes, which say why.
            self._transport.write(self.engine.data_to_send())
            self._close_transport(self._transport)
        self._lose(f"the connection ended: {name} {about}".rstrip())

    # --- state

    def _enter(self, state: ConnectionState) -> None:
        self.state = max(self.state, state)

    def _opened(self, stream_id: int, handler: StreamHandler | None) -> H2Stream:
        if not self._streams:
            self._keepalive.watch()
        stream = self._streams[stream_id] = H2Stream(self, stream_id, handler)
        return stream

    def _close_transport(self, transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            self._closing = close_in_time(transport)

    def _abort(self, reason: str) -> None:
        self.is_broken = True
        if self._transport is not None:
            self._transport.abort()
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self.state is ConnectionState.LOST:
            return
        self.state, self._lost_by = ConnectionState.LOST, reason
        self._keepalive.stop()
        self._goaway.stop()
        self._stop_unread_timer()
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.tell_closed(StreamEnd(None, reason))
        self._owner.lost(reason)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    # --- writing

    def _flush(self) -> None:
        self._will_flush = False
        queued, self._queued = self._queued, []
        for stream in queued:
            if stream.id not in self._streams:
                # What was said to it when it was closed already.
                stream.drop_unsent()
                continue
            try:
                stream.flush_to(self.engine)
            except EngineError:
                # The engine has closed the stream, and the event that says so is on its way.
                stream.drop_unsent()
                continue
            self._behind.add(stream)
        is_drained = False
        while (
            self.state is not ConnectionState.LOST
            and self._transport is not None
            and not self._is_blocked
        ):
            try:
                data = self.engine.data_to_send(WRITE_BYTES)
            except EngineError as error:
                self._abort(f"HTTP/2: {error}")
                return
            if data:
                self._transport.write(data)
                if self._unread_timer is not None:
                    self._stop_unread_timer()
            # What was queued may close streams only when it is taken.
            if events := self.engine.events():
                self._take(events)
            if len(data) < WRITE_BYTES:
                is_drained = True
                break
        if self._behind:
            behind, self._behind = self._behind, set()
            for stream in behind:
                if stream.id in self._streams:
                    behind_bytes = self.engine.queued_body_size(stream.id)
                    stream.unsent_bytes = stream.parts_bytes + behind_bytes
                    if behind_bytes:
                        self._behind.add(stream)
        if self._watched:
            self._tell_those_writable()
        if self._last_words and is_drained:
            self._reset_those_behind()

    def _tell_those_writable(self) -> None:
        for stream in list(self._watched):
            if stream.id not in self._streams:
                self._watched.discard(stream)
            elif stream.unsent_bytes <= LOW_WATER_BYTES:
                self._watched.discard(stream)
                if stream.handler is not None:
                    stream.handler.writable()

    def _reset_those_behind(self) -> None:
        last, self._last_words = self._last_words, {}
        for stream, code in last.items():
            if stream.unsent_bytes or stream.is_queued:
                self._last_words[stream] = code
                continue
            handler = stream.handler
            stream.reset(code)
            if handler is not None:
                handler.closed(StreamEnd(code, "reset behind its last words"))


_STREAM_EVENTS: dict[type[Event], Callable[[H2Connection, Any], None]] = {
    RequestReceived: H2Connection._request,
    ResponseReceived: H2Connection._response,
    TrailersReceived: H2Connection._trailers,
    StreamClosed: H2Connection._stream_closed,
    StreamReset: H2Connection._stream_reset,
}
_CONNECTION_EVENTS: dict[type[Event], Callable[[H2Connection, Any], None]] = {
    ConnectionClosed: H2Connection._connection_ended,
    PingReceived: H2Connection._control_frame,
    PingAcknowledged: H2Connection._control_frame,
    SettingsReceived: H2Connection._control_frame,
    GoAwayReceived: H2Connection._control_frame,
}
