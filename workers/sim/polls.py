"""How an engine hands over what it is polled for: its KV events and its iteration statistics.

TensorRT-LLM has had two ways. Up to 1.1 both travel through a queue that the engine's process fills
(executor/executor.py @ed53795b `aget_stats`, `aget_kv_events`). Since 1.2 each poll is a call to that
process, and the caller waits for the answer (pull request #9980; executor/proxy.py id 3493716097
`aget_stats`, `get_stats`; executor/rpc/rpc_client.py @fbbc05dd `_call_sync`).
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from slagate.workers.sim.kv_cache.events import Arrivals

log = logging.getLogger(__name__)

REFETCH_S = 0.1
"""Between two looks of the engine's process while it has nothing (executor/rpc_worker_mixin.py @0ae93999
`fetch_stats_wait_async`): a poll with any time limit above 0 takes at least as long if there is nothing."""


class MixedSyncAsyncAPIError(Exception):
    """A queue that was read synchronously once cannot be read asynchronously any more."""


class IterationResult:
    """What an asynchronous poll gives: an iterator over a queue, always the same one of an engine.

    It ends when nothing comes within the time limit of the newest poll, and then stays at its end until
    `mark_undone`. With a limit of 0 it does not end: an empty queue is an error. (executor/result.py
    @a678b91a `IterationResult.__anext__`, llmapi/utils.py id 2506903241 `AsyncQueue.get`)
    """

    def __init__(self, take: Callable[[], Any | None], arrivals: Arrivals) -> None:
        """`take` gives the next item of the queue, or None; `arrivals` are the queue's."""
        self._take = take
        self._arrivals = arrivals
        self._timeout_s: float | None = None
        self._is_done = self._is_tainted = False

    def set_timeout(self, timeout_s: float | None) -> None:
        """Set how long each item is waited for; None is no limit."""
        self._timeout_s = timeout_s

    def mark_undone(self) -> None:
        """Let it go on after its end."""
        self._is_done = False

    def mark_done(self) -> None:
        """Put it at its end."""
        self._is_done = True

    def get_results(self) -> list[Any]:
        """All items that are there; nobody can iterate over this object afterwards."""
        self._is_tainted = True
        return list(iter(self._take, None))

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        """The next item. Raises `asyncio.QueueEmpty` for none with a limit of 0."""
        if self._is_done:
            raise StopAsyncIteration
        if self._is_tainted:
            raise MixedSyncAsyncAPIError
        item = self._take()
        if item is None:
            if self._timeout_s is not None and self._timeout_s <= 0:
                raise asyncio.QueueEmpty
            await self._arrivals.wait(self._timeout_s)
            item = self._take()
        if item is None:
            self.mark_done()
            raise StopAsyncIteration
        return item


class PolledSource:
    """One thing that an engine is polled for, handed over as its version does."""

    def __init__(
        self,
        take: Callable[[], Any | None],
        arrivals: Arrivals,
        *,
        by_call: bool,
        pause: Callable[[float], object] | None,
    ) -> None:
        """`take` and `arrivals` are of the engine's own queue; `take` may be called from any thread.

        With `by_call` a poll is a call that blocks its caller, in `pause`, for as long as it lasts.
        """
        self._take = take
        self._by_call = by_call
        self._pause = threading.Event().wait if pause is None else pause
        self._fetched: deque[Any] = deque()
        self._result = (
            IterationResult(self._take_fetched, Arrivals())
            if by_call
            else IterationResult(take, arrivals)
        )
        self.is_set_up = by_call

    def request_came(self) -> None:
        """Note that a request was submitted: a queue exists from the first one on, and is read on."""
        self.is_set_up = True
        self._result.mark_undone()

    def poll_async(self, timeout_s: float | None) -> IterationResult:
        """The iterator over what is there, empty before there is a queue; a call is made here."""
        if not self.is_set_up:
            return _empty_result()
        if self._by_call:
            self._result.mark_undone()
            self._fetched.extend(self._fetch(timeout_s))
        self._result.set_timeout(timeout_s)
        return self._result

    def poll(self, timeout_s: float | None) -> list[Any]:
        """All that is there."""
        if self._by_call:
            return self._fetch(timeout_s)
        return self._result.get_results() if self.is_set_up else []

    def _take_fetched(self) -> Any | None:
        return self._fetched.popleft() if self._fetched else None

    def _fetch(self, timeout_s: float | None) -> list[Any]:
        waited_s = 0.0
        while True:
            items = self._take_all()
            if items or timeout_s is None or waited_s >= timeout_s:
                return items
            self._pause(REFETCH_S)
            waited_s += REFETCH_S

    def _take_all(self) -> list[Any]:
        """All that is there; nothing of it where one item fails, as the call swallows that.

        (executor/proxy.py id 3493716097 `get_kv_events`, `aget_kv_events`; the worker's process takes all
        events of its engine before it makes dicts of them.)
        """
        items: list[Any] = []
        failed = False
        while True:
            try:
                item = self._take()
            except AttributeError:
                log.exception("kv_events.fetch_failed")
                failed = True
                continue
            if item is None:
                return [] if failed else items
            items.append(item)


def _empty_result() -> IterationResult:
    result = IterationResult(lambda: None, Arrivals())
    result.mark_done()
    return result
