"""A worker's KV events, followed for ever: which incarnation, which ranks, and whether any come."""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable

import anyio

from slagate.pools.kv_events.rank_follower import Incarnation, RankFollower
from slagate.pools.kv_events.view import EventMode, EventView
from slagate.pools.prefix.holder import Holder
from slagate.pools.prefix.index import PrefixIndex
from slagate.proto import openengine_pb2 as oe
from slagate.workers.runtime.cooperative import CooperativeScheduler
from slagate.workers.worker import Worker

log = logging.getLogger(__name__)

SILENT_REQUESTS = 100
SILENT_S = 60.0
"""A worker that processes as many prompts in that time without an event does not publish them."""


class WorkerFollower:
    """Follows one worker's events into an index, one `Holder` a rank."""

    def __init__(
        self,
        worker: Worker,
        events: EventView,
        *,
        index_of: Callable[[int], PrefixIndex],
        on_holder: Callable[[int, Holder | None], None],
        n_served: Callable[[], int],
        scheduler: CooperativeScheduler,
        rng: random.Random,
    ) -> None:
        """`index_of` gives the index for a block size in tokens; `turns` are those of the whole gateway.

        `on_holder` is told when a rank has events to score by, and with None when it has none any more;
        `n_served` is how many prompts the worker has processed.
        """
        self._worker = worker
        self._events = events
        self._index_of = index_of
        self._on_holder = on_holder
        self._n_served = n_served
        self._scheduler = scheduler
        self._rng = rng
        self._who: Incarnation | None = None
        self._ranks: list[RankFollower] = []
        self._changed = anyio.Event()
        self._served: deque[tuple[float, int]] = deque()  # since the last event
        self._n_events = 0
        self._has_warned = False
        events.start_incarnation()

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"Follower({self._who}, {self._events})"

    def identified(self, info: oe.ServerInfo) -> None:
        """The worker has just said who it is; another incarnation makes everything known of it void."""
        who = Incarnation(
            info.instance_id,
            max(1, info.parallelism.data_parallel_size),
            info.capacity.kv_block_size,
        )
        if who != self._who:
            self._forget()
            self._who = who
            if who.block_tokens:
                self._events.start_incarnation(n_ranks=who.n_ranks)
            else:
                self._events.start_incarnation(
                    why_none="does not say how many tokens a KV block has"
                )
            self._changed.set()
        self._watch_silence()

    def misfit(self) -> None:
        """What answers there now is not the worker to follow."""
        if self._who is not None:
            self._forget()
            self._who = None
            self._events.start_incarnation(why_none="is not the worker that was configured")
            self._changed.set()

    async def run(self) -> None:
        """Follow until cancelled."""
        try:
            while True:
                self._changed = anyio.Event()
                async with anyio.create_task_group() as tasks:
                    if self._who is not None and self._who.block_tokens:
                        self._ranks = [self._rank(rank, self._who) for rank in self._events.ranks]
                    for rank in self._ranks:
                        tasks.start_soon(rank.run)
                    await self._changed.wait()
                    tasks.cancel_scope.cancel()
        finally:
            self._forget()

    def _rank(self, rank: int, who: Incarnation) -> RankFollower:
        return RankFollower(
            rank,
            who,
            worker=self._worker,
            events=self._events,
            index=self._index_of(who.block_tokens),
            on_holder=self._on_holder,
            scheduler=self._scheduler,
            rng=self._rng,
        )

    def _forget(self) -> None:
        for rank in self._ranks:
            rank.leave()
        self._ranks = []
        self._served.clear()
        self._has_warned = False

    def _watch_silence(self) -> None:
        """Notice a worker that works and publishes nothing."""
        events, now_s = self._events, asyncio.get_running_loop().time()
        if events.n_events != self._n_events or events.mode is EventMode.NONE:
            self._n_events = events.n_events
            self._served.clear()
            events.is_silent = False
        n_served = self._n_served()
        while self._served and self._served[0][0] < now_s - SILENT_S:
            self._served.popleft()
        self._served.append((now_s, n_served))
        if n_served - self._served[0][1] >= SILENT_REQUESTS:
            events.is_silent = True
            if not self._has_warned:
                self._has_warned = True
                log.warning("events.silent", extra={"worker": events.worker})
