"""A worker's streams over gRPC: the only module on the gateway's worker side that carries tokens.

A first cut over `grpc.aio`; what replaces it keeps the port (`slagate.workers.worker`) as it is.
"""

import asyncio
import logging
from typing import cast

import grpc
import grpc.aio
from anyio.abc import TaskGroup

from slagate.workers.stream import Gate
from slagate.workers.worker import Call, Metadata, Sink, Status

log = logging.getLogger(__name__)

GENERATE = "/openengine.v1.Inference/Generate"
SUBSCRIBE_KV_EVENTS = "/openengine.v1.Control/SubscribeKvEvents"

MAX_MESSAGE_BYTES = 64 << 20
"""Of one message on any hop of ours, well above the gateway's own limit of a request."""


class StreamChannel:
    """Starts streams on one channel. The task group that owns the reading tasks is the caller's."""

    def __init__(self, channel: grpc.aio.Channel, tasks: TaskGroup) -> None:
        self._generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
            GENERATE
        )
        self._kv_events: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
            SUBSCRIBE_KV_EVENTS
        )
        self._tasks = tasks

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        """As `Worker.generate`."""
        return self._read(
            self._generate(request, metadata=tuple(metadata), timeout=timeout_s), sink
        )

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        """As `Worker.kv_events`."""
        return self._read(self._kv_events(request, metadata=tuple(metadata)), sink)

    def _read(self, rpc: grpc.aio.UnaryStreamCall[bytes, bytes], sink: Sink) -> Call:
        call = _RpcCall(rpc, sink)
        self._tasks.start_soon(call.run)
        return call


class _RpcCall:
    """One RPC: reads while not paused, so that HTTP/2 flow control carries the pause to the worker."""

    def __init__(self, rpc: grpc.aio.UnaryStreamCall[bytes, bytes], sink: Sink) -> None:
        self._rpc = rpc
        self._sink = sink
        self._gate = Gate()
        self._cancelled = False
        self._ended = False

    def cancel(self) -> None:
        if not self._cancelled and not self._ended:
            self._cancelled = True
            self._gate.resume()
            self._rpc.cancel()
            self._end(Status(grpc.StatusCode.CANCELLED, "cancelled by the gateway"))

    def pause(self) -> None:
        if not self._cancelled:
            self._gate.pause()

    def resume(self) -> None:
        self._gate.resume()

    def _end(self, status: Status) -> None:
        if not self._ended:
            self._ended = True
            try:
                self._sink.end(status)
            except Exception:
                # As for a message: one call's sink must not end the task group of them all.
                log.exception("channel.end")

    async def run(self) -> None:
        """Read to the end. Leaves no RPC behind, however it is left."""
        status = Status(grpc.StatusCode.CANCELLED, "the channel is closing")
        try:
            status = await self._read()
        except Exception:
            # One call's sink or one peer's answer must not end the task group of them all.
            log.exception("channel.call")
            status = Status(grpc.StatusCode.INTERNAL, "the answer could not be taken")
        except asyncio.CancelledError:
            # grpc.aio also raises this where the RPC was cancelled and this task was not.
            if not self._cancelled:
                raise
        finally:
            self._rpc.cancel()
            self._end(status)

    async def _read(self) -> Status:
        try:
            while (data := await self._rpc.read()) is not grpc.aio.EOF:
                await self._gate.wait()
                if self._cancelled:
                    break
                self._sink.message(cast("bytes", data))
            code = await self._rpc.code()
            return _status(code, await self._rpc.details(), await self._rpc.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            return _status(error.code(), error.details(), error.trailing_metadata())


def _status(code: grpc.StatusCode, details: str | None, trailers: grpc.aio.Metadata) -> Status:
    return Status(code, details or "", tuple((key, value) for key, value in trailers or ()))
