"""What may take for ever, beside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(call: Callable[[], T]) -> T:
    """`call()` on a thread of its own, which ends with the process. Raises what it raises.

    Reading a file may take for ever (a dead mount), as may asking an engine, and the interpreter would wait
    at its end for a thread of anyio's: a process has to end all the same.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is for who waits
            future.set_exception(error)

    future.set_running_or_notify_cancel()  # from here on nobody who stops waiting for it cancels it
    threading.Thread(target=run, name="slagate aside", daemon=True).start()
    return await asyncio.wrap_future(future)
