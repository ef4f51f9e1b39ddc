"""Estimator: how a profile is corrected, when numbers mean seconds, and what the error figures say."""

import json
import math
import random
import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from slagate.pools.estimator.estimator import (
    MIN_OBSERVED,
    MIN_OBSERVED_NOMINAL,
    Coefficients,
    Estimator,
    FrozenEstimator,
)
from slagate.workers.profiles.profile import load_profile

PROFILE = load_profile("llama-3.1-8b-h100").tp(1)
SEEDS = range(5)


def learner() -> Estimator:
    return Estimator(PROFILE, source="profile p tp 1")


def prompt(rng: random.Random) -> int:
    """A prompt's length: 128 to 16k tokens, each order as likely."""
    return int(2 ** rng.uniform(7, 14))


def teach(
    estimator: Estimator,
    truth: Callable[[float], float],
    *,
    n: int,
    seed: int,
    noise: float = 0.1,
    isl_tokens: int | None = None,
) -> list[Coefficients]:
    """TTFTs on idle workers that need `truth(profile seconds)`; the coefficients after each."""
    rng = random.Random(seed)
    seen = []
    for _ in range(n):
        new_tokens = isl_tokens or prompt(rng)
        seconds = truth(PROFILE.prefill_s(new_tokens, 0)) * rng.lognormvariate(0, noise)
        estimator.observe_first_response(estimator.frozen.work_s(new_tokens, 0), seconds)
        seen.append(estimator.frozen.coefficients)
    return seen


def test_a_profile_predicts_as_it_is_until_something_is_learnt() -> None:
    frozen = learner().frozen
    assert (frozen.source, frozen.predicts) == ("profile p tp 1", True)
    assert frozen.prefill_s(1000, 500) == PROFILE.prefill_s(1000, 500)
    assert frozen.itl_s(8, 3000.5) == PROFILE.itl_s(8, 3000.5)


def test_the_offset_is_paid_once_and_the_scale_for_the_queue_too() -> None:
    frozen = FrozenEstimator(PROFILE, "p", Coefficients(2.0, 0.01, 3.0))
    own_s = PROFILE.prefill_s(1000, 500)
    assert frozen.work_s(1000, 500) == own_s
    assert frozen.prefill_s(1000, 500) == pytest.approx(0.01 + 2 * own_s)
    assert frozen.ttft_s(0.3 + own_s) == pytest.approx(0.01 + 0.6 + 2 * own_s)
    assert frozen.ttft_s(np.array([0.0, 0.3])).tolist() == pytest.approx([0.01, 0.61])
    assert frozen.itl_s(8, 3000) == pytest.approx(3 * PROFILE.itl_s(8, 3000))


def test_kv_cache_comes_back_from_the_host_at_the_speed_of_the_link() -> None:
    frozen = FrozenEstimator(PROFILE, "p", Coefficients(2.0, 0.01, 3.0))
    assert frozen.host_s(1000) == pytest.approx(1000 * PROFILE.kv_bytes_per_token / 25e9)
    assert FrozenEstimator().host_s(1000) == pytest.approx(1000 * 131_072 / 25e9)
    assert frozen.host_s(-1) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("scale", "offset_s"), [(2.0, 0.0), (1.0, 0.01), (2.0, 0.01), (0.5, 0.0), (10.0, 0.0)]
)
def test_fifty_observations_are_enough(scale: float, offset_s: float, seed: int) -> None:
    estimator = learner()
    teach(estimator, lambda work_s: offset_s + scale * work_s, n=50, seed=seed)
    frozen = estimator.frozen
    for new_tokens in (200, 1000, 4000, 16_000):
        actual_s = offset_s + scale * PROFILE.prefill_s(new_tokens, 0)
        assert frozen.prefill_s(new_tokens, 0) == pytest.approx(actual_s, rel=0.12)


@pytest.mark.parametrize("seed", SEEDS)
def test_decode_steps_are_learnt_apart_from_prefill(seed: int) -> None:
    estimator, rng = learner(), random.Random(seed)
    for _ in range(50):
        batch, context = rng.randint(1, 100), rng.uniform(100, 20_000)
        actual_s = 1.5 * PROFILE.itl_s(batch, context) * rng.lognormvariate(0, 0.1)
        estimator.observe_itl(batch, context, actual_s)
    learnt = estimator.frozen.coefficients
    assert learnt.prefill == (1, 0)
    assert learnt.itl_scale == pytest.approx(1.5, rel=0.1)


def test_what_every_decode_step_takes_longer_is_learnt_as_a_scale() -> None:
    """There is no offset for it: a coefficient that is left out of receipts must not be learnt."""
    estimator = learner()
    for batch in range(1, 101):
        estimator.observe_itl(batch, 1000, PROFILE.itl_s(batch, 1000) + 0.01)
    frozen = estimator.frozen
    assert frozen.itl_s(90, 1000) == pytest.approx(PROFILE.itl_s(90, 1000) + 0.01, rel=0.1)


def test_a_few_first_observations_change_nothing() -> None:
    estimator = learner()
    before = estimator.frozen
    estimator.observe_first_response(estimator.frozen.work_s(1000, 0), 1.0)
    assert estimator.frozen is before
    estimator = learner()
    seen = teach(estimator, lambda work_s: 2 * work_s, n=MIN_OBSERVED, seed=1)
    assert set(seen[:-1]) == {before.coefficients}
    assert seen[-1] != before.coefficients


def test_what_is_frozen_stays_and_is_the_same_object_until_the_numbers_change() -> None:
    estimator = learner()
    teach(estimator, lambda work_s: 2 * work_s, n=20, seed=1)
    before = estimator.frozen
    predicted_s = before.prefill_s(1000, 0)
    assert estimator.frozen is before
    estimator.observe_first_response(estimator.frozen.work_s(1000, 0), math.nan)
    assert estimator.frozen is before
    estimator.observe_first_response(estimator.frozen.work_s(1000, 0), 1.0)
    assert estimator.frozen is not before
    assert before.prefill_s(1000, 0) == predicted_s != estimator.frozen.prefill_s(1000, 0)


def test_without_a_profile_numbers_only_rank_until_enough_was_seen() -> None:
    estimator = Estimator()
    frozen = estimator.frozen
    assert (frozen.source, frozen.predicts) == ("none", False)
    assert 0 < frozen.prefill_s(100, 0) < frozen.prefill_s(200, 0)
    assert 0 < frozen.itl_s(1, 100) < frozen.itl_s(2, 100) < frozen.itl_s(2, 200)
    teach(estimator, lambda work_s: work_s, n=MIN_OBSERVED_NOMINAL - 1, seed=1)
    assert not estimator.frozen.predicts
    teach(estimator, lambda work_s: work_s, n=1, seed=2)
    frozen = estimator.frozen
    assert (frozen.source, frozen.predicts) == ("learned", True)
    assert (frozen.predicts_prefill, frozen.predicts_itl) == (True, False)
    estimator = Estimator()
    for _ in range(MIN_OBSERVED_NOMINAL):
        estimator.observe_itl(4, 1000, 0.02)
    frozen = estimator.frozen
    assert (frozen.source, frozen.predicts) == ("learned", True)
    assert (frozen.predicts_prefill, frozen.predicts_itl) == (False, True)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_profile_what_is_learnt_is_near_the_truth(seed: int) -> None:
    estimator, rng = Estimator(), random.Random(seed)
    teach(estimator, lambda work_s: 0.02 + 3 * work_s, n=200, seed=seed)
    for _ in range(200):
        batch, context = rng.randint(1, 60), rng.uniform(500, 8000)
        estimator.observe_itl(batch, context, 2 * PROFILE.itl_s(batch, context))
    frozen = estimator.frozen
    assert frozen.predicts_prefill
    assert frozen.predicts_itl
    actual_s = 0.02 + 3 * PROFILE.prefill_s(4000, 0)
    assert frozen.prefill_s(4000, 0) == pytest.approx(actual_s, rel=0.25)
    assert frozen.itl_s(30, 4000) == pytest.approx(2 * PROFILE.itl_s(30, 4000), rel=0.25)


@pytest.mark.parametrize("bad", [-0.001, math.nan, math.inf, -math.inf, 1e6])
def test_what_is_no_time_is_not_learnt_from(bad: float) -> None:
    estimator = learner()
    estimator.observe_first_response(estimator.frozen.work_s(1000, 0), bad)
    estimator.observe_first_response(estimator.frozen.work_s(1000, 0), 0.1, queued_s=bad - 1)
    estimator.observe_itl(4, 1000, bad)
    assert estimator.n_observed == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_one_stall_hardly_moves_the_prediction(seed: int) -> None:
    estimator = learner()
    teach(estimator, lambda work_s: work_s, n=200, seed=seed)
    before_s = estimator.frozen.prefill_s(2000, 0)
    estimator.observe_first_response(estimator.frozen.work_s(2000, 0), 100 * before_s)
    assert estimator.frozen.prefill_s(2000, 0) == pytest.approx(before_s, rel=0.03)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_first_request_is_forgotten(seed: int) -> None:
    estimator = learner()
    estimator.observe_first_response(estimator.frozen.work_s(100, 0), 8.0)
    teach(estimator, lambda work_s: work_s, n=50, seed=seed)
    frozen = estimator.frozen
    assert frozen.prefill_s(2000, 0) == pytest.approx(PROFILE.prefill_s(2000, 0), rel=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_that_become_slower_are_followed(seed: int) -> None:
    estimator = learner()
    teach(estimator, lambda work_s: work_s, n=1000, seed=seed)
    teach(estimator, lambda work_s: 2 * work_s, n=100, seed=seed)
    actual_s = 2 * PROFILE.prefill_s(2000, 0)
    assert estimator.frozen.prefill_s(2000, 0) == pytest.approx(actual_s, rel=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_prompts_that_are_all_alike_let_nothing_drift(seed: int) -> None:
    """They say nothing of scale against offset, so both stay about where they were."""
    seen = teach(learner(), lambda work_s: work_s, n=3000, seed=seed, isl_tokens=4000)[100:]
    assert max(c.prefill_offset_s for c in seen) < 0.002
    assert 0.9 < min(c.prefill_scale for c in seen) <= max(c.prefill_scale for c in seen) < 1.1


@pytest.mark.parametrize("seed", SEEDS)
def test_queues_that_nobody_counted_stay_out_of_the_coefficients(seed: int) -> None:
    estimator, rng = learner(), random.Random(seed)
    for i in range(2000):
        new_tokens = prompt(rng)
        seconds = PROFILE.prefill_s(new_tokens, 0) * rng.lognormvariate(0, 0.1)
        if rng.random() < 0.3:
            seconds += rng.expovariate(1 / 0.1)
        estimator.observe_first_response(estimator.frozen.work_s(new_tokens, 0), seconds)
        if i >= 100:
            scale, offset_s = estimator.frozen.coefficients.prefill
            assert 0.85 < scale < 1.35
            assert offset_s < 0.01


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("utilisation", [0.7, 0.95, 1.5])
def test_nothing_swings_in_a_queue_that_was_predicted_with_it(
    utilisation: float, seed: int
) -> None:
    """One worker, first come first served, twice as slow as its profile; its queue is ours alone.

    The predicted queue counts the head in full, also where it is nearly done.
    """
    estimator, rng = learner(), random.Random(seed)
    mean_s = statistics.fmean(2 * PROFILE.prefill_s(prompt(rng), 0) for _ in range(1000))
    now_s = free_s = 0.0
    waiting: list[tuple[float, float, int, float, float]] = []  # first answer at, work, observation
    for i in range(1500):
        new_tokens = prompt(rng)
        busy_s = 2 * PROFILE.prefill_s(new_tokens, 0) * rng.lognormvariate(0, 0.05)
        now_s += rng.expovariate(utilisation / mean_s)
        for done in [entry for entry in waiting if entry[0] <= now_s]:
            estimator.observe_first_response(
                estimator.frozen.work_s(done[2], 0), done[4], queued_s=done[3]
            )
        waiting = [entry for entry in waiting if entry[0] > now_s]
        queued_s = sum(entry[1] for entry in waiting)
        free_s = max(now_s, free_s) + busy_s
        work_s = estimator.frozen.work_s(new_tokens, 0)
        waiting.append((free_s + 0.01, work_s, new_tokens, queued_s, free_s + 0.01 - now_s))
        if i >= 300:
            scale, offset_s = estimator.frozen.coefficients.prefill
            assert 1.4 < scale < 2.2
            assert offset_s < 0.03


def test_an_engine_that_takes_no_time_leaves_the_order_of_prompts() -> None:
    estimator = learner()
    for _ in range(200):
        estimator.observe_first_response(estimator.frozen.work_s(1000, 0), 0.0)
        estimator.observe_itl(4, 1000, 0.0)
    frozen = estimator.frozen
    seconds = [frozen.prefill_s(new_tokens, 0) for new_tokens in (10, 100, 1000, 10_000)]
    assert all(0 < a < b < 1 for a, b in pairwise(seconds))
    assert 0 < frozen.itl_s(4, 1000) < frozen.itl_s(64, 10_000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": None}, "source must be text"),
        ({"profile": 3}, "profile must be a table"),
        ({"profile": {}}, "decode: Field required"),
        ({"profile": PROFILE.to_json() | {"prefill": [[0, 0, 1.0]]}}, r"prefill\.0\.0"),
        ({"profile": PROFILE.to_json() | {"more": 1}}, "more: Extra"),
    ],
)
def test_a_table_that_cannot_be_read_names_its_field(change: dict[str, Any], message: str) -> None:
    table = learner().frozen.table_json() | change
    with pytest.raises(ValueError, match=message):
        FrozenEstimator.from_json(table, Coefficients())


@pytest.mark.parametrize("field", Coefficients.__struct_fields__)
@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_coefficient_that_is_no_factor_is_refused_by_name(field: str, bad: float) -> None:
    with pytest.raises(ValueError, match=field):
        FrozenEstimator(PROFILE, "p", Coefficients(**{field: bad}))


def test_the_table_is_plain_json_and_the_same_whatever_was_learnt() -> None:
    estimator = learner()
    before = json.dumps(estimator.frozen.table_json())
    teach(estimator, lambda work_s: 2 * work_s, n=20, seed=1)
    assert json.dumps(estimator.frozen.table_json()) == before
    assert Estimator().frozen.table_json() == {"source": "none", "profile": None}
