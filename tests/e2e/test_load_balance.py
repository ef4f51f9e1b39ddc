"""Load is counted when a worker is chosen, on every path, and is gone when the requests are."""

import pytest

from support.engine.tokens import expected, prompt
from support.gateway.foreign_client import Client, endless, read_tokens, request
from support.gateway.processes import Cluster, eventually
from support.gateway.receipts import ASK, receipt_of

N_REQUESTS = 100


def test_score_01_unrelated_requests_spread_over_equal_workers(
    either: Cluster, client: Client
) -> None:
    """SCORE-01, SCORE-02: the split of those that run is no worse than 60/40, and ends at 0."""
    pool = "a" if "a" in either.workers else "d"
    eventually(either.gateway.is_idle, "what other tests left is over")
    prompts = [prompt(200, seed=100 + number) for number in range(N_REQUESTS)]
    calls = [
        client.start(endless(tokens, 6000, request_id=f"r-{number}"))
        for number, tokens in enumerate(prompts)
    ]
    for tokens, call in zip(prompts, calls, strict=True):
        first = read_tokens(call, 1)
        assert first == expected(tokens, len(first))
    split = {w.worker: w.inflight for w in either.gateway.workers() if w.inflight}
    assert set(split) <= set(either.addresses(pool))
    assert sum(split.values()) == N_REQUESTS
    assert max(split.values()) <= 0.6 * N_REQUESTS, split
    for call in calls:
        call.cancel()
    eventually(either.gateway.is_idle, "every gauge is 0")


def test_the_gauges_show_a_running_request(either: Cluster, client: Client) -> None:
    """The proof that the zeros of the other tests can be something else."""
    call = client.start(endless(prompt(100, seed=31)))
    next(call)
    assert not either.gateway.is_idle()
    assert sum(either.gateway.metrics("slagate_worker_inflight").values()) >= 1
    call.cancel()
    eventually(either.gateway.is_idle, "every gauge is 0")


def test_a_receipt_says_what_happened(either: Cluster, client: Client) -> None:
    answer = client.generate(
        request(prompt(300, seed=32), 10, request_id="told"),
        [*ASK, ("x-slo-ttft-ms", "150"), ("openengine-priority", "3")],
    )
    receipt = receipt_of(answer)
    assert receipt.decision.request_id == "told"
    assert receipt.decision.isl_tokens == 300
    assert receipt.decision.sla.ttft_ms == 150
    assert receipt.decision.sla.priority == 3
    assert not receipt.decision.sla.HasField("itl_ms")
    assert receipt.actual.output_tokens == 10
    assert receipt.actual.ttft_met == (receipt.actual.ttft_ms <= 150)
    assert not receipt.actual.HasField("itl_met")
    assert [attempt.status for attempt in receipt.attempts] == ["OK"] * len(either.workers)
    assert receipt.ByteSize() <= 4096


@pytest.mark.parametrize("asked", [[], [("slagate-receipt", "0")]])
def test_without_asking_there_is_no_receipt(client: Client, asked: list[tuple[str, str]]) -> None:
    answer = client.generate(request(prompt(10), 2), asked)
    assert "slagate-receipt-bin" not in answer.trailers
