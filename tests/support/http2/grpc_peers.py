"""Real grpcio servers, sync and aio, whose calls do what the request says."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anyio
import grpc
import grpc.aio

GENERATE = "/openengine.v1.Inference/Generate"
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


class Order(NamedTuple):
    """What one call is to do, in this order."""

    n_messages: int = 0
    message_bytes: int = 40
    echo_bytes: bool = False  # one message more, the length of the request
    code: int = 0
    details: str = ""
    hang: bool = False  # instead of an end

    def request(self, padding_bytes: int = 0) -> bytes:
        return json.dumps(self._asdict()).encode() + b"\n" + bytes(padding_bytes)


class Seen(NamedTuple):
    """One call as it arrived."""

    metadata: dict[str, str | bytes]
    remaining_s: float | None
    peer: str


@dataclass
class Peer:
    """One server, and what has happened to it."""

    address: str = ""
    calls: list[Seen] = field(default_factory=list)
    hanging: anyio.Event = field(default_factory=anyio.Event)  # a call hangs
    given_up: anyio.Event = field(default_factory=anyio.Event)  # a call that hung was cancelled
    trailers: tuple[tuple[str, str | bytes], ...] = ()
    server: Any = None

    def see(self, request: bytes, context: Any) -> tuple[Order, list[bytes]]:
        """Note a call; what it is to do, and the messages of it."""
        metadata = dict(context.invocation_metadata() or ())
        self.calls.append(Seen(metadata, context.time_remaining(), context.peer()))
        order = Order(**json.loads(request.split(b"\n", 1)[0]))
        messages = [numbered(i, order.message_bytes) for i in range(order.n_messages)]
        if order.echo_bytes:
            messages.append(len(request).to_bytes(4, "big"))
        return order, messages


def numbered(number: int, n_bytes: int) -> bytes:
    """The message of this number: it differs from the others in every part."""
    return (number.to_bytes(4, "big") * (n_bytes // 4 + 1))[:n_bytes]


Serve = Callable[..., AbstractAsyncContextManager[Peer]]

_CODES = {code.value[0]: code for code in grpc.StatusCode}


@asynccontextmanager
async def aio_peer(
    *,
    options: tuple[tuple[str, Any], ...] = (),
    serves: bool = True,
    credentials: grpc.ServerCredentials | None = None,
    **server: Any,
) -> AsyncIterator[Peer]:
    """A `grpc.aio` server; without `serves` it knows no method."""
    peer = Peer()

    async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
        order, messages = peer.see(request, context)
        for message in messages:
            yield message
        if order.hang:
            peer.hanging.set()
            try:
                await anyio.sleep_forever()
            finally:
                peer.given_up.set()
        context.set_trailing_metadata(peer.trailers)
        if order.code:
            await context.abort(_CODES[order.code], order.details, peer.trailers)

    peer.server = grpc.aio.server(options=(*OPTIONS, *options), **server)
    if serves:
        peer.server.add_generic_rpc_handlers((_handlers(answer),))
    port = _bound(peer.server, credentials)
    await peer.server.start()
    peer.address = f"127.0.0.1:{port}"
    try:
        yield peer
    finally:
        await peer.server.stop(0)


@asynccontextmanager
async def sync_peer(
    *,
    options: tuple[tuple[str, Any], ...] = (),
    serves: bool = True,
    credentials: grpc.ServerCredentials | None = None,
    **server: Any,
) -> AsyncIterator[Peer]:
    """A grpcio server on threads of its own; without `serves` it knows no method."""
    peer = Peer()
    loop = asyncio.get_running_loop()

    def answer(request: bytes, context: Any) -> Iterator[bytes]:
        order, messages = peer.see(request, context)
        yield from messages
        if order.hang:
            over = threading.Event()
            if context.add_callback(over.set):
                loop.call_soon_threadsafe(peer.hanging.set)
                over.wait()
            loop.call_soon_threadsafe(peer.given_up.set)
            return
        context.set_trailing_metadata(peer.trailers)
        if order.code:
            context.abort(_CODES[order.code], order.details)

    with ThreadPoolExecutor(max_workers=256) as threads:
        peer.server = grpc.server(threads, options=(*OPTIONS, *options), **server)
        if serves:
            peer.server.add_generic_rpc_handlers((_handlers(answer),))
        port = _bound(peer.server, credentials)
        peer.server.start()
        peer.address = f"127.0.0.1:{port}"
        try:
            yield peer
        finally:
            stopped = peer.server.stop(0)
            await anyio.to_thread.run_sync(stopped.wait)


def _bound(server: Any, credentials: grpc.ServerCredentials | None) -> int:
    at = "127.0.0.1:0"
    if credentials is None:
        return int(server.add_insecure_port(at))
    return int(server.add_secure_port(at, credentials))


def _handlers(answer: Any) -> grpc.GenericRpcHandler:
    _, service, method = GENERATE.split("/")
    return grpc.method_handlers_generic_handler(
        service, {method: grpc.unary_stream_rpc_method_handler(answer)}
    )
