"""Watches whether an engine is still alive, by a call to it and by what it knows of itself.

The requests of a dead engine would wait for ever, as it neither answers nor closes anything. TensorRT-LLM
has two signs of death. `_check_health` checks the processes behind the engine, and may hang as they do, so
it is called on a thread, with a limit. Attributes of `_executor` are read without a call (`death_of`): a
thread polls them, as the event loop may itself be stuck in a call to the dead engine. Versions before 1.3
have only the attributes, and their results never tell.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from slagate.workers.runtime.waiting import run_in_daemon_thread

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTimes:
    """The engine is asked every `interval_s` (0: never); an answer that takes `check_limit_s` is a failure.

    What it knows of itself is read every `flag_s`. An event loop that does not react within `stuck_s` is
    stuck for ever.
    """

    interval_s: float = 2.0
    check_limit_s: float = 30.0
    flag_s: float = 0.5
    stuck_s: float = 60.0


def death_of(llm: Any) -> str:
    """Why an engine is dead, as far as this process knows without a call that could block; "" if it is not.

    `_fatal_error` is set by newer versions where they meet an error, or look for one. In all of them a
    process of the engine that has ended completes its future, and an error that was found, or a shutdown,
    sets `doing_shutdown`.
    """
    executor = getattr(llm, "_executor", None)
    error = getattr(executor, "_fatal_error", None)
    if error is not None:
        return f"fatal error: {error}"
    for process in getattr(executor, "mpi_futures", None) or ():
        if process.done():
            error = None if process.cancelled() else process.exception()
            return f"its process has ended{f': {error}' if error is not None else ''}"
    return "it has shut down" if getattr(executor, "doing_shutdown", False) else ""


class EngineWatch:
    """Watches one `LLM`, and calls `on_death` once, on the event loop, with the reason."""

    def __init__(
        self,
        llm: Any,
        *,
        times: WatchTimes,
        on_death: Callable[[Exception], None],
        leave: Callable[[int], object],
    ) -> None:
        """`leave` ends the process at once; it is called from a thread."""
        self._llm = llm
        self._times = times
        self._on_death = on_death
        self._leave = leave
        self.is_dead = False
        self._is_over = threading.Event()

    async def run(self) -> None:
        """Watch until the engine is dead, or until cancelled."""
        check = getattr(self._llm, "_check_health", None)
        if self._times.interval_s <= 0:
            log.info("engine.watch_off")
            return
        with self._reading_flag():
            if check is None:
                # Old versions have only what `death_of` reads.
                log.info("engine.no_health_check")
                await anyio.sleep_forever()
                return
            while not self.is_dead:
                await anyio.sleep(self._times.interval_s)
                failure = await self._checked(check)
                if failure is not None:
                    self._report_dead(failure)

    async def _checked(self, check: Callable[[], object]) -> Exception | None:
        try:
            with anyio.fail_after(self._times.check_limit_s):
                is_well = await run_in_daemon_thread(check)
        except TimeoutError:
            return TimeoutError(f"no answer to a health check in {self._times.check_limit_s:g} s")
        except Exception as error:
            # Any error of the check counts as a death.
            log.exception("engine.check_failed")
            return error
        return None if is_well else RuntimeError("its health check failed")

    def _report_dead(self, error: Exception) -> None:
        if not self.is_dead:
            self.is_dead = True
            log.error("engine.dead", extra={"reason": str(error) or type(error).__name__})
            self._on_death(error)

    @contextmanager
    def _reading_flag(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        thread = threading.Thread(
            target=self._read_flag, args=(loop,), name="slagate engine watch", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()

    def _read_flag(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._is_over.wait(self._times.flag_s):
            death = death_of(self._llm)
            if not death:
                continue
            loop.call_soon_threadsafe(self._report_dead, RuntimeError(death))
            if not self._is_over.wait(self._times.stuck_s):
                log.critical("engine.loop_stuck", extra={"reason": death})
                self._leave(1)
            return
