"""A sink that keeps everything, and small readers of what it kept."""

from collections.abc import Callable

import anyio
import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import Status


class KeepingSink:
    """Keeps messages and the end; fails the test when the port's contract is broken."""

    def __init__(self, on_message: Callable[["KeepingSink"], None] | None = None) -> None:
        self.messages: list[oe.GenerateResponse] = []
        self.status: Status | None = None
        self.ended = anyio.Event()
        self._on_message = on_message
        self._waiters: list[tuple[int, anyio.Event]] = []

    def message(self, data: bytes, /) -> None:
        assert self.status is None, "a message after the end"
        self.messages.append(oe.GenerateResponse.FromString(data))
        for n_messages, event in self._waiters:
            if len(self.messages) >= n_messages:
                event.set()
        if self._on_message is not None:
            self._on_message(self)

    def finish(self, status: Status, /) -> None:
        assert self.status is None, "a second end"
        self.status = status
        self.ended.set()
        for _, event in self._waiters:
            event.set()

    async def at_least(self, n_messages: int) -> None:
        """Wait for that many messages, or the end."""
        event = anyio.Event()
        self._waiters.append((n_messages, event))
        if len(self.messages) >= n_messages or self.status is not None:
            event.set()
        await event.wait()

    async def done(self) -> "KeepingSink":
        await self.ended.wait()
        return self

    @property
    def code(self) -> grpc.StatusCode:
        assert self.status is not None
        return self.status.code

    @property
    def tokens(self) -> list[int]:
        return [token.token_id for m in self.messages for token in m.token.tokens]

    @property
    def events(self) -> list[str | None]:
        return [message.WhichOneof("event") for message in self.messages]
