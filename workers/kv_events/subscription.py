"""One subscriber of a worker's KV events: its snapshot, then its place in the history of each rank."""

import asyncio
import math
from collections.abc import Callable, Iterator

import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Sink
from slagate.proto.rpc.status import OK, Status
from slagate.workers.kv_events.log import RankLog

_TOO_SLOW = oe.SubscribeKvEventsResponse(
    error=oe.EngineError(
        code=oe.ERROR_CODE_OVERLOADED,
        message="kv events: read too slowly, the history has moved on; subscribe with a snapshot",
        retryable=True,
    )
).SerializeToString()

_STALLED = Status(
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    "kv events: nothing was read for too long; subscribe with a snapshot",
)


class Subscription:
    """The `Call` of one subscriber."""

    def __init__(
        self,
        sink: Sink,
        *,
        wake: Callable[["Subscription"], None],
        forget: Callable[["Subscription"], None],
        snapshot: Iterator[bytes] | None,
        cursors: dict[int, int],
    ) -> None:
        """`cursors` are the numbers of the live batches that come next, by rank.

        `wake` is called when there may be something to deliver, `forget` when it has ended.
        """
        self._wake = wake
        self._forget = forget
        self._sink = sink
        self._snapshot = snapshot
        self._cursors = cursors  # the rank served longest ago first
        self.paused_since_s = math.inf  # infinite while it is not
        self._has_ended = False
        self.is_queued = False  # the feed's note
        self.was_too_slow = False

    @property
    def is_open(self) -> bool:
        """Whether it may be given messages now."""
        return self.paused_since_s == math.inf and not self._has_ended

    def cancel(self) -> None:
        """As `Call.cancel`."""
        self.end(Status(grpc.StatusCode.CANCELLED, "cancelled"))

    def pause(self) -> None:
        """As `Call.pause`."""
        if self.paused_since_s == math.inf:
            self.paused_since_s = asyncio.get_running_loop().time()

    def resume(self) -> None:
        """As `Call.resume`."""
        self.paused_since_s = math.inf
        self._wake(self)

    def end(self, status: Status) -> None:
        """End the sink unless it has ended."""
        if not self._has_ended:
            self._has_ended = True
            self._snapshot = None
            self._forget(self)
            self._sink.end(status)

    def end_stalled(self) -> None:
        """End it as one whose client has stopped reading; no message can tell it so."""
        self.was_too_slow = True
        self.end(_STALLED)

    def published(self, rank: int, log: RankLog) -> None:
        """There are new batches of a rank: time to go on, or to see that it fell behind."""
        number = self._cursors.get(rank)
        if number is None:
            return
        if number < log.oldest:
            # The stream can only end now, and until it is resumed it must not hold a snapshot.
            self._snapshot = None
        self._wake(self)

    def step(self, logs: list[RankLog]) -> int:
        """Deliver at most one message; its size in bytes, or 0 when there is nothing to do now."""
        if not self.is_open:
            return 0
        if any(number < logs[rank].oldest for rank, number in self._cursors.items()):
            self.was_too_slow = True
            self._sink.message(_TOO_SLOW)
            self.end(OK)
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
