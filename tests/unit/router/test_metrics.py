import math
import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from prometheus_client import Histogram
from prometheus_client.core import Metric

from slagate.pools.estimator.accuracy import BASES
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.kv_events.view import EventView
from slagate.router.metrics import TTFT_BUCKETS_S, Metrics
from slagate.router.receipts.record import Latencies, Record
from slagate.router.request.errors import Outcome
from slagate.router.request.sla import Sla
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.policy import choose
from slagate.workers.runtime.virtual_loop import run
from support.builders import ask, fleet, one_cell, pool_view, request, rng, view
from support.gateway.request_path import bench

NO_LATENCIES = Latencies(None, None, None, None)


def exercised() -> Metrics:
    """Every family with at least one child."""
    metrics = Metrics()
    of = fleet()
    for member in of.members():
        member.events = EventView(member.address, unix_s=lambda: 0.0)
    for pool in of.pools.values():
        pool.estimator.ttft.add_pair(0.1, 0.2, 0.2, 0.2)
        pool.estimator.itl.add_pair(0.1, 0.05, 0.05, 0.05)
    metrics.watch(Dispatcher(of, rng=rng()))
    record = finished_record()
    metrics.measure(record, Outcome.COMPLETED, record.latencies())
    metrics.retries.labels(stage="prefill", code="UNAVAILABLE").inc()
    metrics.handoffs_released.labels(result="released").inc()
    return metrics


def finished_record() -> Record:
    record = Record(0.0)
    record.sla = Sla(ttft_ms=100.0, itl_ms=50.0)
    stages = {s: one_cell(s, s.value) for s in (Stage.PREFILL, Stage.DECODE)}
    pools = {s.value: pool_view(s.value, [view()]) for s in stages}
    record.decision = replace(choose(ask(), stages, pools, rng=rng()), admission="shadow")
    record.stats.count_tokens(1, 0.05)
    record.stats.count_tokens(4, 0.45)
    return record


def described(family: Metric) -> str:
    labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
    return f"{family.name} {family.type} [{', '.join(labels)}] {family.documentation}\n"


def test_the_surface_of_the_metrics(golden: Callable[[str, str], None]) -> None:
    golden("metrics.txt", "".join(sorted(described(f) for f in exercised().registry.collect())))


def test_names_carry_units_and_labels_stay_few() -> None:
    for family in exercised().registry.collect():
        assert family.name.startswith("slagate_")
        assert family.documentation
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        has_worker = any("worker" in sample.labels for sample in family.samples)
        assert has_worker <= (family.type == "gauge")
        assert has_worker == family.name.startswith("slagate_worker_")


def test_how_right_predictions_were_is_told_of_each_latency_of_a_pool() -> None:
    registry = exercised().registry

    def told(name: str, stage: str, latency: str, **more: str) -> float | None:
        labels = {"stage": stage, "pool": stage, "latency": latency, **more}
        return registry.get_sample_value(f"slagate_prediction_{name}", labels)

    names = ("bias_ratio", "error_ratio", "coverage_ratio")
    assert [told(name, "prefill", "ttft") for name in names] == pytest.approx([1.0, 1.0, 1.0])
    assert [told(name, "decode", "itl") for name in names] == pytest.approx([-0.5, 0.5, 0.0])
    assert {told(name, "prefill", "itl") for name in names} == {None}
    assert {told(name, "decode", "ttft") for name in names} == {None}
    bases = [told("basis", "decode", "itl", basis=basis) for basis in BASES]
    assert (BASES, bases) == (("learnt", "profile", "grid"), [1, 0, 0])


def test_every_outcome_is_a_series_from_the_start() -> None:
    registry = Metrics().registry
    for outcome in Outcome:
        assert registry.get_sample_value("slagate_requests_total", {"outcome": outcome.value}) == 0


def test_a_request_is_measured_by_the_pools_that_served_it() -> None:
    registry = exercised().registry

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("slagate_requests_total", outcome="completed") == 1
    assert value("slagate_ttft_seconds_sum", pool="prefill") == 0.05
    assert value("slagate_itl_seconds_count", pool="decode") == 1
    assert value("slagate_output_tokens_total") == 5
    assert value("slagate_targets_total", target="ttft", pool="prefill", met="true") == 1
    assert value("slagate_targets_total", target="itl", pool="decode", met="false") == 1


def test_a_refusal_measures_nothing_but_its_outcome() -> None:
    metrics = Metrics()
    metrics.measure(Record(0.0), Outcome.INVALID, NO_LATENCIES)
    samples = [s for f in metrics.registry.collect() for s in f.samples if s.value]
    named = [s for s in samples if not s.name.endswith("_created")]
    assert [(s.name, s.labels) for s in named] == [
        ("slagate_requests_total", {"outcome": "invalid"})
    ]


def test_a_histogram_counts_as_the_librarys_own_does() -> None:
    seed = 5
    luck = random.Random(seed)
    ours, theirs = Metrics(), Histogram("slagate_wait_seconds", "", buckets=TTFT_BUCKETS_S)
    edges = [0.0, -1.0, math.inf, *TTFT_BUCKETS_S]
    for amount in (*edges, *(luck.lognormvariate(0, 3) for _ in range(300))):
        ours.waits.observe(amount)
        theirs.observe(amount)
    (got,), (wanted,) = ours.waits.collect(), theirs.collect()
    assert [each for each in got.samples if not each.name.endswith("_created")] == [
        each for each in wanted.samples if not each.name.endswith("_created")
    ], f"seed {seed}"


def test_gauges_read_the_fleet_when_they_are_scraped() -> None:
    of = fleet("agg")
    metrics = Metrics()
    metrics.watch(Dispatcher(of, rng=rng()))
    labels = {"stage": "agg", "pool": "agg", "worker": "a1:1"}

    def values() -> tuple[float | None, ...]:
        names = ("inflight", "queued_tokens", "context_tokens", "ready")
        return tuple(
            metrics.registry.get_sample_value(f"slagate_worker_{name}", labels) for name in names
        )

    assert values() == (0, 0, 0, 1)
    lease = of.pools["agg"].lease(0, Work(10, 0.1, 20))
    of.pools["agg"].members["a1:1"].refuse("wrong")
    assert values() == (1, 10, 20, 0)
    lease.release()
    assert values() == (0, 0, 0, 0)


def test_a_gateway_counts_each_request_once() -> None:
    async def main() -> None:
        async with bench() as b:
            for _ in range(3):
                await b.call()
            registry = b.app.gateway.metrics.registry
            await b.check_idle(*[Outcome.COMPLETED] * 3)
            assert registry.get_sample_value("slagate_output_tokens_total") == 9
            assert registry.get_sample_value("slagate_ttft_seconds_count", {"pool": "prefill"}) == 3
            assert registry.get_sample_value("slagate_itl_seconds_count", {"pool": "decode"}) == 3

    run(main)


def test_metrics_01_made_up_model_names_create_no_series() -> None:
    async def main() -> None:
        async with bench() as b:
            registry = b.app.gateway.metrics.registry

            def n_series() -> int:
                return sum(len(family.samples) for family in registry.collect())

            before = n_series()
            for at in range(200):
                await b.call(request(model=f"made-up-{at}"))
            assert n_series() == before
            await b.check_idle(*[Outcome.INVALID] * 200)

    run(main)


def test_i8_spills_are_a_series_of_every_pool_from_the_start() -> None:
    of = fleet()
    metrics = Metrics()
    metrics.watch(Dispatcher(of, rng=rng()))

    def spills(pool: str) -> float | None:
        labels = {"stage": pool, "pool": pool}
        return metrics.registry.get_sample_value("slagate_spills_total", labels)

    assert (spills("prefill"), spills("decode")) == (0, 0)
    for _ in range(3):
        of.pools["decode"].count_spill()
    assert (spills("prefill"), spills("decode")) == (0, 3)
