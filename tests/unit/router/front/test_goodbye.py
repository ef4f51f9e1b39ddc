"""How the front says goodbye: whatever was on its way is served, and nothing after that."""

import anyio
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.proto.http2.goaway import ANSWER_LIMIT_S
from slagate.proto.rpc.frames import MessageReader, prefix
from slagate.proto.rpc.status import OK
from slagate.router.app import _drain
from slagate.router.request.settings import Settings
from slagate.workers.runtime.virtual_loop import run
from support.builders import finished, request, token
from support.gateway.front_path import Served, served
from support.http2.raw import (
    ACK,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    HELLO,
    PING,
    RawClient,
    begin,
    frame,
    frames,
)
from support.worker.fake import HANG, Script, Wait

ANSWER: Script = (token(1), token(2), finished(), OK)
PATH = b"/openengine.v1.Inference/Generate"
BODY = request().SerializeToString()
ALL = (1 << 31) - 1


class Slow(RawClient):
    """Answers pings when it is told to."""

    def send(self, data: bytes) -> None:
        if data[3:5] != bytes((PING, ACK)):
            super().send(data)

    def answer(self) -> None:
        for payload in self.said(PING):
            super().send(frame(PING, ACK, 0, payload))


def call(stream_id: int) -> bytes:
    return begin(stream_id, PATH) + frame(DATA, END_STREAM, stream_id, prefix(BODY) + BODY)


def last_ids(raw: RawClient) -> list[int]:
    return [int.from_bytes(payload[:4], "big") for payload in raw.said(GOAWAY)]


def n_ended(raw: RawClient) -> int:
    """Streams that have their status."""
    return sum(
        bool(flags & END_STREAM) for kind, flags, _, _ in frames(raw.heard) if kind <= HEADERS
    )


async def connected(s: Served) -> Slow:
    raw = Slow()
    s.join(raw)
    raw.send(HELLO)
    await anyio.sleep(0.1)
    return raw


def test_what_comes_before_the_client_has_read_the_notice_is_served() -> None:
    async def main() -> None:
        async with served(ANSWER) as s:
            raw = await connected(s)
            s.front.retire()
            await anyio.sleep(0.1)
            assert last_ids(raw) == [ALL]
            raw.send(call(1) + call(3))
            await anyio.sleep(0.1)
            assert n_ended(raw) == 2
            assert not raw.is_over
            raw.answer()
            await anyio.sleep(0.1)
            assert last_ids(raw) == [ALL, 3]
            await s.front.emptied()
            await anyio.sleep(0.1)  # what was written arrives
            assert raw.is_over
            s.check_free()

    run(main)


def test_what_comes_behind_the_last_word_is_not_taken_and_the_client_can_tell() -> None:
    async def main() -> None:
        async with served((token(1), HANG)) as s:
            raw = await connected(s)
            raw.send(call(1))
            await anyio.sleep(0.1)
            s.front.retire()
            await anyio.sleep(0.1)
            raw.answer()
            await anyio.sleep(0.1)
            raw.send(call(3))
            await anyio.sleep(0.1)
            assert last_ids(raw) == [ALL, 1]
            assert len(s.bench.calls("agg")) == 1
            s.bench.calls("agg")[0].say(finished(), OK)
            await s.front.emptied()
            await anyio.sleep(0.1)  # what was written arrives
            assert n_ended(raw) == 1
            s.check_free()

    run(main)


def test_a_client_that_does_not_answer_is_told_the_end_all_the_same() -> None:
    async def main() -> None:
        async with served(ANSWER) as s:
            raw = await connected(s)
            s.front.retire()
            s.front.retire()
            await s.front.settled()
            assert anyio.current_time() == pytest.approx(ANSWER_LIMIT_S, abs=0.3)
            await s.front.emptied()
            await anyio.sleep(0.1)  # what was written arrives
            assert last_ids(raw) == [ALL, 0]
            assert raw.is_over

    run(main)


def test_a_drain_waits_for_what_is_still_arriving() -> None:
    async def main() -> None:
        async with served(ANSWER, settings=Settings()) as s:
            raw = await connected(s)
            raw.send(begin(1, PATH))
            await anyio.sleep(0.1)
            s.front.retire()
            await anyio.sleep(0.1)
            raw.answer()
            with anyio.move_on_after(5) as waiting:
                await s.front.settled()
            assert waiting.cancelled_caught
            raw.send(frame(DATA, END_STREAM, 1, prefix(BODY) + BODY))
            await s.front.settled()
            await s.front.emptied()
            await anyio.sleep(0.1)  # what was written arrives
            assert n_ended(raw) == 1
            assert s.bench.outcomes() == {"completed": 1}

    run(main)


def test_a_drain_serves_what_comes_late_for_as_long_as_any_other() -> None:
    slow: Script = (token(1), Wait(4.0), finished(), OK)

    async def main() -> None:
        async with served(slow) as s, anyio.create_task_group() as tasks:
            raw = await connected(s)

            async def late() -> None:
                await anyio.sleep(0.5)
                raw.send(call(1))
                raw.answer()

            tasks.start_soon(late)
            await _drain(s.front, s.bench.app.gateway, 30)
            assert s.bench.outcomes() == {"completed": 1}
            await anyio.sleep(0.1)
            assert n_ended(raw) == 1

    run(main)


def test_a_client_that_leaves_before_it_was_told_is_not_waited_for() -> None:
    async def main() -> None:
        async with served(ANSWER) as s:
            raw = await connected(s)
            began_s = anyio.current_time()
            s.front.retire()
            assert raw.transport is not None
            raw.transport.close()
            await s.front.settled()
            await s.front.emptied()
            assert anyio.current_time() == began_s

    run(main)


def test_a_goodbye_goes_out_behind_what_was_said_in_the_same_turn() -> None:
    async def main() -> None:
        async with served((token(1), HANG)) as s:
            raw = await connected(s)
            raw.send(call(1))
            await anyio.sleep(0.1)
            said = b"".join(raw.said(DATA))
            s.bench.calls("agg")[0].say(token(2), token(3))
            s.front.close()
            await anyio.sleep(0.1)
            assert raw.is_over
            rest = b"".join(raw.said(DATA))[len(said) :]
            reader = MessageReader(1000)
            responses = [oe.GenerateResponse.FromString(each) for each in reader.feed(rest)]
            assert [each.token.tokens[0].token_id for each in responses] == [2, 3]
            kinds = [kind for kind, _, _, _ in frames(raw.heard)]
            assert kinds.index(GOAWAY) > max(at for at, kind in enumerate(kinds) if kind == DATA)

    run(main)


def test_everybody_who_waits_for_a_goodbye_is_told() -> None:
    """The drain, and whoever else wants to know."""

    async def main() -> None:
        async with served(ANSWER) as s:
            raw = await connected(s)
            s.front.retire()
            with anyio.fail_after(10):
                async with anyio.create_task_group() as tasks:
                    for _ in range(2):
                        tasks.start_soon(s.front.settled)
                        tasks.start_soon(s.front.emptied)
            await anyio.sleep(0.1)
            assert raw.is_over

    run(main)
