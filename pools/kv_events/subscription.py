"""One subscription to one rank's KV events: messages wait as bytes, and are applied in small steps."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple

import anyio
import grpc
from typing_extensions import override

from slagate.pools.kv_events.apply import BlockWriter, MismatchError
from slagate.pools.kv_events.decode import PIECE_BYTES, UndecodableError, parse, pieces, read_head
from slagate.pools.kv_events.view import EventMode, EventView, RankEvents
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, Sink
from slagate.proto.rpc.status import Metadata, Status
from slagate.workers.errors import scrub, status_of_engine_error
from slagate.workers.kv_events.feed import HEARTBEAT_S
from slagate.workers.kv_events.rank_state import SequenceNumbers
from slagate.workers.runtime.cooperative import CooperativeScheduler
from slagate.workers.worker import Worker

log = logging.getLogger(__name__)

SILENCE_S = 3 * HEARTBEAT_S
"""A stream without any message for that long, not even a heartbeat, is dead."""

TURN_WORK = 5_000
"""The work of one step, in units of about 20 ns: a tenth of a millisecond, plus a slice of a long event."""

_MESSAGE_WORK = 150
_PARSED_BYTES = 14  # in one unit of work

_FINAL = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION)
_STALE = (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.RESOURCE_EXHAUSTED)


class StreamEndKind(Enum):
    """What can follow the end of a stream."""

    LOST = "lost"  # the next one resumes where it ended, if the worker still can
    STALE = "stale"  # the next one starts over with a snapshot
    NONE = "none"  # this worker has no usable events


class StreamOutcome(NamedTuple):
    """How a stream ended."""

    kind: StreamEndKind
    reason: str


class EventStream(Sink):
    """The sink of one subscription. Applies messages until something is wrong or the stream ends.

        message ──▶ waiting bytes ──▶ step, step, step: sequence check, pieces, index
        finish ──▶ behind the messages that wait

    Whatever a worker sends, no exception leaves this class.
    """

    def __init__(
        self,
        rank: int,
        events: EventView,
        *,
        state: RankEvents,
        writer: Callable[[], BlockWriter],
        scheduler: CooperativeScheduler,
        max_waiting_bytes: int,
        resync_from_s: float,
    ) -> None:
        """`state.next_number` is that of the first batch; None: any, as a snapshot is asked for.

        `writer` is called for each batch. From `resync_from_s` on, by the event loop's clock, the
        stream ends as `STALE` where the index lacks blocks of the rank.
        """
        self._rank = rank
        self._events = events
        self._state = state
        self._writer = writer
        self._scheduler = scheduler
        self._max_bytes = max_waiting_bytes
        self._resync_from_s = resync_from_s
        self._waiting: deque[bytes] = deque()
        self._work: Iterator[int] | None = None  # of the first message that waits
        self._call: Call | None = None
        self._is_paused = False
        self._status: Status | None = None
        self._end: StreamOutcome | None = None
        self._ended = anyio.Event()
        next_number = state.next_number
        self._numbers = None if next_number is None else SequenceNumbers(next_number)
        self._now_s = asyncio.get_running_loop().time
        self._began_s = self._heard_s = self._now_s()  # the latter: when a message was applied
        self.n_applied = 0

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"EventStream(rank {self._rank}, {self.n_applied} applied, {self._end})"

    @override
    def message(self, data: bytes, /) -> None:
        if self._end is None:
            self._waiting.append(data)
            self._state.n_waiting_bytes += len(data)
            self._pause_or_resume()
            self._scheduler.add_step(self._step)

    @override
    def finish(self, status: Status, /) -> None:
        self._status = status
        self._scheduler.add_step(self._step)

    async def follow(self, worker: Worker, request: bytes, metadata: Metadata) -> StreamOutcome:
        """Subscribe, apply messages, and return how the stream ended. Always ends the call."""
        self._call = worker.kv_events(request, metadata, self)
        self._pause_or_resume()
        try:
            while self._end is None:
                with anyio.CancelScope(deadline=self._heard_s + SILENCE_S):
                    await self._ended.wait()
                if self._end is None and self._now_s() >= self._heard_s + SILENCE_S:
                    self._finish(StreamEndKind.LOST, f"silent for {SILENCE_S:g} s")
            return self._end
        finally:
            self.stop()
            self._call.cancel()

    def stop(self) -> None:
        """Apply no more messages, and have `follow` return."""
        self._finish(StreamEndKind.LOST, "is left")

    def _step(self) -> bool:
        """Do one step's work; True while there is more."""
        room = TURN_WORK
        while room > 0 and self._end is None:
            if self._work is None:
                if not self._waiting:
                    self._drained()
                    return False
                self._work = self._apply(self._waiting[0])
            room -= self._advance()
        return self._end is None

    def _advance(self) -> int:
        """Apply a part of the first message; returns how much work it was."""
        assert self._work is not None
        try:
            return next(self._work)
        except StopIteration:
            if self._end is None:
                self._heard_s = self._now_s()
                self._work = None
                self._state.n_waiting_bytes -= len(self._waiting.popleft())
                self._pause_or_resume()
        except UndecodableError as error:
            self._events.n_errors += 1
            self._finish(StreamEndKind.STALE, f"undecodable batch: {error}")
        except MismatchError as error:
            self._events.n_errors += 1
            self._finish(StreamEndKind.NONE, str(error))
        except Exception as error:
            # Whatever one worker sends must not stop the others or the gateway.
            log.exception("events.apply")
            self._events.n_errors += 1
            self._finish(
                StreamEndKind.STALE, f"batch that cannot be applied: {type(error).__name__}"
            )
        return _MESSAGE_WORK

    def _apply(self, message: bytes) -> Iterator[int]:
        head = read_head(message)
        if isinstance(head, oe.EngineError):
            self._failed(status_of_engine_error(head))
            return
        if head.rank != self._rank:
            raise UndecodableError(f"of rank {head.rank} on the stream of rank {self._rank}")
        if not self._is_next(head.number):
            return
        state, writer, events = self._state, self._writer(), self._events
        state.applied_unix_s = head.unix_s
        n_before, n_errors = writer.n_events, writer.n_errors
        writer.was_cleared = False
        for piece in pieces(message, head):
            if piece.n_bytes > PIECE_BYTES:
                yield TURN_WORK  # parsing it takes most of a step, so a new step must begin
            parsed = parse(message, piece)
            yield piece.n_bytes // _PARSED_BYTES
            yield from writer.apply(parsed)
        state.next_number = head.number + 1
        if writer.was_cleared:
            state.is_partial = False
        if writer.n_events > n_before:
            events.n_events += writer.n_events - n_before
            events.is_silent = False
        events.n_errors += writer.n_errors - n_errors
        events.n_batches += 1
        self.n_applied += 1
        if writer.has_gap and self._now_s() >= self._resync_from_s:
            self._finish(
                StreamEndKind.STALE, "the index had no room for all of its blocks, or lacks parents"
            )

    def _is_next(self, number: int) -> bool:
        """Whether to apply this batch; ends the stream where batches are missing."""
        if self._numbers is None:
            self._numbers = SequenceNumbers(number)
            # A batch does not say that it is a snapshot, which begins with a clearing.
            self._state.is_partial = number > 0
        expected = self._numbers.next
        check = self._numbers.check(number)
        if check.is_gap:
            self._events.n_gaps += 1
            # A worker that skips batches right at the resume point cannot resume there.
            is_lost = self.n_applied and check.n_missed
            kind = StreamEndKind.LOST if is_lost else StreamEndKind.STALE
            self._finish(kind, f"gap: batch {number} instead of {expected}")
        return not check.is_old and not check.is_gap

    def _drained(self) -> None:
        """No message waits: the stream is up to date, or at its end."""
        if self._status is not None:
            self._failed(self._status)
        elif self.n_applied and self._state.mode is not EventMode.LIVE:
            self._state.rebuild_s = self._now_s() - self._began_s
            self._events.set_mode(self._state, EventMode.LIVE, "")

    def _failed(self, status: Status) -> None:
        kind = StreamEndKind.LOST
        if status.code in _FINAL:
            kind = StreamEndKind.NONE
        elif status.code in _STALE:
            kind = StreamEndKind.STALE
        self._finish(kind, f"{status.code.name}: {scrub(status.message)}")

    def _finish(self, kind: StreamEndKind, reason: str) -> None:
        if self._end is None:
            self._end = StreamOutcome(kind, reason)
            self._waiting.clear()
            self._work = None
            self._state.n_waiting_bytes = 0
            self._ended.set()

    def _pause_or_resume(self) -> None:
        if self._call is None or self._end is not None:
            return
        n_bytes = self._state.n_waiting_bytes
        if not self._is_paused and n_bytes > self._max_bytes:
            self._is_paused = True
            self._call.pause()
        elif self._is_paused and n_bytes <= self._max_bytes // 4:
            self._is_paused = False
            self._call.resume()
