"""Cases of streams and of memory that are about the gateway's own connections, by their ids."""

import asyncio
import gc
import os
import socket
import sys
import threading
import tracemalloc
from collections import Counter
from pathlib import Path

import anyio
import anyio.lowlevel
import grpc
import pytest
import uvloop

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import OK
from slagate.router.request.settings import Settings
from slagate.workers.client.client import WorkerClient
from slagate.workers.runtime.virtual_loop import run
from support.builders import config, finished, request, token
from support.gateway.front_path import served
from support.gateway.grpc_gateway import Order, aio_worker, whole
from support.gateway.request_path import bench
from support.http2.grpc_clients import aio_client, rest
from support.http2.memory_transport import Network
from support.http2.peer import PeerServer
from support.limits import HANG_S
from support.seeds import n_in
from support.worker.bytes_sink import BytesSink
from support.worker.fake import Script, Wait

ANSWER: Script = (token(1), finished(), OK)


def test_stream_05_a_reader_that_stops_for_a_minute_while_two_hundred_others_finish() -> None:
    """STREAM-05: with little to say to it nothing ends it; none of the others waits for it."""

    async def main() -> None:
        steps = tuple(step for at in range(200) for step in (token(at), Wait(0.5)))
        async with served((*steps, finished(), OK), ANSWER) as s:
            slow = BytesSink()
            call = s.good.generate(request().SerializeToString(), (), slow, timeout_s=None)
            await slow.at_least(2)
            call.pause()
            n_taken = len(slow.messages)
            began_s = anyio.current_time()
            for _ in range(200):
                assert await s.ask() == OK
            assert anyio.current_time() - began_s < 5
            await anyio.sleep(60)
            assert len(slow.messages) == n_taken
            call.resume()
            assert await slow.done() == OK
            found = [oe.GenerateResponse.FromString(each) for each in slow.messages]
            ids = [each.token_id for one in found for each in one.token.tokens]
            assert ids == list(range(200))
            await anyio.sleep(1)
            s.check_free()

    run(main)


def test_stream_05_one_message_a_second_of_a_megabyte_a_second_holds_no_more_than_its_buffer() -> (
    None
):
    """STREAM-05: the worker is slowed to what the reader takes, and nothing grows."""
    text = token(1)
    text.token.tokens[0].token = "x" * 1000

    async def main() -> None:
        burst = tuple(step for _ in range(60) for step in (*[text] * 1000, Wait(1.0)))
        async with served((*burst, finished(), OK), ANSWER) as s:
            slow = BytesSink(lambda _: call.pause())
            call = s.good.generate(request().SerializeToString(), (), slow, timeout_s=None)
            highest = 0
            for _ in range(60):
                await anyio.sleep(1)
                call.resume()
                (client,) = s.front.clients
                streams = client.connection._streams.values()
                highest = max(highest, *(each.handler.n_bytes for each in streams), 0)  # type: ignore[union-attr]
            assert Settings().max_buffer_bytes // 2 < highest < 1.2 * Settings().max_buffer_bytes
            assert slow.status is None or slow.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await s.ask() == OK
            call.cancel()
            await anyio.sleep(1)
            s.check_free()

    run(main)


def test_stream_08_an_idle_channel_says_nothing_and_then_serves_at_once() -> None:
    """STREAM-08: ten minutes without a call, and not one ping."""

    async def main() -> None:
        server = PeerServer()
        network = Network(server.protocol)
        async with anyio.create_task_group() as tasks:
            channel = WorkerClient("worker:1", tasks, dial=network.dial)

            async def ask() -> None:
                sink = BytesSink()
                channel.generate(b"x", (), sink, timeout_s=1)
                assert await sink.done() == OK

            await ask()
            await anyio.sleep(1)
            n_writes = network.links[0][0].n_writes
            await anyio.sleep(600)
            assert network.links[0][0].n_writes == n_writes
            await ask()
            assert network.n_dials == 1
            channel.close()
            tasks.cancel_scope.cancel()

    run(main)


def test_mem_02_a_worker_that_is_down_for_ten_minutes_costs_nothing_that_grows() -> None:
    """MEM-02: fifty calls a second all the while, and dials that back off; the gate takes two minutes."""
    n_minutes = n_in(gate=1, long=5)

    async def main() -> None:
        network = Network(PeerServer().protocol)
        network.refuses = "nobody listens"
        async with anyio.create_task_group() as tasks:
            channel = WorkerClient("worker:1", tasks, dial=network.dial)

            async def minutes(n_minutes: int) -> tuple[int, int]:
                for _ in range(n_minutes * 60 * 50):
                    sink = BytesSink()
                    channel.generate(b"x" * 100, (), sink, timeout_s=10)
                    assert (await sink.done()).code is grpc.StatusCode.UNAVAILABLE
                    await anyio.sleep(0.02)
                gc.collect()
                return tracemalloc.get_traced_memory()[0], len(asyncio.all_tasks())

            tracemalloc.start()
            try:
                early_bytes, early_tasks = await minutes(n_minutes)
                late_bytes, late_tasks = await minutes(n_minutes)
            finally:
                tracemalloc.stop()
            assert late_tasks <= early_tasks + 1
            assert late_bytes < early_bytes + 10_000 * n_minutes
            assert network.n_dials < 2 * n_minutes * 60
            network.refuses = ""
            channel.pool.reachable()
            sink = BytesSink()
            channel.generate(b"x", (), sink, timeout_s=10)
            assert await sink.done() == OK
            channel.close()
            tasks.cancel_scope.cancel()

    run(main)


def test_mem_04_reloads_under_light_traffic_leave_no_task_and_no_memory() -> None:
    """MEM-04: each takes a worker out or in; threads are counted too. 200 of them in `make test-long`."""
    n_late = n_in(gate=60, long=200)

    async def main() -> None:
        async with bench("agg", n_workers=2, agg=[ANSWER]) as b:
            names = [["a1:1"], ["a1:1", "a2:1"]]

            async def reloads(n_reloads: int) -> tuple[int, int, int]:
                for number in range(n_reloads):
                    found = config("agg", {"agg": {"workers": names[number % 2]}})
                    b.app.reloader.put(b.app.reloader.propose(lambda found=found: found))
                    assert (await b.call()).status.code is grpc.StatusCode.OK
                    await anyio.sleep(1.0)
                b.calls("agg").clear()
                for worker in b.workers.values():
                    worker.calls.clear()
                    worker.kv_calls.clear()
                await anyio.sleep(60)
                gc.collect()
                n_tasks = len(asyncio.all_tasks())
                return tracemalloc.get_traced_memory()[0], n_tasks, threading.active_count()

            b.app.gateway.receipts._max_receipts = 1
            tracemalloc.start()
            try:
                early = await reloads(40)
                late = await reloads(n_late)
            finally:
                tracemalloc.stop()
            assert late[1:] == early[1:]
            assert late[0] < early[0] + 1000 * n_late

    run(main)


def test_mem_07_many_large_requests_at_once_take_a_small_multiple_of_what_they_are() -> None:
    """MEM-07: 64k tokens each; and when they are over nothing of them is left."""
    n_calls = n_in(gate=12, long=50)
    data = request(tokens=[100_000 + at for at in range(65_536)]).SerializeToString()

    async def main() -> None:
        async with served((token(1), Wait(1.0), finished(), OK)) as s:

            async def some(n: int) -> None:
                sinks = [BytesSink() for _ in range(n)]
                for sink in sinks:
                    s.good.generate(data, (), sink, timeout_s=100)
                for sink in sinks:
                    assert await sink.done() == OK
                for worker in s.bench.workers.values():
                    worker.calls.clear()
                s.bench.calls("agg").clear()

            s.bench.app.gateway.receipts._max_receipts = 1
            await some(5)
            gc.collect()
            tracemalloc.start()
            try:
                before_bytes = tracemalloc.get_traced_memory()[0]
                await some(n_calls)
                peak_bytes = tracemalloc.get_traced_memory()[1] - before_bytes
                gc.collect()
                left_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
            finally:
                tracemalloc.stop()
            # The double keeps the parsed request too, which a gateway does not.
            assert peak_bytes < n_calls * len(data) * 8
            assert left_bytes < 0.1 * peak_bytes
            await anyio.sleep(1)
            s.check_free()

    run(main)


def test_mem_08_a_request_asks_no_file_no_name_and_no_control_plane(tmp_path: Path) -> None:
    """MEM-08: what is opened, looked up or connected to does not depend on how many requests there are."""
    seen: Counter[str] = Counter()
    is_on = [False]

    def audit(event: str, _args: object) -> None:
        if is_on[0] and event in ("open", "socket.getaddrinfo", "socket.connect", "os.listdir"):
            seen[event] += 1

    sys.addaudithook(audit)

    n_seen = -1

    async def main() -> None:
        nonlocal n_seen
        with anyio.fail_after(HANG_S):
            async with whole(tmp_path, aio_worker) as w, aio_client(w.address) as client:

                async def some(n_calls: int) -> None:
                    for _ in range(n_calls):
                        call = client.generate(
                            request().SerializeToString(), metadata=Order().metadata
                        )
                        assert len(await rest(call)) == 3

                await some(20)
                is_on[0] = True
                try:
                    await some(100)
                    n_seen = seen.total()
                    with open(os.devnull):  # noqa: ASYNC230 - which shows that it is looked for
                        pass
                finally:
                    is_on[0] = False
                await w.free()

    anyio.run(main)
    assert (n_seen, seen.total()) == (0, 1), seen


def test_mem_10_every_channel_and_stream_belongs_to_the_one_loop(tmp_path: Path) -> None:
    """MEM-10: no thread of the gateway runs a loop of its own."""
    loops: set[tuple[str, str]] = set()

    def trace(frame: object, _event: str, _arg: object) -> None:
        name = frame.f_code.co_name  # type: ignore[attr-defined]
        if name in ("run_forever", "run_until_complete"):
            loops.add((threading.current_thread().name, name))

    async def main() -> None:
        with anyio.fail_after(HANG_S):
            async with whole(tmp_path, aio_worker) as w, aio_client(w.address) as client:
                call = client.generate(request().SerializeToString())
                assert len(await rest(call)) == 3
                await w.free()
                # One that has a loop is seen.
                soon = anyio.lowlevel.checkpoint()
                other = threading.Thread(target=asyncio.run, args=(soon,), name="seen")
                other.start()
                await anyio.to_thread.run_sync(other.join)

    threading.setprofile(trace)  # type: ignore[arg-type]
    try:
        anyio.run(main)
    finally:
        threading.setprofile(None)
    assert loops == {("seen", "run_forever"), ("seen", "run_until_complete")}


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_peer_02_nagle_is_off_on_every_socket_that_carries_tokens(
    tmp_path: Path, loop: str
) -> None:
    """PEER-02: at both ends of the gateway, looked at on the socket."""

    async def main() -> None:
        with anyio.fail_after(HANG_S):
            async with whole(tmp_path, aio_worker) as w, aio_client(w.address) as client:
                call = client.generate(request().SerializeToString())
                assert len(await rest(call)) == 3
                (near,) = w.front.clients
                (member,) = w.app.fleet.members()
                connections = [near.connection, *member.worker.pool.connections]  # type: ignore[union-attr]
                assert len(connections) == 2
                for connection in connections:
                    assert connection._transport is not None
                    found = connection._transport.get_extra_info("socket")
                    assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1

    options = {"loop_factory": uvloop.new_event_loop} if loop == "uvloop" else {}
    anyio.run(main, backend_options=options)
