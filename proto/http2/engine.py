"""The HTTP/2 engine, libnghttp2 by way of `ngh2`: the only module that imports it.

It is an alpha release and pinned exactly. Sans-I/O: bytes go in, events and bytes come out.
"""

from ngh2 import (
    Configuration,
    Connection,
    ConnectionClosed,
    DataReceived,
    Event,
    GoAwayReceived,
    NeverIndexedHeader,
    PingAcknowledged,
    PingReceived,
    RequestReceived,
    ResponseReceived,
    Role,
    Setting,
    SettingsReceived,
    StreamClosed,
    StreamReset,
    TrailersReceived,
)
from ngh2 import NGH2Error as EngineError

from slagate.proto.http2.interfaces import Http2Settings

__all__ = [
    "Connection",
    "ConnectionClosed",
    "DataReceived",
    "EngineError",
    "Event",
    "GoAwayReceived",
    "PingAcknowledged",
    "PingReceived",
    "RequestReceived",
    "ResponseReceived",
    "Setting",
    "SettingsReceived",
    "StreamClosed",
    "StreamReset",
    "TrailersReceived",
    "begin",
    "new_engine",
    "unindexed",
]


HEADER_TIMES = 8
"""Of the header list that clients are told to send at most: what is above ends the connection.

Clients do not all look at what they are told, and what is moderately too large is to end its call alone.
"""


_UNLIMITED = (1 << 32, 1 << 32)
"""Resets are counted in `Events`: over a limit of its own, libnghttp2 says INTERNAL_ERROR."""


def new_engine(settings: Http2Settings, *, is_server: bool) -> Connection:
    """An engine for one connection."""
    max_header_bytes = settings.max_header_bytes * (HEADER_TIMES if is_server else 1)
    return Connection(
        Role.SERVER if is_server else Role.CLIENT,
        Configuration(
            stream_reset_rate_limit=_UNLIMITED,
            max_inbound_header_list_size=max_header_bytes,
        ),
    )


def begin(engine: Connection, settings: Http2Settings, *, is_server: bool) -> None:
    """Queue the preface and SETTINGS, and set the connection's window."""
    said = {
        Setting.INITIAL_WINDOW_SIZE: settings.stream_window_bytes,
        Setting.MAX_HEADER_LIST_SIZE: settings.max_header_bytes,
    }
    if is_server:
        said[Setting.MAX_CONCURRENT_STREAMS] = settings.max_streams
    else:
        said[Setting.ENABLE_PUSH] = 0
    engine.initiate_connection(said)
    engine.set_local_window_size(settings.connection_window_bytes)


def unindexed(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """A header field that HPACK does not index, as its value is another one each time."""
    return NeverIndexedHeader(name, value)
