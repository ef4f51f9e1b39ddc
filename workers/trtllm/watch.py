"""Watches whether an engine is still alive, by a call to it and by a flag that it sets.

The requests of a dead engine would wait for ever, as it neither answers nor closes anything. TensorRT-LLM
has two signs of death. `_check_health` checks the processes behind the engine, and may hang as they do, so
it is called on a thread, with a limit. `_executor._fatal_error` is set by the code that meets an error; a
thread polls it, as the event loop may itself be stuck in a call to the dead engine.
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

    The flag is polled every `flag_s`. An event loop that does not react within `stuck_s` is stuck for ever.
    """

    interval_s: float = 2.0
    check_limit_s: float = 30.0
    flag_s: float = 0.5
    stuck_s: float = 60.0


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
                # Old versions have only the flag, and requests that fail.
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
            error = getattr(getattr(self._llm, "_executor", None), "_fatal_error", None)
            if error is None:
                continue
            loop.call_soon_threadsafe(self._report_dead, RuntimeError(f"fatal error: {error}"))
            if not self._is_over.wait(self._times.stuck_s):
                log.critical("engine.loop_stuck", extra={"reason": str(error)})
                self._leave(1)
            return
