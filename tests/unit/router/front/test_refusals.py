"""What the front refuses before anybody serves it; what comes too late to be refused, or to be served."""

import gzip

import anyio
import pytest

from slagate.proto.http2.connection import H2Connection
from slagate.proto.http2.interfaces import CANCEL, Headers, Http2Settings, StreamEnd
from slagate.proto.rpc.frames import prefix
from slagate.proto.rpc.status import OK
from slagate.router.request.settings import ClientLimits, Settings
from slagate.workers.runtime.virtual_loop import VirtualLoop, run
from support.builders import finished, request, token
from support.gateway.front_path import Served, served
from support.http2.memory_transport import joined
from support.http2.peer import PeerServer
from support.http2.raw import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    HELLO,
    RST_STREAM,
    SETTINGS,
    RawClient,
    begin,
    field,
    frame,
    frames,
)
from support.worker.fake import Script

ANSWER: Script = (token(1), token(2), finished(), OK)
PATH = b"/openengine.v1.Inference/Generate"
BODY = request().SerializeToString()
CALL = prefix(BODY) + BODY


async def hello(s: Served) -> RawClient:
    raw = s.raw()
    raw.send(HELLO)
    await anyio.sleep(0.1)
    return raw


def kinds(raw: RawClient, stream_id: int) -> list[int]:
    """Types of the frames that came on this stream, in order."""
    return [kind for kind, _, at, _ in frames(raw.heard) if at == stream_id]


# --- whose time to arrive ends just as the last of it comes ------------------------------------------


def test_a_request_that_comes_whole_as_its_time_ends_is_served_and_its_neighbour_refused() -> None:
    """The last bytes and the timer in one turn of the loop: the task that serves it has not run yet."""

    async def main() -> None:
        async with served(ANSWER) as s:
            loop = s.front.loop
            assert isinstance(loop, VirtualLoop)
            raw = await hello(s)
            raw.send(begin(1, PATH) + begin(3, PATH))
            due_s = loop.time() + s.front.settings.clients.arrival_s
            (server,) = [client.connection for client in s.front.clients]
            # Behind the stall all of it is due, and runs in one turn, in order.
            loop.call_at(due_s - 0.003, loop.stall, 0.01)
            loop.call_at(due_s - 0.002, server.data_received, frame(DATA, END_STREAM, 1, CALL))
            await anyio.sleep(s.front.settings.clients.arrival_s + 1)
            first, *answer, last = kinds(raw, 1)
            assert (first, set(answer), last) == (HEADERS, {DATA}, HEADERS)
            assert kinds(raw, 3) == [HEADERS, RST_STREAM]
            assert s.bench.outcomes() == {"completed": 1, "deadline": 1}
            assert not raw.is_over
            s.check_free()

    run(main)


# --- connections that come too late ------------------------------------------------------------------


def test_a_connection_whose_handshake_ends_behind_the_goodbye_is_closed_and_not_waited_for() -> (
    None
):
    """With TLS it is accepted before, and joins when its client has shown who it is."""

    async def main() -> None:
        async with served(ANSWER) as s:
            late = s.front.protocol()
            s.front.retire()
            raw = RawClient()
            joined(raw, late)
            raw.send(HELLO)
            with anyio.fail_after(5):
                await s.front.settled()
                await s.front.emptied()
            await anyio.sleep(0.1)
            assert raw.is_over
            assert raw.heard == b""

    run(main)


def test_connections_that_shake_hands_at_once_are_no_more_than_may_be_there() -> None:
    async def main() -> None:
        settings = Settings(clients=ClientLimits(max_connections=1))
        async with served(ANSWER, settings=settings) as s:
            raws, ends = [RawClient(), RawClient()], [s.front.protocol(), s.front.protocol()]
            for raw, end in zip(raws, ends, strict=True):
                joined(raw, end)
                raw.send(HELLO)
            await anyio.sleep(0.1)
            assert [raw.is_over for raw in raws] == [False, True]
            assert len(s.front.clients) == 1
            assert len(raws[0].said(SETTINGS)) == 2
            assert raws[1].heard == b""

    run(main)


# --- what is not gRPC --------------------------------------------------------------------------------


class Said:
    """The handler of a client's stream: what it was told, in order."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def headers(self, headers: Headers, /) -> None:
        fields = dict(headers)
        assert set(fields) == {b":status"}, fields
        self.words.append(fields[b":status"].decode())

    def data(self, data: bytes, /) -> None:
        self.words.append(f"{len(data)} bytes")

    def trailers(self, headers: Headers, /) -> None:
        self.words.append(f"trailers {headers}")

    def ended(self) -> None:
        self.words.append("ended")

    def writable(self) -> None: ...

    def closed(self, end: StreamEnd, /) -> None:
        self.words.append(f"closed {end.code}")


async def client_of(s: Served) -> H2Connection:
    """A client that speaks HTTP/2 and not always gRPC."""
    connection = H2Connection(PeerServer(), Http2Settings())
    s.join(connection)
    await anyio.sleep(0.1)
    return connection


def headers_of(kind: bytes) -> Headers:
    return (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", PATH),
        (b":authority", b"a"),
        (b"content-type", kind),
    )


OTHER_TYPES = [b"application/json", b"application/grpcfoo", b"application/grpc-web", b""]


@pytest.mark.parametrize("kind", OTHER_TYPES)
@pytest.mark.parametrize("has_body", [False, True])
def test_a_call_that_is_not_grpc_is_told_so_in_http_and_its_connection_goes_on(
    kind: bytes, *, has_body: bool
) -> None:
    async def main() -> None:
        async with served(ANSWER) as s:
            connection, said = await client_of(s), Said()
            stream = connection.open(headers_of(kind), said)
            assert stream is not None
            if has_body:
                # On its way without an end: it is told that nobody wants it; RFC 9113, section 8.1.
                stream.send(bytes(100))
            else:
                stream.end_stream()
            await anyio.sleep(0.1)
            assert said.words == ["415", "ended", "closed 0"]
            assert connection.n_streams == 0
            assert await s.ask() == OK
            s.check_free()
            connection.close("over")

    run(main)


@pytest.mark.parametrize("more", [b"", b"+proto", b"+json", b";charset=utf-8", b"+proto; a=b"])
def test_every_content_type_of_grpc_is_served(more: bytes) -> None:
    async def main() -> None:
        async with served(ANSWER) as s:
            raw = await hello(s)
            fields = headers_of(b"application/grpc" + more)
            block = b"".join(field(name, value) for name, value in fields)
            raw.send(frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, CALL))
            await anyio.sleep(0.1)
            assert s.bench.outcomes() == {"completed": 1}
            assert not raw.is_over

    run(main)


def test_a_call_that_is_not_grpc_is_not_reset_in_front_of_what_it_is_told() -> None:
    """Its connection cannot be written yet: a reset would overtake the answer."""

    async def main() -> None:
        async with served(ANSWER) as s:
            connection, said = await client_of(s), Said()
            (server,) = [client.connection for client in s.front.clients]
            server.pause_writing()
            stream = connection.open(headers_of(b"application/json"), said)
            assert stream is not None
            stream.send(bytes(100))
            await anyio.sleep(0.1)
            assert said.words == []
            server.resume_writing()
            await anyio.sleep(0.1)
            assert said.words == ["415", "ended", "closed 0"]
            s.check_free()
            connection.close("over")

    run(main)


def test_a_call_that_is_not_grpc_is_given_up_by_a_client_that_never_takes_the_answer() -> None:
    """As late as any other answer."""

    async def main() -> None:
        async with served(ANSWER, settings=Settings(default_timeout_s=20)) as s:
            connection, said = await client_of(s), Said()
            (server,) = [client.connection for client in s.front.clients]
            server.pause_writing()
            stream = connection.open(headers_of(b"application/json"), said)
            assert stream is not None
            stream.send(bytes(100))
            await anyio.sleep(19)
            assert (server.n_streams, len(s.front.untaken)) == (1, 1)
            await anyio.sleep(2)
            assert (server.n_streams, len(s.front.untaken)) == (0, 0)
            connection.close("over")

    run(main)


# --- what is counted ---------------------------------------------------------------------------------

LIMIT_BYTES = 1000
GZIP = (b"grpc-encoding", b"gzip")


def squeezed(message: bytes) -> bytes:
    data = gzip.compress(message)
    return b"\1" + len(data).to_bytes(4, "big") + data


REFUSED: dict[str, tuple[bytes, str]] = {
    "a byte too large": (
        begin(1, PATH) + frame(DATA, END_STREAM, 1, prefix(bytes(1001)) + bytes(1001)),
        "too_large",
    ),
    "far too large, by its prefix": (
        begin(1, PATH) + frame(DATA, 0, 1, prefix(bytes(2001))),
        "too_large",
    ),
    "far too large, decompressed": (
        begin(1, PATH, GZIP) + frame(DATA, END_STREAM, 1, squeezed(bytes(100_000))),
        "too_large",
    ),
    "too much metadata": (
        begin(1, PATH, (b"x", bytes(20_000).hex().encode()[:15_000])),
        "too_large",
    ),
    "no message": (begin(1, PATH) + frame(DATA, END_STREAM, 1), "invalid"),
    "two messages": (begin(1, PATH) + frame(DATA, END_STREAM, 1, CALL + CALL), "invalid"),
    "an unknown encoding": (begin(1, PATH, (b"grpc-encoding", b"snappy")), "invalid"),
    "a bad deadline": (begin(1, PATH, (b"grpc-timeout", b"soon")), "invalid"),
    "bad metadata": (
        begin(1, PATH, (b"x-bin", b"!")) + frame(DATA, END_STREAM, 1, CALL),
        "invalid",
    ),
    "too late": (begin(1, PATH), "deadline"),
    "no room": (begin(1, PATH) + frame(DATA, 0, 1, prefix(bytes(900)) + bytes(850)), "overloaded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_request_that_is_refused_counts_once_by_why_it_was(name: str) -> None:
    async def main() -> None:
        said, outcome = REFUSED[name]
        limits = ClientLimits(
            max_header_bytes=10_000,
            max_arriving_bytes=(4 << 10) + (800 if name == "no room" else 4000),
        )
        settings = Settings(max_request_bytes=LIMIT_BYTES, clients=limits)
        async with served(ANSWER, settings=settings) as s:
            raw = await hello(s)
            raw.send(said)
            await anyio.sleep(limits.arrival_s + 1 if name == "too late" else 0.1)
            assert s.bench.outcomes() == {outcome: 1}
            assert kinds(raw, 1)[0] == HEADERS
            assert not raw.is_over
            s.check_free()

    run(main)


@pytest.mark.parametrize(
    "fault", [(b"grpc-timeout", b"soon"), (b"grpc-encoding", b"snappy"), (b"x-more", b"1")]
)
def test_another_call_with_too_much_metadata_is_refused_and_is_no_request(
    fault: tuple[bytes, bytes],
) -> None:
    """Whatever else is wrong with it that would be wrong with a request."""

    async def main() -> None:
        settings = Settings(clients=ClientLimits(max_header_bytes=1000))
        async with served(ANSWER, settings=settings) as s:
            raw = await hello(s)
            much = (b"x", b"y" * 1000)
            raw.send(begin(1, b"/grpc.health.v1.Health/Check", much, fault))
            await anyio.sleep(0.1)
            assert kinds(raw, 1) == [HEADERS, RST_STREAM]
            assert s.bench.outcomes() == {}
            assert s.local.streams == []
            assert await s.ask() == OK
            s.check_free()

    run(main)


def test_a_request_that_is_refused_counts_also_when_its_client_leaves_in_the_same_breath() -> None:
    async def main() -> None:
        async with served(ANSWER) as s:
            raw = await hello(s)
            bad = begin(1, PATH, (b"grpc-timeout", b"soon"))
            raw.send(bad + frame(RST_STREAM, 0, 1, CANCEL.to_bytes(4, "big")))
            await anyio.sleep(0.1)
            assert s.bench.outcomes() == {"cancelled": 1}
            s.check_free()

    run(main)
