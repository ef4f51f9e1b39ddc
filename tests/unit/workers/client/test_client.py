"""A worker's client: how long it waits for an answer, and for a peer that has vanished."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.address import Address
from slagate.proto.rpc.sinks import Call, Sink
from slagate.proto.rpc.status import Metadata
from slagate.workers.client import client
from slagate.workers.client.client import connect_worker
from slagate.workers.errors import WorkerError
from slagate.workers.server import serve_worker
from slagate.workers.trtllm import probe as trtllm_probe
from support.http2.keepalive_clock import KeepaliveClock
from support.limits import HANG_S
from support.worker.fake import FakeWorker
from support.worker.sinks import KeepingSink

HERE = Address("127.0.0.1", 0)


class Worker(FakeWorker):
    """A fake whose health waits to be let, and whose events are one message and then silence."""

    def __init__(self) -> None:
        super().__init__()
        self.let = anyio.Event()

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        await self.let.wait()
        return oe.HealthResponse(state=oe.HEALTH_STATE_READY)

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        sink.message(oe.SubscribeKvEventsResponse().SerializeToString())
        return Silent()


class Silent:
    def cancel(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def test_a_health_check_with_a_probe_may_take_as_long_as_the_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert client.PROBE_TIMEOUT_S > trtllm_probe.TIMEOUT_S > client.CONTROL_TIMEOUT_S
    monkeypatch.setattr(client, "CONTROL_TIMEOUT_S", 0.05)

    async def main() -> None:
        worker = Worker()
        states: list[int] = []
        with anyio.fail_after(HANG_S):
            async with serve_worker(worker, HERE, grace_s=0) as at, connect_worker(str(at)) as far:

                async def probe() -> None:
                    wanted = oe.HealthRequest(include_inference_probe=True)
                    states.append((await far.health(wanted)).state)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(probe)
                    with pytest.raises(WorkerError) as raised:
                        await far.health(oe.HealthRequest())
                    assert raised.value.status.code is grpc.StatusCode.DEADLINE_EXCEEDED
                    assert states == []
                    worker.let.set()
        assert states == [oe.HEALTH_STATE_READY]

    anyio.run(main)


class Cable:
    """A connection that can be cut so that neither side is told."""

    def __init__(self) -> None:
        self.is_cut = False

    @asynccontextmanager
    async def to(self, host: str, port: int) -> AsyncIterator[str]:
        async def copy(source: anyio.abc.ByteStream, sink: anyio.abc.ByteStream) -> None:
            async for data in source:
                if not self.is_cut:
                    await sink.send(data)

        async def connected(near: anyio.abc.ByteStream) -> None:
            async with (
                near,
                await anyio.connect_tcp(host, port) as far,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(copy, near, far)
                tasks.start_soon(copy, far, near)

        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, connected)
            yield f"127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
            tasks.cancel_scope.cancel()


def test_a_stream_from_a_host_that_has_vanished_ends() -> None:
    """No byte and no end ever comes from there, as when its power is cut."""

    async def main() -> None:
        cable, sink = Cable(), KeepingSink()
        with anyio.fail_after(HANG_S):
            async with (
                serve_worker(Worker(), HERE, grace_s=0) as at,
                cable.to(at.host, at.port) as address,
                connect_worker(address) as worker,
            ):
                worker.kv_events(b"", (), sink)
                await sink.at_least(1)
                cable.is_cut = True
                (connection,) = worker.pool.connections
                clock = KeepaliveClock(connection)
                assert clock.move_on(), "it is asked whether it is there"
                clock.move_on()
                assert (await sink.done()).code is grpc.StatusCode.UNAVAILABLE

    anyio.run(main)
