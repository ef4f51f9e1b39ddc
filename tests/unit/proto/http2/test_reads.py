"""What one read brings: each stream's body in one piece, and one write for all that the read led to."""

import asyncio
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel

from slagate.proto.http2.connection import (
    ConnectionState,
    H2Connection,
    H2Stream,
    write_coalescer,
)
from slagate.proto.http2.engine import (
    ConnectionClosed,
    DataReceived,
    ResponseReceived,
    StreamClosed,
    TrailersReceived,
)
from slagate.proto.http2.interfaces import Headers, Http2Settings, StreamEnd
from slagate.proto.rpc.status import OK
from slagate.workers.client.client import WorkerClient
from slagate.workers.runtime.virtual_loop import run
from support.http2.memory_transport import Network
from support.http2.peer import PeerServer, PeerStream
from support.seeds import each_seed
from support.worker.bytes_sink import BytesSink


class Heard:
    """A stream's handler that writes down what it is told."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.on_data: Callable[[], None] = lambda: None

    def headers(self, headers: Headers, /) -> None:
        self.said.append("headers")

    def data(self, data: bytes, /) -> None:
        self.said.append(data)
        self.on_data()

    def trailers(self, headers: Headers, /) -> None:
        self.said.append("trailers")

    def ended(self) -> None:
        self.said.append("ended")

    def writable(self) -> None: ...

    def closed(self, end: StreamEnd, /) -> None:
        self.said.append("closed")


class Owner:
    """Has a connection, and does nothing."""

    def ready(self) -> None: ...

    def freed(self) -> None: ...

    def retiring(self, code: int, about: bytes, /) -> None: ...

    def lost(self, reason: str, /) -> None: ...


def heard(n_streams: int) -> tuple[H2Connection, list[Heard]]:
    handlers = [Heard() for _ in range(n_streams)]
    connection = H2Connection(Owner(), Http2Settings())
    for number, each in enumerate(handlers):
        connection._streams[number] = H2Stream(connection, number, each)
    return connection, handlers


def life(rng: random.Random, stream_id: int) -> list[Any]:
    """What an engine says of one stream, from its answer on."""
    body = [
        DataReceived(stream_id, rng.randbytes(3), end_stream=False) for _ in range(rng.randrange(5))
    ]
    end: list[Any]
    if body and rng.random() < 0.5:
        last = body.pop()
        end = [DataReceived(stream_id, last.data, end_stream=True)]
    else:
        end = [TrailersReceived(stream_id, ())]
    closed = [StreamClosed(stream_id, 0, None)] if rng.random() < 0.8 else []
    return [ResponseReceived(stream_id, (), end_stream=False), *body, *end, *closed]


def test_a_streams_frames_of_one_read_are_one_piece() -> None:
    def history(seed: int) -> None:
        rng = random.Random(seed)
        lives = [life(rng, number) for number in range(rng.randrange(1, 6))]
        one_by_one, alone = heard(len(lives))
        together, in_one_read = heard(len(lives))
        mixed = []
        while any(lives):
            mixed.append(rng.choice([each for each in lives if each]).pop(0))
        for event in mixed:
            one_by_one._take([event])
        together._take(mixed)
        for each, joined in zip(alone, in_one_read, strict=True):
            pieces = [said for said in each.said if isinstance(said, bytes)]
            assert [said for said in joined.said if isinstance(said, bytes)] == (
                [b"".join(pieces)] if pieces else []
            )
            assert [said for said in joined.said if isinstance(said, str)] == [
                said for said in each.said if isinstance(said, str)
            ]
            if pieces:
                assert joined.said.index(b"".join(pieces)) == each.said.index(pieces[0])

    async def main() -> None:
        each_seed(200, history)

    run(main)


def test_a_body_is_told_before_the_connection_is_over_and_to_nobody_behind() -> None:
    async def main() -> None:
        connection, (first, second) = heard(2)
        over = ConnectionClosed(0, b"")
        connection._take(
            [DataReceived(0, b"a", end_stream=False), over, DataReceived(1, b"b", end_stream=False)]
        )
        assert (first.said, second.said) == ([b"a", "closed"], ["closed"])
        connection, (first, second) = heard(2)

        def lost() -> None:
            connection.state = ConnectionState.LOST

        first.on_data = lost
        connection._take(
            [DataReceived(0, b"a", end_stream=False), DataReceived(1, b"b", end_stream=False)]
        )
        assert (first.said, second.said) == ([b"a"], [])

    run(main)


def test_last_words_of_a_task_that_a_read_woke_go_out_in_the_same_write() -> None:
    async def main() -> None:
        n_writes: list[int] = []
        woken = asyncio.get_running_loop().create_future()

        def on_request(peer: PeerStream) -> None:
            (connection,) = server.connections
            n_writes.append(connection._transport.n_writes)  # type: ignore[union-attr]
            peer.answer(b"first")
            woken.set_result(peer)

        server = PeerServer(on_request)
        network = Network(server.protocol, 0.001)
        async with anyio.create_task_group() as tasks:
            channel = WorkerClient("w", tasks, dial=network.dial)
            sink = BytesSink()
            channel.generate(b"request", (), sink, timeout_s=5)
            peer = await woken
            (connection,) = server.connections
            peer.say(b"last")
            peer.finish()
            assert await sink.done() == OK
            # Its headers, both messages and its trailers.
            assert connection._transport.n_writes == n_writes[0] + 1  # type: ignore[union-attr]
            assert sink.messages == [b"first", b"last"]
            channel.close()
            tasks.cancel_scope.cancel()

    run(main)


def test_a_write_outside_a_read_is_in_the_next_turn() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        coalescer = write_coalescer(loop)
        assert write_coalescer(loop) is coalescer
        order: list[str] = []
        coalescer.n_reading = 1
        coalescer.soon(loop, lambda: order.append("write"))
        loop.call_soon(order.append, "woken")
        coalescer.n_reading = 0
        coalescer.release(loop)
        coalescer.soon(loop, lambda: order.append("later"))
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        assert order == ["woken", "write", "later"]

    run(main)


def test_a_loop_that_is_over_is_not_kept() -> None:
    async def main() -> weakref.ref[asyncio.AbstractEventLoop]:
        loop = asyncio.get_running_loop()
        write_coalescer(loop)
        return weakref.ref(loop)

    loop = run(main)
    gc.collect()
    assert loop() is None
