"""Real grpcio clients, sync and aio, behind one face: what a test does with a call of either."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Protocol

import anyio
import grpc
import grpc.aio

from slagate.workers.worker import GENERATE

OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

Metadata = Sequence[tuple[str, str | bytes]]


class Caller(Protocol):
    """One call."""

    async def read(self) -> bytes | None:
        """The next message; None at the end, whatever that is."""

    async def end(self) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
        """Code, details and trailing metadata."""

    def cancel(self) -> None: ...


class Client(Protocol):
    """One connection."""

    def generate(self, request: bytes, **options: Any) -> Caller: ...

    def stream(self, path: str, requests: Sequence[bytes], **options: Any) -> Caller: ...

    async def close(self) -> None: ...


async def rest(call: Caller) -> list[bytes]:
    """Every message that is left."""
    messages = []
    while (message := await call.read()) is not None:
        messages.append(message)
    return messages


class _AioCall:
    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> bytes | None:
        with suppress(grpc.aio.AioRpcError):
            message = await self._call.read()
            return None if message is grpc.aio.EOF else message
        return None

    async def end(self) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
        code = await self._call.code()
        trailers = dict(await self._call.trailing_metadata())
        return code, await self._call.details() or "", trailers

    def cancel(self) -> None:
        self._call.cancel()


class _AioClient:
    def __init__(self, address: str, options: Any) -> None:
        self._channel: Any = grpc.aio.insecure_channel(address, options=(*OPTIONS, *options))

    def generate(self, request: bytes, **options: Any) -> Caller:
        return _AioCall(self._channel.unary_stream(GENERATE)(request, **options))

    def stream(self, path: str, requests: Sequence[bytes], **options: Any) -> Caller:
        return _AioCall(self._channel.stream_stream(path)(iter(requests), **options))

    async def close(self) -> None:
        await self._channel.close()


class _SyncCall:
    def __init__(self, call: Any, threads: ThreadPoolExecutor) -> None:
        self._call = call
        self._threads = threads

    async def _away(self, ask: Callable[[], Any]) -> Any:
        done = anyio.Event()
        found: list[Any] = []
        token = anyio.lowlevel.current_token()

        def run() -> None:
            found.append(ask())
            with suppress(RuntimeError):  # the test has ended
                anyio.from_thread.run_sync(done.set, token=token)

        self._threads.submit(run)
        await done.wait()
        return found[0]

    def _next(self) -> bytes | None:
        with suppress(grpc.RpcError, StopIteration):
            message: bytes = next(self._call)
            return message
        return None

    async def read(self) -> bytes | None:
        message: bytes | None = await self._away(self._next)
        return message

    async def end(self) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
        code = await self._away(self._call.code)
        return code, self._call.details() or "", dict(self._call.trailing_metadata() or ())

    def cancel(self) -> None:
        self._call.cancel()


class _SyncClient:
    def __init__(self, address: str, options: Any) -> None:
        self._channel = grpc.insecure_channel(address, options=(*OPTIONS, *options))
        self._threads = ThreadPoolExecutor(max_workers=256)

    def generate(self, request: bytes, **options: Any) -> Caller:
        call: Any = self._channel.unary_stream(GENERATE)
        return _SyncCall(call(request, **options), self._threads)

    def stream(self, path: str, requests: Sequence[bytes], **options: Any) -> Caller:
        call: Any = self._channel.stream_stream(path)
        return _SyncCall(call(iter(requests), **options), self._threads)

    async def close(self) -> None:
        closed = anyio.Event()
        token = anyio.lowlevel.current_token()

        def run() -> None:
            self._channel.close()
            anyio.from_thread.run_sync(closed.set, token=token)

        threading.Thread(target=run).start()
        await closed.wait()
        self._threads.shutdown(wait=False)


Connect = Callable[..., AbstractAsyncContextManager[Client]]


@asynccontextmanager
async def sync_client(address: str, *options: tuple[str, Any]) -> AsyncIterator[Client]:
    client = _SyncClient(address, options)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def aio_client(address: str, *options: tuple[str, Any]) -> AsyncIterator[Client]:
    client = _AioClient(address, options)
    try:
        yield client
    finally:
        await client.close()
