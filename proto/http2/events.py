"""What the engine of an HTTP/2 connection says, to the streams and to the owner of the connection."""

from typing import Any, Protocol

from slagate.proto.http2.engine import (
    ConnectionClosed,
    DataReceived,
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
)
from slagate.proto.http2.goaway import GracefulGoaway
from slagate.proto.http2.interfaces import (
    ENHANCE_YOUR_CALM,
    NO_ERROR,
    REFUSED_STREAM,
    RESET_NAMES,
    Accept,
    Owner,
    StreamEnd,
    StreamHandler,
)
from slagate.proto.http2.stream import H2Stream
from slagate.proto.http2.token_bucket import TokenBucket

_UNLIMITED = (1 << 31) - 1

_DONE = StreamEnd(NO_ERROR, "the peer reset the stream: NO_ERROR")


class Line(Protocol):
    """The connection, as its events may change it."""

    def now_s(self) -> float:
        """The loop's time."""

    def add(self, stream_id: int, handler: StreamHandler | None) -> H2Stream:
        """A stream is open."""

    def close(self, reason: str, code: int = NO_ERROR) -> None:
        """Say goodbye and close."""

    def turn_away(self, code: int) -> None:
        """Take no more streams of the peer, with this HTTP/2 error code; the open ones go on."""

    def ended(self, reason: str, code: int) -> None:
        """Both sides are done, or one broke the protocol, with its HTTP/2 error code."""


class Events:
    """`streams` are those that are open, by their numbers."""

    def __init__(
        self,
        line: Line,
        owner: Owner,
        accept: Accept | None,
        streams: dict[int, H2Stream],
        *,
        chatter: TokenBucket,
        resets: TokenBucket,
        farewell: GracefulGoaway,
    ) -> None:
        self._line = line
        self._owner = owner
        self._accept = accept
        self._streams = streams
        self._chatter = chatter
        self._resets = resets
        self._farewell = farewell
        self._is_ready = False
        self._is_turned_away = False
        self.is_retiring = False
        self.is_over = False  # the connection: what it had still to say is for nobody
        self.max_streams = 0  # that we may open at once; 0 until the peer has said
        self.n_leaving = 0  # forgotten here, and not closed by the engine yet
        self._of_streams: dict[type[Event], Any] = {
            RequestReceived: self._request,
            ResponseReceived: self._response,
            TrailersReceived: self._trailers,
            StreamClosed: self._closed,
            StreamReset: self._reset,
        }
        self._of_line: dict[type[Event], Any] = {
            ConnectionClosed: self._gone,
            # What libnghttp2 does not count, as it does empty frames, unknown ones and resets.
            PingReceived: self._heard,
            PingAcknowledged: self._heard,
            SettingsReceived: self._heard,
            GoAwayReceived: self._heard,
        }

    def tell(self, events: list[Any]) -> None:
        """Pass them on, in order; what they bring of one stream's body as one piece.

        Each message comes in a frame of its own, between those of other streams, and to hand a frame over
        costs more than all that is done with the message in it.
        """
        bodies: dict[int, list[bytes]] = {}
        for event in events:
            if self.is_over:
                return
            if type(event) is DataReceived:
                stream_id = event.stream_id
                if stream_id in bodies:
                    bodies[stream_id].append(event.data)
                else:
                    bodies[stream_id] = [event.data]
                if event.end_stream:
                    self._body(stream_id, bodies.pop(stream_id))
                    self._ended(stream_id)
            elif (told := self._of_streams.get(type(event))) is not None:
                if event.stream_id in bodies:
                    self._body(event.stream_id, bodies.pop(event.stream_id))
                told(event)
            elif (told := self._of_line.get(type(event))) is not None:
                self._bodies(bodies)
                bodies.clear()
                told(event)
        self._bodies(bodies)

    def _bodies(self, bodies: dict[int, list[bytes]]) -> None:
        for stream_id, parts in bodies.items():
            if self.is_over:
                return
            self._body(stream_id, parts)

    def _body(self, stream_id: int, parts: list[bytes]) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None and stream.handler is not None:
            stream.handler.data(parts[0] if len(parts) == 1 else b"".join(parts))

    def _request(self, event: RequestReceived) -> None:
        assert self._accept is not None
        stream = self._line.add(event.stream_id, None)
        if self._is_turned_away:
            # Sent before the peer could know: with what crossed the limit, or without reading.
            stream.reset(REFUSED_STREAM)
            return
        stream.handler = self._accept(stream, event.headers)
        if event.end_stream:
            self._ended(event.stream_id)

    def _response(self, event: ResponseReceived) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None or stream.handler is None:
            return
        if stream.is_paused:
            # It may have been paused when the engine did not know the stream yet.
            stream.apply_window()
        stream.handler.headers(event.headers)
        if event.end_stream:
            self._ended(event.stream_id)

    def _trailers(self, event: TrailersReceived) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None and stream.handler is not None:
            stream.handler.trailers(event.headers)
            self._ended(event.stream_id)

    def _ended(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None and stream.handler is not None:
            stream.handler.ended()

    def _closed(self, event: StreamClosed) -> None:
        stream = self._streams.pop(event.stream_id, None)
        if stream is None:
            self.n_leaving -= 1
        elif event.error_code == NO_ERROR and event.local_error is None:
            stream.close(_DONE)
        else:
            name = RESET_NAMES.get(event.error_code, str(event.error_code))
            reason = event.local_error or f"the peer reset the stream: {name}"
            # The peer's, or one that it made the engine send (CVE-2025-8671).
            self._count_reset()
            stream.close(StreamEnd(event.error_code, str(reason)))
        self._owner.freed()

    def _reset(self, event: StreamReset) -> None:
        if event.error_code == NO_ERROR:
            self._count_reset()  # any other one shows in how the stream is closed

    def _count_reset(self) -> None:
        # A server may reset what a client has asked it for as often as it likes.
        if self._accept is None or self._is_turned_away:
            return
        if not self._resets.take_token(self._line.now_s()):
            self._is_turned_away = self.is_retiring = True
            self._line.turn_away(ENHANCE_YOUR_CALM)

    def _heard(self, event: Event) -> None:
        if not self._chatter.take_token(self._line.now_s()):
            self._line.close("the peer talks too much", ENHANCE_YOUR_CALM)
        elif isinstance(event, SettingsReceived):
            self._permitted(event)
        elif isinstance(event, GoAwayReceived):
            self.is_retiring = True
            self._owner.retiring(event.error_code, event.debug_data)
        elif isinstance(event, PingAcknowledged):
            self._farewell.answered(event.opaque_data)

    def _permitted(self, event: SettingsReceived) -> None:
        key = Setting.MAX_CONCURRENT_STREAMS
        if self._is_ready:
            self.max_streams = event.settings.get(key, self.max_streams)
            self._owner.freed()
        else:
            self._is_ready = True
            self.max_streams = event.settings.get(key, _UNLIMITED)
            self._owner.ready()

    def _gone(self, event: ConnectionClosed) -> None:
        name = RESET_NAMES.get(event.error_code, str(event.error_code))
        about = event.debug_data[:200].decode(errors="replace")
        reason = f"the connection ended: {name} {about}".rstrip()
        self._line.ended(reason, event.error_code)
