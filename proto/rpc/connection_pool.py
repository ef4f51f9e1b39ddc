"""A few HTTP/2 connections to one address, and the calls that wait for room on them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

import anyio
import grpc
from anyio.abc import TaskGroup
from typing_extensions import override

from slagate.proto.http2.connection import H2Connection
from slagate.proto.http2.interfaces import ENHANCE_YOUR_CALM, ConnectionCallbacks, Http2Settings
from slagate.proto.rpc.address import parse_address
from slagate.proto.rpc.backoff import Backoff
from slagate.proto.rpc.status import Status

MAX_CONNECTIONS = 8
"""To one worker at a time. A second one is made only where the first has all streams that it may have."""

CONNECT_LIMIT_S = 5.0
"""Seconds for a connection and the first SETTINGS of the worker on it."""

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
"""Seconds between two attempts. A worker that restarts must be found again in seconds."""

MAX_PING_AFTER_S = 7200.0

_TOO_MANY_PINGS = b"too_many_pings"
"""How servers of gRPC say which calm they ask for (its proposal A8): there is that of calls too."""

MakeProtocol = Callable[[], asyncio.Protocol]
Dial = Callable[[str, MakeProtocol], Awaitable[Any]]
"""Connects a protocol to an address. Raises `OSError` or `ValueError` with the reason."""


async def dial_tcp(address: str, make: MakeProtocol) -> None:
    """Dial over TCP in plaintext."""
    host, port = parse_address(address)
    # Without Nagle's delay: event loops switch it off for TCP.
    await asyncio.get_running_loop().create_connection(make, host, port)


async def dial_unix(path: str, make: MakeProtocol) -> None:
    """Dial a Unix socket of this machine."""
    await asyncio.get_running_loop().create_unix_connection(make, path)


class PendingCall(Protocol):
    """A call that waits for a connection."""

    __slots__ = ()

    def start(self, connection: H2Connection, /) -> bool:
        """Open the call's stream on it. False: the connection takes no more."""

    def end_call(self, status: Status, /) -> None:
        """End the call with this status: no connection can be had."""


class ConnectionPool:
    """The connections to one address, made when there is a call to send, in the caller's task group.

    While the address cannot be reached, calls fail at once with UNAVAILABLE until the next attempt is due.
    """

    def __init__(
        self, address: str, tasks: TaskGroup, *, settings: Http2Settings, dial: Dial, hint: str = ""
    ) -> None:
        """`hint` follows the reason where a new connection is lost before the peer's first SETTINGS."""
        self._address = address
        self._hint = hint
        self._tasks = tasks
        self._settings = settings
        self._dial = dial
        self._loop = asyncio.get_running_loop()
        self._connections: list[_PooledConnection] = []  # that may take a stream, now or later
        self.waiting: dict[PendingCall, None] = {}  # for room, in order
        self._is_dialing = False
        self._backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        self._retry_at_s = 0.0
        self._failure = ""
        self._closed_by: str | None = None

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"{len(self.waiting)} waiting, {self.connections}"

    @property
    def connections(self) -> list[H2Connection]:
        """The open connections."""
        return [pooled.connection for pooled in self._connections]

    def start(self, call: PendingCall) -> None:
        """Start the call once a connection has room for it, or end it if none can be had."""
        if not self.waiting:
            for pooled in self._connections:
                if pooled.connection.room > 0 and call.start(pooled.connection):
                    return
        self.waiting[call] = None
        self.serve()

    def drop(self, call: PendingCall) -> None:
        """Take a call out of the waiting ones. Harmless when it is none."""
        self.waiting.pop(call, None)

    def reachable(self) -> None:
        """Forget the backoff: the address was reached in another way, so the next call may connect."""
        self._backoff.reset()
        self._retry_at_s = 0.0

    def close(self, reason: str) -> None:
        """End every connection; streams that are open are closed for this reason."""
        self._closed_by = reason
        for connection in self.connections:
            connection.close(reason)
        self._fail_waiting(reason)

    def serve(self) -> None:
        """Start the calls that wait, as far as connections have room, and connect where none has."""
        while self.waiting:
            pooled = next(
                (pooled for pooled in self._connections if pooled.connection.room > 0), None
            )
            if pooled is None:
                self._want_another()
                return
            call = next(iter(self.waiting))
            if call.start(pooled.connection):
                self.drop(call)

    def _want_another(self) -> None:
        if self._closed_by is not None:
            self._fail_waiting(self._closed_by)
            return
        n_open = sum(not pooled.connection.is_retiring for pooled in self._connections)
        if self._is_dialing or n_open >= MAX_CONNECTIONS:
            return
        if self._loop.time() >= self._retry_at_s:
            self._is_dialing = True
            self._tasks.start_soon(self._connect)
        elif not n_open:
            self._fail_waiting(self._failure)

    async def _connect(self) -> None:
        pooled = _PooledConnection(self, self._settings)
        is_dialed = False
        try:
            with anyio.fail_after(CONNECT_LIMIT_S):
                await self._dial(self._address, lambda: pooled.connection)
                is_dialed = True
                await pooled.settled.wait()
            self._failure = "" if pooled.lost_by is None else pooled.lost_by + self._hint
        except TimeoutError:
            self._failure = f"no answer in {CONNECT_LIMIT_S:g} s"
        except (OSError, ValueError) as error:
            self._failure = str(error) or type(error).__name__
        finally:
            self._is_dialing = False
            if not is_dialed:
                # It may be in use by now. uvloop frees the transport of a dial that is given up, and tells
                # nobody: a word on it would raise.
                pooled.connection.abandon("given up")
            elif pooled not in self._connections:
                pooled.connection.close("given up")
        if self._failure:
            self._retry_at_s = self._loop.time() + self._backoff.next_s()
            if not self._connections:
                self._fail_waiting(self._failure)
        self.serve()

    def _fail_waiting(self, reason: str) -> None:
        text = f"cannot connect to {self._address}: {reason}"
        status = Status(grpc.StatusCode.UNAVAILABLE, text)
        waiting, self.waiting = self.waiting, {}
        for call in waiting:
            call.end_call(status)

    # --- what its connections call

    def opened(self, pooled: "_PooledConnection") -> None:
        """Add a connection that is ready."""
        if self._closed_by is not None:
            return  # and who dialled it closes it
        self._backoff.reset()
        self._connections.append(pooled)
        self.serve()

    def asked_for_calm(self) -> None:
        """Ping half as often on later connections: the peer had too many pings."""
        after_s = min(self._settings.ping_after_s * 2, MAX_PING_AFTER_S)
        self._settings = replace(self._settings, ping_after_s=after_s)

    def dropped(self, pooled: "_PooledConnection") -> None:
        """Remove a connection that is over."""
        if pooled in self._connections:
            self._connections.remove(pooled)


class _PooledConnection(ConnectionCallbacks):
    """One connection of the pool, as its owner."""

    def __init__(self, pool: ConnectionPool, settings: Http2Settings) -> None:
        self._pool = pool
        self.connection = H2Connection(self, settings)
        self.settled = anyio.Event()  # ready or lost
        self.lost_by: str | None = None

    @override
    def ready(self) -> None:
        self.settled.set()
        self._pool.opened(self)

    @override
    def freed(self) -> None:
        if self._pool.waiting:
            self._pool.serve()

    @override
    def retiring(self, code: int, about: bytes, /) -> None:
        if code == ENHANCE_YOUR_CALM and about == _TOO_MANY_PINGS:
            self._pool.asked_for_calm()

    @override
    def lost(self, reason: str, /) -> None:
        self.lost_by = reason
        self.settled.set()
        self._pool.dropped(self)
