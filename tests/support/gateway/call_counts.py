"""How many Python functions of the gateway a request passes through, and how often the module changes.

One disaggregated request from the client's socket to the last status, with HTTP/2 on both sides: over
transports in memory and on virtual time, so that nothing but the code decides. Its client and its workers
are the bare HTTP/2 engine, so that all Python of the product that runs is the gateway's. Counts are of the
third request: by then connections stand and what is kept between requests is there.

A call counts by its code object, once: what a generator or a coroutine does when it goes on is no new
call, and a comprehension, which some versions of Python call as a function, is part of the function
around it. So every version of Python counts the same. The loop of virtual time is in the product, and not
counted, as asyncio's is not.
"""

import asyncio
import inspect
import itertools
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any, NamedTuple

import anyio
import ngh2

import slagate
from slagate.proto import openengine_pb2 as oe
from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.connection_pool import ConnectionPool
from slagate.router.app import build
from slagate.router.front.server import Front
from slagate.router.generate import generate
from slagate.router.request.settings import Settings
from slagate.workers.client.client import WorkerClient
from slagate.workers.runtime import virtual_loop
from slagate.workers.worker import GENERATE, Worker
from support.builders import PROFILE, config, finished, prefill_ready, request, rng, token
from support.http2.memory_transport import Network, joined
from support.worker.fake import ROLES, FakeWorker

WARM_REQUESTS = 2
N_TOKENS = 8

_MAY_GO_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

PARTS_OF_FUNCTIONS = frozenset(("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"))

_ROOTS = tuple(
    f"{root}/{part}/"
    for root in slagate.__path__
    for part in ("proto", "workers", "pools", "router")
)


class Count(NamedTuple):
    """Python calls, and those of them that are in another module than the call before."""

    calls: int
    module_changes: int


class Counts(NamedTuple):
    """Of one disaggregated request."""

    to_first_token: Count
    further_token: Count
    to_end: Count  # from the last token on


class CallRecorder:
    """The product's functions that were called, in order."""

    def __init__(self) -> None:
        self.codes: list[CodeType] = []
        # Of generators and coroutines; kept, so that no id is used twice.
        self._running: dict[int, FrameType] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record for the time of the block."""
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(_ROOTS) or code.co_name in PARTS_OF_FUNCTIONS:
            return
        if code.co_filename == virtual_loop.__file__:
            return
        if code.co_flags & _MAY_GO_ON:
            if id(frame) in self._running:
                return
            self._running[id(frame)] = frame
        self.codes.append(code)

    def count(self, since: int, until: int) -> Count:
        """Of the calls with these numbers."""
        codes = self.codes[since:until]
        changes = sum(a.co_filename != b.co_filename for a, b in itertools.pairwise(codes))
        return Count(len(codes), changes)


class _End(asyncio.Protocol):
    """One end of an HTTP/2 connection, by the engine alone: messages come out, with their streams."""

    def __init__(self, role: ngh2.Role) -> None:
        self.engine = ngh2.Connection(role, ngh2.Configuration())
        self.messages: list[bytes] = []
        self.trailers: dict[bytes, bytes] = {}
        self._bodies: dict[int, bytes] = {}
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.engine.initiate_connection({ngh2.Setting.MAX_CONCURRENT_STREAMS: 100})
        self.flush()

    def data_received(self, data: bytes) -> None:
        self.engine.receive_data(data)
        for event in self.engine.events():
            if isinstance(event, ngh2.RequestReceived):
                self.asked(event.stream_id, dict(event.headers)[b":path"])
            elif isinstance(event, ngh2.DataReceived):
                self._bodies[event.stream_id] = self._bodies.get(event.stream_id, b"") + event.data
                self._take(event.stream_id)
            elif isinstance(event, ngh2.TrailersReceived):
                self.trailers = dict(event.headers)
        self.flush()

    def flush(self) -> None:
        assert self._transport is not None
        self._transport.write(self.engine.data_to_send())

    def asked(self, stream_id: int, path: bytes) -> None:
        """A request has begun here."""

    def say(self, stream_id: int, message: bytes) -> None:
        self.engine.send_data(stream_id, b"\0" + len(message).to_bytes(4, "big") + message)
        self.flush()

    def _take(self, stream_id: int) -> None:
        body = self._bodies[stream_id]
        while len(body) >= 5 and len(body) >= (end := 5 + int.from_bytes(body[1:5], "big")):
            self.messages.append(body[5:end])
            body = body[end:]
        self._bodies[stream_id] = body


class _FarWorker(_End):
    """Takes a Generate call, and says what the harness has it say."""

    def __init__(self) -> None:
        super().__init__(ngh2.Role.SERVER)
        self.stream_id = 0

    def asked(self, stream_id: int, path: bytes) -> None:
        assert path == GENERATE.encode(), path
        self.stream_id = stream_id
        self.messages.clear()
        answer = [(b":status", b"200"), (b"content-type", b"application/grpc")]
        self.engine.send_response(stream_id, answer, end_stream=False)

    def answer(self, response: oe.GenerateResponse) -> None:
        """One message, with the id of the leg that was asked for."""
        leg = oe.GenerateRequest.FromString(self.messages[-1])
        named = oe.GenerateResponse(request_id=leg.request_id)
        named.MergeFrom(response)
        self.say(self.stream_id, named.SerializeToString())

    def end(self) -> None:
        self.engine.send_trailers(self.stream_id, [(b"grpc-status", b"0")])
        self.flush()


class _Client(_End):
    """Sends requests, one after the other."""

    def __init__(self) -> None:
        super().__init__(ngh2.Role.CLIENT)

    def generate(self, message: bytes) -> None:
        self.messages.clear()
        self.trailers.clear()
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", GENERATE.encode()),
            (b":authority", b"gateway"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"x-slo-ttft-ms", b"500"),
            (b"x-slo-tpot-ms", b"20"),
        ]
        stream_id = self.engine.send_request(headers)
        data = b"\0" + len(message).to_bytes(4, "big") + message
        self.engine.send_data(stream_id, data, end_stream=True)
        self.flush()


class _Reached:
    """A worker whose streams go over HTTP/2, and who answers control calls at once."""

    def __init__(self, streams: WorkerClient, control: FakeWorker) -> None:
        self.generate = streams.generate
        self._control = control

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)


async def count_calls() -> Counts:
    """Serve three disaggregated requests; the counts of the last one."""
    far: dict[str, _FarWorker] = {}

    @asynccontextmanager
    async def connect(address: str) -> AsyncIterator[Worker]:
        def made() -> _FarWorker:
            far[address] = _FarWorker()
            return far[address]

        async with anyio.create_task_group() as tasks:
            streams = WorkerClient(address, tasks, dial=Network(made).dial)
            role = ROLES["prefill" if address.startswith("p") else "decode"]
            fake = FakeWorker(role=role)
            fake.info.capacity.kv_block_size = 32
            yield _Reached(streams, fake)
            streams.close()
            tasks.cancel_scope.cancel()

    pools = {
        stage: {"workers": [f"{stage[0]}1:1"], "profile": PROFILE, "tp": 1}
        for stage in ("prefill", "decode")
    }
    async with (
        build(
            config(pools=pools), Settings(), connect=connect, now_s=anyio.current_time, rng=rng()
        ) as app,
        anyio.create_task_group() as tasks,
    ):
        await anyio.sleep(0.01)
        local = ConnectionPool("local", tasks, settings=Http2Settings(), dial=Network(_Client).dial)
        front = Front(
            partial(generate, gateway=app.gateway),
            local,
            app.gateway.settings,
            counts=app.gateway.metrics.connections,
        )
        client = _Client()
        joined(client, front.protocol())
        await _settled()
        for _ in range(WARM_REQUESTS):
            await _serve(client, far)
        counts = await _serve(client, far)
        front.close()
        local.close("over")
        tasks.cancel_scope.cancel()
    return counts


async def _serve(client: _Client, far: dict[str, _FarWorker]) -> Counts:
    """One request to its end, each answer of a worker when all that came before is done."""
    recorder = CallRecorder()
    codes = recorder.codes
    with recorder.on():
        message = request(tokens=range(200))
        message.stopping.max_tokens = N_TOKENS
        client.generate(message.SerializeToString())
        await _settled()
        prefill = far["p1:1"]
        prefill.answer(prefill_ready(cached=0))
        prefill.end()
        await _settled()
        decode = far["d1:1"]
        marks = []
        for number in range(N_TOKENS):
            marks.append(len(codes))
            decode.answer(token(number))
            await _settled()
            assert len(client.messages) == number + 1
        marks.append(len(codes))
        decode.answer(finished())
        decode.end()
        await _settled()
    assert client.trailers[b"grpc-status"] == b"0", client.trailers
    further = {recorder.count(*pair) for pair in itertools.pairwise(marks[1:])}
    assert len(further) == 1, further
    return Counts(recorder.count(0, marks[1]), further.pop(), recorder.count(marks[-1], len(codes)))


async def _settled() -> None:
    """Until nothing is left to do now: virtual time goes on only then."""
    await anyio.sleep(0.001)
