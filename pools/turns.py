"""Work that can wait, a bounded step in each turn of the event loop, so that nothing else waits for it."""

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

Step = Callable[[], bool]
"""Does a little of its work, well under a millisecond; true while there is more."""


class Turns:
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
