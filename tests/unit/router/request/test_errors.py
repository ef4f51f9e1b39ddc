from collections.abc import Iterator

import grpc
import pytest

from slagate.pools.grid.grid import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import Status
from slagate.router.request import errors
from slagate.router.request.errors import (
    RETRY_PUSHBACK,
    Draining,
    ErrorRelayed,
    GatewayError,
    InvalidRequest,
    LegFailed,
    NoWorker,
    Outcome,
    Overloaded,
)
from slagate.workers.errors import (
    MAX_MESSAGE_BYTES,
    STATUS_OF_ENGINE_ERROR,
    RequestRefused,
    WorkerError,
    scrub,
    status_of_engine_error,
)

Code = grpc.StatusCode


def subclasses(of: type[GatewayError]) -> Iterator[type[GatewayError]]:
    for each in of.__subclasses__():
        yield each
        yield from subclasses(each)


KINDS = list(subclasses(GatewayError))


def example(kind: type[GatewayError]) -> GatewayError:
    if issubclass(kind, InvalidRequest):
        return kind("field", "is wrong")
    if issubclass(kind, LegFailed):
        return kind(Stage.DECODE, Status(Code.UNAVAILABLE, "gone"), retryable=False)
    return kind("says why")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_has_its_own_answer_and_a_refusal_is_never_internal(
    kind: type[GatewayError],
) -> None:
    error = example(kind)
    assert error.code is not Code.INTERNAL
    assert error.code is not Code.UNKNOWN
    assert isinstance(error.outcome, Outcome)
    assert error.outcome not in (Outcome.INTERNAL, Outcome.COMPLETED)
    status = error.status()
    assert status.code is error.code
    assert bool(status.message) == (kind is not ErrorRelayed)


def test_every_outcome_can_happen_and_only_a_bug_is_internal() -> None:
    reachable = {example(kind).outcome for kind in KINDS}
    by_hand = {Outcome.COMPLETED, Outcome.INTERNAL}
    assert reachable | by_hand == set(Outcome)
    assert errors.INTERNAL.code is Code.INTERNAL
    assert errors.CANCELLED.code is Code.CANCELLED


@pytest.mark.parametrize("kind", [Overloaded, NoWorker, Draining])
def test_what_may_pass_says_when_to_try_again(kind: type[GatewayError]) -> None:
    assert dict(kind("x").status().trailers) == {RETRY_PUSHBACK: "1000"}


def test_what_will_not_pass_gives_no_hint() -> None:
    for kind in set(KINDS) - {Overloaded, NoWorker, Draining, LegFailed}:
        assert example(kind).status().trailers == ()


@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.name)
def test_health_02_a_failed_leg_keeps_its_code(code: grpc.StatusCode) -> None:
    error = LegFailed(Stage.PREFILL, Status(code, ""), retryable=False)
    assert error.status().code is code
    assert str(error) == f"prefill: {code.name}"


WORDS_OF_A_WORKER = {
    Code.INVALID_ARGUMENT: Outcome.INVALID,
    Code.OUT_OF_RANGE: Outcome.INVALID,
    Code.NOT_FOUND: Outcome.INVALID,
    Code.UNIMPLEMENTED: Outcome.INVALID,
    Code.RESOURCE_EXHAUSTED: Outcome.OVERLOADED,
    Code.DEADLINE_EXCEEDED: Outcome.DEADLINE,
}


@pytest.mark.parametrize("code", [c for c in Code if c is not Code.OK], ids=lambda code: code.name)
def test_a_failed_leg_is_counted_as_what_the_workers_code_says(code: grpc.StatusCode) -> None:
    error = LegFailed(Stage.AGG, Status(code, "why"), retryable=False)
    assert error.outcome is WORDS_OF_A_WORKER.get(code, Outcome.WORKER_FAILED)
    may_pass = code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)
    assert dict(error.status().trailers) == ({RETRY_PUSHBACK: "1000"} if may_pass else {})


def test_a_gateway_that_shuts_down_is_unavailable() -> None:
    error = Draining("the gateway is shutting down")
    assert (error.code, error.outcome) == (Code.UNAVAILABLE, Outcome.UNAVAILABLE)


def test_an_invalid_request_names_its_field() -> None:
    error = InvalidRequest("stopping.max_tokens", "must be at least 1")
    assert error.field == "stopping.max_tokens"
    assert str(error) == "stopping.max_tokens: must be at least 1"


@pytest.mark.parametrize("code", oe.ErrorCode.values(), ids=oe.ErrorCode.keys())
def test_the_table_of_engine_errors_is_complete(code: oe.ErrorCode.ValueType) -> None:
    status = status_of_engine_error(oe.EngineError(code=code, message="why"))
    assert status == Status(STATUS_OF_ENGINE_ERROR[code], "why")
    assert status.code is not Code.OK


def test_an_engine_error_of_a_later_protocol_is_internal() -> None:
    error = oe.EngineError.FromString(b"\x08\xe7\x07")
    assert status_of_engine_error(error).code is Code.INTERNAL


def test_worker_errors_carry_their_status() -> None:
    error = RequestRefused(Code.NOT_FOUND, "model: no")
    assert isinstance(error, WorkerError)
    assert error.status == Status(Code.NOT_FOUND, "model: no")
    assert str(error) == "NOT_FOUND: model: no"


@pytest.mark.parametrize(
    ("message", "leaks"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.1.2.3:50051: Failed to"
            " connect to remote host: connect: Connection refused (111)",
            ["10.1.2.3", "50051"],
        ),
        ("recvmsg:Connection reset by peer ipv6:%5B2001:db8::7%5D:443", ["2001", "db8", "443"]),
        ("peer [2001:db8::7]:50051 closed", ["2001", "50051"]),
        ("unix:/tmp/slagate-1/worker.sock: No such file", ["/tmp", "worker.sock"]),
        ("DNS resolution failed for dns:///worker-3.prod.internal:50051", ["worker-3", "50051"]),
        ("cannot read /opt/models/llama/config.json", ["/opt", "config.json"]),
        ('File "/usr/lib/python3.12/asyncio/base.py", line 7', ["/usr", "base.py"]),
        ("bad <class 'tensorrt_llm.executor.RequestError'>", ["class", "tensorrt_llm"]),
        (
            'engine died\nTraceback (most recent call last):\n  File "x.py", line 1\nKeyError: 1',
            ["Traceback", "x.py", "KeyError"],
        ),
        (
            "<AioRpcError of RPC that terminated with:\n\tstatus = StatusCode.UNAVAILABLE\n\tdetails ="
            ' "no"\n\tdebug_error_string = "UNKNOWN:Error received from peer ipv4:1.2.3.4:5">',
            ["AioRpcError", "debug_error_string", "1.2.3.4"],
        ),
        (
            "tensorrt_llm.executor.utils.RequestError: out of blocks",
            ["tensorrt_llm", "RequestError"],
        ),
    ],
)
def test_stream_06_a_message_for_clients_has_no_addresses_paths_or_python(
    message: str, leaks: list[str]
) -> None:
    clean = scrub(message)
    assert not [leak for leak in leaks if leak in clean], clean
    assert clean


@pytest.mark.parametrize(
    "message",
    [
        "stopping.conditions[3]: stop_text needs a tokenizer on the worker",
        "token_ids: 9000 tokens do not fit the context window of 8192",
        "sampling.top_p: must be in (0, 1] (got 1.5)",
        "cache full: 12/64 blocks",
        "model: 'meta-llama/Llama-3.1-8B' is not served here",
        "and/or 10 tokens/s",
        "",
    ],
)
def test_stream_06_what_a_client_should_read_is_left_alone(message: str) -> None:
    assert scrub(message) == message


@pytest.mark.parametrize(
    "piece", ["a.", "/a", "a.B ", "1.", "[:", "<Rpc ", "a.a.A.", "ipv4:", "\n"]
)
def test_stream_06_a_hostile_message_of_a_megabyte_is_cut_before_it_is_looked_at(
    piece: str,
) -> None:
    clean = scrub(piece * (1_000_000 // len(piece)))
    # What is cut out leaves a word that is at most three times as long as the shortest find.
    assert len(clean) <= 3 * MAX_MESSAGE_BYTES
    assert clean == scrub((piece * MAX_MESSAGE_BYTES)[:MAX_MESSAGE_BYTES])


def test_stream_06_what_is_cut_off_is_the_end() -> None:
    assert scrub("x" * 5000) == "x" * MAX_MESSAGE_BYTES
    assert scrub("y" * MAX_MESSAGE_BYTES) == "y" * MAX_MESSAGE_BYTES
