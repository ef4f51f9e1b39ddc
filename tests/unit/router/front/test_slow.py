"""Clients that take the end of their answer slowly, behind the request's own time."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from slagate.proto.http2.interfaces import CANCEL
from slagate.proto.rpc.frames import prefix
from slagate.proto.rpc.status import OK
from slagate.router.front.limits import CHECK_S, FLUSH_S, MOST_S, SlowReaderTimeouts
from slagate.router.request.settings import Settings
from slagate.workers.runtime.virtual_loop import run
from support.builders import finished, request, token
from support.gateway.front_path import Served, served
from support.http2.memory_transport import MemoryTransport
from support.http2.raw import (
    DATA,
    END_STREAM,
    HELLO,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    RawClient,
    begin,
    frame,
    frames,
)
from support.worker.fake import Script

PATH = b"/openengine.v1.Inference/Generate"
BODY = request().SerializeToString()
LONG: Script = (*(token(*range(500)) for _ in range(300)), finished(), OK)
"""About 600 kB, at once; less than what may wait for a client."""

TIMEOUT_S = 5.0
QUICK = Settings(default_timeout_s=TIMEOUT_S)


@asynccontextmanager
async def answering(
    window_bytes: int | None = None, *, settings: Settings = QUICK
) -> AsyncIterator[tuple[Served, RawClient, MemoryTransport]]:
    """A client whose answer is made, and waits for it; its connection as the front has it."""
    async with served(LONG, settings=settings) as s:
        raw = RawClient()
        _, line = s.join(raw)
        raw.send(HELLO)
        if window_bytes is not None:
            more = window_bytes.to_bytes(4, "big")
            raw.send(frame(SETTINGS, 0, 0, b"\0\4" + more) + frame(WINDOW_UPDATE, 0, 0, more))
            await anyio.sleep(0.1)
            line.is_stalled = True
        raw.send(begin(1, PATH) + frame(DATA, END_STREAM, 1, prefix(BODY) + BODY))
        await anyio.sleep(0.1)
        assert s.bench.outcomes() == ({"completed": 1} if settings is QUICK else {})
        yield s, raw, line
        assert raw.transport is not None
        raw.transport.close()
        await anyio.sleep(0.1)
        s.check_free()


def permit(raw: RawClient, n_bytes: int) -> None:
    more = n_bytes.to_bytes(4, "big")
    raw.send(frame(WINDOW_UPDATE, 0, 0, more) + frame(WINDOW_UPDATE, 0, 1, more))


def has_all(raw: RawClient) -> bool:
    return any(flags & END_STREAM for _, flags, at, _ in frames(raw.heard) if at == 1)


def test_a_client_that_takes_its_answer_slowly_and_steadily_gets_all_of_it() -> None:
    async def main() -> None:
        async with answering() as (_, raw, _line):
            began_s = anyio.current_time()
            while not has_all(raw):
                permit(raw, 25_000)
                await anyio.sleep(1)
                assert raw.said(RST_STREAM) == []
            took_s = anyio.current_time() - began_s
            # Longer than its time and one more of it.
            assert TIMEOUT_S + 2 * FLUSH_S < took_s < TIMEOUT_S + MOST_S

    run(main)


def test_a_client_that_stops_taking_its_answer_is_given_up() -> None:
    async def main() -> None:
        async with answering() as (_, raw, _line):
            for _ in range(10):
                permit(raw, 25_000)
                await anyio.sleep(1)
            assert raw.said(RST_STREAM) == []
            await anyio.sleep(2 * FLUSH_S + CHECK_S)
            assert raw.said(RST_STREAM) == [CANCEL.to_bytes(4, "big")]
            assert not has_all(raw)

    run(main)


def test_a_client_does_not_get_for_ever_to_take_its_answer() -> None:
    async def main() -> None:
        async with answering() as (_, raw, _line):
            for _ in range(int(TIMEOUT_S + MOST_S) - 1):
                permit(raw, 5000)
                await anyio.sleep(1)
                assert raw.said(RST_STREAM) == []
            await anyio.sleep(FLUSH_S + CHECK_S)
            assert raw.said(RST_STREAM) == [CANCEL.to_bytes(4, "big")]

    run(main)


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_a_slow_line_has_written_counts_though_none_of_the_answer_moves(
    *, is_slow: bool
) -> None:
    """What was given to the transport has to go first, and is a quarter of a megabyte."""

    async def main() -> None:
        async with answering(4 << 20) as (s, raw, line):
            (client,) = [each for each in s.front.clients if each.connection.n_streams]
            for _ in range(15):
                if is_slow:
                    line.n_bytes -= 1000
                await anyio.sleep(1)
            assert client.connection.n_streams == is_slow
            if not is_slow:
                return
            line.n_bytes += 15_000
            line.flow()
            await anyio.sleep(0.1)
            assert has_all(raw)

    run(main)


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_client_on_a_slow_line_is_not_taken_for_one_that_takes_nothing(*, is_slow: bool) -> None:
    """Its worker waits meanwhile, and more than may wait for it is on its way."""

    async def main() -> None:
        settings = Settings(max_buffer_bytes=100_000, stuck_s=2.0)
        async with answering(4 << 20, settings=settings) as (s, raw, line):
            (worker_call,) = s.bench.calls("agg")
            assert worker_call.is_paused
            for _ in range(10):
                if is_slow:
                    line.n_bytes -= 1000
                await anyio.sleep(1)
            assert s.bench.outcomes() == ({} if is_slow else {"slow_client": 1})
            line.n_bytes += 10_000 * is_slow
            line.flow()
            await anyio.sleep(0.1)
            assert has_all(raw)
            if is_slow:
                assert s.bench.outcomes() == {"completed": 1}

    run(main)


def test_an_answer_that_was_passed_on_is_given_up_as_any_other() -> None:
    async def main() -> None:
        async with answering() as (s, raw, _line):
            raw.send(begin(3, b"/other/Echo") + frame(DATA, END_STREAM, 3))
            await anyio.sleep(0.1)
            (local,) = s.local.streams
            assert local.end is not None  # all of it is here, and nothing of it was permitted
            (client,) = [each for each in s.front.clients if each.connection.n_streams]
            await anyio.sleep(TIMEOUT_S + CHECK_S)
            assert len(raw.said(RST_STREAM)) == 2
            assert client.connection.n_streams == 0

    run(main)


def test_what_is_taken_in_time_is_never_asked_about() -> None:
    async def main() -> None:
        class Taken:
            def unsent(self) -> tuple[int]:
                raise AssertionError

            def give_up(self) -> None:
                raise AssertionError

        untaken, taken = SlowReaderTimeouts(), Taken()
        untaken.start_timeout(taken, 0.0)
        untaken.discard(taken)
        await anyio.sleep(5)
        assert len(untaken) == 0

    run(main)
