"""What an HTTP/2 connection counts comes to nothing when its streams are over, however they end."""

import random

import anyio

from slagate.proto.http2.connection import ConnectionState, H2Connection, H2Stream
from slagate.proto.http2.interfaces import Headers, Http2Settings, StreamEnd
from slagate.workers.runtime.virtual_loop import run
from support.http2.memory_transport import MemoryTransport, joined
from support.seeds import each_seed

N_SEEDS = 150
N_STEPS = 60
REQUEST = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"a"))
ANSWER = ((b":status", b"200"),)
TRAILERS = ((b"grpc-status", b"0"),)


class End:
    """The handler of one end of a stream."""

    def __init__(self, stream: H2Stream | None = None) -> None:
        self.stream = stream
        self.n_closed = 0
        self.has_answered = False

    def headers(self, headers: Headers, /) -> None: ...

    def data(self, data: bytes, /) -> None: ...

    def trailers(self, headers: Headers, /) -> None: ...

    def ended(self) -> None: ...

    def writable(self) -> None: ...

    def closed(self, end: StreamEnd, /) -> None:
        assert self.stream is None or self.stream.unsent_bytes == 0
        self.n_closed += 1


class Side:
    """The owner of a connection."""

    def ready(self) -> None: ...

    def freed(self) -> None: ...

    def retiring(self, code: int, about: bytes, /) -> None: ...

    def lost(self, reason: str, /) -> None: ...


def act(rng: random.Random, end: End, *, is_server: bool) -> None:
    """Something that a user may ask of a stream, whether it is closed or not."""
    stream = end.stream
    assert stream is not None
    what = rng.choice(["send", "send", "reset", "finish", "end", "pause", "resume", "watch", "own"])
    if what == "send":
        stream.send(bytes(rng.choice([10, 1000, 100_000])))
    elif what == "reset":
        stream.reset(rng.choice([0, 8]))
    elif what == "finish":
        stream.end_stream()
    elif what == "end":
        stream.end_stream(TRAILERS)
    elif what == "pause":
        stream.pause()
    elif what == "resume":
        stream.resume()
    elif what == "watch":
        stream.tell_writable()
    elif is_server:
        if end.has_answered:
            stream.reset_behind(0)
        else:
            end.has_answered = True
            stream.respond(ANSWER)


def check(connection: H2Connection, ends: list[End]) -> None:
    assert connection.n_streams == 0
    if connection.state is not ConnectionState.LOST:
        assert connection._n_forgotten == 0
        assert connection.engine.queued_body_size() == 0
        for kept in (
            connection._queued,
            connection._behind,
            connection._watched,
            connection._last_words,
        ):
            assert not kept, kept
    for end in ends:
        assert isinstance(end.stream, H2Stream)
        assert (end.stream.unsent_bytes, end.stream._parts) == (0, [])
        assert end.stream.handler is None
        assert end.n_closed <= 1


async def history(seed: int) -> None:
    rng = random.Random(seed)
    theirs: list[End] = []

    def accept(stream: H2Stream, _headers: Headers) -> End:
        theirs.append(End(stream))
        return theirs[-1]

    client = H2Connection(Side(), Http2Settings(stream_window_bytes=rng.choice([1000, 65_535])))
    server = H2Connection(Side(), Http2Settings(resets=(1 << 30, 1 << 30)), accept=accept)
    lines: tuple[MemoryTransport, MemoryTransport] = joined(client, server, 0.001)
    await anyio.sleep(0.01)
    ours: list[End] = []
    for _ in range(N_STEPS):
        if rng.random() < 0.15 and client.room > 0:
            end = End()
            end.stream = client.open(REQUEST, end)
            ours.append(end)
        elif ours:
            ends = rng.choice([ours, theirs or ours])
            act(rng, rng.choice(ends), is_server=ends is theirs)
        if rng.random() < 0.5:
            await anyio.sleep(rng.choice([0, 0.0005, 0.01]))
    if rng.random() < 0.3:
        rng.choice(lines).close()
    for end in ours:
        if rng.random() < 0.5 and end.stream is not None:
            end.stream.reset()
    await anyio.sleep(1)
    for end in ours:
        assert end.stream is not None
        end.stream.reset()
    await anyio.sleep(1)
    for connection, all_of_it in ((client, ours), (server, theirs)):
        connection.flush_soon()
        await anyio.sleep(0.1)
        check(connection, all_of_it)


def test_what_is_counted_of_streams_comes_to_nothing() -> None:
    each_seed(N_SEEDS, lambda seed: run(history, seed))
