"""Follows the sockets on which an engine streams its KV events, one for each rank.

The engine binds, this process connects, and both are on one machine. Batches that were published before the
subscription, or while this process was too slow, are asked for again where the engine has a replay
endpoint.
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
"""For one replay; engines keep 10,000 batches."""

ERROR_DELAY_S = 1.0
"""From an error of a socket to the next attempt."""

MAX_MESSAGE_BYTES = 64 << 20
"""An engine caps a batch at 50,000 blocks; of 32 tokens, 5 bytes each, that is 8 MB."""

_TCP = re.compile(r"tcp://(?P<host>\*|\[[0-9a-fA-F:]+\]|[^:\[\]*/]+):(?P<port>[0-9]{1,5})")
_LOCAL = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


class Endpoints(NamedTuple):
    """ZMQ addresses of one rank; `replay` is None where the engine has no replay endpoint."""

    events: str
    replay: str | None


class StreamSettings(NamedTuple):
    """What `kv_cache_config.kv_events_config` says of the stream, with addresses for each rank."""

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
    """The engine's own, for each rank. Raises `ValueError` naming a field that cannot be used."""
    if not isinstance(topic, str):
        raise ValueError(f"topic {topic!r} is no text")
    if type(hwm) is not int or hwm < 0:
        raise ValueError(f"hwm {hwm!r} is no number of messages")
    ranks = range(n_ranks)
    events = [_address("endpoint", endpoint, rank) for rank in ranks]
    replays: list[str | None] = [None] * n_ranks
    if replay_endpoint is not None:
        replays = [_address("replay_endpoint", replay_endpoint, rank) for rank in ranks]
    return StreamSettings(tuple(map(Endpoints, events, replays)), topic, hwm)


def _address(name: str, endpoint: object, rank: int) -> str:
    """The address of a rank's endpoint: each rank has its own port or path."""
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
    """Why ZMQ cannot be used; "" where it can."""
    try:
        importlib.import_module("zmq")
    except ImportError as error:
        return f"needs the extra zmq: pip install 'slagate[zmq]' (for pyzmq: {error})"
    return ""


class StreamSource:
    """Reads the batches that an engine publishes over ZMQ, and hands them to `take`."""

    def __init__(
        self,
        settings: StreamSettings,
        normaliser: KvStreamNormaliser,
        *,
        take: Callable[[list[Batch]], Iterable[None]],
        on_read: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`take` gets each batch, in a list, and returns slices of work, one a turn of the loop.

        `normaliser` knows each rank's next number. `on_read` gets the number of events in a batch.
        """
        self._settings = settings
        self._normaliser = normaliser
        self._take = take
        self._on_read = on_read
        self.n_errors = 0  # exceptions while a rank was followed, `take`'s included
        self._n_malformed = self._n_replays = 0

    def counters(self) -> dict[str, int]:
        """Counts by name: messages that are no batch of the topic, and replays asked for."""
        return {"malformed_messages": self._n_malformed, "replays": self._n_replays}

    async def run(self) -> None:
        """Follow every rank's socket until cancelled; the batch in hand is still taken as a whole.

        Any exception is counted, logged (the first, second, fourth, ...) and followed by a pause
        of `ERROR_DELAY_S` and a new socket. Raises `ImportError` without pyzmq.
        """
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
                # At the first, second, fourth ... error, not at each attempt.
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
        """Ask for missing batches, and pass on those that the engine still has."""
        address = self._settings.endpoints[rank].replay
        if address is None:
            return
        self._n_replays += 1
        # A new socket each time, so that nothing of an earlier replay is in it.
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
                        return  # the live socket has the rest, or it is the end of the replay
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
