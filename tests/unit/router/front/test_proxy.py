"""Calls that are passed on to the local server: what ends early, on either side, is ended on both."""

from collections.abc import Awaitable, Callable

import anyio
import pytest

from slagate.proto.http2.connection import H2Connection
from slagate.proto.http2.interfaces import CANCEL, Headers, Http2Settings, StreamEnd
from slagate.proto.rpc.status import OK
from slagate.workers.runtime.virtual_loop import run
from support.builders import finished, token
from support.gateway.front_path import Served, served
from support.http2.peer import PeerServer, PeerStream
from support.http2.raw import (
    DATA,
    HEADERS,
    HELLO,
    RST_STREAM,
    WINDOW_UPDATE,
    RawClient,
    begin,
    frame,
    frames,
)
from support.worker.fake import Script

ANSWER: Script = (token(1), finished(), OK)
PATH = b"/other/Echo"
NO_ERROR = bytes(4)

Scene = Callable[[Served, RawClient, PeerStream], Awaitable[None]]


def play(scene: Scene) -> None:
    """A client has begun a call and sent a part of it; the local server has that."""

    async def main() -> None:
        async with served(ANSWER) as s:
            raw = s.raw()
            raw.send(HELLO + begin(1, PATH) + frame(DATA, 0, 1, bytes(100)))
            await anyio.sleep(0.1)
            (local,) = s.local.streams
            assert len(local.body) == 100
            await scene(s, raw, local)
            await anyio.sleep(0.1)
            assert not raw.is_over
            assert await s.ask() == OK
            s.check_free()

    run(main)


def kinds(raw: RawClient) -> list[int]:
    """Types of the frames of its answer, in order; DATA in a row is one, and windows are nothing of it."""
    found = [kind for kind, _, at, _ in frames(raw.heard) if at == 1 and kind != WINDOW_UPDATE]
    return [kind for at, kind in enumerate(found) if kind != DATA or found[at - 1] != DATA]


def test_a_call_that_is_answered_before_its_end_is_over_on_both_sides() -> None:
    async def scene(_s: Served, raw: RawClient, local: PeerStream) -> None:
        local.answer(b"a")
        local.finish(3)
        await anyio.sleep(0.1)
        assert kinds(raw) == [HEADERS, DATA, HEADERS, RST_STREAM]
        assert raw.said(RST_STREAM) == [NO_ERROR]
        # The local server is told, too, that nothing more comes.
        assert local.end is not None
        # What the client had on its way goes nowhere.
        raw.send(frame(DATA, 0, 1, bytes(100)))

    play(scene)


def test_a_call_that_is_refused_before_its_end_is_over_on_both_sides() -> None:
    async def scene(_s: Served, raw: RawClient, local: PeerStream) -> None:
        local.stream.respond([(b":status", b"200"), (b"grpc-status", b"12")], last=True)
        await anyio.sleep(0.1)
        assert kinds(raw) == [HEADERS, RST_STREAM]
        assert raw.said(RST_STREAM) == [NO_ERROR]
        assert local.end is not None

    play(scene)


def test_an_early_answer_that_waits_for_its_client_is_not_cut_off() -> None:
    async def scene(s: Served, raw: RawClient, local: PeerStream) -> None:
        local.answer(bytes(100_000))
        local.finish()
        await anyio.sleep(5)
        assert kinds(raw) == [HEADERS, DATA]
        more = (100_000).to_bytes(4, "big")
        raw.send(frame(WINDOW_UPDATE, 0, 0, more) + frame(WINDOW_UPDATE, 0, 1, more))
        await anyio.sleep(0.1)
        assert kinds(raw) == [HEADERS, DATA, HEADERS, RST_STREAM]
        assert len(b"".join(raw.said(DATA))) == 100_005

    play(scene)


def test_an_answer_of_which_the_client_takes_nothing_is_given_up() -> None:
    """More than may wait of it: the local server never gets to its end, behind which a time would begin."""

    async def scene(s: Served, raw: RawClient, local: PeerStream) -> None:
        local.answer(bytes(500_000))
        local.finish()
        limit_s = s.front.settings.default_timeout_s
        await anyio.sleep(limit_s - 1)
        assert raw.said(RST_STREAM) == []
        assert local.end is None
        await anyio.sleep(2)
        assert raw.said(RST_STREAM) == [CANCEL.to_bytes(4, "big")]
        assert local.end is not None

    play(scene)


def test_the_time_to_take_an_answer_ends_when_most_of_it_is_taken() -> None:
    async def scene(s: Served, raw: RawClient, local: PeerStream) -> None:
        local.answer(bytes(200_000))
        await anyio.sleep(1)
        assert len(s.front.untaken) == 1
        more = (1 << 20).to_bytes(4, "big")
        raw.send(frame(WINDOW_UPDATE, 0, 0, more) + frame(WINDOW_UPDATE, 0, 1, more))
        await anyio.sleep(s.front.settings.default_timeout_s * 2)
        assert raw.said(RST_STREAM) == []
        assert local.end is None
        local.finish()

    play(scene)


class Kept:
    """The handler of a client's stream: what it was told, header fields by name."""

    def __init__(self) -> None:
        self.fields: list[dict[bytes, bytes]] = []
        self.body = b""

    def headers(self, headers: Headers, /) -> None:
        self.fields.append(dict(headers))

    def data(self, data: bytes, /) -> None:
        self.body += data

    def trailers(self, headers: Headers, /) -> None:
        self.fields.append(dict(headers))

    def ended(self) -> None: ...

    def writable(self) -> None: ...

    def closed(self, end: StreamEnd, /) -> None: ...


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_local_server_that_is_lost_right_behind_its_headers_ends_the_call_once(
    *, is_reset: bool
) -> None:
    """They were kept, as they might have been the last words, and must not come behind the status."""

    async def main() -> None:
        async with served(ANSWER) as s:
            client, kept = H2Connection(PeerServer(), Http2Settings()), Kept()
            s.join(client)
            await anyio.sleep(0.1)
            fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"a")]
            stream = client.open([*fields, (b":path", PATH)], kept)
            assert stream is not None
            await anyio.sleep(0.1)
            ((connection,), (local,)) = s.local.connections, s.local.streams
            local.stream.respond([(b":status", b"200"), (b"x-first", b"a")])
            if is_reset:
                local.stream.reset_behind(2)
            else:
                connection.close("gone")
            await anyio.sleep(0.1)
            assert [each.get(b"grpc-status") for each in kept.fields] == [b"14"] * (not is_reset)
            assert all(b"x-first" not in each for each in kept.fields)
            assert client.n_streams == 0
            s.check_free()
            client.close("over")

    run(main)


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_local_server_that_is_lost_ends_its_calls_with_a_status(*, has_answered: bool) -> None:
    async def scene(s: Served, raw: RawClient, local: PeerStream) -> None:
        if has_answered:
            local.answer()
            await anyio.sleep(0.1)
        (connection,) = s.local.connections
        connection.close("gone")
        await anyio.sleep(0.1)
        assert kinds(raw) == [HEADERS] * (1 + has_answered) + [RST_STREAM]
        assert raw.said(RST_STREAM) == [NO_ERROR]

    play(scene)
