"""The channel to a worker against real grpcio servers, sync and aio."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import grpc
import pytest
import uvloop

from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.http2.keepalive import QUICK_PINGS, RARE_S
from slagate.proto.rpc.sinks import Call
from slagate.proto.rpc.status import Metadata, Status
from slagate.workers.client.client import WorkerClient
from support.http2.grpc_peers import Order, Peer, Serve, aio_peer, numbered, sync_peer
from support.http2.keepalive_clock import KeepaliveClock
from support.limits import HANG_S
from support.worker.bytes_sink import BytesSink

QUICK = Http2Settings(stream_window_bytes=64 << 10)


@asynccontextmanager
async def channel_to(
    address: str, settings: Http2Settings | None = None
) -> AsyncIterator[WorkerClient]:
    async with anyio.create_task_group() as tasks:
        channel = WorkerClient(address, tasks, settings=settings)
        yield channel
        channel.close()
        tasks.cancel_scope.cancel()


def start(
    channel: WorkerClient,
    order: Order,
    sink: BytesSink,
    *,
    padding_bytes: int = 0,
    metadata: Metadata = (),
    timeout_s: float | None = HANG_S,
) -> Call:
    return channel.generate(order.request(padding_bytes), metadata, sink, timeout_s=timeout_s)


async def ask(channel: WorkerClient, order: Order, **options: object) -> BytesSink:
    sink = BytesSink()
    start(channel, order, sink, **options)  # type: ignore[arg-type]
    await sink.done()
    return sink


def play(
    serve: Serve,
    scene: Callable[[Peer, WorkerClient], Awaitable[None]],
    settings: Http2Settings | None = None,
    **options: object,
) -> None:
    """A scene with a server and a channel to it, on uvloop, which the gateway runs on."""

    async def main() -> None:
        with anyio.fail_after(HANG_S):
            async with serve(**options) as peer, channel_to(peer.address, settings) as channel:
                await scene(peer, channel)
                assert repr(channel).startswith("WorkerClient(0 calls, 0 waiting"), channel

    with_uvloop = {"loop_factory": uvloop.new_event_loop}
    anyio.run(main, backend_options=with_uvloop)


either = pytest.mark.parametrize("serve", [sync_peer, aio_peer])


@either
def test_a_request_of_a_megabyte_and_more_arrives_whole(serve: Serve) -> None:
    async def scene(_peer: Peer, channel: WorkerClient) -> None:
        order = Order(echo_bytes=True)
        sink = await ask(channel, order, padding_bytes=1_400_000)
        assert sink.code is grpc.StatusCode.OK
        assert int.from_bytes(sink.messages[0], "big") == len(order.request(1_400_000))

    play(serve, scene)


@either
@pytest.mark.parametrize("settings", [None, QUICK], ids=["default", "small windows"])
def test_large_answers_come_whole_and_in_order(
    serve: Serve, settings: Http2Settings | None
) -> None:
    async def scene(_peer: Peer, channel: WorkerClient) -> None:
        sink = await ask(channel, Order(n_messages=50, message_bytes=1 << 20))
        assert sink.code is grpc.StatusCode.OK
        assert sink.messages == [numbered(i, 1 << 20) for i in range(50)]

    play(serve, scene, settings)


@either
def test_two_hundred_streams_share_one_connection(serve: Serve) -> None:
    async def scene(peer: Peer, channel: WorkerClient) -> None:
        sinks = [BytesSink() for _ in range(200)]
        calls = [
            start(channel, Order(n_messages=3, hang=True), sink, metadata=[("x-number", str(at))])
            for at, sink in enumerate(sinks)
        ]
        for sink in sinks:
            await sink.at_least(3)
        assert {seen.metadata["x-number"] for seen in peer.calls} == set(map(str, range(200)))
        assert len({seen.peer for seen in peer.calls}) == 1
        for call in calls:
            call.cancel()

    play(serve, scene)


@either
def test_a_status_comes_with_its_details_and_trailers(serve: Serve) -> None:
    details = "no such thing: 100 % \u201ctried\u201d\n, \U0001f600"

    async def scene(peer: Peer, channel: WorkerClient) -> None:
        peer.trailers = (("x-a", "b"), ("grpc-status-details-bin", b"\x00\xff\xfe"), ("y-bin", b""))
        for n_messages in (0, 2):
            sink = await ask(channel, Order(n_messages=n_messages, code=5, details=details))
            assert len(sink.messages) == n_messages
            assert sink.status == Status(grpc.StatusCode.NOT_FOUND, details, peer.trailers)

    play(serve, scene)


@either
def test_metadata_arrives_as_it_was_given(serve: Serve) -> None:
    metadata = (("x-a", "b c"), ("x-raw-bin", bytes(range(256))), ("traceparent", "00-1-2-03"))

    async def scene(peer: Peer, channel: WorkerClient) -> None:
        await ask(channel, Order(), metadata=metadata)
        assert metadata == tuple(peer.calls[0].metadata.items())[-3:] or set(metadata) <= set(
            peer.calls[0].metadata.items()
        )

    play(serve, scene)


def test_metadata_that_cannot_be_sent_ends_the_call_and_names_the_key() -> None:
    async def scene(_peer: Peer, channel: WorkerClient) -> None:
        sink = await ask(channel, Order(), metadata=[("x-a", "b\nc")])
        assert sink.code is grpc.StatusCode.INTERNAL
        assert sink.status is not None
        assert "'x-a'" in sink.status.message

    play(aio_peer, scene)


@either
def test_a_method_that_the_worker_does_not_serve_is_unimplemented(serve: Serve) -> None:
    async def scene(_peer: Peer, channel: WorkerClient) -> None:
        assert (await ask(channel, Order())).code is grpc.StatusCode.UNIMPLEMENTED

    play(serve, scene, serves=False)


@either
def test_a_cancel_before_anything_was_sent_reaches_nobody(serve: Serve) -> None:
    async def scene(peer: Peer, channel: WorkerClient) -> None:
        sink = BytesSink()
        start(channel, Order(), sink).cancel()
        assert sink.code is grpc.StatusCode.CANCELLED
        assert (await ask(channel, Order())).code is grpc.StatusCode.OK
        at_once = BytesSink()
        start(channel, Order(), at_once).cancel()
        assert (await ask(channel, Order())).code is grpc.StatusCode.OK
        assert len(peer.calls) == 2

    play(serve, scene)


@either
@pytest.mark.parametrize("n_messages", [0, 2])
def test_a_cancel_reaches_the_worker(serve: Serve, n_messages: int) -> None:
    async def scene(peer: Peer, channel: WorkerClient) -> None:
        sink = BytesSink()
        call = start(channel, Order(n_messages=n_messages, hang=True), sink)
        await peer.hanging.wait()
        await sink.at_least(n_messages)
        call.cancel()
        call.cancel()
        assert sink.code is grpc.StatusCode.CANCELLED
        await peer.given_up.wait()

    play(serve, scene)


def test_a_cancel_within_a_message_is_the_end() -> None:
    async def scene(_peer: Peer, channel: WorkerClient) -> None:
        calls: list[Call] = []
        sink = BytesSink(lambda _: calls[0].cancel())
        calls.append(start(channel, Order(n_messages=100), sink))
        assert (await sink.done()).code is grpc.StatusCode.CANCELLED
        assert len(sink.messages) == 1

    play(aio_peer, scene)


@either
def test_a_deadline_travels_as_what_is_left_of_it_and_ends_the_call_at_both_ends(
    serve: Serve,
) -> None:
    async def scene(peer: Peer, channel: WorkerClient) -> None:
        # The shortest one that leaves time for the message.
        for limit_s in (0.4, 4.0, 40.0):
            sink = await ask(channel, Order(n_messages=1, hang=True), timeout_s=limit_s)
            assert sink.code is grpc.StatusCode.DEADLINE_EXCEEDED
            if sink.messages:
                break
        assert len(sink.messages) == 1
        await peer.given_up.wait()
        remaining_s = peer.calls[-1].remaining_s
        assert remaining_s is not None
        assert 0 < remaining_s <= limit_s

    play(serve, scene)


@either
def test_a_deadline_ends_a_call_that_is_paused(serve: Serve) -> None:
    async def scene(_peer: Peer, channel: WorkerClient) -> None:
        sink = BytesSink()
        call = start(channel, Order(n_messages=9, message_bytes=1 << 20), sink, timeout_s=0.3)
        call.pause()
        assert (await sink.done()).code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert sink.messages == []

    play(serve, scene)


@either
def test_a_reader_that_stops_keeps_its_place_while_two_hundred_others_finish(serve: Serve) -> None:
    """STREAM: nothing of the stream that is not read is lost, and it holds up nobody."""
    size = 100_000

    async def scene(_peer: Peer, channel: WorkerClient) -> None:
        slow = BytesSink()
        call = start(channel, Order(n_messages=80, message_bytes=size), slow)
        await slow.at_least(1)
        call.pause()
        n_taken = len(slow.messages)
        others = [BytesSink() for _ in range(200)]
        for sink in others:
            start(channel, Order(n_messages=3, message_bytes=size), sink)
        for sink in others:
            assert (await sink.done()).code is grpc.StatusCode.OK
            assert len(sink.messages) == 3
        assert len(slow.messages) == n_taken
        assert slow.status is None
        call.resume()
        assert (await slow.done()).code is grpc.StatusCode.OK
        assert slow.messages == [numbered(i, size) for i in range(80)]

    play(serve, scene)


@either
def test_a_stream_that_is_paused_is_kept_up_to_its_window(serve: Serve) -> None:
    """MEM: what waits here does not grow, however much the worker has to say."""
    n_kept: list[int] = []

    async def scene(_peer: Peer, channel: WorkerClient) -> None:
        slow = BytesSink()
        call = start(channel, Order(n_messages=100, message_bytes=100_000), slow)
        call.pause()
        for _ in range(20):
            # Others' bytes come behind what the worker could still send of this one.
            await ask(channel, Order(n_messages=2, message_bytes=100_000))
        n_kept.append(sum(map(len, call._kept)) + call._reader.waiting_bytes)  # type: ignore[attr-defined]
        call.cancel()

    play(serve, scene, QUICK)
    # Half a window more, as the pause came before the worker had answered.
    assert 0 < n_kept[0] <= 1.5 * QUICK.stream_window_bytes


def test_a_pause_before_the_first_byte_holds() -> None:
    async def scene(peer: Peer, channel: WorkerClient) -> None:
        sink = BytesSink()
        call = start(channel, Order(n_messages=2), sink)
        call.pause()
        await ask(channel, Order())
        assert (len(peer.calls), sink.messages) == (2, [])
        call.resume()
        call.pause()
        await ask(channel, Order())
        assert sink.messages == []
        call.resume()
        assert (await sink.done()).code is grpc.StatusCode.OK
        assert len(sink.messages) == 2

    play(aio_peer, scene)


@either
def test_more_streams_than_a_connection_may_have_get_connections_of_their_own(
    serve: Serve,
) -> None:
    async def scene(peer: Peer, channel: WorkerClient) -> None:
        sinks = [BytesSink() for _ in range(25)]
        calls = [start(channel, Order(n_messages=1, hang=True), sink) for sink in sinks]
        for sink in sinks:
            await sink.at_least(1)
        assert len({seen.peer for seen in peer.calls}) == 3
        for call in calls:
            call.cancel()
        # And one that has become free takes the next.
        assert (await ask(channel, Order())).code is grpc.StatusCode.OK
        assert len({seen.peer for seen in peer.calls}) == 3

    play(serve, scene, options=(("grpc.max_concurrent_streams", 10),))


def test_calls_beyond_all_connections_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slagate.proto.rpc.connection_pool.MAX_CONNECTIONS", 2)

    async def scene(peer: Peer, channel: WorkerClient) -> None:
        sinks = [BytesSink() for _ in range(5)]
        calls = [start(channel, Order(n_messages=1, hang=True), sink) for sink in sinks]
        for sink in sinks[:4]:
            await sink.at_least(1)
        late = await ask(channel, Order(), timeout_s=0.2)
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert sinks[4].messages == []
        calls[1].cancel()
        await sinks[4].at_least(1)
        assert len(sinks[4].messages) == 1
        for call in calls:
            call.cancel()

    play(aio_peer, scene, options=(("grpc.max_concurrent_streams", 2),))


@either
@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_answers_are_read(serve: Serve, compression: grpc.Compression) -> None:
    async def scene(_peer: Peer, channel: WorkerClient) -> None:
        sink = await ask(channel, Order(n_messages=3, message_bytes=50_000))
        assert sink.code is grpc.StatusCode.OK
        assert sink.messages == [numbered(i, 50_000) for i in range(3)]

    play(serve, scene, compression=compression)


def test_a_server_that_says_goodbye_finishes_what_it_has_and_gets_nothing_new() -> None:
    async def scene(peer: Peer, channel: WorkerClient) -> None:
        sink = BytesSink()
        call = start(channel, Order(n_messages=60, message_bytes=100_000), sink)
        await sink.at_least(1)
        call.pause()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(peer.server.stop, HANG_S)
            while not channel.pool.connections[0].is_retiring:
                await anyio.lowlevel.checkpoint()
            refused = await ask(channel, Order())
            assert refused.code is grpc.StatusCode.UNAVAILABLE
            call.resume()
            assert (await sink.done()).code is grpc.StatusCode.OK
            assert len(sink.messages) == 60

    play(aio_peer, scene)


def test_a_server_that_is_stopped_at_once_ends_each_stream_once_with_unavailable() -> None:
    async def scene(peer: Peer, channel: WorkerClient) -> None:
        sinks = [BytesSink() for _ in range(20)]
        for sink in sinks:
            start(channel, Order(n_messages=1, hang=True), sink)
        for sink in sinks:
            await sink.at_least(1)
        await peer.server.stop(0)
        for sink in sinks:
            status = await sink.done()
            assert status.code is grpc.StatusCode.UNAVAILABLE
            assert status.message

    play(aio_peer, scene)


@either
def test_a_stock_server_takes_our_pings_for_as_long_as_a_stream_is_silent(serve: Serve) -> None:
    """STREAM-08: one that permits a ping in five minutes ends a connection for the fourth that is quick."""

    async def scene(peer: Peer, channel: WorkerClient) -> None:
        sink = BytesSink()
        call = start(channel, Order(n_messages=1, hang=True), sink)
        await sink.at_least(1)
        clock = KeepaliveClock(channel.pool.connections[0])
        while clock.due_s < RARE_S:
            if clock.move_on():
                await clock.answered()
        assert clock.n_pings == QUICK_PINGS
        assert sink.status is None
        assert (await ask(channel, Order())).code is grpc.StatusCode.OK
        assert len({seen.peer for seen in peer.calls}) == 1
        call.cancel()

    play(serve, scene)


@either
def test_a_server_whose_connections_age_ends_no_stream_and_refuses_no_call(serve: Serve) -> None:
    """STREAM-09: its goodbye comes in the middle of a stream that is longer, and new calls go elsewhere."""

    async def scene(peer: Peer, channel: WorkerClient) -> None:
        slow = BytesSink()
        call = start(channel, Order(n_messages=40, message_bytes=100_000), slow)
        await slow.at_least(1)
        call.pause()
        while not channel.pool.connections[0].is_retiring:
            assert (await ask(channel, Order())).code is grpc.StatusCode.OK
        for _ in range(10):
            assert (await ask(channel, Order())).code is grpc.StatusCode.OK
        assert len({seen.peer for seen in peer.calls}) > 1
        call.resume()
        assert (await slow.done()).code is grpc.StatusCode.OK
        assert slow.messages == [numbered(i, 100_000) for i in range(40)]

    grace = ("grpc.max_connection_age_grace_ms", round(HANG_S * 1000))
    aging = (("grpc.max_connection_age_ms", 400), grace)
    play(serve, scene, options=aging)
