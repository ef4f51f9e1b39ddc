"""Limits of what clients may keep waiting: requests that arrive in part, and answers that they do not read.

`TimeoutQueue` has one limit for all of its items, `SlowReaderTimeouts` gives up answers that nobody takes,
`IncomingRequestLimit` bounds the bytes and the time of requests that are not whole.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import anyio

from slagate.proto.rpc.sinks import was_taken
from slagate.router.request.errors import DeadlineExceeded, GatewayError, Overloaded

T = TypeVar("T")


class TimeoutQueue(Generic[T]):
    """Calls `late` with what was added and not discarded within `limit_s`. One timer for all of it."""

    def __init__(self, limit_s: float, late: Callable[[T], None]) -> None:
        self._limit_s = limit_s
        self._late = late
        self._loop = asyncio.get_running_loop()
        self._due_s: dict[T, float] = {}  # in order, as the limit is the same for all
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, item: T) -> None:
        """Its time begins now."""
        self._due_s[item] = due_s = self._loop.time() + self._limit_s
        if self._timer is None:
            self._timer = self._loop.call_at(due_s, self._look)

    def discard(self, item: T) -> bool:
        """It is done; false: it was not there."""
        return self._due_s.pop(item, None) is not None

    def close(self) -> None:
        """Forget all of it."""
        self._due_s.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        late = []
        for item, due_s in self._due_s.items():
            if due_s > now_s:
                self._timer = self._loop.call_at(due_s, self._look)
                break
            late.append(item)
        for item in late:
            if self.discard(item):
                self._late(item)


LOOK_S = 0.5
"""Between two looks at what may be untaken."""

FLUSH_S = 2.0
"""For a client to take the last of its answer, when the request itself took all its time; and again, for
one that took some of it meanwhile."""

MOST_S = 30.0
"""Of that, behind its own time."""


class PendingResponse(Protocol):
    """What a client is to take."""

    __slots__ = ()

    def unsent(self) -> tuple[int, ...]:
        """How much is untaken, by each count that falls when some of it is taken."""

    def give_up(self) -> None:
        """Its client has not taken it in time."""


class SlowReaderTimeouts:
    """Gives up what was not discarded by its own time, give or take `LOOK_S`.

    What became less within its time, and then within the last `FLUSH_S`, has until `MOST_S` later.

    Nearly all of it is discarded at once, so that it is not worth a timer for each, nor an order.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due_s: dict[PendingResponse, float] = {}
        # What was left of each when it was last asked, and its last moment.
        self._slow: dict[PendingResponse, tuple[tuple[int, ...], float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, item: PendingResponse, due_s: float) -> None:
        """It has until then, on the loop's clock."""
        self._due_s[item] = due_s
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def discard(self, item: PendingResponse) -> None:
        """It was taken. Harmless when it was not there."""
        self._due_s.pop(item, None)
        if self._slow:
            self._slow.pop(item, None)

    def close(self) -> None:
        """Forget all of it."""
        self._due_s.clear()
        self._slow.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        now_s = self._loop.time()
        late = [
            item for item, due_s in self._due_s.items() if not self._has_time(item, due_s, now_s)
        ]
        for item in late:
            self.discard(item)
        self._timer = self._loop.call_later(LOOK_S, self._look) if self._due_s else None
        for item in late:
            item.give_up()

    def _has_time(self, item: PendingResponse, due_s: float, now_s: float) -> bool:
        if item not in self._slow:
            self._slow[item] = (item.unsent(), due_s + MOST_S)
        if due_s > now_s:
            return True
        before, last_s = self._slow[item]
        left = item.unsent()
        if now_s >= last_s or not was_taken(before, left):
            return False
        self._slow[item] = (left, last_s)
        self._due_s[item] = now_s + FLUSH_S
        return True


EACH_BYTES = 4 << 10
"""What a request takes that has only begun, about: its headers, its stream and its handler."""


def full() -> GatewayError:
    """Why a request is refused that there is no room for."""
    return Overloaded("too much of other requests is arriving at the gateway")


class IncomingRequest(Protocol):
    """A request of which more is to come."""

    __slots__ = ()

    def refuse(self, error: GatewayError, /) -> None:
        """End it, with what it holds."""


class IncomingRequestLimit:
    """Counts what has arrived of requests that are not whole. `refuse` is called from a timer only."""

    def __init__(self, *, max_bytes: int, limit_s: float) -> None:
        """`max_bytes` is for all of them together, `limit_s` for each."""
        self._max_bytes = max_bytes
        self._held_bytes: dict[IncomingRequest, int] = {}
        self._limit_s = limit_s
        self._overdue: TimeoutQueue[IncomingRequest] = TimeoutQueue(limit_s, self._is_late)
        self._emptied: list[Callable[[], None]] = []
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._held_bytes)

    def begin(self, request: IncomingRequest) -> bool:
        """Count it from here on; false: there is no room for it."""
        if self.n_bytes + EACH_BYTES > self._max_bytes:
            return False
        self.n_bytes += EACH_BYTES
        self._held_bytes[request] = EACH_BYTES
        self._overdue.add(request)
        return True

    def holds(self, request: IncomingRequest, n_bytes: int) -> bool:
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

    def done(self, request: IncomingRequest) -> None:
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

    def _is_late(self, request: IncomingRequest) -> None:
        self.done(request)
        request.refuse(DeadlineExceeded(f"the request did not arrive in {self._limit_s:g} s"))
