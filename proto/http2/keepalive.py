"""Finds out whether a silent peer is still there."""

import asyncio
from collections.abc import Callable

QUICK_PINGS = 3
"""In a row, while the peer says nothing else. At the fourth a gRPC server ends the connection, unless it
comes `RARE_S` later or the server was told otherwise (gRPC's proposal A8)."""

RARE_S = 300.0


class Keepalive:
    """Pings after `after_s` of silence; a peer that then says nothing for `limit_s` is dead.

    One that answers, and says nothing else for long, is pinged rarely in the end. The keepalive
    runs from `watch` on, until `stop`, or until its timer fires while `wanted` is false.
    """

    def __init__(
        self,
        after_s: float,
        limit_s: float,
        *,
        wanted: Callable[[], bool],
        ping: Callable[[], None],
        dead: Callable[[], None],
    ) -> None:
        self._after_s = after_s
        self._limit_s = limit_s
        self._wanted = wanted
        self._ping = ping
        self._dead = dead
        self._loop = asyncio.get_running_loop()
        self.now_s = self._loop.time
        # The connection writes these two with each read, which a call would cost too much for.
        self.heard_s = self.now_s()  # when something came last from the peer
        self.n_heard = 0  # reads since the timer fired last
        self._pinged_s: float | None = None  # and nothing was heard until the timer fired last
        self._n_pings = 0  # in a row
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Begin, unless it runs: silence counts from here."""
        if self._timer is None:
            self.heard_s = self.now_s()
            self.n_heard = 0
            self._pinged_s = None
            self._n_pings = 0
            self._timer = self._loop.call_at(self.heard_s + self._after_s, self._tick)

    def stop(self) -> None:
        """End. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        if not self._wanted():
            return
        now_s = self.now_s()
        if self.n_heard:
            # What came first behind a ping is its answer, which does not end a row of pings.
            if self._pinged_s is None or self.n_heard > 1:
                self._n_pings = 0
            self._pinged_s, self.n_heard = None, 0
        if self._pinged_s is not None:
            if now_s >= self._pinged_s + self._limit_s:
                self._dead()
                return
        elif now_s >= self.heard_s + self._patience_s:
            self._pinged_s = now_s
            self._n_pings += 1
            self._ping()
        due_s = (
            self.heard_s + self._patience_s
            if self._pinged_s is None
            else self._pinged_s + self._limit_s
        )
        self._timer = self._loop.call_at(due_s, self._tick)

    @property
    def _patience_s(self) -> float:
        return self._after_s if self._n_pings < QUICK_PINGS else max(self._after_s, RARE_S)
