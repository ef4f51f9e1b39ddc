"""How a gRPC call ends, and the metadata that goes with it."""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import grpc


class Status(NamedTuple):
    """The status of an ended call, with its trailing metadata."""

    code: grpc.StatusCode
    message: str = ""
    trailers: tuple[tuple[str, str | bytes], ...] = ()


OK = Status(grpc.StatusCode.OK)
Metadata = Sequence[tuple[str, str | bytes]]
"""gRPC metadata: lower-case keys; values are bytes for keys that end in `-bin`."""


async def abort(
    context: Any,
    code: grpc.StatusCode,
    message: str,
    trailers: tuple[tuple[str, str | bytes], ...] = (),
) -> NoReturn:
    """End a call that grpc.aio serves. It never returns: `context.abort` raises."""
    await context.abort(code, message, trailers)
    raise AssertionError("context.abort raises")
