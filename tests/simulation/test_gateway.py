"""The whole gateway over simulated engines in virtual time: random clients, every invariant.

`test_wire` has the same faults with HTTP/2 in between, so few seeds of them are tried here in the gate.
"""

import random
from collections import Counter

import pytest

from slagate.router.replay.invariants import check_idle
from slagate.workers.runtime import virtual_loop
from support.gateway.simulation import Plan, Seen, check_tokens, running, simulate
from support.seeds import n_in, n_seeds_of

DISAGG = {"prefill": 2, "decode": 2}
AGG = {"agg": 2}
N_MENDED = n_in(gate=60, long=100)


def plans(rng: random.Random, count: int) -> list[Plan]:
    """Prompts of every size against the block, outputs of every length, and impatient clients."""
    made = []
    for _ in range(count):
        n_prompt = rng.choice([1, 31, 32, 33, 200, 3000, 9000])
        first = rng.randrange(50_000)
        does = rng.choice(["stays", "stays", "cancels", "aborts", "has a deadline"])
        moment_s = rng.choice([0.0, 0.001, rng.uniform(0, 0.02), rng.uniform(0, 1.5)])
        made.append(
            Plan(
                at_s=rng.uniform(0, 2),
                prompt=list(range(first, first + n_prompt)),
                n_tokens=rng.choice([1, 2, 3, 30, 120]),
                cancel_after_s=moment_s if does == "cancels" else None,
                abort_after_s=moment_s if does == "aborts" else None,
                timeout_s=moment_s if does == "has a deadline" else None,
            )
        )
    return made


@pytest.mark.parametrize("seed", range(n_seeds_of(2)))
@pytest.mark.parametrize("stages", [DISAGG, AGG], ids=["disagg", "agg"])
def test_random_clients_leave_nothing_behind(stages: dict[str, int], seed: int) -> None:
    async def main() -> list[Seen]:
        todo = plans(random.Random(seed), 40)
        async with running(stages, seed=seed) as fleet:
            seen = await simulate(fleet, todo)
            check_tokens(seen)
            await check_idle(fleet.app, fleet.workers, n_requests=len(todo))
            # STREAM-03: whatever was cancelled before, the next requests are served as ever.
            after = [Plan(0.0, list(range(i, i + 100)), 20) for i in range(20)]
            assert {one.code for one in await simulate(fleet, after)} == {"OK"}
            return seen

    seen = virtual_loop.run(main)
    for one in seen:
        plan = one.plan
        patient = plan.cancel_after_s is plan.abort_after_s is plan.timeout_s is None
        allowed = {
            "OK",
            *(["CANCELLED"] if not patient and plan.timeout_s is None else []),
            *(["DEADLINE_EXCEEDED"] if plan.timeout_s is not None else []),
        }
        assert one.code in allowed, one.plan


@pytest.mark.parametrize("seed", range(n_seeds_of(2)))
@pytest.mark.parametrize("stages", [DISAGG, AGG], ids=["disagg", "agg"])
def test_workers_that_refuse_leave_nothing_behind(stages: dict[str, int], seed: int) -> None:
    async def main() -> list[Seen]:
        todo = plans(random.Random(seed), 40)
        async with running(stages, seed=seed, refusals=0.3) as fleet:
            seen = await simulate(fleet, todo)
            check_tokens(seen)
            await check_idle(fleet.app, fleet.workers, n_requests=len(todo))
            return seen

    for one in virtual_loop.run(main):
        attempts = [attempt.status for attempt in one.receipt.attempts]
        if one.code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL"):
            assert one.tokens == []
            # Without an attempt there was nobody left: three refusals in a row take a worker out.
            assert attempts[-1:] in ([one.code], [])
        # Only what another worker may do better is tried again.
        assert "INTERNAL" not in attempts[:-1]


@pytest.mark.parametrize("seed", range(n_seeds_of(2)))
@pytest.mark.parametrize("stages", [DISAGG, AGG], ids=["disagg", "agg"])
def test_workers_lost_midway_leave_nothing_behind(stages: dict[str, int], seed: int) -> None:
    """Streams that break or go silent: what arrived is right, and nothing stays held."""

    async def main() -> list[Seen]:
        todo = plans(random.Random(seed), 40)
        async with running(stages, seed=seed, losses=0.4) as fleet:
            seen = await simulate(fleet, todo)
            check_tokens(seen)
            await check_idle(fleet.app, fleet.workers, n_requests=len(todo))
            return seen

    for one in virtual_loop.run(main):
        if one.code == "UNAVAILABLE":
            assert not one.finished
            if one.tokens:
                # HEALTH-01: a request that had tokens is not tried again.
                assert one.receipt.attempts[-1].status == "UNAVAILABLE"


@pytest.mark.parametrize("stages", [DISAGG, AGG], ids=["disagg", "agg"])
def test_most_requests_survive_what_a_second_worker_can_mend(stages: dict[str, int]) -> None:
    """That the two tests above are not about requests which all fail."""

    async def main(seed: int, refusals: float, losses: float) -> Counter[str]:
        todo = [Plan(i * 0.2, list(range(i, i + 300)), 20) for i in range(N_MENDED)]
        async with running(stages, seed=seed, refusals=refusals, losses=losses) as fleet:
            seen = await simulate(fleet, todo)
            retried = sum(len(one.receipt.attempts) > len(stages) for one in seen)
            return Counter(one.code for one in seen) + Counter(retried=retried)

    refused = virtual_loop.run(main, 1, 0.1, 0.0)
    assert refused["OK"] > 0.85 * N_MENDED, refused
    assert refused["retried"] > 0.03 * N_MENDED, refused
    lost = virtual_loop.run(main, 1, 0.0, 0.1)
    assert lost["OK"] > 0.75 * N_MENDED, lost
    assert lost["UNAVAILABLE"], lost
    assert lost["DEADLINE_EXCEEDED"], lost


@pytest.mark.parametrize("stages", [DISAGG, AGG], ids=["disagg", "agg"])
def test_the_same_seed_gives_the_same_run(stages: dict[str, int]) -> None:
    async def main() -> list[tuple[str, bytes]]:
        async with running(stages, seed=5, refusals=0.2) as fleet:
            return [
                (one.code, one.receipt.SerializeToString(deterministic=True))
                for one in await simulate(fleet, plans(random.Random(5), 30))
            ]

    assert virtual_loop.run(main) == virtual_loop.run(main)


def test_aggregated_and_disaggregated_answers_are_equal() -> None:
    prompts = [Plan(0.0, list(range(i, i + 50 * i + 1)), 40) for i in range(12)]

    async def answers(stages: dict[str, int]) -> list[list[int]]:
        async with running(stages, seed=1) as fleet:
            return [one.tokens for one in await simulate(fleet, prompts)]

    assert virtual_loop.run(answers, DISAGG) == virtual_loop.run(answers, AGG)


@pytest.mark.parametrize("stages", [DISAGG, AGG], ids=["disagg", "agg"])
def test_score_01_a_burst_is_split_evenly(stages: dict[str, int]) -> None:
    """100 unrelated requests at once over two equal workers: no worse than 60/40 in any stage."""

    async def main() -> list[Counter[str]]:
        burst = [Plan(0.0, list(range(i * 1000, i * 1000 + 500)), 30) for i in range(100)]
        async with running(stages, seed=3) as fleet:
            seen = await simulate(fleet, burst)
            await check_idle(fleet.app, fleet.workers, n_requests=100)
            assert {one.code for one in seen} == {"OK"}
            choices = [one.receipt.decision.stages for one in seen]
            return [Counter(choice[at].worker for choice in choices) for at in range(len(stages))]

    for split in virtual_loop.run(main):
        assert sum(split.values()) == 100
        assert max(split.values()) <= 60, split
