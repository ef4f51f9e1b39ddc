"""Long work on the event loop in small parts, so that what else runs there waits for one at most.

`Slices` runs generators, the first part at once; `CooperativeScheduler` runs the steps of many sources in
rotation.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator

SLICE_BYTES = 1 << 20
"""Bytes that one slice reads, sums or compares: below a millisecond."""

Work = Generator[None, None, None]
"""Yields between slices."""


class Slices:
    """Works in turn, one slice of one of them in each turn of the loop.

    The first slice is done at once, so what has no more than one needs no loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[Work] = deque()
        self._turn: asyncio.Handle | None = None

    def start(self, work: Work) -> None:
        """Do the first slice, the others later; raises what the first one raises."""
        if _goes_on(work):
            self._waiting.append(work)
            self._arm()

    def cancel(self, work: Work) -> None:
        """Leave out the slices that are not done yet. No-op when there are none."""
        if work in self._waiting:
            self._waiting.remove(work)
            work.close()
            self._rest()

    def fail_all(self, error: Exception) -> None:
        """Raise `error` where each of them stands; nothing is left to do."""
        while self._waiting:
            work = self._waiting.popleft()
            try:
                work.throw(error)
            except StopIteration:
                continue
        self._rest()

    def _advance(self) -> None:
        self._turn = None
        work = self._waiting.popleft()
        try:
            if _goes_on(work):
                self._waiting.append(work)
        finally:
            if self._waiting:
                self._arm()

    def _arm(self) -> None:
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._advance)

    def _rest(self) -> None:
        if not self._waiting and self._turn is not None:
            self._turn.cancel()
            self._turn = None


def _goes_on(work: Work) -> bool:
    try:
        next(work)
    except StopIteration:
        return False
    return True


log = logging.getLogger(__name__)

Step = Callable[[], bool]
"""Does a little of its work, well under a millisecond; true while there is more."""


class CooperativeScheduler:
    """One step a turn, each source in turn: however many have work, a turn costs one step.

    A source is known by its step: a bound method equals itself, a new lambda does not.
    """

    def __init__(self) -> None:
        self._steps: dict[Step, None] = {}  # the one served longest ago first
        self._handle: asyncio.Handle | None = None
        self.n_turns = 0
        self.n_errors = 0  # steps that raised, and were dropped

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"Turns({len(self._steps)} waiting, {self.n_turns} taken)"

    def add(self, step: Step) -> None:
        """There is work: the step gets its turns until it returns false. Idempotent while it waits."""
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
