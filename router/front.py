"""The client-facing side of Generate: the only module of the gateway that carries tokens to clients.

A first cut over `grpc.aio`; what replaces it hands the same `ClientCall` to the same request path.
"""

from typing import Any

import anyio
import grpc
import grpc.aio

from slagate.router.generate import ClientCall, Gateway, generate
from slagate.workers.channel import GENERATE
from slagate.workers.stream import BufferedSink


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
        out = BufferedSink()
        call = ClientCall(
            data=request,
            metadata=tuple(context.invocation_metadata() or ()),
            peer=context.peer(),
            timeout_s=context.time_remaining(),
            out=out,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_write, out, context)
            await generate(call, self._gateway)
            if out.discarded:
                # The writer hangs in a write that this client does not take.
                tasks.cancel_scope.cancel()
        assert out.status is not None
        code, message, trailers = out.status
        if code is grpc.StatusCode.OK:
            context.set_trailing_metadata(trailers)
        else:
            await context.abort(code, message, trailers)


async def _write(out: BufferedSink, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    while (data := await out.next()) is not None:
        await context.write(data)
