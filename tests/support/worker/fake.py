"""A `Worker` that plays a script: what the router does with every answer, without an engine."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import grpc

from slagate.pools.fleet.watch import Connect
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, Sink
from slagate.proto.rpc.status import OK, Metadata, Status
from slagate.workers.errors import WorkerError
from slagate.workers.worker import SCHEMA_RELEASE
from support.builders import MODEL, model_info

ROLES = {
    "prefill": oe.ENGINE_ROLE_PREFILL,
    "decode": oe.ENGINE_ROLE_DECODE,
    "agg": oe.ENGINE_ROLE_AGGREGATED,
}


class Wait(NamedTuple):
    """Virtual seconds until the next step of a script."""

    seconds: float


class Forever(Enum):
    """Ends a script without an end of the call."""

    HANG = "hang"


HANG = Forever.HANG
Step = oe.GenerateResponse | oe.SubscribeKvEventsResponse | bytes | Status | Wait | Forever
Script = tuple[Step, ...]


@dataclass
class Scripts:
    """The scripts of a stage, played in order whichever worker is called, the last one for ever."""

    scripts: list[Script] = field(default_factory=lambda: [(OK,)])
    calls: list["FakeCall"] = field(default_factory=list)

    def next(self) -> Script:
        return self.scripts[min(len(self.calls), len(self.scripts) - 1)]


def refusal(code: grpc.StatusCode, message: str = "no") -> Script:
    return (Status(code, message),)


class Played:
    """One call that a script answers."""

    def __init__(self, data: bytes, metadata: Metadata, sink: Sink, *, script: Script) -> None:
        self.data = data
        self.metadata = metadata
        self.cancelled = False  # before the end, so that the worker had to stop
        self.has_ended = False
        self.is_paused = False
        self.n_pauses = 0
        self._sink = sink
        self._steps = deque(script)
        asyncio.get_running_loop().call_soon(self._play)

    def say(self, *steps: Step) -> None:
        """Go on with more steps; after `HANG` too."""
        self._steps.extend(steps)
        self._play()

    def _play(self) -> None:
        while self._steps and not self.is_paused and not self.has_ended:
            step = self._steps.popleft()
            if isinstance(step, Wait):
                asyncio.get_running_loop().call_later(step.seconds, self._play)
                return
            if isinstance(step, Status):
                self._end(step)
            elif not isinstance(step, Forever):
                self._sink.message(self._bytes(step))

    def _bytes(self, step: oe.GenerateResponse | oe.SubscribeKvEventsResponse | bytes) -> bytes:
        return step if isinstance(step, bytes) else step.SerializeToString()

    def _end(self, status: Status) -> None:
        self.has_ended = True
        self._sink.finish(status)

    def cancel(self) -> None:
        if not self.has_ended:
            self.cancelled = True
            self._end(Status(grpc.StatusCode.CANCELLED, "cancelled"))

    def pause(self) -> None:
        self.is_paused = True
        self.n_pauses += 1

    def resume(self) -> None:
        self.is_paused = False
        self._play()


class FakeCall(Played):
    """One scripted leg; also what the test asks about it afterwards."""

    def __init__(
        self,
        data: bytes,
        metadata: Metadata,
        sink: Sink,
        *,
        timeout_s: float | None,
        script: Script,
    ) -> None:
        super().__init__(data, metadata, sink, script=script)
        self.request = oe.GenerateRequest.FromString(data)
        self.timeout_s = timeout_s

    def _bytes(self, step: oe.GenerateResponse | oe.SubscribeKvEventsResponse | bytes) -> bytes:
        if not isinstance(step, oe.GenerateResponse):
            return super()._bytes(step)
        response = oe.GenerateResponse(request_id=self.request.request_id)
        response.MergeFrom(step)
        return response.SerializeToString()


class FakeKvCall(Played):
    """One scripted subscription to KV events."""

    def __init__(self, data: bytes, metadata: Metadata, sink: Sink, *, script: Script) -> None:
        super().__init__(data, metadata, sink, script=script)
        self.request = oe.SubscribeKvEventsRequest.FromString(data)


NO_KV_EVENTS: Script = (Status(grpc.StatusCode.UNIMPLEMENTED, "no KV events"),)


@dataclass
class FakeWorker:
    """Plays the next script at each call and records what it was asked."""

    role: oe.EngineRole.ValueType = oe.ENGINE_ROLE_PREFILL
    scripts: Scripts = field(default_factory=Scripts)
    info: oe.ServerInfo = field(default_factory=oe.ServerInfo)
    models: dict[str, oe.ModelInfo] = field(default_factory=lambda: {MODEL: model_info()})
    state: oe.HealthState.ValueType = oe.HEALTH_STATE_READY
    down: Status | None = None  # what every control call fails with
    load_fails: Status | None = None
    abort_fails: Status | None = None
    calls: list[FakeCall] = field(default_factory=list)
    aborts: list[oe.AbortRequest] = field(default_factory=list)
    # The answers to subscriptions in order, the last one for ever.
    kv_scripts: list[Script] = field(default_factory=lambda: [NO_KV_EVENTS])
    kv_calls: list[FakeKvCall] = field(default_factory=list)
    kv_sources: oe.GetKvEventSourcesResponse = field(default_factory=oe.GetKvEventSourcesResponse)
    n_server_infos: int = 0
    n_model_infos: int = 0

    def __post_init__(self) -> None:
        if not self.info.schema_release:
            self.info = oe.ServerInfo(
                engine_role=self.role,
                instance_id="i1",
                supported_models=list(self.models),
                schema_revision=1,
                minimum_client_revision=1,
                schema_release=SCHEMA_RELEASE,
                kv_connector=oe.KvConnectorInfo(transfer_backend="nixl"),
            )

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> FakeCall:
        call = FakeCall(request, metadata, sink, timeout_s=timeout_s, script=self.scripts.next())
        self.calls.append(call)
        self.scripts.calls.append(call)
        return call

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        script = self.kv_scripts[min(len(self.kv_calls), len(self.kv_scripts) - 1)]
        call = FakeKvCall(request, metadata, sink, script=script)
        self.kv_calls.append(call)
        return call

    async def kv_event_sources(
        self, request: oe.GetKvEventSourcesRequest
    ) -> oe.GetKvEventSourcesResponse:
        self._check_up()
        return self.kv_sources

    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        self.aborts.append(request)
        if self.abort_fails is not None:
            raise WorkerError(self.abort_fails)
        return oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED)

    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        self._check_up()
        if self.load_fails is not None:
            raise WorkerError(self.load_fails)
        return oe.LoadInfo(instance_id=self.info.instance_id, running_requests=len(self.calls))

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        self._check_up()
        return oe.HealthResponse(state=self.state)

    async def server_info(self) -> oe.ServerInfo:
        self._check_up()
        self.n_server_infos += 1
        return self.info

    async def model_info(self, model: str) -> oe.ModelInfo:
        self._check_up()
        self.n_model_infos += 1
        return self.models[model]

    def _check_up(self) -> None:
        if self.down is not None:
            raise WorkerError(self.down)


def connector(workers: dict[str, FakeWorker]) -> Connect:
    """A `Connect` for the watch loops that hands out these workers by address."""

    @asynccontextmanager
    async def connect(address: str) -> AsyncIterator[FakeWorker]:
        yield workers[address]

    return connect
