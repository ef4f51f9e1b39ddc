"""A worker's metrics: its own, and those of TensorRT-LLM's collector.

Where Dynamo's TensorRT-LLM worker has such a metric, it has the same name here, so that dashboards go on
working. The others are named `slagate_worker_*`.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

Outcome = Literal["ok", "refused", "failed", "cancelled", "deadline"]
"""How a leg ended: answered; refused before the engine had it; failed; cancelled; out of time."""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class Observer:
    """Callbacks about an engine's work, on the event loop; must not raise. These do nothing."""

    wants_perf_metrics: bool = False
    """Whether the engine is to measure each request, which costs it a little."""

    def leg_ended(self, outcome: Outcome, result: Any | None) -> None:
        """The engine has finished with a leg; `result` is the engine's, None where it had none."""

    def stats_polled(self, rows: list[Any]) -> None:
        """Iteration statistics have come; the rows are as the engine gave them."""

    def events_polled(self, n_events: int) -> None:
        """One poll brought so many KV events."""


SILENT = Observer()

log = logging.getLogger(__name__)

ENGINE_PREFIX = "trtllm_"
"""TensorRT-LLM registers its families in the process's default registry, under this prefix."""

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
SIZE_BUCKETS_BYTES = (1e5, 1e6, 5e6, 1e7, 5e7, 1e8, 2.5e8, 5e8, 1e9, 2.5e9, 5e9)
SPEED_BUCKETS_GB_S = (0.1, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
BATCH_BUCKETS = tuple(2**power for power in range(18))


class WorkerMetrics(Observer):
    """One worker's metric families, on a registry of their own."""

    wants_perf_metrics = True

    def __init__(self, *, model: str, role: str, engine: str) -> None:
        """`role` is the one on the command line; `engine` is `trtllm` or `sim`."""
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "disaggregation_mode": role, "engine_type": engine}
        self._engine_labels = {"model_name": model, "engine_type": engine}
        self._collector: Any = None
        self._log_request: Callable[[Any], object] | None = None
        self._n_errors = 0
        names = list(self._labels)
        self._load_s = Gauge(
            "slagate_worker_load_seconds",
            "From the start of the process to its first request: import, weights, warm-up, canary",
            names,
            registry=self.registry,
        )
        about = "Legs by how they ended"
        requests = Counter(
            "slagate_worker_requests", about, [*names, "outcome"], registry=self.registry
        )
        self._requests = {
            outcome: requests.labels(**self._labels, outcome=outcome) for outcome in OUTCOMES
        }
        self._aborted = self._counter("num_aborted_requests", "Requests given up while they ran")
        self._transfers = self._counter("kv_transfer_success", "KV caches that were fetched")
        self._transfer_s = self._histogram(
            "kv_transfer_latency_seconds", "Time that a KV cache took to fetch", LATENCY_BUCKETS_S
        )
        self._transfer_bytes = self._histogram(
            "kv_transfer_bytes", "Size of a KV cache that was fetched", SIZE_BUCKETS_BYTES
        )
        self._transfer_speed = self._histogram(
            "kv_transfer_speed_gb_s", "Its size over its time", SPEED_BUCKETS_GB_S
        )
        self._drained = self._histogram(
            "kv_event_drain_batch_size", "KV events that one poll brought", BATCH_BUCKETS
        )
        self._capacity = Gauge(
            f"{ENGINE_PREFIX}kv_event_buffer_capacity",
            "KV events that the engine keeps until they are read",
            names,
            registry=self.registry,
        )

    def loaded(
        self, load_s: float, *, event_capacity: int, counters: Callable[[], Mapping[str, int]]
    ) -> None:
        """The worker became ready after `load_s`; `counters` gives those of its KV events at any time."""
        self._load_s.labels(**self._labels).set(load_s)
        self._capacity.labels(**self._labels).set(event_capacity)
        self.registry.register(_EventGaps(counters, self._labels))

    def collect_from(self, collector_class: Any | None) -> None:
        """Feed TensorRT-LLM's own collector, where the version has one, and show its families."""
        if collector_class is None:
            log.info("metrics.no_engine_collector")
            return
        self._collector = collector_class(self._engine_labels)
        self._log_request = getattr(self._collector, "log_request_metrics_dict", None) or getattr(
            self._collector, "log_metrics_dict", None
        )
        owned = {family.name for family in self.registry.collect()}
        self.registry.register(_EngineFamilies(owned))

    @override
    def leg_ended(self, outcome: Outcome, result: Any | None) -> None:
        self._requests[outcome].inc()
        if result is None:
            return
        if outcome in ("cancelled", "deadline"):
            self._aborted.inc()
        self._contained(self._measure, result)

    @override
    def stats_polled(self, rows: list[Any]) -> None:
        if self._collector is not None:
            for row in rows:
                self._contained(self._collector.log_iteration_stats, row)

    @override
    def events_polled(self, n_events: int) -> None:
        self._drained.observe(n_events)

    def _measure(self, result: Any) -> None:
        request = getattr(result, "metrics_dict", None)
        if request and self._log_request is not None:
            self._log_request(request)
        for output in result.outputs:
            timing = getattr(output.request_perf_metrics, "timing_metrics", None)
            if timing is None:
                continue
            start, end = timing.kv_cache_transfer_start, timing.kv_cache_transfer_end
            # Both are zero where no KV cache was fetched. They may be equal, by the engine's clock.
            if start and end >= start:
                seconds = (end - start).total_seconds()
                self._transfers.inc()
                self._transfer_s.observe(seconds)
                self._transfer_bytes.observe(timing.kv_cache_size)
                if seconds:
                    self._transfer_speed.observe(timing.kv_cache_size / seconds / 1e9)

    def _contained(self, tell: Callable[[Any], object], what: Any) -> None:
        """Call a collector. Its errors cost figures, not requests; the 1st, 2nd, 4th ... are logged."""
        try:
            tell(what)
        except Exception:
            self._n_errors += 1
            if self._n_errors & (self._n_errors - 1) == 0:
                log.exception("metrics.failed", extra={"n_errors": self._n_errors})

    def _counter(self, name: str, about: str) -> Counter:
        family = Counter(ENGINE_PREFIX + name, about, list(self._labels), registry=self.registry)
        return family.labels(**self._labels)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        labels, registry = list(self._labels), self.registry
        family = Histogram(ENGINE_PREFIX + name, about, labels, buckets=buckets, registry=registry)
        return family.labels(**self._labels)


class _EventGaps(Collector):
    """Reads the count of KV events that were lost from where it is kept."""

    def __init__(
        self, counters: Callable[[], Mapping[str, int]], labels: Mapping[str, str]
    ) -> None:
        self._counters = counters
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            f"{ENGINE_PREFIX}kv_event_id_gap_events",
            "KV events that the engine dropped before they were read",
            labels=list(self._labels),
        )
        n_missed = self._counters().get("kv_event_missed_events", 0)
        family.add_metric(list(self._labels.values()), n_missed)
        yield family


class _EngineFamilies(Collector):
    """TensorRT-LLM's families, without those that this worker has itself."""

    def __init__(self, owned: set[str]) -> None:
        self._owned = owned

    def collect(self) -> Iterable[Metric]:
        for family in prometheus_client.REGISTRY.collect():
            if family.name.startswith(ENGINE_PREFIX) and family.name not in self._owned:
                yield family
