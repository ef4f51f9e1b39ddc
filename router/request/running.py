"""The running requests, by the client that sent them: an Abort, a time limit or a drain may cancel them.

The request path uses the event loop's own tasks and futures: cancel scopes and task groups around each
request cost more than relaying its messages (docs/decisions/0015-the-data-plane.md).
"""

import asyncio
from collections.abc import Callable

from slagate.router.request.errors import GatewayError
from slagate.workers.runtime.waiting import UntilEmpty


class CancelHandle:
    """Cancels one request's task, at most once, and never after its answer was sent."""

    __slots__ = ("_has_ended", "_task", "ended_by", "is_answered")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._has_ended = False
        self.ended_by: GatewayError | None = None  # None also where the client has left
        self.is_answered = False  # there is nothing left to cancel

    def start(self) -> None:
        """Make the current task the one to cancel. Raises `CancelledError` if it is cancelled already."""
        self._task = asyncio.current_task()
        if self._has_ended:
            raise asyncio.CancelledError

    def cancel(self, error: GatewayError | None = None) -> None:
        """Cancel the request, with `error` for its client, or because its client has left."""
        if not self._has_ended and not self.is_answered:
            self._has_ended = True
            self.ended_by = error
            if self._task is not None:
                self._task.cancel()

    def answered(self) -> None:
        """Ignore cancels from now on, as the client has its whole answer."""
        self.is_answered = True

    def finish(self) -> None:
        """Ignore cancels from now on, and forget the task, as it is about to return."""
        self.is_answered = True
        self._task = None

    def absorb(self) -> GatewayError | None:
        """The error of `cancel`, or None; with one the task is not cancelled any more, and can go on."""
        if self.ended_by is not None and self._task is not None and hasattr(self._task, "uncancel"):
            self._task.uncancel()  # from Python 3.11 on
        return self.ended_by


class RunningRequests:
    """Running requests by client and id. Clients choose the ids, so several may have the same."""

    def __init__(self, tell: Callable[[int], None] | None = None) -> None:
        """`tell` gets the number of running requests with each change."""
        self._running: dict[tuple[str, str], list[CancelHandle]] = {}
        self._n_running = 0
        self._tell = tell
        self._all_ended = UntilEmpty(self._running)

    def __len__(self) -> int:
        return self._n_running

    def _count(self, change: int) -> None:
        self._n_running += change
        if self._tell is not None:
            self._tell(self._n_running)

    def register(self, peer: str, request_id: str, one: CancelHandle) -> None:
        """Add a request, so that it can be cancelled and counts as running, until `unregister`."""
        self._running.setdefault((peer, request_id), []).append(one)
        self._count(1)

    def unregister(self, peer: str, request_id: str, one: CancelHandle) -> None:
        """Remove a request that has ended."""
        several = self._running[peer, request_id]
        several.remove(one)
        if not several:
            del self._running[peer, request_id]
        self._count(-1)
        if not self._n_running:
            self._all_ended.set()

    def abort(self, peer: str, request_id: str, error: GatewayError) -> bool:
        """Cancel a client's requests with this id, with `error` for the client. False: there is none."""
        several = self._running.get((peer, request_id), [])
        for one in several:
            one.cancel(error)
        return bool(several)

    def end_all(self, error: GatewayError) -> None:
        """Cancel every request, with `error` for its client."""
        for several in self._running.values():
            for one in several:
                one.cancel(error)

    async def none_left(self) -> None:
        """Wait until no request is running."""
        await self._all_ended.wait()
