"""An engine's side of streamed KV events: sockets that publish batches, and replay what they published."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import zmq
import zmq.asyncio

BLOCK_TOKENS = 4
END = (-1).to_bytes(8, "big", signed=True)


def stored(*hashes: int, parent: int | None = None, **more: Any) -> dict[str, Any]:
    """As TensorRT-LLM writes it."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": [1, 2, 3, 4] * len(hashes),
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(*hashes: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}


class Publisher:
    """The sockets of one rank. An XPUB socket is a PUB socket that tells of subscriptions."""

    def __init__(self, context: Any, *, rank: int, topic: str, at: str, replay_at: str) -> None:
        self._events = context.socket(zmq.XPUB)
        self._events.bind(at)
        self._replays = context.socket(zmq.ROUTER)
        self._replays.bind(replay_at)
        self._rank = rank
        self._topic = topic.encode()
        self.number = 0
        self.kept: dict[int, bytes] = {}
        self.asked: list[int] = []

    @property
    def at(self) -> str:
        return str(self._events.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def replay_at(self) -> str:
        return str(self._replays.getsockopt_string(zmq.LAST_ENDPOINT))

    async def subscribed(self) -> None:
        """Wait until somebody subscribes."""
        assert await self._events.recv() == b"\x01" + self._topic

    def lose(self, *events: Any) -> None:
        """Publish a batch that gets nowhere; it can be replayed."""
        payload = msgspec.msgpack.encode([0.5, list(events), self._rank])
        self.kept[self.number] = payload
        self.number += 1

    async def publish(self, *events: Any) -> None:
        self.lose(*events)
        number = self.number - 1
        await self.send(self._topic, number.to_bytes(8, "big"), self.kept[number])

    async def send(self, *frames: bytes) -> None:
        """Anything."""
        await self._events.send_multipart(frames)

    async def serve_replays(self) -> None:
        while True:
            client, empty, start = await self._replays.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            for number, payload in self.kept.items():
                if number >= first:
                    frames = (self._topic, number.to_bytes(8, "big"), payload)
                    await self._replays.send_multipart((client, empty, *frames))
            await self._replays.send_multipart((client, empty, b"", END, b""))

    def close(self) -> None:
        self._events.close(linger=0)
        self._replays.close(linger=0)


@asynccontextmanager
async def publisher(
    *,
    rank: int = 0,
    topic: str = "",
    at: str = "tcp://127.0.0.1:*",
    replay_at: str = "tcp://127.0.0.1:*",
    replays: bool = True,
) -> AsyncIterator[Publisher]:
    """Bound, for the time of the block; without `replays` nobody answers there."""
    context = zmq.asyncio.Context()
    made = Publisher(context, rank=rank, topic=topic, at=at, replay_at=replay_at)
    try:
        async with anyio.create_task_group() as tasks:
            if replays:
                tasks.start_soon(made.serve_replays)
            yield made
            tasks.cancel_scope.cancel()
    finally:
        made.close()
        context.destroy(linger=0)
