"""A network in between: every call, answer and cancellation takes a while, as over gRPC."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, Sink
from slagate.proto.rpc.status import Metadata, Status
from slagate.workers.worker import Worker


class Fault(NamedTuple):
    """What goes wrong with a call: after so many messages it ends with a status, or (None) goes silent."""

    after: int
    status: Status | None


class FarWorker:
    """A worker `latency_s` away. A cancelled call ends here at once, and there when the news arrives.

    `fault` is asked for each call what will go wrong with it.
    """

    def __init__(
        self, worker: Worker, *, latency_s: float, fault: Callable[[], Fault | None]
    ) -> None:
        self._worker = worker
        self._latency_s = latency_s
        self._fault = fault

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        fault = self._fault()

        def start(far: Sink) -> Call | None:
            if fault is not None and fault.after == 0 and fault.status is not None:
                far.finish(fault.status)
                return None
            return self._worker.generate(request, metadata, far, timeout_s=timeout_s)

        return _FarCall(self._latency_s, sink, start, fault)

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        def start(far: Sink) -> Call:
            return self._worker.kv_events(request, metadata, far)

        return _FarCall(self._latency_s, sink, start, None)

    async def kv_event_sources(
        self, request: oe.GetKvEventSourcesRequest
    ) -> oe.GetKvEventSourcesResponse:
        return await self._worker.kv_event_sources(request)

    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        await anyio.sleep(self._latency_s)
        return await self._worker.abort(request)

    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        await anyio.sleep(self._latency_s)
        return await self._worker.load(request)

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        await anyio.sleep(self._latency_s)
        return await self._worker.health(request)

    async def server_info(self) -> oe.ServerInfo:
        return await self._worker.server_info()

    async def model_info(self, model: str) -> oe.ModelInfo:
        return await self._worker.model_info(model)


class _FarCall:
    def __init__(self, latency_s: float, sink: Sink, start: Any, fault: Fault | None) -> None:
        self._fault = fault
        self._n_messages = 0
        self._latency_s = latency_s
        self._sink = sink
        self._ended = False
        self._call: Call | None = None
        self._travelling: deque[tuple[Any, tuple[Any, ...]]] = deque()
        self._later(self._start, start)

    def _later(self, callback: Any, *args: Any) -> None:
        # A loop does not keep the order of timers that are due at one time, a connection does.
        self._travelling.append((callback, args))
        asyncio.get_running_loop().call_later(self._latency_s, self._arrive)

    def _arrive(self) -> None:
        callback, args = self._travelling.popleft()
        callback(*args)

    def _start(self, start: Any) -> None:
        self._call = start(self)

    def message(self, data: bytes, /) -> None:
        self._n_messages += 1
        if self._fault is None or self._n_messages <= self._fault.after:
            self._later(self._deliver, data)
        elif self._fault.status is not None and self._n_messages == self._fault.after + 1:
            self._later(self._finish, self._fault.status)
            self._later(self._cancel)

    def finish(self, status: Status, /) -> None:
        if self._fault is None or self._n_messages <= self._fault.after:
            self._later(self._finish, status)

    def _deliver(self, data: bytes) -> None:
        if not self._ended:
            self._sink.message(data)

    def _finish(self, status: Status) -> None:
        if not self._ended:
            self._ended = True
            self._sink.finish(status)

    def cancel(self) -> None:
        if not self._ended:
            self._finish(Status(grpc.StatusCode.CANCELLED, "cancelled"))
            self._later(self._cancel)

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def pause(self) -> None:
        raise AssertionError("the gateway keeps reading")

    resume = pause
