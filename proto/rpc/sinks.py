"""Where the messages of a call go: the callbacks of a stream, and a buffer between them and a coroutine."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import anyio
from typing_extensions import override

from slagate.proto.rpc.status import OK, Status


class Sink(Protocol):
    """Takes the messages of one call, and its end, by callbacks."""

    __slots__ = ()

    def message(self, data: bytes, /) -> None:
        """Take one serialised response."""

    def finish(self, status: Status, /) -> None:
        """Take the status of the call. The last callback."""


class StreamSink(Sink, Protocol):
    """A sink that takes all messages of one read together, even if it pauses the call."""

    __slots__ = ()

    def batch(self, messages: list[bytes], /) -> None:
        """Take serialised responses of the stream, in order, as `message` would."""


class Call(Protocol):
    """One running call, as its consumer controls it."""

    __slots__ = ()

    def cancel(self) -> None:
        """Give the call up. Idempotent, harmless after the end; never waits."""

    def pause(self) -> None:
        """Ask for no messages until `resume`; none are lost. Idempotent."""

    def resume(self) -> None:
        """Let messages come again after `pause`. Idempotent."""


class ResponseWriter(StreamSink, Protocol):
    """A sink that writes to a client, and says how much waits in it. `BufferedSink` is one."""

    __slots__ = ()

    @property
    def n_bytes(self) -> int:
        """Bytes that wait for the reader."""

    def unsent(self) -> tuple[int, ...]:
        """Counts of bytes that the client has not read: when it reads some, one of them falls."""

    def discard(self) -> None:
        """Drop what waits: the client does not read it."""

    def on_room(self, tell: Callable[[], None], /) -> None:
        """Have `tell` called once, when nothing waits any more."""


class BufferedSink:
    """Buffers the messages of a call for one reader, a coroutine.

    `n_bytes` are waiting. The owner decides what a full buffer means: the worker's server pauses the
    engine's stream, the gateway ends a client's stream.
    """

    def __init__(self, on_message: Callable[["BufferedSink"], None] | None = None) -> None:
        """`on_message` is called with the sink after each message that was queued."""
        self._on_message = on_message
        self.n_bytes: int = 0
        self.status: Status | None = None
        self._messages: deque[bytes] = deque()
        self._on_room: Callable[[], None] | None = None
        self._wake = anyio.Event()

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        end = "open" if self.status is None else self.status.code.name
        return f"BufferedSink({len(self._messages)} messages, {self.n_bytes} bytes, {end})"

    def message(self, data: bytes, /) -> None:
        """Queue one message behind the others."""
        self._messages.append(data)
        self.n_bytes += len(data)
        self._wake.set()
        if self._on_message is not None:
            self._on_message(self)

    def batch(self, messages: list[bytes], /) -> None:
        """Queue messages that came together behind the others."""
        for data in messages:
            self.message(data)

    def finish(self, status: Status = OK, /) -> None:
        """Mark the end; what is queued is still written first."""
        if self.status is None:
            self.status = status
            self._wake.set()

    def unsent(self) -> tuple[int, ...]:
        """Bytes that the reader has not taken yet."""
        return (self.n_bytes,)

    def discard(self) -> None:
        """Drop what is queued: its reader does not take it."""
        self._messages.clear()
        self.n_bytes = 0

    def on_room(self, tell: Callable[[], None], /) -> None:
        """Have `tell` called once, when the reader has taken all that waited."""
        self._on_room = tell

    async def next(self) -> bytes | None:
        """The next message in order, or None when the call has ended and all was taken."""
        while not self._messages:
            if self.status is not None:
                return None
            self._wake = anyio.Event()
            await self._wake.wait()
        data = self._messages.popleft()
        self.n_bytes -= len(data)
        if not self._messages and self._on_room is not None:
            tell, self._on_room = self._on_room, None
            tell()
        return data


def made_progress(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Whether the reader took some: one of the counts of `unsent` fell.

    >>> made_progress((5, 100), (5, 90)), made_progress((5, 100), (5, 120))
    (True, False)
    """
    return any(after < count for count, after in zip(before, now, strict=True))


class PauseGate:
    """A gate where a producer waits while its consumer has paused it. Open until `pause`."""

    def __init__(self) -> None:
        self._open = anyio.Event()
        self._open.set()

    @property
    def is_closed(self) -> bool:
        """Whether the consumer has paused its producer."""
        return not self._open.is_set()

    def pause(self) -> None:
        """Close the gate. Idempotent."""
        if self._open.is_set():
            self._open = anyio.Event()

    def resume(self) -> None:
        """Open the gate. Idempotent."""
        self._open.set()

    async def wait(self) -> None:
        """Yield to other tasks once, and return when the gate is open."""
        await self._open.wait()
        # A waiter wakes in a later turn than the `resume`, and may find the gate closed again.
        while not self._open.is_set():
            await self._open.wait()


class EndedCall(Call):
    """The call of a request that was refused at once; its methods do nothing."""

    @override
    def cancel(self) -> None:
        pass

    @override
    def pause(self) -> None:
        pass

    @override
    def resume(self) -> None:
        pass
