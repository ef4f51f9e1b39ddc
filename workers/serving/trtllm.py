"""A TensorRT-LLM worker process, which is reachable from its first second, and ready when its engine is."""

import logging
import os
import uuid
from collections.abc import Awaitable
from typing import Any, NoReturn

import anyio

from slagate.proto.rpc.address import Address
from slagate.workers.runtime.listen import on_sighup, ready_line, stopped
from slagate.workers.runtime.usage import UsageError
from slagate.workers.server import serve_worker
from slagate.workers.serving.serve import FLUSH_S, metrics_served, tell_ready, until_stopped
from slagate.workers.serving.start import (
    Phases,
    Started,
    StartingWorker,
    TrtllmOptions,
    prepare_start,
    start_engine,
    worker_over,
)
from slagate.workers.tls.files import TlsFiles
from slagate.workers.tls.reloading import ServerTls, following
from slagate.workers.trtllm.encode import Encoder, EncodeWorker, start_encoder
from slagate.workers.trtllm.engine import setting
from slagate.workers.trtllm.metrics import SILENT, WorkerMetrics
from slagate.workers.trtllm.package import shut_down
from slagate.workers.trtllm.watch import EngineWatch
from slagate.workers.trtllm.worker import TrtllmWorker

log = logging.getLogger(__name__)


async def run_trtllm_worker(
    options: TrtllmOptions,
    listen: Address,
    *,
    drain_s: float,
    tls: TlsFiles | None,
    metrics_listen: Address | None = None,
) -> int:
    """Serve a TensorRT-LLM worker until SIGTERM, SIGINT or the engine's end; the exit status.

    The status is 0 after a signal, also while the engine loads, and 1 when the engine failed to start or
    died. Raises `UsageError` for a wrong option or engine argument, or a package that is not installed, and
    `OSError` when an address cannot be bound.
    """
    key = prepare_start(options)
    life = _WorkerLife(options, key, drain_s=drain_s, is_measured=metrics_listen is not None)
    side = None if tls is None else ServerTls("clients", tls)
    why_not_ready = lambda: life.starting.why_not_ready  # noqa: E731
    with metrics_served(life.metrics, metrics_listen, not_ready=why_not_ready) as metrics_at:
        async with (
            serve_worker(life.starting, listen, grace_s=FLUSH_S, tls=side) as address,
            following(side) as reread,
            on_sighup(reread),
            stopped() as signals,
        ):
            log.info("worker.listening", extra={"listen": str(address), "metrics": metrics_at})
            status = await life.run(address, signals, metrics_at)
    # Only now: callers that wait have got all answers there were, also of a dead engine.
    if life.has_leftovers:
        leave_at_once(status)
    return status


class _WorkerLife:
    """One worker from its arguments to its exit status."""

    def __init__(
        self, options: TrtllmOptions, key: bytes | None, *, drain_s: float, is_measured: bool
    ) -> None:
        self._options = options
        self._key = key
        self._drain_s = drain_s
        self._is_measured = is_measured
        self._instance_id = uuid.uuid4().hex
        self.has_leftovers = False  # threads, or processes of a dead engine, that end with this one
        self.starting = StartingWorker("import")
        self.metrics = WorkerMetrics(model=options.served_name, role=options.role, engine="trtllm")

    async def run(self, address: Address, signals: anyio.Event, metrics_at: str) -> int:
        """Start the engine, serve, and end it; the exit status."""
        phases = Phases(self.starting, every_s=self._options.progress_s)
        start: Awaitable[Started | Encoder] = (
            start_encoder(self._options.args.values)
            if self._options.role == "encode"
            else start_engine(self._options, instance_id=self._instance_id, phases=phases)
        )
        try:
            started = await phases.run_unless(start, until=[signals])
        except UsageError:
            raise
        except Exception:
            log.exception("engine.start_failed")
            self.has_leftovers = True
            return 1
        if started is None:
            log.info("engine.start_given_up", extra={"phase": self.starting.phase})
            self.has_leftovers = True
            return 0
        if isinstance(started, Encoder):
            return await self._encode(started, address, signals)
        return await self._serve(started, phases, address, signals, metrics_at)

    async def _serve(
        self,
        started: Started,
        phases: Phases,
        address: Address,
        signals: anyio.Event,
        metrics_at: str,
    ) -> int:
        package, llm, *_ = started
        is_fine = is_dead = False
        if self._is_measured:
            self.metrics.collect_from(package.MetricsCollector)
        async with anyio.create_task_group() as tasks:
            worker = worker_over(
                started,
                self._options,
                tasks=tasks,
                handoff_key=self._key,
                observer=self.metrics if self._is_measured else SILENT,
            )
            times = self._options.watch
            watch = EngineWatch(llm, times=times, on_death=worker.declare_dead, leave=leave_at_once)
            tasks.start_soon(watch.run)
            warm_up = self._warmed_up(worker, phases)
            failure = await phases.run_unless(warm_up, until=[signals, worker.fatal])
            if failure == "":
                self._ready(worker, phases, llm)
                await tell_ready(
                    worker, role=self._options.role, address=address, metrics_at=metrics_at
                )
                await until_stopped(worker, signals, drain_s=self._drain_s)
                is_fine = not worker.fatal.is_set()
            elif failure is None and not worker.fatal.is_set():
                log.info("engine.start_given_up", extra={"phase": self.starting.phase})
                is_fine = True
            else:
                log.error("engine.start_failed", extra={"reason": failure or "the engine died"})
            is_dead = worker.fatal.is_set()
            tasks.cancel_scope.cancel()
        # A dead engine's own shutdown would wait for its ranks, which are gone.
        limit_s = self._options.shutdown_limit_s
        self.has_leftovers = is_dead or bool(await shut_down(llm, limit_s=limit_s))
        return 0 if is_fine else 1

    async def _warmed_up(self, worker: TrtllmWorker, phases: Phases) -> str:
        phases.begin_phase("warm-up")
        return await worker.warm_up(
            self._options.warm_up_limit_s, on_canary=lambda: phases.begin_phase("canary")
        )

    def _ready(self, worker: TrtllmWorker, phases: Phases, llm: Any) -> None:
        cache = setting(llm.args, "kv_cache_config")
        capacity = setting(cache, "event_buffer_max_size") or 0
        self.metrics.loaded(phases.total_s, event_capacity=capacity, counters=worker.counters)
        self.starting.become(worker)
        log.info("engine.ready", extra={"total_seconds": round(phases.total_s, 1)})

    async def _encode(self, encoder: Encoder, address: Address, signals: anyio.Event) -> int:
        model = self._options.served_name
        worker = EncodeWorker(encoder, model=model, instance_id=self._instance_id)
        self.starting.become(worker)
        ready_line(
            listen=str(address),
            role="encode",
            model=model,
            kv_transport="none",
            instance_id=self._instance_id,
            pid=os.getpid(),
        )
        await signals.wait()
        self.has_leftovers = bool(await worker.shut_down(self._options.shutdown_limit_s))
        return 0


def leave_at_once(status: int) -> NoReturn:
    """End the process at once, as a native thread or a dead engine's exit handlers would hold it up."""
    logging.shutdown()
    os._exit(status)
