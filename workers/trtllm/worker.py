"""`TrtllmWorker`: the `Worker` port over TensorRT-LLM's `LLM` object, or over its double.

One engine request per leg, one task per request that turns the engine's cumulative, mutable result into
OpenEngine deltas, and two that poll the engine for KV events and statistics while it works. What an error
means is TensorRT-LLM's policy: a `RequestError` is its request's, anything else out of a result ends the
engine, and with it this worker.
"""

from collections.abc import Callable
from typing import Any

import anyio
import grpc
from anyio.abc import TaskGroup
from google.protobuf.message import DecodeError

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, EndedCall, Sink
from slagate.proto.rpc.status import Metadata
from slagate.workers.errors import RequestRefused
from slagate.workers.kv_events.feed import HISTORY_BATCHES
from slagate.workers.kv_transfer.transport import KvConnector
from slagate.workers.legs import CONTEXT_ONLY
from slagate.workers.logits.processors import LogitsProcessors
from slagate.workers.logits.request import RequestLogits
from slagate.workers.runtime.clock import unix_nanos
from slagate.workers.trtllm.engine import Engine, EngineApi, EngineGoneError
from slagate.workers.trtllm.events import EngineEvents
from slagate.workers.trtllm.handoffs import Handoffs, fetched
from slagate.workers.trtllm.load import attribute, load_info, rank_loads
from slagate.workers.trtllm.metrics import SILENT, Observer
from slagate.workers.trtllm.poll import STATS_PACE, Activity, NewestRows, Poller
from slagate.workers.trtllm.probe import InferenceProbe
from slagate.workers.trtllm.request import EngineRequest, parse_leg
from slagate.workers.trtllm.running import SHUTTING_DOWN, EngineRequests
from slagate.workers.trtllm.server_info import WorkerIdentity, health, model_info, server_info
from slagate.workers.trtllm.stream import EngineStream

STATS_TIMEOUT_S = 0.01


class TrtllmWorker:
    """Serves one `LLM`. The task group that owns its tasks is the caller's, who cancels it at the end."""

    def __init__(
        self,
        llm: Any,  # (tensorrt_llm ships no types, and is not installed everywhere)
        *,
        api: EngineApi,
        identity: WorkerIdentity,
        tasks: TaskGroup,
        release_session: Callable[[int], bool] | None,
        connector: KvConnector | None = None,
        handoff_key: bytes | None = None,
        kv_history_batches: int = HISTORY_BATCHES,
        new_handoff_id: Callable[[], int] | None = None,
        observer: Observer = SILENT,
        is_watched: bool = False,
        logits: LogitsProcessors | None = None,
    ) -> None:
        """`release_session` frees a parked handoff by context request id; None where none can be.

        `connector` reports on KV transfers, where that is to be had. `handoff_key` seals handoffs
        between workers that have the same one. `kv_history_batches` of KV events are kept for each rank.
        `new_handoff_id` makes ids for handoffs, where the engine does not. An engine that `is_watched` is
        not asked how it is: who watches it calls `end`. `logits` are the processors of requests.
        Raises `ValueError` for a key that is too short.
        """
        self._engine = Engine(
            llm,
            api,
            new_handoff_id=new_handoff_id,
            measures=observer.wants_perf_metrics,
        )
        self._observer = observer
        self._is_watched = is_watched
        self._identity = identity
        self._connector = connector
        self._handoffs = Handoffs(
            backend=identity.transfer_backend,
            limit_s=self._engine.handoff_limit_s,
            key=handoff_key,
            release=release_session,
        )
        self._activity = Activity()
        self._running = EngineRequests(
            self._activity,
            self._handoffs,
            tasks=tasks,
            request_error=api.RequestError,
            on_fatal=self.declare_dead,
            observer=observer,
        )
        self._probe = InferenceProbe(
            self._engine, self._activity, end_id=identity.end_id, tasks=tasks
        )
        self._rows = NewestRows(self._engine.n_ranks)
        self._events = EngineEvents(
            self._engine,
            self._activity,
            instance_id=identity.instance_id,
            history_batches=kv_history_batches,
            observer=observer,
        )
        self._logits = RequestLogits(
            logits or LogitsProcessors(),
            base=getattr(api, "LogitsProcessor", None),
            end_id=identity.end_id,
            vocab_size=identity.vocab_size,
        )
        self._problem = ""  # why no request is taken any more
        self.fatal = anyio.Event()
        tasks.start_soon(self._events.run)
        if hasattr(llm, "get_stats_async"):
            poller = Poller(
                "stats",
                lambda: llm.get_stats_async(timeout=STATS_TIMEOUT_S),
                self._take_rows,
                pace=STATS_PACE,
                activity=self._activity,
            )
            tasks.start_soon(poller.run)

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"TrtllmWorker({self._identity.role_name}, {len(self._running)} live)"

    @property
    def n_live(self) -> int:
        """Requests the engine has not finished, cancelled ones included."""
        return len(self._running)

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        """As `Worker.generate`."""
        stream = EngineStream(sink, self._handoffs)
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
        if self._problem:
            raise RequestRefused(grpc.StatusCode.UNAVAILABLE, self._problem)
        try:
            request = oe.GenerateRequest.FromString(data)
        except DecodeError:
            raise RequestRefused(
                grpc.StatusCode.INVALID_ARGUMENT, "request: is not a GenerateRequest"
            ) from None
        if request.request_id in self._running:
            raise RequestRefused(
                grpc.StatusCode.ALREADY_EXISTS, f"request_id: {request.request_id!r} is running"
            )
        return parse_leg(
            request,
            metadata,
            engine=self._engine,
            identity=self._identity,
            handoffs=self._handoffs,
            logits=self._logits,
        )

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

    def _take_rows(self, rows: list[Any]) -> None:
        self._rows.take_rows(rows)
        self._observer.stats_polled(rows)

    def declare_dead(self, error: Exception) -> None:
        """The engine is gone: no stream gets another result, and none must wait for one."""
        if self.fatal.is_set():
            return
        self._problem = f"engine: {str(error) or type(error).__name__}"
        self._running.fail_all(error)
        self.fatal.set()

    async def drain(self, limit_s: float) -> None:
        """Take no new request; return when nothing runs here and no handoff is parked here.

        What runs then still, after `limit_s`, ends with an error. KV-event streams end at once: they
        have no end of their own. Control calls go on being answered, so parked handoffs can be freed.
        """
        self._problem = self._problem or SHUTTING_DOWN
        self._events.end_streams()
        with anyio.move_on_after(limit_s):
            await self._running.all_ended()
            await self._handoffs_fetched()
        self._running.fail_all(RuntimeError(SHUTTING_DOWN))

    async def _handoffs_fetched(self) -> None:
        # The simulated engine's; TensorRT-LLM does not say when its handoffs have been fetched.
        collected = getattr(self._engine.llm, "handoffs_collected", None)
        if collected is not None:
            await collected()
        elif self._handoffs.n_parked:
            # Its memory is read by others: it goes on being polled for who is active.
            self._activity.started()
            try:
                await fetched(self._rows, self._handoffs)
            finally:
                self._activity.ended()

    async def warm_up(self, limit_s: float, *, on_canary: Callable[[], None]) -> str:
        """Have every rank generate a little, then the probe's token; why not, or "" where all is well."""
        failure = await self._probe.warm_up(limit_s)
        if not failure:
            on_canary()
            failure = await self._probe()
        return failure

    def counters(self) -> dict[str, int]:
        """What was lost of KV events on the way, by name."""
        return self._events.counters()

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        """As `Worker.kv_events`."""
        try:
            return self._events.subscribe(request, metadata, sink)
        except RequestRefused as refused:
            sink.finish(refused.status)
            return EndedCall()

    async def kv_event_sources(
        self, request: oe.GetKvEventSourcesRequest
    ) -> oe.GetKvEventSourcesResponse:
        """As `Worker.kv_event_sources`; the address is the server's to fill in."""
        return oe.GetKvEventSourcesResponse(
            sources=self._events.sources(list(request.data_parallel_ranks))
        )

    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        """As `Worker.abort`."""
        target = request.WhichOneof("target")
        if target == "request_id":
            return oe.AbortResponse(status=self._running.abort(request.request_id))
        if target == "kv_session" and not self._handoffs.can_release:
            raise RequestRefused(
                grpc.StatusCode.UNIMPLEMENTED, "kv_session: this worker parks no handoff"
            )
        if target == "kv_session":
            session_id = request.kv_session.session_id
            is_id = session_id.isascii() and session_id.isdigit() and len(session_id) <= 20
            if is_id and self._handoffs.release(int(session_id)):
                return oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED)
            raise RequestRefused(
                grpc.StatusCode.NOT_FOUND, f"kv_session: no session {session_id!r}"
            )
        if target == "all_requests":
            self._running.cancel_all()
            return oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED)
        raise RequestRefused(grpc.StatusCode.INVALID_ARGUMENT, "target: none is given")

    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        """As `Worker.load`."""
        engine, llm = self._engine, self._engine.llm
        scope: dict[str, Any] = {
            "n_ranks": engine.n_ranks,
            "n_live": len(self._running),
            "blocks_per_rank": engine.blocks_per_rank,
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
        counts = dict(self._events.counters())
        if self._connector is not None:
            counts |= self._connector.counters()
        for name in ("kv_verify_failures", "kv_transfer_failures"):
            count = getattr(llm, name, None)
            if count is not None:
                counts[name] = count
        info.attributes.update({name: attribute(count) for name, count in counts.items()})
        return info

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        """As `Worker.health`."""
        return await health(
            self._identity,
            request,
            fatal=self._problem or self._engine_failure(),
            kv_problem="" if self._connector is None else self._connector.problem(),
            probe=self._probe if request.include_inference_probe else None,
        )

    def _engine_failure(self) -> str:
        return "" if self._is_watched or self._engine.alive else "the engine has ended"

    async def server_info(self) -> oe.ServerInfo:
        """As `Worker.server_info`."""
        return server_info(self._engine, self._identity, frees_handoffs=self._handoffs.can_release)

    async def model_info(self, model: str) -> oe.ModelInfo:
        """As `Worker.model_info`."""
        if model != self._identity.model:
            raise RequestRefused(grpc.StatusCode.NOT_FOUND, f"model: {model!r} is not served here")
        return model_info(self._engine, self._identity)
