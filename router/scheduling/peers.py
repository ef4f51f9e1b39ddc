"""The other processes of the gateway, as those see them who wait for a worker.

What an older request waits for no younger one takes, in whichever process they are: each shows since when
the oldest of its requests waits for a pool. Who gives something back wakes those in which somebody waits;
all that says is that they should look again.
"""

import asyncio
from collections.abc import Callable, Mapping

from slagate.pools.fleet.pool import Pool
from slagate.pools.inflight.shared_counts import GATEWAY, GatewayCell, SharedCounts

BEAT_S = 0.25
STALE_S = 1.5
"""A process in which requests wait says that it is alive, else nobody leaves anything to them."""


class PeerProcesses:
    """Tells the others what waits here, and knows what waits there."""

    def __init__(
        self,
        shared: SharedCounts,
        *,
        wake: Callable[[int], None],
        now_s: Callable[[], float],
    ) -> None:
        """`wake` has the process of that number look again."""
        self.look: Callable[[], None] = lambda: (
            None
        )  # called when something may have changed elsewhere
        self._shared = shared
        self._wake = wake
        self._now_s = now_s
        self._slot = shared.claim(GATEWAY)
        self._n_waiting = 0
        self._beat: asyncio.TimerHandle | None = None

    @property
    def running_elsewhere(self) -> int:
        """Requests that the other processes serve now."""
        return sum(n for _, n in self._shared.each_other(self._slot, GatewayCell.RUNNING))

    @property
    def waiting_elsewhere(self) -> int:
        """Requests that wait in the other processes."""
        return sum(n for _, n in self._shared.each_other(self._slot, GatewayCell.WAITING))

    def show_running(self, n_requests: int) -> None:
        """Requests that this one serves."""
        self._shared.set(self._slot, GatewayCell.RUNNING, n_requests)

    def show_waiting(
        self, n_waiting: int, pools: Mapping[str, Pool], oldest_s: Mapping[str, float]
    ) -> None:
        """How many wait here, and since when the oldest does for each pool."""
        if not n_waiting and not self._n_waiting:
            return
        self._n_waiting = n_waiting
        self._shared.set(self._slot, GatewayCell.WAITING, n_waiting)
        if self._beat is None:
            self._say_alive()
        # All of them are to be told, so no `any` of a generator.
        lines = [(name, pool.line) for name, pool in pools.items() if pool.line is not None]
        news = [line.set_oldest_s(oldest_s.get(name, 0.0)) for name, line in lines]
        if any(news):
            self.wake()
            # What others gave back before they could know that somebody waits here.
            asyncio.get_running_loop().call_soon(self.look)

    def older(self, since_s: float, pools: Mapping[str, Pool]) -> set[str]:
        """Pools that a request waits for elsewhere which came before `since_s`."""
        alive = self._alive()
        return {
            name
            for name, pool in pools.items()
            if alive
            and pool.line is not None
            and any(
                number in alive and 0.0 < oldest_s < since_s
                for number, oldest_s in pool.line.oldest_elsewhere()
            )
        }

    def wake(self) -> None:
        """Have those look again in which somebody waits."""
        for number, n_waiting in self._shared.each_other(self._slot, GatewayCell.WAITING):
            if n_waiting:
                self._wake(number)

    def close(self) -> None:
        """Nothing waits here any more."""
        if self._beat is not None:
            self._beat.cancel()

    def _alive(self) -> set[int]:
        """Processes in which somebody waits, and that run."""
        if not self.waiting_elsewhere:
            return set()
        limit_s = self._now_s() - STALE_S
        seen = self._shared.each_other_s(self._slot, GatewayCell.SEEN_S)
        return {number for number, seen_s in seen if seen_s > limit_s}

    def _say_alive(self) -> None:
        self._shared.set_s(self._slot, GatewayCell.SEEN_S, self._now_s())
        self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._again)

    def _again(self) -> None:
        self._beat = None
        if self._n_waiting:
            self._say_alive()
            self.look()
