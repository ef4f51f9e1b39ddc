"""From grpcio clients to grpcio workers, sync and aio at either end, through the whole gateway."""

import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
import uvloop

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.client_call import MAX_MESSAGE_BYTES
from slagate.router.request.metadata import PEER
from slagate.router.request.settings import Settings
from slagate.workers.worker import GENERATE
from support.builders import request
from support.gateway.grpc_gateway import Order, Serve, Whole, aio_worker, sync_worker, until, whole
from support.http2.grpc_clients import Caller, Client, Connect, aio_client, rest, sync_client
from support.limits import HANG_S
from support.seeds import is_long_run

Scene = Callable[[Whole, Client], Awaitable[None]]
Play = Callable[..., None]


# Each kind of client and of worker once; all that there are in the long run.
ENDS = {"sync to aio": (sync_client, aio_worker), "aio to sync": (aio_client, sync_worker)}
if is_long_run():
    ENDS |= {"sync to sync": (sync_client, sync_worker), "aio to aio": (aio_client, aio_worker)}


@pytest.fixture(params=ENDS.values(), ids=ENDS.keys())
def ends(request: pytest.FixtureRequest) -> tuple[Connect, Serve]:
    found: tuple[Connect, Serve] = request.param
    return found


@pytest.fixture
def play(ends: tuple[Connect, Serve], tmp_path: Path) -> Play:
    return partial(_play, tmp_path, *ends)


def _play(
    folder: Path, connect: Connect, serve: Serve, scene: Scene, settings: Settings | None = None
) -> None:
    """A scene; then nothing may be held anywhere."""

    async def main() -> None:
        with anyio.fail_after(HANG_S):
            async with whole(folder, serve, settings) as w, connect(w.address) as client:
                await scene(w, client)
                await w.free()

    anyio.run(main, backend_options={"loop_factory": uvloop.new_event_loop})


def ask(client: Client, order: Order | None = None, *more: Any, **options: Any) -> Caller:
    metadata = (*(order or Order()).metadata, *more)
    return client.generate(request().SerializeToString(), metadata=metadata, **options)


def numbers(messages: list[bytes]) -> list[int]:
    found = [oe.GenerateResponse.FromString(each) for each in messages]
    return [each.token_id for one in found for each in one.token.tokens]


def test_a_request_of_more_than_a_megabyte_arrives_as_it_was(play: Play) -> None:
    async def scene(w: Whole, client: Client) -> None:
        large = request(tokens=[(i * 48_271) % 100_000 for i in range(500_000)])
        assert large.ByteSize() > 1_400_000
        call = client.generate(large.SerializeToString())
        assert numbers(await rest(call)) == [0, 1]
        assert (await call.end())[0] is grpc.StatusCode.OK
        assert w.worker.requests[-1].token_ids.ids == large.token_ids.ids

    play(scene)


def test_fifty_answers_of_a_megabyte_come_whole_and_in_order(play: Play) -> None:
    async def scene(_w: Whole, client: Client) -> None:
        call = ask(client, Order(n_messages=50, message_bytes=1 << 20))
        messages = await rest(call)
        assert (await call.end())[:2] == (grpc.StatusCode.OK, "")
        assert numbers(messages) == list(range(50))
        assert all(len(each) > 1 << 20 for each in messages[:-1])

    play(scene)


def test_two_hundred_streams_share_one_connection_at_both_ends(play: Play) -> None:
    async def scene(w: Whole, client: Client) -> None:
        calls = [ask(client, Order(n_messages=3, hang_after=3)) for _ in range(200)]
        for call in calls:
            assert [numbers([await call.read() or b""]) for _ in range(3)] == [[0], [1], [2]]
        assert len(w.front.clients) == 1
        # The other one is that of health and load.
        assert len(w.worker.peers) == 1
        for call in calls:
            call.cancel()

    play(scene)


def test_metadata_of_its_own_for_each_request(play: Play) -> None:
    """What goes to workers does; the rest is read here, binary values and their joined forms included."""

    async def scene(w: Whole, client: Client) -> None:
        calls = [
            ask(client, None, ("tracestate", f"t={at}"), ("x-any-bin", bytes((at, 255, 0))))
            for at in range(50)
        ]
        for call in calls:
            assert numbers(await rest(call)) == [0, 1]
        assert sorted(each["tracestate"] for each in w.worker.metadata) == sorted(
            f"t={at}" for at in range(50)
        )
        assert not any("x-any-bin" in each for each in w.worker.metadata)
        receipt = ask(client, None, ("slagate-receipt", "1"))
        await rest(receipt)
        assert isinstance((await receipt.end())[2]["slagate-receipt-bin"], bytes)

    play(scene)


@pytest.mark.parametrize("n_messages", [0, 2])
def test_a_workers_status_comes_with_its_details(play: Play, n_messages: int) -> None:
    """Without a message it is the only thing that the worker says: trailers alone."""

    async def scene(_w: Whole, client: Client) -> None:
        order = Order(n_messages=n_messages, code=9, details="not now: 100 % “sure”")
        call = ask(client, order)
        assert numbers(await rest(call)) == list(range(n_messages))
        code, details, _ = await call.end()
        assert (code, details) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "agg: not now: 100 % “sure”",
        )

    play(scene)


STAGES = {
    "before the worker answered": Order(hang_after=0),
    "between messages": Order(n_messages=3, hang_after=2),
    "behind the last token": Order(n_messages=2, hang_after=2),
}
stages = pytest.mark.parametrize("order", STAGES.values(), ids=STAGES.keys())


async def reach(w: Whole, call: Caller, order: Order) -> None:
    """Let the call get as far as its worker goes."""
    for _ in range(order.hang_after):
        assert await call.read() is not None
    await until(lambda: w.worker.n_running)


@stages
def test_a_cancel_reaches_the_worker_and_frees_everything(play: Play, order: Order) -> None:
    """STREAM-02: whatever the worker is at."""

    async def scene(w: Whole, client: Client) -> None:
        call = ask(client, order)
        await reach(w, call, order)
        call.cancel()
        await w.free()
        assert w.worker.n_cancelled == 1
        assert w.outcomes() == {"cancelled": 1}

    play(scene)


@stages
def test_a_client_that_goes_is_a_cancel(play: Play, ends: Any, order: Order) -> None:
    """STREAM-02: the connection is closed with calls on it."""

    async def scene(w: Whole, _client: Client) -> None:
        async with ends[0](w.address) as other:
            call = ask(other, order)
            await reach(w, call, order)
        await w.free()
        assert w.worker.n_cancelled == 1
        assert w.outcomes() == {"cancelled": 1}

    play(scene)


@stages
def test_a_deadline_reaches_the_worker_and_frees_everything(play: Play, order: Order) -> None:
    """STREAM-01: the worker gets what is left of it."""

    async def scene(w: Whole, client: Client) -> None:
        call = ask(client, order, timeout=0.5)
        await rest(call)
        assert (await call.end())[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        await w.free()
        assert w.outcomes() == {"deadline": 1}
        # On a machine that stands still the deadline may pass on the way to the worker.
        assert w.worker.n_cancelled == len(w.worker.requests) <= 1
        assert all(left_s is not None and left_s <= 0.56 for left_s in w.worker.remaining_s)

    play(scene)


def test_stream_01_without_a_deadline_the_gateways_own_limit_holds(play: Play) -> None:
    """STREAM-01: no deadline is neither an infinite one nor one that has passed."""

    async def scene(w: Whole, client: Client) -> None:
        call = ask(client)
        assert numbers(await rest(call)) == [0, 1]
        remaining_s = w.worker.remaining_s[0]
        assert remaining_s is not None
        assert 600 - HANG_S < remaining_s < 601

    play(scene)


def test_a_worker_that_never_closes_its_call_keeps_nobody(play: Play) -> None:
    async def scene(w: Whole, client: Client) -> None:
        call = ask(client, Order(finish_then_hang=True))
        assert numbers(await rest(call)) == [0, 1]
        assert (await call.end())[0] is grpc.StatusCode.OK
        await w.free()
        assert w.worker.n_cancelled == 1

    play(scene)


@pytest.mark.parametrize("path", ["/openengine.v1.Inference/Other", "/nobody.knows/It"])
def test_a_method_that_nobody_serves_is_unimplemented(play: Play, path: str) -> None:
    async def scene(_w: Whole, client: Client) -> None:
        call = client.stream(path, [b"x"])
        assert await rest(call) == []
        assert (await call.end())[0] is grpc.StatusCode.UNIMPLEMENTED

    play(scene)


def test_a_compressed_request_is_read(play: Play) -> None:
    async def scene(w: Whole, client: Client) -> None:
        data = request(tokens=[5] * 100_000).SerializeToString()
        call = client.generate(data, compression=grpc.Compression.Gzip)
        assert numbers(await rest(call)) == [0, 1]
        assert len(w.worker.requests[0].token_ids.ids) == 100_000

    play(scene)


def test_a_bomb_is_refused_before_it_goes_off(play: Play) -> None:
    async def scene(w: Whole, client: Client) -> None:
        bomb = client.generate(bytes(200 << 20), compression=grpc.Compression.Gzip)
        assert await rest(bomb) == []
        code, details, _ = await bomb.end()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "decompressed" in details
        assert w.worker.requests == []

    play(scene)


def test_a_message_over_the_limit_is_refused_with_both_numbers(play: Play) -> None:
    """STREAM-07: at its first bytes, not when all of it is here."""

    async def scene(w: Whole, client: Client) -> None:
        call = client.generate(bytes(3_000_000))
        assert await rest(call) == []
        code, details, _ = await call.end()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "3000000" in details
        assert "1000000" in details
        assert w.worker.requests == []
        assert numbers(await rest(ask(client))) == [0, 1]

    play(scene, Settings(max_request_bytes=1_000_000))


def test_stream_07_large_answers_pass_and_larger_ones_are_refused_by_name(
    ends: tuple[Connect, Serve], tmp_path: Path
) -> None:
    """STREAM-07: 6 MB, and more than any hop of ours takes."""
    serve = partial(ends[1], ("grpc.max_send_message_length", -1))

    async def scene(_w: Whole, client: Client) -> None:
        call = ask(client, Order(n_messages=1, message_bytes=6 << 20))
        assert numbers(await rest(call)) == [0]
        assert (await call.end())[0] is grpc.StatusCode.OK
        call = ask(client, Order(n_messages=1, message_bytes=MAX_MESSAGE_BYTES + 1))
        assert await rest(call) == []
        code, details, _ = await call.end()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(MAX_MESSAGE_BYTES) in details

    _play(tmp_path, ends[0], serve, scene)


def test_header_lists_over_the_limit_end_that_call_with_a_status(play: Play, ends: Any) -> None:
    async def scene(w: Whole, client: Client) -> None:
        async with ends[0](w.address, ("grpc.max_metadata_size", 1 << 20)) as other:
            call = ask(other, None, *((f"x-{i}", "y" * 1000) for i in range(40)))
            assert await rest(call) == []
            code, details, _ = await call.end()
            assert code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
            assert details
        assert w.worker.requests == []
        # As much as grpcio takes by default passes.
        call = ask(client, None, *((f"x-{i}", "y" * 1000) for i in range(7)))
        assert numbers(await rest(call)) == [0, 1]

    play(scene)


def test_a_reader_that_stops_keeps_its_place_while_two_hundred_others_finish(
    play: Play, ends: Any
) -> None:
    """STREAM-05: little of it waits, so nothing ends it."""

    async def scene(w: Whole, client: Client) -> None:
        async with ends[0](w.address) as other:
            slow = ask(other, Order(n_messages=30, message_bytes=20_000))
            assert await slow.read() is not None
            calls = [ask(client, Order(n_messages=5, message_bytes=2000)) for _ in range(200)]
            for call in calls:
                assert numbers(await rest(call)) == list(range(5))
            assert len(w.worker.peers) == 1
            assert numbers(await rest(slow)) == list(range(1, 30))
            assert (await slow.end())[0] is grpc.StatusCode.OK

    play(scene)


def test_a_reader_for_whom_too_much_waits_is_ended_with_words(play: Play, ends: Any) -> None:
    """STREAM-05, MEM: and the others of its worker's connection finish."""

    async def scene(w: Whole, client: Client) -> None:
        async with ends[0](w.address) as other:
            slow = ask(other, Order(n_messages=3000, message_bytes=20_000))
            assert await slow.read() is not None
            calls = [ask(client, Order(n_messages=5, message_bytes=2000)) for _ in range(200)]
            for call in calls:
                assert numbers(await rest(call)) == list(range(5))
            await until(lambda: "slow_client" in w.outcomes())
            await rest(slow)
            code, details, _ = await slow.end()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "reads too slowly" in details

    play(scene)


def test_streams_both_ways_go_to_the_local_server(play: Play) -> None:
    async def scene(w: Whole, client: Client) -> None:
        sent = [bytes((i,)) * 50_000 for i in range(40)]
        call = client.stream("/other/Echo", sent, metadata=(("x-a", "b"), (PEER, "forged")))
        assert await rest(call) == sent
        assert (await call.end())[0] is grpc.StatusCode.OK
        assert w.others[0]["x-a"] == "b"
        assert w.others[0][PEER].startswith("127.0.0.1:")
        failed = client.stream("/other/Echo", [b"1", b"fail", b"2"])
        assert await rest(failed) == [b"1"]
        assert (await failed.end())[:2] == (grpc.StatusCode.DATA_LOSS, "as asked")

    play(scene)


def test_generate_as_another_kind_of_call_is_the_same_on_the_wire(play: Play) -> None:
    async def scene(_w: Whole, client: Client) -> None:
        call = client.stream(GENERATE, [request().SerializeToString()])
        assert numbers(await rest(call)) == [0, 1]
        for n_requests in (0, 2):
            call = client.stream(GENERATE, [request().SerializeToString()] * n_requests)
            await rest(call)
            assert "request message" in (await call.end())[1]

    play(scene)


def test_one_after_the_other_uses_nothing_up(play: Play) -> None:
    async def scene(w: Whole, client: Client) -> None:
        for number in itertools.chain(range(3), range(60)):
            call = ask(client, Order(n_messages=number % 4))
            assert numbers(await rest(call)) == list(range(number % 4))
        assert w.outcomes() == {"completed": 63}

    play(scene)
