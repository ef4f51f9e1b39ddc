"""Unrelated requests over equal workers, at true speed: of every stage, by the receipts."""

from collections import Counter
from collections.abc import Iterator

import pytest

from slagate.proto import gateway_pb2 as gw
from support.engine.tokens import expected, prompt
from support.gateway.foreign_client import Client, read, request
from support.gateway.processes import Cluster, Pool, cluster, eventually
from support.gateway.receipts import ASK, receipt_of

N_REQUESTS = 100
FLEETS = {
    "disagg": {"p": Pool("prefill", 2), "d": Pool("decode", 2)},
    "agg": {"a": Pool("agg", 2)},
}


@pytest.fixture(params=FLEETS.values(), ids=FLEETS.keys())
def either(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("fleet"), request.param) as running:
        yield running


@pytest.fixture
def client(either: Cluster) -> Iterator[Client]:
    with Client(either.gateway.address) as connected:
        yield connected


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
