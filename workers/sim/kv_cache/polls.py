"""Polling the simulated engine: what its iteration statistics and its KV cache events have in common."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any


class Arrivals:
    """Those who wait for the next thing that a queue gets."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def announce(self) -> None:
        """Something is there."""
        for waiter in self._waiters:
            _complete(waiter)

    async def wait(self, timeout_s: float) -> None:
        """Return at the next announcement, or after `timeout_s` seconds."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        timer = loop.call_later(timeout_s, _complete, waiter)
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)


class PollResult:
    """Async iterator of what is there and what arrives; it ends when nothing does within the timeout."""

    def __init__(
        self, take: Callable[[], Any | None], arrivals: Arrivals, *, timeout_s: float
    ) -> None:
        """`take` gives the next item, or None; `arrivals` are those of what it takes from."""
        self._take = take
        self._arrivals = arrivals
        self._timeout_s = timeout_s

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        item = self._take()
        if item is None and self._timeout_s > 0:
            await self._arrivals.wait(self._timeout_s)
            item = self._take()
        if item is None:
            raise StopAsyncIteration
        return item


def _complete(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
