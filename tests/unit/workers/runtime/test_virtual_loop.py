"""The virtual loop of these tests: it never hangs and hides no failure."""

import asyncio
import socket

import pytest

from slagate.workers.runtime.virtual_loop import DeadlockError, VirtualLoop, run
from support.engine.sim_llm import until


def test_a_lost_wake_up_is_an_error_not_a_hang() -> None:
    async def scenario() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError, match="no ready task and no timer"):
        run(scenario)


def test_an_hour_passes_at_once_and_a_failing_callback_fails_the_run() -> None:
    async def scenario() -> None:
        asyncio.get_running_loop().call_at(1.0, lambda: 1 // 0)
        await until(3600.0)
        assert asyncio.get_running_loop().time() == pytest.approx(3600.0)

    with pytest.raises(ZeroDivisionError):
        run(scenario)


def test_timers_for_one_time_fire_in_the_order_of_their_making() -> None:
    async def scenario() -> list[int]:
        loop, fired = asyncio.get_running_loop(), list[int]()
        for number in range(100):
            # Half of them are for one time, given as a delay and as a time in turn.
            when_s = 1.0 if number % 2 else 2.0 + number
            if number % 4 == 1:
                loop.call_later(when_s, fired.append, number)
            else:
                loop.call_at(when_s, fired.append, number)
        await until(1.5)
        return fired

    assert run(scenario) == list(range(1, 100, 2))


def test_a_cancelled_timer_does_not_fire_and_is_not_kept() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        fired: list[int] = []
        timers = [loop.call_at(1.0 + number, fired.append, number) for number in range(1000)]
        for timer in timers[5:]:
            timer.cancel()
            timer.cancel()
        assert loop.n_timers == 5
        assert len(vars(loop)["_timers"]) < 200
        await until(2000.0)
        assert fired == [0, 1, 2, 3, 4]
        timers[0].cancel()
        assert loop.n_timers == 0

    run(scenario)


def test_what_a_descriptor_has_is_read_before_time_goes_on() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        here, there = socket.socketpair()
        with here, there:
            here.settimeout(0)
            there.send(b"one")
            read: list[tuple[bytes, float]] = []
            loop.add_reader(here, lambda: read.append((here.recv(9), loop.time())))
            loop.call_at(5.0, there.send, b"two")
            await until(10.0)
            loop.remove_reader(here)
            assert read == [(b"one", 0.0), (b"two", 5.0)]

    run(scenario)
