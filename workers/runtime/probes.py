"""Serves `/metrics`, `/healthz` and `/readyz` over HTTP, on a thread.

Rendering thousands of series takes milliseconds, in which the event loop must not wait. The thread only
reads numbers from their owners, and asks one function for readiness.
"""

import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from slagate.proto.rpc.address import Address

log = logging.getLogger(__name__)


@contextmanager
def serve_probes(
    host: str, port: int, *, registry: CollectorRegistry, not_ready: Callable[[], str]
) -> Iterator[int]:
    """Context manager that serves the paths until it exits; yields the port. Raises `OSError`.

    `not_ready`, called on a thread, says why the process cannot serve requests; "" when it can.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # seconds after which a silent peer's thread ends

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif path == "/healthz":
                self._answer(200, b"ok\n")
            elif path == "/readyz":
                reason = not_ready()
                self._answer(503 if reason else 200, f"{reason or 'ready'}\n".encode())
            else:
                self._answer(404, b"not found: try /metrics, /healthz, /readyz\n")

        def _answer(self, code: int, body: bytes, content_type: str = "text/plain") -> None:
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing, as scrapes come every few seconds."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def server_bind(self) -> None:
            # Unlike the base class, this does not wait for DNS to resolve a name that is not used.
            socketserver.TCPServer.server_bind(self)

        def handle_error(self, request: Any, client_address: Any) -> None:
            # The base class prints to stderr, which is for lines of JSON. A scraper that left is no error.
            if not isinstance(sys.exc_info()[1], ConnectionError):
                log.exception("probes.bug")

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise OSError(f"cannot listen on {Address(host, port)}: {error.strerror}") from error
    with server:
        thread = threading.Thread(
            target=server.serve_forever, args=(0.05,), name="probes", daemon=True
        )
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()
