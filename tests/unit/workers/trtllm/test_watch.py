"""The watch over an engine: what counts as its death, and who finds it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from slagate.workers.trtllm.watch import EngineWatch, WatchTimes
from support.limits import HANG_S

FAST = WatchTimes(interval_s=0.01, check_limit_s=HANG_S, flag_s=0.01, stuck_s=HANG_S)


class Engine:
    def __init__(self, check: Callable[[], object] | None = lambda: True) -> None:
        self._executor: Any = SimpleNamespace(_fatal_error=None)
        if check is not None:
            self._check_health = check


def death_of(engine: Any, times: WatchTimes = FAST) -> Exception:
    """What a watch says that the engine died of."""

    async def main() -> Exception:
        deaths: list[Exception] = []
        dead = anyio.Event()

        def on_death(error: Exception) -> None:
            deaths.append(error)
            dead.set()

        watch = EngineWatch(engine, times=times, on_death=on_death, leave=_never)
        assert not watch.is_dead
        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch.run)
                await dead.wait()
                tasks.cancel_scope.cancel()
        assert watch.is_dead
        (death,) = deaths
        return death

    return anyio.run(main)


def _never(status: int) -> None:
    raise AssertionError(f"left with {status}")


def _raises() -> bool:
    raise OSError("no such process")


def _hangs() -> bool:
    return threading.Event().wait()


@pytest.mark.parametrize(
    ("check", "limit_s", "said"),
    [
        (lambda: False, HANG_S, "its health check failed"),
        (_raises, HANG_S, "no such process"),
        (_hangs, 0.05, "no answer to a health check in 0.05 s"),
    ],
)
def test_who_cannot_say_that_it_is_well_is_dead(
    check: Callable[[], bool], limit_s: float, said: str
) -> None:
    assert str(death_of(Engine(check), replace(FAST, check_limit_s=limit_s))) == said


@pytest.mark.parametrize("check", [None, lambda: True])
def test_the_flag_of_the_engine_is_believed(check: Callable[[], bool] | None) -> None:
    engine = Engine(check)
    engine._executor._fatal_error = RuntimeError("rank 3 died")
    assert str(death_of(engine)) == "fatal error: rank 3 died"


@pytest.mark.parametrize("check", [None, lambda: True])
def test_w05_an_engine_whose_process_has_ended_is_dead(check: Callable[[], bool] | None) -> None:
    """Versions before 1.3 have no flag, and tell nobody else."""
    process: Future[None] = Future()
    process.set_exception(ValueError("rank 3 died"))
    engine = Engine(check)
    engine._executor = SimpleNamespace(mpi_futures=[Future(), process])
    assert str(death_of(engine)) == "its process has ended: rank 3 died"


def test_an_engine_that_is_shut_down_has_no_executor_and_is_not_dead() -> None:
    checks = threading.Semaphore(0)

    def check() -> bool:
        checks.release()
        return True

    engine = Engine(check)
    engine._executor = None

    async def main() -> None:
        watch = EngineWatch(engine, times=FAST, on_death=_died, leave=_never)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch.run)
            for _ in range(3):
                await anyio.to_thread.run_sync(checks.acquire)
            tasks.cancel_scope.cancel()
        assert not watch.is_dead

    anyio.run(main)


def _died(error: Exception) -> None:
    raise AssertionError(error)


def test_a_watch_that_is_off_asks_nobody() -> None:
    async def main() -> None:
        off = WatchTimes(interval_s=0.0)
        watch = EngineWatch(Engine(_raises), times=off, on_death=_died, leave=_never)
        await watch.run()
        assert not watch.is_dead

    anyio.run(main)


def test_a_loop_that_is_stuck_in_a_dead_engine_is_left() -> None:
    """The thread ends the process; here it sets free what the loop is stuck in."""
    left: list[int] = []
    free = threading.Event()

    def leave(status: int) -> None:
        left.append(status)
        free.set()

    engine = Engine(None)
    times = WatchTimes(interval_s=0.01, flag_s=0.01, stuck_s=0.05)

    async def main() -> None:
        watch = EngineWatch(engine, times=times, on_death=lambda _: None, leave=leave)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch.run)
            await anyio.lowlevel.checkpoint()
            engine._executor._fatal_error = RuntimeError("rank 3 died")
            assert free.wait(HANG_S), "nobody ended the process"
            tasks.cancel_scope.cancel()

    anyio.run(main)
    assert left == [1]
