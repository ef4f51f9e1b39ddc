"""Workers that die, come late or come back: clear words for the client, true words for the probes."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from support.engine.tokens import expected, prompt
from support.gateway.foreign_client import Client, endless, read, read_tokens, request
from support.gateway.processes import (
    Gateway,
    eventually,
    fleet_config,
    gateway,
    running,
    worker_arguments,
)
from support.worker.foreign import ForeignWorker, Received, foreign_worker, token_response

APART = "127.0.0.2"
"""Where a port is still free after a while: the other tests take theirs at `LOOPBACK`."""

_PRIVATE = re.compile(r"\d+\.\d+\.\d+\.\d+|:\d{4,5}|ipv[46]:|Traceback|<class|\w+Error\b|/\w+/\w+")


def assert_fit_for_a_client(details: str) -> None:
    """Words, without addresses, paths or class names."""
    assert details
    assert not _PRIVATE.search(details), details


def free_address() -> str:
    """An address nobody listens on at the moment."""
    with socket.create_server((APART, 0)) as server:
        return f"{APART}:{server.getsockname()[1]}"


def test_health_05_the_only_decode_worker_dies_mid_stream_and_returns(tmp_path: Path) -> None:
    """HEALTH-05: one UNAVAILABLE for the client, /readyz follows the worker, /healthz does not."""
    with (
        running("p", worker_arguments("prefill"), tmp_path) as p,
        running("d", worker_arguments("decode", listen=f"{APART}:0"), tmp_path) as d,
        gateway(
            tmp_path,
            fleet_config({"p": ("prefill", [p.address]), "d": ("decode", [d.address])}),
        ) as served,
        Client(served.address) as client,
    ):
        eventually(served.is_ready, "the gateway is ready")
        call = client.start(endless(prompt(50)))
        assert read_tokens(call, 3)[:3] == expected(prompt(50), 3)
        d.kill()
        answer = read(call)
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        assert "finished" not in answer.events
        assert "error" not in answer.events
        assert_fit_for_a_client(answer.details)

        # Before the probes have noticed, a new request meets the same fate, in words and quickly.
        answer = client.generate(request(prompt(50), 5))
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        assert answer.tokens == []
        assert_fit_for_a_client(answer.details)

        eventually(lambda: not served.is_ready(), "/readyz notices")
        assert served.http("/readyz") == (503, "no decode worker is ready\n")
        assert served.http("/healthz")[0] == 200
        answer = client.generate(request(prompt(50), 5))
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        assert answer.details == "decode: no worker of pool d is ready"
        assert int(answer.trailers["grpc-retry-pushback-ms"]) > 0
        eventually(served.is_idle, "nothing is leased")
        with Client(p.address) as prefill:
            none_parked = "no session is parked"
            eventually(lambda: prefill.load().active_kv_sessions == 0, none_parked)

        again = worker_arguments("decode", listen=d.address)
        with running("d-again", again, tmp_path):
            eventually(served.is_ready, "/readyz recovers")
            answer = client.generate(request(prompt(50), 5))
            assert answer.tokens == expected(prompt(50), 5)


def test_health_06_a_gateway_is_not_ready_before_its_workers(tmp_path: Path) -> None:
    """HEALTH-06: early calls are UNAVAILABLE at once; they succeed when the worker has come."""
    address = free_address()
    with (
        gateway(tmp_path, fleet_config({"a": ("agg", [address])})) as served,
        Client(served.address) as client,
    ):
        assert served.http("/readyz") == (503, "no agg worker is ready\n")
        assert served.http("/healthz")[0] == 200
        # Its deadline is the proof of "at once": a gateway that waited would give DEADLINE_EXCEEDED.
        answer = read(client.start(request(prompt(50), 5)))
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        assert_fit_for_a_client(answer.details)
        assert [worker.state for worker in served.workers()] == ["connecting"]
        with running("a", worker_arguments("agg", listen=address), tmp_path):
            eventually(served.is_ready, "the worker is found")
            answer = client.generate(request(prompt(50), 5))
            assert answer.tokens == expected(prompt(50), 5)


def test_a_worker_of_the_wrong_role_is_refused_by_name(tmp_path: Path) -> None:
    with (
        running("d", worker_arguments("decode"), tmp_path) as d,
        gateway(tmp_path, fleet_config({"a": ("agg", [d.address])})) as served,
    ):
        eventually(lambda: served.workers()[0].state == "refused", "the worker is refused")
        assert "is a decode worker" in served.workers()[0].reason
        assert served.http("/readyz")[0] == 503


@pytest.fixture(scope="module")
def foreign() -> Iterator[ForeignWorker]:
    with foreign_worker() as worker:
        yield worker


@pytest.fixture(scope="module")
def over_foreign(
    foreign: ForeignWorker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("foreign")
    with gateway(folder, fleet_config({"a": ("agg", [foreign.address])})) as served:
        eventually(served.is_ready, "the gateway is ready")
        yield served


DUMP = "Traceback (most recent call last): File /usr/lib/python3/site-packages/engine.py ipv4:10.0.0.7:443"


@pytest.mark.parametrize("n_tokens", [0, 2])
@pytest.mark.parametrize(
    "code",
    [
        code
        for code in grpc.StatusCode
        if code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)
    ],
    ids=lambda code: code.name,
)
def test_stream_06_a_workers_status_keeps_its_code_and_loses_its_insides(
    foreign: ForeignWorker, over_foreign: Gateway, code: grpc.StatusCode, n_tokens: int
) -> None:
    """STREAM-06, HEALTH-01, HEALTH-02: before the first message and behind two tokens."""

    def fail(received: Received, context: grpc.ServicerContext) -> Iterator[object]:
        for token in range(n_tokens):
            yield token_response(received, token)
        context.abort(code, f"cache full at 10.0.0.7:443 {DUMP}")

    foreign.answer = fail
    n_calls = len(foreign.calls)
    with Client(over_foreign.address) as client:
        answer = client.generate(request(prompt(50), 5))
    assert answer.code is code
    assert answer.tokens == list(range(n_tokens))
    assert answer.details.startswith("agg: cache full")
    assert_fit_for_a_client(answer.details)
    # There is one worker, so a second call could only be the same worker asked twice.
    assert len(foreign.calls) == n_calls + 1
    eventually(over_foreign.is_idle, "nothing is leased")
