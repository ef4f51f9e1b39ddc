"""A worker's server over the same HTTP/2 engine: what it answers is up to the test."""

from collections.abc import Callable

from slagate.proto.http2.connection import H2Connection, H2Stream
from slagate.proto.http2.interfaces import Headers, Http2Settings, StreamEnd
from slagate.proto.rpc.frames import prefix

ANSWER = ((b":status", b"200"), (b"content-type", b"application/grpc"))


class PeerStream:
    """One stream at the server, and what the client did to it."""

    def __init__(self, stream: H2Stream, headers: Headers, on_request: "OnRequest") -> None:
        self.stream = stream
        self.request_headers = headers
        self.body = b""
        self.has_ended = False
        self.end: StreamEnd | None = None
        self._on_request = on_request

    def headers(self, headers: Headers, /) -> None:
        raise AssertionError(headers)

    def data(self, data: bytes, /) -> None:
        self.body += data

    def trailers(self, headers: Headers, /) -> None: ...

    def ended(self) -> None:
        self.has_ended = True
        self._on_request(self)

    def writable(self) -> None: ...

    def closed(self, end: StreamEnd, /) -> None:
        self.end = end

    def answer(self, *messages: bytes) -> None:
        self.stream.respond(ANSWER)
        self.say(*messages)

    def say(self, *messages: bytes) -> None:
        for message in messages:
            self.stream.send(prefix(message) + message)

    def finish(self, code: int = 0, message: bytes = b"") -> None:
        self.stream.end_stream([(b"grpc-status", b"%d" % code), (b"grpc-message", message)])


OnRequest = Callable[[PeerStream], None]


def echo(stream: PeerStream) -> None:
    """Answer with the length of the request."""
    stream.answer(len(stream.body).to_bytes(4, "big"))
    stream.finish()


class PeerServer:
    """Makes the server's end of each connection, and remembers all of them and their streams."""

    def __init__(self, on_request: OnRequest = echo, settings: Http2Settings | None = None) -> None:
        self.on_request = on_request
        self.settings = settings or Http2Settings()
        self.connections: list[H2Connection] = []
        self.streams: list[PeerStream] = []
        self.reasons: list[str] = []  # why connections were lost

    def protocol(self) -> H2Connection:
        connection = H2Connection(self, self.settings, accept=self._accept)
        self.connections.append(connection)
        return connection

    def _accept(self, stream: H2Stream, headers: Headers) -> PeerStream:
        accepted = PeerStream(stream, headers, lambda peer: self.on_request(peer))
        self.streams.append(accepted)
        return accepted

    def ready(self) -> None: ...

    def freed(self) -> None: ...

    def retiring(self, code: int, about: bytes, /) -> None: ...

    def lost(self, reason: str, /) -> None:
        self.reasons.append(reason)
