"""Ways to wait that asyncio does not have: for a blocking call, a changed file, an empty collection."""

import asyncio
import os
import threading
from collections.abc import Callable, Sized
from concurrent.futures import CancelledError, Executor, Future
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, ParamSpec, TypeVar

import anyio
from typing_extensions import override

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThread(Executor):
    """Makes blocking calls, one after the other, on a thread that ends with the process.

    A call that blocks for ever (a file on a dead mount, an engine that hangs) does not hold up the end of
    the process: the interpreter waits for threads of `concurrent.futures` and `anyio.to_thread`, not for
    daemons. A call goes on when the one who waits for it is cancelled.
    """

    def __init__(self, name: str = "slagate call") -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @override
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Have the call made after those before it."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def call() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except (CancelledError, asyncio.CancelledError) as error:
                # As it is, it would be a cancel of the task that waits for the call.
                future.set_exception(RuntimeError(f"{type(error).__name__} {error}".strip()))
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where it is awaited
                future.set_exception(error)

        self._calls.put(call)
        return future

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after the calls it has; nothing is waited for."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


async def run_in_daemon_thread(call: Callable[[], T]) -> T:
    """Run `call()` on a `DaemonThread` of its own, and return its result. Raises what it raises."""
    thread = DaemonThread()
    made = asyncio.get_running_loop().run_in_executor(thread, call)
    thread.shutdown()
    return await made


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """A value that compares unequal to an earlier one once the file was written; None: there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class FileWatch:
    """Tells when a file has changed, and then stayed as it is for one poll: it is written whole by then."""

    def __init__(self, stamp: Callable[[], object], *, in_use: object) -> None:
        """`stamp()` differs once the file was written; `in_use` is that of the content in use."""
        self._stamp = stamp
        self._in_use = in_use
        self._asked = anyio.Event()

    def ask(self) -> None:
        """Have `changed` return now, even if the file is as before."""
        self._asked.set()

    async def changed(self, poll_s: float) -> None:
        """Return when the file is to be read again; its stamp is taken every `poll_s` seconds."""
        seen = self._in_use
        while True:
            with anyio.move_on_after(poll_s):
                await self._asked.wait()
            is_asked, self._asked = self._asked.is_set(), anyio.Event()
            before, seen = seen, await run_in_daemon_thread(self._stamp)
            if is_asked or (seen == before and seen != self._in_use):
                self._in_use = seen
                return


class UntilEmpty(asyncio.Event):
    """Lets any number of tasks wait until a collection is empty; whoever empties it calls `set`."""

    def __init__(self, items: Sized) -> None:
        super().__init__()
        self._items = items

    @override
    async def wait(self) -> Literal[True]:
        while self._items:
            self.clear()  # this wakes nobody, and those who wait already go on waiting
            await super().wait()
        return True
