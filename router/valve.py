"""Holds a worker's stream while too much of what it has said waits for the client."""

import asyncio
from collections.abc import Callable

from slagate.workers.stream import Outlet
from slagate.workers.worker import Call


class Valve:
    """Shut when no more may wait, and open again when nothing does.

    A client that takes nothing for `limit_s` meanwhile is stuck.
    """

    def __init__(self, client: Outlet, *, limit_s: float) -> None:
        self._client = client
        self._limit_s = limit_s
        self._waiting_bytes = 0  # when it was last looked at
        self._timer: asyncio.TimerHandle | None = None  # while it is shut
        self.call: Call | None = None

    def shut(self, stuck: Callable[[], None]) -> bool:
        """Let nothing more come; false: it does all the same. `stuck` is called, once, where it is.

        It is known for that long only: with its owner it would be a cycle, which every stream would leave.
        """
        if self.call is None or self._timer is not None:
            return False
        self.call.pause()
        self._client.on_room(self._open)
        # With what is passed on right now.
        self._waiting_bytes = 1 << 62
        self._timer = self._looked_at_later(stuck)
        return True

    def close(self) -> None:
        """The stream is over. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.call = None

    def _open(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if self.call is not None:
                self.call.resume()

    def _looked_at_later(self, stuck: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._limit_s, self._look, stuck)

    def _look(self, stuck: Callable[[], None]) -> None:
        n_bytes = self._client.n_bytes
        if n_bytes < self._waiting_bytes:
            self._waiting_bytes = n_bytes
            self._timer = self._looked_at_later(stuck)
        else:
            self.close()
            stuck()
