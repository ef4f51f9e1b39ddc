"""What commands say of a server that they cannot call: one line, with what is wrong and which option."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import grpc
import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from slagate.proto.rpc.status import Status
from slagate.router.cli.command import EXIT_FAILED
from slagate.router.client import CallFailed, engine_at, explain_failure
from slagate.router.commands import cli
from slagate.workers.runtime.probes import serve_probes
from support.gateway.certificates import Ca, Pair

COMMANDS = [
    ("pools",),
    ("generate", "--isl", "3"),
    ("generate", "--isl", "3", "--model", "m"),
    ("explain", "--isl", "3"),
    ("receipts",),
    ("reload",),
    ("grid", "show"),
    ("profile", "measure", "--out", "x", "--kv-bytes", "1"),
]


OR_FULL = "otherwise it may have as many as it takes"


class Fleet(NamedTuple):
    """Certificates, and a server that shows one and asks for one, which knows no method."""

    folder: Path
    ca: Ca
    server: Pair
    client: Pair
    address: str


@contextmanager
def listening(credentials: grpc.ServerCredentials | None) -> Iterator[str]:
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, options=[("grpc.so_reuseport", 0)])
        anywhere = "127.0.0.1:0"
        port = (
            server.add_insecure_port(anywhere)
            if credentials is None
            else server.add_secure_port(anywhere, credentials)
        )
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def shows(pair: Pair, asks_for: Ca | None = None) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(pair.key.read_bytes(), pair.cert.read_bytes())],
        None if asks_for is None else asks_for.path.read_bytes(),
        require_client_auth=asks_for is not None,
    )


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("refusals")
    ca = Ca(folder)
    server, client = ca.issue("server"), ca.issue("client", host="client")
    with listening(shows(server, ca)) as address:
        yield Fleet(folder, ca, server, client, address)


def said(target: str, *options: str, command: tuple[str, ...] = ("pools",)) -> str:
    """The one line that a command says."""
    ended: Any = CliRunner().invoke(cli, [*command, "--target", target, *options])
    assert ended.exit_code == EXIT_FAILED, (ended.exit_code, ended.stderr, ended.exception)
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1, ended.stderr
    return str(ended.stderr).rstrip("\n")


def own(pair: Pair) -> tuple[str, ...]:
    return "--tls-cert", str(pair.cert), "--tls-key", str(pair.key)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_asks_for_the_certificate_that_is_missing(
    fleet: Fleet, command: tuple[str, ...]
) -> None:
    told = said(fleet.address, "--tls-ca", str(fleet.ca.path), command=command)
    asks = "if it asks for a client certificate, give --tls-cert and --tls-key"
    assert told == f"slagate: UNAVAILABLE: {fleet.address} closed the connection: {asks}; {OR_FULL}"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_says_that_plaintext_is_not_spoken(
    fleet: Fleet, command: tuple[str, ...]
) -> None:
    told = said(fleet.address, "--insecure", command=command)
    closed = f"slagate: UNAVAILABLE: {fleet.address} closed the connection: if it speaks TLS, "
    assert told.startswith(f"{closed}give --tls-ca (and --tls-cert and --tls-key, where it asks")
    assert told.endswith(f") in place of --insecure; {OR_FULL}")


def test_a_certificate_of_another_ca_is_named_on_either_side(fleet: Fleet) -> None:
    other = Ca(fleet.folder, "other-ca")
    told = said(fleet.address, "--tls-ca", str(other.path), *own(fleet.client))
    assert told == (
        f"slagate: UNAVAILABLE: the certificate of {fleet.address} is of no CA"
        f" in --tls-ca {other.path}: give the CA that issued it with --tls-ca"
    )
    stranger = other.issue("stranger")
    told = said(fleet.address, "--tls-ca", str(fleet.ca.path), *own(stranger))
    assert told == (
        f"slagate: UNAVAILABLE: {fleet.address} closed the connection: if it does not take --tls-cert"
        f" {stranger.cert}, give one of a CA in its --tls-client-ca; {OR_FULL}"
    )


def test_a_name_that_the_certificate_does_not_have(fleet: Fleet) -> None:
    told = said(
        fleet.address, "--tls-ca", str(fleet.ca.path), *own(fleet.client), "--tls-name", "nobody"
    )
    assert told.endswith(
        f"the certificate of {fleet.address} is not for nobody: give a name of it with --tls-name"
    )


@pytest.mark.parametrize(
    ("from_s", "to_s", "words"),
    [
        (-90.0, -9.0, ", or a CA of it, has expired"),
        (9e3, 1e4, " is not valid yet (or the clock here is wrong)"),
    ],
)
def test_a_certificate_that_is_not_in_time(
    fleet: Fleet, from_s: float, to_s: float, words: str
) -> None:
    pair = fleet.ca.issue("late", from_s=from_s, to_s=to_s)
    with listening(shows(pair)) as address:
        told = said(address, "--tls-ca", str(fleet.ca.path))
    assert told == f"slagate: UNAVAILABLE: the certificate of {address}{words}"


def test_a_server_without_tls_is_told_apart_from_one_that_is_no_grpc(fleet: Fleet) -> None:
    tls = ("--tls-ca", str(fleet.ca.path), *own(fleet.client))
    with listening(None) as address:
        plain = f"{address} does not speak TLS: if it speaks plaintext, give --insecure in place of"
        told = said(address, *tls)
        assert told.startswith(
            f"slagate: UNAVAILABLE: {plain} --tls-ca and --tls-cert and --tls-key; it should"
        )
        unknown = said(address, "--insecure")
        assert unknown.startswith("slagate: UNIMPLEMENTED: ")
        assert unknown.endswith(
            f"Is {address} the gateway's admin listener (`slagate serve --admin`)?"
        )
        assert said(address, "--insecure", command=("generate", "--isl", "3")).endswith(
            "(--listen)?"
        )
    with serve_probes("127.0.0.1", 0, registry=CollectorRegistry(), not_ready=str) as port:
        http = f"127.0.0.1:{port}"
        it = "it should be the gateway's admin listener (`slagate serve --admin`)"
        told = said(http, *tls)
        assert told.startswith(f"slagate: UNAVAILABLE: {http} does not speak TLS: ")
        assert told.endswith(it)
        assert said(http, "--insecure") == f"slagate: UNAVAILABLE: {http} does not speak gRPC; {it}"


def test_nobody_listens() -> None:
    told = said("127.0.0.1:9", "--insecure")
    assert told == (
        "slagate: UNAVAILABLE: cannot connect to 127.0.0.1:9: Connection refused;"
        " it should be the gateway's admin listener (`slagate serve --admin`)"
    )


def test_a_name_that_is_none_is_told() -> None:
    told = said("a..b:9000", "--insecure")
    assert told.startswith("slagate: UNAVAILABLE: cannot connect to a..b:9000: Misformatted domain")
    # What a server is called is not mixed up with what is said of it.
    told = said("alert.issuer.invalid:9", "--insecure")
    assert told.startswith("slagate: UNAVAILABLE: cannot connect to alert.issuer.invalid:9: ")


def test_of_two_servers_the_one_that_failed_is_named() -> None:
    async def main() -> None:
        async with engine_at("127.0.0.1:9", None) as first, engine_at("127.0.0.1:7", None):
            await first.server_info()

    with pytest.raises(Exception) as failed:  # noqa: PT011 - of task groups, with it inside
        anyio.run(main)
    error: Any = failed.value
    while hasattr(error, "exceptions"):
        (error,) = error.exceptions
    assert isinstance(error, CallFailed)
    assert str(error).startswith("UNAVAILABLE: cannot connect to 127.0.0.1:9: Connection refused; ")


@contextmanager
def accepting(meet: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does this with each connection, then closes it."""

    def serve() -> None:
        while True:
            try:
                to, _ = bound.accept()
            except OSError:
                return  # it is over
            with to, contextlib.suppress(OSError):
                meet(to)

    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{bound.getsockname()[1]}"
        finally:
            bound.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextmanager
def openssl(
    pair: Pair,
    *,
    protocol: str,
    asks_for: Ca | None = None,
    closes: bool = False,
    only: ssl.TLSVersion | None = None,
) -> Iterator[str]:
    """A server of TLS that says nothing but its alerts, and waits for its clients to leave, or `closes`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if only is not None:
        context.minimum_version = context.maximum_version = only
    context.load_cert_chain(pair.cert, pair.key)
    context.set_alpn_protocols([protocol])
    if asks_for is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(asks_for.path)

    def meet(to: socket.socket) -> None:
        with context.wrap_socket(to, server_side=True) as shaken:
            if not closes:
                shaken.recv(1)

    with accepting(meet) as address:
        yield address


def test_a_server_that_closes_for_another_reason_may_be_full(fleet: Fleet) -> None:
    """As a gateway does that has as many connections as it takes."""
    with openssl(fleet.server, protocol="h2", closes=True) as address:
        told = said(address, "--tls-ca", str(fleet.ca.path), *own(fleet.client))
    assert told.startswith(f"slagate: UNAVAILABLE: {address} closed the connection: ")
    assert told.endswith(OR_FULL)
    with accepting(lambda _: None) as address:
        assert said(address, "--insecure").endswith(OR_FULL)


@pytest.mark.parametrize("command", [("pools",), ("generate", "--isl", "3")], ids=" ".join)
def test_a_server_that_says_so_by_an_alert_may_ask_for_a_certificate(
    fleet: Fleet, command: tuple[str, ...]
) -> None:
    with openssl(fleet.server, protocol="h2", asks_for=fleet.ca) as address:
        missing = said(address, "--tls-ca", str(fleet.ca.path), command=command)
    assert "if it asks for a client certificate, give --tls-cert and --tls-key" in missing


def test_a_server_of_another_protocol_is_no_grpc(fleet: Fleet) -> None:
    with openssl(fleet.server, protocol="http/1.1") as address:
        told = said(address, "--tls-ca", str(fleet.ca.path))
    assert told.startswith(
        f"slagate: UNAVAILABLE: {address} does not speak gRPC, which is HTTP/2 (ALPN h2); it should be"
    )


def test_a_server_of_tls_1_2_alone_whose_certificate_does_not_do_is_not_called_unreachable(
    fleet: Fleet,
) -> None:
    other = Ca(fleet.folder, "fifth-ca")
    old = ssl.TLSVersion.TLSv1_2
    with openssl(fleet.server, protocol="h2", asks_for=fleet.ca, only=old) as address:
        unknown = said(address, "--tls-ca", str(other.path))
    assert unknown == (
        f"slagate: UNAVAILABLE: the certificate of {address} is of no CA in --tls-ca {other.path}:"
        " give the CA that issued it with --tls-ca"
    )


def test_what_a_server_answers_itself_is_told_as_it_is() -> None:
    """Also where that is about connecting, to others."""
    for words in ("cannot connect to (address): Connection refused", "draining"):
        status = Status(grpc.StatusCode.UNAVAILABLE, words)
        assert explain_failure(status, "127.0.0.1:9", None, "a listener") == words
