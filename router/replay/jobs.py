"""Many runs, on all cores: one child process for each core, which plays one run after the other."""

import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from slagate.workers.runtime.usage import UsageError

LOOK_S = 0.25
"""Between two looks at how far the children are."""


class JobFailed(Exception):
    """A run ended with an error; the text says which and why."""


class Done(NamedTuple):
    """A job with its result."""

    job: Any
    result: Any


def run_jobs(
    jobs: Sequence[Any],
    work: Callable[[Any, Callable[[], None]], Any],
    *,
    n_processes: int,
    on_progress: Callable[[int], None],
) -> Iterator[Done]:
    """Yield each job with what `work(job, count)` gives, as they are done; `work` calls `count` on the way.

    `work`, jobs and results must be picklable. `on_progress` gets how often `count` was called in all.
    Ctrl-C ends the children, and the iteration with `KeyboardInterrupt`. Raises `JobFailed`, and a
    `UsageError` of `work`.
    """
    context = multiprocessing.get_context("spawn")
    counted = context.Value("q", 0)
    with _children(context, counted, min(n_processes, len(jobs)) or 1) as executor:
        todo = {executor.submit(_do, work, job): job for job in jobs}
        while todo:
            ended, _ = wait(todo, timeout=LOOK_S, return_when=FIRST_COMPLETED)
            on_progress(counted.value)
            for future in ended:
                job = todo.pop(future)
                yield Done(job, _result(future, job))


def _result(future: Future[Any], job: Any) -> Any:
    try:
        return future.result()
    except UsageError:
        raise
    except BrokenProcessPool:
        raise JobFailed(f"a process that played {job} or another run was ended") from None
    except Exception as error:
        raise JobFailed(f"{job}: {type(error).__name__}: {error}") from error


@contextmanager
def _children(context: Any, counted: Any, n_processes: int) -> Iterator[ProcessPoolExecutor]:
    """An executor of so many processes, which are killed at the end, whatever they do."""
    before = {child.pid for child in multiprocessing.active_children()}
    executor = ProcessPoolExecutor(n_processes, context, initializer=_be_child, initargs=(counted,))
    try:
        yield executor
    finally:
        for child in multiprocessing.active_children():
            if child.pid not in before:
                child.kill()
        executor.shutdown(cancel_futures=True)


_counted: Any = None
"""In a child process: the parent's count."""


def _be_child(counted: Any) -> None:
    global _counted
    _counted = counted
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    logging.disable(logging.ERROR)  # a warning for each spilled request would bury all else


def _do(work: Callable[[Any, Callable[[], None]], Any], job: Any) -> Any:
    return work(job, partial(_count, _counted))


def _count(counted: Any) -> None:
    with counted.get_lock():
        counted.value += 1
