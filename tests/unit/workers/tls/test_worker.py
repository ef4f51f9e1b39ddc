"""A worker's own server and the gateway's calls to it over mTLS, both ends ours, while files change."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar, NamedTuple

import anyio
import anyio.lowlevel
import grpc
import pytest
import uvloop
from cryptography import x509

from slagate.proto import openengine_pb2 as oe
from slagate.proto.http2.goaway import all_closed
from slagate.proto.rpc.address import Address
from slagate.proto.rpc.status import OK
from slagate.workers.client.client import WorkerClient, connect_worker
from slagate.workers.errors import WorkerError
from slagate.workers.server import serve_worker
from slagate.workers.tls.files import TlsFiles
from slagate.workers.tls.reloading import ClientTls, ServerTls, TlsSide, following
from support.builders import request, token
from support.gateway.certificates import Ca, files
from support.limits import HANG_S
from support.worker.bytes_sink import BytesSink
from support.worker.fake import HANG, ROLES, FakeWorker, Scripts


class Ends(NamedTuple):
    """A worker, its server, and a gateway's connections to it."""

    ca: Ca
    worker: FakeWorker
    server: ServerTls
    client: ClientTls
    address: str
    far: WorkerClient


class SlowWorker(FakeWorker):
    """One whose load is told when the test says so."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.asked = anyio.Event()
        self.may_tell = anyio.Event()

    async def load(self, request: oe.GetLoadRequest) -> oe.LoadInfo:
        self.asked.set()
        await self.may_tell.wait()
        return oe.LoadInfo(instance_id="slow")


@asynccontextmanager
async def ends(folder: Path) -> AsyncIterator[Ends]:
    ca = Ca(folder)
    server = ServerTls("clients", files(ca.issue("server"), ca.path))
    client = ClientTls("workers", files(ca.issue("client"), ca.path))
    worker = SlowWorker(ROLES["agg"], Scripts([(token(1), HANG)]))
    async with (
        serve_worker(worker, Address("127.0.0.1", 0), grace_s=0, tls=server) as at,
        connect_worker(str(at), tls=client) as far,
        following(server, client, poll_s=0.01),
    ):
        yield Ends(ca, worker, server, client, str(at), far)


def play(folder: Path, scene: Callable[[Ends], Awaitable[None]]) -> None:
    async def main() -> None:
        with anyio.fail_after(HANG_S):
            async with ends(folder) as e:
                await scene(e)
            await all_closed()

    anyio.run(main, backend_options={"loop_factory": uvloop.new_event_loop})


async def renewed(side: TlsSide, before: object) -> None:
    while side.current is before:
        await anyio.lowlevel.checkpoint()


async def asks(e: Ends, tls: ClientTls | None) -> str:
    """What becomes of a control call on a connection of its own."""
    async with connect_worker(e.address, tls=tls) as worker:
        try:
            await worker.server_info()
        except WorkerError as error:
            return str(error)
    return "answered"


def test_streams_and_control_calls_over_mtls(tmp_path: Path) -> None:
    async def scene(e: Ends) -> None:
        assert (await e.far.server_info()).instance_id
        sink = BytesSink()
        call = e.far.generate(request().SerializeToString(), (), sink, timeout_s=HANG_S)
        await sink.at_least(1)
        call.cancel()

    play(tmp_path, scene)


def test_who_has_no_certificate_or_another_is_refused(tmp_path: Path) -> None:
    async def scene(e: Ends) -> None:
        (other := tmp_path / "other").mkdir()
        stranger = Ca(other).issue("client")
        for pair in (None, stranger, e.ca.issue("old", to_s=3600.0)):
            told = await asks(e, ClientTls("workers", files(pair, e.ca.path)))
            good = pair is not None and pair.cert.stem == "old"
            assert told.startswith("answered" if good else "UNAVAILABLE: "), told
            assert good or told.endswith("Socket closed; it may not take our certificate"), told
        plain = await asks(e, None)
        assert plain.startswith("UNAVAILABLE: ")
        assert plain.endswith("Socket closed; it may want TLS")
        unknown = ClientTls("workers", files(e.ca.issue("client"), other / "ca.pem"))
        assert "Tls handshake failed" in await asks(e, unknown)

    play(tmp_path, scene)


def test_everything_is_rotated_and_what_runs_goes_on(tmp_path: Path) -> None:
    """CA, the worker's certificate and the gateway's: a stream and a control call live through it."""

    async def scene(e: Ends) -> None:
        old = ClientTls("workers", files(e.ca.issue("old"), e.ca.path))
        sink = BytesSink()
        e.far.generate(request().SerializeToString(), (), sink, timeout_s=HANG_S)
        await sink.at_least(1)
        loads: list[oe.LoadInfo] = []

        async def ask_load() -> None:
            loads.append(await e.far.load(oe.GetLoadRequest()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_load)
            assert isinstance(e.worker, SlowWorker)
            await e.worker.asked.wait()
            server, client = e.server.current, e.client.current
            fresh = Ca(tmp_path)
            fresh.issue("server")
            fresh.issue("client")
            await renewed(e.server, server)
            await renewed(e.client, client)
            assert (await e.far.server_info()).instance_id  # on a channel of the new certificates
            assert len(e.far.control._channels) == 2
            assert await asks(e, e.client) == "answered"
            assert await asks(e, old) != "answered"
            assert loads == []
            e.worker.may_tell.set()
        assert [each.instance_id for each in loads] == ["slow"]
        assert len(e.far.control._channels) == 1
        e.worker.calls[0].say(token(2), OK)
        await sink.done()
        assert sink.code is grpc.StatusCode.OK
        assert len(sink.messages) == 2
        again = BytesSink()
        call = e.far.generate(request().SerializeToString(), (), again, timeout_s=HANG_S)
        await again.at_least(1)
        call.cancel()

    play(tmp_path, scene)


class Watched(TlsFiles):
    """Files to which something is done behind each look."""

    then: ClassVar[list[Callable[[], object]]] = []

    def stamp(self) -> object:
        found = super().stamp()
        if Watched.then:
            Watched.then.pop(0)()
        return found


def test_a_changed_file_is_read_when_it_has_stayed_so_for_one_look(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The key may come after the certificate: in between the two do not fit, and nothing is said of it."""
    ca = Ca(tmp_path)
    of = files(ca.issue("server"), ca.path)
    server = ServerTls("clients", Watched(cert=of.cert, key=of.key, ca=of.ca))
    (new := tmp_path / "new").mkdir()
    pair = Ca(new).issue("server")

    async def main() -> None:
        with anyio.fail_after(HANG_S):
            async with following(server, poll_s=0.01):
                before = server.current
                Watched.then += [
                    lambda: (tmp_path / "server.pem").write_bytes(pair.cert.read_bytes()),
                    lambda: (tmp_path / "server.key").write_bytes(pair.key.read_bytes()),
                ]
                await renewed(server, before)
                assert server.current.chain == pair.cert.read_bytes()

    caplog.clear()
    with caplog.at_level(logging.INFO):
        anyio.run(main)
    assert [each.getMessage() for each in caplog.records] == ["tls.renewed"]


def test_files_are_read_at_once_when_that_is_asked_for_and_the_log_says_whose_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = Ca(tmp_path)
    of = files(ca.issue("server"), ca.path)
    caplog.set_level(logging.INFO)
    server = ServerTls("clients", of)
    first = server.current

    async def main() -> None:
        with anyio.fail_after(HANG_S):
            async with following(server, None, poll_s=1e6) as reread:
                await anyio.wait_all_tasks_blocked()
                ca.issue("server")
                reread()
                await renewed(server, first)

    anyio.run(main)
    loaded, now = caplog.records
    assert [each.getMessage() for each in caplog.records] == ["tls.loaded", "tls.renewed"]
    told = [
        {name: vars(record)[name] for name in ("side", "ca", "cert", "subject", "issuer", "serial")}
        for record in (loaded, now)
    ]
    own = [x509.load_pem_x509_certificate(each.chain) for each in (first, server.current)]
    assert told == [
        {
            "side": "clients",
            "ca": f"--tls-ca {ca.path}",
            "cert": f"--tls-cert {tmp_path}/server.pem",
            "subject": "CN=server",
            "issuer": "CN=ca",
            "serial": certificate.serial_number.to_bytes(20, "big").lstrip(b"\0").hex().upper(),
        }
        for certificate in own
    ]
    ends_at = own[1].not_valid_after_utc
    assert vars(now)["expires"] == f"{ends_at:%Y-%m-%d %H:%M:%S} UTC"
    assert "PRIVATE" not in str([vars(record) for record in caplog.records])
