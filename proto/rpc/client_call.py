"""One call with one request and a stream of answers, over one HTTP/2 stream."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import grpc
from typing_extensions import override

from slagate.proto.http2.connection import H2Connection, H2Stream
from slagate.proto.http2.engine import unindexed
from slagate.proto.http2.interfaces import REFUSED_STREAM, Headers, StreamEnd, StreamHandler
from slagate.proto.rpc.connection_pool import ConnectionPool, PendingCall
from slagate.proto.rpc.frames import IDENTITY, MessageReader, WireError, prefix
from slagate.proto.rpc.headers import (
    CONTENT_TYPE,
    answer_of,
    encode_timeout,
    status_of_headers,
    status_of_reset,
)
from slagate.proto.rpc.sinks import Call, Sink
from slagate.proto.rpc.status import Status

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
"""Of one message on any hop of ours, well above the gateway's own limit of a request."""

_LATE = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "the worker did not answer in time")
_CANCELLED = Status(grpc.StatusCode.CANCELLED, "cancelled by the gateway")
_UNTAKEN = Status(grpc.StatusCode.INTERNAL, "the answer could not be taken")
_CUT_OFF = Status(grpc.StatusCode.INTERNAL, "the call ended within a message")

_FIXED_HEADERS = (
    (b"te", b"trailers"),
    (b"content-type", CONTENT_TYPE),
    (b"grpc-accept-encoding", b"identity,gzip,deflate"),
    (b"user-agent", b"slagate"),
)


def call_headers(path: str, authority: bytes, *, scheme: bytes) -> Headers:
    """The headers that all calls of a method have in common."""
    return (
        (b":method", b"POST"),
        (b":scheme", scheme),
        (b":path", path.encode()),
        (b":authority", authority),
        *_FIXED_HEADERS,
    )


class ServerStreamCall(StreamHandler, PendingCall, Call):
    """One call: the handler of its HTTP/2 stream, and the `Call` that its consumer controls.

        waiting ──start──▶ sent ──headers──▶ answered ──▶ ended     each of them may end it

    While the call is paused, messages that arrive are kept: at most the stream's window and what was on its
    way. An end waits behind what is kept, unless the consumer or the deadline ends the call.
    """

    __slots__ = (
        "_base",
        "_deadline_s",
        "_is_answered",
        "_is_paused",
        "_kept",
        "_loop",
        "_metadata",
        "_pool",
        "_reader",
        "_request",
        "_running",
        "_sink",
        "_status",
        "_stream",
        "_take",
        "_timer",
        "_trailers",
        "_was_refused",
        "has_ended",
    )

    def __init__(
        self,
        base: Headers,
        request: bytes,
        metadata: Headers,
        sink: Sink,
        *,
        pool: ConnectionPool,
        timeout_s: float | None,
        running: set["ServerStreamCall"],
    ) -> None:
        """`base` is what `call_headers` returns; the call is in `running` until its end.

        The owner calls `pool.start` next; the call does so again, once, if refused unseen.
        """
        self._base = base
        self._request = request
        self._metadata = metadata
        self._sink = sink
        self._take: Callable[[list[bytes]], None] = getattr(sink, "batch", self._take_each)
        self._pool = pool
        self._running = running
        running.add(self)
        self._loop = loop = asyncio.get_running_loop()
        self._deadline_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self._deadline_s = loop.time() + timeout_s
            self._timer = loop.call_later(timeout_s, self.end_call, _LATE)
        self._stream: H2Stream | None = None
        self._reader = MessageReader(MAX_MESSAGE_BYTES)
        self._trailers: Headers = ()
        self._kept: deque[bytes] = deque()
        self._status: Status | None = None  # behind what is kept
        self._is_paused = False
        self._is_answered = False
        self._was_refused = False
        self.has_ended = False

    @override
    def start(self, connection: H2Connection, /) -> bool:
        headers = [*self._base, *self._metadata]
        if self._deadline_s is not None:
            remaining_s = self._deadline_s - self._loop.time()
            headers.append(unindexed(b"grpc-timeout", encode_timeout(remaining_s)))
        stream = connection.open(headers, self)
        if stream is None:
            return False
        self._stream = stream
        stream.send(prefix(self._request) + self._request)
        stream.end_stream()
        if self._is_paused:
            stream.pause()
        return True

    # --- as `Call`

    @override
    def cancel(self) -> None:
        self.end_call(_CANCELLED)

    @override
    def pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            if self._stream is not None:
                self._stream.pause()

    @override
    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            # Not within this call: the consumer may be in the middle of something.
            self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        try:
            while self._kept and not self._is_paused and not self.has_ended:
                self._sink.message(self._kept.popleft())
        except Exception:
            # One call's sink must not end the connection of them all.
            log.exception("channel.call")
            self.end_call(_UNTAKEN)
        if self._is_paused or self.has_ended:
            return
        if self._status is not None:
            self.end_call(self._status)
        elif self._stream is not None:
            # Not before all was taken: who pauses and resumes at once would else get ever more to keep.
            self._stream.resume()

    # --- as `StreamHandler`

    @override
    def headers(self, headers: Headers, /) -> None:
        self._is_answered = True
        self._request = b""
        self._trailers = headers  # where there are no others
        refusal, encoding = answer_of(tuple(headers))
        if refusal is not None:
            self.end_call(refusal)
        elif encoding != IDENTITY:
            self._reader = MessageReader(MAX_MESSAGE_BYTES, encoding=encoding)

    @override
    def data(self, data: bytes, /) -> None:
        if self.has_ended or self._status is not None:
            return
        failure: Status | None = None
        try:
            messages = self._reader.feed(data)
        except WireError as error:
            messages, failure = error.whole, error.status
        if self._is_paused or self._kept:
            self._kept.extend(messages)
        elif messages:
            try:
                self._take(messages)
            except Exception:
                # One call's sink must not end the connection of them all.
                log.exception("channel.call")
                self.end_call(_UNTAKEN)
        if failure is not None:
            self._finish(failure)
            if self._stream is not None:
                self._stream.reset()
                self._stream = None

    def _take_each(self, messages: list[bytes]) -> None:
        for at, message in enumerate(messages):
            self._sink.message(message)
            if self._is_paused:
                self._kept.extend(messages[at + 1 :])
                break
            if self.has_ended:
                break

    @override
    def trailers(self, headers: Headers, /) -> None:
        self._trailers = headers

    @override
    def ended(self) -> None:
        if self._stream is not None and self._stream.unsent_bytes:
            # It was answered before all of it was sent, which nobody waits for any more.
            self._stream.reset()
        self._stream = None
        status = status_of_headers(self._trailers)
        if status.code is grpc.StatusCode.OK and self._reader.waiting_bytes:
            status = _CUT_OFF
        self._finish(status)

    @override
    def writable(self) -> None:
        """The request was given whole."""

    @override
    def closed(self, end: StreamEnd, /) -> None:
        if self.has_ended or self._status is not None:
            return
        if end.code is None:
            self._finish(Status(grpc.StatusCode.UNAVAILABLE, end.reason))
        elif end.code == REFUSED_STREAM and not self._is_answered and not self._was_refused:
            # The peer says that it has not looked at it, as one that is about to leave does.
            self._was_refused = True
            self._stream = None
            self._pool.start(self)
        else:
            self._finish(status_of_reset(end.code, end.reason))

    # ---

    def _finish(self, status: Status) -> None:
        if self._status is not None:
            return
        if self._kept:
            self._status = status
        else:
            self.end_call(status)

    @override
    def end_call(self, status: Status, /) -> None:
        """End the call now, once. The worker is told where it may still be at work."""
        if self.has_ended:
            return
        self.has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._stream is not None:
            self._stream.reset()
        self._kept.clear()
        self._request = b""
        self._running.discard(self)
        self._pool.drop(self)
        try:
            self._sink.finish(status)
        except Exception:
            # As for a message.
            log.exception("channel.end")
