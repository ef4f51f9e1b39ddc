"""What an HTTP/2 connection and those who use it tell each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Headers = Sequence[tuple[bytes, bytes]]

# RFC 9113, section 7.
NO_ERROR = 0x0
INTERNAL_ERROR = 0x2
REFUSED_STREAM = 0x7
CANCEL = 0x8
ENHANCE_YOUR_CALM = 0xB

RESET_NAMES = {
    NO_ERROR: "NO_ERROR",
    0x1: "PROTOCOL_ERROR",
    INTERNAL_ERROR: "INTERNAL_ERROR",
    0x3: "FLOW_CONTROL_ERROR",
    0x4: "SETTINGS_TIMEOUT",
    0x5: "STREAM_CLOSED",
    0x6: "FRAME_SIZE_ERROR",
    REFUSED_STREAM: "REFUSED_STREAM",
    CANCEL: "CANCEL",
    0x9: "COMPRESSION_ERROR",
    0xA: "CONNECT_ERROR",
    ENHANCE_YOUR_CALM: "ENHANCE_YOUR_CALM",
    0xC: "INADEQUATE_SECURITY",
    0xD: "HTTP_1_1_REQUIRED",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Settings:
    """Limits that one end sets its peer (windows, streams, headers, floods), and its keepalive."""

    stream_window_bytes: int = 256 << 10  # what may arrive of a stream that is paused
    connection_window_bytes: int = 16 << 20  # never what limits: it is opened again as bytes arrive
    max_streams: int = 1000  # open at once, of those that the peer opens
    max_header_bytes: int = 64 << 10  # of one header list; more of them end the connection
    # By the peer, of a server's streams: at once, and each second; more get ENHANCE_YOUR_CALM.
    resets: tuple[int, int] = (1000, 100)
    control_frames: tuple[int, int] = (200, 20)  # as `resets`: the peer's pings, settings and such
    ping_after_s: float = 30.0  # of silence, while streams are open
    ping_limit_s: float = 10.0  # of silence behind a ping: the peer has vanished


class StreamEnd(NamedTuple):
    """Why a stream was closed; `code` is HTTP/2's, None where the whole connection was lost."""

    code: int | None
    reason: str


class StreamHandler(Protocol):
    """Callbacks of one stream. They must not raise: the connection carries other streams too.

    headers ──▶ data* ──▶ trailers? ──▶ ended ──▶ closed        closed may come at any point, once
    """

    __slots__ = ()

    def headers(self, headers: Headers, /) -> None:
        """Take the headers of a response. Those of a request go to `Accept` instead."""
        return

    def data(self, data: bytes, /) -> None:
        """Take bytes of the body."""

    def trailers(self, headers: Headers, /) -> None:
        """Take the trailers, the headers behind the body."""
        return

    def ended(self) -> None:
        """The peer has sent END_STREAM: no more comes from it."""

    def writable(self) -> None:
        """At most `LOW_WATER_BYTES` are unsent; called once for each `H2Stream.tell_writable`."""

    def closed(self, end: StreamEnd, /) -> None:
        """The stream is closed. The last callback; not made after our own `H2Stream.reset`."""


class ConnectionCallbacks(Protocol):
    """Callbacks of a connection, for what is not about one stream. They must not raise."""

    def ready(self) -> None:
        """The peer's first SETTINGS have come: streams may be opened."""

    def freed(self) -> None:
        """One more stream may fit: one has closed, or the peer permits more."""
        return

    def retiring(self, code: int, about: bytes, /) -> None:
        """The peer's GOAWAY, with its error code and debug data: no new streams, the open ones go on."""
        return

    def lost(self, reason: str, /) -> None:
        """The connection is lost, after `closed` of each of its streams."""
