"""The client commands: `generate`, `explain`, `pools`."""

import json
import sys
import uuid
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from slagate.proto import gateway_pb2 as gw
from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.proto import openengine_pb2 as oe
from slagate.router.generate import RECEIPT_TRAILER
from slagate.router.sla import ITL, PRIORITY, RECEIPT, TTFT
from slagate.workers.client import CHANNEL_OPTIONS, GrpcWorker, connect_worker
from slagate.workers.errors import UsageError, WorkerError
from slagate.workers.stream import BufferedSink
from slagate.workers.worker import Status

EXIT_FAILED = 1


class RequestOptions(NamedTuple):
    """What the flags of `generate` and `explain` say of a request."""

    prompt: list[int]
    model: str | None
    max_tokens: int | None
    ttft_ms: str | None
    itl_ms: str | None
    priority: str | None

    def metadata(self) -> list[tuple[str, str | bytes]]:
        """The SLA as gRPC metadata; values go out as typed, and the gateway judges them."""
        pairs = ((TTFT, self.ttft_ms), (ITL, self.itl_ms), (PRIORITY, self.priority))
        return [(key, value) for key, value in pairs if value is not None]

    def message(self, model: str) -> oe.GenerateRequest:
        """The request, with an id of its own."""
        request = oe.GenerateRequest(
            request_id=uuid.uuid4().hex, model=model, token_ids=oe.TokenIds(ids=self.prompt)
        )
        if self.max_tokens is not None:
            if not 0 <= self.max_tokens < 2**32:
                raise UsageError(
                    f"--max-tokens must be an unsigned 32-bit number (got {self.max_tokens})"
                )
            request.stopping.max_tokens = self.max_tokens
        return request


def read_prompt(tokens: str | None, isl: int | None) -> list[int]:
    """The prompt of `--tokens 1,2,3`, `--tokens @FILE` or `--isl N`.

    Raises `UsageError` naming the flag.

    >>> read_prompt("5, 6", None)
    [5, 6]
    """
    if (tokens is None) == (isl is None):
        raise UsageError("give either --tokens or --isl")
    if isl is not None:
        # Any fixed sequence does; a long period keeps two lengths from looking like repeats.
        return [(i * 48271 + 11) % 100_003 for i in range(isl)]
    assert tokens is not None
    if tokens.startswith("@"):
        try:
            tokens = Path(tokens[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "is not text"
            raise UsageError(f"--tokens {tokens}: {reason}") from error
    words = tokens.replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) <= 10 and int(word) < 2**32):
            raise UsageError(f"--tokens: {word[:40]!r} is not a token id")
    return [int(word) for word in words]


async def generate(
    target: str, options: RequestOptions, *, receipt: bool, timeout_s: float | None
) -> int:
    """Stream one request to stdout; the exit status."""
    async with connect_worker(target) as gateway:
        try:
            model = options.model or await _only_model(gateway)
        except WorkerError as error:
            return _failed(error.status)
        metadata = options.metadata()
        if receipt:
            metadata.append((RECEIPT, "1"))
        sink = BufferedSink()
        request = options.message(model).SerializeToString()
        call = gateway.generate(request, metadata, sink, timeout_s=timeout_s)
        try:
            status = await _print_tokens(sink)
        finally:
            call.cancel()
    trailer = dict(status.trailers).get(RECEIPT_TRAILER)
    if isinstance(trailer, bytes):
        _print_json(gw.Receipt.FromString(trailer))
    return 0 if status.code is grpc.StatusCode.OK else _failed(status)


async def _print_tokens(sink: BufferedSink) -> Status:
    """Write token ids as they come, separated by spaces, and a newline behind the last."""
    n_tokens = 0
    problem = ""
    while (data := await sink.next()) is not None:
        response = oe.GenerateResponse.FromString(data)
        for token in response.token.tokens:
            sys.stdout.write(f"{' ' if n_tokens else ''}{token.token_id}")
            n_tokens += 1
        sys.stdout.flush()
        if response.HasField("error"):
            problem = f"{oe.ErrorCode.Name(response.error.code)}: {response.error.message}"
    if n_tokens:
        sys.stdout.write("\n")
    assert sink.status is not None
    if problem:
        return Status(grpc.StatusCode.UNKNOWN, problem, sink.status.trailers)
    return sink.status


async def _only_model(gateway: GrpcWorker) -> str:
    models = list((await gateway.server_info()).supported_models)
    if len(models) != 1:
        known = ", ".join(models) or "none yet"
        raise UsageError(f"--model is needed: the gateway serves {known}")
    return models[0]


async def explain(target: str, options: RequestOptions, *, as_json: bool) -> int:
    """Print a decision; the exit status."""
    async with _admin(target) as channel:
        stub: Any = gw_grpc.GatewayStub(channel)
        try:
            model = options.model or await _admin_model(stub)
            request = gw.ExplainRequest(request=options.message(model))
            decision = await stub.Explain(request, metadata=options.metadata(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return _failed(Status(error.code(), error.details() or ""))
    if as_json:
        _print_json(decision)
    else:
        _print_decision(decision)
    return 0


async def _admin_model(stub: Any) -> str:
    workers = (await stub.ListWorkers(gw.ListWorkersRequest(), timeout=10)).workers
    models = sorted({model for worker in workers for model in worker.models})
    if len(models) != 1:
        raise UsageError(f"--model is needed: the gateway serves {', '.join(models) or 'none yet'}")
    return str(models[0])


async def pools(target: str, *, as_json: bool) -> int:
    """Print pools and workers; the exit status."""
    async with _admin(target) as channel:
        stub: Any = gw_grpc.GatewayStub(channel)
        try:
            pool_list = await stub.ListPools(gw.ListPoolsRequest(), timeout=10)
            worker_list = await stub.ListWorkers(gw.ListWorkersRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return _failed(Status(error.code(), error.details() or ""))
    if as_json:
        _write_json(_to_dict(pool_list) | _to_dict(worker_list))
    else:
        _print_pools(pool_list, worker_list)
    return 0


def _admin(target: str) -> AbstractAsyncContextManager[grpc.aio.Channel]:
    return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)


def _failed(status: Status) -> int:
    sys.stderr.write(f"slagate: {status.code.name}: {status.message}\n")
    return EXIT_FAILED


def _to_dict(message: Message) -> dict[str, Any]:
    # Zeros are figures here: a worker with nothing in flight says so.
    value = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _numbers(value, message.DESCRIPTOR)
    return value


def _numbers(value: dict[str, Any], descriptor: Any) -> None:
    """Turn 64-bit numbers, which protobuf's JSON writes as strings, back into numbers; in place."""
    for name, item in value.items():
        field = descriptor.fields_by_name.get(name)
        if field is None:
            continue
        if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            value[name] = int(item)
        elif field.message_type is not None and "Struct" not in field.message_type.name:
            for child in item if isinstance(item, list) else [item]:
                _numbers(child, field.message_type)


def _write_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def _print_json(message: Message) -> None:
    _write_json(_to_dict(message))


def _stage(stage: int) -> str:
    return gw.Stage.Name(stage).removeprefix("STAGE_").lower()  # type: ignore[arg-type]


def _print_decision(decision: gw.Decision) -> None:
    console = Console()
    for choice in decision.stages:
        cell = "".join(f"[{index}]" for index in choice.cell)
        title = f"{_stage(choice.stage)}: cell {cell}, pool {choice.pool}"
        several = len({candidate.pool for candidate in choice.candidates}) > 1
        table = Table(title=title, title_justify="left")
        table.add_column("worker", no_wrap=True)
        if several:
            table.add_column("pool", no_wrap=True)
        for name in ("in flight", "queued tokens", "TTFT ms", "ITL ms", "load s"):
            table.add_column(name, justify="right")
        table.add_column("")
        for candidate in choice.candidates:
            won = candidate.worker == choice.worker
            table.add_row(
                candidate.worker,
                *([candidate.pool] if several else []),
                str(candidate.inflight),
                f"{candidate.queued_tokens:,}",
                _figure(candidate, "predicted_ttft_ms"),
                _figure(candidate, "predicted_itl_ms"),
                f"{candidate.score_s:.4f}",
                "chosen" if won else candidate.excluded,
                style="bold" if won else None,
            )
        console.print(table)
    console.print(decision.text, soft_wrap=True, highlight=False, markup=False)


def _figure(candidate: gw.Candidate, field: str) -> str:
    return f"{getattr(candidate, field):.1f}" if candidate.HasField(field) else "-"  # type: ignore[arg-type]


def _print_pools(pools: gw.ListPoolsResponse, workers: gw.ListWorkersResponse) -> None:
    console = Console()
    title = f"Pools (a stage may try {pools.max_attempts} workers)"
    table = Table(title=title, title_justify="left")
    for name in ("pool", "stage", "then tries", "estimator"):
        table.add_column(name, no_wrap=name in ("pool", "stage"))
    for name in ("ready", "in flight", "queued tokens", "requests", "retries"):
        table.add_column(name, justify="right")
    for pool in pools.pools:
        table.add_row(
            pool.name,
            _stage(pool.stage),
            ", ".join(pool.pool_order[1:]) or "-",
            pool.estimator,
            f"{pool.workers_ready}/{pool.workers}",
            str(pool.inflight),
            f"{pool.queued_tokens:,}",
            f"{pool.requests_total:,}",
            f"{pool.retries_total:,}",
        )
    console.print(table)
    table = Table(title="Workers", title_justify="left")
    for name in ("worker", "pool", "state", "engine"):
        table.add_column(name, no_wrap=name in ("worker", "pool"))
    for name in ("in flight", "engine running", "engine queued", "KV blocks"):
        table.add_column(name, justify="right")
    for worker in workers.workers:
        load = worker.load
        blocks = f"{load.used_kv_blocks:,}/{load.total_kv_blocks:,}"
        table.add_row(
            worker.worker,
            worker.pool,
            f"{worker.state} ({worker.reason})" if worker.reason else worker.state,
            worker.engine,
            str(worker.inflight),
            str(load.running_requests) if load.HasField("running_requests") else "-",
            str(load.queued_requests) if load.HasField("queued_requests") else "-",
            blocks if load.HasField("total_kv_blocks") else "-",
        )
    console.print(table)
    for warning in pools.warnings:
        console.print(f"warning: {warning}", soft_wrap=True, markup=False)
