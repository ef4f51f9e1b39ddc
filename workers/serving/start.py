"""The start of a TensorRT-LLM worker: its options, the worker until then, the engine, and the phases."""

import logging
import os
import re
from collections.abc import Awaitable, Sequence, Sized
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import anyio
import grpc
from anyio.abc import TaskGroup
from typing_extensions import override

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, EndedCall, Sink
from slagate.proto.rpc.status import Metadata
from slagate.workers.engine_args.build import EngineArgs
from slagate.workers.errors import RequestRefused
from slagate.workers.handoff.seal import read_key
from slagate.workers.logits.processors import LogitsProcessors
from slagate.workers.runtime.usage import UsageError
from slagate.workers.runtime.waiting import run_in_daemon_thread
from slagate.workers.trtllm.engine import (
    Engine,
    KvCapacity,
    ask_kv_capacity,
    model_setting,
    setting,
)
from slagate.workers.trtllm.metrics import SILENT, Observer
from slagate.workers.trtllm.package import (
    TELEMETRY,
    EnginePackage,
    as_usage,
    check_installed,
    constructor_values,
    handoff_ids,
    judge_arguments,
    load_package,
    set_engine_log_level,
    shut_down,
    with_telemetry_choice,
)
from slagate.workers.trtllm.poll import poll_of
from slagate.workers.trtllm.server_info import ROLES, WorkerIdentity
from slagate.workers.trtllm.watch import WatchTimes
from slagate.workers.trtllm.worker import TrtllmWorker
from slagate.workers.worker import Worker

log = logging.getLogger(__name__)

_T = TypeVar("_T")

NO_BACKEND = "DEFAULT"

NIXL_LIBRARY = "TRTLLM_NIXL_KVCACHE_BACKEND"
"""The environment variable by which TensorRT-LLM's NIXL uses LIBFABRIC, not UCX (its documentation, id
10573063983)."""

OPTIONAL_KEYWORDS = (
    "cache_salt",
    "scheduling_params",
    "trace_headers",
    "priority",
    "conversation_params",
)
"""Arguments of `generate_async` that some versions lack."""

UNSEALED_RISK = (
    "one malformed handoff ends this engine for everybody: its native code reads opaque_state unchecked, "
    "whoever sent it"
)
UNSEALED_ADVICE = (
    "give --handoff-key-file here and to the prefill workers: then only their handoffs are read"
)

WARM_UP_LIMIT_S = 300.0
"""For the first request of each rank, in which kernels are tuned and graphs captured."""

SHUTDOWN_LIMIT_S = 60.0
"""For the engine's own shutdown."""

KV_CAPACITY_LIMIT_S = 30.0
"""For the engine's answer to how large its KV cache is, which the worker can do without."""

PROGRESS_S = 5.0
"""Between log lines while the engine starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmOptions:
    """The options of the command line; `args` are the engine's, and have no errors."""

    args: EngineArgs
    served_name: str
    end_id: int | None = None  # None: the tokenizer's
    handoff_key_file: Path | None = None
    log_level: str = "info"
    warm_up_limit_s: float = WARM_UP_LIMIT_S
    shutdown_limit_s: float = SHUTDOWN_LIMIT_S
    progress_s: float = PROGRESS_S
    watch: WatchTimes = field(default_factory=WatchTimes)
    logits: LogitsProcessors = field(default_factory=LogitsProcessors)

    @property
    def role(self) -> str:
        """`prefill`, `decode`, `agg` or `encode`."""
        return self.args.role


class StartingWorker(Worker):
    """The worker of a process while its engine starts; after `become` it passes calls to another one.

    While a model loads, health checks get STARTING and the phase, not a refused connection.
    """

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self._worker: Worker | None = None

    @property
    def why_not_ready(self) -> str:
        """Why no requests are accepted yet; "" when they are."""
        return "" if self._worker is not None else f"the engine is starting: {self.phase}"

    def become(self, worker: Worker) -> None:
        """Pass calls to this worker from now on."""
        self._worker = worker

    def _ready_worker(self) -> Worker:
        if self._worker is None:
            raise self._refusal()
        return self._worker

    def _refusal(self) -> RequestRefused:
        return RequestRefused(grpc.StatusCode.UNAVAILABLE, self.why_not_ready)

    @override
    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        if self._worker is not None:
            return self._worker.generate(request, metadata, sink, timeout_s=timeout_s)
        sink.finish(self._refusal().status)
        return EndedCall()

    @override
    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        if self._worker is not None:
            return self._worker.kv_events(request, metadata, sink)
        sink.finish(self._refusal().status)
        return EndedCall()

    @override
    async def kv_event_sources(
        self, request: oe.GetKvEventSourcesRequest
    ) -> oe.GetKvEventSourcesResponse:
        return await self._ready_worker().kv_event_sources(request)

    @override
    async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
        return await self._ready_worker().abort(request)

    @override
    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        return await self._ready_worker().load(request)

    @override
    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        if self._worker is not None:
            return await self._worker.health(request)
        starting = oe.HEALTH_STATE_STARTING
        checks = [
            oe.HealthCheck(name="grpc", state=oe.HEALTH_STATE_READY),
            oe.HealthCheck(name="model", state=starting, message=self.why_not_ready),
        ]
        return oe.HealthResponse(state=starting, checks=checks)

    @override
    async def server_info(self) -> oe.ServerInfo:
        return await self._ready_worker().server_info()

    @override
    async def model_info(self, model: str) -> oe.ModelInfo:
        return await self._ready_worker().model_info(model)


class Started(NamedTuple):
    """A constructed engine, its package, what the worker is, and the KV cache where the engine says it."""

    package: EnginePackage
    llm: Any
    identity: WorkerIdentity
    capacity: KvCapacity | None = None


class Phases:
    """The phase of a start, for health checks, and for a line of the log every few seconds."""

    def __init__(self, starting: StartingWorker, *, every_s: float) -> None:
        self._starting = starting
        self._every_s = every_s
        self._started_s = anyio.current_time()
        self.begin_phase(starting.phase)

    @property
    def total_s(self) -> float:
        """Seconds since the first phase began."""
        return anyio.current_time() - self._started_s

    def begin_phase(self, phase: str) -> None:
        """End the phase before and begin this one."""
        self._starting.phase = phase
        self._phase_s = anyio.current_time()
        self._log_phase("engine.phase")

    async def run_unless(self, work: Awaitable[_T], *, until: Sequence[anyio.Event]) -> _T | None:
        """What `work` returns, or None once one of these events is set. Raises what `work` raises.

        Log lines tell how long it takes so far. A thread that it waits for goes on until the process ends.
        """
        result: _T | None = None
        error: Exception | None = None
        async with anyio.create_task_group() as tasks:

            async def give_up(event: anyio.Event) -> None:
                await event.wait()
                tasks.cancel_scope.cancel()

            for event in until:
                tasks.start_soon(give_up, event)
            tasks.start_soon(self._log_progress)
            try:
                result = await work
            except Exception as raised:  # noqa: BLE001 - raised again below: the task group would wrap it
                error = raised
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error
        return result

    async def _log_progress(self) -> None:
        while True:
            await anyio.sleep(self._every_s)
            self._log_phase("engine.starting")

    def _log_phase(self, event: str) -> None:
        now_s = anyio.current_time()
        seconds = round(now_s - self._phase_s, 1)
        about = {"phase": self._starting.phase, "seconds": seconds}
        log.info(event, extra={**about, "total_seconds": round(self.total_s, 1)})


def prepare_start(options: TrtllmOptions) -> bytes | None:
    """Before the package is imported: log what is wrong with the options, set the engine's log level.

    Returns the handoff key. Raises `UsageError` for one that cannot be read, or a package that is not
    installed.
    """
    check_installed()
    for finding in options.args.findings:
        log.warning("engine_args.finding", extra={"code": finding.code, "finding": str(finding)})
    set_engine_log_level(options.log_level, os.environ)
    key = read_key(options.handoff_key_file)
    if options.role == "decode" and key is None:
        log.warning("handoff.unsealed", extra={"risk": UNSEALED_RISK, "advice": UNSEALED_ADVICE})
    return key


async def start_engine(options: TrtllmOptions, *, instance_id: str, phases: Phases) -> Started:
    """Import the package and construct the engine, both on threads, so that the event loop goes on.

    Raises `UsageError` for a package or arguments that cannot be used, and what else the constructor
    raises.
    """
    package = await run_in_daemon_thread(load_package)
    if options.logits.is_used and package.LogitsProcessor is None:
        raise UsageError(f"--logits-processor: tensorrt_llm {package.version} has none")
    phases.begin_phase("engine")
    values = with_telemetry_choice(options.args.values, package, os.environ)

    def constructed() -> Any:
        taken = constructor_values(package, values)
        judge_arguments(package, taken)
        return package.LLM(**taken)

    llm = await run_in_daemon_thread(as_usage(constructed))
    try:
        identity = identity_of(llm, package, options, instance_id=instance_id)
        options.logits.check(end_id=identity.end_id, vocab_size=identity.vocab_size)
    except UsageError:
        await shut_down(llm, limit_s=options.shutdown_limit_s)
        raise
    return Started(package, llm, identity, await _kv_capacity(llm))


async def _kv_capacity(llm: Any) -> KvCapacity | None:
    with anyio.move_on_after(KV_CAPACITY_LIMIT_S):
        return await run_in_daemon_thread(partial(ask_kv_capacity, llm))
    log.warning("engine.kv_capacity_timeout", extra={"limit_s": KV_CAPACITY_LIMIT_S})
    return None


def worker_over(
    started: Started,
    options: TrtllmOptions,
    *,
    tasks: TaskGroup,
    handoff_key: bytes | None,
    observer: Observer = SILENT,
) -> TrtllmWorker:
    """The worker of a constructed engine; its tasks run in `tasks`, which the caller cancels at the end."""
    package, llm, identity, capacity = started
    log.info("engine.abilities", extra=abilities(started))
    return TrtllmWorker(
        llm,
        api=package,
        identity=identity,
        tasks=tasks,
        release_session=None,
        handoff_key=handoff_key,
        new_handoff_id=handoff_ids(package, identity.instance_id),
        observer=observer,
        logits=options.logits,
        capacity=capacity,
    )


def abilities(started: Started) -> dict[str, Any]:
    """What the installed engine was found to have, by name, and under `off` what a worker does without.

    It is looked for where it is: signature, attribute, class. No version is asked for its number.
    """
    package, llm, _, capacity = started
    engine = Engine(llm, package, capacity)
    executor = getattr(llm, "_executor", None)
    collector = package.MetricsCollector
    finishers = ("log_request_metrics_dict", "log_metrics_dict")
    found: dict[str, Any] = {
        "generate_async": [name for name in OPTIONAL_KEYWORDS if engine.takes(name)],
        "statistics": _how_polled(llm, "get_stats"),
        "kv_events": "streamed"
        if engine.event_stream is not None
        else _how_polled(llm, "get_kv_cache_events"),
        "kv_capacity": capacity is not None,
        "health_check": hasattr(llm, "_check_health"),
        "fatal_flag": hasattr(executor, "_fatal_error"),
        "process_futures": hasattr(executor, "mpi_futures"),
        "dead_error": package.EngineDeadError is not None,
        "handoff_ids": package.get_global_disagg_request_id is not None,
        "logprob_class": package.Logprob is not None,
        "logits_processors": package.LogitsProcessor is not None,
        "guided_decoding": package.GuidedDecodingParams is not None,
        "telemetry_argument": TELEMETRY in getattr(package.TorchLlmArgs, "model_fields", {}),
        "metrics_collector": next(
            (name for name in finishers if getattr(collector, name, None)), ""
        ),
    }
    found["off"] = sorted(name for name, has in found.items() if not has) + [
        name for name in OPTIONAL_KEYWORDS if not engine.takes(name)
    ]
    return found


def _how_polled(llm: Any, name: str) -> str:
    """`call` to the engine's process, `queue` in this one, or "" for an engine that cannot be polled."""
    poll = poll_of(llm, name)
    return "" if poll is None else "call" if poll.may_block else "queue"


def identity_of(
    llm: Any, package: EnginePackage, options: TrtllmOptions, *, instance_id: str
) -> WorkerIdentity:
    """What the worker is.

    Raises `UsageError` for an engine that a request of the role would end, and where the end-of-text token
    is not known.
    """
    _check_role(llm, package, options.role)
    tokenizer = getattr(llm.tokenizer, "tokenizer", None)
    end_id = options.end_id
    if end_id is None:
        end_id = getattr(tokenizer, "eos_token_id", None)
    if end_id is None:
        raise UsageError("--end-id is needed: the engine has no tokenizer that knows it")
    transceiver = getattr(llm.args, "cache_transceiver_config", None)
    hands_off = transceiver is not None and options.role != "agg"
    backend = setting(transceiver, "backend") or NO_BACKEND if hands_off else ""
    transport = kv_transport(llm, backend, package.version)
    return WorkerIdentity(
        role=ROLES[options.role],
        model=options.served_name,
        instance_id=instance_id,
        engine_version=package.version,
        transfer_backend=backend,
        kv_transport=transport,
        transfer_library=transfer_library(llm, transport),
        tensor_parallel_size=getattr(llm.args, "tensor_parallel_size", 1),
        end_id=end_id,
        engine_knows_end=options.end_id is None,
        vocab_size=_vocab_size(llm, tokenizer),
    )


def kv_transport(llm: Any, backend: str, version: str) -> str:
    """The transport that a back-end of the transceiver stands for; "" where it cannot be told.

    DEFAULT is the first that a variable asks for, else UCX in 1.1 and NIXL since
    (kv_cache_transceiver.py id 616290201 `create_kv_cache_transceiver`).
    """
    if backend != NO_BACKEND:
        return backend
    for name in ("UCX", "NIXL", "MOONCAKE", "MPI"):
        if _variable(llm, f"TRTLLM_USE_{name}_KVCACHE") == "1":
            return name
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None:
        return ""
    return "UCX" if (int(number[1]), int(number[2])) < (1, 2) else "NIXL"


def transfer_library(llm: Any, transport: str) -> str:
    """What a transport stands on, as far as that can be told from here; "" where it cannot."""
    if transport == "NIXL":
        return (_variable(llm, NIXL_LIBRARY) or "UCX").upper()
    return "UCX" if transport == "UCX" else ""


def _variable(llm: Any, name: str) -> str:
    """A variable of the engine's environment: of its arguments, else of this process; "" without it."""
    overrides = setting(llm.args, "env_overrides") or {}
    return str(overrides.get(name) or os.environ.get(name, ""))


def _check_role(llm: Any, package: EnginePackage, role: str) -> None:
    """The same as rules E201, E202 and E206, of the constructed engine. Raises `UsageError`."""
    if role not in ("prefill", "decode"):
        return
    if setting(getattr(llm.args, "cache_transceiver_config", None), "backend") is None:
        raise UsageError(
            f"--role {role}: the engine has no KV transceiver, and would not survive a request; "
            "set cache_transceiver_config.backend"
        )
    # The ids of both legs came with 1.3, which hands off with the overlap scheduler on.
    is_old = "disagg_request_id" not in {each.name for each in fields(package.DisaggregatedParams)}
    if role == "prefill" and is_old and not setting(llm.args, "disable_overlap_scheduler"):
        raise UsageError(
            f"--role prefill: tensorrt_llm {package.version} would not survive a request; "
            "set disable_overlap_scheduler: true"
        )


def _vocab_size(llm: Any, tokenizer: object) -> int | None:
    """The tokens that the model has an embedding for, which are often more than its tokenizer's."""
    of_model = model_setting(llm, "vocab_size")
    if isinstance(of_model, int):
        return of_model
    # `len` counts the tokens that were added to it, which a tokenizer's `vocab_size` leaves out.
    return len(tokenizer) if isinstance(tokenizer, Sized) else None
