"""TLS of the product as it is run: a gateway and its workers over mTLS, with certificates that change."""

import contextlib
import functools
import json
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from slagate.proto import gateway_pb2 as gw
from slagate.proto import gateway_pb2_grpc as gw_grpc
from support.engine.tokens import expected
from support.gateway.certificates import Ca, Pair
from support.gateway.processes import (
    Gateway,
    Process,
    eventually,
    fleet_config,
    run_cli,
    run_here,
    running,
    serve_arguments,
    worker_arguments,
)
from support.limits import HANG_S
from support.seeds import is_long_run


class Fleet(NamedTuple):
    """A ready gateway over a prefill and a decode worker, all of it mTLS with one CA."""

    ca: Ca
    gateway: Process
    workers: list[Process]
    options: tuple[str, ...]  # of a command that calls any of them
    n_processes: int  # of the gateway

    @property
    def admin_address(self) -> str:
        return str(self.gateway.ready["admin"])


def listens(ca: Ca, name: str) -> tuple[str, ...]:
    pair = ca.issue(name)
    files = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    return (*files, "--tls-client-ca", str(ca.path))


def calls(ca: Ca, pair: Pair, prefix: str = "--") -> tuple[str, ...]:
    files = (f"{prefix}tls-cert", str(pair.cert), f"{prefix}tls-key", str(pair.key))
    return (f"{prefix}tls-ca", str(ca.path), *files)


@contextlib.contextmanager
def mtls_fleet(folder: Path, *, n_processes: int) -> Iterator[Fleet]:
    ca = Ca(folder)
    options = calls(ca, ca.issue("operator", host="operator"))
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                running(role, worker_arguments(role, tls=listens(ca, role)), folder)
            )
            for role in ("prefill", "decode")
        ]
        config = folder / "fleet.json"
        pools = {w.name[0]: (w.name, [w.address]) for w in workers}
        config.write_text(json.dumps(fleet_config(pools)))
        tls = (*listens(ca, "gateway"), *calls(ca, ca.issue("to-workers"), "--worker-"))
        gateway = stack.enter_context(
            running("gw", serve_arguments(config, "--processes", str(n_processes), tls=tls), folder)
        )
        fleet = Fleet(ca, gateway, workers, options, n_processes)
        eventually(lambda: are_ready(fleet), "every worker is ready")
        yield fleet
        for process in (gateway, *workers):
            assert process.terminate() == 0
            assert "Traceback" not in process.stderr()


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Fleet]]:
    """The fleet whose gateway has so many processes, started when it is first asked for."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def started(n_processes: int) -> Fleet:
            folder = tmp_path_factory.mktemp("tls")
            return stack.enter_context(mtls_fleet(folder, n_processes=n_processes))

        yield started


@pytest.fixture(params=[1, 2] if is_long_run() else [1])
def fleet(request: pytest.FixtureRequest, fleets: Callable[[int], Fleet]) -> Fleet:
    """With one and with two processes of the gateway."""
    return fleets(request.param)


def are_ready(fleet: Fleet) -> bool:
    shown = run_here("pools", "--json", "--target", fleet.admin_address, *fleet.options)
    assert shown.returncode == 0, shown.stderr
    return all(each["state"] == "ready" for each in json.loads(shown.stdout)["workers"])


def certificate(address: str, ca: Path, pair: Pair) -> bytes:
    """What a new connection is shown, as DER; the handshake must succeed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    context.load_cert_chain(pair.cert, pair.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=HANG_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as to,
    ):
        return to.getpeercert(binary_form=True) or b""


def test_a_fleet_over_mtls_serves_and_takes_over_new_certificates(
    fleet: Fleet, tmp_path: Path
) -> None:
    answer = run_cli(
        *("generate", "--target", fleet.gateway.address, "--tokens", "1,2,3"),
        *("--max-tokens", "5", *fleet.options),
    )
    assert answer.returncode == 0, answer.stderr
    assert [int(word) for word in answer.stdout.split()] == expected([1, 2, 3], 5)

    without = run_here("pools", "--target", fleet.admin_address, "--tls-ca", str(fleet.ca.path))
    assert without.returncode == 1
    assert "UNAVAILABLE" in without.stderr
    plain = run_here("pools", "--target", fleet.admin_address, "--insecure")
    assert plain.returncode == 1
    anonymous = ("--tls-ca", str(fleet.ca.path))
    stranger = run_here("generate", "--target", fleet.gateway.address, "--isl", "3", *anonymous)
    assert "asks for a client certificate" in stranger.stderr
    served = Gateway(fleet.gateway)
    with served.channel:
        refusals = served.metrics("slagate_client_connections_refused_total")
    assert refusals['{reason="tls"}'] >= 1
    # Refused by a listener of gRPC's own once more, which has its own ways with stderr.
    for process in fleet.workers:
        with pytest.raises(ssl.SSLError):
            certificate(process.address, Ca(tmp_path, "unknown").path, fleet.ca.issue("x"))

    pair = fleet.ca.issue("other-operator")
    addresses = {
        "gateway": [fleet.gateway.address, fleet.admin_address],
        **{each.name: [each.address] for each in fleet.workers},
    }
    for name, places in addresses.items():
        new = ssl.PEM_cert_to_DER_cert(fleet.ca.issue(name).cert.read_text())
        for address in places:
            eventually(
                lambda a=address, n=new: certificate(a, fleet.ca.path, pair) == n,  # type: ignore[misc]
                f"{name} shows its new certificate at {address}",
            )
    again = run_here(
        *("generate", "--target", fleet.gateway.address, "--tokens", "1,2,3"),
        *("--max-tokens", "5", *fleet.options),
    )
    assert again.stdout == answer.stdout
    # With several processes the parent, too, as it has the admin listener.
    n_of_gateway = 1 if fleet.n_processes == 1 else fleet.n_processes + 1
    for process in (fleet.gateway, *fleet.workers):
        n_wanted = n_of_gateway if process is fleet.gateway else 1
        eventually(
            lambda p=process, n=n_wanted: p.stderr().count('"tls.renewed"') == n,  # type: ignore[misc]
            f"{process.name} has taken over its certificate once in each process",
        )
        # At a SIGHUP, those to workers too, and none of them ends.
        n_sides = 1
        if process is fleet.gateway:
            n_sides = 2 if fleet.n_processes == 1 else 2 * fleet.n_processes + 1
        process.popen.send_signal(signal.SIGHUP)
        eventually(
            lambda p=process, n=n_wanted + n_sides: p.stderr().count('"tls.renewed"') == n,  # type: ignore[misc]
            f"{process.name} has read its files again in each process",
        )
        assert all(isinstance(json.loads(line), dict) for line in process.stderr().splitlines())


def test_grpcio_reads_the_admin_listener_and_the_metric_says_when_certificates_end(
    fleet: Fleet,
) -> None:
    pair = fleet.ca.issue("grpcio")
    credentials = grpc.ssl_channel_credentials(
        fleet.ca.path.read_bytes(), pair.key.read_bytes(), pair.cert.read_bytes()
    )
    with grpc.secure_channel(fleet.admin_address, credentials) as channel:
        pools = gw_grpc.GatewayStub(channel).ListPools(gw.ListPoolsRequest(), timeout=HANG_S).pools
    assert {pool.workers_ready for pool in pools} == {1}
    gateway = Gateway(fleet.gateway)
    with gateway.channel:
        ends = gateway.metrics("slagate_tls_certificate_expiry_seconds")
    assert set(ends) == {'{side="clients"}', '{side="workers"}'}
    assert min(ends.values()) > 0
