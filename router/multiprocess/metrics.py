"""The metrics and the readiness of a gateway of several processes, for a scrape.

Counters and histograms are summed from the files in which the processes keep them, which outlive a crash.
Gauges come from the processes that run: what each has a part of is summed, of what each sees for itself the
worst is taken. A process that does not answer in time is left out.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from typing_extensions import override

from slagate.pools.inflight.shared_counts import GATEWAY, GatewayCell, PoolCell, SharedCounts
from slagate.proto import process_pb2 as ps
from slagate.router.metrics import Metrics
from slagate.router.multiprocess.supervisor import Supervisor

LOOK_LIMIT_S = 2.0

_SUMMED = frozenset(
    {
        "slagate_worker_inflight",
        "slagate_worker_queued_tokens",
        "slagate_worker_context_tokens",
        "slagate_worker_prefix_predicted_tokens",
        "slagate_worker_prefix_cached_tokens",
        "slagate_worker_prefix_error_tokens",
        "slagate_prediction_basis",
        "slagate_waiting_requests",
        "slagate_client_connections",
    }
)
_LEAST = frozenset(
    {
        "slagate_worker_ready",
        "slagate_worker_events_live",
        "slagate_prediction_coverage_ratio",
        "slagate_tls_certificate_expiry_seconds",
    }
)
_FARTHEST_FROM_0 = frozenset({"slagate_prediction_bias_ratio"})
_OF_THE_FIRST = frozenset({"slagate_pool_workers"})
"""Gauges that belong together, and are the same in all processes but for a moment."""

_OF_THE_PARENT = frozenset({"slagate_reloads"})
"""Counters of what happens once and is counted in each process as well."""


class MergedMetrics(Collector):
    """Collects the metrics of all processes; its registry must not describe them beforehand."""

    def __init__(
        self, supervisor: Supervisor, counts: SharedCounts, folder: Path, *, own: Metrics
    ) -> None:
        self._supervisor = supervisor
        self._counts = counts
        self._folder = folder
        self._own = own

    @override
    def collect(self) -> Iterator[Metric]:
        files = MultiProcessCollector(None, path=str(self._folder))  # type: ignore[no-untyped-call]
        for family in files.collect():  # type: ignore[no-untyped-call]
            # A gauge in a file may be that of a process which has ended.
            if family.type != "gauge" and family.name not in _OF_THE_PARENT:
                yield family
        for family in self._own.registry.collect():
            if family.name in _OF_THE_PARENT:
                yield family
        gauges = merged(
            list(text_string_to_metric_families(answer.metrics.decode()))
            for answer in looks(self._supervisor, ps.LookRequest(metrics=True))
        )
        for family in gauges:
            yield self._spills(family) if family.name == "slagate_spills" else family
        yield GaugeMetricFamily(
            "slagate_processes", "Processes that serve", value=len(self._supervisor.running)
        )
        yield self._running()
        yield CounterMetricFamily(
            "slagate_process_restarts",
            "Processes that ended and were started again",
            value=self._supervisor.n_restarts,
        )
        yield CounterMetricFamily(
            "slagate_process_lost_requests",
            "Requests that ended because their process did: they have no outcome in slagate_requests_total",
            value=self._supervisor.n_lost,
        )

    def _running(self) -> Metric:
        """The gauge that shows how evenly the kernel spreads connections."""
        made = GaugeMetricFamily(
            "slagate_process_running_requests", "Requests that a process serves", labels=["process"]
        )
        for number, n_running in enumerate(self._counts.each(GATEWAY, GatewayCell.RUNNING)):
            made.add_metric([str(number)], n_running)
        return made

    def _spills(self, family: Metric) -> Metric:
        """The counter with what processes counted that have ended."""
        made = CounterMetricFamily(family.name, family.documentation, labels=["stage", "pool"])
        for labels in {tuple(sorted(sample.labels.items())) for sample in family.samples}:
            of = dict(labels)
            total = self._counts.total(f"pool {of['stage']} {of['pool']}", PoolCell.SPILLS)
            made.add_metric([of["stage"], of["pool"]], total)
        return made


def merged(processes: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Merge gauges of several processes: the sum of a gauge's values, or the least or largest one."""
    found: dict[str, Metric] = {}
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for families in processes:
        for family in families:
            is_first = family.name not in found
            found.setdefault(family.name, family)
            into = values.setdefault(family.name, {})
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                if labels not in into:
                    if is_first or family.name not in _OF_THE_FIRST:
                        into[labels] = sample.value
                elif family.name in _SUMMED:
                    into[labels] += sample.value
                elif family.name in _LEAST:
                    into[labels] = min(into[labels], sample.value)
                elif family.name in _FARTHEST_FROM_0:
                    into[labels] = max(into[labels], sample.value, key=abs)
                elif family.name not in _OF_THE_FIRST:
                    into[labels] = max(into[labels], sample.value)
    for name, family in found.items():
        sample_name = family.samples[0].name if family.samples else name
        family.samples = []
        for labels, value in values[name].items():
            family.add_sample(sample_name, dict(labels), value)
    return list(found.values())


def looks(supervisor: Supervisor, request: ps.LookRequest) -> list[ps.LookResponse]:
    """Ask the running processes for `Look`, and wait for the answers; not from the event loop's thread."""
    asked = []
    for _, child in sorted(supervisor.running.items()):
        with suppress(ValueError):  # it has just ended, and its channel is closed
            asked.append(child.in_threads.Look.future(request, timeout=LOOK_LIMIT_S))
    found = []
    for call in asked:
        # It has just ended, or hangs; or its channel was closed meanwhile.
        with suppress(grpc.RpcError, grpc.FutureCancelledError):
            found.append(call.result())
    return found


def not_ready(supervisor: Supervisor) -> str:
    """Why no process can serve a request, empty when one can; not from the event loop's thread."""
    if supervisor.stopping.is_set():
        return "draining"
    said = [answer.not_ready for answer in looks(supervisor, ps.LookRequest())]
    if not said:
        return "no process is running"
    return "" if not all(said) else said[0]
