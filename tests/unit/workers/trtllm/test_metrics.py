"""A worker's metrics: their names, what they are made of, and an engine's collector that fails."""

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client import Counter

from slagate.workers.trtllm.metrics import WorkerMetrics

PAGE = Path(__file__).parents[4] / "docs" / "worker.md"
LABELS = {"model_name": "m", "disaggregation_mode": "decode", "engine_type": "trtllm"}


@pytest.fixture
def metrics() -> WorkerMetrics:
    made = WorkerMetrics(model="m", role="decode", engine="trtllm")
    made.loaded(12.5, event_capacity=100, counters=lambda: {"kv_event_missed_events": 3})
    return made


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, LABELS | labels)


def result(start_s: float, end_s: float, n_bytes: int) -> Any:
    timing = SimpleNamespace(
        kv_cache_transfer_start=timedelta(seconds=start_s),
        kv_cache_transfer_end=timedelta(seconds=end_s),
        kv_cache_size=n_bytes,
    )
    output = SimpleNamespace(request_perf_metrics=SimpleNamespace(timing_metrics=timing))
    return SimpleNamespace(outputs=[output], metrics_dict={"ttft": 0.5})


def test_the_page_names_every_family_and_no_other(metrics: WorkerMetrics) -> None:
    table = PAGE.read_text().split("\n## Metrics\n")[1].split("\nWhatever else")[0]
    named = re.findall(r"`((?:slagate_worker|trtllm)_\w+)`", table)
    families = [
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in metrics.registry.collect()
    ]
    assert sorted(named) == sorted(families)


def test_what_was_given_up_is_told_from_what_was_refused(metrics: WorkerMetrics) -> None:
    metrics.leg_ended("refused", None)
    metrics.leg_ended("cancelled", result(0, 0, 0))
    metrics.leg_ended("deadline", result(0, 0, 0))
    metrics.leg_ended("cancelled", None)
    for outcome, n in (("ok", 0), ("refused", 1), ("cancelled", 2), ("deadline", 1)):
        assert value(metrics, "slagate_worker_requests_total", outcome=outcome) == n
    assert value(metrics, "trtllm_num_aborted_requests_total") == 2
    assert value(metrics, "trtllm_kv_event_id_gap_events_total") == 3
    assert value(metrics, "slagate_worker_load_seconds") == 12.5
    assert value(metrics, "trtllm_kv_event_buffer_capacity") == 100


def test_a_transfer_has_a_time_a_size_and_a_speed(metrics: WorkerMetrics) -> None:
    metrics.leg_ended("ok", result(10.0, 10.5, 4_000_000_000))
    metrics.leg_ended("ok", result(0, 0, 0))  # of who fetched nothing
    assert value(metrics, "trtllm_kv_transfer_success_total") == 1
    assert value(metrics, "trtllm_kv_transfer_latency_seconds_sum") == 0.5
    assert value(metrics, "trtllm_kv_transfer_bytes_sum") == 4e9
    assert value(metrics, "trtllm_kv_transfer_speed_gb_s_sum") == 8
    # As fast as the engine's clock can tell: it has a time and a size, but no speed.
    metrics.leg_ended("ok", result(10.5, 10.5, 1000))
    assert value(metrics, "trtllm_kv_transfer_success_total") == 2
    assert value(metrics, "trtllm_kv_transfer_latency_seconds_count") == 2
    assert value(metrics, "trtllm_kv_transfer_bytes_sum") == 4e9 + 1000
    assert value(metrics, "trtllm_kv_transfer_speed_gb_s_count") == 1


class Collector:
    """TensorRT-LLM's, of 1.2; it cannot take a row."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels
        self.seen: list[Any] = []

    def log_metrics_dict(self, metrics: Any) -> None:
        self.seen.append(metrics)

    def log_iteration_stats(self, stats: Any) -> None:
        raise KeyError("kvCacheStats")


@pytest.fixture
def families() -> Iterator[list[Counter]]:
    """Of the process's default registry, where TensorRT-LLM's are."""
    names = ("trtllm_request_success", "trtllm_num_aborted_requests", "python_other")
    made = [Counter(name, "about") for name in names]
    yield made
    for family in made:
        prometheus_client.REGISTRY.unregister(family)


def test_an_engines_collector_is_fed_and_its_families_passed_on(
    metrics: WorkerMetrics, families: list[Counter]
) -> None:
    made: list[Collector] = []

    def collector(labels: dict[str, str]) -> Collector:
        made.append(Collector(labels))
        return made[0]

    metrics.collect_from(collector)
    metrics.leg_ended("ok", result(0, 0, 0))
    assert made[0].labels == {"model_name": "m", "engine_type": "trtllm"}
    assert made[0].seen == [{"ttft": 0.5}]
    families[0].inc()
    families[1].inc(100)  # counted here already
    assert metrics.registry.get_sample_value("trtllm_request_success_total") == 1
    assert metrics.registry.get_sample_value("python_other_total") is None
    names = [family.name for family in metrics.registry.collect()]
    assert names.count("trtllm_num_aborted_requests") == 1
    assert value(metrics, "trtllm_num_aborted_requests_total") == 0


def test_a_collector_that_fails_costs_figures_only(
    metrics: WorkerMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    metrics.collect_from(Collector)
    for _ in range(5):
        metrics.stats_polled([{}])
    # The first, the second and the fourth.
    assert [record.message for record in caplog.records] == ["metrics.failed"] * 3


def test_a_version_without_a_collector_has_the_workers_own(
    metrics: WorkerMetrics, families: list[Counter]
) -> None:
    metrics.collect_from(None)
    metrics.stats_polled([{}])
    assert metrics.registry.get_sample_value("trtllm_request_success_total") is None
