"""The sockets that an engine streams its KV events on, followed: one a rank, and one for what was missed.

The engine binds, we connect; both are on one machine. What was published before the subscription was
there, or while this process was too slow, is asked for again where the engine has a replay endpoint.
"""

import importlib
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import anyio

from slagate.workers.kv_events.engine_stream import END, Batch, KvStreamNormaliser, batch_of
from slagate.workers.runtime.cooperative import finish_cooperatively

log = logging.getLogger(__name__)

REPLAY_LIMIT_S = 5.0
"""For one replay: 10,000 batches is what engines keep."""

ERROR_DELAY_S = 1.0

MAX_MESSAGE_BYTES = 64 << 20
"""An engine caps a batch at 50,000 blocks; of 32 tokens, 5 bytes each, that is 8 MB."""

_TCP = re.compile(r"tcp://(?P<host>\*|\[[0-9a-fA-F:]+\]|[^:\[\]*/]+):(?P<port>[0-9]{1,5})")
_LOCAL = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


class Endpoints(NamedTuple):
    """Where to connect to for one rank; no `replay` where the engine has none."""

    events: str
    replay: str | None


class StreamSettings(NamedTuple):
    """What `kv_cache_config.kv_events_config` says, with an entry a rank."""

    endpoints: tuple[Endpoints, ...]
    topic: str
    high_water: int  # messages that may wait in this process


def stream_settings(
    *,
    endpoint: object,
    replay_endpoint: object,
    topic: object,
    hwm: object,
    n_ranks: int,
) -> StreamSettings:
    """Raises `ValueError` naming the field that nothing can be connected to with."""
    if not isinstance(topic, str):
        raise ValueError(f"topic {topic!r} is no text")
    if type(hwm) is not int or hwm < 0:
        raise ValueError(f"hwm {hwm!r} is no number of messages")
    return StreamSettings(
        tuple(
            Endpoints(
                _address("endpoint", endpoint, rank),
                None
                if replay_endpoint is None
                else _address("replay_endpoint", replay_endpoint, rank),
            )
            for rank in range(n_ranks)
        ),
        topic,
        hwm,
    )


def _address(name: str, endpoint: object, rank: int) -> str:
    """Where the engine's endpoint of a rank is to be reached: the port, or the path, is the rank's own."""
    if isinstance(endpoint, str) and endpoint.startswith("ipc://") and endpoint != "ipc://":
        return f"{endpoint}_dp{rank}" if rank else endpoint
    matched = _TCP.fullmatch(endpoint) if isinstance(endpoint, str) else None
    if matched is None:
        raise ValueError(f"{name} {endpoint!r} is no tcp:// or ipc:// address")
    host, port = matched["host"], int(matched["port"]) + rank
    if not rank < port <= 65_535:
        raise ValueError(f"{name} {endpoint!r} has no port for rank {rank}")
    return f"tcp://{_LOCAL.get(host, host)}:{port}"


def pyzmq_missing() -> str:
    """Why there are no sockets of ZMQ; "" where there are."""
    try:
        importlib.import_module("zmq")
    except ImportError as error:
        return f"needs the extra zmq: pip install 'slagate[zmq]' (for pyzmq: {error})"
    return ""


class StreamSource:
    """Follows every rank's socket while it runs; `counters` tells what went wrong on the way."""

    def __init__(
        self,
        settings: StreamSettings,
        normaliser: KvStreamNormaliser,
        *,
        take: Callable[[list[Batch]], Iterable[None]],
        on_read: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`take` gets batches, and is gone through, a step in each turn of the loop.

        `normaliser` is asked which number a rank goes on with. `on_read` is told how many events came.
        """
        self._settings = settings
        self._normaliser = normaliser
        self._take = take
        self._on_read = on_read
        self.n_errors = 0
        self._n_malformed = self._n_replays = 0

    def counters(self) -> dict[str, int]:
        """Messages that are none of the engine's, and replays asked for."""
        return {"malformed_messages": self._n_malformed, "replays": self._n_replays}

    async def run(self) -> None:
        """Until cancelled; no error of a socket ends it."""
        asyncio_zmq = importlib.import_module("zmq.asyncio")
        context = asyncio_zmq.Context()
        try:
            async with anyio.create_task_group() as tasks:
                for rank in range(len(self._settings.endpoints)):
                    tasks.start_soon(self._follow, context, rank)
        finally:
            context.destroy(linger=0)

    async def _follow(self, context: Any, rank: int) -> None:
        while True:
            try:
                await self._listen(context, rank)
            except Exception:
                self.n_errors += 1
                # Once a fault, not once a try.
                if self.n_errors & (self.n_errors - 1) == 0:
                    log.exception("kv_stream.failed", extra={"rank": rank, "times": self.n_errors})
                await anyio.sleep(ERROR_DELAY_S)

    async def _listen(self, context: Any, rank: int) -> None:
        settings = self._settings
        socket = _socket(context, "SUB")
        try:
            socket.rcvhwm = settings.high_water
            socket.subscribe(settings.topic.encode())
            socket.connect(settings.endpoints[rank].events)
            while True:
                batch = self._read(rank, await socket.recv_multipart())
                if batch is None or batch.number == END:
                    continue
                if batch.number > self._normaliser.next_number(rank):
                    await self._replay(context, rank, before=batch.number)
                await self._pass_on(batch)
        finally:
            socket.close(linger=0)

    async def _replay(self, context: Any, rank: int, *, before: int) -> None:
        """Pass on the batches that are missing, as far as the engine still has them."""
        address = self._settings.endpoints[rank].replay
        if address is None:
            return
        self._n_replays += 1
        # A new one each time: nothing of the last replay can be in it.
        socket = _socket(context, "DEALER")
        try:
            socket.connect(address)
            with anyio.move_on_after(REPLAY_LIMIT_S):
                first = self._normaliser.next_number(rank)
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                while True:
                    _, *frames = await socket.recv_multipart()
                    batch = self._read(rank, frames)
                    if batch is not None and batch.number >= before:
                        return  # what comes from here on comes live, or it is the end
                    if batch is not None:
                        await self._pass_on(batch)
        finally:
            socket.close(linger=0)

    def _read(self, rank: int, frames: list[bytes]) -> Batch | None:
        batch = batch_of(rank, frames, topic=self._settings.topic)
        self._n_malformed += batch is None
        return batch

    async def _pass_on(self, batch: Batch) -> None:
        if batch.events:
            self._on_read(len(batch.events))
        # All of it, also when cancelled: the engine will not send it again.
        await finish_cooperatively(self._take([batch]))


def _socket(context: Any, kind: str) -> Any:
    socket = context.socket(getattr(importlib.import_module("zmq"), kind))
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.ipv6 = True  # and version 4
    return socket
