"""Predictions beside what became of them, of whole requests over simulated engines."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from slagate.pools.fleet.pool import Pool
from slagate.proto import gateway_pb2 as gw
from slagate.router.receipts.feedback import accuracies
from slagate.workers.profiles.profile import load_profile
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.trtllm.worker import TrtllmWorker
from support.builders import PROFILE
from support.engine.workers import engine_worker
from support.gateway.simulation import Fleet, Plan, Seen, check_tokens, running, simulate

STAGES = {"prefill": {"prefill": 3, "decode": 3}, "agg": {"agg": 3}}
A_STEP = 4
DRAFTS = {"speculative_config": {"max_draft_len": A_STEP - 1}}


def n_pairs(fleet: Fleet) -> dict[str, int]:
    """Pairs by latency, of all pools."""
    return {
        latency: accuracy.n_pairs
        for pool in fleet.app.fleet.pools.values()
        for latency, accuracy, _ in accuracies(pool)
    }


@pytest.mark.parametrize("stage", STAGES)
def test_who_was_retried_cancelled_or_aborted_is_no_wrong_prediction(stage: str) -> None:
    rng = random.Random(5)
    plans = [
        Plan(
            rng.uniform(0, 30),
            rng.choices(range(100_000), k=rng.randint(100, 3000)),
            rng.randint(2, 30),
            cancel_after_s=rng.uniform(0, 0.6) if rng.random() < 0.3 else None,
            abort_after_s=rng.uniform(0, 0.6) if rng.random() < 0.2 else None,
        )
        for _ in range(120)
    ]

    async def main() -> tuple[list[Seen], dict[str, int]]:
        async with running(STAGES[stage], seed=3, refusals=0.1, losses=0.1) as fleet:
            return await simulate(fleet, plans), n_pairs(fleet)

    seen, found = run(main)
    answered = [one.receipt for one in seen if one.code == "OK"]
    plain = [each for each in answered if all(leg.status == "OK" for leg in each.attempts)]
    assert 10 < len(plain) < len(answered) < len(plans)
    assert found == {"ttft": len(plain), "itl": len(plain)}
    for receipt in [one.receipt for one in seen if one.receipt.HasField("actual")]:
        actual = receipt.actual
        is_paired = actual.HasField("predicted_ttft_ms"), actual.HasField("predicted_itl_ms")
        assert is_paired == ((True, True) if receipt in plain else (False, False))


def test_a_short_prompt_waits_for_the_step_of_an_answer_where_there_is_one() -> None:
    """It comes while a worker is idle, or while it answers another, at any moment of a step."""
    rng = random.Random(2)
    plans = []
    for number in range(120):
        at_s, long = 4.0 * number, list(range(200 * number, 200 * number + 100))
        if number % 2:
            plans.append(Plan(at_s, long, 200))
        short = rng.choices(range(100_000), k=rng.randint(10, 60))
        plans.append(Plan(at_s + rng.uniform(0.3, 1.5), short, 2))

    async def main() -> list[gw.Actual]:
        async with running({"agg": 1}, seed=1) as fleet:
            return [one.receipt.actual for one in await simulate(fleet, plans)]

    for is_beside in (False, True):
        found = [one for one in run(main)[60:] if one.output_tokens == 2]
        found = found[is_beside::2]
        off = sorted(abs(one.predicted_ttft_ms - one.ttft_ms) / one.ttft_ms for one in found)
        assert len(off) > 35
        assert off[9 * len(off) // 10] < 0.35, (is_beside, off)


@asynccontextmanager
async def speculating(stage: str, address: str) -> AsyncIterator[TrtllmWorker]:
    del address
    settings = {} if stage == "prefill" else {"tokens_per_step": A_STEP}
    args = {} if stage == "prefill" else DRAFTS
    async with engine_worker(stage, sim_settings=settings, **args) as made:
        yield made.inner


@pytest.mark.parametrize("stage", STAGES)
def test_tokens_count_however_many_come_in_one_message(stage: str) -> None:
    """Speculative decoding: a step takes what it takes by the profile, and brings several tokens."""

    async def main() -> tuple[list[Seen], Pool]:
        async with running(STAGES[stage], seed=1, make=speculating) as fleet:
            seen = []
            for number in range(60):
                prompt = list(range(100 * number, 100 * number + 400))
                seen += await simulate(fleet, [Plan(0.0, prompt, 101)])
                await anyio.sleep(1)
            *_, pool = fleet.app.fleet.pools.values()
            return seen, pool

    seen, pool = run(main)
    check_tokens(seen)
    step_s = load_profile(PROFILE).tp(1).itl_s(1, 450)
    for one in seen:
        assert one.receipt.actual.output_tokens == 101
        assert one.receipt.actual.itl_ms == pytest.approx(1000 * step_s / A_STEP, rel=0.15)
    # It is learnt as a pool that is so many times as fast, or as workers that are.
    for one in seen[20:]:
        assert one.receipt.actual.predicted_itl_ms == pytest.approx(
            1000 * step_s / A_STEP, rel=0.15
        )
    assert pool.estimator.itl.basis == "learnt"


def test_the_stall_of_an_answer_is_counted_by_its_tokens_too() -> None:
    """A prompt of others stops an answer for as long, whether a message brings one token or several."""

    async def main() -> list[gw.Actual]:
        async with running({"agg": 1}, seed=1, make=speculating) as fleet:
            return [
                one.receipt.actual
                for number in range(40)
                for one in (
                    await simulate(
                        fleet,
                        [
                            Plan(0.0, list(range(100 * number, 100 * number + 300)), 201),
                            Plan(0.1, list(range(100 * number, 100 * number + 6000)), 1),
                        ],
                    )
                )[:1]
            ]

    found = run(main)
    for actual in found[20:]:
        assert actual.stalled_ms > 0.1 * actual.itl_ms
        steps_ms = actual.itl_ms - actual.stalled_ms
        assert steps_ms == pytest.approx(actual.predicted_itl_ms, rel=0.25)
