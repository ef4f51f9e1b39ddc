"""What clients may do to the front, and what ends when they do more: theirs, and nothing of others."""

import gc
import tracemalloc
from collections.abc import Awaitable, Callable

import anyio
import pytest

from slagate.proto.http2.goaway import LINGER_S
from slagate.proto.http2.interfaces import ENHANCE_YOUR_CALM
from slagate.proto.rpc.frames import prefix
from slagate.proto.rpc.status import OK
from slagate.router.request.settings import ClientLimits, Settings
from slagate.workers.runtime.virtual_loop import run
from support.builders import finished, request, token
from support.gateway.front_path import Served, served
from support.http2.memory_transport import HIGH_WATER_BYTES
from support.http2.raw import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    HELLO,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    RawClient,
    begin,
    field,
    frame,
    headers_of,
)
from support.seeds import n_in
from support.worker.fake import HANG, Script

ANSWER: Script = (token(1), token(2), finished(), OK)
PATH = b"/openengine.v1.Inference/Generate"
BODY = request().SerializeToString()
CALL = prefix(BODY) + BODY

Scene = Callable[[Served], Awaitable[None]]


def play(scene: Scene, *scripts: Script, clients: ClientLimits | None = None) -> None:
    async def main() -> None:
        settings = Settings(clients=clients or ClientLimits())
        async with served(*scripts or (ANSWER,), settings=settings) as s:
            assert await s.ask() == OK
            await scene(s)
            await anyio.sleep(1)
            assert await s.ask() == OK
            await anyio.sleep(1)
            s.check_free()

    run(main)


def call(stream_id: int, body: bytes = CALL) -> bytes:
    return begin(stream_id, PATH) + frame(DATA, END_STREAM, stream_id, body)


async def hello(s: Served) -> RawClient:
    raw = s.raw()
    raw.send(HELLO)
    await anyio.sleep(0.1)
    return raw


# --- connections -----------------------------------------------------------------------------------


def test_connections_beyond_the_limit_are_closed_and_those_that_are_there_stay() -> None:
    async def scene(s: Served) -> None:
        some = [s.raw() for _ in range(2)]
        more = s.raw()
        await anyio.sleep(0.1)
        assert [each.is_over for each in (*some, more)] == [False, False, True]
        assert more.heard == b""
        assert some[0].transport is not None
        some[0].transport.close()
        await anyio.sleep(0.1)
        assert not (await hello(s)).is_over
        assert await s.ask() == OK

    play(scene, clients=ClientLimits(max_connections=3))


def test_a_connection_that_never_says_anything_is_closed_and_one_that_did_is_not() -> None:
    async def scene(s: Served) -> None:
        silent, slow, fine = s.raw(), s.raw(), await hello(s)
        slow.send(HELLO[:10])
        await anyio.sleep(9)
        assert [each.is_over for each in (silent, slow, fine)] == [False, False, False]
        await anyio.sleep(2)
        assert [each.is_over for each in (silent, slow, fine)] == [True, True, False]
        await anyio.sleep(3000)
        assert not fine.is_over

    play(scene)


def test_a_connection_gets_as_many_streams_as_are_permitted() -> None:
    async def scene(s: Served) -> None:
        raw = await hello(s)
        assert (3).to_bytes(2, "big") + (5).to_bytes(4, "big") in raw.said(SETTINGS)[0]
        raw.send(b"".join(call(n) for n in range(1, 17, 2)))
        await anyio.sleep(0.1)
        # What came before it was told is refused so that it may be tried again.
        refused = [payload for payload in raw.said(RST_STREAM) if payload == b"\0\0\0\7"]
        assert len(s.bench.calls("agg")) == 1 + 5
        assert len(refused) == 3 or raw.goaway_code is not None
        assert raw.transport is not None
        raw.transport.close()

    play(scene, ANSWER, *[(token(1), HANG)] * 5, ANSWER, clients=ClientLimits(max_streams=5))


# --- requests that arrive ---------------------------------------------------------------------------


def test_what_arrives_is_bounded_in_all_and_who_needs_more_is_refused() -> None:
    """MEM-07: many clients that begin large requests."""

    async def scene(s: Served) -> None:
        part = (0).to_bytes(1, "big") + (8 << 20).to_bytes(4, "big") + bytes(16_000)
        raws = []
        for _ in range(10):
            raw = await hello(s)
            raw.send(b"".join(begin(n, PATH) + frame(DATA, 0, n, part) for n in range(1, 41, 2)))
            raws.append(raw)
        await anyio.sleep(0.5)
        assert 1_500_000 < s.front.intake.n_bytes <= 2_000_000
        n_refused = sum(len(raw.said(RST_STREAM)) for raw in raws)
        assert n_refused == 200 - len(s.front.intake)
        answers = b"".join(b"".join(raw.said(HEADERS)) for raw in raws)
        assert answers
        # A small one finds room still.
        assert await s.ask() == OK
        for raw in raws:
            assert raw.transport is not None
            raw.transport.close()

    play(scene, clients=ClientLimits(max_arriving_bytes=2_000_000))


def test_a_request_that_does_not_arrive_is_given_up() -> None:
    async def scene(s: Served) -> None:
        raw = await hello(s)
        raw.send(begin(1, PATH) + begin(3, PATH) + frame(DATA, 0, 3, CALL[:20]) + call(5))
        await anyio.sleep(59)
        assert len(s.front.intake) == 2
        await anyio.sleep(2)
        assert len(s.front.intake) == 0
        assert len(raw.said(RST_STREAM)) == 2
        assert not raw.is_over
        # What comes of it afterwards goes nowhere.
        raw.send(frame(DATA, END_STREAM, 3, CALL[20:]))
        await anyio.sleep(1)
        assert not raw.is_over
        assert len(s.bench.calls("agg")) == 2

    play(scene)


def test_nothing_is_kept_of_a_request_that_is_larger_than_it_may_be() -> None:
    async def scene(s: Served) -> None:
        raw = await hello(s)
        raw.send(begin(1, PATH) + frame(DATA, 0, 1, b"\0" + (17 << 20).to_bytes(4, "big")))
        await anyio.sleep(0.1)
        assert len(s.front.intake) == 0
        assert len(raw.said(RST_STREAM)) == 1
        raw.send(b"".join(frame(DATA, 0, 1, bytes(16_000)) for _ in range(100)))
        await anyio.sleep(0.1)
        assert not raw.is_over

    play(scene)


def test_what_came_before_the_local_server_was_reached_is_passed_on_and_so_is_the_rest() -> None:
    async def scene(s: Served) -> None:
        raw = await hello(s)
        raw.send(begin(1, b"/other/Echo") + frame(DATA, 0, 1, bytes(100)))
        for _ in range(40):
            # More than the window, and never much at once.
            await anyio.sleep(0.1)
            raw.send(frame(DATA, 0, 1, bytes(16_000)))
        raw.send(frame(DATA, END_STREAM, 1))
        await anyio.sleep(0.1)
        assert raw.said(RST_STREAM) == []
        assert len(s.local.streams[0].body) == 640_100
        assert (640_100).to_bytes(4, "big") in raw.heard

    play(scene)


# --- floods ----------------------------------------------------------------------------------------


async def flood(s: Served, data: bytes, n_times: int) -> RawClient:
    """Send it again and again, a hundred at a time; the client, whose connection is over."""
    raw = await hello(s)
    raw.send(begin(1, PATH))
    for _ in range(n_times // 100):
        raw.send(data * 100)
        await anyio.sleep(0.0001)
        if raw.is_over:
            break
    await anyio.sleep(0.1)
    return raw


@pytest.mark.parametrize(
    ("data", "n_times"),
    [
        (frame(PING, 0, 0, bytes(8)), 1000),
        (frame(PING, 1, 0, bytes(8)), 1000),
        (frame(SETTINGS), 1000),
        (frame(GOAWAY, 0, 0, bytes(8)), 1000),
        (frame(DATA, 0, 1), 12_000),
        (frame(PRIORITY, 0, 1, bytes(4) + b"\x10"), 12_000),
        (frame(0x77, 0, 0, b"?"), 12_000),
    ],
    ids=["pings", "answers to pings", "settings", "goaway", "empty data", "priorities", "unknown"],
)
def test_a_flood_of_cheap_frames_ends_its_connection(data: bytes, n_times: int) -> None:
    async def scene(s: Served) -> None:
        raw = await flood(s, data, n_times)
        assert raw.is_over
        assert raw.goaway_code == ENHANCE_YOUR_CALM
        assert len(s.front.clients) == 1

    play(scene)


def test_pings_as_often_as_clients_measure_with_are_answered() -> None:
    async def scene(s: Served) -> None:
        raw = await hello(s)
        for _ in range(3000):
            raw.send(frame(PING, 0, 0, bytes(8)))
            await anyio.sleep(0.1)
        assert not raw.is_over
        assert len(raw.said(PING)) == 3000

    play(scene)


def test_rapid_resets_end_their_connection_and_leave_nothing() -> None:
    """CVE-2023-44487: calls that are begun and given up at once, as fast as can be."""

    async def scene(s: Served) -> None:
        raw = await hello(s)
        n_before = len(s.bench.calls("agg"))
        for at in range(0, 5000, 50):
            ids = range(2 * at + 1, 2 * at + 101, 2)
            raw.send(b"".join(call(n) + frame(RST_STREAM, 0, n, bytes(3) + b"\x08") for n in ids))
            await anyio.sleep(0.0001)
        await anyio.sleep(0.1)
        assert raw.is_over
        assert raw.goaway_code == ENHANCE_YOUR_CALM
        # What is given up in the same breath never gets to a worker.
        assert len(s.bench.calls("agg")) == n_before
        assert len(s.bench.app.gateway.live) == 0

    play(scene)


def test_who_resets_too_many_calls_may_begin_no_more_and_keeps_those_that_are_open() -> None:
    async def scene(s: Served) -> None:
        raw = await hello(s)
        raw.send(call(1))
        for at in range(1, 14):
            raw.send(begin(2 * at + 1, PATH) + frame(RST_STREAM, 0, 2 * at + 1, bytes(4)))
            await anyio.sleep(0.01)
        assert raw.goaway_code == ENHANCE_YOUR_CALM
        raw.send(call(99))
        await anyio.sleep(0.1)
        assert not raw.is_over
        assert len(s.bench.calls("agg")) == 2
        s.bench.calls("agg")[1].say(finished(), OK)
        await anyio.sleep(0.1)
        assert raw.is_over
        assert s.bench.outcomes() == {"completed": 2}

    play(scene, ANSWER, (token(1), HANG), ANSWER, clients=ClientLimits(resets=(10, 1)))


def test_who_does_not_read_that_it_resets_too_many_calls_is_not_served_all_the_same() -> None:
    """Its connection takes no more bytes, so that nothing can be said to it, and then ends."""

    async def scene(s: Served) -> None:
        raw = RawClient()
        _, line = s.join(raw)
        raw.send(HELLO)
        await anyio.sleep(0.1)
        line.is_stalled = True
        stream_id = 1
        while line.n_bytes <= HIGH_WATER_BYTES:
            raw.send(
                begin(stream_id, b"/nothing/Known")
                + frame(DATA, END_STREAM, stream_id, bytes(9_000))
            )
            stream_id += 2
            await anyio.sleep(0.01)
        for at in range(stream_id, stream_id + 30, 2):
            raw.send(begin(at, PATH) + frame(RST_STREAM, 0, at, bytes(4)))
            await anyio.sleep(0.001)
        raw.send(call(stream_id + 98) + call(stream_id + 100))
        await anyio.sleep(0.1)
        assert s.bench.outcomes() == {"completed": 1}
        assert not raw.is_over
        await anyio.sleep(LINGER_S)
        assert len(s.front.clients) == 1
        line.flow()
        await anyio.sleep(0.1)
        assert raw.is_over
        assert raw.goaway_code is None

    play(scene, clients=ClientLimits(resets=(10, 1)))


def test_calls_that_are_given_up_now_and_then_end_nothing() -> None:
    async def scene(s: Served) -> None:
        raw = await hello(s)
        for at in range(100):
            raw.send(begin(2 * at + 1, PATH) + frame(RST_STREAM, 0, 2 * at + 1, bytes(4)))
            await anyio.sleep(1.1)
        assert raw.goaway_code is None
        raw.send(call(999))
        await anyio.sleep(0.1)
        assert s.bench.outcomes() == {"completed": 2}

    play(scene, clients=ClientLimits(resets=(10, 1)))


def test_resets_that_the_gateway_is_made_to_send_end_their_connection_too() -> None:
    """CVE-2025-8671: more of a body than it was said to have."""

    async def scene(s: Served) -> None:
        raw = await hello(s)
        for at in range(0, 30_000, 50):
            ids = range(2 * at + 1, 2 * at + 101, 2)
            short = (b"content-length", b"1")
            raw.send(b"".join(begin(n, PATH, short) + frame(DATA, 0, n, CALL) for n in ids))
            await anyio.sleep(0.0001)
            if raw.is_over:
                break
        await anyio.sleep(0.1)
        assert raw.is_over
        assert raw.goaway_code == ENHANCE_YOUR_CALM

    play(scene)


@pytest.mark.parametrize(
    "n_frames", [1, 7, 100], ids=["one list", "a few continuations", "many continuations"]
)
def test_header_floods_end_their_connection(n_frames: int) -> None:
    async def scene(s: Served) -> None:
        raw = await hello(s)
        block = headers_of(PATH) + b"".join(field(b"x-%d" % i, b"y" * 1000) for i in range(200))
        size = min(len(block) // n_frames + 1, 16_000)
        parts = [block[at : at + size] for at in range(0, len(block), size)]
        raw.send(frame(HEADERS, 0, 1, parts[0]))
        for part in parts[1:-1]:
            raw.send(frame(CONTINUATION, 0, 1, part))
        raw.send(frame(CONTINUATION, END_HEADERS, 1, parts[-1]))
        await anyio.sleep(0.1)
        assert raw.is_over or len(raw.said(RST_STREAM)) == 1
        assert len(s.front.intake) == 0

    play(scene)


# --- memory ----------------------------------------------------------------------------------------


def test_mem_01_calls_given_up_at_any_point_leave_nothing_behind() -> None:
    """MEM-01: by clients, before the worker's first word, behind it, and with what it says on its way."""
    n_calls = n_in(gate=1000, long=3000)

    async def scene(s: Served) -> None:
        async def some(n_calls: int) -> None:
            raw = await hello(s)
            for at in range(0, n_calls, 20):
                ids = range(2 * at + 1, 2 * at + 41, 2)
                raw.send(b"".join(map(call, ids)))
                await anyio.sleep((0, 0.001, 0.2)[at // 20 % 3])
                raw.send(b"".join(frame(RST_STREAM, 0, n, bytes(3) + b"\x08") for n in ids))
                await anyio.sleep(0.3)
                raw.forget()
                s.bench.calls("agg")[:] = s.bench.calls("agg")[:1]
                for worker in s.bench.workers.values():
                    worker.calls.clear()
            assert not raw.is_over
            assert raw.transport is not None
            raw.transport.close()
            await anyio.sleep(1)
            s.check_free()

        s.bench.app.gateway.receipts._max_receipts = 10
        await some(300)
        tracemalloc.start()
        try:
            before_bytes = tracemalloc.get_traced_memory()[0]
            await some(n_calls)
            gc.collect()
            grown_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
        finally:
            tracemalloc.stop()
        # What is expected to be in caches stays until its time is up; a call itself takes kilobytes.
        assert grown_bytes < n_calls * 500, grown_bytes
        s.bench.scripts["agg"].scripts[:] = [ANSWER]

    # libnghttp2 counts them by the real clock, on which none of this takes any time.
    play(scene, ANSWER, (token(1), HANG), clients=ClientLimits(resets=(1 << 30, 1 << 30)))
