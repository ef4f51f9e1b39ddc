"""Clients' connections, counted: how many there are, and what became of the others."""

from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge


class Ended(Enum):
    """How a connection ended. The value is the label."""

    CLIENT = "client"  # closed by the client, or lost on the way
    BROKEN = (
        "broken"  # for what its client did, or did not do: `client.broken` in the log says what
    )
    DRAINED = "drained"  # the gateway shuts down


class Refused(Enum):
    """Why one was not even taken. The value is the label."""

    LIMIT = "limit"  # there were `max_connections` already
    DRAINING = "draining"
    TLS = "tls"  # the handshake failed: `tls.refused` in the log says why


class ConnectionCounts:
    """Of one listener for clients."""

    def __init__(self, registry: CollectorRegistry, gauges: CollectorRegistry) -> None:
        """`gauges` gets the gauge once more."""
        self._n_open = 0
        now = Gauge(
            "slagate_client_connections", "Connections of clients that are open", registry=registry
        )
        # Not written with each change: a process that is started again would go on from there.
        now.set_function(lambda: self._n_open)
        gauges.register(now)
        self._accepted = Counter(
            "slagate_client_connections_accepted",
            "Connections of clients that were taken, with TLS behind the handshake",
            registry=registry,
        )
        ended = Counter(
            "slagate_client_connections_ended",
            "Connections of clients that were taken and are over, by how they ended",
            ["reason"],
            registry=registry,
        )
        refused = Counter(
            "slagate_client_connections_refused",
            "Connections of clients that were not taken, by why",
            ["reason"],
            registry=registry,
        )
        self._ended = {each: ended.labels(reason=each.value) for each in Ended}
        self._refused = {each: refused.labels(reason=each.value) for each in Refused}

    def accepted(self) -> None:
        """One more is open."""
        self._n_open += 1
        self._accepted.inc()

    def ended(self, how: Ended) -> None:
        """One that was open is not any more."""
        self._n_open -= 1
        self._ended[how].inc()

    def refused(self, why: Refused) -> None:
        """One was not taken."""
        self._refused[why].inc()
