"""An event loop on virtual time: timers fire in order and at once, and a lost wake-up is an error."""

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextvars import copy_context
from heapq import heapify, heappop, heappush
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_RESOLUTION_S = 1e-9
"""Timers so close together are due in one turn, as on any loop: the same sum has two values in floats."""


class DeadlockError(RuntimeError):
    """The loop has no ready task and no timer, so nothing could ever happen again."""


class _Callback:
    """A handle, without what those of asyncio do for debug mode: hundreds are made for each request."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_loop")
    _source_traceback = None

    def __init__(self, loop: "VirtualLoop", callback: Any, args: Any, context: Any) -> None:
        self._loop = loop
        self._callback = callback
        self._args = args
        self._context = copy_context() if context is None else context
        self._cancelled = False

    def cancel(self) -> None:
        """Do not call back. Idempotent."""
        if not self._cancelled:
            self._cancelled = True
            self._callback, self._args = None, ()
            self._loop.count_cancelled()


class VirtualLoop(asyncio.SelectorEventLoop):
    """A selector loop whose `time()` starts at 0 s and only moves when every task waits.

    Its turn is asyncio's without what costs a simulation a tenth of its time: a poll of descriptors where
    there are none, comparisons of timers in Python, debug mode. Timers for one time fire in the order in
    which they were made.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        # Handles of asyncio's are in it too: of descriptors, and of other threads.
        self._callbacks: deque[Any] = vars(self)["_ready"]
        # A heap, in which each timer is behind its time and its number, so that it is never compared.
        self._timers: list[tuple[float, int, _Callback]] = []
        self._n_made = self._n_cancelled = 0
        self._selected: selectors.BaseSelector = vars(self)["_selector"]
        self._n_own = len(self._selected.get_map())  # by which another thread would end a sleep
        self.failures: list[Mapping[str, Any]] = []
        self.set_exception_handler(lambda _loop, context: self.failures.append(context))

    def time(self) -> float:
        """Seconds since the loop began, none of them real."""
        return self._now_s

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        """Call back in the next turn."""
        made = _Callback(self, callback, args, context)
        self._callbacks.append(made)
        return made

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        """Call back at a time."""
        made = _Callback(self, callback, args, context)
        self._n_made += 1
        heappush(self._timers, (when, self._n_made, made))
        return made

    def count_cancelled(self) -> None:
        """Drop cancelled timers when they are many and most: each call leaves that of its limit behind."""
        self._n_cancelled += 1
        if self._n_cancelled > 100 and 2 * self._n_cancelled > len(self._timers):
            self._timers[:] = [entry for entry in self._timers if not entry[2]._cancelled]
            heapify(self._timers)
            self._n_cancelled = 0

    def _run_once(self) -> None:
        """Call what is ready; what becomes ready by that waits for the next turn."""
        ready, timers = self._callbacks, self._timers
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not ready:
            if len(self._selected.get_map()) > self._n_own:
                self._process_events(self._selected.select(0))  # type: ignore[attr-defined]
            if not ready:
                if not timers:
                    raise DeadlockError("no ready task and no timer")
                self._now_s = max(self._now_s, timers[0][0])
        end_s = self._now_s + _RESOLUTION_S
        while timers and timers[0][0] < end_s:
            timer = heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)
        for _ in range(len(ready)):
            one = ready.popleft()
            if not one._cancelled:
                try:
                    one._context.run(one._callback, *one._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - ends the run, see `run`
                    self.call_exception_handler({"message": str(error), "exception": error})

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
        self._now_s += seconds

    @property
    def n_timers(self) -> int:
        """Timers pending: 0 when nothing would ever wake an idle engine."""
        return sum(not timer._cancelled for _, _, timer in self._timers)


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
