"""The client-facing side: connections, and who serves the calls on them.

Generate is served here, by `ClientStream` and the function that a front is given. Every other method goes,
as it is, to the local server behind `local`.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain

import anyio
from prometheus_client import CollectorRegistry
from typing_extensions import override

from slagate.proto.http2.connection import Accept, H2Connection, H2Stream
from slagate.proto.http2.interfaces import (
    ENHANCE_YOUR_CALM,
    ConnectionCallbacks,
    Headers,
    Http2Settings,
    StreamHandler,
)
from slagate.proto.http2.token_bucket import TokenBucket
from slagate.proto.rpc.connection_pool import ConnectionPool
from slagate.router.front.client_stream import ClientStream, Serve, StreamContext
from slagate.router.front.limits import TimeoutQueue
from slagate.router.front.proxy import ProxiedCall
from slagate.router.metrics import ConnectionCounts, ConnectionEnd, RefusedConnection
from slagate.router.request.errors import TooLarge
from slagate.router.request.settings import Settings
from slagate.workers.runtime.listen import BACKLOG
from slagate.workers.runtime.waiting import UntilEmpty
from slagate.workers.tls.reloading import HANDSHAKE_LIMIT_S
from slagate.workers.worker import GENERATE

log = logging.getLogger(__name__)

_PATH = GENERATE.encode()


class Front(StreamContext):
    """The clients' connections of one listener, and the requests that are being served on them."""

    def __init__(
        self,
        serve: Serve,
        local: ConnectionPool,
        settings: Settings,
        *,
        counts: ConnectionCounts | None = None,
    ) -> None:
        super().__init__(serve, local, settings)
        limits = settings.clients
        self.counts = counts or ConnectionCounts(CollectorRegistry(), CollectorRegistry())
        self.clients: set[_Client] = set()
        self.server: asyncio.Server | None = None
        self.silent: TimeoutQueue[_Client] = TimeoutQueue(
            limits.handshake_s,
            lambda client: client.connection.close("it said nothing", ENHANCE_YOUR_CALM),
        )
        self.http2 = Http2Settings(
            max_streams=limits.max_streams,
            max_header_bytes=limits.max_header_bytes,
            resets=limits.resets,
            control_frames=limits.control_frames,
        )
        # Clients that may still send new requests, though asked not to.
        self._may_send: set[_Client] = set()
        self._none_may_send = UntilEmpty(self._may_send)
        self._all_gone = UntilEmpty(self.clients)
        self._is_leaving = False
        self._n_broken = 0
        self._told_of_broken = TokenBucket(10, 0.2)  # lines of the log, at once and each second

    def protocol(self) -> asyncio.Protocol:
        """The protocol object for a new connection."""
        return _Client(self).connection

    def joined(self, client: "_Client") -> bool:
        """Take a client that has connected, with TLS once its handshake is done.

        False: it is refused, as the gateway is draining, or has as many connections as it may have.
        """
        if self._is_leaving:
            self.counts.refused(RefusedConnection.DRAINING)
            return False
        if len(self.clients) >= self.settings.clients.max_connections:
            self.counts.refused(RefusedConnection.LIMIT)
            return False
        self.clients.add(client)
        self.silent.start_timeout(client)
        self.counts.accepted()
        return True

    def retire(self) -> None:
        """Ask all clients to send no new requests; those on their way are still served. Idempotent."""
        if self._is_leaving:
            return
        self._is_leaving = True
        if self.server is not None:
            self.server.close()
        self._may_send |= self.clients
        for client in list(self.clients):
            client.connection.retire(partial(self._retired, client))

    async def settled(self) -> None:
        """After `retire`: wait until every request that was on its way has arrived."""
        await self._none_may_send.wait()
        await self.intake.emptied()

    async def emptied(self) -> None:
        """Wait until no client is connected."""
        await self._all_gone.wait()

    async def finished(self) -> None:
        """Wait until no request is being served."""
        while self.requests:
            await asyncio.wait(self.requests)

    def client_gone(self, client: "_Client") -> None:
        """Count and forget a client whose connection is over."""
        if client in self.clients:
            how = ConnectionEnd.DRAINED if self._is_leaving else ConnectionEnd.CLIENT
            self.counts.ended(ConnectionEnd.BROKEN if client.connection.is_broken else how)
        self.clients.discard(client)
        self.silent.discard(client)
        if not self.clients:
            self._all_gone.set()

    def broken(self, peer: str, reason: str) -> None:
        """Log, at a bounded rate, a connection that was ended for what its client did or did not do."""
        self._n_broken += 1
        if self._told_of_broken.take_token(self.loop.time()):
            about = {"peer": peer, "reason": reason, "connections": self._n_broken}
            log.warning("client.broken", extra=about)

    def _retired(self, client: "_Client") -> None:
        self._may_send.discard(client)
        if not self._may_send:
            self._none_may_send.set()

    def close(self) -> None:
        """Close every connection, which ends its requests."""
        for client in list(self.clients):
            client.connection.close("the gateway is shutting down")
        self.silent.clear()
        self.intake.stop_timeouts()
        self.untaken.clear()


class _Client(ConnectionCallbacks):
    """One connection of a client: its `ConnectionCallbacks`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.connection = _ClientConnection(self, front.http2, accept=self._accept)

    def _accept(self, stream: H2Stream, headers: Headers) -> StreamHandler:
        fields = dict(headers)
        front, peer = self._front, self.connection.peer
        n_bytes = sum(map(len, chain.from_iterable(headers))) + 32 * len(headers)
        max_bytes = front.http2.max_header_bytes
        refusal = None
        if n_bytes > max_bytes:
            refusal = TooLarge("metadata", f"{n_bytes} bytes, more than {max_bytes}")
        if fields.get(b":path") == _PATH:
            return ClientStream(stream, headers, fields, front, peer=peer, refusal=refusal)
        status = None if refusal is None else refusal.status()
        return ProxiedCall(stream, headers, front, peer=peer, refusal=status)

    def connected(self) -> bool:
        """The connection was made. False: the gateway does not want it."""
        return self._front.joined(self)

    @override
    def ready(self) -> None:
        self._front.silent.discard(self)

    @override
    def lost(self, reason: str, /) -> None:
        if self.connection.is_broken:
            self._front.broken(self.connection.peer, reason)
        self._front.client_gone(self)


class _ClientConnection(H2Connection):
    def __init__(self, client: _Client, settings: Http2Settings, *, accept: Accept) -> None:
        super().__init__(client, settings, accept=accept)
        self._client = client

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._client.connected():
            super().connection_made(transport)
        else:
            transport.close()


@asynccontextmanager
async def serve_front(
    serve: Serve,
    listening: socket.socket,
    local: ConnectionPool,
    settings: Settings,
    *,
    tls: ssl.SSLContext | None = None,
    counts: ConnectionCounts | None = None,
) -> AsyncIterator[Front]:
    """Serve clients on a listening socket within the `with`, in plaintext without `tls`.

    `serve` serves Generate, the server behind `local` all other methods; `counts` counts connections.
    """
    loop = asyncio.get_running_loop()
    front = Front(serve, local, settings, counts=counts)
    front.server = await loop.create_server(
        front.protocol,
        sock=listening,
        backlog=BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else HANDSHAKE_LIMIT_S,
    )
    try:
        yield front
    finally:
        front.retire()
        front.close()
        with anyio.CancelScope(shield=True):
            await front.finished()
