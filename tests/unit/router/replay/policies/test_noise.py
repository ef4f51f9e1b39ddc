"""Predictions that are off: by how much, the same for every policy, and times only."""

import math
import random
from collections.abc import Mapping

import numpy as np
import pytest

from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.grid.grid import Stage, StageGrid
from slagate.router.replay.policies.noise import NoisyChoice
from slagate.router.request.sla import Sla
from slagate.router.scheduling.policy import NO_CONFIG, Decision, choose
from slagate.router.scheduling.score import RoutingRequest, score_pool
from support.builders import ask, one_cell, pool_view, profiled, rng, view

ROWS = [view(f"w{n}:1", queued_s=2.0, inflight=n, context_tokens=100 * n) for n in range(5)]
POOL = pool_view("only", ROWS, speed=profiled(), n_leases=9)


class Seen:
    """A policy that keeps what it is given, and decides as our own."""

    def __init__(self) -> None:
        self.pool = POOL

    def __call__(
        self,
        asked: RoutingRequest,
        stages: Mapping[Stage, StageGrid],
        pools: Mapping[str, PoolSnapshot],
        *,
        rng: random.Random,
        config: object = NO_CONFIG,
    ) -> Decision:
        del config
        self.pool = pools["only"]
        return choose(asked, stages, pools, rng=rng)


def disturbed(
    asked: RoutingRequest, *, sigma: float = 0.6, seed: int = 1, stage: Stage = Stage.AGG
) -> PoolSnapshot:
    seen = Seen()
    noisy = NoisyChoice(seen, sigma, seed)
    decision = noisy(asked, {stage: one_cell(stage, "only")}, {"only": POOL}, rng=rng())
    assert decision.stage(stage).scored[0].pool is seen.pool
    return seen.pool


def request(session: str, *, isl_tokens: int = 1000) -> RoutingRequest:
    return ask(isl_tokens=isl_tokens, sla=Sla(objective="a", session_id=session))


def seconds(pool: PoolSnapshot) -> list[list[float]]:
    scored = score_pool(Stage.AGG, request("1"), pool)
    assert scored.work_s is not None
    assert scored.itl_s is not None
    return [each.tolist() for each in (pool.rows.load_s, scored.work_s, scored.itl_s)]


def test_a_request_has_the_same_noise_whenever_it_is_decided() -> None:
    one = seconds(disturbed(request("1")))
    assert seconds(disturbed(request("1"))) == one
    others = (
        disturbed(request("2")),
        disturbed(request("1", isl_tokens=1001)),
        disturbed(request("1"), seed=2),
    )
    for other in others:
        assert all(a != b for a, b in zip(one, seconds(other), strict=True))


def test_without_sigma_nothing_changes() -> None:
    assert seconds(disturbed(request("1"), sigma=0.0)) == seconds(POOL)


def test_the_prompt_is_off_alike_on_equal_workers_and_queues_and_itl_are_not() -> None:
    queue, own, itl = (
        np.array(noisy) / np.array(plain)
        for noisy, plain in zip(seconds(disturbed(request("1"))), seconds(POOL), strict=True)
    )
    assert own == pytest.approx([own[0]] * len(ROWS))
    assert len({*queue.round(9), *itl.round(9), *own.round(9)}) == 2 * len(ROWS) + 1


def test_factors_are_lognormal_with_median_1() -> None:
    plain = seconds(POOL)
    logs: list[list[float]] = [[], [], []]
    for n in range(200):
        for found, noisy, true in zip(
            logs, seconds(disturbed(request(str(n)))), plain, strict=True
        ):
            found.append(math.log(noisy[0] / true[0]))
    for found in logs:
        assert np.mean(found) == pytest.approx(0.0, abs=0.15)
        assert np.std(found) == pytest.approx(0.6, rel=0.2)


def test_what_is_counted_stays_as_it_is() -> None:
    noisy = disturbed(request("1"))
    for name in ("inflight", "queued_tokens", "context_tokens", "capacity_tokens"):
        assert noisy.rows.ints(name).tolist() == POOL.rows.ints(name).tolist()
    assert noisy.cached is POOL.cached
    assert (noisy.name, noisy.n_leases, len(noisy.rows)) == (POOL.name, 9, len(ROWS))
    assert noisy.estimator.coefficients == POOL.estimator.coefficients
    assert noisy.estimator.profile is POOL.estimator.profile, "it goes on learning"
