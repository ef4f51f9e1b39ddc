"""Relays that are measured, as processes: ours, nginx, envoy."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.relay.programs import port_of, running

ENVOY = Path("build/envoy/envoy/_bin/envoy")
"""Where `make bench-relay` puts it, where there is a wheel for this machine."""


class Proxy(NamedTuple):
    """A relay that is running."""

    pid: int
    addresses: list[str]


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def python_relay(
    module: str, options: Sequence[str], folder: Path, core: int, addresses: list[str]
) -> Iterator[Proxy]:
    """One of ours."""
    name = "-".join([module, *options]).replace("/", "_")
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", f"bench.relay.{module}", *options, *addresses]
    with running(command, core, log=log) as process:
        yield Proxy(process.pid, [f"127.0.0.1:{port_of(process, log)}"])


NGINX = """
daemon off;
worker_processes 1;
{user}
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log warn;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/nginx-body;
  proxy_temp_path {folder}/nginx-proxy;
  fastcgi_temp_path {folder}/nginx-fastcgi;
  uwsgi_temp_path {folder}/nginx-uwsgi;
  scgi_temp_path {folder}/nginx-scgi;
  upstream workers {{
    {servers}
    keepalive 512;
    keepalive_requests 1000000000;
    keepalive_time 24h;
  }}
  server {{
    listen 127.0.0.1:{port} http2;
    keepalive_requests 1000000000;
    keepalive_time 24h;
    http2_max_concurrent_streams 4096;
    http2_body_preread_size 256k;
    client_max_body_size 0;
    client_body_buffer_size 1m;
    location / {{
      grpc_pass grpc://workers;
      grpc_buffer_size 64k;
      grpc_read_timeout 600s;
      grpc_send_timeout 600s;
    }}
  }}
}}
"""


def nginx_program() -> str:
    """Where it is. Raises `RuntimeError`."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise RuntimeError("nginx is not installed")
    return program


def nginx_version() -> str:
    """As it says itself."""
    said = subprocess.run([nginx_program(), "-v"], capture_output=True, text=True, check=True)
    return said.stderr.strip().rpartition("/")[2]


@contextmanager
def nginx(folder: Path, core: int, addresses: list[str]) -> Iterator[Proxy]:
    """One worker process, connections to the backends that are kept, nothing on disk."""
    port = free_port()
    file = folder / "nginx.conf"
    file.write_text(
        NGINX.format(
            folder=folder,
            port=port,
            servers=" ".join(f"server {address};" for address in addresses),
            user="user root;" if os.geteuid() == 0 else "",
        )
    )
    log = folder / "nginx.log"
    with running([nginx_program(), "-e", str(log), "-c", str(file)], core, log=log) as process:
        _wait_for(port, process, log)
        yield Proxy(process.pid, [f"127.0.0.1:{port}"])


def _wait_for(port: int, process: "subprocess.Popen[str]", log: Path) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except ConnectionRefusedError:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args!r}: {log.read_text()[-2000:]}") from None
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        else:
            return


def _envoy_config(port: int, addresses: Sequence[str]) -> dict[str, Any]:
    http2 = {"explicit_http_config": {"http2_protocol_options": {"max_concurrent_streams": 4096}}}
    options = {"@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions", **http2}
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "relay",
        "codec_type": "HTTP2",
        "http2_protocol_options": {"max_concurrent_streams": 4096},
        "generate_request_id": False,
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {"cluster": "workers", "timeout": "0s"},
                        }
                    ],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"},
            }
        ],
    }
    cluster = {
        "name": "workers",
        "type": "STATIC",
        "circuit_breakers": {"thresholds": [{"max_requests": 100_000}]},
        "typed_extension_protocol_options": {_OPTIONS: options},
        "load_assignment": {
            "cluster_name": "workers",
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": _socket(each)}} for each in addresses]}
            ],
        },
    }
    listener = {
        "address": _socket(f"127.0.0.1:{port}"),
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": manager,
                    }
                ]
            }
        ],
    }
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _socket(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


_TYPES = "type.googleapis.com/envoy.extensions"
_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def has_envoy() -> bool:
    """Whether there is one here, and it runs."""
    if not ENVOY.exists():
        return False
    said = subprocess.run([ENVOY, "--version"], capture_output=True)
    return said.returncode == 0


@contextmanager
def envoy(folder: Path, core: int, addresses: list[str]) -> Iterator[Proxy]:
    """One worker thread."""
    port = free_port()
    file = folder / "envoy.json"
    file.write_text(json.dumps(_envoy_config(port, addresses)))
    log = folder / "envoy.log"
    options = ["--concurrency", "1", "--log-level", "warning", "--use-dynamic-base-id"]
    with running([str(ENVOY), *options, "-c", str(file)], core, log=log) as process:
        _wait_for(port, process, log)
        yield Proxy(process.pid, [f"127.0.0.1:{port}"])
