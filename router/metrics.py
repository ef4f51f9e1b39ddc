"""The gateway's metric families: requests, workers, and clients' connections.

Labels come from closed sets; workers appear on gauges only.
"""

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from slagate.pools.estimator.accuracy import BASES
from slagate.pools.fleet.fleet import Fleet
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pairing import pair_statuses
from slagate.pools.inflight.row_view import State
from slagate.pools.inflight.shared_counts import PoolCell
from slagate.pools.kv_events.view import EventMode, EventView
from slagate.router.receipts.feedback import accuracies
from slagate.router.receipts.record import Latencies, Record
from slagate.router.request.errors import Outcome
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.workers.tls.reloading import TlsSide


class ConnectionEnd(Enum):
    """How a client's connection ended. The value is the label of the metric."""

    CLIENT = "client"  # closed by the client, or lost on the way
    # For what its client did, or did not do: `client.broken` in the log says what.
    BROKEN = "broken"
    DRAINED = "drained"  # the gateway shuts down


class RefusedConnection(Enum):
    """Why a client's connection was not accepted. The value is the label of the metric."""

    LIMIT = "limit"  # there were `max_connections` already
    DRAINING = "draining"
    TLS = "tls"  # the handshake failed: `tls.refused` in the log says why


class ConnectionCounts:
    """The metrics on clients' connections."""

    def __init__(self, registry: CollectorRegistry, gauges: CollectorRegistry) -> None:
        """`registry` gets all of them, `gauges` also the gauge of open connections."""
        counter = partial(Counter, registry=registry)
        self._n_open = 0
        n_open = Gauge(
            "slagate_client_connections", "Connections of clients that are open", registry=registry
        )
        # Read at scrape time: a written value would be kept for a process that is started again.
        n_open.set_function(lambda: self._n_open)
        gauges.register(n_open)
        self._accepted = counter(
            "slagate_client_connections_accepted",
            "Connections of clients that were taken, with TLS behind the handshake",
        )
        ended = counter(
            "slagate_client_connections_ended",
            "Connections of clients that were taken and are over, by how they ended",
            ["reason"],
        )
        refused = counter(
            "slagate_client_connections_refused",
            "Connections of clients that were not taken, by why",
            ["reason"],
        )
        self._ended = {each: ended.labels(reason=each.value) for each in ConnectionEnd}
        self._refused = {each: refused.labels(reason=each.value) for each in RefusedConnection}

    def accepted(self) -> None:
        """Count a connection that was opened."""
        self._n_open += 1
        self._accepted.inc()

    def ended(self, how: ConnectionEnd) -> None:
        """Count a connection that was open and has ended."""
        self._n_open -= 1
        self._ended[how].inc()

    def refused(self, why: RefusedConnection) -> None:
        """Count a connection that was not taken."""
        self._refused[why].inc()


TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60)
ITL_BUCKETS_S = (0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)


_MISS = "Requests predicted to miss their targets everywhere: refused, shadow, served, relegated or waits"
_BYPASSED = "Requests that a decode worker served without a prefill worker, by its pool"

_LABEL = {True: "true", False: "false"}

_FamilyT = TypeVar("_FamilyT", Counter, Histogram)


class _Histogram(Histogram):
    """Finds the bucket by bisection; the library's own compares with one after the other."""

    @override
    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        assert exemplar is None, "nobody gives any"
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)


class _Children(dict[tuple[str, ...], _FamilyT]):
    """A family's child for each tuple of label values, made when it is first asked for."""

    def __init__(self, family: _FamilyT) -> None:
        super().__init__()
        self._family: _FamilyT = family

    def __missing__(self, labels: tuple[str, ...]) -> _FamilyT:
        made: _FamilyT = self._family.labels(*labels)
        self[labels] = made
        return made


class Metrics:
    """One gateway's metrics, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        # Has the gauges alone, for the parent of several processes.
        self.gauges = CollectorRegistry()
        self.connections = ConnectionCounts(registry, self.gauges)
        counter = partial(Counter, registry=registry)
        histogram = partial(_Histogram, registry=registry)
        self.requests = counter("slagate_requests", "Requests by how they ended", ["outcome"])
        self._of_outcome = {each: self.requests.labels(outcome=each.value) for each in Outcome}
        ttft = histogram(
            "slagate_ttft_seconds",
            "From the arrival of a request to its first token, by the pool that prefilled it",
            ["pool"],
            buckets=TTFT_BUCKETS_S,
        )
        itl = histogram(
            "slagate_itl_seconds",
            "Mean time between a request's tokens, by the pool that decoded it",
            ["pool"],
            buckets=ITL_BUCKETS_S,
        )
        targets = counter(
            "slagate_targets",
            "Requests with a latency target, by whether it was met",
            ["target", "pool", "met"],
        )
        self._ttft, self._itl, self._targets = _Children(ttft), _Children(itl), _Children(targets)
        self._bypassed = _Children(counter("slagate_bypassed_requests", _BYPASSED, ["pool"]))
        self._misses = _Children(counter("slagate_predicted_misses", _MISS, ["class", "admission"]))
        self.tokens = counter("slagate_output_tokens", "Tokens sent to clients")
        self.retries = counter(
            "slagate_retries", "Legs that were tried again on another worker", ["stage", "code"]
        )
        self.handoffs_released = counter(
            "slagate_handoffs_released",
            "Handoffs that no decode worker collected, by what became of them",
            ["result"],
        )
        self.waits = histogram(
            "slagate_wait_seconds",
            "Time that requests waited for a worker below its limit, those that did not wait included",
            buckets=TTFT_BUCKETS_S,
        )
        reloads = counter(
            "slagate_reloads",
            "Configurations that were to be put in force, by what became of them",
            ["result"],
        )
        self.reloads = {each: reloads.labels(result=each) for each in ("applied", "refused")}
        self.drains_cut = counter(
            "slagate_drains_cut", "Workers that drained for too long and had their requests ended"
        )
        self.certificates = Gauge(
            "slagate_tls_certificate_expiry_seconds",
            "Unix time from which the certificate in use is refused: of the listeners (clients), or as "
            "workers see it",
            ["side"],
            registry=registry,
        )
        self.gauges.register(self.certificates)

    def measure(self, record: Record, outcome: Outcome, latencies: Latencies) -> None:
        """Count one request that has ended, with its tokens, latencies and targets."""
        self._of_outcome[outcome].inc()
        self.tokens.inc(record.stats.n_tokens)
        if record.decision is None:
            return
        self.waits.observe(record.waited_s)
        if record.decision.admission:
            self._misses[record.decision.class_name, record.decision.admission].inc()
        prefill_pool, decode_pool = record.decision.stages[0].pool, record.decision.stages[-1].pool
        if record.decision.untaken and record.decoded and record.decision.is_bypass:
            self._bypassed[decode_pool,].inc()
        ttft_s, itl_s, ttft_met, itl_met = latencies
        if ttft_s is not None:
            self._ttft[prefill_pool,].observe(ttft_s)
        if ttft_met is not None:
            self._targets["ttft", prefill_pool, _LABEL[ttft_met]].inc()
        if itl_s is not None:
            self._itl[decode_pool,].observe(itl_s)
        if itl_met is not None:
            self._targets["itl", decode_pool, _LABEL[itl_met]].inc()

    def watch(self, dispatcher: Dispatcher) -> None:
        """Add the gauges of workers, pools and waiting requests, which are read at scrape time."""
        collector = _FleetCollector(dispatcher)
        self.registry.register(collector)
        self.gauges.register(collector)

    def watch_certificate(self, side: TlsSide) -> None:
        """Add the gauge of when the own certificate of this TLS side expires, if it has one."""
        if side.files.cert is not None:
            gauge = self.certificates.labels(side=side.side)
            gauge.set_function(lambda: side.current.own.ends_at_s if side.current.own else 0.0)


_OF_WORKER: tuple[tuple[str, str, Callable[[Member], float]], ...] = (
    ("inflight", "Leases held on a worker", lambda m: m.ranks.inflight),
    (
        "queued_tokens",
        "Prompt tokens leased to a worker and not prefilled yet, less what it had cached",
        lambda m: m.ranks.queued_tokens,
    ),
    (
        "context_tokens",
        "Prompt tokens of the requests a worker decodes",
        lambda m: m.ranks.context_tokens,
    ),
    ("ready", "1 while a worker may take requests", lambda m: m.state is State.READY),
    (
        "prefix_predicted_tokens",
        "Prompt tokens of processed requests that were predicted to be cached there",
        lambda m: m.prefix_error.predicted_tokens,
    ),
    (
        "prefix_cached_tokens",
        "Prompt tokens of the same requests that the engine says were cached",
        lambda m: m.prefix_error.engine_cached_tokens,
    ),
    (
        "prefix_error_tokens",
        "Differences between the two, summed over the requests",
        lambda m: m.prefix_error.abs_error_tokens,
    ),
)

_OF_EVENTS: tuple[tuple[str, str, Callable[[EventView], float]], ...] = (
    (
        "events_live",
        "1 while a worker's KV events are followed",
        lambda e: e.mode is EventMode.LIVE,
    ),
    (
        "events_silent",
        "1 for a worker that processes requests and publishes no KV event",
        lambda e: e.is_silent,
    ),
    (
        "events_partial",
        "1 while a worker may have more cached than is known, for want of a snapshot",
        lambda e: e.is_partial,
    ),
    (
        "event_lag_seconds",
        "Age of the newest KV event applied while others wait",
        lambda e: e.lag_s,
    ),
    ("events_applied", "KV events applied", lambda e: e.n_events),
    ("event_gaps", "Places where KV events were missing", lambda e: e.n_gaps),
    ("event_resyncs", "Times that a rank started over with a snapshot", lambda e: e.n_resyncs),
    ("event_errors", "KV events and batches that made no sense", lambda e: e.n_errors),
    (
        "index_rebuild_seconds",
        "Time from the last subscription to an index that is up to date",
        lambda e: e.rebuild_s,
    ),
    ("index_blocks", "KV blocks known to be cached on a worker", lambda e: e.n_blocks),
    ("index_pending_blocks", "KV blocks whose parent is not known", lambda e: e.n_pending),
)


class _FleetCollector(Collector):
    """Reads the fleet when it is scraped: a second copy of the figures could be wrong."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        fleet = self._dispatcher.fleet
        members = [(m, [m.stage.value, m.pool, m.address]) for m in fleet.all_members()]
        for name, text, figure in _OF_WORKER:
            yield _gauge(name, text, ((labels, figure(m)) for m, labels in members))
        for name, text, of_events in _OF_EVENTS:
            followed = ((labels, m.events) for m, labels in members)
            yield _gauge(
                name, text, ((labels, of_events(e)) for labels, e in followed if e is not None)
            )
        yield from _of_pools(fleet)
        yield GaugeMetricFamily(
            "slagate_waiting_requests",
            "Requests that wait for a worker below its limit",
            value=self._dispatcher.n_waiting,
        )


def _gauge(name: str, text: str, values: Iterable[tuple[list[str], float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"slagate_worker_{name}", text, labels=["stage", "pool", "worker"])
    for labels, value in values:
        family.add_metric(labels, float(value))
    return family


def _of_pools(fleet: Fleet) -> Iterator[Metric]:
    labels = ["stage", "pool"]
    spills = CounterMetricFamily(
        "slagate_spills",
        "Legs that went past the pools before it in the order: by load, or as those had nobody",
        labels=labels,
    )
    gauge = partial(GaugeMetricFamily, labels=[*labels, "latency"])
    bias = gauge(
        "slagate_prediction_bias_ratio",
        "Geometric mean of predicted / actual of a pool's newest requests, less 1",
    )
    error = gauge(
        "slagate_prediction_error_ratio",
        "Median of |predicted - actual| / actual of a pool's newest requests",
    )
    coverage = gauge(
        "slagate_prediction_coverage_ratio",
        "Share of a pool's newest requests that kept the tightest target which their prediction allows",
    )
    basis = GaugeMetricFamily(
        "slagate_prediction_basis",
        "Processes in which a pool's predictions are based on this",
        labels=[*labels, "latency", "basis"],
    )
    workers = GaugeMetricFamily(
        "slagate_pool_workers",
        "Workers of a pool by state, those that drain besides it included",
        labels=[*labels, "state"],
    )
    unpaired = GaugeMetricFamily(
        "slagate_pool_unpaired_workers",
        "Ready prefill or decode workers that fit none of the other stage",
        labels=labels,
    )
    statuses = pair_statuses(fleet.members())
    for pool in fleet.all_pools:
        of_pool = [pool.stage.value, pool.name]
        members = list(pool.members.values())
        n_unpaired = sum(bool(statuses[each].problem) for each in members if each in statuses)
        unpaired.add_metric(of_pool, n_unpaired)
        states = Counts(member.state for member in pool.all_members)
        for state in State:
            if state is not State.LEFT:
                workers.add_metric([*of_pool, state.value], states[state])
        spills.add_metric(of_pool, pool.table.totals[PoolCell.SPILLS])
        for latency, accuracy, share in accuracies(pool):
            for each in BASES:
                basis.add_metric([*of_pool, latency, each], each == accuracy.basis)
            if (figures := accuracy.figures(share)) is not None:
                bias.add_metric([*of_pool, latency], figures.bias)
                error.add_metric([*of_pool, latency], figures.median_error)
                coverage.add_metric([*of_pool, latency], figures.coverage)
    yield from (spills, bias, error, coverage, basis, workers, unpaired)
