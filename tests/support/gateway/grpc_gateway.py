"""The whole gateway between real grpcio clients and real grpcio workers, in one process on loopback.

A worker does what the request's `traceparent` says, which the gateway passes on as it is.
"""

import json
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import grpc
import grpc.aio

from slagate.proto import openengine_pb2 as oe
from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.address import Address
from slagate.proto.rpc.connection_pool import ConnectionPool, dial_unix
from slagate.router.app import App, build
from slagate.router.front.server import Front, serve_front
from slagate.router.generate import generate
from slagate.router.request.errors import Outcome
from slagate.router.request.settings import Settings
from slagate.workers.client.client import WorkerClient, connect_worker
from slagate.workers.runtime.listen import listen_on
from slagate.workers.server import SERVER_OPTIONS
from slagate.workers.worker import SCHEMA_RELEASE
from support.builders import MODEL, config, finished, model_info, token
from support.limits import HANG_S

ORDER = "traceparent"
LOOK_S = 0.002
_CODES = {code.value[0]: code for code in grpc.StatusCode}


async def until(holds: Callable[[], object]) -> None:
    """Return once it holds. What threads and other processes do can only be looked at."""
    while not holds():  # noqa: ASYNC110 - nobody would set an event
        await anyio.sleep(LOOK_S)


class Order(NamedTuple):
    """What one call is to do, in this order."""

    n_messages: int = 2
    message_bytes: int = 0  # of text in each
    hang_after: int = -1  # say nothing more behind this message
    code: int = 0  # instead of the last message
    details: str = ""
    finish_then_hang: bool = False  # the status never comes

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((ORDER, json.dumps(self._asdict())),)


@dataclass
class OeWorker:
    """One worker and what came to it."""

    address: str = ""
    requests: list[oe.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    remaining_s: list[float | None] = field(default_factory=list)
    peers: set[str] = field(default_factory=set)
    n_running: int = 0
    n_cancelled: int = 0
    server: Any = None

    def take(self, data: bytes, context: Any) -> tuple[oe.GenerateRequest, Order]:
        request = oe.GenerateRequest.FromString(data)
        metadata = dict(context.invocation_metadata())
        self.requests.append(request)
        self.metadata.append(metadata)
        self.remaining_s.append(context.time_remaining())
        self.peers.add(context.peer())
        return request, Order(**json.loads(metadata.get(ORDER, "{}")))


def message(request: oe.GenerateRequest, number: int, n_bytes: int) -> bytes:
    made = token(number)
    made.token.tokens[0].token = "x" * n_bytes
    made.request_id = request.request_id
    return made.SerializeToString()


def last(request: oe.GenerateRequest) -> bytes:
    made = finished()
    made.request_id = request.request_id
    return made.SerializeToString()


def _control() -> dict[str, Any]:
    info = oe.ServerInfo(
        engine_role=oe.ENGINE_ROLE_AGGREGATED,
        instance_id="i1",
        supported_models=[MODEL],
        schema_revision=1,
        minimum_client_revision=1,
        schema_release=SCHEMA_RELEASE,
    )
    replies: dict[str, Any] = {
        "GetServerInfo": info,
        "GetModelInfo": model_info(),
        "GetLoad": oe.LoadInfo(instance_id="i1"),
        "Health": oe.HealthResponse(state=oe.HEALTH_STATE_READY),
        "Abort": oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED),
    }
    return {name: reply.SerializeToString() for name, reply in replies.items()}


Serve = Callable[..., AbstractAsyncContextManager[OeWorker]]


@asynccontextmanager
async def aio_worker(*options: tuple[str, Any]) -> AsyncIterator[OeWorker]:
    worker = OeWorker()

    async def generate(data: bytes, context: Any) -> AsyncIterator[bytes]:
        request, order = worker.take(data, context)
        worker.n_running += 1
        is_whole = False
        try:
            for number in range(order.n_messages):
                if number == order.hang_after:
                    await anyio.sleep_forever()
                yield message(request, number, order.message_bytes)
            if order.n_messages == order.hang_after:
                await anyio.sleep_forever()
            is_whole = not order.finish_then_hang
            if order.code:
                await context.abort(_CODES[order.code], order.details)
            yield last(request)
            if order.finish_then_hang:
                await anyio.sleep_forever()
        finally:
            # Not where it is cancelled: one that has not gone on from a yield by then is closed there.
            worker.n_cancelled += not is_whole
            worker.n_running -= 1

    replies = _control()

    def unary(name: str) -> Any:
        async def reply(_data: bytes, _context: Any) -> bytes:
            return bytes(replies[name])

        return grpc.unary_unary_rpc_method_handler(reply)

    server = worker.server = grpc.aio.server(options=(*SERVER_OPTIONS[:2], *options))
    _add(server, generate, unary)
    worker.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield worker
    finally:
        await server.stop(0)


@asynccontextmanager
async def sync_worker(*options: tuple[str, Any]) -> AsyncIterator[OeWorker]:
    worker = OeWorker()
    lock = threading.Lock()

    def generate(data: bytes, context: Any) -> Iterator[bytes]:
        over = threading.Event()
        is_whole = False
        with lock:
            request, order = worker.take(data, context)
            worker.n_running += 1
        if not context.add_callback(over.set):
            over.set()
        try:
            for number in range(order.n_messages):
                if number == order.hang_after:
                    over.wait()
                    return
                yield message(request, number, order.message_bytes)
            if order.n_messages == order.hang_after:
                over.wait()
                return
            is_whole = not order.finish_then_hang
            if order.code:
                context.abort(_CODES[order.code], order.details)
            yield last(request)
            if order.finish_then_hang:
                over.wait()
        finally:
            with lock:
                worker.n_cancelled += not is_whole
                worker.n_running -= 1

    replies = _control()

    def unary(name: str) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda _data, _context: replies[name])

    with ThreadPoolExecutor(max_workers=300) as threads:
        server = worker.server = grpc.server(threads, options=(*SERVER_OPTIONS[:2], *options))
        _add(server, generate, unary)
        worker.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield worker
        finally:
            stopped = server.stop(0)
            await anyio.to_thread.run_sync(stopped.wait)


def _add(server: Any, generate: Any, unary: Callable[[str], Any]) -> None:
    inference: dict[str, Any] = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    control = {name: unary(name) for name in _control()}
    for service, methods in (("Inference", inference), ("Control", control)):
        handler = grpc.method_handlers_generic_handler(f"openengine.v1.{service}", methods)
        server.add_generic_rpc_handlers((handler,))


class Whole(NamedTuple):
    """A running gateway and its worker."""

    app: App
    front: Front
    address: str
    worker: OeWorker
    others: list[dict[str, Any]]  # metadata of the calls that were passed on to the local server

    def outcomes(self) -> dict[str, int]:
        """Outcome -> requests, without zeros."""
        registry = self.app.gateway.metrics.registry
        counts = {
            o.value: registry.get_sample_value("slagate_requests_total", {"outcome": o.value})
            for o in Outcome
        }
        return {name: int(n) for name, n in counts.items() if n}

    def held(self) -> list[str]:
        """What is held anywhere, in words; empty when all is free."""
        members = list(self.app.fleet.members())
        found = {
            "leases": sum(
                m.ranks.inflight + m.ranks.queued_tokens + m.ranks.context_tokens for m in members
            ),
            "legs": sum(len(m.legs) for m in members),
            "live": len(self.app.gateway.live),
            "releases": self.app.gateway.releaser.n_open,
            "arriving": len(self.front.intake) + self.front.intake.n_bytes,
            "worker": self.worker.n_running,
        }
        for client in self.front.clients:
            found["client streams"] = client.connection.n_streams
            found["unsent"] = client.connection.engine.queued_body_size()
        for member in members:
            worker = member.worker
            assert isinstance(worker, WorkerClient)
            found["calls"] = worker.n_calls
            found["streams"] = sum(each.n_streams for each in worker.pool.connections)
        return [f"{n} {name}" for name, n in found.items() if n]

    async def free(self) -> None:
        """Wait until nothing is held."""
        with anyio.move_on_after(HANG_S):
            await until(lambda: not self.held())
            return
        raise AssertionError(self.held())


@asynccontextmanager
async def whole(
    folder: Path, serve: Serve, settings: Settings | None = None
) -> AsyncIterator[Whole]:
    """A gateway in front of one worker."""
    others: list[dict[str, Any]] = []

    async def echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        others.append(dict(context.invocation_metadata()))
        async for each in messages:
            if each == b"fail":
                await context.abort(grpc.StatusCode.DATA_LOSS, "as asked")
            yield each

    local = grpc.aio.server(options=SERVER_OPTIONS)
    echoes: dict[str, Any] = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    local.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("other", echoes),))
    local.add_insecure_port(f"unix:{folder}/local")
    await local.start()
    try:
        async with (
            serve() as worker,
            build(
                config("agg", {"agg": {"workers": [worker.address], "max_inflight": 1000}}),
                settings or Settings(),
                connect=connect_worker,
                now_s=anyio.current_time,
                rng=random.Random(7),
            ) as app,
            anyio.create_task_group() as tasks,
        ):
            await until(lambda: not app.fleet.not_ready())
            links = ConnectionPool(
                f"{folder}/local", tasks, settings=Http2Settings(), dial=dial_unix
            )
            with closing(listen_on(Address("127.0.0.1", 0))) as listening:
                port = listening.getsockname()[1]
                async with serve_front(
                    partial(generate, gateway=app.gateway), listening, links, app.gateway.settings
                ) as front:
                    yield Whole(app, front, f"127.0.0.1:{port}", worker, others)
            links.close("over")
            tasks.cancel_scope.cancel()
    finally:
        await local.stop(None)
