"""The time of one connection's keepalive, which a test moves on: silence that nobody has to wait for."""

import asyncio
from collections.abc import Callable

import anyio.lowlevel

from slagate.proto.http2.connection import H2Connection


class KeepaliveClock:
    """Stands in for the loop of a connection's keepalive; all else of the connection is in real time."""

    def __init__(self, connection: H2Connection) -> None:
        """From here on the keepalive has this time, and counts silence anew."""
        self.n_pings = 0
        self.due_s = 0.0
        self._now_s = 0.0
        self._keepalive = connection._keepalive
        self._keepalive.stop()
        self._keepalive._loop = self  # type: ignore[assignment]
        self._keepalive.now_s = self.time
        self._keepalive.watch()

    def time(self) -> float:
        """As a loop's."""
        return self._now_s

    def call_at(self, when_s: float, due: Callable[[], None]) -> asyncio.Handle:
        """As a loop's; only what was given last is due."""
        self.due_s, self._due = when_s, due
        return asyncio.Handle(due, (), asyncio.get_running_loop())

    def move_on(self) -> bool:
        """To when something is due; whether that was a ping."""
        self._now_s = self.due_s
        n_before = self._keepalive._n_pings
        self._due()
        is_ping = self._keepalive._n_pings > n_before
        self.n_pings += is_ping
        return is_ping

    async def answered(self) -> None:
        """Until the peer has said something since the last ping."""
        while not self._keepalive.n_heard:
            await anyio.lowlevel.checkpoint()
