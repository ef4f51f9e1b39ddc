"""One stream of an HTTP/2 connection, as its user drives it."""

from collections.abc import Callable
from typing import Any, Protocol

from slagate.workers.h2_port import CANCEL, Headers, Settings, StreamHandler


class Carrier(Protocol):
    """What a stream needs of its connection."""

    engine: Any
    settings: Settings

    def submit(self, action: Callable[..., None], *args: Any) -> None:
        """Ask something of the engine, which may know already that the stream is closed."""

    def queue(self, stream: "H2Stream") -> None:
        """Have `H2Stream.give` called before the next write."""

    def watch(self, stream: "H2Stream") -> None:
        """Tell it when little of it is unsent."""

    def forget(self, stream: "H2Stream") -> bool:
        """Tell this stream nothing any more. False: it was closed."""


class H2Stream:
    """As `Stream`.

    What is to be sent is collected here and given to the engine in one piece, before the next write: most
    of a short stream's cost would else be the calls for each of its messages.
    """

    __slots__ = (
        "_carrier",
        "_end",
        "_parts",
        "_parts_bytes",
        "behind_bytes",
        "handler",
        "id",
        "is_paused",
    )

    def __init__(self, carrier: Carrier, stream_id: int, handler: StreamHandler | None) -> None:
        """`handler` is None only as long as a server makes up its mind about the request."""
        self._carrier = carrier
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._end: Headers | None = None  # trailers; none for an end without any
        self.behind_bytes = 0  # in the engine, after the last write
        self.handler = handler
        self.id = stream_id
        self.is_paused = False

    @property
    def unsent_bytes(self) -> int:
        """As `Stream.unsent_bytes`."""
        return self._parts_bytes + self.behind_bytes

    def respond(self, headers: Headers, *, last: bool = False) -> None:
        """As `Stream.respond`."""
        self._carrier.submit(
            lambda: self._carrier.engine.send_response(self.id, headers, end_stream=last)
        )

    def send(self, data: bytes) -> None:
        """As `Stream.send`."""
        if not self._parts:
            self._carrier.queue(self)
        self._parts.append(data)
        self._parts_bytes += len(data)

    def finish(self) -> None:
        """As `Stream.finish`."""
        self._end = ()
        self._carrier.queue(self)

    def end(self, trailers: Headers) -> None:
        """As `Stream.end`."""
        self._end = trailers
        self._carrier.queue(self)

    def give(self) -> None:
        """Give the engine what was collected."""
        engine, parts, end = self._carrier.engine, self._parts, self._end
        if parts:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            self._parts = []
            self._parts_bytes = 0
            engine.send_data(self.id, data, end_stream=end is not None and not end)
        elif end is not None and not end:
            engine.send_data(self.id, b"", end_stream=True)
        if end:
            engine.send_trailers(self.id, end)
        self._end = None

    def reset(self, code: int = CANCEL) -> None:
        """As `Stream.reset`."""
        self._parts = []
        self._parts_bytes = 0
        self._end = None
        if self._carrier.forget(self):
            self._carrier.submit(self._carrier.engine.reset_stream, self.id, code)

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
