"""Work in slices: what one turn of the loop does, and how the rest is given up."""

import asyncio

import pytest

from slagate.workers.runtime.cooperative import Slices, Steps
from slagate.workers.runtime.virtual_loop import run


def work(name: str, n_slices: int, log: list[str]) -> Steps[None]:
    try:
        for i in range(n_slices):
            log.append(f"{name}{i}")
            if i < n_slices - 1:
                yield
    except OSError as error:
        log.append(f"{name} {error}")
    finally:
        log.append(f"{name}.")


async def turns(n: int, log: list[str]) -> None:
    """Let the loop turn some times, each told by "|" in the log."""
    loop = asyncio.get_running_loop()
    reached = loop.create_future()

    def turn(left: int) -> None:
        if left:
            log.append("|")
            loop.call_soon(turn, left - 1)
        else:
            reached.set_result(None)

    loop.call_soon(turn, n)
    await reached


def test_one_slice_is_done_at_once_and_needs_no_loop() -> None:
    log: list[str] = []
    Slices().start(work("a", 1, log))
    assert log == ["a0", "a."]


def test_a_turn_has_one_slice_however_many_wait() -> None:
    async def scenario() -> None:
        log: list[str] = []
        slices = Slices()
        for name in "abc":
            slices.start(work(name, 3, log))
        await turns(7, log)
        assert "".join(log) == "a0b0c0a1|b1|c1|a2a.|b2b.|c2c.||"

    run(scenario)


def test_cancelled_work_does_nothing_more_and_is_closed() -> None:
    async def scenario() -> None:
        log: list[str] = []
        slices = Slices()
        a, b = work("a", 3, log), work("b", 2, log)
        slices.start(a)
        slices.start(b)
        slices.cancel(a)
        slices.cancel(a)
        assert log == ["a0", "b0", "a."]
        await turns(0, log)
        slices.cancel(b)
        assert log == ["a0", "b0", "a.", "b1", "b."]

    run(scenario)


def test_work_may_cancel_itself_and_start_other_work_at_its_end() -> None:
    async def scenario() -> None:
        log: list[str] = []
        slices = Slices()

        def last() -> Steps[None]:
            yield
            slices.cancel(own)
            slices.start(work("b", 2, log))

        own = last()
        slices.start(own)
        await turns(2, log)
        assert "".join(log) == "b0|b1b.|"

    run(scenario)


def test_all_work_fails_where_it_stands() -> None:
    async def scenario() -> None:
        log: list[str] = []
        slices = Slices()
        for name in "ab":
            slices.start(work(name, 2, log))
        slices.fail_all(OSError("gone"))
        assert log == ["a0", "b0", "a gone", "a.", "b gone", "b."]
        await turns(0, log)
        assert len(log) == 6

    run(scenario)


def test_work_that_raises_does_not_stop_the_others() -> None:
    async def scenario() -> None:
        log: list[str] = []
        slices = Slices()

        def broken() -> Steps[None]:
            yield
            raise LookupError("broken")

        slices.start(broken())
        slices.start(work("b", 2, log))
        loop = asyncio.get_running_loop()
        caught: list[object] = []
        loop.set_exception_handler(lambda _loop, context: caught.append(context["exception"]))
        await turns(1, log)
        assert [str(error) for error in caught] == ["broken"]
        assert "".join(log) == "b0|b1b."

    run(scenario)


def test_what_the_first_slice_raises_is_raised() -> None:
    def broken() -> Steps[None]:
        raise LookupError("broken")
        yield

    with pytest.raises(LookupError, match="broken"):
        Slices().start(broken())
