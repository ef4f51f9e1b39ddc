"""The clients' side in virtual time: answers that wait for their client, and what a call leaves behind."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import NoReturn

import anyio
import grpc
import pytest

from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.connection_pool import ConnectionPool
from slagate.proto.rpc.sinks import Call
from slagate.proto.rpc.status import OK
from slagate.router.front.client_stream import ClientStream
from slagate.router.front.limits import FLUSH_S
from slagate.router.front.server import Front
from slagate.workers.client.client import WorkerClient
from slagate.workers.runtime.virtual_loop import run
from support.builders import finished, request, token
from support.gateway.request_path import Bench, bench
from support.http2.memory_transport import Network
from support.worker.bytes_sink import BytesSink
from support.worker.fake import HANG, Script

LONG: Script = (*(token(*range(500)) for _ in range(300)), finished(), OK)
"""More than the window of a client that does not read, and less than what may wait for it."""

Scene = Callable[[Bench, WorkerClient], Awaitable[None]]


def play(scene: Scene, *scripts: Script) -> None:
    async def main() -> None:
        async with bench("agg", agg=list(scripts)) as b, anyio.create_task_group() as tasks:
            local = Network(asyncio.Protocol)
            links = ConnectionPool("local", tasks, settings=Http2Settings(), dial=local.dial)
            front = Front(b.serve, links, b.app.gateway.settings)
            channel = WorkerClient("gw", tasks, dial=Network(front.protocol, 0.001).dial)
            await scene(b, channel)
            channel.close()
            tasks.cancel_scope.cancel()

    run(main)


def start(channel: WorkerClient, sink: BytesSink, *, timeout_s: float | None = None) -> Call:
    return channel.generate(request().SerializeToString(), (), sink, timeout_s=timeout_s)


def test_an_answer_waits_for_a_slow_client_without_a_deadline_as_long_as_any_request_may_take() -> (
    None
):
    async def scene(b: Bench, channel: WorkerClient) -> None:
        sink = BytesSink()
        call = start(channel, sink)
        call.pause()
        await anyio.sleep(0.9 * b.app.gateway.settings.default_timeout_s)
        assert b.outcomes() == {"completed": 1}
        call.resume()
        assert await sink.done() == OK
        assert len(sink.messages) == 301
        assert sum(map(len, sink.messages)) > 2 * Http2Settings().stream_window_bytes
        given_up = BytesSink()
        start(channel, given_up).pause()
        await anyio.sleep(b.app.gateway.settings.default_timeout_s + FLUSH_S)
        assert n_streams(b) == 0

    play(scene, LONG)


def n_streams(b: Bench) -> int:
    """Calls that somebody holds, besides the worker's double, which keeps those that it got."""
    b.calls("agg").clear()
    for worker in b.workers.values():
        worker.calls.clear()
    gc.collect()
    return sum(isinstance(each, ClientStream) for each in gc.get_objects())


def test_nothing_is_left_of_calls_that_were_given_up_long_before_their_deadline() -> None:
    """MEM: neither the call nor its request, of up to 8 MB, waits for the deadline."""

    async def scene(b: Bench, channel: WorkerClient) -> None:
        sinks = [BytesSink() for _ in range(10)]
        calls = [start(channel, sink, timeout_s=3600) for sink in sinks]
        for sink in sinks:
            await sink.at_least(1)
        assert n_streams(b) == 10
        for call in calls:
            call.cancel()
        await anyio.sleep(FLUSH_S * 2)
        assert b.outcomes() == {"cancelled": 10}
        assert n_streams(b) == 0

    play(scene, (token(1), HANG))


def test_a_bug_with_one_request_ends_that_one_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(b: Bench, channel: WorkerClient) -> None:
        def fail(*_: object) -> NoReturn:
            raise ZeroDivisionError

        other, failed, late = BytesSink(), BytesSink(), BytesSink()
        start(channel, other)
        await other.at_least(1)
        with monkeypatch.context() as patch:
            patch.setattr(b.app.gateway.receipts, "add_receipt", fail)
            start(channel, failed)
            assert (await failed.done()).code is grpc.StatusCode.INTERNAL
        b.calls("agg")[0].say(finished(), OK)
        assert await other.done() == OK
        start(channel, late)
        assert await late.done() == OK
        assert [each.message for each in caplog.records if each.levelname == "ERROR"] == [
            "front.bug"
        ]

    play(scene, (token(1), HANG), (token(1), finished(), OK))
