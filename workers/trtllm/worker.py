"""`TrtllmWorker`: the `Worker` port over TensorRT-LLM's `LLM` object, or over its double.

Each leg is one request of the engine, with a task that turns the engine's cumulative, mutable result into
OpenEngine deltas. Two more tasks poll the engine for KV events and statistics while it works. Errors mean
what they mean to TensorRT-LLM: a `RequestError` is one request's, and any other error out of a result says
that the engine is dead, and with it this worker.
"""

from collections.abc import Callable
from typing import Any

import anyio
import grpc
from anyio.abc import TaskGroup
from google.protobuf.message import DecodeError
from typing_extensions import override

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, EndedCall, Sink
from slagate.proto.rpc.status import Metadata
from slagate.workers.errors import RequestRefused, invalid, not_found, unsupported
from slagate.workers.kv_events.feed import HISTORY_BATCHES
from slagate.workers.kv_transfer.transport import KvTransport
from slagate.workers.legs import CONTEXT_ONLY
from slagate.workers.logits.processors import LogitsProcessors
from slagate.workers.runtime.clock import unix_nanos
from slagate.workers.trtllm.engine import Engine, EngineApi, EngineGoneError, KvCapacity
from slagate.workers.trtllm.events import EngineEvents
from slagate.workers.trtllm.handoffs import Handoffs
from slagate.workers.trtllm.load import attribute, load_info, rank_loads
from slagate.workers.trtllm.metrics import SILENT, Observer
from slagate.workers.trtllm.poll import STATS_PACE, Activity, NewestRows, Pace
from slagate.workers.trtllm.probe import InferenceProbe
from slagate.workers.trtllm.request import EngineRequest, LegParser
from slagate.workers.trtllm.running import SHUTTING_DOWN, EngineRequests
from slagate.workers.trtllm.server_info import WorkerIdentity, health, model_info, server_info
from slagate.workers.trtllm.stream import EngineStream
from slagate.workers.trtllm.watch import death_of
from slagate.workers.worker import Worker


class TrtllmWorker(Worker):
    """Serves one `LLM`. The task group of its tasks is the caller's, who cancels it at the end."""

    problem = ""  # why no request is accepted any more

    def __init__(
        self,
        llm: Any,
        *,
        api: EngineApi,
        identity: WorkerIdentity,
        tasks: TaskGroup,
        release_session: Callable[[int], bool] | None,
        connector: KvTransport | None = None,
        handoff_key: bytes | None = None,
        kv_history_batches: int = HISTORY_BATCHES,
        new_handoff_id: Callable[[], int] | None = None,
        observer: Observer = SILENT,
        logits: LogitsProcessors | None = None,
        capacity: KvCapacity | None = None,
        stats_pace: Pace = STATS_PACE,
    ) -> None:
        """`llm` is of the package that `api` names. Raises `ValueError` for a `handoff_key` too short.

        `release_session` frees a parked handoff by its context request id; None where none can be freed.
        `connector` reports on KV transfers. `handoff_key` seals handoffs between workers that share it.
        `kv_history_batches` of KV events are kept for each rank. `new_handoff_id` makes ids of handoffs for
        an engine that does not. `logits` are logits processors, `capacity` is what `ask_kv_capacity` said,
        `stats_pace` that of polls for statistics.
        """
        self._identity, self._observer, self._connector = identity, observer, connector
        self.fatal = anyio.Event()
        self._engine = engine = Engine(
            llm, api, capacity, new_handoff_id=new_handoff_id, measures=observer.wants_perf_metrics
        )
        self._handoffs = Handoffs(
            backend=identity.transfer_backend,
            limit_s=engine.handoff_limit_s,
            key=handoff_key,
            release=release_session,
        )
        self._parser = LegParser(engine, identity, self._handoffs, logits or LogitsProcessors())
        activity = Activity()
        self._running = EngineRequests(
            activity,
            self._handoffs,
            tasks=tasks,
            request_error=api.RequestError,
            on_fatal=self.declare_dead,
            observer=observer,
        )
        self._probe = InferenceProbe(
            engine, activity, identity.end_id, tasks=tasks, on_fatal=self.declare_dead
        )
        self._rows = NewestRows(engine.n_ranks, stats_pace)
        self._events = EngineEvents(
            engine,
            activity,
            instance_id=identity.instance_id,
            history_batches=kv_history_batches,
            observer=observer,
            on_error=self._poll_failed,
        )
        tasks.start_soon(self._events.run)
        tasks.start_soon(self._rows.poll, llm, activity, observer.stats_polled, self._poll_failed)

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"TrtllmWorker({self._identity.role_name}, {len(self._running)} live)"

    @property
    def llm(self) -> Any:
        """The engine: TensorRT-LLM's object, or its double."""
        return self._engine.llm

    @property
    def n_live(self) -> int:
        """Requests that the engine has not finished, the cancelled ones among them."""
        return len(self._running)

    @override
    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        stream = EngineStream(sink, self._handoffs)
        if self._engine.learns_blocks:
            self._engine.learn_blocks(self._rows.of_rank)
        try:
            leg = self._parse(request, metadata)
            stream.start(self._submit(leg, metadata), leg, timeout_s=timeout_s)
        except RequestRefused as refused:
            stream.finish(refused.status)
            self._observer.leg_ended(stream.outcome, None)
            return stream
        self._running.start(leg.request_id, stream)
        return stream

    def _parse(self, data: bytes, metadata: Metadata) -> EngineRequest:
        if self.problem:
            raise RequestRefused(grpc.StatusCode.UNAVAILABLE, self.problem)
        try:
            request = oe.GenerateRequest.FromString(data)
        except DecodeError:
            raise invalid("request", "is not a GenerateRequest") from None
        if request.request_id in self._running:
            raise RequestRefused(
                grpc.StatusCode.ALREADY_EXISTS, f"request_id: {request.request_id!r} is running"
            )
        return self._parser.parse_leg(request, metadata)

    def _submit(self, leg: EngineRequest, metadata: Metadata) -> Any:
        trace = {key: value for key, value in metadata if key in ("traceparent", "tracestate")}
        scheduling = None
        if leg.rank is not None and self._engine.n_ranks > 1:
            scheduling = self._engine.api.SchedulingParams(
                attention_dp_rank=leg.rank, attention_dp_relax=False
            )
        try:
            return self._engine.submit(
                leg.tokens,
                sampling_params=leg.sampling,
                streaming=leg.kind != CONTEXT_ONLY,
                disaggregated_params=leg.disaggregated,
                cache_salt=leg.cache_salt,
                scheduling_params=scheduling,
                trace_headers=trace or None,
            )
        except EngineGoneError as gone:
            self.declare_dead(gone)
            raise

    def _poll_failed(self, error: Exception) -> None:
        """A poll may be the first to learn of a dead engine; its other errors cost figures only."""
        if self._engine.tells_death(error):
            self.declare_dead(error)

    def declare_dead(self, error: Exception) -> None:
        """The engine is dead, as its watch or a request has found: end every stream with this error.

        No request is accepted any more.
        """
        if self.fatal.is_set():
            return
        self.problem = f"engine: {str(error) or type(error).__name__}"
        self._running.fail_all(error)
        self.fatal.set()

    async def drain(self, limit_s: float) -> None:
        """Accept no new request, and return when none runs and no handoff is parked here.

        What still runs after `limit_s` ends with an error. KV-event streams end at once, as they would
        never end by themselves. Control calls are still answered, so that parked handoffs can be freed.
        """
        self.problem = self.problem or SHUTTING_DOWN
        self._events.end_streams()
        with anyio.move_on_after(limit_s):
            await self._running.all_ended()
            await self._handoffs_fetched()
        self._running.fail_all(RuntimeError(SHUTTING_DOWN))

    async def _handoffs_fetched(self) -> None:
        # Only the simulated engine knows when its handoffs have been fetched.
        collected = getattr(self._engine.llm, "handoffs_collected", None)
        await (self._handoffs.none_left if collected is None else collected)()

    async def warm_up(self, limit_s: float, *, on_canary: Callable[[], None]) -> str:
        """Have every rank generate a little, then the probe one token. Why that failed, or ""."""
        failure = await self._probe.warm_up(limit_s)
        if not failure:
            on_canary()
            failure = await self._probe()
        return failure

    def counters(self) -> dict[str, int]:
        """Counts of KV events and of those that were lost, by name."""
        return self._events.counters()

    @override
    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        try:
            return self._events.subscribe(request, metadata, sink)
        except RequestRefused as refused:
            sink.finish(refused.status)
            return EndedCall()

    @override
    async def kv_event_sources(
        self, request: oe.GetKvEventSourcesRequest
    ) -> oe.GetKvEventSourcesResponse:
        # Without an address: `serve_worker` fills it in.
        ranks = list(request.data_parallel_ranks)
        return oe.GetKvEventSourcesResponse(sources=self._events.sources(ranks))

    @override
    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        target = request.WhichOneof("target")
        if target == "request_id":
            return oe.AbortResponse(status=self._running.abort(request.request_id))
        if target == "kv_session" and not self._handoffs.can_release:
            raise unsupported("kv_session", "this worker parks no handoff")
        if target == "kv_session":
            session_id = request.kv_session.session_id
            is_id = session_id.isascii() and session_id.isdigit() and len(session_id) <= 20
            if is_id and self._handoffs.release(int(session_id)):
                return oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED)
            raise not_found("kv_session", f"no session {session_id!r}")
        if target == "all_requests":
            self._running.cancel_all()
            return oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED)
        raise invalid("target", "none is given")

    @override
    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        engine, llm = self._engine, self._engine.llm
        scope: dict[str, Any] = {
            "n_ranks": engine.n_ranks,
            "n_live": len(self._running),
            "blocks_per_rank": engine.known_blocks,
            "has_host_blocks": engine.has_host_blocks,
            "used_blocks": getattr(llm, "used_blocks", None),
        }
        info = load_info(self._rows.of_rank, **scope)
        info.instance_id = self._identity.instance_id
        info.timestamp_unix_nanos = unix_nanos()
        if request.include_per_rank:
            info.ranks.extend(rank_loads(self._rows.of_rank, **scope))
        if self._identity.transfer_backend:
            n_parked = getattr(llm, "n_parked", None)
            info.active_kv_sessions = self._handoffs.n_parked if n_parked is None else n_parked
        counts = self._events.counters() | self._rows.counters()
        if self._connector is not None:
            counts |= self._connector.counters()
        # Only the simulated engine has these.
        for name in ("kv_verify_failures", "kv_transfer_failures"):
            if (count := getattr(llm, name, None)) is not None:
                counts[name] = count
        info.attributes.update({name: attribute(count) for name, count in counts.items()})
        return info

    @override
    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        return await health(
            self._identity,
            request,
            # Not by `_check_health`, which may block: `EngineWatch` calls it.
            fatal=self.problem or death_of(self._engine.llm),
            kv_problem="" if self._connector is None else self._connector.problem(),
            probe=self._probe if request.include_inference_probe else None,
        )

    @override
    async def server_info(self) -> oe.ServerInfo:
        return server_info(self._engine, self._identity, self._handoffs)

    @override
    async def model_info(self, model: str) -> oe.ModelInfo:
        if model != self._identity.model:
            raise not_found("model", f"{model!r} is not served here")
        return model_info(self._engine, self._identity)
