"""The way between the gateway and a simulated worker: every call, answer and cancellation takes a while."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import grpc
from typing_extensions import override

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, Sink
from slagate.proto.rpc.status import Metadata, Status
from slagate.workers.worker import Worker


class Delay:
    """Makes calls a fixed time later, in the order in which they were asked for.

    A loop does not keep the order of timers that are due at one time, a connection does. One timer serves
    all that is under way: a batch of hundreds of sequences sends at one moment.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_armed = False
        self._under_way: deque[tuple[float, Callable[..., None], tuple[Any, ...]]] = deque()

    def later(self, callback: Callable[..., None], *args: Any) -> None:
        """Call back once the time is over."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._seconds
        self._under_way.append((due_s, callback, args))
        if not self._is_armed:
            self._is_armed = True
            loop.call_at(due_s, self._arrive)

    def _arrive(self) -> None:
        under_way = self._under_way
        now_s = under_way[0][0]
        try:
            while under_way and under_way[0][0] <= now_s:
                _, callback, args = under_way.popleft()
                callback(*args)
        finally:
            self._is_armed = bool(under_way)
            if under_way:
                asyncio.get_running_loop().call_at(under_way[0][0], self._arrive)


class FarWorker(Worker):
    """A worker that everything takes `latency_s` to reach and to come back from.

    A cancelled call ends here at once, and there when the news arrives. KV events take `events_latency_s`
    to come. Between two answers about its load that differ are at least `load_every_s`.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        latency_s: float,
        events_latency_s: float | None = None,
        load_every_s: float = 0.0,
    ) -> None:
        self._worker = worker
        self._latency_s = latency_s
        self._there, self._back = Delay(latency_s), Delay(latency_s)
        self._events_back = Delay(latency_s if events_latency_s is None else events_latency_s)
        self._load_every_s = load_every_s
        self._load: oe.LoadInfo | None = None
        self._load_at_s = 0.0

    @override
    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        def start(far: Sink) -> Call:
            return self._worker.generate(request, metadata, far, timeout_s=timeout_s)

        return _FarCall(sink, start, self._there, self._back)

    @override
    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        def start(far: Sink) -> Call:
            return self._worker.kv_events(request, metadata, far)

        return _FarCall(sink, start, self._there, self._events_back)

    @override
    async def kv_event_sources(
        self, request: oe.GetKvEventSourcesRequest
    ) -> oe.GetKvEventSourcesResponse:
        return await self._worker.kv_event_sources(request)

    @override
    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        await anyio.sleep(self._latency_s)
        return await self._worker.abort(request)

    @override
    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        await anyio.sleep(self._latency_s)
        now_s = anyio.current_time()
        if self._load is None or now_s >= self._load_at_s + self._load_every_s:
            self._load, self._load_at_s = await self._worker.load(request), now_s
        return self._load

    @override
    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        await anyio.sleep(self._latency_s)
        return await self._worker.health(request)

    @override
    async def server_info(self) -> oe.ServerInfo:
        return await self._worker.server_info()

    @override
    async def model_info(self, model: str) -> oe.ModelInfo:
        return await self._worker.model_info(model)


class _FarCall(Call):
    """One call to a far worker, and the sink of its answers there."""

    def __init__(
        self, sink: Sink, start: Callable[[Sink], Call], there: Delay, back: Delay
    ) -> None:
        self._sink = sink
        self._there, self._back = there, back
        self._has_ended = False
        self._call: Call | None = None
        there.later(self._start, start)

    def _start(self, start: Callable[[Sink], Call]) -> None:
        self._call = start(self)

    def message(self, data: bytes, /) -> None:
        self._back.later(self._deliver, data)

    def finish(self, status: Status, /) -> None:
        self._back.later(self._finish, status)

    def _deliver(self, data: bytes) -> None:
        if not self._has_ended:
            self._sink.message(data)

    def _finish(self, status: Status) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._sink.finish(status)

    @override
    def cancel(self) -> None:
        if not self._has_ended:
            self._finish(Status(grpc.StatusCode.CANCELLED, "cancelled"))
            self._there.later(self._cancel)

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    @override
    def pause(self) -> None:
        raise AssertionError("the gateway keeps reading")

    @override
    def resume(self) -> None:
        raise AssertionError("the gateway keeps reading")
