"""Requests that are wrong: the right code, the field's name, and no worker is called.

The worker counts what reaches it, so that "no worker" is seen and not believed.
"""

from collections.abc import Callable, Iterator, Mapping
from math import nan
from typing import Any, NamedTuple

import grpc
import pytest

from support.gateway.foreign_client import Client, read, request
from support.gateway.processes import Gateway, eventually, fleet_config, gateway, run_here
from support.limits import HANG_S
from support.worker.foreign import MAX_CONTEXT_TOKENS, TOKENS, ForeignWorker, foreign_worker

INVALID = grpc.StatusCode.INVALID_ARGUMENT
TOO_LARGE = grpc.StatusCode.RESOURCE_EXHAUSTED
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED

PROMPT = [1, 2, 3]
TTFT, ITL, PRIORITY = "x-slo-ttft-ms", "x-slo-tpot-ms", "openengine-priority"


class Served(NamedTuple):
    gateway: Gateway
    worker: ForeignWorker
    client: Client


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with foreign_worker() as worker:
        config = fleet_config({"a": ("agg", [worker.address])})
        with (
            gateway(tmp_path_factory.mktemp("bad-input"), config) as running,
            Client(running.address) as client,
        ):
            eventually(running.is_ready, "the gateway is ready")
            yield Served(running, worker, client)


def good(**fields: Any) -> Any:
    return request(PROMPT, **fields)


def with_stopping(**fields: int) -> Any:
    return request(PROMPT, None, stopping=fields)


BAD_REQUESTS: Mapping[str, tuple[Any, grpc.StatusCode, str]] = {
    "no input": (request([]), INVALID, "token_ids"),
    "no tokens": (request([], token_ids={}), INVALID, "token_ids"),
    "empty request id": (good(request_id=""), INVALID, "request_id"),
    "long request id": (good(request_id="x" * 1025), INVALID, "request_id"),
    "empty model": (good(model=""), INVALID, "model"),
    "unknown model": (good(model="nobody"), grpc.StatusCode.NOT_FOUND, "model"),
    "no budget": (with_stopping(max_tokens=0), INVALID, "stopping.max_tokens"),
    "min over max": (with_stopping(min_tokens=9, max_tokens=8), INVALID, "stopping.min_tokens"),
    "no sequence": (good(sampling={"num_sequences": 0}), INVALID, "sampling.num_sequences"),
    "two sequences": (
        good(sampling={"num_sequences": 2}),
        UNIMPLEMENTED,
        "sampling.num_sequences",
    ),
    "top_k -2": (good(sampling={"top_k": -2}), INVALID, "sampling.top_k"),
    "top_p 0": (good(sampling={"top_p": 0}), INVALID, "sampling.top_p"),
    "temperature NaN": (good(sampling={"temperature": nan}), INVALID, "sampling.temperature"),
    "10,000 stops": (
        good(stopping={"conditions": [{"stop_token_id": 1}] * 10_000}),
        INVALID,
        "stopping.conditions",
    ),
    "10 MB prompt": (request([100_000] * 3_500_000), TOO_LARGE, "token_ids"),
    "over the window": (request([1] * (MAX_CONTEXT_TOKENS + 1)), INVALID, "token_ids"),
    "the whole window": (request([1] * MAX_CONTEXT_TOKENS), INVALID, "token_ids"),
    "target in extra": (good(extra={"ttft_target": 150}), INVALID, "extra.ttft_target"),
    "target in nvext": (good(extra={"nvext": {"router": {}}}), INVALID, "extra.nvext"),
}

BAD_METADATA: list[tuple[list[tuple[str, str]], str]] = [
    *(
        ([(key, value)], key)
        for key in (TTFT, ITL)
        for value in ("NaN", "inf", "-inf", "fast", "true", "[]", "-1", "1e400", "", "1,5", "0x10")
    ),
    *(
        ([(PRIORITY, value)], PRIORITY)
        for value in ("1.5", "2147483648", "-2147483649", "", "high")
    ),
    ([(TTFT, "100"), (TTFT, "100")], TTFT),
    ([(PRIORITY, "1"), (PRIORITY, "2")], PRIORITY),
    ([("x-slo-tftt-ms", "150")], "x-slo-tftt-ms"),
    ([("x-slo-ttft", "150")], "x-slo-ttft"),
    ([("slagate-receipt", "yes")], "slagate-receipt"),
    ([("openengine-target-dp-rank", "0")], "openengine-target-dp-rank"),
    ([("x-gateway-inference-objective", "x" * 257)], "x-gateway-inference-objective"),
]


def assert_refused(
    served: Served,
    start: Callable[[], Any],
    *,
    code: grpc.StatusCode,
    field: str,
    outcome: str,
) -> None:
    calls, outcomes = len(served.worker.calls), served.gateway.outcomes(outcome)
    internal = served.gateway.outcomes("internal")
    answer = read(start())
    assert answer.code is code, answer.details
    assert answer.details.startswith(f"{field}:")
    assert "Traceback" not in answer.details
    assert "Error" not in answer.details
    assert answer.events == []
    assert len(served.worker.calls) == calls
    assert served.gateway.outcomes(outcome) == outcomes + 1
    assert served.gateway.outcomes("internal") == internal
    assert served.gateway.is_idle()


def test_a_good_request_is_counted_by_the_worker(served: Served) -> None:
    """The proof that the counter of the other tests can move."""
    calls = len(served.worker.calls)
    answer = served.client.generate(good(), [(TTFT, "0"), (ITL, "1e1"), (PRIORITY, "-2147483648")])
    assert answer.tokens == TOKENS
    assert len(served.worker.calls) == calls + 1


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_reaches_no_worker(served: Served, name: str) -> None:
    """ENGINE-08, for what no engine can use."""
    message, code, field = BAD_REQUESTS[name]
    outcome = "too_large" if code is TOO_LARGE else "invalid"
    assert_refused(
        served, lambda: served.client.start(message), code=code, field=field, outcome=outcome
    )


def test_a_text_prompt_is_refused_while_there_is_no_tokenizer(served: Served) -> None:
    message = good()
    message.prompt = "hello"
    assert_refused(
        served,
        lambda: served.client.start(message),
        code=INVALID,
        field="prompt",
        outcome="invalid",
    )


@pytest.mark.parametrize(("metadata", "field"), BAD_METADATA, ids=lambda value: repr(value)[:50])
def test_bad_metadata_reaches_no_worker(
    served: Served, metadata: list[tuple[str, str]], field: str
) -> None:
    """CFG-01, CFG-04: never a silent default."""
    assert_refused(
        served,
        lambda: served.client.start(good(), metadata),
        code=INVALID,
        field=field,
        outcome="invalid",
    )


@pytest.mark.parametrize(
    "data", [b"\xff" * 10, b"\x0a\x7f", b"garbage" * 100], ids=["tags", "cut", "text"]
)
def test_bytes_that_are_no_request_reach_no_worker(served: Served, data: bytes) -> None:
    assert_refused(
        served,
        lambda: served.client.start_bytes(data),
        code=INVALID,
        field="request",
        outcome="invalid",
    )


def test_a_private_field_hidden_in_a_second_copy_reaches_no_worker(served: Served) -> None:
    """Concatenated messages merge, so a session may hide in an appended half."""
    hidden = type(good())()
    hidden.kv.session.session_id = "1"
    assert_refused(
        served,
        lambda: served.client.start_bytes(good().SerializeToString() + hidden.SerializeToString()),
        code=INVALID,
        field="kv.session",
        outcome="invalid",
    )


@pytest.mark.parametrize(
    "key",
    ["x-gateway-destination-endpoint", "x-prefiller-host-port", "traceparent"],
)
def test_secmm_01_no_routing_header_of_a_client_reaches_a_worker(served: Served, key: str) -> None:
    """SECMM-01: only what traces a request is passed on; the worker is the gateway's choice."""
    answer = served.client.generate(good(), [(key, "169.254.169.254:80")])
    assert answer.tokens == TOKENS
    assert (key in served.worker.calls[-1].metadata) is (key == "traceparent")


@pytest.mark.parametrize("key", ["x-slagate-dp-rank", "openengine-target-dp-rank"])
def test_secmm_01_a_rank_is_not_the_clients_to_choose(served: Served, key: str) -> None:
    assert_refused(
        served,
        lambda: served.client.start(good(), [(key, "1")]),
        code=INVALID,
        field=key,
        outcome="invalid",
    )


def test_stream_01_a_worker_sees_the_clients_deadline_or_the_gateways_limit(
    served: Served,
) -> None:
    """STREAM-01: no deadline is not an infinite one, and not one that has passed."""
    without = read(served.client.start(good(), timeout_s=None))
    assert without.tokens == TOKENS
    limit_s = served.worker.calls[-1].remaining_s
    assert limit_s is not None
    # On the wire gRPC rounds a time up to three digits or so: to the second or less here.
    assert 600 - HANG_S < limit_s <= 601
    read(served.client.start(good(), timeout_s=200))
    remaining_s = served.worker.calls[-1].remaining_s
    assert remaining_s is not None
    assert 200 - HANG_S < remaining_s <= 202, "each hop rounds up"


def test_a_worker_gets_an_id_of_the_gateways_own(served: Served) -> None:
    answers = [served.client.generate(good(request_id="mine")) for _ in range(2)]
    assert {frozenset(answer.request_ids) for answer in answers} == {frozenset(["mine"])}
    ids = [call.request.request_id for call in served.worker.calls[-2:]]
    assert len(set(ids)) == 2
    assert "mine" not in ids


def test_explain_reaches_no_worker(served: Served) -> None:
    calls = len(served.worker.calls)
    explained = run_here(
        "explain", "--insecure", "--target", served.gateway.admin_address, "--isl", "9", "--json"
    )
    assert explained.returncode == 0, explained.stderr
    assert served.worker.address in explained.stdout
    assert len(served.worker.calls) == calls
