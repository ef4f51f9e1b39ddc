"""HTTP/2 over one asyncio transport, client or server.

    transport ──bytes──▶ engine ──events──▶ handlers of the streams
    transport ◀──bytes── engine ◀── streams: collected, one write for each turn of the loop

Framing, HPACK, validation and flow control are libnghttp2's. The windows are our policy: that of the
connection is opened again as bytes arrive, so that no stream stalls the others. So is that of a stream,
unless it is paused: then its peer can send what is left of it, and no more.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from slagate.proto.http2.engine import EngineError, begin, new_engine
from slagate.proto.http2.events import Events
from slagate.proto.http2.goaway import LINGER_S, ClosingTransport, GracefulGoaway, close_in_time
from slagate.proto.http2.interfaces import (
    NO_ERROR,
    Accept,
    Headers,
    Http2Settings,
    Owner,
    StreamEnd,
    StreamHandler,
)
from slagate.proto.http2.keepalive import Keepalive
from slagate.proto.http2.outbox import Outbox, turn_of
from slagate.proto.http2.stream import H2Stream
from slagate.proto.http2.token_bucket import TokenBucket

WRITE_BYTES = 256 << 10
"""Given to the transport at once; what it does not take stays in the engine, where it is counted."""


class H2Connection(asyncio.Protocol):
    """One connection. With `accept` it is a server's, and the peer opens streams; else a client's."""

    def __init__(
        self, owner: Owner, settings: Http2Settings, *, accept: Accept | None = None
    ) -> None:
        self.settings = settings
        self.engine = new_engine(settings, is_server=accept is not None)
        self.peer = ""  # the other end's address, empty where it has none
        self._owner = owner
        self._is_server = accept is not None
        self._loop = asyncio.get_running_loop()
        self._turn = turn_of(self._loop)
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, H2Stream] = {}
        self._outbox = Outbox(self.engine, self._streams, error=EngineError)
        self._is_blocked = False  # by the transport
        self._will_flush = False
        self._is_leaving = False
        self._closing: ClosingTransport | None = None  # for a peer to take our last words
        self._unsaid: asyncio.TimerHandle | None = (
            None  # until it can be told that it is turned away
        )
        self._lost: str | None = None
        self.is_broken = False  # ended for what the peer did, or did not do
        self._keepalive = Keepalive(
            settings.ping_after_s,
            settings.ping_limit_s,
            wanted=lambda: bool(self._streams),
            ping=lambda: self.submit(self.engine.ping),
            dead=lambda: self._abort(f"no answer to a ping in {settings.ping_limit_s:g} s"),
        )
        self._farewell = GracefulGoaway(
            notice=lambda: self.submit(self.engine.send_shutdown_notice),
            ping=lambda about: self.submit(self.engine.ping, about),
            last_word=lambda: self.submit(self.engine.send_goaway),
        )
        self._events = Events(
            self,
            owner,
            accept,
            self._streams,
            chatter=TokenBucket(*settings.chatter),
            resets=TokenBucket(*settings.resets),
            farewell=self._farewell,
        )

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        state = f"lost: {self._lost}" if self._lost else "retiring" if self.is_retiring else "open"
        return f"H2Connection({self.n_streams} streams, {state})"

    @property
    def is_retiring(self) -> bool:
        """Whether it takes no new streams, by the peer's word or by ours."""
        return self._events.is_retiring

    @property
    def n_streams(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    @property
    def room(self) -> int:
        """How many more streams the peer permits us to open."""
        if self._lost is not None or self._events.is_retiring:
            return 0
        return self._events.max_streams - len(self._streams) - self._events.n_leaving

    @property
    def blocked_bytes(self) -> int:
        """As `Carrier.blocked_bytes`."""
        if self._transport is None or not self._is_blocked or self._lost is not None:
            return 0
        return self._transport.get_write_buffer_size()

    def open(self, headers: Headers, handler: StreamHandler) -> H2Stream | None:
        """Open a stream with a request's headers; the body follows. None: the connection takes no more."""
        try:
            stream_id = self.engine.send_request(headers)
        except EngineError:
            # It is closing, which we are about to be told, or it has used up its numbers.
            self._events.is_retiring = True
            return None
        self.flush_soon()
        return self.add(stream_id, handler)

    def retire(self, told: Callable[[], None] = lambda: None) -> None:
        """A server's: ask for no new streams; the open ones go on, and the connection ends with the last.

        `told` is called, once, when no new one can come any more.
        """
        if self._lost is not None or self._is_leaving:
            told()
            return
        self._is_leaving = self._events.is_retiring = True
        self._farewell.begin(told)

    def close(self, reason: str, code: int = NO_ERROR) -> None:
        """Say goodbye and close the transport. Streams that are open are closed for this reason."""
        self.is_broken = self.is_broken or code != NO_ERROR
        if self._lost is None and self._transport is not None:
            # What was said before goes out before.
            self._flush()
        if self._lost is None and self._transport is not None:
            self.submit(self.engine.terminate_connection, code)
            self._flush()
            self._close(self._transport)
        self._lose(reason)

    def abandon(self, reason: str) -> None:
        """As `close`, without a word to the peer: the transport may be gone already."""
        self._abort(reason)
        self.is_broken = False

    # --- what the streams call

    def submit(self, action: Callable[..., None], *args: Any) -> None:
        """Ask something of the engine, and see that it is sent."""
        try:
            action(*args)
        except EngineError:
            # The engine is ahead of what was told: the stream or the connection is closed in there, and
            # the event that says so is on its way.
            return
        self.flush_soon()

    def forget(self, stream: H2Stream) -> bool:
        """Tell this stream nothing any more; false: it was closed. The engine makes room for another."""
        if self._streams.pop(stream.id, None) is None:
            return False
        self._events.n_leaving += 1
        return True

    def queue(self, stream: H2Stream) -> None:
        """Have `H2Stream.give` called before the next write."""
        self._outbox.queue(stream)
        if not self._will_flush:
            self.flush_soon()

    def reset_behind(self, stream: H2Stream, code: int) -> None:
        """Reset it when what it has said is written."""
        self._outbox.reset_behind(stream, code)
        self.flush_soon()

    def watch(self, stream: H2Stream) -> None:
        """Tell it when little of it is unsent."""
        self._outbox.watch(stream)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Write what is queued in the next turn of the loop, with what else is queued until then."""
        if not self._will_flush:
            self._will_flush = True
            self._turn.soon(self._loop, self._flush_queued)

    # --- what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As `asyncio.Protocol`."""
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.peer = f"{name[0]}:{name[1]}"
        begin(self.engine, self.settings, is_server=self._is_server)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """As `asyncio.Protocol`."""
        if self._lost is not None:
            return
        self._keepalive.heard()
        self._turn.begin()
        try:
            self._received(data)
        finally:
            self._turn.end(self._loop)

    def _received(self, data: bytes) -> None:
        broken: Exception | None = None
        try:
            self.engine.receive_data(data)
        except (EngineError, ValueError) as error:
            broken = error
        # Also what came before the peer broke the protocol.
        self._events.tell(self.engine.events())
        if broken is not None:
            self._abort(f"the peer broke HTTP/2: {broken}")
        elif self.engine.want_write:
            # Acknowledgements and windows; what the streams say goes out with them.
            self.flush_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        """As `asyncio.Protocol`."""
        if self._closing is not None:
            self._closing.over()
        self._lose("the peer closed the connection" if exc is None else str(exc))

    def pause_writing(self) -> None:
        """As `asyncio.Protocol`."""
        self._is_blocked = True

    def resume_writing(self) -> None:
        """As `asyncio.Protocol`."""
        self._is_blocked = False
        self._flush()

    # --- what its events call, besides `close`

    def now_s(self) -> float:
        """As `Line.now_s`."""
        return self._loop.time()

    def add(self, stream_id: int, handler: StreamHandler | None) -> H2Stream:
        """As `Line.add`."""
        if not self._streams:
            self._keepalive.watch()
        stream = self._streams[stream_id] = H2Stream(self, stream_id, handler)
        return stream

    def turn_away(self, code: int) -> None:
        """As `Line.turn_away`."""
        self._is_leaving = True
        self.submit(self.engine.send_goaway, code)
        # A peer that reads nothing is never told, and would go on.
        unread = "it was turned away, and does not read so"
        self._unsaid = self._loop.call_later(LINGER_S, self._abort, unread)

    def ended(self, reason: str, code: int) -> None:
        """As `Line.ended`."""
        self.is_broken = self.is_broken or code != NO_ERROR
        if self._transport is not None:
            # The event may come before the last bytes, which say why.
            self._transport.write(self.engine.data_to_send())
            self._close(self._transport)
        self._lose(reason)

    # ---

    def _flush_queued(self) -> None:
        if self._will_flush:
            self._flush()

    def _flush(self) -> None:
        self._will_flush = False
        if self._outbox.has_any:
            self._outbox.give()
        is_drained = False
        while self._lost is None and self._transport is not None and not self._is_blocked:
            try:
                data = self.engine.data_to_send(WRITE_BYTES)
            except EngineError as error:
                self._abort(f"HTTP/2: {error}")
                return
            if data:
                self._transport.write(data)
                self._said()
            # What was queued may close streams only when it is taken.
            self._events.tell(self.engine.events())
            if len(data) < WRITE_BYTES:
                is_drained = True
                break
        self._outbox.written(is_drained=is_drained)

    def _said(self) -> None:
        if self._unsaid is not None:
            self._unsaid.cancel()
            self._unsaid = None

    def _close(self, transport: asyncio.Transport) -> None:
        if not transport.is_closing():
            self._closing = close_in_time(transport)

    def _abort(self, reason: str) -> None:
        self.is_broken = True
        if self._transport is not None:
            self._transport.abort()
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost = reason
        self._events.is_over = True
        self._keepalive.stop()
        self._farewell.stop()
        self._said()
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.close(StreamEnd(None, reason))
        self._owner.lost(reason)
