"""Gauges of several processes as those of one, and counters that outlive a process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, values
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from slagate.proto import process_pb2 as ps
from slagate.proto import process_pb2_grpc as ps_grpc
from slagate.router.metrics import Metrics
from slagate.router.multiprocess.child import METRICS_FOLDER
from slagate.router.multiprocess.metrics import looks, merged
from slagate.router.receipts.record import Latencies, Record
from slagate.router.request.errors import Outcome
from slagate.router.scheduling.dispatcher import Dispatcher
from support.builders import fleet, rng
from support.limits import HANG_S

NO_LATENCIES = Latencies(None, None, None, None)


def families(of_process: str) -> list[Metric]:
    return list(text_string_to_metric_families(of_process))


def values_of(found: list[Metric]) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in found
        for sample in family.samples
    }


def test_each_gauge_of_a_gateway_is_merged_by_what_it_means() -> None:
    one = """
# TYPE slagate_worker_inflight gauge
slagate_worker_inflight{worker="a"} 3
# TYPE slagate_worker_ready gauge
slagate_worker_ready{worker="a"} 1
slagate_worker_ready{worker="b"} 1
# TYPE slagate_worker_event_lag_seconds gauge
slagate_worker_event_lag_seconds{worker="a"} 0.5
# TYPE slagate_pool_workers gauge
slagate_pool_workers{state="ready"} 2
slagate_pool_workers{state="draining"} 0
# TYPE slagate_prediction_bias_ratio gauge
slagate_prediction_bias_ratio{pool="a"} 0.25
slagate_prediction_bias_ratio{pool="b"} -0.5
# TYPE slagate_prediction_coverage_ratio gauge
slagate_prediction_coverage_ratio{pool="a"} 0.75
# TYPE slagate_prediction_basis gauge
slagate_prediction_basis{basis="learnt"} 1
slagate_prediction_basis{basis="grid"} 0
# TYPE slagate_spills counter
slagate_spills_total{pool="a"} 4
"""
    two = """
# TYPE slagate_worker_inflight gauge
slagate_worker_inflight{worker="a"} 2
slagate_worker_inflight{worker="c"} 7
# TYPE slagate_worker_ready gauge
slagate_worker_ready{worker="a"} 0
slagate_worker_ready{worker="b"} 1
# TYPE slagate_worker_event_lag_seconds gauge
slagate_worker_event_lag_seconds{worker="a"} 0.25
# TYPE slagate_pool_workers gauge
slagate_pool_workers{state="ready"} 1
slagate_pool_workers{state="not_ready"} 1
# TYPE slagate_prediction_bias_ratio gauge
slagate_prediction_bias_ratio{pool="a"} -0.5
slagate_prediction_bias_ratio{pool="b"} 0.25
# TYPE slagate_prediction_coverage_ratio gauge
slagate_prediction_coverage_ratio{pool="a"} 0.5
# TYPE slagate_prediction_basis gauge
slagate_prediction_basis{basis="learnt"} 0
slagate_prediction_basis{basis="grid"} 1
# TYPE slagate_spills counter
slagate_spills_total{pool="a"} 5
"""
    assert values_of(merged([families(one), families(two)])) == {
        "slagate_worker_inflight['a']": 5,
        "slagate_worker_inflight['c']": 7,
        "slagate_worker_ready['a']": 0,
        "slagate_worker_ready['b']": 1,
        "slagate_worker_event_lag_seconds['a']": 0.5,
        "slagate_pool_workers['ready']": 2,
        "slagate_pool_workers['draining']": 0,
        "slagate_prediction_bias_ratio['a']": -0.5,
        "slagate_prediction_bias_ratio['b']": -0.5,
        "slagate_prediction_coverage_ratio['a']": 0.5,
        "slagate_prediction_basis['learnt']": 1,
        "slagate_prediction_basis['grid']": 1,
        "slagate_spills_total['a']": 5,
    }
    assert merged([]) == []


def test_one_process_merged_is_that_process() -> None:
    metrics = Metrics()
    metrics.watch(Dispatcher(fleet(), rng=rng()))
    text = generate_latest(metrics.gauges).decode()
    assert values_of(merged([families(text)])) == values_of(families(text))


def test_counters_are_summed_and_a_successor_goes_on_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(METRICS_FOLDER, str(tmp_path))

    def process(number: int) -> Metrics:
        of = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]
        monkeypatch.setattr(values, "ValueClass", of)
        return Metrics()

    def total(name: str, **labels: str) -> float | None:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]
        return registry.get_sample_value(name, labels)

    first, second = process(0), process(1)
    first.measure(Record(0.0), Outcome.INVALID, NO_LATENCIES)
    second.measure(Record(0.0), Outcome.INVALID, NO_LATENCIES)
    second.waits.observe(0.02)
    assert total("slagate_requests_total", outcome="invalid") == 2
    assert total("slagate_wait_seconds_bucket", le="0.025") == 1
    # Number 1 crashed and came back.
    again = process(1)
    assert total("slagate_requests_total", outcome="invalid") == 2
    again.measure(Record(0.0), Outcome.INVALID, NO_LATENCIES)
    again.waits.observe(0.5)
    assert total("slagate_requests_total", outcome="invalid") == 3
    assert total("slagate_wait_seconds_count") == 2
    values.close_all_multiprocess_files()  # type: ignore[no-untyped-call]


def test_a_process_that_ends_while_it_is_asked_has_no_part(tmp_path: Path) -> None:
    class Hangs(ps_grpc.ProcessServicer):
        asked, go_on = threading.Event(), threading.Event()

        def Look(self, request: ps.LookRequest, context: object) -> ps.LookResponse:
            self.asked.set()
            self.go_on.wait(HANG_S)
            return ps.LookResponse()

    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        ps_grpc.add_ProcessServicer_to_server(Hangs(), server)
        server.add_insecure_port(f"unix:{tmp_path}/admin")
        server.start()
        channel = grpc.insecure_channel(f"unix:{tmp_path}/admin")
        child = SimpleNamespace(in_threads=ps_grpc.ProcessStub(channel))
        supervisor: Any = SimpleNamespace(running={0: child})
        answers = threads.submit(looks, supervisor, ps.LookRequest())
        assert Hangs.asked.wait(HANG_S)
        channel.close()
        assert answers.result(HANG_S) == []
        assert looks(supervisor, ps.LookRequest()) == []
        Hangs.go_on.set()
        server.stop(None).wait()
