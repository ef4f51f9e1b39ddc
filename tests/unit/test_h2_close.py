"""A connection that is closed is over in the end, and so is its socket: whatever the peer does."""

import asyncio
import socket
from contextlib import closing

import anyio
import pytest

from slagate.workers import farewell
from slagate.workers.h2 import H2Connection
from slagate.workers.h2_port import ENHANCE_YOUR_CALM, Headers, Settings, Stream
from support.h2_peer import PeerServer, PeerStream
from support.raw_http2 import HELLO, SETTINGS, WINDOW_UPDATE, begin, frame

HUGE = (1 << 30).to_bytes(4, "big")


class Ending(H2Connection):
    """Says when its transport is gone."""

    def __init__(self, owner: PeerServer) -> None:
        super().__init__(owner, Settings(), accept=self._flood)
        self.is_blocked = anyio.Event()
        self.is_gone = anyio.Event()

    def _flood(self, stream: Stream, headers: Headers) -> PeerStream:
        stream.respond([(b":status", b"200")])
        stream.send(bytes(64 << 20))
        return PeerStream(stream, headers, lambda _: None)

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
        with anyio.fail_after(8), closing(server), socket.socket() as peer:
            peer.connect(server.sockets[0].getsockname())
            permitted = frame(SETTINGS, 0, 0, b"\0\4" + HUGE) + frame(WINDOW_UPDATE, 0, 0, HUGE)
            peer.sendall(HELLO + permitted + begin(1, b"/x"))
            await end.is_blocked.wait()
            end.close("enough", ENHANCE_YOUR_CALM)
            await end.is_gone.wait()

    anyio.run(main)
