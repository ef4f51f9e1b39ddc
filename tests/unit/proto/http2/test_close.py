"""A connection that is closed is over in the end, and so is its socket: whatever the peer does."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from slagate.proto.http2 import goaway as farewell
from slagate.proto.http2.connection import H2Connection, H2Stream
from slagate.proto.http2.goaway import all_closed
from slagate.proto.http2.interfaces import ENHANCE_YOUR_CALM, Headers, Http2Settings
from slagate.workers.tls.reloading import ServerTls
from support.gateway.certificates import Ca, files
from support.http2.peer import PeerServer, PeerStream
from support.http2.raw import HELLO, SETTINGS, WINDOW_UPDATE, begin, frame
from support.limits import HANG_S

HUGE = (1 << 30).to_bytes(4, "big")


class Ending(H2Connection):
    """Says when its transport is gone."""

    def __init__(self, owner: PeerServer) -> None:
        super().__init__(owner, Http2Settings(), accept=self._flood)
        self.is_blocked = anyio.Event()
        self.is_gone = anyio.Event()
        self.is_made = anyio.Event()

    def _flood(self, stream: H2Stream, headers: Headers) -> PeerStream:
        stream.respond([(b":status", b"200")])
        stream.send(bytes(64 << 20))
        return PeerStream(stream, headers, lambda _: None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.is_made.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.is_blocked.set()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.is_gone.set()


def test_a_peer_that_reads_no_more_does_not_keep_its_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection is closed for what it did, and it never takes what was said to it before."""
    monkeypatch.setattr(farewell, "LINGER_S", 0.05)

    async def main() -> None:
        end = Ending(PeerServer())
        server = await asyncio.get_running_loop().create_server(lambda: end, "127.0.0.1", 0)
        with anyio.fail_after(HANG_S), closing(server), socket.socket() as peer:
            peer.connect(server.sockets[0].getsockname())
            permitted = frame(SETTINGS, 0, 0, b"\0\4" + HUGE) + frame(WINDOW_UPDATE, 0, 0, HUGE)
            peer.sendall(HELLO + permitted + begin(1, b"/x"))
            await end.is_blocked.wait()
            end.close("enough", ENHANCE_YOUR_CALM)
            await end.is_gone.wait()

    anyio.run(main)


def shaken(ca: Ca, port: int) -> ssl.SSLSocket:
    """A client's socket that has shaken hands; it blocks."""
    context = ssl.create_default_context(cafile=str(ca.path))
    context.set_alpn_protocols(["h2"])
    plain = socket.create_connection(("127.0.0.1", port))
    return context.wrap_socket(plain, server_hostname="127.0.0.1")


def read_to_the_end(client: ssl.SSLSocket) -> None:
    """Until the server's goodbye, and answer it."""
    while client.recv(1 << 16):
        pass
    client.unwrap()


@asynccontextmanager
async def served(ca: Ca) -> AsyncIterator[tuple[Ending, ssl.SSLSocket]]:
    """A server's connection over TLS whose client has shaken hands, and does nothing more."""
    tls = ServerTls("clients", files(ca.issue("server"), None))
    end = Ending(PeerServer())
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: end, "127.0.0.1", 0, ssl=tls.context)
    with anyio.fail_after(HANG_S), closing(server):
        port = server.sockets[0].getsockname()[1]
        with await anyio.to_thread.run_sync(shaken, ca, port) as client:
            await end.is_made.wait()
            yield end, client


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_nor_does_one_that_has_shaken_hands_and_does_not_say_goodbye(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, use_uvloop: bool
) -> None:
    """TLS ends with a word from either side, and event loops wait for it."""
    monkeypatch.setattr(farewell, "LINGER_S", 0.05)

    async def main() -> None:
        async with served(Ca(tmp_path)) as (end, _):
            end.close("enough", ENHANCE_YOUR_CALM)
            await end.is_gone.wait()

    anyio.run(main, backend_options={"use_uvloop": use_uvloop})


@pytest.mark.parametrize("use_uvloop", [False, True])
def test_a_loop_may_end_once_all_are_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, use_uvloop: bool
) -> None:
    """By the client's goodbye or, where none comes, in less time than a connection of a server gets."""
    monkeypatch.setattr(farewell, "END_LIMIT_S", 0.05)
    monkeypatch.setattr(farewell, "LINGER_S", HANG_S)

    async def main() -> None:
        ca = Ca(tmp_path)
        async with served(ca) as (end, client), served(ca) as (silent, _):
            for each in (end, silent):
                each.close("enough")
            await anyio.to_thread.run_sync(read_to_the_end, client)
            assert not silent.is_gone.is_set()
            await all_closed()
            assert end.is_gone.is_set()
            assert silent.is_gone.is_set()
            await all_closed()

    anyio.run(main, backend_options={"use_uvloop": use_uvloop})
