"""Two asyncio transports joined in memory: real protocols in virtual time, and on bad lines."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio

HIGH_WATER_BYTES = 64 << 10


class MemoryTransport(asyncio.Transport):
    """One end. What is written arrives at the other end in order, `latency_s` later."""

    def __init__(self, protocol: asyncio.Protocol, latency_s: float) -> None:
        super().__init__()
        self._protocol = protocol
        self._latency_s = latency_s
        self._loop = asyncio.get_running_loop()
        self._other: MemoryTransport | None = None
        self._is_closed = False
        self._is_told_to_pause = False
        self._travelling: deque[bytes | None] = deque()  # None: the end
        self.n_bytes = 0  # written, and not arrived
        self.n_writes = 0
        self.is_cut = False  # everything written is lost
        self.is_stalled = False  # the other end does not read
        self._is_freed = False

    def join(self, other: "MemoryTransport") -> None:
        self._other = other

    def begin(self) -> None:
        self._protocol.connection_made(self)

    def write(self, data: Any) -> None:
        if self._is_freed:
            raise RuntimeError("the handler is closed")
        if self._is_closed or self.is_cut or not data:
            return
        self.n_writes += 1
        self.n_bytes += len(data)
        self._send(bytes(data))
        if self.n_bytes > HIGH_WATER_BYTES and not self._is_told_to_pause:
            self._is_told_to_pause = True
            self._protocol.pause_writing()

    def _send(self, data: bytes | None) -> None:
        self._travelling.append(data)
        self._loop.call_later(self._latency_s, self._arrive)

    def flow(self) -> None:
        """The other end reads again."""
        self.is_stalled = False
        self._arrive()

    def _arrive(self) -> None:
        while self._travelling and not self.is_stalled:
            data = self._travelling.popleft()
            assert self._other is not None
            if data is None:
                self._other.lose(None)
                continue
            self.n_bytes -= len(data)
            self._other.receive(data)
        if self._is_told_to_pause and not self.n_bytes and not self._is_closed:
            self._is_told_to_pause = False
            self._protocol.resume_writing()

    def receive(self, data: bytes) -> None:
        if not self._is_closed:
            self._protocol.data_received(data)

    def lose(self, error: Exception | None) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._protocol.connection_lost(error)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon(self._protocol.connection_lost, None)
            if not self.is_cut:
                self._send(None)

    def abort(self) -> None:
        self.close()

    def get_write_buffer_size(self) -> int:
        return self.n_bytes

    def free(self) -> None:
        """As uvloop does it to a dial that is given up: this end is told nothing, and may not write."""
        self._is_closed = self._is_freed = True
        self._send(None)

    def is_closing(self) -> bool:
        return self._is_closed


def joined(
    here: asyncio.Protocol, there: asyncio.Protocol, latency_s: float = 0.0
) -> tuple[MemoryTransport, MemoryTransport]:
    """Connect two protocols; the transports that they were given."""
    near, far = MemoryTransport(here, latency_s), MemoryTransport(there, latency_s)
    near.join(far)
    far.join(near)
    near.begin()
    far.begin()
    return near, far


class Network:
    """A `Dial` whose connections lead to servers that are made for each."""

    def __init__(self, serve: Callable[[], asyncio.Protocol], latency_s: float = 0.0) -> None:
        self._serve = serve
        self._latency_s = latency_s
        self.links: list[tuple[MemoryTransport, MemoryTransport]] = []
        self.refuses = ""  # why it cannot be connected
        self.hangs = False  # it connects, and does not come to its end
        self.n_dials = 0

    async def dial(self, _address: str, make: Callable[[], asyncio.Protocol]) -> None:
        self.n_dials += 1
        if self.refuses:
            raise OSError(self.refuses)
        near, far = joined(make(), self._serve(), self._latency_s)
        self.links.append((near, far))
        if self.hangs:
            try:
                await anyio.sleep_forever()
            finally:
                near.free()
