"""What a worker polls its engine for while it works: KV events and iteration statistics.

TensorRT-LLM has no call that waits for events, and none may be asked for them before its first result. An
idle engine has nothing new to say, so polling rests with it and costs nothing.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio

log = logging.getLogger(__name__)

SLICE = 256
"""Items read in one go, so that a full buffer does not hold up the tokens."""

LINGER_S = 1.0
"""How long polling goes on behind the last request: an engine reports a moment after it has answered."""

ERROR_DELAY_S = 1.0


class Activity:
    """Whether the engine works: when it started, and how long it has been idle."""

    def __init__(self) -> None:
        self.has_answered = False
        self._n_live = 0
        self._idle_since_s = 0.0
        self._changed = anyio.Event()

    def started(self) -> None:
        """A request was submitted."""
        self._n_live += 1
        self._wake()

    def answered(self) -> None:
        """A result has come: from now on the engine may be polled."""
        if not self.has_answered:
            self.has_answered = True
            self._wake()

    def ended(self) -> None:
        """A request is over."""
        self._n_live -= 1
        self._idle_since_s = asyncio.get_running_loop().time()

    async def rest(self, delay_s: float, *, may_stop: bool) -> None:
        """Wait that long, and before the first result, or where `may_stop` and all is idle, longer."""
        if not self._is_over(may_stop=may_stop):
            await anyio.sleep(delay_s)
        while self._is_over(may_stop=may_stop):
            await self._changed.wait()

    def _is_over(self, *, may_stop: bool) -> bool:
        return not self.has_answered or (may_stop and self._is_idle())

    def _is_idle(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        return self._n_live == 0 and now_s >= self._idle_since_s + LINGER_S

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between polls: `first` behind one that brought something, then growing to `most`."""

    first_s: float
    factor: float
    most_s: float


EVENT_PACE = Pace(0.005, 1.5, 0.020)
STATS_PACE = Pace(0.010, 2.0, 0.100)


class Poller:
    """Polls one source as long as the engine works. `n_errors` counts polls that raised."""

    def __init__(
        self,
        name: str,
        poll: Callable[[], Any],
        take: Callable[[list[Any]], None],
        *,
        pace: Pace,
        activity: Activity,
    ) -> None:
        """`poll` gives what one poll answers; `take` gets what was in it."""
        self._name = name
        self._poll = poll
        self._take = take
        self._pace = pace
        self._activity = activity
        self.n_errors = 0

    async def run(self) -> None:
        """Until cancelled; no error of the engine ends it."""
        delay_s = self._pace.first_s
        may_stop = False
        await self._activity.rest(0, may_stop=True)
        while True:
            n_items = 0
            try:
                n_items = await self._once()
            except Exception:
                self.n_errors += 1
                # Once a fault, not once a poll.
                if self.n_errors & (self.n_errors - 1) == 0:
                    log.exception("poll.failed %s (%d times)", self._name, self.n_errors)
                delay_s, may_stop = ERROR_DELAY_S, True
            else:
                grown_s = min(delay_s * self._pace.factor, self._pace.most_s)
                delay_s = self._pace.first_s if n_items else grown_s
                may_stop = not n_items
            await self._activity.rest(0 if n_items >= SLICE else delay_s, may_stop=may_stop)

    async def _once(self) -> int:
        """Read at most a slice and pass it on, also where reading fails half way."""
        polled = self._poll()
        if inspect.isawaitable(polled) and not hasattr(polled, "__aiter__"):
            polled = await polled
        if not hasattr(polled, "__aiter__"):
            self._take(polled)
            return 0 if polled is None else 1
        items: list[Any] = []
        try:
            async for item in polled:
                items.append(item)
                if len(items) >= SLICE:
                    break
        finally:
            if items:
                self._take(items)
        return len(items)


class NewestRows:
    """The newest iteration statistics of each attention-DP rank."""

    def __init__(self, n_ranks: int) -> None:
        self._n_ranks = n_ranks
        self.of_rank: dict[int, dict[str, Any]] = {}

    def take(self, rows: Any) -> None:
        """Keep the newest; whatever is no row, or is of nobody knows which rank, is passed over."""
        for row in rows if isinstance(rows, list) else [rows]:
            if isinstance(row, list):
                self.take(row)
            elif isinstance(row, dict):
                # Early versions do not name the rank.
                rank = row.get("attentionDpRank", 0 if self._n_ranks == 1 else None)
                if isinstance(rank, int) and rank in range(self._n_ranks):
                    self.of_rank[rank] = row
