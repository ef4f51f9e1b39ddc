"""Load is counted when a worker is chosen, on every path, and is gone when the requests are.

And prefill and decode workers are chosen as pairs that can hand over.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest

from support.engine.tokens import expected, prompt
from support.gateway.foreign_client import Client, endless, read_tokens, request
from support.gateway.processes import (
    Cluster,
    eventually,
    fleet_config,
    gateway,
    running,
    worker_arguments,
)
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


def test_requests_complete_on_pairs_that_fit_and_a_worker_without_one_is_told(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        workers = {
            (role, transport): stack.enter_context(
                running(
                    f"{role}-{transport}",
                    worker_arguments(role, "--transport", transport),
                    tmp_path,
                )
            )
            for role in ("prefill", "decode")
            for transport in ("nixl", "shm")
        }
        addresses = {
            role: [workers[role, transport].address for transport in ("nixl", "shm")]
            for role in ("prefill", "decode")
        }
        pools = {role: (role, found) for role, found in addresses.items()}
        served = stack.enter_context(gateway(tmp_path, fleet_config(pools)))
        client = stack.enter_context(Client(served.address))
        eventually(
            lambda: [each.pairs_with for each in served.workers()] == [1, 1, 1, 1],
            "each worker has one partner",
        )

        def served_by(seed: int) -> tuple[str, ...]:
            answer = client.generate(request(prompt(60, seed=seed), 4), ASK)
            assert answer.tokens == expected(prompt(60, seed=seed), 4)
            attempts = receipt_of(answer).attempts
            assert [attempt.status for attempt in attempts] == ["OK", "OK"]
            return tuple(attempt.worker for attempt in attempts)

        pairs = {served_by(seed) for seed in range(12)}
        nixl, shm = zip(*addresses.values(), strict=True)
        assert pairs == {nixl, shm}

        workers["decode", "shm"].kill()
        eventually(
            lambda: [pool.workers_unpaired for pool in served.pools()] == [1, 0],
            "the other half is without a partner",
        )
        (lonely,) = [each for each in served.workers() if each.pair_problem]
        assert lonely.worker == shm[0]
        assert "KV transport is shm on prefill and nixl on decode" in lonely.pair_problem
        assert {served_by(seed) for seed in range(12, 18)} == {nixl}
        assert served.is_ready()
