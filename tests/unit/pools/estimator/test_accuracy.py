"""How right predictions were, and what they are based on where they are off."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from slagate.pools.estimator.accuracy import EACH, MAX_PAIRS, MIN_PAIRS, MIN_S, Accuracy
from slagate.pools.estimator.estimator import Estimator
from support.builders import profiled

SPEED = profiled()
assert SPEED.profile is not None
PROFILE = SPEED.profile
SEEDS = range(8)
SHARE = 0.8


def filled(learnt: float, profile: float, *, n: int = MIN_PAIRS, **more: bool) -> Accuracy:
    """After `n` outcomes that were predicted so many times too long or too short."""
    accuracy = Accuracy(has_profile=more.get("has_profile", True))
    put(accuracy, learnt, profile, n=n)
    return accuracy


def put(accuracy: Accuracy, learnt: float, profile: float, *, n: int = MAX_PAIRS) -> str:
    """Outcomes of very different length, so that no calibration makes up for the factors."""
    for number in range(n):
        actual_s, too_long = math.exp((8, -8)[number % 2]), (1, -1)[number // 2 % 2]
        predicted_s = [actual_s * factor**too_long for factor in (learnt, profile)]
        accuracy.add_pair(actual_s, predicted_s[accuracy.basis == "profile"], *predicted_s)
    return accuracy.basis


def test_figures_are_of_the_predictions_as_they_were_made() -> None:
    accuracy = Accuracy(has_profile=True)
    assert accuracy.figures(SHARE) is None
    for actual_s in (0.25, 0.5, 1.0, 0.5 / SHARE, 0.6 / SHARE):
        accuracy.add_pair(actual_s, 0.5, 9.0, 9.0)
    figures = accuracy.figures(SHARE)
    assert figures is not None
    assert figures.n_pairs == 5
    assert figures.median_error == pytest.approx(1 - 0.5 / (0.6 / SHARE))
    quotients = (2.0, 1.0, 0.5, SHARE, SHARE / 1.2)
    assert figures.bias == pytest.approx(math.prod(quotients) ** 0.2 - 1)
    assert figures.coverage == pytest.approx(3 / 5)


def test_only_the_newest_pairs_count() -> None:
    accuracy = filled(3.0, 3.0, n=1000)
    put(accuracy, 1.0, 1.0)
    assert accuracy.figures(SHARE) == (MAX_PAIRS, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("at", range(4))
def test_what_is_no_time_is_no_pair(bad: float, at: int) -> None:
    accuracy, seconds = Accuracy(has_profile=True), [1.0] * 4
    seconds[at] = bad
    assert not accuracy.add_pair(*seconds)
    assert accuracy.figures(SHARE) is None


def test_what_takes_no_time_counts_as_what_a_clock_can_resolve() -> None:
    accuracy = Accuracy(has_profile=True)
    accuracy.add_pair(0.0, 2 * MIN_S, 0.0, 0.0)
    figures = accuracy.figures(SHARE)
    assert figures is not None
    assert figures.median_error == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("learnt", "profile", "basis"),
    [
        (1.5, 1.0, "learnt"),  # not far enough off
        (1.7, 1.0, "profile"),
        (1 / 1.7, 1.0, "profile"),
        (1.7, 1.6, "learnt"),  # hardly better
        (1.8, 3.0, "learnt"),
        (5.0, 1.5, "profile"),
        (2.3, 2.3, "grid"),
        (1 / 2.3, 3.0, "grid"),
        (100.0, 0.01, "grid"),
    ],
)
def test_predictions_that_are_off_give_way_to_the_profile_and_then_to_the_grid(
    learnt: float, profile: float, basis: str
) -> None:
    assert filled(learnt, profile, n=MIN_PAIRS - 1).basis == "learnt", "too few to tell"
    assert filled(learnt, profile).basis == basis


def test_without_a_profile_there_is_nothing_between_what_was_learnt_and_the_grid() -> None:
    assert filled(1.8, 1.0, has_profile=False).basis == "learnt"
    assert filled(2.3, 1.0, has_profile=False).basis == "grid"


def test_it_comes_back_later_than_it_fell_back() -> None:
    accuracy = filled(1.7, 1.1)
    assert accuracy.basis == "profile"
    assert put(accuracy, 1.5, 1.3) == "profile"
    assert put(accuracy, 1.4, 1.3) == "learnt"
    assert put(accuracy, 2.3, 2.3) == "grid"
    assert put(accuracy, 1.9, 1.9) == "grid"
    assert put(accuracy, 1.9, 1.4) == "profile"
    assert put(accuracy, 2.3, 2.3) == "grid"
    assert put(accuracy, 1.4, 1.9) == "learnt"


def test_it_tells_that_the_basis_has_changed_once() -> None:
    accuracy = Accuracy(has_profile=True)
    told = [accuracy.add_pair(1.0, 3.0, 3.0, 3.0) for _ in range(MAX_PAIRS)]
    assert told == [n == MIN_PAIRS for n in range(1, MAX_PAIRS + 1)]
    assert MIN_PAIRS % EACH == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_of_many_noisy_predictions_is_calibrated(seed: int) -> None:
    """What takes about a second is all alike to them; what takes from 10 ms to 100 s is not."""
    for spread, slopes in ((0.05, (0.0, 0.2)), (2.0, (0.8, 1.0))):
        accuracy, rng, taken = Accuracy(has_profile=True), random.Random(seed), []
        for _ in range(2 * MAX_PAIRS):
            actual_s = rng.lognormvariate(0, spread)
            predicted_s = min(actual_s * rng.lognormvariate(0, 0.6) for _ in range(4))
            now = (1 / 9, 0.0)
            accuracy.add_pair(actual_s, predicted_s, predicted_s, 9 * predicted_s, now=now)
            taken.append((predicted_s, actual_s))
        line = accuracy.calibration
        assert line is not None
        assert slopes[0] <= line.slope <= slopes[1]
        predicted, actual = np.array(taken[-MAX_PAIRS:]).T
        assert np.median(predicted / actual) < 0.7
        assert np.median(line.typical_s(predicted) / actual) == pytest.approx(1.0, abs=0.2)
        careful, hopeful = line.parts(predicted, 1.0)
        assert np.mean(careful >= actual) == pytest.approx(0.84, abs=0.1)
        assert np.mean(hopeful >= actual) == pytest.approx(0.38, abs=0.1)
        assert accuracy.basis == "learnt"


def test_right_predictions_are_not_calibrated_nor_any_more_once_they_are() -> None:
    accuracy, rng = Accuracy(has_profile=True), random.Random(1)
    for too_long, is_calibrated in ((1.2, False), (1.3, True), (1.2, True), (1.1, False)):
        for _ in range(MAX_PAIRS):
            actual_s = rng.lognormvariate(0, 1)
            accuracy.add_pair(actual_s, *[too_long * actual_s] * 3)
        assert (accuracy.calibration is not None) is is_calibrated


def test_a_line_that_is_no_nearer_still_tells_how_far_off_predictions_are() -> None:
    accuracy = filled(1.5, 1.5)
    line = accuracy.calibration
    assert line is not None
    assert line.slope == pytest.approx(1.0, abs=0.01)
    assert line.offset == pytest.approx(0.0, abs=0.02)
    assert line.spread == pytest.approx(math.log(1.5), rel=0.01)
    assert accuracy.basis == "learnt"


def test_a_line_that_a_few_outliers_draw_is_none() -> None:
    """Short prompts that come behind long ones take ten times as long, two in five of them."""
    accuracy, rng = Accuracy(has_profile=True), random.Random(1)
    for number in range(MAX_PAIRS):
        actual_s = rng.lognormvariate(0, 1)
        predicted_s = actual_s * (0.75 if number % 5 < 3 else 0.1)
        accuracy.add_pair(actual_s, predicted_s, predicted_s, predicted_s)
    assert accuracy.calibration is None


@pytest.mark.parametrize("scale", [0.4, 2.0, 3.0])
def test_a_learnt_speed_is_not_put_right_once_more_where_others_follow(scale: float) -> None:
    """What follows after the leg's first response does not change with the pool's speed."""
    estimator, rng, later_s = Estimator(PROFILE, source="p"), random.Random(1), 0.03
    for number in range(2 * MAX_PAIRS):
        work_s = PROFILE.prefill_s(rng.randint(50, 900), 0)
        frozen = estimator.frozen
        if number >= MAX_PAIRS:
            estimator.pair_ttft(frozen, frozen.ttft_s(work_s), later_s, scale * work_s + later_s)
        estimator.observe_first_response(work_s, scale * work_s)
    assert estimator.frozen.coefficients.prefill_scale == pytest.approx(scale, rel=0.05)
    assert estimator.ttft.calibration is None


def test_what_is_always_as_far_off_is_right_when_it_is_calibrated() -> None:
    accuracy = Accuracy(has_profile=True)
    for _ in range(MIN_PAIRS):
        accuracy.add_pair(1.0, 3.0, 3.0, 5.0, now=(0.6, 0.0))
    assert accuracy.basis == "learnt"
    assert accuracy.calibration is not None
    assert accuracy.calibration.typical_s(np.array([3.0])) == pytest.approx([1.0])


def test_what_was_learnt_meanwhile_is_put_right_once() -> None:
    """A burst is predicted before its first request has ended: three times too short."""
    estimator = Estimator(PROFILE, source="p")
    frozen, rng = estimator.frozen, random.Random(1)
    works = [PROFILE.prefill_s(rng.randint(500, 8000), 0) for _ in range(MIN_PAIRS)]
    for work_s in works:
        estimator.observe_first_response(work_s, 3 * work_s)
        estimator.pair_ttft(frozen, work_s, 0.0, 3 * work_s)
    assert estimator.frozen.coefficients.prefill_scale == pytest.approx(3.0, rel=0.05)
    assert estimator.ttft.calibration is None


def test_a_line_holds_as_far_as_there_are_pairs() -> None:
    """Beyond that, what is ten times as long takes ten times as long: a queue is never out of sight."""
    accuracy, rng = Accuracy(has_profile=True), random.Random(1)
    for _ in range(MAX_PAIRS):
        predicted_s = rng.lognormvariate(0, 0.6)
        accuracy.add_pair(0.5, predicted_s, predicted_s, predicted_s)
    line = accuracy.calibration
    assert line is not None
    assert line.slope < 0.1
    low, high = line.typical_s(np.exp([line.low, line.high]))
    assert low == pytest.approx(high, rel=0.2) == pytest.approx(0.5, rel=0.1)
    far = np.exp([line.low - 3, line.high + 5])
    assert line.typical_s(far) == pytest.approx([low * math.exp(-3), high * math.exp(5)])
    assert line.typical_s(np.array([0.0, math.inf]))[1] == math.inf


def test_predictions_that_are_all_the_same_tell_nothing() -> None:
    accuracy, rng = Accuracy(has_profile=True), random.Random(1)
    for _ in range(MAX_PAIRS):
        accuracy.add_pair(rng.lognormvariate(1, 0.2), 0.3, 0.3, 0.3)
    assert accuracy.calibration is not None
    assert accuracy.calibration.slope == 0.0


def seen_bases(
    actual_of: Callable[[int], float], *, n: int, seed: int, noise: float
) -> tuple[list[str], Estimator]:
    """The basis after each of `n` prompts that take `actual_of` times the profile.

    Each is learnt once the next 20 were sent. `noise` is on what was predicted, another for each prompt.
    """
    estimator, rng = Estimator(PROFILE, source="p"), random.Random(seed)
    bases, sent = [], []
    for number in range(n):
        work_s = PROFILE.prefill_s(rng.randint(500, 8000), 0)
        actual_s = actual_of(number) * work_s * rng.lognormvariate(0, 0.2)
        sent.append((estimator.frozen, work_s, actual_s))
        if len(sent) > 20:
            frozen, work_s, actual_s = sent.pop(0)
            predicted_s = frozen.ttft_s(work_s * rng.lognormvariate(0, noise))
            estimator.pair_ttft(frozen, predicted_s, 0.0, actual_s)
            estimator.observe_first_response(work_s, actual_s)
        bases.append(estimator.frozen.ttft_basis)
    return bases, estimator


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_of_60_percent_is_no_reason_to_fall_back(seed: int) -> None:
    bases, estimator = seen_bases(lambda _: 1.0, n=5000, seed=seed, noise=0.6)
    figures = estimator.ttft.figures(SHARE)
    assert figures is not None
    assert 0.3 < figures.median_error < 0.6
    assert set(bases) == {"learnt"}


@pytest.mark.parametrize("factor", [0.5, 2.0], ids=["twice as fast", "half as fast"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_pool_whose_speed_has_changed_once_is_learnt_before_it_falls_back(
    seed: int, factor: float
) -> None:
    bases, estimator = seen_bases(
        lambda number: factor if number >= 300 else 1.0, n=900, seed=seed, noise=0.1
    )
    assert set(bases) == {"learnt"}
    assert estimator.frozen.coefficients.prefill_scale == pytest.approx(factor, rel=0.15)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pool_that_cannot_be_learnt_goes_to_the_grid_and_comes_back(seed: int) -> None:
    """Each 10 prompts it is 30 times as fast as before or after; from the 600th on it is steady."""
    bases, _ = seen_bases(
        lambda number: (1 / 5.5, 5.5)[number // 10 % 2] if number < 600 else 1.0,
        n=1200,
        seed=seed,
        noise=0.0,
    )
    assert bases[599] == "grid"
    assert bases[600 + MAX_PAIRS + 50] == "learnt"
    assert sum(one != other for one, other in pairwise(bases)) <= 4


def test_what_was_learnt_and_is_off_is_not_in_force_while_it_is_learnt_on() -> None:
    estimator = Estimator(PROFILE, source="p")
    work_s, itl_s = PROFILE.prefill_s(4000, 0), PROFILE.itl_s(8, 1000)
    for _ in range(50):
        estimator.observe_first_response(work_s, 3 * work_s)
        estimator.observe_itl(8, 1000, 3 * itl_s)
    learnt = estimator.frozen.learnt
    assert learnt == estimator.frozen.coefficients
    assert learnt.itl_scale == pytest.approx(3.0, rel=0.05)
    for _ in range(MIN_PAIRS):
        frozen = estimator.frozen
        estimator.pair_ttft(frozen, frozen.ttft_s(work_s), 0.01, work_s + 0.01)
    frozen = estimator.frozen
    assert (frozen.ttft_basis, frozen.itl_basis) == ("profile", "learnt")
    assert frozen.coefficients.prefill == (1.0, 0.0)
    assert frozen.coefficients.itl_scale == learnt.itl_scale
    assert frozen.learnt == learnt
    for _ in range(MIN_PAIRS):
        estimator.pair_itl(estimator.frozen, 3 * itl_s, itl_s)
    assert estimator.frozen.coefficients.itl_scale == 1.0
    # By the profile, what would have been predicted of what was learnt goes on being paired.
    for _ in range(MAX_PAIRS):
        frozen = estimator.frozen
        estimator.pair_ttft(frozen, frozen.ttft_s(work_s), 0.0, learnt.prefill_scale * work_s)
        estimator.pair_itl(frozen, frozen.itl_s(8, 1000), learnt.itl_scale * itl_s)
    assert estimator.frozen.coefficients == learnt
    assert (estimator.frozen.ttft_basis, estimator.frozen.itl_basis) == ("learnt", "learnt")
