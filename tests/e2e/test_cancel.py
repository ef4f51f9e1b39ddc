"""A client that leaves: the worker sees it, and nothing stays.

Workers are slow enough that what is left while it runs takes minutes. Stages that are over by themselves,
and deadlines, are in tests/long, and in virtual time in tests/simulation.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

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

N_LONG = 130_000


class Slow(NamedTuple):
    gateway: Gateway
    prefill: Client
    decode: Client
    client: Client


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slow]:
    folder = tmp_path_factory.mktemp("cancel")
    with (
        running("p", worker_arguments("prefill", "--time-scale", "5"), folder) as p,
        running("d", worker_arguments("decode", "--time-scale", "20"), folder) as d,
        gateway(
            folder,
            fleet_config({"p": ("prefill", [p.address]), "d": ("decode", [d.address])}),
        ) as served,
        Client(p.address) as prefill,
        Client(d.address) as decode,
        Client(served.address) as client,
    ):
        eventually(served.is_ready, "the gateway is ready")
        yield Slow(served, prefill, decode, client)


@pytest.fixture(autouse=True)
def all_is_free_and_works(slow: Slow) -> Iterator[None]:
    """After each: no lease, no running request, no parked session; and 20 requests go through."""
    yield
    eventually(slow.gateway.is_idle, "the gateway holds no lease")
    eventually(lambda: slow.prefill.load().running_requests == 0, "no prefill runs")
    eventually(lambda: slow.decode.load().running_requests == 0, "no decode runs")
    eventually(lambda: slow.prefill.load().active_kv_sessions == 0, "no session is parked")
    prompts = [prompt(40, seed=200 + number) for number in range(20)]
    calls = [slow.client.start(request(tokens, 3)) for tokens in prompts]
    for call, tokens in zip(calls, prompts, strict=True):
        assert read(call).tokens == expected(tokens, 3)


def cancel(slow: Slow, call: Any) -> None:
    cancelled = slow.gateway.outcomes("cancelled")
    call.cancel()
    answer = read(call)
    assert answer.code is grpc.StatusCode.CANCELLED
    eventually(lambda: slow.gateway.outcomes("cancelled") == cancelled + 1, "the gateway counts it")


def test_stream_03_cancel_in_prefill(slow: Slow) -> None:
    """STREAM-03, DISAGG-10 (a): the prefill worker drops it, nothing is half open afterwards."""
    call = slow.client.start(request(prompt(N_LONG, seed=42), 50))
    eventually(lambda: slow.prefill.load().running_requests == 1, "prefill has begun")
    cancel(slow, call)


def test_stream_02_cancel_in_decode(slow: Slow) -> None:
    """STREAM-02: after three tokens the client has enough; so has the worker."""
    call = slow.client.start(endless(prompt(50, seed=41)))
    assert read_tokens(call, 3)[:3] == expected(prompt(50, seed=41), 3)
    cancel(slow, call)
    eventually(lambda: slow.decode.load().running_requests == 0, "the worker stops")


def test_a_client_that_vanishes_is_a_cancelled_one(slow: Slow) -> None:
    """STREAM-02: the connection is cut, nobody says a word."""
    cancelled = slow.gateway.outcomes("cancelled")
    with Client(slow.gateway.address) as gone:
        call = gone.start(endless(prompt(50, seed=48)))
        read_tokens(call, 3)
    eventually(lambda: slow.gateway.outcomes("cancelled") == cancelled + 1, "it is noticed")
    eventually(lambda: slow.decode.load().running_requests == 0, "the worker stops")
