"""Limits on what clients may keep waiting: requests that arrive in part, and answers that they do not read.

`TimeoutQueue` has one limit for all of its items, `SlowReaderTimeouts` gives up answers that nobody takes,
`IncomingRequestLimit` bounds the bytes and the time of requests that are not whole.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import anyio

from slagate.proto.rpc.sinks import made_progress
from slagate.router.request.errors import DeadlineExceeded, GatewayError, Overloaded

T = TypeVar("T")


class TimeoutQueue(Generic[T]):
    """One timer for many items with the same limit: `late` gets each that is not discarded in time."""

    def __init__(self, limit_s: float, late: Callable[[T], None]) -> None:
        self._limit_s = limit_s
        self._late = late
        self._loop = asyncio.get_running_loop()
        self._due_s: dict[T, float] = {}  # in order, as the limit is the same for all
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due_s)

    def start_timeout(self, item: T) -> None:
        """Start the item's timeout now."""
        self._due_s[item] = due_s = self._loop.time() + self._limit_s
        if self._timer is None:
            self._timer = self._loop.call_at(due_s, self._check)

    def discard(self, item: T) -> bool:
        """Stop the item's timeout. False: it had none."""
        return self._due_s.pop(item, None) is not None

    def clear(self) -> None:
        """Forget every item, and stop the timer."""
        self._due_s.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        late = []
        for item, due_s in self._due_s.items():
            if due_s > now_s:
                self._timer = self._loop.call_at(due_s, self._check)
                break
            late.append(item)
        for item in late:
            if self.discard(item):
                self._late(item)


CHECK_S = 0.5
"""Seconds between two checks of responses that nobody may be reading."""

FLUSH_S = 2.0
"""Seconds that a client has for the rest of its answer where the request itself took all its time; again
so many for one that read some of it meanwhile."""

MOST_S = 30.0
"""How long after its deadline a client that still makes progress is waited for."""


class PendingResponse(Protocol):
    """A response that a client has still to read."""

    __slots__ = ()

    def unsent(self) -> tuple[int, ...]:
        """Counts of bytes that the client has not read; when it reads some, at least one count falls."""

    def give_up(self) -> None:
        """Reset the response's stream, as the client has not read it in time."""


class SlowReaderTimeouts:
    """Gives up responses whose clients stopped reading, within `CHECK_S` of the response's deadline.

    A client that still makes progress gets up to `MOST_S` beyond the deadline, checked every `FLUSH_S`.
    There is no timer for each response, as nearly all are discarded at once.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due_s: dict[PendingResponse, float] = {}
        # What was left of each when it was last asked, and its last moment.
        self._slow: dict[PendingResponse, tuple[tuple[int, ...], float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due_s)

    def start_timeout(self, item: PendingResponse, due_s: float) -> None:
        """Set the response's deadline `due_s`, on the loop's clock."""
        self._due_s[item] = due_s
        if self._timer is None:
            self._timer = self._loop.call_later(CHECK_S, self._check)

    def discard(self, item: PendingResponse) -> None:
        """Forget a response that was read. Harmless when it has no timeout."""
        self._due_s.pop(item, None)
        if self._slow:
            self._slow.pop(item, None)

    def clear(self) -> None:
        """Forget every response, and stop the timer."""
        self._due_s.clear()
        self._slow.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        now_s = self._loop.time()
        late = [
            item for item, due_s in self._due_s.items() if not self._has_time(item, due_s, now_s)
        ]
        for item in late:
            self.discard(item)
        self._timer = self._loop.call_later(CHECK_S, self._check) if self._due_s else None
        for item in late:
            item.give_up()

    def _has_time(self, item: PendingResponse, due_s: float, now_s: float) -> bool:
        if item not in self._slow:
            self._slow[item] = (item.unsent(), due_s + MOST_S)
        if due_s > now_s:
            return True
        before, last_s = self._slow[item]
        left = item.unsent()
        if now_s >= last_s or not made_progress(before, left):
            return False
        self._slow[item] = (left, last_s)
        self._due_s[item] = now_s + FLUSH_S
        return True


EACH_BYTES = 4 << 10
"""Estimated memory of a request without a body: its headers, its stream and its handler."""


def full() -> GatewayError:
    """The error for a request that `IncomingRequestLimit` has no room for."""
    return Overloaded("too much of other requests is arriving at the gateway")


class IncomingRequest(Protocol):
    """A request that has not arrived whole."""

    __slots__ = ()

    def refuse(self, error: GatewayError, /) -> None:
        """End the request with `error`, and free the memory it holds."""


class IncomingRequestLimit:
    """Limits the memory and the time of requests that have not arrived whole; late ones are refused."""

    def __init__(self, *, max_bytes: int, limit_s: float) -> None:
        """`max_bytes` bounds all such requests together, `limit_s` each."""
        self._max_bytes = max_bytes
        self._held_bytes: dict[IncomingRequest, int] = {}
        self._limit_s = limit_s
        self._overdue: TimeoutQueue[IncomingRequest] = TimeoutQueue(limit_s, self._is_late)
        self._emptied: list[Callable[[], None]] = []
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._held_bytes)

    def admit(self, request: IncomingRequest) -> bool:
        """Count a request, and start its time limit, until `done`. False: there is no room for it."""
        if self.n_bytes + EACH_BYTES > self._max_bytes:
            return False
        self.n_bytes += EACH_BYTES
        self._held_bytes[request] = EACH_BYTES
        self._overdue.start_timeout(request)
        return True

    def holds(self, request: IncomingRequest, n_bytes: int) -> bool:
        """Set how many bytes of the body have arrived. False: there is no room for so many."""
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
        """Stop counting a request that is whole, or over. Idempotent."""
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
        """Wait until no request is arriving."""
        while self._held_bytes:
            event = anyio.Event()
            self._emptied.append(event.set)
            await event.wait()

    def stop_timeouts(self) -> None:
        """Stop the timer; late requests are not refused any more."""
        self._overdue.clear()

    def _is_late(self, request: IncomingRequest) -> None:
        self.done(request)
        request.refuse(DeadlineExceeded(f"the request did not arrive in {self._limit_s:g} s"))
