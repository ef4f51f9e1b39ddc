"""Long work on the event loop in slices, so that everything else that runs there waits for one at most.

A task goes through slices with `run_cooperatively` or `finish_cooperatively`. Without a task, `Slices` runs
generators, and `CooperativeScheduler` the steps of many sources, both in rotation.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import TypeVar

import anyio.lowlevel

log = logging.getLogger(__name__)

T = TypeVar("T")

SLICE_BYTES = 1 << 20
"""Bytes that one slice reads, sums or compares: below a millisecond."""

Steps = Generator[None, None, T]
"""A generator that returns a T, and yields after each slice of its work, below a millisecond."""

Step = Callable[[], bool]
"""A function that does one such slice in each call; returns true while there is more."""


def run_at_once(steps: Steps[T]) -> T:
    """Run the steps to their end without a pause, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: T = end.value
            return made


async def run_cooperatively(steps: Steps[T]) -> T:
    """Run the steps, with a turn of the event loop after each slice, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: T = end.value
            return made
        await anyio.lowlevel.checkpoint()


async def finish_cooperatively(slices: Iterable[None]) -> None:
    """Do all slices, a turn of the loop after each; once cancelled, the rest without turns."""
    rest = iter(slices)
    try:
        for _ in rest:
            await anyio.lowlevel.checkpoint()
    finally:
        for _ in rest:
            pass


class Slices:
    """Runs generators in rotation, one slice of one of them in each turn of the loop.

    The first slice of each is done at once, so work of a single slice needs no loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[Steps[None]] = deque()
        self._handle: asyncio.Handle | None = None

    def start(self, work: Steps[None]) -> None:
        """Do the first slice now, which may raise, and the others in turns of the running loop."""
        if _goes_on(work):
            self._waiting.append(work)
            self._schedule()

    def cancel(self, work: Steps[None]) -> None:
        """Close a generator that has slices left; no-op otherwise."""
        if work in self._waiting:
            self._waiting.remove(work)
            work.close()
            self._schedule()

    def fail_all(self, error: Exception) -> None:
        """Raise `error`, which they must catch, in generators with slices left, and drop them."""
        while self._waiting:
            with suppress(StopIteration):
                self._waiting.popleft().throw(error)
        self._schedule()

    def _turn(self) -> None:
        self._handle = None
        work = self._waiting.popleft()
        try:
            if _goes_on(work):
                self._waiting.append(work)
        finally:
            self._schedule()

    def _schedule(self) -> None:
        """Have a turn of the loop exactly while generators wait."""
        if self._waiting and self._handle is None:
            self._handle = asyncio.get_running_loop().call_soon(self._turn)
        elif not self._waiting and self._handle is not None:
            self._handle.cancel()
            self._handle = None


def _goes_on(work: Steps[None]) -> bool:
    try:
        next(work)
    except StopIteration:
        return False
    return True


class CooperativeScheduler:
    """Runs steps, which are functions, in rotation: one in each turn of the loop.

    A step that is added again is the same if it is equal: a bound method is, a new lambda is not.
    """

    def __init__(self) -> None:
        self._steps: dict[Step, None] = {}  # in order of when they ran last
        self._handle: asyncio.Handle | None = None
        self.n_turns = 0
        self.n_errors = 0  # of steps that raised; each was dropped

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"CooperativeScheduler({len(self._steps)} waiting, {self.n_turns} taken)"

    def add_step(self, step: Step) -> None:
        """Run a step until it returns false, or raises (logged). No-op while it waits already."""
        self._steps[step] = None
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self.n_turns += 1
        step = next(iter(self._steps))
        del self._steps[step]
        try:
            if step():
                self._steps[step] = None
        except Exception:
            # One source's bug must not end the work of the others.
            self.n_errors += 1
            log.exception("turns.step")
        finally:
            again = asyncio.get_running_loop().call_soon
            self._handle = again(self._turn) if self._steps else None
