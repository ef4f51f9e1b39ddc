"""The channel to a worker in virtual time: lines that go dead, and peers that misbehave."""

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import anyio
import anyio.lowlevel
import grpc
import pytest

from slagate.proto.http2.connection import WRITE_BYTES, H2Connection
from slagate.proto.http2.interfaces import (
    CANCEL,
    ENHANCE_YOUR_CALM,
    INTERNAL_ERROR,
    NO_ERROR,
    REFUSED_STREAM,
    Http2Settings,
)
from slagate.proto.rpc.client_call import MAX_MESSAGE_BYTES
from slagate.proto.rpc.connection_pool import CONNECT_LIMIT_S, MAX_BACKOFF_S, ConnectionPool
from slagate.proto.rpc.frames import prefix
from slagate.proto.rpc.sinks import Call
from slagate.proto.rpc.status import OK, Status
from slagate.workers.client.client import WorkerClient
from slagate.workers.runtime.virtual_loop import run
from support.http2.memory_transport import Network
from support.http2.peer import ANSWER, PeerServer, PeerStream, echo
from support.seeds import n_in
from support.worker.bytes_sink import BytesSink

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@asynccontextmanager
async def channel_over(network: Network, **options: object) -> AsyncIterator[WorkerClient]:
    async with anyio.create_task_group() as tasks:
        channel = WorkerClient("worker:1", tasks, dial=network.dial, **options)  # type: ignore[arg-type]
        yield channel
        channel.close()
        tasks.cancel_scope.cancel()


def start(channel: WorkerClient, sink: BytesSink, *, timeout_s: float | None = None) -> Call:
    return channel.generate(b"request", (), sink, timeout_s=timeout_s)


async def ask(channel: WorkerClient, *, timeout_s: float | None = None) -> Status:
    sink = BytesSink()
    start(channel, sink, timeout_s=timeout_s)
    return await sink.done()


Scene = Callable[[WorkerClient, PeerServer, Network], Awaitable[None]]


def play(
    scene: Scene,
    *,
    settings: Http2Settings | None = None,
    peer_settings: Http2Settings | None = None,
    latency_s: float = 0.001,
) -> None:
    async def main() -> None:
        server = PeerServer(settings=peer_settings)
        network = Network(server.protocol, latency_s)
        async with channel_over(network, settings=settings) as channel:
            await scene(channel, server, network)
        # Nothing is left behind: no stream anywhere, no timer.
        await anyio.sleep(0.1)
        assert [connection.n_streams for connection in server.connections] == [0] * len(
            server.connections
        )

    run(main)


def hold(_stream: PeerStream) -> None:
    """Say nothing."""


def test_nothing_is_connected_before_there_is_something_to_send() -> None:
    async def scene(channel: WorkerClient, _server: PeerServer, network: Network) -> None:
        await anyio.sleep(10)
        assert network.n_dials == 0
        assert await ask(channel) == OK
        assert await ask(channel) == OK
        assert network.n_dials == 1

    play(scene)


def test_one_write_carries_what_one_turn_of_the_loop_sends() -> None:
    async def scene(channel: WorkerClient, _server: PeerServer, network: Network) -> None:
        await ask(channel)
        near, far = network.links[0]
        before = near.n_writes, far.n_writes
        sinks = [BytesSink() for _ in range(50)]
        for sink in sinks:
            start(channel, sink)
        for sink in sinks:
            assert await sink.done() == OK
        assert (near.n_writes - before[0], far.n_writes - before[1]) == (1, 1)

    play(scene)


def test_a_line_that_goes_dead_ends_its_streams_once_and_the_next_call_gets_another() -> None:
    async def scene(channel: WorkerClient, server: PeerServer, network: Network) -> None:
        server.on_request = lambda stream: stream.answer(b"one")
        sinks = [BytesSink() for _ in range(3)]
        for sink in sinks:
            start(channel, sink)
        for sink in sinks:
            await sink.at_least(1)
        for end in network.links[0]:
            end.is_cut = True
        started_s = anyio.current_time()
        for sink in sinks:
            assert await sink.done() == Status(UNAVAILABLE, "no answer to a ping in 10 s")
        assert 40 <= anyio.current_time() - started_s <= 41
        server.on_request = echo
        assert await ask(channel) == OK
        assert network.n_dials == 2
        # The dead one's other end has noticed as well.
        await anyio.sleep(60)
        assert server.connections[0].n_streams == 0

    play(scene)


def test_a_silent_stream_on_a_good_line_goes_on() -> None:
    async def scene(channel: WorkerClient, server: PeerServer, _network: Network) -> None:
        server.on_request = lambda stream: stream.answer()
        sink = BytesSink()
        start(channel, sink)
        await anyio.sleep(1000)
        assert sink.status is None
        server.streams[0].say(b"late")
        server.streams[0].finish()
        assert await sink.done() == OK
        assert sink.messages == [b"late"]

    play(scene)


@pytest.mark.parametrize(("about", "after_s"), [(b"too_many_pings", 60), (b"", 30), (b"calls", 30)])
def test_a_peer_that_finds_its_pings_too_many_gets_half_of_them(about: bytes, after_s: int) -> None:
    """And no fewer where it asks for another calm."""

    async def scene(channel: WorkerClient, server: PeerServer, _network: Network) -> None:
        server.on_request = hold
        sink = BytesSink()
        start(channel, sink)
        await anyio.sleep(1)
        server.connections[0].engine.send_goaway(ENHANCE_YOUR_CALM, debug_data=about)
        server.connections[0].flush_soon()
        await anyio.sleep(1)
        assert sink.status is None  # what the peer has taken goes on
        start(channel, BytesSink())
        await anyio.sleep(1)
        assert [connection.settings.ping_after_s for connection in channel.pool.connections] == [
            30,
            after_s,
        ]

    play(scene)


def test_a_worker_that_cannot_be_reached_is_unavailable_at_once_until_it_is_tried_again() -> None:
    async def scene(channel: WorkerClient, _server: PeerServer, network: Network) -> None:
        network.refuses = "nobody listens"
        status = await ask(channel)
        assert status == Status(UNAVAILABLE, "cannot connect to worker:1: nobody listens")
        assert await ask(channel) == status
        assert network.n_dials == 1
        tried_s = []
        while anyio.current_time() < 20:
            n_dials = network.n_dials
            assert await ask(channel) == status
            if network.n_dials > n_dials:
                tried_s.append(anyio.current_time())
            await anyio.sleep(0.05)
        gaps = [later - earlier for earlier, later in pairwise(tried_s)]
        assert gaps == pytest.approx(sorted(gaps), abs=0.06)
        assert gaps[0] < 0.5
        assert MAX_BACKOFF_S <= gaps[-1] < MAX_BACKOFF_S + 0.1
        network.refuses = ""
        assert await ask(channel) == status
        channel.pool.reachable()
        assert await ask(channel) == OK

    play(scene)


def test_a_peer_that_says_nothing_is_given_up_and_so_are_its_calls() -> None:
    async def main() -> None:
        network = Network(asyncio.Protocol)
        async with channel_over(network) as channel:
            started_s = anyio.current_time()
            status = await ask(channel)
            assert status.code is UNAVAILABLE
            assert "no answer" in status.message
            assert anyio.current_time() - started_s == pytest.approx(CONNECT_LIMIT_S)
            assert network.links[0][0].is_closing()

    run(main)


def test_a_dial_that_is_given_up_takes_its_connection_along_though_it_is_in_use() -> None:
    """Its transport is freed then, as uvloop does it: nothing may write on it any more."""

    async def scene(channel: WorkerClient, server: PeerServer, network: Network) -> None:
        server.on_request = hold
        network.hangs = True
        early = BytesSink()
        start(channel, early)
        await anyio.sleep(1)
        assert len(server.streams) == 1
        assert (await early.done()).code is UNAVAILABLE
        assert anyio.current_time() == pytest.approx(CONNECT_LIMIT_S)
        await anyio.sleep(MAX_BACKOFF_S)
        start(channel, BytesSink())
        await anyio.sleep(1)
        assert (network.n_dials, len(server.streams)) == (2, 2)

    play(scene)


class Shouting(asyncio.Protocol):
    """Says something that is not HTTP/2."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\nno\r\n")


def test_a_peer_that_speaks_something_else_is_unavailable() -> None:
    async def main() -> None:
        network = Network(Shouting)
        async with channel_over(network) as channel:
            status = await ask(channel)
            assert status.code is UNAVAILABLE
            assert network.links[0][0].is_closing()

    run(main)


def test_a_call_that_the_worker_has_not_looked_at_is_sent_once_more() -> None:
    async def scene(channel: WorkerClient, server: PeerServer, _network: Network) -> None:
        def refuse_first(stream: PeerStream) -> None:
            if len(server.streams) == 1:
                stream.stream.reset(REFUSED_STREAM)
            else:
                echo(stream)

        server.on_request = refuse_first
        assert await ask(channel) == OK
        assert [stream.body for stream in server.streams] == [prefix(b"request") + b"request"] * 2
        server.on_request = lambda stream: stream.stream.reset(REFUSED_STREAM)
        assert (await ask(channel)).code is UNAVAILABLE
        assert len(server.streams) == 4

    play(scene)


@pytest.mark.parametrize(
    ("reset", "code"),
    [
        (CANCEL, grpc.StatusCode.CANCELLED),
        (REFUSED_STREAM, UNAVAILABLE),
        (INTERNAL_ERROR, grpc.StatusCode.INTERNAL),
        (NO_ERROR, grpc.StatusCode.INTERNAL),
        (ENHANCE_YOUR_CALM, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_a_stream_reset_after_a_message_ends_with_grpcs_code(
    reset: int, code: grpc.StatusCode
) -> None:
    async def scene(channel: WorkerClient, server: PeerServer, _network: Network) -> None:
        def answer_and_reset(stream: PeerStream) -> None:
            stream.answer(b"one")
            asyncio.get_running_loop().call_later(1, stream.stream.reset, reset)

        server.on_request = answer_and_reset
        sink = BytesSink()
        start(channel, sink)
        assert (await sink.done()).code is code
        assert sink.messages == [b"one"]
        assert len(server.streams) == 1

    play(scene)


def half_a_message(stream: PeerStream) -> None:
    stream.stream.respond(ANSWER)
    stream.stream.send(b"\0\0\0\0\5ab")
    stream.finish()


def too_long_a_message(stream: PeerStream) -> None:
    stream.stream.respond(ANSWER)
    stream.stream.send(b"\0" + (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))


def no_status(stream: PeerStream) -> None:
    stream.answer(b"one")
    stream.stream.end_stream()


def a_web_page(stream: PeerStream) -> None:
    stream.stream.respond([(b":status", b"200"), (b"content-type", b"text/html")])
    stream.stream.send(b"<html>")
    stream.stream.end_stream()


def a_proxys_error(stream: PeerStream) -> None:
    stream.stream.respond([(b":status", b"503")])
    stream.stream.send(b"nobody there")
    stream.stream.end_stream()


def an_unknown_encoding(stream: PeerStream) -> None:
    stream.stream.respond([*ANSWER, (b"grpc-encoding", b"snappy")])


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (half_a_message, grpc.StatusCode.INTERNAL),
        (too_long_a_message, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (no_status, grpc.StatusCode.INTERNAL),
        (a_web_page, grpc.StatusCode.UNKNOWN),
        (a_proxys_error, UNAVAILABLE),
        (an_unknown_encoding, grpc.StatusCode.UNIMPLEMENTED),
    ],
)
def test_an_answer_that_is_wrong_ends_its_call_and_leaves_the_connection_to_the_others(
    answer: Callable[[PeerStream], None], code: grpc.StatusCode
) -> None:
    async def scene(channel: WorkerClient, server: PeerServer, network: Network) -> None:
        server.on_request = hold
        other = BytesSink()
        start(channel, other)
        await anyio.sleep(1)
        server.on_request = answer
        assert (await ask(channel)).code is code
        echo(server.streams[0])
        assert await other.done() == OK
        assert network.n_dials == 1

    play(scene)


def test_headers_that_are_too_large_end_the_connection_and_each_call_once() -> None:
    async def scene(channel: WorkerClient, server: PeerServer, _network: Network) -> None:
        server.on_request = hold
        sinks = [BytesSink() for _ in range(3)]
        for sink in sinks:
            start(channel, sink)
        await anyio.sleep(1)
        many = [(b"x-%d" % at, bytes(b"y" * 1000)) for at in range(63)]
        server.streams[0].stream.respond([*ANSWER, *many, (b"z", b"z" * 1000)])
        for sink in sinks:
            assert (await sink.done()).code is UNAVAILABLE
        server.on_request = echo
        assert await ask(channel) == OK

    play(scene)


def test_calls_that_are_open_when_the_channel_closes_are_cancelled() -> None:
    async def main() -> None:
        server = PeerServer(hold)
        network = Network(server.protocol)
        sinks = [BytesSink() for _ in range(3)]
        async with channel_over(network) as channel:
            for sink in sinks[:2]:
                start(channel, sink)
            await anyio.sleep(1)
            start(channel, sinks[2])
        for sink in sinks:
            assert sink.code is grpc.StatusCode.CANCELLED
        await anyio.sleep(1)
        assert [stream.end is not None for stream in server.streams] == [True, True]
        late = BytesSink()
        start(channel, late)
        assert late.code is grpc.StatusCode.CANCELLED
        assert network.links[0][1].is_closing()

    run(main)


def test_a_connection_that_is_made_as_its_channel_closes_is_closed_too() -> None:
    async def main() -> None:
        server = PeerServer()
        network = Network(server.protocol, 0.01)
        async with anyio.create_task_group() as tasks:
            channel = WorkerClient("worker:1", tasks, dial=network.dial)
            sink = BytesSink()
            start(channel, sink)
            await anyio.sleep(0.005)  # it is dialled, and the peer has not said anything yet
            channel.close()
            await anyio.sleep(1)
            assert channel.pool.connections == []
            assert [far.is_closing() for _, far in network.links] == [True]
            assert len(server.reasons) == 1
            tasks.cancel_scope.cancel()

    run(main)


class Waiting:
    """A call that waits for a connection, and keeps its end."""

    def __init__(self) -> None:
        self.status: Status | None = None

    def start(self, connection: H2Connection, /) -> bool:
        raise AssertionError(connection)

    def end_call(self, status: Status, /) -> None:
        assert self.status is None
        self.status = status


def test_who_waits_for_a_connection_is_told_when_there_will_be_none() -> None:
    async def main() -> None:
        network = Network(PeerServer().protocol)
        network.hangs = True
        async with anyio.create_task_group() as tasks:
            links = ConnectionPool("worker:1", tasks, settings=Http2Settings(), dial=network.dial)
            early, late = Waiting(), Waiting()
            links.start(early)
            await anyio.lowlevel.checkpoint()
            links.close("it is over")
            wanted = Status(UNAVAILABLE, "cannot connect to worker:1: it is over")
            assert early.status == wanted
            links.start(late)
            assert late.status == wanted
            assert not links.waiting
            tasks.cancel_scope.cancel()

    run(main)


def test_what_was_kept_of_a_lost_stream_comes_before_its_end() -> None:
    async def scene(channel: WorkerClient, server: PeerServer, network: Network) -> None:
        server.on_request = lambda stream: stream.answer(b"one", b"two")
        sink = BytesSink()
        call = start(channel, sink)
        call.pause()
        await anyio.sleep(1)
        network.links[0][1].abort()
        await anyio.sleep(1)
        assert (sink.messages, sink.status) == ([], None)
        call.resume()
        assert (await sink.done()).code is UNAVAILABLE
        assert sink.messages == [b"one", b"two"]

    play(scene)


def test_what_comes_right_behind_a_resume_comes_behind_what_was_kept() -> None:
    async def scene(channel: WorkerClient, server: PeerServer, network: Network) -> None:
        server.on_request = lambda stream: stream.answer(b"one", b"two")
        sink = BytesSink()
        call = start(channel, sink)
        call.pause()
        await anyio.sleep(1)
        server.streams[0].say(b"three")
        server.streams[0].finish()
        await anyio.lowlevel.checkpoint()  # written, and on its way
        call.resume()
        network.links[0][1].flow()
        assert await sink.done() == OK
        assert sink.messages == [b"one", b"two", b"three"]

    play(scene)


def test_a_peer_that_does_not_read_holds_up_no_more_than_what_it_is_sent() -> None:
    """MEM: what the transport does not take stays in the engine, and goes when the call goes."""

    async def scene(channel: WorkerClient, _server: PeerServer, network: Network) -> None:
        await ask(channel)
        near, _ = network.links[0]
        near.is_stalled = True
        sink = BytesSink()
        call = channel.generate(bytes(4 << 20), (), sink, timeout_s=None)
        await anyio.sleep(1)
        engine = channel.pool.connections[0].engine
        assert WRITE_BYTES // 2 < near.n_bytes <= 2 * WRITE_BYTES
        assert engine.queued_body_size() > 3 << 20
        call.cancel()
        near.flow()
        await anyio.sleep(1)
        assert engine.queued_body_size() == 0
        assert await ask(channel) == OK

    wide = Http2Settings(stream_window_bytes=8 << 20)
    play(scene, peer_settings=wide)


def test_thousands_of_calls_leave_nothing_behind() -> None:
    """MEM: answered ones, cancelled ones, and ones that the worker resets, over one connection."""
    n_calls = n_in(gate=3000, long=10_000)

    async def scene(channel: WorkerClient, server: PeerServer, network: Network) -> None:
        def answer(stream: PeerStream) -> None:
            number = len(server.streams)
            server.streams.clear()
            stream.answer(b"m" * 40)
            if number % 4 == 0:
                stream.stream.reset()
            elif number % 4 != 1:
                stream.finish()

        async def some(n: int) -> None:
            for _ in range(n // 100):
                sinks = [BytesSink() for _ in range(100)]
                calls = [start(channel, sink) for sink in sinks]
                await anyio.sleep(0.0005)
                for call in calls[::5]:
                    call.cancel()
                await anyio.sleep(0.01)
                for call in calls:
                    call.cancel()
                await anyio.sleep(0.01)

        server.on_request = answer
        await some(1000)
        tracemalloc.start()
        try:
            before_bytes = tracemalloc.get_traced_memory()[0]
            await some(n_calls)
            gc.collect()
            grown_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
        finally:
            tracemalloc.stop()
        assert grown_bytes < 10 * n_calls
        assert network.n_dials == 1

    play(scene, peer_settings=Http2Settings(resets=(1 << 30, 1 << 30)))
