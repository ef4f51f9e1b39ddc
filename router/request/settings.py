"""The gateway's own limits; the fleet file says nothing about them."""

from dataclasses import dataclass

CUT_S = 2.0
"""For requests that outlived the drain to get their last status out."""

RECEIPTS_S = 1.0
"""For whoever follows receipts to get the last ones."""

POLICIES = ("slagate", "least_loaded")
"""By targets, and predicted seconds with what each worker has cached; or by predicted load alone."""


@dataclass(frozen=True)
class ClientLimits:
    """Limits of clients' connections, and of requests not yet whole."""

    max_connections: int = 4096
    """At once; one more is closed when it is accepted."""
    max_streams: int = 1000
    """Calls at once on one connection (SETTINGS_MAX_CONCURRENT_STREAMS): clients queue what is more."""
    max_header_bytes: int = 16 << 10
    """Of one call, as many as grpcio takes. More of them end the connection."""
    max_arriving_bytes: int = 256 << 20
    """Of requests that are not whole, in all: one that needs more is refused (RESOURCE_EXHAUSTED)."""
    arrival_s: float = 60.0
    """Seconds for a request to arrive whole."""
    handshake_s: float = 10.0
    """Seconds for a connection to send the preface of HTTP/2."""
    resets: tuple[int, int] = (1000, 100)
    """Calls given up on one connection: at once, and each second. With more of them it takes no new ones
    (ENHANCE_YOUR_CALM)."""
    control_frames: tuple[int, int] = (200, 20)
    """Pings, settings and the like on one connection: at once, and each second; grpcio, which measures
    bandwidth with them, sends ten. More of them end the connection (ENHANCE_YOUR_CALM)."""


@dataclass(frozen=True)
class Settings:
    """Settings, fixed at start; those without a command-line option are not meant to be tuned."""

    max_request_bytes: int = 8 << 20
    """A serialised request: about 2.7 million tokens, above any context window of today."""
    max_buffer_bytes: int = 1 << 20
    """Output that may wait for one client before its worker is asked to wait too."""
    stuck_s: float = 2.0
    """How long such a client may then take nothing before its stream is ended (RESOURCE_EXHAUSTED)."""
    default_timeout_s: float = 600.0
    """Limit of a request whose client set no deadline."""
    drain_s: float = 30.0
    """How long running requests get to finish after SIGTERM."""
    worker_drain_s: float = 600.0
    """How long a worker that a reload removed gets to finish its requests."""
    watch_config: bool = False
    """Whether the configuration is reloaded when its files change."""
    max_attempts: int = 3
    """Workers that one stage of a request may try."""
    policy: str = "slagate"
    """How workers are chosen; one of `POLICIES`."""
    max_waiting: int = 1024
    """Requests that may wait because every worker for them is at its limit."""
    client_receipts: bool = True
    """Whether clients may ask for receipts, which name pools and workers and show their load."""
    clients: ClientLimits = ClientLimits()
    """Limits of connections and of requests that arrive."""
