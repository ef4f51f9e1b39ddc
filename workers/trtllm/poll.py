"""Polls an engine for KV events and iteration statistics while it works.

TensorRT-LLM has no call that waits for events, and old versions may not be asked for them before their
first request. An idle engine has nothing new to tell, so polling stops while it is idle.
"""

import asyncio
import contextlib
import inspect
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import anyio
import msgspec

from slagate.workers.kv_events.fields import TURN_WORK
from slagate.workers.runtime.cooperative import finish_cooperatively
from slagate.workers.runtime.waiting import DaemonThread

log = logging.getLogger(__name__)

ROW_WORK = TURN_WORK
"""Each row is passed on in a turn of its own. The poll of a busy engine does not end, as its iterations are
shorter than the poll's wait for one, and an answer about the load needs the newest row."""

LINGER_S = 1.0
"""How long polling goes on after the last request: an engine reports a moment after it has answered."""

ERROR_DELAY_S = 1.0
"""From a poll that raised to the next one."""

UNANSWERED_S = 10.0
"""How long a poll may take before the log says so, and counts it as an error."""


class Activity:
    """Whether the engine works, and since when it is idle."""

    def __init__(self) -> None:
        self.has_answered = False
        self._n_live = 0
        self._idle_since_s = 0.0
        self._changed = anyio.Event()

    def request_started(self) -> None:
        """Count a request that was submitted."""
        self._n_live += 1
        self._wake()

    def result_came(self) -> None:
        """Note that a result has come: the engine may be polled from now on."""
        if not self.has_answered:
            self.has_answered = True
            self._wake()

    def request_ended(self) -> None:
        """Count a request that has ended."""
        self._n_live -= 1
        self._idle_since_s = asyncio.get_running_loop().time()

    async def rest_between_polls(self, delay_s: float, *, may_stop: bool) -> None:
        """Wait `delay_s`, then until there was a result, and with `may_stop` until the engine works."""
        if not self._rests(may_stop=may_stop):
            await anyio.sleep(delay_s)
        while self._rests(may_stop=may_stop):
            await self._changed.wait()

    def _rests(self, *, may_stop: bool) -> bool:
        return not self.has_answered or (may_stop and self._is_idle())

    def _is_idle(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        return self._n_live == 0 and now_s >= self._idle_since_s + LINGER_S

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between polls: `first_s` after one that brought something, then growing to `most_s`."""

    first_s: float
    factor: float
    most_s: float


EVENT_PACE = Pace(0.005, 1.5, 0.020)
STATS_PACE = Pace(0.010, 2.0, 0.100)


def is_polled_by_call(llm: Any) -> bool:
    """Whether a poll is a call to the engine's process, which blocks until that answers.

    Older engines have a queue in this process instead. TensorRT-LLM's executor/proxy.py has the one or the
    other, which its `rpc_client` tells.
    """
    return hasattr(getattr(llm, "_executor", None), "rpc_client")


class EnginePoll(NamedTuple):
    """How an engine is polled for one thing: `read` gives what is there, and may block its thread."""

    read: Callable[[], Any]
    may_block: bool


def poll_of(llm: Any, name: str) -> EnginePoll | None:
    """How the engine is polled by its method `name`; None where it has no such method.

    A queue is read by the method's asynchronous form, as the other one would make it unreadable for good.
    Nothing is waited for: an iterator over it that has waited in vain stays at its end until the next
    request.
    """
    by_call = is_polled_by_call(llm)
    read = getattr(llm, name if by_call else f"{name}_async", None)
    return None if read is None else EnginePoll(partial(read, timeout=0), may_block=by_call)


class Poller:
    """Polls one source of an engine while it works; `n_errors` counts polls that raised or took long."""

    def __init__(
        self,
        name: str,
        poll: EnginePoll,
        take: Callable[[list[Any]], Iterable[None] | None],
        *,
        pace: Pace,
        activity: Activity,
        work: Callable[[Any], int] = lambda _: ROW_WORK,
        on_read: Callable[[int], None] = lambda _: None,
        on_error: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """What `poll` reads is an iterator or nested lists of items, which `take` gets in order.

        A poll that may block is made on a thread, so that nobody waits for an engine that does not answer.

        `take` gets as many items at once as their `work` fits `TURN_WORK`, or one that does not; what it
        returns is iterated over, one step in each turn of the loop. `on_read` gets the number of items of a
        poll that had any, `on_error` the error of one that raised. None of them may raise.
        """
        self._name = name
        self._poll = poll
        self._take = take
        self._pace = pace
        self._activity = activity
        self._work = work
        self._on_read = on_read
        self._on_error = on_error
        self.n_errors = 0

    async def run(self) -> None:
        """Poll until cancelled; an error of the engine does not end it."""
        if not self._poll.may_block:
            await self._poll_on(None)
            return
        thread = DaemonThread(f"slagate {self._name}")
        try:
            await self._poll_on(thread)
        finally:
            thread.shutdown()

    async def _poll_on(self, thread: DaemonThread | None) -> None:
        delay_s = self._pace.first_s
        may_stop = False
        await self._activity.rest_between_polls(0, may_stop=True)
        while True:
            try:
                is_news = await self._once(thread)
            except Exception as error:
                self.n_errors += 1
                self._on_error(error)
                # At the first, second, fourth ... error, not at each poll.
                if self.n_errors & (self.n_errors - 1) == 0:
                    log.exception("poll.failed %s (%d times)", self._name, self.n_errors)
                delay_s, may_stop = ERROR_DELAY_S, True
            else:
                grown_s = min(delay_s * self._pace.factor, self._pace.most_s)
                delay_s = self._pace.first_s if is_news else grown_s
                may_stop = not is_news
            await self._activity.rest_between_polls(delay_s, may_stop=may_stop)

    async def _answer(self, thread: DaemonThread) -> Any:
        """What a poll on the thread reads; the log says when it takes long, at ever greater distances."""
        loop = asyncio.get_running_loop()

        def warn(seconds: float) -> None:
            self.n_errors += 1
            log.warning("poll.unanswered", extra={"polled": self._name, "seconds": seconds})
            timers.append(loop.call_later(seconds, warn, 2 * seconds))

        timers = [loop.call_later(UNANSWERED_S, warn, UNANSWERED_S)]
        try:
            return await loop.run_in_executor(thread, self._poll.read)
        finally:
            timers[-1].cancel()

    async def _once(self, thread: DaemonThread | None) -> bool:
        """Poll once, and pass on what it brought. Whether there was any."""
        polled = self._poll.read() if thread is None else await self._answer(thread)
        if polled == []:  # as nearly always
            return False
        if inspect.isawaitable(polled) and not hasattr(polled, "__aiter__"):
            polled = await polled
        unread: deque[Any] = deque()
        part: list[Any] = []
        work = n_read = 0
        try:
            async with aclosing(_items(polled)) as items:
                async for item in items:
                    n_unread = len(unread)
                    unread.extend(_flat(item))
                    n_read += len(unread) - n_unread
                    while unread:
                        work += self._work(unread[0])
                        if part and work > TURN_WORK:
                            full, part, work = part, [], 0
                            await finish_cooperatively(self._steps(full))
                        else:
                            part.append(unread.popleft())
            full, part = part, []
            await finish_cooperatively(self._steps(full))
        finally:
            # Also when cancelled: the engine will not hand these over again.
            for _ in self._steps([*part, *unread]):
                pass
            if n_read:
                self._on_read(n_read)
        return n_read > 0

    def _steps(self, part: list[Any]) -> Iterator[None]:
        """Pass on items, if there are any; yields after each turn's work."""
        if part:
            yield from self._take(part) or (None,)


async def _items(polled: Any) -> AsyncGenerator[Any, None]:
    if not hasattr(polled, "__aiter__"):
        yield polled
        return
    # An iterator of TensorRT-LLM that may not wait ends with an error.
    with contextlib.suppress(asyncio.QueueEmpty, asyncio.TimeoutError):
        async for item in polled:
            yield item


def _flat(polled: Any) -> Iterator[Any]:
    if isinstance(polled, list | tuple):
        for entry in polled:
            yield from _flat(entry)
    elif polled is not None:
        yield polled


class NewestRows:
    """The newest iteration statistics of each attention-DP rank. Rows that cannot be used are counted."""

    def __init__(self, n_ranks: int, pace: Pace = STATS_PACE) -> None:
        self._n_ranks = n_ranks
        self._pace = pace
        self._n_unusable = 0
        self._poller: Poller | None = None
        self.of_rank: dict[int, dict[str, Any]] = {}

    def take_rows(self, rows: list[Any]) -> list[dict[str, Any]]:
        """Keep the newest row of each rank, and return all that are rows, which may come as JSON text."""
        read = [row for row in map(_row, rows) if row is not None]
        self._n_unusable += len(rows) - len(read)
        for row in read:
            rank = row.get("attentionDpRank")
            # With TLLM_METRICS_ALL_RANKS it had another name for a while; before, only the first had rows.
            rank = row.get("rank", 0) if rank is None else rank
            if type(rank) is int and rank in range(self._n_ranks):
                self.of_rank[rank] = row
            else:
                self._n_unusable += 1
        return read

    async def poll(
        self,
        llm: Any,
        activity: Activity,
        on_rows: Callable[[list[Any]], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Keep the rows new until cancelled; returns at once for an engine without statistics.

        `on_error` gets the error of a poll that raised.
        """
        poll = poll_of(llm, "get_stats")
        if poll is None:
            return

        def take(rows: list[Any]) -> None:
            if read := self.take_rows(rows):
                on_rows(read)

        self._poller = Poller(
            "stats", poll, take, pace=self._pace, activity=activity, on_error=on_error
        )
        await self._poller.run()

    def counters(self) -> dict[str, int]:
        """Counts of rows that could not be used, and of polls that failed, by name."""
        n_errors = 0 if self._poller is None else self._poller.n_errors
        return {"stats_unusable_rows": self._n_unusable, "stats_poll_errors": n_errors}


def _row(item: object) -> dict[str, Any] | None:
    """A row of statistics, which some versions hand over as JSON text; None for anything else."""
    if isinstance(item, str | bytes):
        try:
            item = msgspec.json.decode(item)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
    return item if isinstance(item, dict) else None
