"""Streams to workers over TLS, against real grpcio servers and against servers that are none."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
import uvloop

from slagate.proto.http2.connection import H2Connection, H2Stream
from slagate.proto.http2.goaway import all_closed
from slagate.proto.http2.interfaces import Headers, Http2Settings
from slagate.proto.rpc.headers import CONTENT_TYPE, status_headers
from slagate.proto.rpc.status import OK
from slagate.workers.client.client import WorkerClient
from slagate.workers.tls.reloading import ClientTls, ServerTls
from support.gateway.certificates import Ca, Pair, files
from support.http2.grpc_peers import Order, Serve, aio_peer, sync_peer
from support.limits import HANG_S
from support.worker.bytes_sink import BytesSink

LOOPS = {"uvloop": {"loop_factory": uvloop.new_event_loop}, "asyncio": {}}
either = pytest.mark.parametrize("serve", [sync_peer, aio_peer])
on_both_loops = pytest.mark.parametrize("loop", LOOPS)


def run(main: Callable[[], Awaitable[None]], loop: str = "uvloop") -> None:
    async def limited() -> None:
        with anyio.fail_after(HANG_S):
            await main()
            await all_closed()

    anyio.run(limited, backend_options=LOOPS[loop])


async def ask(address: str, tls: ClientTls | None, order: Order | None = None) -> BytesSink:
    """One call on a channel of its own."""
    async with anyio.create_task_group() as tasks:
        channel = WorkerClient(address, tasks, tls=tls)
        sink = BytesSink()
        channel.generate((order or Order(n_messages=3)).request(), (), sink, timeout_s=HANG_S)
        await sink.done()
        channel.close()
        tasks.cancel_scope.cancel()
    return sink


def message(sink: BytesSink) -> str:
    assert sink.status is not None
    assert sink.code is grpc.StatusCode.UNAVAILABLE, sink.status
    return sink.status.message


def credentials(pair: Pair, ca: Path | None) -> grpc.ServerCredentials:
    """Of a grpcio server, which does not look at the times of its own certificate."""
    return grpc.ssl_server_credentials(
        [(pair.key.read_bytes(), pair.cert.read_bytes())],
        root_certificates=None if ca is None else ca.read_bytes(),
        require_client_auth=ca is not None,
    )


@either
@on_both_loops
def test_mtls_with_a_grpcio_server(tmp_path: Path, serve: Serve, loop: str) -> None:
    ca = Ca(tmp_path)
    server, client = ca.issue("server"), ca.issue("client", host="anything")

    async def main() -> None:
        tls = ClientTls("workers", files(client, ca.path))
        async with serve(credentials=credentials(server, ca.path)) as peer:
            sink = await ask(peer.address, tls, Order(n_messages=3))
            assert sink.code is grpc.StatusCode.OK, sink.status
            assert len(sink.messages) == 3
            large = await ask(peer.address, tls, Order(n_messages=100, message_bytes=60_000))
            assert sum(map(len, large.messages)) == 6_000_000

    run(main, loop)


@either
def test_a_name_may_stand_for_the_address(tmp_path: Path, serve: Serve) -> None:
    ca = Ca(tmp_path)
    server = ca.issue("server", host="worker.fleet")

    async def main() -> None:
        async with serve(credentials=credentials(server, None)) as peer:
            named = ClientTls("workers", files(None, ca.path, name="worker.fleet"))
            assert (await ask(peer.address, named)).code is grpc.StatusCode.OK
            sink = await ask(peer.address, ClientTls("workers", files(None, ca.path)))
            assert "certificate is not valid for '127.0.0.1'" in message(sink)

    run(main)


REFUSED: dict[str, tuple[Callable[[Ca], Pair], Callable[[Ca], Pair | None], str]] = {
    "wrong CA": (
        lambda ca: Ca(ca.path.parent, "other").issue("server"),
        lambda ca: ca.issue("client"),
        "TLS: certificate verify failed: ",
    ),
    "expired": (
        lambda ca: ca.issue("server", to_s=-60.0),
        lambda ca: ca.issue("client"),
        "TLS: certificate verify failed: certificate has expired",
    ),
    "wrong name": (
        lambda ca: ca.issue("server", host="127.0.0.2"),
        lambda ca: ca.issue("client"),
        "TLS: certificate verify failed: IP address mismatch, certificate is not valid for '127",
    ),
    "no client certificate": (
        lambda ca: ca.issue("server"),
        lambda ca: None,
        # grpcio's servers say no more than that.
        ": the peer closed the connection; it may not take our certificate",
    ),
    "client certificate of another CA": (
        lambda ca: ca.issue("server"),
        lambda ca: Ca(ca.path.parent, "other").issue("client"),
        ": the peer closed the connection; it may not take our certificate",
    ),
}


@on_both_loops
@pytest.mark.parametrize("what", REFUSED)
def test_a_server_that_does_not_fit_is_refused_and_so_are_we(
    tmp_path: Path, what: str, loop: str
) -> None:
    make_server, make_client, told = REFUSED[what]
    ca = Ca(tmp_path)

    async def main() -> None:
        own = make_client(ca)
        tls = ClientTls("workers", files(own, ca.path))
        async with aio_peer(credentials=credentials(make_server(ca), ca.path)) as peer:
            text = message(await ask(peer.address, tls))
            assert text.startswith(f"cannot connect to {peer.address}: ")
            assert told in text
            assert peer.calls == []

    run(main, loop)


@asynccontextmanager
async def raw_server(
    context: ssl.SSLContext | None, make: Callable[[], asyncio.BaseProtocol]
) -> AsyncIterator[str]:
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@on_both_loops
@pytest.mark.parametrize("protocols", [None, ["http/1.1"]])
def test_a_server_without_http2_is_refused(
    tmp_path: Path, protocols: list[str] | None, loop: str
) -> None:
    ca = Ca(tmp_path)
    server = ca.issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.cert, server.key)
    if protocols:
        context.set_alpn_protocols(protocols)

    async def main() -> None:
        async with raw_server(context, asyncio.Protocol) as address:
            sink = await ask(address, ClientTls("workers", files(None, ca.path)))
            assert message(sink).endswith("TLS: the peer does not speak HTTP/2 (ALPN h2)")

    run(main, loop)


@either
def test_a_plaintext_server_is_refused(tmp_path: Path, serve: Serve) -> None:
    ca = Ca(tmp_path)

    async def main() -> None:
        async with serve() as peer:
            sink = await ask(peer.address, ClientTls("workers", files(None, ca.path)))
            assert message(sink).endswith(": TLS: the other end does not speak TLS"), sink.status
            assert peer.calls == []
            assert (await ask(peer.address, None)).code is grpc.StatusCode.OK

    run(main)


@either
def test_plaintext_to_a_tls_server_is_an_error(tmp_path: Path, serve: Serve) -> None:
    server = Ca(tmp_path).issue("server")

    async def main() -> None:
        async with serve(credentials=credentials(server, None)) as peer:
            text = message(await ask(peer.address, None))
            assert text.startswith(f"cannot connect to {peer.address}: "), text
            assert text.endswith("; it may want TLS"), text

    run(main)


class _Recorder:
    """The owner of a server's connection that answers every call at once, and notes its headers."""

    def __init__(self, seen: list[dict[bytes, bytes]]) -> None:
        self._seen = seen
        self.connection = H2Connection(self, Http2Settings(), accept=self._accept)

    def _accept(self, stream: H2Stream, headers: Headers) -> Any:
        self._seen.append(dict(headers))
        answer = [(b":status", b"200"), (b"content-type", CONTENT_TYPE), *status_headers(OK)]
        stream.respond(answer, last=True)

    def ready(self) -> None: ...
    def freed(self) -> None: ...
    def retiring(self, code: int, about: bytes, /) -> None: ...
    def lost(self, reason: str, /) -> None: ...


def test_requests_name_the_scheme_they_travel_by(tmp_path: Path) -> None:
    ca = Ca(tmp_path)
    server = ServerTls("clients", files(ca.issue("server"), None))
    seen: list[dict[bytes, bytes]] = []

    async def main() -> None:
        for context, tls in (
            (server.context, ClientTls("workers", files(None, ca.path))),
            (None, None),
        ):
            async with raw_server(context, lambda: _Recorder(seen).connection) as address:
                assert (await ask(address, tls)).code is grpc.StatusCode.OK

    run(main)
    assert [fields[b":scheme"] for fields in seen] == [b"https", b"http"]
