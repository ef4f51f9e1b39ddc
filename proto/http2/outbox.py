"""What the streams of a connection have for its engine, who waits for that, and when it is written."""

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from slagate.proto.http2.interfaces import StreamEnd
from slagate.proto.http2.stream import H2Stream

LOW_WATER_BYTES = 16 << 10
"""Unsent of a stream: little enough that it is worth having more."""

Write = Callable[[], None]


class Outbox:
    """`streams` are those that are open, by their numbers."""

    def __init__(
        self, engine: Any, streams: dict[int, H2Stream], *, error: type[Exception]
    ) -> None:
        """`error` is what the engine raises where it is ahead of what was told: the stream is closed."""
        self._engine = engine
        self._streams = streams
        self._error = error
        self._queued: dict[H2Stream, None] = {}  # that have something for the engine
        self._behind: set[H2Stream] = set()  # of which the engine still has something
        self._watched: set[H2Stream] = set()  # to be told when they are writable
        self._last_words: dict[H2Stream, int] = {}  # to be reset when that is written

    @property
    def has_any(self) -> bool:
        """Whether a stream has something for the engine."""
        return bool(self._queued)

    def queue(self, stream: H2Stream) -> None:
        """It has something for the engine."""
        self._queued[stream] = None

    def watch(self, stream: H2Stream) -> None:
        """Tell it when little of it is unsent."""
        if stream.id in self._streams:
            self._watched.add(stream)

    def reset_behind(self, stream: H2Stream, code: int) -> None:
        """Reset it when what it has said is written: a reset would overtake that."""
        self._last_words[stream] = code

    def give(self) -> None:
        """Give the engine what there is."""
        queued, self._queued = self._queued, {}
        for stream in queued:
            if stream.id in self._streams:
                try:
                    stream.give()
                except self._error:
                    continue
                self._behind.add(stream)
            else:
                # What was said to it when it was closed already.
                stream.drop()

    def written(self, *, is_drained: bool) -> None:
        """The engine was asked for what can be sent; `is_drained`: it has no more. Tells who waits."""
        if self._behind:
            self._behind = {stream for stream in self._behind if self._is_behind(stream)}
        if self._watched:
            self._tell_writable()
        if self._last_words and is_drained:
            self._reset_those_behind()

    def _reset_those_behind(self) -> None:
        last, self._last_words = self._last_words, {}
        for stream, code in last.items():
            if stream.unsent_bytes or stream in self._queued:
                self._last_words[stream] = code
                continue
            handler = stream.handler
            stream.reset(code)
            if handler is not None:
                handler.closed(StreamEnd(code, "reset behind its last words"))

    def _is_behind(self, stream: H2Stream) -> bool:
        if stream.id not in self._streams:
            return False
        stream.behind_bytes = self._engine.queued_body_size(stream.id)
        return stream.behind_bytes > 0

    def _tell_writable(self) -> None:
        for stream in list(self._watched):
            if stream.id not in self._streams:
                self._watched.discard(stream)
            elif stream.unsent_bytes <= LOW_WATER_BYTES:
                self._watched.discard(stream)
                if stream.handler is not None:
                    stream.handler.writable()


class Turn:
    """The writes of one event loop.

    What a read brings for others wakes tasks that have last words for them, statuses and trailers say.
    They run in the loop's next turn, and the writes that the read has led to run in that turn behind them:
    one write then carries it all.
    """

    def __init__(self) -> None:
        self._n_reading = 0
        self._held: list[Write] = []  # while something is being read

    def soon(self, loop: asyncio.AbstractEventLoop, write: Write) -> None:
        """Have it called in the next turn of this loop, which is always the same one."""
        if self._n_reading:
            self._held.append(write)
        else:
            loop.call_soon(write)

    def begin(self) -> None:
        """Something is being read, until `end`."""
        self._n_reading += 1

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """It was read, and everybody knows."""
        self._n_reading -= 1
        if self._held and not self._n_reading:
            held, self._held = self._held, []
            for write in held:
                loop.call_soon(write)


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turn] = WeakKeyDictionary()


def turn_of(loop: asyncio.AbstractEventLoop) -> Turn:
    """The one that all connections of a loop share."""
    turn = _turns.get(loop)
    if turn is None:
        turn = _turns[loop] = Turn()
    return turn
