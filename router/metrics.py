"""Every metric family, in one place. Labels come from closed sets; workers appear on gauges only."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slagate.pools.fleet import Fleet
from slagate.pools.member import State
from slagate.router.errors import Outcome
from slagate.router.receipts import Record

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60)
ITL_BUCKETS_S = (0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)


class Metrics:
    """One gateway's metrics, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "slagate_requests", "Requests by how they ended", ["outcome"], registry=self.registry
        )
        self.ttft = Histogram(
            "slagate_ttft_seconds",
            "From the arrival of a request to its first token, by the pool that prefilled it",
            ["pool"],
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.itl = Histogram(
            "slagate_itl_seconds",
            "Mean time between a request's tokens, by the pool that decoded it",
            ["pool"],
            buckets=ITL_BUCKETS_S,
            registry=self.registry,
        )
        self.targets = Counter(
            "slagate_targets",
            "Requests with a latency target, by whether it was met",
            ["target", "pool", "met"],
            registry=self.registry,
        )
        self.tokens = Counter(
            "slagate_output_tokens", "Tokens sent to clients", registry=self.registry
        )
        self.retries = Counter(
            "slagate_retries",
            "Legs that were tried again on another worker",
            ["stage", "code"],
            registry=self.registry,
        )
        self.handoffs_released = Counter(
            "slagate_handoffs_released",
            "Handoffs that no decode worker collected, by what became of them",
            ["result"],
            registry=self.registry,
        )
        for outcome in Outcome:
            self.requests.labels(outcome=outcome.value)

    def measure(self, record: Record, outcome: Outcome) -> None:
        """Count one request that has ended."""
        self.requests.labels(outcome=outcome.value).inc()
        self.tokens.inc(record.tally.n_tokens)
        if record.decision is None:
            return
        prefill_pool, decode_pool = record.decision.stages[0].pool, record.decision.stages[-1].pool
        if record.ttft_s is not None:
            self.ttft.labels(pool=prefill_pool).observe(record.ttft_s)
        if record.itl_s is not None:
            self.itl.labels(pool=decode_pool).observe(record.itl_s)
        for target, pool, met in (
            ("ttft", prefill_pool, record.ttft_met()),
            ("itl", decode_pool, record.itl_met()),
        ):
            if met is not None:
                self.targets.labels(target=target, pool=pool, met=str(met).lower()).inc()

    def watch(self, fleet: Fleet) -> None:
        """Add the gauges that read the fleet at scrape time."""
        self.registry.register(_FleetCollector(fleet))


class _FleetCollector(Collector):
    """Reads the owner when scraped: a second copy of the state would only be another thing to be wrong."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        labels = ["stage", "pool", "worker"]
        inflight = GaugeMetricFamily(
            "slagate_worker_inflight", "Leases held on a worker", labels=labels
        )
        queued = GaugeMetricFamily(
            "slagate_worker_queued_tokens",
            "Prompt tokens leased to a worker and not prefilled yet",
            labels=labels,
        )
        context = GaugeMetricFamily(
            "slagate_worker_context_tokens",
            "Prompt tokens of the requests a worker decodes",
            labels=labels,
        )
        ready = GaugeMetricFamily(
            "slagate_worker_ready", "1 while a worker may take requests", labels=labels
        )
        for member in self._fleet.members():
            values = [member.stage.value, member.pool, member.address]
            inflight.add_metric(values, member.inflight)
            queued.add_metric(values, member.queued_tokens)
            context.add_metric(values, member.context_tokens)
            ready.add_metric(values, float(member.state is State.READY))
        yield from (inflight, queued, context, ready)
        spills = CounterMetricFamily(
            "slagate_spills",
            "Legs that a pool got because those before it in the order had nobody",
            labels=labels[:2],
        )
        for pool in self._fleet.pools.values():
            spills.add_metric([pool.stage.value, pool.name], pool.spills_total)
        yield spills
