"""Requests that are running, by who sent them: what a client's own Abort, or a drain, may end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from slagate.router.errors import RequestError


class _Running:
    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.ended_by: RequestError | None = None

    def end(self, error: RequestError) -> None:
        if self.ended_by is None:
            self.ended_by = error
            self.scope.cancel()


class LiveRequests:
    """Ids are the clients' and need not be unique; an entry belongs to the peer that sent it."""

    def __init__(self, tell: Callable[[int], None] | None = None) -> None:
        """`tell` gets the number of them with each change."""
        self._running: dict[tuple[str, str], list[_Running]] = {}
        self._n_running = 0
        self._tell = tell
        self._gone = anyio.Event()

    def __len__(self) -> int:
        return self._n_running

    def _count(self, change: int) -> None:
        self._n_running += change
        if self._tell is not None:
            self._tell(self._n_running)

    @contextmanager
    def listed(self, peer: str, request_id: str) -> Iterator[None]:
        """List a request for the time of the block. Raises the error that it was ended by."""
        one = _Running()
        several = self._running.setdefault((peer, request_id), [])
        several.append(one)
        self._count(1)
        try:
            with one.scope:
                yield
        finally:
            several.remove(one)
            self._count(-1)
            if not several:
                del self._running[peer, request_id]
            self._gone.set()
        if one.scope.cancelled_caught:
            assert one.ended_by is not None
            raise one.ended_by

    def abort(self, peer: str, request_id: str, error: RequestError) -> bool:
        """End a peer's requests with this id by `error`; False: there is none."""
        several = self._running.get((peer, request_id), [])
        for one in several:
            one.end(error)
        return bool(several)

    def end_all(self, error: RequestError) -> None:
        """End every request by `error`."""
        for several in self._running.values():
            for one in several:
                one.end(error)

    async def none_left(self) -> None:
        """Wait until nothing runs."""
        while self._running:
            self._gone = anyio.Event()
            await self._gone.wait()
