"""The clients' side over real connections and grpcio clients: Generate, and what is passed on."""

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import grpc
import grpc.aio
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.address import Address
from slagate.proto.rpc.connection_pool import ConnectionPool, dial_unix
from slagate.proto.rpc.status import OK
from slagate.router.front.server import Front, serve_front
from slagate.router.request.metadata import PEER
from slagate.workers.runtime.listen import listen_on
from slagate.workers.worker import GENERATE
from support.builders import finished, request, token
from support.gateway.grpc_gateway import until
from support.gateway.request_path import Bench, bench
from support.http2.grpc_peers import OPTIONS
from support.limits import HANG_S
from support.worker.fake import HANG, Script, refusal

LARGE = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
ANSWER: Script = (token(1), token(2), finished(), OK)


class Served(NamedTuple):
    """A gateway over scripted workers, behind its front."""

    bench: Bench
    front: Front
    address: str
    others: list[dict[str, Any]]  # metadata of the calls that were passed on


@asynccontextmanager
async def served(folder: Path, *scripts: Script) -> AsyncIterator[Served]:
    others: list[dict[str, Any]] = []

    async def echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        others.append(dict(context.invocation_metadata()))
        context.set_trailing_metadata((("x-t", "u"),))
        async for message in messages:
            if message == b"fail":
                await context.abort(grpc.StatusCode.DATA_LOSS, "as asked")
            yield message

    local = grpc.aio.server(options=OPTIONS)
    echoes = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    local.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("other", echoes),))
    local.add_insecure_port(f"unix:{folder}/local")
    await local.start()
    try:
        async with bench("agg", agg=list(scripts)) as b, anyio.create_task_group() as tasks:
            links = ConnectionPool(
                f"{folder}/local", tasks, settings=Http2Settings(), dial=dial_unix
            )
            with closing(listen_on(Address("127.0.0.1", 0))) as listening:
                port = listening.getsockname()[1]
                async with serve_front(b.serve, listening, links, b.app.gateway.settings) as front:
                    yield Served(b, front, f"127.0.0.1:{port}", others)
            links.close("over")
            tasks.cancel_scope.cancel()
    finally:
        await local.stop(None)


Scene = Callable[[Served, grpc.aio.Channel], Awaitable[None]]


def play(folder: Path, scene: Scene, *scripts: Script) -> None:
    async def main() -> None:
        with anyio.fail_after(HANG_S):
            async with served(folder, *scripts) as s:
                async with grpc.aio.insecure_channel(s.address, options=LARGE) as channel:
                    await scene(s, channel)
                while s.front.clients or len(s.bench.app.gateway.live):
                    await anyio.lowlevel.checkpoint()

    anyio.run(main)


def generate(channel: grpc.aio.Channel, data: bytes | None = None, **options: Any) -> Any:
    message = request().SerializeToString() if data is None else data
    return channel.unary_stream(GENERATE)(message, **options)


async def tokens(call: Any) -> list[int]:
    """All that is left, up to the end, whatever it is."""
    found = []
    with contextlib.suppress(grpc.aio.AioRpcError):
        while (data := await call.read()) is not grpc.aio.EOF:
            found.append(oe.GenerateResponse.FromString(data))
    return [each.token_id for response in found for each in response.token.tokens]


def test_a_client_gets_its_answer_and_its_status(tmp_path: Path) -> None:
    async def scene(_s: Served, channel: grpc.aio.Channel) -> None:
        call = generate(channel)
        assert await tokens(call) == [1, 2]
        assert await call.code() is grpc.StatusCode.OK
        refused = generate(channel)
        assert await tokens(refused) == []
        assert await refused.code() is grpc.StatusCode.NOT_FOUND
        assert await refused.details() == "agg: no: 100 % \u00e9"

    play(tmp_path, scene, ANSWER, refusal(grpc.StatusCode.NOT_FOUND, "no: 100 % \u00e9"))


def test_two_hundred_requests_at_once_and_a_large_one(tmp_path: Path) -> None:
    async def scene(s: Served, channel: grpc.aio.Channel) -> None:
        calls = [generate(channel) for _ in range(200)]
        for call in calls:
            assert await tokens(call) == [1, 2]
        large = request(tokens=list(range(300_000, 650_000)))
        assert large.ByteSize() > 1_000_000
        await tokens(generate(channel, large.SerializeToString()))
        sent = s.bench.calls("agg")[-1].request
        assert list(sent.token_ids.ids) == list(large.token_ids.ids)

    play(tmp_path, scene, ANSWER)


def test_a_compressed_request_is_read(tmp_path: Path) -> None:
    async def scene(_s: Served, channel: grpc.aio.Channel) -> None:
        call = generate(channel, compression=grpc.Compression.Gzip)
        assert await tokens(call) == [1, 2]

    play(tmp_path, scene, ANSWER)


@pytest.mark.parametrize("n_messages", [0, 2])
def test_a_call_needs_exactly_one_request(tmp_path: Path, n_messages: int) -> None:
    async def scene(s: Served, channel: grpc.aio.Channel) -> None:
        call: Any = channel.stream_stream(GENERATE)(
            iter([request().SerializeToString()] * n_messages)
        )
        await tokens(call)
        assert "request message" in await call.details()
        assert s.bench.calls("agg") == []

    play(tmp_path, scene, ANSWER)


def test_a_clients_cancel_reaches_the_worker(tmp_path: Path) -> None:
    async def scene(s: Served, channel: grpc.aio.Channel) -> None:
        call = generate(channel)
        await call.read()
        call.cancel()
        while not s.bench.calls("agg")[0].cancelled:
            await anyio.lowlevel.checkpoint()

    play(tmp_path, scene, (token(1), HANG))


def test_a_deadline_ends_the_call_at_both_ends(tmp_path: Path) -> None:
    async def scene(s: Served, channel: grpc.aio.Channel) -> None:
        # The shortest one that leaves time for the token.
        for limit_s in (0.4, 4.0, 40.0):
            call = generate(channel, timeout=limit_s)
            found = await tokens(call)
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if found:
                break
        assert found == [1]
        while not s.bench.calls("agg")[-1].cancelled:
            await anyio.lowlevel.checkpoint()

    play(tmp_path, scene, (token(1), HANG))


def test_a_client_that_stops_reading_is_ended_and_the_others_are_not(tmp_path: Path) -> None:
    """STREAM, MEM: what waits for one client is bounded, whatever its window is."""
    large: Script = (*[token(*range(500))] * 4000, HANG)

    async def scene(s: Served, channel: grpc.aio.Channel) -> None:
        async with grpc.aio.insecure_channel(s.address, options=[("grpc.a", 1)]) as other:
            slow = generate(other)
            await slow.read()
            await until(lambda: s.bench.calls("agg")[0].cancelled)
            for _ in range(20):
                assert await tokens(generate(channel)) == [1, 2]
            await tokens(slow)
            assert await slow.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    play(tmp_path, scene, large, ANSWER)


def test_a_burst_of_connections_waits_while_the_loop_is_busy(tmp_path: Path) -> None:
    async def scene(s: Served, channel: grpc.aio.Channel) -> None:
        host, port = s.address.split(":")
        with contextlib.ExitStack() as burst:
            for _ in range(120):  # event loops let 100 wait, unless told otherwise
                burst.enter_context(socket.create_connection((host, int(port)), timeout=0.5))
            assert await tokens(generate(channel)) == [1, 2]

    play(tmp_path, scene, ANSWER)


def test_every_other_method_is_passed_on_both_ways(tmp_path: Path) -> None:
    async def scene(s: Served, channel: grpc.aio.Channel) -> None:
        call: Any = channel.stream_stream("/other/Echo")(metadata=(("x-a", "b"), (PEER, "forged")))
        for size in (3, 1_000_000, 0):
            await call.write(b"m" * size)
            assert await call.read() == b"m" * size
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert (await call.code(), dict(await call.trailing_metadata())["x-t"]) == (
            grpc.StatusCode.OK,
            "u",
        )
        assert s.others[0]["x-a"] == "b"
        assert s.others[0][PEER].startswith("127.0.0.1:")

    play(tmp_path, scene, ANSWER)


@pytest.mark.parametrize(
    ("path", "code"),
    [("/other/Echo", grpc.StatusCode.DATA_LOSS), ("/other/None", grpc.StatusCode.UNIMPLEMENTED)],
)
def test_a_status_of_the_local_server_is_passed_on(
    tmp_path: Path, path: str, code: grpc.StatusCode
) -> None:
    async def scene(_s: Served, channel: grpc.aio.Channel) -> None:
        call: Any = channel.unary_unary(path)(b"fail")
        assert await call.code() is code

    play(tmp_path, scene, ANSWER)


def test_a_client_is_told_goodbye_and_what_runs_goes_on(tmp_path: Path) -> None:
    async def scene(s: Served, channel: grpc.aio.Channel) -> None:
        call = generate(channel)
        await call.read()
        s.front.retire()
        s.bench.calls("agg")[0].say(token(2), finished(), OK)
        assert await tokens(call) == [2]
        assert await call.code() is grpc.StatusCode.OK
        await s.front.emptied()

    play(tmp_path, scene, (token(1), HANG))
