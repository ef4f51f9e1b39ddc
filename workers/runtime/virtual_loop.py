"""An event loop on virtual time: timers fire in order and at once, and a lost wake-up is an error."""

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any, ParamSpec, TypeVar

from typing_extensions import TypeVarTuple, Unpack

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_RESOLUTION_S = 1e-9
"""Timers so close together are due in one turn, as on any loop: the same sum has two values in floats."""

_MAX_CANCELLED = 100
"""Cancelled timers that stay in the heap, however few others are in it."""


class DeadlockError(RuntimeError):
    """The loop has no ready task and no timer, so nothing could ever happen again."""


class _Callback:
    """What `asyncio.Handle` and `asyncio.TimerHandle` are, without what a loop in debug mode wants of them.

    A simulation makes hundreds for each request, and twice as fast.
    """

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_loop", "_when")

    def __init__(
        self,
        loop: "VirtualLoop",
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> None:
        self._loop = loop
        self._when = when
        self._callback: Callable[..., object] | None = callback
        self._args = args
        self._context = copy_context() if context is None else context
        self._cancelled = False

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        state = "cancelled" if self._cancelled else f"at {self._when} s"
        return f"_Callback({self._callback!r}, {state})"

    def cancel(self) -> None:
        """Do not call back. Idempotent."""
        if not self._cancelled:
            self._cancelled = True
            self._callback, self._args = None, ()
            self._loop.count_cancelled()

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled

    def when(self) -> float:
        """When it is due, on the loop's clock."""
        return self._when


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

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: Unpack[Ts],
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Call back in the next turn."""
        made = _Callback(self, self._now_s, callback, args, context)
        self._callbacks.append(made)
        return made  # type: ignore[return-value] # it does what callers ask of one

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: Unpack[Ts],
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call back in so many seconds."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: Unpack[Ts],
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call back at a time."""
        made = _Callback(self, when, callback, args, context)
        self._n_made += 1
        heappush(self._timers, (when, self._n_made, made))
        return made  # type: ignore[return-value]

    def count_cancelled(self) -> None:
        """Drop cancelled timers when they are most: each call leaves that of its limit behind."""
        self._n_cancelled += 1
        if self._n_cancelled > _MAX_CANCELLED and 2 * self._n_cancelled > len(self._timers):
            self._timers[:] = [entry for entry in self._timers if not entry[2].cancelled()]
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
                    message = f"an error in {one._callback!r}"
                    self.call_exception_handler({"message": message, "exception": error})

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
        return sum(not timer.cancelled() for _, _, timer in self._timers)


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
