"""A client that leaves, or whose deadline passes, at each stage: the worker sees it, and nothing stays.

The prefill worker is slow enough that a long prompt takes about a second, the decode worker so slow that
its transfer does too: each stage lasts long enough to be met, on a machine that is not busy.
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

N_LONG = 20_000


class Slow(NamedTuple):
    gateway: Gateway
    prefill: Client
    decode: Client
    client: Client


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slow]:
    folder = tmp_path_factory.mktemp("cancel")
    with (
        running("p", worker_arguments("prefill", "--time-scale", "2"), folder) as p,
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


def in_prefill(slow: Slow, seed: int, timeout_s: float | None = 60) -> Any:
    """A call whose prefill has begun on the worker."""
    call = slow.client.start(request(prompt(N_LONG, seed=seed), 50), timeout_s=timeout_s)
    eventually(lambda: slow.prefill.load().running_requests == 1, "prefill has begun")
    return call


def in_handoff(slow: Slow, seed: int, timeout_s: float | None = 60) -> Any:
    """A call whose prompt is prefilled and on its way to the decode worker."""
    tokens = prompt(N_LONG, seed=seed)
    assert slow.client.generate(request(tokens, 1)).tokens == expected(tokens, 1)
    call = slow.client.start(request(tokens, 50), timeout_s=timeout_s)
    eventually(lambda: slow.decode.load().running_requests == 1, "the transfer has begun")
    return call


def in_decode(slow: Slow, timeout_s: float | None = 60) -> Any:
    """A call that has had three tokens of very many."""
    call = slow.client.start(endless(prompt(50, seed=41)), timeout_s=timeout_s)
    assert read_tokens(call, 3)[:3] == expected(prompt(50, seed=41), 3)
    return call


def cancel(slow: Slow, call: Any) -> None:
    cancelled = slow.gateway.outcomes("cancelled")
    call.cancel()
    answer = read(call)
    assert answer.code is grpc.StatusCode.CANCELLED
    eventually(lambda: slow.gateway.outcomes("cancelled") == cancelled + 1, "the gateway counts it")


def expire(slow: Slow, call: Any, n_late: int) -> Any:
    answer = read(call)
    assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "finished" not in answer.events
    eventually(lambda: slow.gateway.outcomes("deadline") == n_late + 1, "the gateway counts it")
    return answer


def test_cancel_in_the_queue_of_a_busy_prefill_worker(slow: Slow) -> None:
    """The second long prompt waits behind the first, and leaves without disturbing it."""
    first = in_prefill(slow, seed=43)
    second = slow.client.start(request(prompt(N_LONG, seed=44), 50))
    eventually(lambda: slow.prefill.load().running_requests == 2, "the second has arrived")
    cancel(slow, second)
    eventually(lambda: slow.prefill.load().running_requests <= 1, "the worker let it go")
    assert read_tokens(first, 1)[:1] == expected(prompt(N_LONG, seed=43), 1)
    cancel(slow, first)


def test_disagg_10_cancel_right_after_prefill(slow: Slow) -> None:
    """DISAGG-10 (b): the handoff is open; it is used up or released, never left."""
    cancel(slow, in_handoff(slow, seed=45))


def test_deadline_in_prefill(slow: Slow) -> None:
    n_late = slow.gateway.outcomes("deadline")
    call = in_prefill(slow, seed=46, timeout_s=0.5)
    assert expire(slow, call, n_late).tokens == []


def test_deadline_right_after_prefill(slow: Slow) -> None:
    n_late = slow.gateway.outcomes("deadline")
    call = in_handoff(slow, seed=47, timeout_s=0.8)
    assert expire(slow, call, n_late).tokens == []


def test_deadline_in_decode(slow: Slow) -> None:
    n_late = slow.gateway.outcomes("deadline")
    call = in_decode(slow, timeout_s=1.5)
    expire(slow, call, n_late)
