"""Requests that are running, by who sent them: what a client's own Abort may reach."""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class LiveRequests:
    """Ids are the clients' and need not be unique; an entry belongs to the peer that sent it."""

    def __init__(self) -> None:
        self._scopes: dict[tuple[str, str], list[anyio.CancelScope]] = {}

    def __len__(self) -> int:
        return sum(len(scopes) for scopes in self._scopes.values())

    @contextmanager
    def listed(self, peer: str, request_id: str, scope: anyio.CancelScope) -> Iterator[None]:
        """List a request for the time of the block."""
        scopes = self._scopes.setdefault((peer, request_id), [])
        scopes.append(scope)
        try:
            yield
        finally:
            scopes.remove(scope)
            if not scopes:
                del self._scopes[peer, request_id]

    def abort(self, peer: str, request_id: str) -> bool:
        """Cancel a peer's request with this id, all of them if there are several; False: there is none."""
        scopes = self._scopes.get((peer, request_id), [])
        for scope in scopes:
            scope.cancel()
        return bool(scopes)
