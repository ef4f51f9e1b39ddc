"""A sink that keeps bytes, and fails the test when the port's contract is broken."""

from collections.abc import Callable

import anyio
import grpc

from slagate.proto.rpc.status import Status


class BytesSink:
    """What a call said, and its end."""

    def __init__(self, on_message: Callable[[bytes], None] | None = None) -> None:
        self.messages: list[bytes] = []
        self.status: Status | None = None
        self._on_message = on_message
        self._changed = anyio.Event()

    def message(self, data: bytes, /) -> None:
        assert self.status is None, "a message after the end"
        self.messages.append(data)
        self._wake()
        if self._on_message is not None:
            self._on_message(data)

    def finish(self, status: Status, /) -> None:
        assert self.status is None, "a second end"
        self.status = status
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def at_least(self, n_messages: int) -> None:
        """Wait for that many messages, or the end."""
        while len(self.messages) < n_messages and self.status is None:
            await self._changed.wait()

    async def done(self) -> Status:
        while self.status is None:
            await self._changed.wait()
        return self.status

    @property
    def code(self) -> grpc.StatusCode:
        assert self.status is not None
        return self.status.code
