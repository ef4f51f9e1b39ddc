"""Pulls that wait for room in the pool, in order of arrival."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from slagate.workers.kv_transfer.nixl.descriptor import NixlDescriptor
from slagate.workers.kv_transfer.transport import Done, KvTimeout, KvTransferError

LOOK_S = 0.02
"""How soon the first one is tried again when nobody says that there is room: a new agent does not."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    wanted: NixlDescriptor
    done: Done
    due_s: float


class PullQueue:
    """Each pull is begun once, when those before it are and there is room for it, or ends with an error.

    `begin` says whether a pull has begun, and raises `KvTransferError` when it never can; `full` is what a
    pull ends with whose time is over. All must have the same time limit.
    """

    def __init__(
        self,
        begin: Callable[[NixlDescriptor, Done, float], bool],
        full: Callable[[NixlDescriptor], KvTimeout],
    ) -> None:
        self._begin = begin
        self._full = full
        self._waiting: deque[_Waiting] = deque()
        self._timer: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, tag: bytes) -> bool:
        return any(each.wanted.tag == tag for each in self._waiting)

    def add(self, wanted: NixlDescriptor, done: Done, *, due_s: float) -> None:
        """Begin a pull when it is its turn; maybe now."""
        self._waiting.append(_Waiting(wanted, done, due_s))
        self._serve()

    def nudge(self) -> None:
        """Look in the next turn of the loop: there may be room."""
        if self._waiting:
            self._set_timer(asyncio.get_running_loop().call_soon(self._serve))

    def close(self) -> None:
        """End every pull."""
        self._set_timer(None)
        while self._waiting:
            self._waiting.popleft().done(KvTransferError("transport is closed"))

    def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            # Taken out first: whoever hears of an end may pull again at once, and be served within this.
            first = self._waiting.popleft()
            try:
                if first.due_s <= loop.time():
                    raise self._full(first.wanted)
                if not self._begin(first.wanted, first.done, first.due_s):
                    self._waiting.appendleft(first)
                    break
            except KvTransferError as error:
                first.done(error)
        due_s = self._waiting[0].due_s if self._waiting else None
        self._set_timer(
            None if due_s is None else loop.call_at(min(loop.time() + LOOK_S, due_s), self._serve)
        )

    def _set_timer(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer
