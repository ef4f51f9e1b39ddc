"""A worker made only from the published tables, in this process: it counts what reaches it.

A gateway cannot tell it from any other aggregated engine, and a test sees every call with its request,
metadata and deadline. grpcio serves it on threads of its own.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc

from support.gateway.processes import LOOPBACK, MODEL
from support.openengine_tables import METHODS, PACKAGE, tables

SCHEMA_RELEASE = "768a93c7b44e40f28c692ad0b471a8f2"
MAX_CONTEXT_TOKENS = 1000

ROLE_AGGREGATED = 1
HEALTH_READY = 2
FINISHED_LENGTH = 2

TOKENS = [7, 8, 9]
"""What it answers, whatever the prompt."""


class Received(NamedTuple):
    """One Generate call as it arrived."""

    request: Any
    metadata: dict[str, str | bytes]
    remaining_s: float | None  # until its deadline


Answer = Callable[[Received, grpc.ServicerContext], Iterator[Any]]


class ForeignWorker:
    """`calls` holds the Generate calls so far; `answer` may be replaced by a test."""

    def __init__(self) -> None:
        self.calls: list[Received] = []
        self.address = ""
        self.answer: Answer = answer_tokens

    def generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        received = Received(request, dict(context.invocation_metadata()), context.time_remaining())
        self.calls.append(received)
        yield from self.answer(received, context)


def response(received: Received, **event: Any) -> Any:
    """One response of a call; `event` is its event as a dict."""
    return tables()["GenerateResponse"](request_id=received.request.request_id, **event)


def token_response(received: Received, *tokens: int) -> Any:
    """One token event."""
    infos = [{"token_id": token} for token in tokens]
    return response(received, token={"output_index": 0, "tokens": infos})


def answer_tokens(received: Received, _: grpc.ServicerContext) -> Iterator[Any]:
    """Every one of `TOKENS`, then the end."""
    for token in TOKENS:
        yield token_response(received, token)
    yield response(received, finished={"output_index": 0, "reason": FINISHED_LENGTH})


@contextmanager
def foreign_worker() -> Iterator[ForeignWorker]:
    """A running one, for the time of the block."""
    worker = ForeignWorker()
    server_info = tables()["ServerInfo"](
        engine_name="foreign",
        engine_role=ROLE_AGGREGATED,
        instance_id="foreign-1",
        supported_models=[MODEL],
        schema_revision=1,
        minimum_client_revision=1,
        schema_release=SCHEMA_RELEASE,
    )
    model_info = tables()["ModelInfo"](model_id=MODEL, max_context_length=MAX_CONTEXT_TOKENS)
    control = {
        "GetServerInfo": server_info,
        "GetModelInfo": model_info,
        "GetLoad": tables()["LoadInfo"](instance_id="foreign-1"),
        "Health": tables()["HealthResponse"](state=HEALTH_READY),
    }
    handlers: dict[str, dict[str, Any]] = {
        "Inference": {
            "Generate": grpc.unary_stream_rpc_method_handler(worker.generate, **_codec("Generate"))
        },
        "Control": {
            name: grpc.unary_unary_rpc_method_handler(
                lambda request, context, reply=reply: reply, **_codec(name)
            )
            for name, reply in control.items()
        },
    }
    with ThreadPoolExecutor() as threads:
        server = grpc.server(threads)
        for service, methods in handlers.items():
            handler = grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", methods)
            server.add_generic_rpc_handlers((handler,))
        worker.address = f"{LOOPBACK}:{server.add_insecure_port(f'{LOOPBACK}:0')}"
        server.start()
        try:
            yield worker
        finally:
            server.stop(None).wait()


def _codec(method: str) -> dict[str, Any]:
    request, reply = METHODS[method].request, METHODS[method].response
    return {
        "request_deserializer": tables()[request].FromString,
        "response_serializer": tables()[reply].SerializeToString,
    }
