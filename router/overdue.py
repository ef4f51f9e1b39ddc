"""What must not take longer than a time that is the same for all of it."""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from slagate.workers.stream import was_taken

T = TypeVar("T")


class Overdue(Generic[T]):
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


class Answer(Protocol):
    """What a client is to take."""

    def left(self) -> tuple[int, ...]:
        """How much is untaken, by each count that falls when some of it is taken."""

    def give_up(self) -> None:
        """Its client has not taken it in time."""


class Untaken:
    """Gives up what was not discarded by its own time, give or take `LOOK_S`.

    What became less within its time, and then within the last `FLUSH_S`, has until `MOST_S` later.

    Nearly all of it is discarded at once, so that it is not worth a timer for each, nor an order.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due_s: dict[Answer, float] = {}
        self._slow: dict[
            Answer, tuple[tuple[int, ...], float]
        ] = {}  # what was left, and the last time
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, item: Answer, due_s: float) -> None:
        """It has until then, on the loop's clock."""
        self._due_s[item] = due_s
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def discard(self, item: Answer) -> None:
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

    def _has_time(self, item: Answer, due_s: float, now_s: float) -> bool:
        if item not in self._slow:
            self._slow[item] = (item.left(), due_s + MOST_S)
        if due_s > now_s:
            return True
        before, last_s = self._slow[item]
        left = item.left()
        if now_s >= last_s or not was_taken(before, left):
            return False
        self._slow[item] = (left, last_s)
        self._due_s[item] = now_s + FLUSH_S
        return True
