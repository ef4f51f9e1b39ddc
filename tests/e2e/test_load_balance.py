"""Load is counted when a worker is chosen, on every path, and is gone when the requests are."""

from collections import Counter

import pytest

from slagate.proto import gateway_pb2 as gw
from support.engine.tokens import expected, prompt
from support.gateway.foreign_client import Client, read, request
from support.gateway.processes import Cluster, eventually
from support.gateway.receipts import ASK, receipt_of

N_REQUESTS = 100


def test_score_01_unrelated_requests_spread_over_equal_workers(
    either: Cluster, client: Client
) -> None:
    """SCORE-01, SCORE-02: no stage's split is worse than 60/40, and every gauge returns to 0."""
    prompts = [prompt(200, seed=100 + number) for number in range(N_REQUESTS)]
    calls = [
        client.start(request(tokens, 40, request_id=f"r-{number}"), ASK)
        for number, tokens in enumerate(prompts)
    ]
    answers = [read(call) for call in calls]

    n_by_stage: dict[int, Counter[str]] = {}
    for tokens, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == expected(tokens, 40)
        receipt = receipt_of(answer)
        assert receipt.actual.outcome == "completed"
        for choice, attempt in zip(receipt.decision.stages, receipt.attempts, strict=True):
            assert attempt.worker == choice.worker
            n_by_stage.setdefault(attempt.stage, Counter())[attempt.worker] += 1
    for pool, workers in either.workers.items():
        stage = gw.STAGE_AGG if pool == "a" else gw.STAGE_PREFILL
        stage = gw.STAGE_DECODE if pool == "d" else stage
        split = n_by_stage.pop(stage)
        assert set(split) <= {worker.address for worker in workers}
        assert max(split.values()) <= 0.6 * N_REQUESTS, split
    assert n_by_stage == {}
    eventually(either.gateway.is_idle, "every gauge is 0")


def test_the_gauges_show_a_running_request(either: Cluster, client: Client) -> None:
    """The proof that the zeros of the other tests can be something else."""
    call = client.start(request(prompt(100, seed=31), 3000))
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
