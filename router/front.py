"""The client-facing side of Generate: the only module of the gateway that carries tokens to clients.

A first cut over `grpc.aio`; what replaces it hands the same `ClientCall` to the same request path.
"""

import contextlib
import math
from typing import Any

import anyio
import grpc
import grpc.aio

from slagate.router.generate import generate
from slagate.router.turn import ClientCall, Gateway
from slagate.workers.channel import GENERATE
from slagate.workers.stream import BufferedSink
from slagate.workers.worker import Status

FLUSH_S = 2.0
"""For a client to take the last of its answer, when the request itself took all its time."""

LATE = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "the client did not take its answer in time")


class Front(grpc.GenericRpcHandler):
    """Serves Generate on raw bytes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
            self._generate
        )

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Claim Generate, leave every other method to the other handlers."""
        return self._handler if handler_call_details.method == GENERATE else None

    async def _generate(
        self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        timeout_s = context.time_remaining()
        limit_s = self._gateway.settings.default_timeout_s if timeout_s is None else timeout_s
        ends_at_s = anyio.current_time() + limit_s
        out = BufferedSink()
        call = ClientCall(
            data=request,
            metadata=tuple(context.invocation_metadata() or ()),
            peer=context.peer(),
            timeout_s=timeout_s,
            out=out,
        )
        gone = False
        async with anyio.create_task_group() as tasks:

            async def write() -> None:
                nonlocal gone
                try:
                    while (data := await out.next()) is not None:
                        await context.write(data)
                except grpc.aio.InternalError:
                    # The client has left; the news of it may still be on its way to this task.
                    gone = True
                    tasks.cancel_scope.cancel()

            tasks.start_soon(write)
            await generate(call, self._gateway)
            # What the client does not take by the end of its time it never gets; nor does one that lets
            # its buffer run full, whose writer hangs in a write.
            flushed_s = max(ends_at_s, anyio.current_time() + FLUSH_S)
            tasks.cancel_scope.deadline = -math.inf if out.discarded else flushed_s
        if gone:
            return
        assert out.status is not None
        code, message, trailers = out.status
        if tasks.cancel_scope.cancelled_caught and code is grpc.StatusCode.OK:
            out.discard()
            code, message, trailers = LATE
        if code is grpc.StatusCode.OK:
            context.set_trailing_metadata(trailers)
            return
        # An RPC that ended meanwhile takes no status any more, and nobody waits for one.
        with contextlib.suppress(grpc.aio.InternalError):
            await context.abort(code, message, trailers)
