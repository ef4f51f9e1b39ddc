"""A server's context without a server."""

from typing import Any

import grpc


class Aborted(Exception):
    """What a real context raises too."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, details)
        self.code, self.details = code, details


class Context:
    """A server's context, as far as the services look."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    async def abort(self, code: grpc.StatusCode, details: str, _trailers: Any = ()) -> None:
        raise Aborted(code, details)
