"""One rank's KV events, subscribed to again and again: from where, and when.

One stream per rank, because the wire has one start number a request and each rank has numbers of its own: a
rank that breaks off goes on alone, and the others notice nothing.

    subscribe with a snapshot ──▶ live ──▶ broken ──▶ resume at the next number   (view kept)
              ▲                     │                     │ refused, skipped, or not within KEEP_S
              └─────────────────────┴─────────────────────┘ (view dropped)
    UNIMPLEMENTED, FAILED_PRECONDITION, other block size: no events; asked again after PROBE_S
"""

import asyncio
import random
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

KEEP_S = 15.0
"""How long the view of a broken stream is kept for one that resumes: a lost connection is back by then, and
a worker that is not has restarted."""

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 10.0
STABLE_S = 30.0
"""A stream that lived that long has earned a quick retry; others wait twice as long each time."""

PROBE_S = 60.0
"""Until a worker that has no events is asked again, and at least between resyncs of a full index."""

WAITING_BYTES = 4 << 20
"""Of a worker's batches that may wait here, over its ranks; the rest waits in the worker's history."""

_MIN_RANK_BYTES = 512 * 1024


class Incarnation(NamedTuple):
    """What a worker's numbers and blocks belong to."""

    instance_id: str
    n_ranks: int
    block_tokens: int


class RankFollower:
    """One rank of one incarnation."""

    def __init__(
        self,
        rank: int,
        who: Incarnation,
        *,
        worker: Worker,
        events: EventView,
        index: PrefixIndex,
        on_holder: Callable[[int, Holder | None], None],
        scheduler: CooperativeScheduler,
        rng: random.Random,
    ) -> None:
        self._rank = rank
        self._who = who
        self._worker = worker
        self._events = events
        self._state = events.ranks[rank]
        self._index = index
        self._on_holder = on_holder
        self._scheduler = scheduler
        self._rng = rng
        self._writer: BlockWriter | None = None
        self._stream: EventStream | None = None
        self._has_left = False
        self._was_live = False
        self._keep_until_s = 0.0
        self._resync_from_s = 0.0
        self._backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)

    async def run(self) -> None:
        """Subscribe again and again. Every way around this loop waits."""
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

    def leave(self) -> None:
        """Hold nothing any more, now and later. Idempotent."""
        self._has_left = True
        if self._stream is not None:
            self._stream.stop()
        self._release()

    async def _follow(self, began_s: float) -> StreamOutcome:
        """One subscription, from its request to its end."""
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
        """Where its blocks go. The index hears of a rank when its first batch has come."""
        if self._writer is None:
            holder = self._state.holder = self._index.join()
            self._writer = BlockWriter(self._index, holder, block_tokens=self._who.block_tokens)
            self._on_holder(self._rank, holder)
        return self._writer

    def _settle(self, end: StreamOutcome, *, again_s: float) -> None:
        """Decide what is kept of what the stream brought until the next one."""
        if end.kind is StreamEndKind.NONE:
            self._release()
            self._events.set_mode(self._state, EventMode.NONE, end.reason)
            return
        # Without its id nobody can tell a worker that has restarted from one that was cut off.
        if (
            end.kind is StreamEndKind.STALE
            or not self._who.instance_id
            or again_s > self._keep_until_s
        ):
            self._drop()
        mode = EventMode.RESYNC if self._was_live else EventMode.STARTING
        self._events.set_mode(self._state, mode, end.reason)

    def _drop(self) -> None:
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
