"""The commands that ask a running gateway: `generate`, `explain`, `pools`, `reload` and `admission`."""

import json
import sys
import uuid
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from slagate.pools.fleet_file.models import ADMISSION_MODES
from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import BufferedSink
from slagate.proto.rpc.status import Status
from slagate.router.cli.client_tables import in_force, print_decision, print_pools
from slagate.router.cli.command import (
    EXIT_USAGE,
    Admin,
    check_choice,
    ending_on_usage_error,
    fail,
    finite,
    run_to_exit,
    seconds,
    server,
)
from slagate.router.cli.tls import Insecure, TlsCa, TlsKey, TlsName, TlsOwnCert, dial_tls
from slagate.router.client import admin_at, engine_at, only_model, only_one_of
from slagate.router.request.metadata import ITL, OBJECTIVE, PRIORITY, RECEIPT, RECEIPT_TRAILER, TTFT
from slagate.workers.errors import WorkerError
from slagate.workers.runtime.usage import UsageError
from slagate.workers.tls.files import TlsFiles

Target = Annotated[str, server("The gateway to call (slagate serve --listen), or a worker.")]
Tokens = Annotated[
    str | None, typer.Option(metavar="1,2,3|@FILE", help="Prompt token ids, or a file of them.")
]
Isl = Annotated[
    int | None,
    typer.Option(min=1, max=10_000_000, help="Or: a made-up prompt of this many tokens."),
]
Model = Annotated[str | None, typer.Option(help="Model name; may be left out where one is served.")]
MaxTokens = Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Output budget.")]
TtftMs = Annotated[float | None, typer.Option(min=0, callback=finite, help="TTFT target, ms.")]
ItlMs = Annotated[float | None, typer.Option(min=0, callback=finite, help="ITL target, ms.")]
Priority = Annotated[
    int | None, typer.Option(min=-(2**31), max=2**31 - 1, help="int32, higher is more important.")
]
Class = Annotated[
    str | None, typer.Option(metavar="NAME", help="Its class, as in objectives of the fleet file.")
]
RELOAD_TIMEOUT_S = 60.0
"""The gateway reads and checks the whole file first, which takes seconds for a large one, and other reloads
may be ahead."""

AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


class RequestOptions(NamedTuple):
    """A request as the options of `generate` and `explain` describe it."""

    prompt: list[int]
    model: str | None
    max_tokens: int | None
    ttft_ms: float | None
    itl_ms: float | None
    priority: int | None
    objective: str | None

    def metadata(self) -> list[tuple[str, str | bytes]]:
        """The targets, the priority and the class as gRPC metadata."""
        pairs = (
            (TTFT, self.ttft_ms),
            (ITL, self.itl_ms),
            (PRIORITY, self.priority),
            (OBJECTIVE, self.objective),
        )
        return [(key, str(value)) for key, value in pairs if value is not None]

    def message(self, model: str) -> oe.GenerateRequest:
        """The request as a message, with a new id."""
        request = oe.GenerateRequest(
            request_id=uuid.uuid4().hex, model=model, token_ids=oe.TokenIds(ids=self.prompt)
        )
        if self.max_tokens is not None:
            request.stopping.max_tokens = self.max_tokens
        return request


def read_prompt(tokens: str | None, isl: int | None) -> list[int]:
    """The prompt of `--tokens 1,2,3`, `--tokens @FILE` or `--isl N`. Raises `UsageError` naming the option.

    >>> read_prompt("5, 6", None)
    [5, 6]
    """
    if (tokens is None) == (isl is None):
        raise UsageError("give either --tokens or --isl")
    if isl is not None:
        # Any fixed sequence does; its period is so long that no part repeats.
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


def generate(
    *,
    target: Target,
    tokens: Tokens = None,
    isl: Isl = None,
    model: Model = None,
    max_tokens: MaxTokens = None,
    ttft_ms: TtftMs = None,
    itl_ms: ItlMs = None,
    priority: Priority = None,
    objective: Class = None,
    receipt: Annotated[
        bool, typer.Option("--receipt", help="Print the receipt at the end.")
    ] = False,
    timeout: Annotated[float | None, seconds("Deadline, seconds.", least=0.001)] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsOwnCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    insecure: Insecure = False,
) -> None:
    """Send one request and print its token ids as they come, then the receipt as JSON."""
    tls = dial_tls(tls_ca, tls_cert, tls_key, tls_name, insecure=insecure)
    with ending_on_usage_error():
        prompt = read_prompt(tokens, isl)
    options = RequestOptions(prompt, model, max_tokens, ttft_ms, itl_ms, priority, objective)
    run_to_exit(lambda: _generate(target, options, tls=tls, receipt=receipt, timeout_s=timeout))


def explain(
    *,
    target: Admin,
    tokens: Tokens = None,
    isl: Isl = None,
    model: Model = None,
    max_tokens: MaxTokens = None,
    ttft_ms: TtftMs = None,
    itl_ms: ItlMs = None,
    priority: Priority = None,
    objective: Class = None,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsOwnCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    insecure: Insecure = False,
) -> None:
    """Show the decision for a request; nothing is sent to a worker."""
    tls = dial_tls(tls_ca, tls_cert, tls_key, tls_name, insecure=insecure)
    with ending_on_usage_error():
        prompt = read_prompt(tokens, isl)
    options = RequestOptions(prompt, model, max_tokens, ttft_ms, itl_ms, priority, objective)
    run_to_exit(lambda: _explain(target, options, tls=tls, as_json=as_json))


def pools(
    *,
    target: Admin,
    as_json: AsJson = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsOwnCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    insecure: Insecure = False,
) -> None:
    """Show the pools and workers of a running gateway."""
    tls = dial_tls(tls_ca, tls_cert, tls_key, tls_name, insecure=insecure)
    run_to_exit(lambda: _pools(target, tls=tls, as_json=as_json))


def reload(
    *,
    target: Admin,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A fleet file of this machine; default: the gateway reads its own again."
        ),
    ] = None,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Go back to what was in force before.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would change.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsOwnCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    insecure: Insecure = False,
) -> None:
    """Have a running gateway take over a changed fleet file, and show what changed.

    A file with problems changes nothing: all of them are listed, and the exit status is 2.
    """
    tls = dial_tls(tls_ca, tls_cert, tls_key, tls_name, insecure=insecure)
    if rollback and config is not None:
        fail("--rollback goes back to what was in force before, so give no --config with it")
    request = gw.ReloadRequest(rollback=rollback, dry_run=dry_run)
    if config is not None:
        try:
            request.fleet = config.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            fail(f"{config}: {getattr(error, 'strerror', None) or 'is not UTF-8'}")
    run_to_exit(lambda: _reload(target, request, tls=tls, as_json=as_json))


def admission(
    mode: Annotated[
        str | None,
        typer.Argument(
            metavar="[off|shadow|on]",
            help="What to put in force, until the next reload. Default: only show what is in force.",
        ),
    ] = None,
    *,
    target: Admin,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsOwnCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    insecure: Insecure = False,
) -> None:
    """Show or switch whether a gateway refuses requests that it predicts to miss their targets.

    off: never. shadow: it only counts them. on: by the policy of their class.
    """
    tls = dial_tls(tls_ca, tls_cert, tls_key, tls_name, insecure=insecure)
    if mode is None:
        run_to_exit(lambda: _show_admission(target, tls=tls, as_json=as_json))
    check_choice("MODE", mode, ADMISSION_MODES)
    request = gw.SetAdmissionRequest(mode=mode)
    run_to_exit(lambda: _set_admission(target, request, tls=tls, as_json=as_json))


async def _generate(
    target: str,
    options: RequestOptions,
    *,
    tls: TlsFiles | None,
    receipt: bool,
    timeout_s: float | None,
) -> int:
    """Stream one request to stdout; the exit status."""
    async with engine_at(target, tls) as gateway:
        model = options.model or await only_model(gateway)
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
        if status.code is not grpc.StatusCode.OK:
            raise WorkerError(status)
    return 0


async def _print_tokens(sink: BufferedSink) -> Status:
    """Write token ids as they come, with spaces between and a newline at the end; returns the status."""
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


async def _explain(
    target: str, options: RequestOptions, *, tls: TlsFiles | None, as_json: bool
) -> int:
    """Print a decision; the exit status."""
    async with admin_at(target, tls) as gateway:
        model = options.model or await _admin_model(gateway)
        request = gw.ExplainRequest(request=options.message(model))
        decision = await gateway.Explain(request, metadata=options.metadata(), timeout=10)
    if as_json:
        _print_json(decision)
    else:
        print_decision(decision)
    return 0


async def _admin_model(stub: Any) -> str:
    workers = (await stub.ListWorkers(gw.ListWorkersRequest(), timeout=10)).workers
    return only_one_of(sorted({model for worker in workers for model in worker.models}))


async def _pools(target: str, *, tls: TlsFiles | None, as_json: bool) -> int:
    """Print pools and workers; the exit status."""
    async with admin_at(target, tls) as gateway:
        pool_list = await gateway.ListPools(gw.ListPoolsRequest(), timeout=10)
        worker_list = await gateway.ListWorkers(gw.ListWorkersRequest(), timeout=10)
    if as_json:
        _write_json(to_dict(pool_list) | to_dict(worker_list))
    else:
        print_pools(pool_list, worker_list)
    return 0


async def _reload(
    target: str, request: gw.ReloadRequest, *, tls: TlsFiles | None, as_json: bool
) -> int:
    async with admin_at(target, tls) as gateway:
        answer = await gateway.Reload(request, timeout=RELOAD_TIMEOUT_S)
    if as_json:
        print(json.dumps(to_dict(answer), indent=2))
    else:
        _show_reload(answer, dry_run=request.dry_run)
    return EXIT_USAGE if answer.problems else 0


async def _show_admission(target: str, *, tls: TlsFiles | None, as_json: bool) -> int:
    """Print the admission mode in force; the exit status."""
    async with admin_at(target, tls) as gateway:
        found = await gateway.ListPools(gw.ListPoolsRequest(), timeout=10)
    if as_json:
        _write_json({"mode": found.admission, "file_mode": found.file_admission})
    else:
        print(in_force(found.admission, found.file_admission))
    return 0


async def _set_admission(
    target: str, request: gw.SetAdmissionRequest, *, tls: TlsFiles | None, as_json: bool
) -> int:
    """Put an admission mode in force, and print the one before; the exit status."""
    async with admin_at(target, tls) as gateway:
        answer = await gateway.SetAdmission(request, timeout=RELOAD_TIMEOUT_S)
    if as_json:
        _print_json(answer)
    elif answer.mode == answer.previous_mode:
        print(f"{answer.mode} is in force already")
    else:
        print(f"went from {answer.previous_mode} to {answer.mode}")
    return 0


def _show_reload(answer: gw.ReloadResponse, *, dry_run: bool) -> None:
    for warning in answer.warnings:
        sys.stderr.write(f"slagate: warning: {warning}\n")
    if answer.problems:
        n_problems = len(answer.problems)
        count = "1 problem" if n_problems == 1 else f"{n_problems} problems"
        sys.stderr.write(f"slagate: refused, {count}; {answer.version} stays in force\n")
        for problem in answer.problems:
            sys.stderr.write(f"  {problem.path}: {problem.reason}\n")
        return
    if answer.proposed_version == answer.previous_version:
        nothing = "" if answer.changes else ", nothing changes"
        print(f"{answer.version} is in force already{nothing}")
        for line in answer.changes:
            print(f"  {line}")
        return
    would = "would go" if dry_run else "went"
    print(f"{would} from {answer.previous_version} to {answer.proposed_version}")
    for line in answer.changes or ["nothing but the order of things, or how they are written"]:
        print(f"  {line}")


def to_dict(message: Message) -> dict[str, Any]:
    """A message as a dict for JSON: names of the proto file, zeros too, 64-bit numbers as numbers."""
    # Zeros are figures here, such as of a worker with nothing in flight.
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
    _write_json(to_dict(message))
