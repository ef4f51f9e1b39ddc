"""A worker's KV events, followed for ever: of which incarnation and ranks, from where, whether any come.

There is one stream per rank, because the wire has one start number a request and each rank has numbers of
its own: a rank whose stream breaks goes on alone, and the others do not notice. A rank's streams:

    subscribe with a snapshot ──▶ live ──▶ broken ──▶ resume at the next number   (blocks kept)
              ▲                     │                     │ refused, skipped, or not within KEEP_S
              └─────────────────────┴─────────────────────┘ (blocks dropped)
    UNIMPLEMENTED, FAILED_PRECONDITION, other block size: no events; asked again after PROBE_S
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import anyio

from slagate.pools.kv_events.apply import BlockWriter
from slagate.pools.kv_events.subscription import EventStream, StreamEndKind, StreamOutcome
from slagate.pools.kv_events.view import EventMode, EventView
from slagate.pools.prefix.holder import Holder
from slagate.pools.prefix.index import PrefixIndex
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.backoff import Backoff
from slagate.proto.rpc.status import Metadata
from slagate.workers.kv_events.feed import INSTANCE_KEY
from slagate.workers.runtime.cooperative import CooperativeScheduler
from slagate.workers.worker import Worker

log = logging.getLogger(__name__)

SILENT_REQUESTS = 100
SILENT_S = 60.0
"""A worker that processes so many prompts in this time without an event does not publish any."""

KEEP_S = 15.0
"""How long a rank's blocks are kept for a stream that resumes: a lost connection is back by then, and a
worker that is not has restarted."""

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 10.0
STABLE_S = 30.0
"""After a stream of this length the next try is quick; others wait twice as long each time."""

PROBE_S = 60.0
"""Until a worker that has no events is asked again, and at least between resyncs of a full index."""

WAITING_BYTES = 4 << 20
"""Limit of a worker's batches that wait here, over its ranks; the rest waits in the worker's history."""

_MIN_RANK_BYTES = 512 * 1024


class Incarnation(NamedTuple):
    """One life of a worker's process: the numbers of its batches and its blocks are of that life only."""

    instance_id: str
    n_ranks: int
    block_tokens: int


class _WorkerContext(NamedTuple):
    """What the ranks of one worker have in common; see `WorkerFollower`."""

    worker: Worker
    events: EventView
    index_of: Callable[[int], PrefixIndex]
    on_holder: Callable[[int, Holder | None], None]
    scheduler: CooperativeScheduler
    rng: random.Random


class RankFollower:
    """Follows the KV events of one rank, of one incarnation of a worker."""

    def __init__(self, rank: int, who: Incarnation, shared: _WorkerContext) -> None:
        self._rank = rank
        self._who = who
        self._worker, self._events, index_of, self._on_holder, self._scheduler, self._rng = shared
        self._state = self._events.ranks[rank]
        self._index = index_of(who.block_tokens)
        self._writer: BlockWriter | None = None
        self._stream: EventStream | None = None
        self._has_left = False
        self._was_live = False
        self._keep_until_s = 0.0
        self._resync_from_s = 0.0
        self._backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)

    async def run(self) -> None:
        """Subscribe again and again until `stop`, with a delay after the end of each stream."""
        now_s = asyncio.get_running_loop().time
        while not self._has_left:
            began_s = now_s()
            end = await self._follow(began_s)
            if now_s() - began_s >= STABLE_S:
                self._backoff.reset()
            if not self._has_left:
                delay_s = self._delay_s(end)
                self._settle(end, again_s=now_s() + delay_s)
                await anyio.sleep(delay_s)

    def stop(self) -> None:
        """Stop following, and free the rank's blocks. Idempotent."""
        self._has_left = True
        if self._stream is not None:
            self._stream.stop()
        self._release()

    async def _follow(self, began_s: float) -> StreamOutcome:
        """Subscribe once, from the request to the end."""
        number = self._state.next_number
        request = oe.SubscribeKvEventsRequest(data_parallel_ranks=[self._rank])
        metadata: Metadata = ()
        if number is None:
            request.include_snapshot = True
            self._resync_from_s = began_s + self._jittered(PROBE_S)
        else:
            request.start_sequence_number = number
            metadata = ((INSTANCE_KEY, self._who.instance_id),)
            self._events.n_resumes += 1
        self._stream = EventStream(
            self._rank,
            self._events,
            state=self._state,
            writer=self._open_writer,
            scheduler=self._scheduler,
            max_waiting_bytes=max(_MIN_RANK_BYTES, WAITING_BYTES // self._who.n_ranks),
            resync_from_s=self._resync_from_s,
        )
        end = await self._stream.follow(self._worker, request.SerializeToString(), metadata)
        if self._stream.n_applied:
            self._was_live = True
            self._keep_until_s = asyncio.get_running_loop().time() + KEEP_S
        return end

    def _open_writer(self) -> BlockWriter:
        """The writer to the index. A rank has no holder in the index before its first batch has come."""
        if self._writer is None:
            holder = self._state.holder = self._index.join()
            self._writer = BlockWriter(self._index, holder, block_tokens=self._who.block_tokens)
            self._on_holder(self._rank, holder)
        return self._writer

    def _settle(self, end: StreamOutcome, *, again_s: float) -> None:
        """Decide whether the rank's blocks are kept until the next stream."""
        if end.kind is StreamEndKind.NONE:
            self._release()
            self._events.set_mode(self._state, EventMode.NONE, end.reason)
            return
        # Without its id a worker that has restarted looks like one whose connection was lost.
        if (
            end.kind is StreamEndKind.STALE
            or not self._who.instance_id
            or again_s > self._keep_until_s
        ):
            self._drop_blocks()
        mode = EventMode.RESYNC if self._was_live else EventMode.STARTING
        self._events.set_mode(self._state, mode, end.reason)

    def _drop_blocks(self) -> None:
        if self._state.next_number is not None:
            self._events.n_resyncs += 1
        self._state.next_number = None
        if self._state.holder is not None:
            self._index.cleared(self._state.holder)
            self._scheduler.add_step(self._index.sweep)

    def _release(self) -> None:
        self._state.next_number = None
        if self._state.holder is not None:
            self._on_holder(self._rank, None)
            self._index.leave(self._state.holder)
            self._scheduler.add_step(self._index.sweep)
        self._state.holder = self._writer = None

    def _delay_s(self, end: StreamOutcome) -> float:
        if end.kind is StreamEndKind.NONE:
            return self._jittered(PROBE_S)
        return self._jittered(self._backoff.next_s())

    def _jittered(self, delay_s: float) -> float:
        return delay_s * self._rng.uniform(0.75, 1.25)


class WorkerFollower:
    """Follows one worker's events into an index, with a `Holder` for each rank."""

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
        """`index_of` gives the index for a block size in tokens; `scheduler` is that of the whole gateway.

        `on_holder` is called when a rank has events to score by, and with None when it has none any more;
        `n_served` is how many prompts the worker has processed.
        """
        self._shared = _WorkerContext(worker, events, index_of, on_holder, scheduler, rng)
        self._events = events
        self._n_served = n_served
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
        """Note who the worker is, at each probe; all that is of another incarnation is dropped."""
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
        """Note that another worker answers at the address, which is not to be followed."""
        if self._who is not None:
            self._forget()
            self._who = None
            self._events.start_incarnation(why_none="is not the worker that was configured")
            self._changed.set()

    async def run(self) -> None:
        """Follow all ranks of the identified worker, until cancelled."""
        try:
            while True:
                self._changed = anyio.Event()
                async with anyio.create_task_group() as tasks:
                    if self._who is not None and self._who.block_tokens:
                        self._ranks = [
                            RankFollower(rank, self._who, self._shared)
                            for rank in self._events.ranks
                        ]
                    for rank in self._ranks:
                        tasks.start_soon(rank.run)
                    await self._changed.wait()
                    tasks.cancel_scope.cancel()
        finally:
            self._forget()

    def _forget(self) -> None:
        for rank in self._ranks:
            rank.stop()
        self._ranks = []
        self._served.clear()
        self._has_warned = False

    def _watch_silence(self) -> None:
        """Notice a worker that processes prompts and publishes no events."""
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
