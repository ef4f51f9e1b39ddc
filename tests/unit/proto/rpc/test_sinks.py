import anyio
import grpc

from slagate.proto.rpc.sinks import BufferedSink, PauseGate
from slagate.proto.rpc.status import OK, Status
from slagate.workers.runtime.virtual_loop import run

GONE = Status(grpc.StatusCode.UNAVAILABLE, "gone")


async def drained(sink: BufferedSink) -> list[bytes]:
    taken = []
    while (data := await sink.next()) is not None:
        taken.append(data)
    return taken


def test_messages_come_in_order_and_before_the_end() -> None:
    async def main() -> None:
        sink = BufferedSink()
        for data in (b"a", b"", b"bc"):
            sink.message(data)
        sink.finish(GONE)
        assert await drained(sink) == [b"a", b"", b"bc"]
        assert await sink.next() is None
        assert sink.status == GONE

    run(main)


def test_a_reader_that_waits_is_woken_by_a_message_and_by_the_end() -> None:
    async def main() -> None:
        sink = BufferedSink()
        got: list[bytes] = []

        async def read() -> None:
            got.extend(await drained(sink))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            for data in (b"1", b"2"):
                await anyio.wait_all_tasks_blocked()
                sink.message(data)
            await anyio.wait_all_tasks_blocked()
            sink.finish()
        assert got == [b"1", b"2"]
        assert sink.status == OK

    run(main)


def test_the_count_is_what_waits() -> None:
    async def main() -> None:
        sink = BufferedSink()
        sink.message(b"abc")
        sink.message(b"de")
        assert sink.n_bytes == 5
        await sink.next()
        assert sink.n_bytes == 2
        await sink.next()
        assert sink.n_bytes == 0

    run(main)


def test_only_the_first_end_counts() -> None:
    async def main() -> None:
        sink = BufferedSink()
        sink.finish(GONE)
        sink.finish(OK)
        assert sink.status == GONE

    run(main)


def test_what_is_discarded_is_never_read() -> None:
    async def main() -> None:
        sink = BufferedSink()
        sink.message(b"abc")
        sink.discard()
        assert sink.n_bytes == 0
        sink.finish(GONE)
        assert await drained(sink) == []

    run(main)


def test_the_repr_says_the_state() -> None:
    async def main() -> None:
        sink = BufferedSink()
        sink.message(b"abc")
        assert repr(sink) == "BufferedSink(1 messages, 3 bytes, open)"
        sink.finish(GONE)
        assert repr(sink) == "BufferedSink(1 messages, 3 bytes, UNAVAILABLE)"

    run(main)


def test_an_owner_is_told_of_each_message_although_nobody_reads() -> None:
    async def main() -> None:
        seen: list[int] = []
        sink = BufferedSink(lambda told: seen.append(told.n_bytes))
        for data in (b"abc", b"", b"de"):
            sink.message(data)
        assert seen == [3, 3, 5]
        await sink.next()
        sink.finish()
        assert seen == [3, 3, 5]

    run(main)


def test_a_gate_closed_again_in_the_turn_in_which_it_opened_holds() -> None:
    async def main() -> None:
        gate = PauseGate()
        passed: list[str] = []

        async def producer() -> None:
            await gate.wait()
            passed.append("through")

        gate.pause()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(producer)
            await anyio.wait_all_tasks_blocked()
            gate.resume()
            gate.pause()
            await anyio.wait_all_tasks_blocked()
            assert passed == []
            gate.resume()
        assert passed == ["through"]

    run(main)
