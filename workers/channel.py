"""A worker's streams over gRPC: the only module on the gateway's worker side that carries tokens."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import grpc
from anyio.abc import TaskGroup

from slagate.workers.grpc_wire import to_headers
from slagate.workers.h2 import H2Connection
from slagate.workers.h2_port import ENHANCE_YOUR_CALM, Settings
from slagate.workers.listen import parse_address
from slagate.workers.rpc import Rpc
from slagate.workers.stream import EndedCall
from slagate.workers.worker import Call, Metadata, Sink, Status

log = logging.getLogger(__name__)

GENERATE = "/openengine.v1.Inference/Generate"
SUBSCRIBE_KV_EVENTS = "/openengine.v1.Control/SubscribeKvEvents"

MAX_CONNECTIONS = 8
"""To one worker, at a time. A second one only where the first has as many streams as the worker permits."""

CONNECT_LIMIT_S = 5.0
"""For a connection and the worker's first word on it."""

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
"""Between two attempts. A worker that restarts must be found again in seconds."""

MAX_PING_AFTER_S = 7200.0

_CLOSING = Status(grpc.StatusCode.CANCELLED, "the channel is closing")

MakeProtocol = Callable[[], asyncio.Protocol]
Dial = Callable[[str, MakeProtocol], Awaitable[Any]]
"""Connects a protocol to an address. Raises `OSError` or `ValueError` saying why it cannot."""


async def dial_tcp(address: str, make: MakeProtocol) -> None:
    """In plain text. As `Dial`."""
    host, port = parse_address(address)
    # Without Nagle's delay: event loops switch it off for TCP.
    await asyncio.get_running_loop().create_connection(make, host, port)


class StreamChannel:
    """Starts streams to one worker. The task group that owns the tasks which connect is the caller's.

    Connects when there is something to send. While a worker cannot be reached, calls fail at once with
    UNAVAILABLE until the next attempt is due.
    """

    def __init__(
        self,
        address: str,
        tasks: TaskGroup,
        *,
        settings: Settings | None = None,
        dial: Dial = dial_tcp,
    ) -> None:
        self._address = address
        self._authority = address.encode(errors="replace")
        self._tasks = tasks
        self._settings = settings or Settings()
        self._dial = dial
        self._loop = asyncio.get_running_loop()
        self._links: list[_Link] = []  # that may take a stream, now or later
        self._calls: set[Rpc] = set()
        self._waiting: dict[Rpc, None] = {}  # of those, in order
        self._is_dialing = False
        self._n_failed = 0  # attempts in a row
        self._retry_at_s = 0.0
        self._failure = ""
        self._is_closed = False

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        links = [link.connection for link in self._links]
        return f"StreamChannel({len(self._calls)} calls, {len(self._waiting)} waiting, {links})"

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        """As `Worker.generate`."""
        return self._begin(GENERATE, request, metadata, sink, timeout_s)

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        """As `Worker.kv_events`."""
        return self._begin(SUBSCRIBE_KV_EVENTS, request, metadata, sink, None)

    def reachable(self) -> None:
        """The worker was reached in another way: the next call need not wait for its turn to try."""
        self._n_failed = 0
        self._retry_at_s = 0.0

    def close(self) -> None:
        """End every call and every connection."""
        self._is_closed = True
        for call in list(self._calls):
            call.end(_CLOSING)
        for link in list(self._links):
            link.connection.close(_CLOSING.message)

    def _begin(
        self, path: str, request: bytes, metadata: Metadata, sink: Sink, timeout_s: float | None
    ) -> Call:
        try:
            headers = to_headers(metadata)
        except ValueError as error:
            sink.end(Status(grpc.StatusCode.INTERNAL, str(error)))
            return EndedCall()
        call = Rpc(
            path.encode(),
            request,
            headers,
            sink,
            timeout_s=timeout_s,
            on_end=self._ended,
            again=self._wait,
        )
        self._calls.add(call)
        if self._is_closed:
            call.end(_CLOSING)
        else:
            self._wait(call)
        return call

    def _ended(self, call: Rpc) -> None:
        self._calls.discard(call)
        self._waiting.pop(call, None)

    def _wait(self, call: Rpc) -> None:
        self._waiting[call] = None
        self.serve()

    def serve(self) -> None:
        """Start the calls that wait, as far as there is room, and connect where there is none."""
        while self._waiting:
            link = next((link for link in self._links if link.connection.room > 0), None)
            if link is None:
                self._want_another()
                return
            call = next(iter(self._waiting))
            if call.start(link.connection, self._authority):
                del self._waiting[call]

    def _want_another(self) -> None:
        n_links = sum(not link.connection.is_retiring for link in self._links)
        if self._is_dialing or self._is_closed or n_links >= MAX_CONNECTIONS:
            return
        if self._loop.time() >= self._retry_at_s:
            self._is_dialing = True
            self._tasks.start_soon(self._connect)
        elif not n_links:
            self._fail_waiting()

    async def _connect(self) -> None:
        link = _Link(self, self._settings)
        try:
            with anyio.fail_after(CONNECT_LIMIT_S):
                await self._dial(self._address, lambda: link.connection)
                await link.settled.wait()
            self._failure = link.lost_by or ""
        except TimeoutError:
            self._failure = f"no answer in {CONNECT_LIMIT_S:g} s"
        except (OSError, ValueError) as error:
            self._failure = str(error) or type(error).__name__
        finally:
            self._is_dialing = False
            if link not in self._links:
                link.connection.close("given up")
        if self._failure:
            delay_s = min(FIRST_BACKOFF_S * 2**self._n_failed, MAX_BACKOFF_S)
            self._n_failed = min(self._n_failed + 1, 16)
            self._retry_at_s = self._loop.time() + delay_s
            if not self._links:
                self._fail_waiting()
        self.serve()

    def _fail_waiting(self) -> None:
        status = Status(
            grpc.StatusCode.UNAVAILABLE, f"cannot connect to {self._address}: {self._failure}"
        )
        for call in list(self._waiting):
            call.end(status)

    # --- what the connections tell

    def opened(self, link: "_Link") -> None:
        """A connection is ready."""
        self._n_failed = 0
        self._links.append(link)
        self.serve()

    def asked_for_calm(self) -> None:
        """The worker was pinged too often."""
        after_s = min(self._settings.ping_after_s * 2, MAX_PING_AFTER_S)
        self._settings = replace(self._settings, ping_after_s=after_s)

    def dropped(self, link: "_Link") -> None:
        """A connection is over."""
        if link in self._links:
            self._links.remove(link)


class _Link:
    """One connection to the worker: its `Owner`."""

    def __init__(self, channel: StreamChannel, settings: Settings) -> None:
        self._channel = channel
        self.connection = H2Connection(self, settings)
        self.settled = anyio.Event()  # ready or lost
        self.lost_by: str | None = None

    def ready(self) -> None:
        """As `Owner.ready`."""
        self.settled.set()
        self._channel.opened(self)

    def freed(self) -> None:
        """As `Owner.freed`."""
        self._channel.serve()

    def retiring(self, code: int, /) -> None:
        """As `Owner.retiring`."""
        if code == ENHANCE_YOUR_CALM:
            self._channel.asked_for_calm()

    def lost(self, reason: str, /) -> None:
        """As `Owner.lost`."""
        self.lost_by = reason
        self.settled.set()
        self._channel.dropped(self)
