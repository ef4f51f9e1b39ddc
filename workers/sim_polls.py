"""What a worker polls the simulated engine for, besides iteration statistics: KV cache events."""

from collections.abc import AsyncIterator
from typing import Any

from slagate.workers.sim_kv_events import KvEventQueue

# An executor hands events over in batches of this many at most, where it hands over batches.
_BATCH_EVENTS = 256


class KvEventResult:
    """Async iterator of KV cache events; it ends when none arrives within the timeout.

    With `nested`, as older executors do it, each item is a list of events.
    """

    def __init__(self, queue: KvEventQueue, *, timeout_s: float, nested: bool) -> None:
        self._queue = queue
        self._timeout_s = timeout_s
        self._n_events = _BATCH_EVENTS if nested else 1
        self._nested = nested

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        await self._queue.wait(self._timeout_s)
        events = self._queue.take(self._n_events)
        if not events:
            raise StopAsyncIteration
        return events if self._nested else events[0]


def all_events(queue: KvEventQueue, *, nested: bool) -> list[Any]:
    """Everything there is, without waiting."""
    events = queue.take()
    if not nested:
        return events
    return [events[i : i + _BATCH_EVENTS] for i in range(0, len(events), _BATCH_EVENTS)]
