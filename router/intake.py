"""Requests that are arriving: how much of them there may be in all, and for how long."""

from collections.abc import Callable
from typing import Protocol

import anyio

from slagate.router.errors import DeadlineExceeded, Overloaded, RequestError
from slagate.router.overdue import Overdue

EACH_BYTES = 4 << 10
"""What a request takes that has only begun, about: its headers, its stream and its handler."""


def full() -> RequestError:
    """Why a request is refused that there is no room for."""
    return Overloaded("too much of other requests is arriving at the gateway")


class Arriving(Protocol):
    """A request of which more is to come."""

    def refuse(self, error: RequestError, /) -> None:
        """End it, with what it holds."""


class Intake:
    """Counts what has arrived of requests that are not whole. `refuse` is called from a timer only."""

    def __init__(self, *, max_bytes: int, limit_s: float) -> None:
        """`max_bytes` is for all of them together, `limit_s` for each."""
        self._max_bytes = max_bytes
        self._held_bytes: dict[Arriving, int] = {}
        self._limit_s = limit_s
        self._overdue: Overdue[Arriving] = Overdue(limit_s, self._is_late)
        self._emptied: list[Callable[[], None]] = []
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._held_bytes)

    def begin(self, request: Arriving) -> bool:
        """Count it from here on; false: there is no room for it."""
        if self.n_bytes + EACH_BYTES > self._max_bytes:
            return False
        self.n_bytes += EACH_BYTES
        self._held_bytes[request] = EACH_BYTES
        self._overdue.add(request)
        return True

    def holds(self, request: Arriving, n_bytes: int) -> bool:
        """So much of its body waits for the rest of it; false: that is more than there is room for."""
        before_bytes = self._held_bytes.get(request)
        if before_bytes is None:
            return True
        more_bytes = n_bytes + EACH_BYTES - before_bytes
        if more_bytes > 0 and self.n_bytes + more_bytes > self._max_bytes:
            return False
        self.n_bytes += more_bytes
        self._held_bytes[request] = n_bytes + EACH_BYTES
        return True

    def done(self, request: Arriving) -> None:
        """It is whole, or over. Idempotent."""
        held_bytes = self._held_bytes.pop(request, None)
        if held_bytes is None:
            return
        self.n_bytes -= held_bytes
        self._overdue.discard(request)
        if not self._held_bytes and self._emptied:
            emptied, self._emptied = self._emptied, []
            for tell in emptied:
                tell()

    async def emptied(self) -> None:
        """Wait until none is left."""
        while self._held_bytes:
            event = anyio.Event()
            self._emptied.append(event.set)
            await event.wait()

    def close(self) -> None:
        """No timer is left behind."""
        self._overdue.close()

    def _is_late(self, request: Arriving) -> None:
        self.done(request)
        request.refuse(DeadlineExceeded(f"the request did not arrive in {self._limit_s:g} s"))
