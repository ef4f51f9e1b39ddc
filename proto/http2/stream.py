"""One stream of an HTTP/2 connection, as its user drives it."""

from collections.abc import Callable
from typing import Any, Protocol

from slagate.proto.http2.interfaces import CANCEL, Headers, Http2Settings, StreamEnd, StreamHandler


class Carrier(Protocol):
    """What a stream needs of its connection."""

    engine: Any
    settings: Http2Settings

    @property
    def blocked_bytes(self) -> int:
        """What waits in the transport while it takes no more."""

    def submit(self, action: Callable[..., None], *args: Any) -> None:
        """Ask something of the engine, which may know already that the stream is closed."""

    def queue(self, stream: "H2Stream") -> None:
        """Have `H2Stream.give` called before the next write."""

    def reset_behind(self, stream: "H2Stream", code: int) -> None:
        """Reset it when what it has said is written."""

    def watch(self, stream: "H2Stream") -> None:
        """Tell it when little of it is unsent."""

    def forget(self, stream: "H2Stream") -> bool:
        """Tell this stream nothing any more. False: it was closed."""


class H2Stream:
    """As `Stream`.

    What is to be sent is collected here and given to the engine in one piece before the next write: to
    call it for each message would cost more than all the rest of a short stream.
    """

    __slots__ = (
        "_answer",
        "_carrier",
        "_end",
        "_is_queued",
        "_parts",
        "behind_bytes",
        "handler",
        "id",
        "is_paused",
        "parts_bytes",
    )

    def __init__(self, carrier: Carrier, stream_id: int, handler: StreamHandler | None) -> None:
        """`handler` is None only as long as a server makes up its mind about the request."""
        self._carrier = carrier
        self._answer: Headers | None = None
        self._parts: list[bytes] = []
        self._is_queued = False
        self._end: Headers | None = None  # the trailers; empty: an end without any
        self.parts_bytes = 0
        self.behind_bytes = 0  # that the engine still had after the last write
        self.handler = handler
        self.id = stream_id
        self.is_paused = False

    @property
    def unsent_bytes(self) -> int:
        """As `Stream.unsent_bytes`."""
        return self.parts_bytes + self.behind_bytes

    @property
    def ahead_bytes(self) -> int:
        """As `Stream.ahead_bytes`."""
        return self._carrier.blocked_bytes

    def respond(self, headers: Headers, *, last: bool = False) -> None:
        """As `Stream.respond`."""
        self._answer = headers
        if last:
            self._end = ()
        self._queue()

    def send(self, data: bytes) -> None:
        """As `Stream.send`."""
        if not self._is_queued:
            self._queue()
        self._parts.append(data)
        self.parts_bytes += len(data)

    def finish(self) -> None:
        """As `Stream.finish`."""
        self._end = ()
        self._queue()

    def end(self, trailers: Headers) -> None:
        """As `Stream.end`."""
        self._end = trailers
        self._queue()

    def _queue(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._carrier.queue(self)

    def give(self) -> None:
        """Give the engine what was collected. Raises its error where it has closed the stream."""
        engine, stream_id, parts, end = self._carrier.engine, self.id, self._parts, self._end
        self._is_queued = False
        is_last = end is not None and not end
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
        if end:
            engine.send_trailers(stream_id, end)
        self._end = None

    def drop(self) -> None:
        """It is closed: nothing of it is unsent any more."""
        self._parts = []
        self._is_queued = False
        self.parts_bytes = self.behind_bytes = 0

    def close(self, end: StreamEnd) -> None:
        """Tell the handler the end, and let go of it: they refer to each other."""
        self.drop()
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.closed(end)

    def reset(self, code: int = CANCEL) -> None:
        """As `Stream.reset`."""
        if self._carrier.forget(self):
            self.drop()
            self.handler = None
            self._carrier.submit(self._carrier.engine.reset_stream, self.id, code)

    def reset_behind(self, code: int) -> None:
        """As `Stream.reset_behind`."""
        self._carrier.reset_behind(self, code)

    def tell_writable(self) -> None:
        """As `Stream.tell_writable`."""
        self._carrier.watch(self)

    def pause(self) -> None:
        """As `Stream.pause`."""
        if not self.is_paused:
            self.is_paused = True
            self.apply_window()

    def resume(self) -> None:
        """As `Stream.resume`."""
        if self.is_paused:
            self.is_paused = False
            self.apply_window()

    def apply_window(self) -> None:
        """Tell the engine how much of this stream may arrive."""
        window_bytes = 0 if self.is_paused else self._carrier.settings.stream_window_bytes
        self._carrier.submit(self._set_window, window_bytes)

    def _set_window(self, window_bytes: int) -> None:
        self._carrier.engine.set_local_window_size(window_bytes, stream_id=self.id)
