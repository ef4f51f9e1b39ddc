"""The clients' side over TLS: real grpcio clients, those that are refused, and files that change."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import anyio.to_thread
import grpc
import grpc.aio
import pytest
import uvloop

from slagate.proto import openengine_pb2 as oe
from slagate.proto.http2.goaway import all_closed
from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.address import Address
from slagate.proto.rpc.connection_pool import ConnectionPool, dial_unix
from slagate.proto.rpc.status import OK
from slagate.router.front.server import Front, serve_front
from slagate.workers.runtime.listen import listen_on
from slagate.workers.tls.reloading import ServerTls, following
from slagate.workers.worker import GENERATE
from support.builders import finished, request, token
from support.gateway.certificates import Ca, Pair, files
from support.gateway.request_path import Bench, bench
from support.http2.grpc_peers import OPTIONS
from support.limits import HANG_S
from support.worker.fake import HANG, Script

ANSWER: Script = (token(1), token(2), finished(), OK)
LOOPS = {"uvloop": {"loop_factory": uvloop.new_event_loop}, "asyncio": {}}
APART = (("grpc.use_local_subchannel_pool", 1),)


class Served(NamedTuple):
    """A gateway over scripted workers that serves mTLS, and what its clients need."""

    ca: Ca
    tls: ServerTls
    bench: Bench
    front: Front
    address: str

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@asynccontextmanager
async def served(folder: Path, *scripts: Script, client_ca: bool = True) -> AsyncIterator[Served]:
    async def echo(data: bytes, context: Any) -> bytes:
        del context
        return data

    ca = Ca(folder)
    tls = ServerTls("clients", files(ca.issue("server"), ca.path if client_ca else None))
    local = grpc.aio.server(options=OPTIONS)
    echoes = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    local.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("other", echoes),))
    local.add_insecure_port(f"unix:{folder}/local")
    await local.start()
    try:
        async with bench("agg", agg=list(scripts)) as b, anyio.create_task_group() as tasks:
            links = ConnectionPool(
                f"{folder}/local", tasks, settings=Http2Settings(), dial=dial_unix
            )
            with closing(listen_on(Address("127.0.0.1", 0))) as listening:
                port = listening.getsockname()[1]
                async with (
                    serve_front(
                        b.serve, listening, links, b.app.gateway.settings, tls=tls.context
                    ) as front,
                    following(tls, poll_s=0.01),
                ):
                    yield Served(ca, tls, b, front, f"127.0.0.1:{port}")
                    while front.clients or len(b.app.gateway.live):
                        await anyio.lowlevel.checkpoint()
            links.close("over")
            tasks.cancel_scope.cancel()
    finally:
        await local.stop(None)


def play(
    folder: Path,
    scene: Callable[[Served], Awaitable[None]],
    *scripts: Script,
    loop: str = "uvloop",
    client_ca: bool = True,
) -> None:
    async def main() -> None:
        with anyio.fail_after(HANG_S):
            async with served(folder, *scripts, client_ca=client_ca) as s:
                await scene(s)
            await all_closed()

    anyio.run(main, backend_options=LOOPS[loop])


def credentials(ca: Path, pair: Pair | None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        ca.read_bytes(),
        None if pair is None else pair.key.read_bytes(),
        None if pair is None else pair.cert.read_bytes(),
    )


def channel(address: str, ca: Path, pair: Pair | None) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(address, credentials(ca, pair), options=APART)


async def tokens(call: Any) -> list[int]:
    found = []
    while (data := await call.read()) is not grpc.aio.EOF:
        found.append(oe.GenerateResponse.FromString(data))
    return [each.token_id for response in found for each in response.token.tokens]


def generate(on: Any) -> Any:
    return on.unary_stream(GENERATE)(request().SerializeToString(), timeout=HANG_S)


async def refused(on: grpc.aio.Channel) -> grpc.StatusCode:
    """The status of a call that fails. Keeps nothing of it: a call that lives on holds its connection."""
    try:
        await tokens(generate(on))
    except grpc.aio.AioRpcError as error:
        return error.code()
    raise AssertionError("it was served")


async def works(s: Served, pair: Pair, ca: Path | None = None) -> None:
    async with channel(s.address, ca or s.ca.path, pair) as on:
        assert await tokens(generate(on)) == [1, 2]


@pytest.mark.parametrize("loop", LOOPS)
def test_grpcio_clients_get_their_answers_over_mtls(tmp_path: Path, loop: str) -> None:
    async def scene(s: Served) -> None:
        pair = s.ca.issue("client", host="anything")
        async with channel(s.address, s.ca.path, pair) as on:
            assert await tokens(generate(on)) == [1, 2]
            assert await on.unary_unary("/other/Echo")(b"x" * 100_000) == b"x" * 100_000
            assert len(s.front.clients) == 1

        def in_a_thread() -> list[int]:
            with grpc.secure_channel(s.address, credentials(s.ca.path, pair), APART) as sync:
                found = [oe.GenerateResponse.FromString(each) for each in generate(sync)]
            return [each.token_id for response in found for each in response.token.tokens]

        assert await anyio.to_thread.run_sync(in_a_thread) == [1, 2]

    play(tmp_path, scene, ANSWER, loop=loop)


def test_without_client_cas_nobody_needs_a_certificate(tmp_path: Path) -> None:
    async def scene(s: Served) -> None:
        async with channel(s.address, s.ca.path, None) as on:
            assert await tokens(generate(on)) == [1, 2]

    play(tmp_path, scene, ANSWER, client_ca=False)


OTHERS: dict[str, tuple[Callable[[Ca], Pair | None], str, str]] = {
    "missing": (lambda ca: None, "certificate required", "peer did not return a certificate"),
    "of another CA": (
        lambda ca: Ca(ca.path.parent, "other").issue("client"),
        "",
        "certificate verify failed: unable to get local issuer certificate",
    ),
    "expired": (
        lambda ca: ca.issue("client", to_s=-60.0),
        "certificate expired",
        "certificate verify failed: certificate has expired",
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("what", OTHERS)
def test_a_client_whose_certificate_does_not_do_is_refused_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, loop: str
) -> None:
    make, alert, logged = OTHERS[what]

    async def scene(s: Served) -> None:
        async with channel(s.address, s.ca.path, make(s.ca)) as on:
            assert await refused(on) is grpc.StatusCode.UNAVAILABLE
        assert not s.front.clients
        context = client_context(s, make(s.ca))
        assert alert in await anyio.to_thread.run_sync(told, s, context)
        await works(s, s.ca.issue("client"))

    with caplog.at_level(logging.WARNING):
        play(tmp_path, scene, ANSWER, loop=loop)
    refusals = [vars(each) for each in caplog.records if each.getMessage() == "tls.refused"]
    assert {(each["side"], each["reason"]) for each in refusals} == {("clients", logged)}


def client_context(s: Served, pair: Pair | None, *alpn: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(s.ca.path)
    context.set_alpn_protocols(list(alpn or ["h2"]))
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


def told(s: Served, context: ssl.SSLContext) -> str:
    """What a client of OpenSSL reads where the gateway's first words should be."""
    with (
        socket.create_connection(("127.0.0.1", s.port), timeout=HANG_S) as plain,
        contextlib.closing(context.wrap_socket(plain, server_hostname="127.0.0.1")) as to,
    ):
        try:
            return f"read {to.recv(100)!r}"
        except ssl.SSLError as error:
            return str(error)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("alpn", [["http/1.1"], []])
def test_a_client_that_does_not_ask_for_http2_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, alpn: list[str], loop: str
) -> None:
    async def scene(s: Served) -> None:
        pair = s.ca.issue("client")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(s.ca.path)
        context.load_cert_chain(pair.cert, pair.key)
        if alpn:
            context.set_alpn_protocols(alpn)
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port, ssl=context)
        with contextlib.suppress(OSError):
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert await reader.read() == b""
        writer.close()
        assert not s.front.clients
        await works(s, pair)

    with caplog.at_level(logging.WARNING):
        play(tmp_path, scene, ANSWER, loop=loop)
    refusals = [vars(each) for each in caplog.records if each.getMessage() == "tls.refused"]
    assert [each["reason"] for each in refusals] == ["the peer does not speak HTTP/2 (ALPN h2)"]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_plaintext_client_is_refused_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loop: str
) -> None:
    async def scene(s: Served) -> None:
        pair = s.ca.issue("client")
        async with channel(s.address, s.ca.path, pair) as on:
            running = generate(on)
            assert await running.read() is not grpc.aio.EOF
            async with grpc.aio.insecure_channel(s.address, options=APART) as plain:
                assert await refused(plain) is grpc.StatusCode.UNAVAILABLE
            assert len(s.front.clients) == 1
            s.bench.scripts["agg"].calls[0].say(token(2), finished(), OK)
            assert await tokens(running) == [2]

    with caplog.at_level(logging.WARNING):
        play(tmp_path, scene, (token(1), HANG), loop=loop)
    refusals = [vars(each) for each in caplog.records if each.getMessage() == "tls.refused"]
    assert {each["reason"] for each in refusals} == {"the other end does not speak TLS"}


async def renewed(tls: ServerTls, before: object) -> None:
    while tls.current is before:
        await anyio.lowlevel.checkpoint()


def shown(s: Served, ca: Path, pair: Pair) -> bytes:
    """The certificate that a new connection is shown, as DER."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(pair.cert, pair.key)
    with (
        socket.create_connection(("127.0.0.1", s.port), timeout=HANG_S) as plain,
        contextlib.closing(context.wrap_socket(plain, server_hostname="127.0.0.1")) as to,
    ):
        to.recv(1)
        return to.getpeercert(binary_form=True) or b""


@pytest.mark.parametrize("loop", LOOPS)
def test_new_certificates_and_cas_are_for_new_connections(tmp_path: Path, loop: str) -> None:
    """Streams of before go on, and so does their connection; who has an old certificate stays outside."""

    async def scene(s: Served) -> None:
        old = s.ca.issue("client")
        old_ca = tmp_path / "old-ca.pem"
        old_ca.write_bytes(s.ca.path.read_bytes())
        old_credentials = credentials(old_ca, old)
        async with grpc.aio.secure_channel(s.address, old_credentials, options=APART) as on:
            running = [generate(on) for _ in range(20)]
            for call in running:
                assert await call.read() is not grpc.aio.EOF
            before = s.tls.current
            fresh = Ca(tmp_path)  # in place of the old one, and of all that it has issued
            fresh.issue("server")
            await renewed(s.tls, before)
            new = fresh.issue("newer")
            seen = await anyio.to_thread.run_sync(shown, s, fresh.path, new)
            assert seen == ssl.PEM_cert_to_DER_cert((tmp_path / "server.pem").read_text())
            calls = s.bench.scripts["agg"].calls
            async with channel(s.address, fresh.path, new) as newer:
                running.append(generate(newer))
                assert await running[-1].read() is not grpc.aio.EOF
                # The new CA knows the server, and the old one's client is a stranger to it.
                async with channel(s.address, fresh.path, old) as stranger:
                    assert await refused(stranger) is grpc.StatusCode.UNAVAILABLE
                running.append(generate(on))  # on the old connection, after all that
                assert await running[-1].read() is not grpc.aio.EOF
                for played in calls:
                    played.say(token(2), finished(), OK)
                for call in running:
                    assert await tokens(call) == [2]
                    assert await call.code() is grpc.StatusCode.OK

    play(tmp_path, scene, (token(1), HANG), loop=loop)


def test_a_bad_file_changes_nothing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(s: Served) -> None:
        pair = s.ca.issue("client")
        before = s.tls.current
        good = (tmp_path / "server.pem").read_bytes()
        for n_told, bad in enumerate((b"garbage", b"more garbage", s.ca.path.read_bytes()), 1):
            (tmp_path / "server.pem").write_bytes(bad)
            while len(kept()) < n_told:
                await anyio.lowlevel.checkpoint()
            await works(s, pair)
        for _ in range(10):  # looks
            await anyio.sleep(0.01)
        assert s.tls.current is before
        (tmp_path / "server.pem").write_bytes(good)
        await renewed(s.tls, before)
        await works(s, pair)

    def kept() -> list[str]:
        return [vars(r)["reason"] for r in caplog.records if r.getMessage() == "tls.kept"]

    with caplog.at_level(logging.INFO):
        play(tmp_path, scene, ANSWER)
    no_certificate = f"--tls-cert {tmp_path}/server.pem has no certificate (PEM)"
    not_its_key = f"--tls-key {tmp_path}/server.key is not the key of --tls-cert "
    assert kept() == [no_certificate, no_certificate, f"{not_its_key}{tmp_path}/server.pem"]
    events = [each.getMessage() for each in caplog.records if ".tls." in each.name]
    assert events == ["tls.loaded", *["tls.kept"] * 3, "tls.renewed"]


def test_refused_handshakes_are_counted_and_told_at_most_once_a_second(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = Ca(tmp_path)
    times = iter(1e9 + each for each in (0.0, 0.5, 0.9, 1.2, 0.0))
    tls = ServerTls("clients", files(ca.issue("server"), None))
    tls._unix_s = lambda: next(times)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            tls.handshake_refused("because")
    assert [vars(each)["handshakes"] for each in caplog.records] == [1, 4, 5]
