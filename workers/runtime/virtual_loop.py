"""An event loop on virtual time: timers fire in order and at once, and a lost wake-up is an error."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeadlockError(RuntimeError):
    """The loop has no ready task and no timer, so nothing could ever happen again."""


class _VirtualSelector(selectors.DefaultSelector):
    """Polls real descriptors without blocking; asked to wait, it moves the clock instead.

    While a task is ready it does not poll: that would be a system call each turn, a tenth of a simulation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []
        events = super().select(0)
        if events:
            return events
        if timeout is None:
            raise DeadlockError("no ready task and no timer")
        self.now_s += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """A selector loop whose `time()` starts at 0 s and only moves when every task waits."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)
        self.failures: list[Mapping[str, Any]] = []
        self.set_exception_handler(lambda _loop, context: self.failures.append(context))

    def time(self) -> float:
        """Seconds since the loop began, none of them real."""
        return self._virtual.now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Make the call at once: no thread's time is virtual, so none may be waited for.

        As on a thread, no loop runs for the call.
        """
        del executor
        made = self.create_future()
        asyncio._set_running_loop(None)
        try:
            made.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            made.set_exception(error)
        finally:
            asyncio._set_running_loop(self)
        return made

    def stall(self, seconds: float) -> None:
        """Let time pass inside the running callback, as when it computes for that long."""
        self._virtual.now_s += seconds

    @property
    def n_timers(self) -> int:
        """Timers pending: 0 when nothing would ever wake an idle engine."""
        timers: list[asyncio.TimerHandle] = vars(self)["_scheduled"]
        return sum(not timer.cancelled() for timer in timers)


def run(coro_fn: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `coro_fn(*args)` to its end on a fresh virtual loop and return its result.

    Raises `DeadlockError` when everything waits for nothing, and whatever a callback raised: an error
    in a timer must end the run, not only be logged.
    """
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(coro_fn(*args, **kwargs))
        for context in loop.failures:
            raise context.get("exception") or RuntimeError(context["message"])
        return result
    finally:
        loop.set_exception_handler(lambda _loop, _context: None)
        _cancel_all(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
