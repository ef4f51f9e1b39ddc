"""A reverse proxy for one call that is not Generate: to the local server and back, as it is."""

import asyncio

import grpc
from typing_extensions import override

from slagate.proto.http2.connection import H2Connection, H2Stream
from slagate.proto.http2.interfaces import (
    CANCEL,
    INTERNAL_ERROR,
    NO_ERROR,
    Headers,
    StreamEnd,
    StreamHandler,
)
from slagate.proto.rpc.connection_pool import PendingCall
from slagate.proto.rpc.headers import CONTENT_TYPE, status_headers
from slagate.proto.rpc.status import Status
from slagate.router.front.client_stream import StreamContext
from slagate.router.front.limits import PendingResponse
from slagate.router.request.metadata import PEER

HIGH_WATER_BYTES = 64 << 10
"""Unsent bytes in one direction above which the sender is asked to wait."""

_PEER = PEER.encode()
_LOST = Status(grpc.StatusCode.UNAVAILABLE, "the gateway is shutting down")


class ProxiedCall(StreamHandler, PendingCall, PendingResponse):
    """One call of a client that is passed on to the local server: handles the client's stream."""

    def __init__(
        self,
        client: H2Stream,
        headers: Headers,
        front: StreamContext,
        *,
        peer: str,
        refusal: Status | None = None,
    ) -> None:
        """A `refusal` is the response itself: then the call is not passed on."""
        self._client = client
        self._headers = [*(field for field in headers if field[0] != _PEER), (_PEER, peer.encode())]
        self._front = front
        self.server: H2Stream | None = None
        self._early: list[bytes] = []  # before there is a stream to the server
        self._has_ended = False
        self.is_over = False
        self._is_blocked = False  # the client does not read its answer
        if refusal is None:
            front.local.start(self)
        else:
            self.end_call(refusal)

    @override
    def start(self, connection: H2Connection, /) -> bool:
        server = connection.open(self._headers, _Answer(self, self._client))
        if server is None:
            return False
        self.server = server
        for data in self._early:
            server.send(data)
        if self._early:
            self._early.clear()
            # It was asked to wait for this; by way of the other end, as it may have to wait for that.
            server.tell_writable()
        if self._has_ended:
            server.end_stream()
        return True

    @override
    def end_call(self, status: Status, /) -> None:
        """Respond with a status: the local server cannot be reached, or is not to be called."""
        fields = [(b":status", b"200"), (b"content-type", CONTENT_TYPE), *status_headers(status)]
        self._client.respond(fields, last=True)
        self.response_ended()

    def response_ended(self) -> None:
        """The whole response is queued: limit the time to read it, and end an unfinished request."""
        self.detach()
        self._add_untaken()
        if not self._has_ended:
            # Nobody wants the rest; both are told so, the client behind its answer: RFC 9113, section 8.1.
            self._client.reset_behind(NO_ERROR)
            if self.server is not None:
                self.server.reset()

    def response_blocked(self) -> None:
        """The client does not read its response: limit the time until it does."""
        if not self._is_blocked:
            self._is_blocked = True
            self._client.tell_writable()
            self._add_untaken()

    def _add_untaken(self) -> None:
        front = self._front
        front.untaken.start_timeout(self, front.loop.time() + front.settings.default_timeout_s)

    def detach(self) -> None:
        """Pass nothing more on to the server, and stop the time limit."""
        self.is_over = True
        self._front.local.drop(self)
        self._front.untaken.discard(self)

    # --- as `StreamHandler`

    @override
    def data(self, data: bytes, /) -> None:
        if self.is_over:
            return
        if self.server is None:
            self._early.append(data)
            self._client.pause()
            return
        self.server.send(data)
        if self.server.unsent_bytes > HIGH_WATER_BYTES:
            self._client.pause()
            self.server.tell_writable()

    @override
    def ended(self) -> None:
        self._has_ended = True
        if self.server is not None:
            self.server.end_stream()

    @override
    def writable(self) -> None:
        """The client's stream has room for more of the response."""
        self._is_blocked = False
        if not self.is_over:
            self._front.untaken.discard(self)
        if self.server is not None:
            self.server.resume()

    @override
    def closed(self, _end: StreamEnd, /) -> None:
        """The client has the whole response, or has left."""
        self.detach()
        if self.server is not None:
            self.server.reset()

    # --- as `PendingResponse`

    @override
    def unsent(self) -> tuple[int, int]:
        return self._client.unsent_bytes, self._client.transport_bytes

    @override
    def give_up(self) -> None:
        self._client.reset()
        self.closed(StreamEnd(CANCEL, "the client has not taken its answer"))


class _Answer(StreamHandler):
    """The handler of the stream to the local server."""

    def __init__(self, forward: ProxiedCall, client: H2Stream) -> None:
        self._forward = forward
        self._client = client
        self._server_trailers: Headers | None = None
        self._first: Headers | None = None  # kept until it is known whether they are the last
        self._has_answered = False
        self._is_last = False

    @override
    def headers(self, headers: Headers, /) -> None:
        self._first = headers
        # Unless they turn out to be the last words, which has to be said along with them.
        asyncio.get_running_loop().call_soon(self._respond)

    @override
    def data(self, data: bytes, /) -> None:
        self._respond()
        self._client.send(data)
        server = self._forward.server
        if server is not None and self._client.unsent_bytes > HIGH_WATER_BYTES:
            server.pause()
            self._forward.response_blocked()

    def _respond(self) -> None:
        if not self._has_answered and self._first is not None and not self._is_last:
            self._has_answered = True
            self._client.respond(self._first)

    @override
    def trailers(self, headers: Headers, /) -> None:
        self._server_trailers = headers

    @override
    def ended(self) -> None:
        if self._server_trailers is not None:
            self._respond()
            self._client.end_stream(self._server_trailers)
        elif self._has_answered or self._first is None:
            self._client.end_stream()
        else:
            self._is_last = True
            self._client.respond(self._first, last=True)
        self._forward.response_ended()

    @override
    def writable(self) -> None:
        """The server's stream has room for more of the request."""
        self._client.resume()

    @override
    def closed(self, end: StreamEnd, /) -> None:
        if self._forward.is_over:
            return
        self._is_last = True  # the headers that it may have begun with come too late
        if end.code is not None:
            self._forward.detach()
            self._client.reset(end.code or INTERNAL_ERROR)
        elif self._has_answered:
            self._client.end_stream(status_headers(_LOST))
            self._forward.response_ended()
        else:
            self._forward.end_call(_LOST)
