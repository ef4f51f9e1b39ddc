"""The server and the channel over a real connection: slow readers, and callbacks that break."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import grpc
import grpc.aio

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.address import Address
from slagate.proto.rpc.sinks import BufferedSink, Sink
from slagate.proto.rpc.status import OK, Metadata, Status
from slagate.workers.client.client import WorkerClient, connect_worker
from slagate.workers.errors import MAX_MESSAGE_BYTES
from slagate.workers.server import HIGH_WATER_BYTES, serve_worker
from slagate.workers.worker import GENERATE
from support.builders import finished, request, token
from support.limits import HANG_S
from support.worker.fake import FakeWorker, Scripts, refusal
from support.worker.sinks import KeepingSink

MESSAGE_BYTES = 16 << 10
N_MESSAGES = 1024
QUIET_S = 0.2


class Flood:
    """A call that sends one message a turn of the loop while it is not paused."""

    def __init__(self, sink: BufferedSink) -> None:
        self.n_sent = self.n_pauses = self.n_resumes = self.peak_bytes = 0
        self.stalled = anyio.Event()
        self._sink = sink
        self._paused = self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._send)

    def _send(self) -> None:
        if self._paused or self._cancelled:
            return
        if self.n_sent == N_MESSAGES:
            self._sink.finish(OK)
            return
        self._sink.message(self.n_sent.to_bytes(4, "big") + bytes(MESSAGE_BYTES - 4))
        self.n_sent += 1
        self.peak_bytes = max(self.peak_bytes, self._sink.n_bytes)
        self._loop.call_soon(self._send)

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            self.n_pauses += 1
            self._loop.call_later(QUIET_S, self._check_stalled, self.n_pauses)

    def _check_stalled(self, n_pauses: int) -> None:
        if self._paused and self.n_pauses == n_pauses:
            self.stalled.set()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self.n_resumes += 1
            self._loop.call_soon(self._send)

    def cancel(self) -> None:
        self._cancelled = True


class FloodWorker(FakeWorker):
    flood: Flood

    def generate(  # type: ignore[override]
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Flood:
        assert isinstance(sink, BufferedSink)
        self.flood = Flood(sink)
        return self.flood


@asynccontextmanager
async def served(worker: FakeWorker) -> AsyncIterator[str]:
    async with serve_worker(worker, Address("127.0.0.1", 0), grace_s=0) as at:
        yield str(at)


def on_the_wire(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(HANG_S):
            await main()

    anyio.run(bounded)


def test_a_client_that_does_not_read_pauses_the_engine_and_one_that_reads_again_gets_all() -> None:
    async def main() -> None:
        worker = FloodWorker()
        async with served(worker) as at, grpc.aio.insecure_channel(at) as channel:
            call = channel.unary_stream(GENERATE)(request().SerializeToString())
            numbers = [int.from_bytes((await call.read())[:4], "big")]
            flood = worker.flood
            await flood.stalled.wait()
            assert flood.n_sent < N_MESSAGES
            assert flood.peak_bytes <= HIGH_WATER_BYTES + MESSAGE_BYTES
            n_resumes = flood.n_resumes
            while (data := await call.read()) is not grpc.aio.EOF:
                numbers.append(int.from_bytes(data[:4], "big"))
            assert numbers == list(range(N_MESSAGES))
            assert flood.n_resumes > n_resumes
            assert flood.peak_bytes <= HIGH_WATER_BYTES + MESSAGE_BYTES
            assert await call.code() is grpc.StatusCode.OK

    on_the_wire(main)


@asynccontextmanager
async def connected(
    *scripts: tuple[oe.GenerateResponse | Status, ...],
) -> AsyncIterator[WorkerClient]:
    """A worker behind a server and a channel that plays these scripts in order."""
    async with (
        served(FakeWorker(scripts=Scripts(list(scripts)))) as at,
        connect_worker(at) as worker,
    ):
        yield worker


async def answer(worker: WorkerClient, sink: KeepingSink) -> KeepingSink:
    worker.generate(request("r").SerializeToString(), (), sink, timeout_s=None)
    return await sink.done()


def test_a_sink_that_breaks_ends_its_own_call_and_leaves_the_channel_to_the_others() -> None:
    def breaks(_sink: KeepingSink) -> None:
        raise ZeroDivisionError("a bug in a sink")

    async def main() -> None:
        async with connected((token(1), token(2), finished(), OK)) as worker:
            broken = await answer(worker, KeepingSink(breaks))
            assert broken.code is grpc.StatusCode.INTERNAL
            assert len(broken.messages) == 1
            good = await answer(worker, KeepingSink())
            assert (good.tokens, good.code) == ([1, 2], grpc.StatusCode.OK)

    on_the_wire(main)


def test_a_status_too_long_for_its_header_is_cut_and_keeps_its_code() -> None:
    async def main() -> None:
        async with connected(refusal(grpc.StatusCode.NOT_FOUND, "x" * 100_000)) as worker:
            sink = await answer(worker, KeepingSink())
            assert sink.status == Status(grpc.StatusCode.NOT_FOUND, "x" * MAX_MESSAGE_BYTES)

    on_the_wire(main)


class MuteWorker(FakeWorker):
    """Accepts every question and answers none."""

    async def health(self, _request: oe.HealthRequest) -> oe.HealthResponse:
        await anyio.sleep_forever()
        raise AssertionError("never")


def test_a_cancel_scope_around_a_control_call_ends_that_call_and_nothing_else() -> None:
    """grpc.aio raises a cancellation of its own making, which would end the task that set the limit."""

    async def main() -> None:
        mute = MuteWorker(role=oe.ENGINE_ROLE_AGGREGATED, scripts=Scripts([(OK,)]))
        listen = Address("127.0.0.1", 0)
        async with (
            serve_worker(mute, listen, grace_s=0) as at,
            connect_worker(str(at)) as worker,
        ):
            with anyio.move_on_after(0.2) as scope:
                await worker.health(oe.HealthRequest())
            assert scope.cancelled_caught
            assert (await worker.server_info()).engine_role == oe.ENGINE_ROLE_AGGREGATED

    anyio.run(main)
