"""When the connections of an event loop write: behind whoever the same read has woken."""

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

Write = Callable[[], None]


class Turn:
    """The writes of one event loop.

    What a read brings for others wakes tasks that have last words for them, statuses and trailers say.
    They run in the loop's next turn, and the writes that the read has led to run in that turn behind them:
    one write then carries it all.
    """

    def __init__(self) -> None:
        self._n_reading = 0
        self._held: list[Write] = []  # while something is being read

    def soon(self, loop: asyncio.AbstractEventLoop, write: Write) -> None:
        """Have it called in the next turn of this loop, which is always the same one."""
        if self._n_reading:
            self._held.append(write)
        else:
            loop.call_soon(write)

    def begin(self) -> None:
        """Something is being read, until `end`."""
        self._n_reading += 1

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """It was read, and everybody knows."""
        self._n_reading -= 1
        if self._held and not self._n_reading:
            held, self._held = self._held, []
            for write in held:
                loop.call_soon(write)


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turn] = WeakKeyDictionary()


def turn_of(loop: asyncio.AbstractEventLoop) -> Turn:
    """The one that all connections of a loop share."""
    turn = _turns.get(loop)
    if turn is None:
        turn = _turns[loop] = Turn()
    return turn
