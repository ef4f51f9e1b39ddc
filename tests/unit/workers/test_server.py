"""The worker's server: back-pressure of a stream, and the address it gives away."""

import anyio
import grpc
import grpc.aio
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.address import Address
from slagate.proto.rpc.sinks import Call, EndedCall, Sink
from slagate.proto.rpc.status import Metadata, Status
from slagate.workers.client.client import connect_worker
from slagate.workers.client.control import CHANNEL_OPTIONS
from slagate.workers.server import serve_worker
from slagate.workers.worker import SUBSCRIBE_KV_EVENTS
from support.limits import HANG_S
from support.worker.fake import FakeWorker

MESSAGE = b"x" * 100_000
ENOUGH = 64 << 20
"""Far more than the windows and buffers of one connection hold."""


class Flood:
    """A stream that sends as long as it is not paused, a message a turn of the loop."""

    def __init__(self, sink: Sink, tasks: anyio.abc.TaskGroup) -> None:
        self.sink = sink
        self.n_bytes = 0
        self.is_cancelled = False
        self.paused = anyio.Event()
        self._open = anyio.Event()
        self._open.set()
        # At once, before the server has a call that it could pause.
        self._send()
        tasks.start_soon(self.run)

    def _send(self) -> None:
        self.n_bytes += len(MESSAGE)
        self.sink.message(MESSAGE)

    async def run(self) -> None:
        while not self.is_cancelled and self.n_bytes < ENOUGH:
            await self._open.wait()
            if not self.is_cancelled:
                self._send()
            await anyio.lowlevel.checkpoint()
        if not self.is_cancelled:
            self.sink.finish(Status(grpc.StatusCode.OK))

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self._open.set()
            self.sink.finish(Status(grpc.StatusCode.CANCELLED))

    def pause(self) -> None:
        self.paused.set()
        if self._open.is_set():
            self._open = anyio.Event()

    def resume(self) -> None:
        self._open.set()


class Worker(FakeWorker):
    """A fake whose events are a flood."""

    tasks: anyio.abc.TaskGroup
    flood: Flood

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Flood:
        self.flood = Flood(sink, self.tasks)
        return self.flood

    async def kv_event_sources(
        self, request: oe.GetKvEventSourcesRequest
    ) -> oe.GetKvEventSourcesResponse:
        return oe.GetKvEventSourcesResponse(sources=[oe.KvEventSource(transport="grpc")])


def test_a_reader_that_does_not_read_pauses_the_stream_and_gets_all_of_it_later() -> None:
    async def main() -> None:
        worker = Worker()
        with anyio.fail_after(HANG_S):
            async with (
                anyio.create_task_group() as tasks,
                serve_worker(worker, Address("127.0.0.1", 0), grace_s=0) as at,
                grpc.aio.insecure_channel(str(at)) as channel,
            ):
                worker.tasks = tasks
                call = channel.unary_stream(SUBSCRIBE_KV_EVENTS)(b"")
                await call.read()
                await worker.flood.paused.wait()
                while worker.flood._open.is_set():
                    await anyio.lowlevel.checkpoint()
                assert worker.flood.n_bytes < ENOUGH / 2
                n_read = 1
                while await call.read() is not grpc.aio.EOF:
                    n_read += 1
                assert n_read * len(MESSAGE) == worker.flood.n_bytes >= ENOUGH

    anyio.run(main)


def test_a_stream_whose_reader_is_gone_is_cancelled() -> None:
    async def main() -> None:
        worker = Worker()
        with anyio.fail_after(HANG_S):
            async with (
                anyio.create_task_group() as tasks,
                serve_worker(worker, Address("127.0.0.1", 0), grace_s=0) as at,
            ):
                worker.tasks = tasks
                async with grpc.aio.insecure_channel(str(at)) as channel:
                    call = channel.unary_stream(SUBSCRIBE_KV_EVENTS)(b"")
                    await call.read()
                while not worker.flood.is_cancelled:
                    await anyio.lowlevel.checkpoint()

    anyio.run(main)


class LargeMessages(FakeWorker):
    """A fake whose events are two messages, each far larger than what a connection holds."""

    n_over = 0  # calls that the server is done with

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        for _ in range(2):
            sink.message(b"x" * (16 << 20))
        return Counted(self)


class Counted(EndedCall):
    """The call of `LargeMessages`."""

    def __init__(self, worker: LargeMessages) -> None:
        self._worker = worker

    def cancel(self) -> None:
        self._worker.n_over += 1


def test_a_call_that_is_given_up_while_a_write_waits_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        worker = LargeMessages()
        with anyio.fail_after(HANG_S):
            async with serve_worker(worker, Address("127.0.0.1", 0), grace_s=0) as at:
                for _ in range(5):
                    async with grpc.aio.insecure_channel(str(at), options=CHANNEL_OPTIONS) as to:
                        call = to.unary_stream(SUBSCRIBE_KV_EVENTS)(b"")
                        await call.read()
                        # The second one is under way, and nobody reads it.
                        call.cancel()
                # A server that stops before that cancels the call itself, which grpc.aio logs as an error.
                while worker.n_over < 5:
                    await anyio.lowlevel.checkpoint()

    anyio.run(main)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    ("listen", "host"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("0.0.0.0", ""), ("::", "")],
)
def test_the_address_of_a_source_is_never_a_wildcard(listen: str, host: str) -> None:
    async def main() -> None:
        async with (
            serve_worker(Worker(), Address(listen, 0), grace_s=0) as at,
            connect_worker(f"localhost:{at.port}") as client,
        ):
            answer = await client.kv_event_sources(oe.GetKvEventSourcesRequest())
            (source,) = answer.sources
            assert source.HasField("endpoint_addr") == bool(host)
            assert source.endpoint_addr.host == host
            if host:
                assert (source.endpoint_addr.port, source.endpoint_addr.protocol) == (
                    at.port,
                    "grpc",
                )

    anyio.run(main)
