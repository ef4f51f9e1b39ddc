"""Subscriptions to a worker's KV events: a snapshot or a replay, then live events, each at its own pace.

A subscriber has no buffer, but a cursor into each rank's history, so a slow one costs nothing. When the
history has moved past its cursor, its stream ends with a retryable EngineError, and it can start over with
a snapshot. A stream that is paused for `STALL_S` is ended. Numbers belong to one incarnation of the worker.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

import grpc
from google.protobuf.message import DecodeError
from typing_extensions import override

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, Sink
from slagate.proto.rpc.status import OK, Metadata, Status
from slagate.workers.errors import RequestRefused, invalid
from slagate.workers.kv_events.changes import Change
from slagate.workers.kv_events.log import RankLog
from slagate.workers.kv_events.normalise import KvEventNormaliser
from slagate.workers.kv_events.rank_state import Normaliser

INSTANCE_KEY = "x-slagate-instance-id"
"""Metadata key: the incarnation of the worker that a start number belongs to."""

HISTORY_BATCHES = 8192
HISTORY_BYTES = 32 * 1024 * 1024
"""Limits of one rank's history, which has the last minute or so of a busy engine."""

MAX_SUBSCRIBERS = 64
"""For each rank, as gateways follow ranks one by one. Each may hold a snapshot in memory for a while."""

HEARTBEAT_S = 5.0
"""A rank without news for so long publishes an empty batch."""

STALL_S = 3 * HEARTBEAT_S
"""A stream that is paused for so long is ended."""

_TURN_BYTES = 512 * 1024
_MESSAGE_BYTES = 2048
"""Limit of what one turn of the loop delivers, and the least that a message counts for: handing over a
message takes about as long as copying so many bytes."""

_TOO_SLOW = oe.SubscribeKvEventsResponse(
    error=oe.EngineError(
        code=oe.ERROR_CODE_OVERLOADED,
        message="kv events: read too slowly, the history has moved on; subscribe with a snapshot",
        retryable=True,
    )
).SerializeToString()

_SHUTTING_DOWN = Status(grpc.StatusCode.UNAVAILABLE, "kv events: the worker is shutting down")

_STALLED = Status(
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    "kv events: nothing was read for too long; subscribe with a snapshot",
)


class Subscription(Call):
    """The call of one subscriber: its snapshot, then its place in the history of each rank."""

    def __init__(
        self,
        sink: Sink,
        *,
        wake: Callable[["Subscription"], None],
        forget: Callable[["Subscription"], None],
        snapshot: Iterator[bytes] | None,
        cursors: dict[int, int],
    ) -> None:
        """`cursors` has the number of the next live batch of each rank.

        `wake` is called when there may be something to deliver, `forget` when the stream has ended.
        """
        self._wake = wake
        self._forget = forget
        self._sink = sink
        self._snapshot = snapshot
        self._cursors = cursors  # in order of when a rank was served last
        self.paused_since_s = math.inf  # infinite while it is not paused
        self._has_ended = False
        self.is_queued = False  # set by the feed
        self.was_too_slow = False

    @property
    def is_open(self) -> bool:
        """Whether messages may be delivered now: the stream is neither paused nor ended."""
        return self.paused_since_s == math.inf and not self._has_ended

    @override
    def cancel(self) -> None:
        self.end_stream(Status(grpc.StatusCode.CANCELLED, "cancelled"))

    @override
    def pause(self) -> None:
        if self.paused_since_s == math.inf:
            self.paused_since_s = asyncio.get_running_loop().time()

    @override
    def resume(self) -> None:
        self.paused_since_s = math.inf
        self._wake(self)

    def end_stream(self, status: Status) -> None:
        """End the stream with a status; no-op if it has ended."""
        if not self._has_ended:
            self._has_ended = True
            self._snapshot = None
            self._forget(self)
            self._sink.finish(status)

    def end_stalled(self) -> None:
        """End a stream whose client has stopped reading, so that no message can reach it."""
        self.was_too_slow = True
        self.end_stream(_STALLED)

    def rank_published(self, rank: int, log: RankLog) -> None:
        """Queue for a rank's new batches; drop the snapshot if a batch is gone before its turn."""
        number = self._cursors.get(rank)
        if number is None:
            return
        if number < log.oldest:
            # The stream will end once it is resumed, and must not hold a snapshot until then.
            self._snapshot = None
        self._wake(self)

    def deliver_one(self, logs: list[RankLog]) -> int:
        """Deliver the next message. Returns its bytes; 0 if there is none, or the stream ended."""
        if not self.is_open:
            return 0
        if any(number < logs[rank].oldest for rank, number in self._cursors.items()):
            self.was_too_slow = True
            self._sink.message(_TOO_SLOW)
            self.end_stream(OK)
            return 0
        message = self._next(logs)
        if message is None:
            return 0
        self._sink.message(message)
        return len(message)

    def _next(self, logs: list[RankLog]) -> bytes | None:
        if self._snapshot is not None:
            message = next(self._snapshot, None)
            if message is not None:
                return message
            self._snapshot = None
        for rank, number in self._cursors.items():
            if number <= logs[rank].newest:
                del self._cursors[rank]
                self._cursors[rank] = number + 1
                return logs[rank].batch(number)
        return None


class KvFeed:
    """The KV events of one engine for any number of subscribers; used on the event loop's thread."""

    def __init__(
        self,
        *,
        ranks: int,
        block_tokens: int,
        instance_id: str,
        unix_nanos: Callable[[], int],
        normaliser: Normaliser | None = None,
        history_batches: int = HISTORY_BATCHES,
        history_bytes: int = HISTORY_BYTES,
    ) -> None:
        """`unix_nanos` stamps batches. `normaliser` reads the events, by default polled ones."""
        self._instance_id = instance_id
        self._unix_nanos = unix_nanos
        self._normaliser: Normaliser = normaliser or KvEventNormaliser(
            ranks=ranks, block_tokens=block_tokens
        )
        limits = {"history_batches": history_batches, "history_bytes": history_bytes}
        self._logs = [RankLog(r, block_tokens=block_tokens, **limits) for r in range(ranks)]
        # When each rank published last; kept while there are subscribers.
        self._last_s = [0.0] * ranks
        self._subscriptions: dict[Subscription, None] = {}
        self._queue: deque[Subscription] = deque()  # there may be messages for these
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._n_slow_subscribers = 0

    def __repr__(self) -> str:
        newest = [log.newest for log in self._logs]
        return f"KvFeed(newest {newest}, {len(self._subscriptions)} subscribers)"

    def publish_polled(self, polled: object) -> Iterator[None]:
        """Publish what a poll of the engine, or its stream, gave. Does not raise, whatever it is.

        It works while it is iterated over: each item is a turn's work, and publishes what it read.
        """
        for portion in self._normaliser.portions(polled):
            changes: dict[int, list[Change]] = {}
            for change in portion:
                changes.setdefault(change.rank, []).append(change)
            for rank, of_rank in changes.items():
                if self._logs[rank].apply(of_rank, self._unix_nanos()):
                    self._published(rank)
            yield
        now_s = asyncio.get_running_loop().time()
        self._normaliser.report_losses(now_s)

    def subscribe(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        """Start a stream of serialised `SubscribeKvEventsResponse`; its first message comes later.

        Raises `RequestRefused`, with the sink untouched: INVALID_ARGUMENT for a request that no worker
        could serve, OUT_OF_RANGE for a start that this one does not have, RESOURCE_EXHAUSTED when each rank
        has `MAX_SUBSCRIBERS`, UNAVAILABLE after `end_streams`.
        """
        if self._is_closed:
            raise RequestRefused(grpc.StatusCode.UNAVAILABLE, _SHUTTING_DOWN.message)
        most = MAX_SUBSCRIBERS * len(self._logs)
        if len(self._subscriptions) >= most:
            reason = f"kv events: {most} subscribers are there already"
            raise RequestRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        wanted = _parse(request)
        self._check_instance(metadata, include_snapshot=wanted.include_snapshot)
        ranks = list(dict.fromkeys(wanted.data_parallel_ranks)) or list(range(len(self._logs)))
        start = wanted.start_sequence_number
        self._check(ranks, start, include_snapshot=wanted.include_snapshot)
        now_s = asyncio.get_running_loop().time()
        if self._timer is None:
            self._last_s = [now_s] * len(self._logs)
            self._set_timer()
        snapshots: list[Iterator[bytes]] = []
        if wanted.include_snapshot:
            for rank in ranks:
                newest = self._logs[rank].newest
                snapshots.append(self._logs[rank].snapshot(self._unix_nanos()))
                if self._logs[rank].newest > newest:
                    self._published(rank)
        subscription = Subscription(
            sink,
            wake=self._wake,
            forget=self._forget,
            snapshot=chain.from_iterable(snapshots),
            cursors={
                rank: self._logs[rank].newest + 1 if wanted.include_snapshot else start
                for rank in ranks
            },
        )
        self._subscriptions[subscription] = None
        self._wake(subscription)
        return subscription

    def counters(self) -> dict[str, int]:
        """Counts of events, blocks and subscribers by name, and the newest number of each rank."""
        mirrors = [log.mirror for log in self._logs]
        return {
            **self._normaliser.counts,
            "orphan_blocks": sum(mirror.n_orphans for mirror in mirrors),
            "unknown_removed": sum(mirror.n_unknown_removed for mirror in mirrors),
            "hidden_blocks": sum(mirror.n_hidden for mirror in mirrors),
            "published_blocks": sum(len(mirror.visible) for mirror in mirrors),
            "subscribers": len(self._subscriptions),
            "slow_subscribers": self._n_slow_subscribers,
            **{f"newest_number_{rank}": log.newest for rank, log in enumerate(self._logs)},
        }

    def end_streams(self) -> None:
        """End every stream and accept no subscriber any more."""
        self._is_closed = True
        for subscription in list(self._subscriptions):
            subscription.end_stream(_SHUTTING_DOWN)

    def _forget(self, subscription: Subscription) -> None:
        """Remove a stream that has ended; without streams there is no timer."""
        del self._subscriptions[subscription]
        self._n_slow_subscribers += subscription.was_too_slow
        if not self._subscriptions and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self, subscription: Subscription) -> None:
        """Queue a subscription that there may be messages for."""
        if subscription.is_open and not subscription.is_queued:
            subscription.is_queued = True
            self._queue.append(subscription)
            if self._turn is None:
                self._turn = asyncio.get_running_loop().call_soon(self._deliver)

    def _check(self, ranks: list[int], start: int, *, include_snapshot: bool) -> None:
        for rank in ranks:
            if rank >= len(self._logs):
                reason = f"{rank} is not one of 0..{len(self._logs) - 1}"
                raise invalid("data_parallel_ranks", reason)
        if include_snapshot:
            if start:
                raise invalid("start_sequence_number", "cannot be given with include_snapshot")
            return
        if start and len(ranks) > 1:
            raise invalid("start_sequence_number", "each rank has its own, ask for one rank")
        for rank in ranks:
            log = self._logs[rank]
            if not log.oldest <= start <= log.newest + 1:
                raise RequestRefused(
                    grpc.StatusCode.OUT_OF_RANGE,
                    f"start_sequence_number: rank {rank} can start at"
                    f" {log.oldest}..{log.newest + 1}, or with a snapshot; not at {start}",
                )

    def _check_instance(self, metadata: Metadata, *, include_snapshot: bool) -> None:
        named = [value for key, value in metadata if key == INSTANCE_KEY]
        if len(named) > 1:
            raise invalid(INSTANCE_KEY, "is given more than once")
        # The refusal asks for a snapshot, which does not depend on an earlier incarnation.
        if named and named[0] != self._instance_id and not include_snapshot:
            raise RequestRefused(
                grpc.StatusCode.OUT_OF_RANGE,
                f"{INSTANCE_KEY}: this is {self._instance_id!r}; subscribe with a snapshot",
            )

    def _published(self, rank: int) -> None:
        """Wake the subscribers of a rank that has new batches."""
        if self._subscriptions:
            self._last_s[rank] = asyncio.get_running_loop().time()
        for subscription in self._subscriptions:
            subscription.rank_published(rank, self._logs[rank])

    def _deliver(self) -> None:
        """Deliver a message to each queued subscription in rotation, up to a turn's bytes."""
        room = _TURN_BYTES
        try:
            while self._queue and room > 0:
                subscription = self._queue.popleft()
                subscription.is_queued = False
                n_bytes = subscription.deliver_one(self._logs)
                if n_bytes:
                    room -= max(n_bytes, _MESSAGE_BYTES)
                    self._wake(subscription)
        finally:
            again = asyncio.get_running_loop().call_soon
            self._turn = again(self._deliver) if self._queue else None

    def _set_timer(self) -> None:
        due_s = min(self._last_s) + HEARTBEAT_S
        self._timer = asyncio.get_running_loop().call_at(due_s, self._beat)

    def _beat(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for subscription in list(self._subscriptions):
            if subscription.paused_since_s <= now_s - STALL_S:
                subscription.end_stalled()
        if not self._subscriptions:
            return
        for rank, log in enumerate(self._logs):
            if self._last_s[rank] + HEARTBEAT_S <= now_s:
                log.publish(b"", self._unix_nanos())
                self._published(rank)
        self._set_timer()


def _parse(request: bytes) -> oe.SubscribeKvEventsRequest:
    try:
        return oe.SubscribeKvEventsRequest.FromString(request)
    except DecodeError:
        raise invalid("request", "is not a SubscribeKvEventsRequest") from None
