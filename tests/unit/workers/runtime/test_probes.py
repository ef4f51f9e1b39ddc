"""The HTTP listener over real sockets on loopback."""

import http.client
import logging
import socket
import struct
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from slagate.router.metrics import Metrics
from slagate.workers.runtime.probes import serve_probes
from support.limits import HANG_S


@pytest.fixture(scope="module")
def reason() -> list[str]:
    """One text: why the server is not ready."""
    return [""]


@pytest.fixture(scope="module")
def port(reason: list[str]) -> Iterator[int]:
    registry = CollectorRegistry()
    Counter("cakes", "Cakes eaten", registry=registry).inc(3)
    with serve_probes("127.0.0.1", 0, registry=registry, not_ready=lambda: reason[0]) as served:
        yield served


def get(port: int, path: str, method: str = "GET") -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read().decode()
    finally:
        connection.close()


def test_alive_is_always_ok_and_ready_says_why_not(port: int, reason: list[str]) -> None:
    reason[0] = "no decode worker is ready"
    assert get(port, "/healthz")[::2] == (200, "ok\n")
    assert get(port, "/readyz")[::2] == (503, "no decode worker is ready\n")
    reason[0] = ""
    assert get(port, "/readyz")[::2] == (200, "ready\n")


def test_metrics_are_in_the_text_format(port: int) -> None:
    status, kind, body = get(port, "/metrics")
    assert status == 200
    assert kind.startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(body)}
    assert families["cakes"].samples[0].value == 3


@pytest.mark.parametrize("path", ["/", "/metrics/", "/health", "/../etc/passwd"])
def test_other_paths_are_not_found(port: int, path: str) -> None:
    assert get(port, path)[0] == 404


def test_only_reading_is_offered(port: int) -> None:
    assert get(port, "/metrics", "POST")[0] == 501


def test_the_gateways_own_metrics_render_and_the_port_is_free_again_afterwards() -> None:
    registry = Metrics().registry
    with serve_probes("127.0.0.1", 0, registry=registry, not_ready=str) as port:
        assert 'slagate_requests_total{outcome="completed"} 0.0' in get(port, "/metrics")[2]
        taken = serve_probes("127.0.0.1", port, registry=registry, not_ready=str)
        with pytest.raises(OSError, match="in use"), taken:
            pass
    with pytest.raises(ConnectionRefusedError):
        get(port, "/healthz")
    with serve_probes("127.0.0.1", port, registry=registry, not_ready=str) as same:
        assert same == port


class Broken(Collector):
    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        raise RuntimeError("a bug")


def test_a_bug_is_a_line_of_the_log_and_a_scraper_that_leaves_is_none(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    registry = CollectorRegistry()
    registry.register(Broken())
    with serve_probes("127.0.0.1", 0, registry=registry, not_ready=str) as port:
        leaving = socket.create_connection(("127.0.0.1", port))
        leaving.sendall(b"GET /metr")
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        leaving.close()  # with a reset
        with pytest.raises(http.client.RemoteDisconnected):
            get(port, "/metrics")
    # The connection ends behind the line.
    assert [(each.levelno, each.message) for each in caplog.records] == [
        (logging.ERROR, "probes.bug")
    ]
    assert capfd.readouterr() == ("", "")
