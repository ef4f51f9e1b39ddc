"""Estimator: arrays give the scalar's numbers, a receipt gives them again, nothing observed breaks it."""

import json
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from slagate.pools.estimator.estimator import Coefficients, Estimator, FrozenEstimator
from slagate.pools.estimator.fit import MAX_OFFSET_S, MAX_SCALE, MIN_SCALE
from slagate.workers.profiles.profile import TpProfile, available_profiles, load_profile

PROFILES = [None] + [
    load_profile(name).tp(size)
    for name in available_profiles()
    for size in load_profile(name).tp_sizes
]
Floats = npt.NDArray[np.float64]

profiles = st.sampled_from(PROFILES)
coefficients = st.builds(
    Coefficients,
    st.floats(MIN_SCALE, MAX_SCALE),
    st.floats(0, MAX_OFFSET_S),
    st.floats(MIN_SCALE, MAX_SCALE),
)
rows_of_tables = st.sampled_from([-1, 1, 2, 64, 512, 2048, 8192, 16_384, 32_768, 131_072])
tokens = st.integers(-1, 300) | st.integers(0, 2_000_000) | rows_of_tables | st.floats(0, 3e5)
points = st.lists(st.tuples(tokens, tokens), max_size=24)
anything = st.floats() | st.floats(0, 10) | st.floats(0, 1e-3)


def same(
    scalar: Callable[[float, float], float],
    many: Callable[[Floats, Floats], Floats],
    at: list[tuple[float, float]],
) -> None:
    x = np.array([point[0] for point in at], np.float64)
    y = np.array([point[1] for point in at], np.float64)
    one_by_one = np.array([scalar(*point) for point in at], np.float64)
    x_before, y_before = x.copy(), y.copy()
    assert many(x, y) == pytest.approx(one_by_one, rel=1e-12, abs=0)
    assert (x == x_before).all()
    assert (y == y_before).all()


@settings(max_examples=150)
@given(profile=profiles, learnt=coefficients, at=points)
def test_arrays_give_the_numbers_of_single_points(
    profile: TpProfile | None, learnt: Coefficients, at: list[tuple[float, float]]
) -> None:
    """For arrays that are looped over, and for those that numpy takes whole; inputs stay as they are."""
    frozen = FrozenEstimator(profile, "p", learnt)
    for few_or_many in (at[:4], at * 3):
        same(frozen.work_s, frozen.work_many, few_or_many)
        same(frozen.work_s, frozen.work_many, few_or_many)


@settings(max_examples=50)
@given(profile=profiles, at=st.tuples(tokens, tokens), others=points)
def test_equal_points_of_one_array_tie_exactly(
    profile: TpProfile | None, at: tuple[float, float], others: list[tuple[float, float]]
) -> None:
    """Equal workers must tie to the last bit wherever they stand, or one would always win."""
    frozen = FrozenEstimator(profile)
    x, y = np.array([at, *others, at, at], np.float64).T
    sizes = np.maximum(x, 1.0).astype(np.int64)
    for seconds in (frozen.work_many(x, y), frozen.itl_of_batches(sizes, y)):
        assert seconds[0] == seconds[-1] == seconds[-2]


@settings(max_examples=50)
@given(profile=profiles, learnt=coefficients, at=points)
def test_a_receipt_predicts_the_same_to_the_last_bit(
    profile: TpProfile | None, learnt: Coefficients, at: list[tuple[float, float]]
) -> None:
    frozen = FrozenEstimator(profile, "profile p tp 1" if profile else "none", learnt)
    table, numbers = json.loads(json.dumps([frozen.table_json(), astuple(learnt)]))
    again = FrozenEstimator.from_json(table, Coefficients(*numbers))
    assert replace(again, profile=None) == replace(frozen, profile=None)
    assert (again.source, again.predicts_prefill, again.predicts_itl) == (
        frozen.source,
        frozen.predicts_prefill,
        frozen.predicts_itl,
    )
    assert again.table_json() == frozen.table_json()
    for new_tokens, cached_tokens in at:
        assert again.prefill_s(new_tokens, cached_tokens) == frozen.prefill_s(
            new_tokens, cached_tokens
        )
        assert again.itl_s(new_tokens, cached_tokens) == frozen.itl_s(new_tokens, cached_tokens)
        assert again.host_s(cached_tokens) == frozen.host_s(cached_tokens)
    x, y = np.array(at, np.float64).reshape(-1, 2).T
    assert (again.work_many(x, y) == frozen.work_many(x, y)).all()
    sizes = np.maximum(x, 1.0).astype(np.int64)
    assert (again.itl_of_batches(sizes, y) == frozen.itl_of_batches(sizes, y)).all()


@settings(max_examples=150)
@given(
    profile=profiles,
    seen=st.lists(st.tuples(tokens, tokens, anything, anything), min_size=1, max_size=20),
    n_rounds=st.integers(1, 8),
)
def test_whatever_is_observed_predictions_stay_finite_and_repeat(
    profile: TpProfile | None,
    seen: list[tuple[int, int, float, float]],
    n_rounds: int,
) -> None:
    first, second = Estimator(profile, source="p"), Estimator(profile, source="p")
    for estimator in (first, second):
        for x, y, queued_s, seconds in seen * n_rounds:
            estimator.observe_first_response(
                estimator.frozen.work_s(x, y), seconds, queued_s=queued_s
            )
            estimator.observe_itl(x, y, seconds)
    frozen = first.frozen
    assert frozen.coefficients == second.frozen.coefficients
    assert MIN_SCALE <= frozen.coefficients.prefill_scale <= MAX_SCALE
    assert 0 <= frozen.coefficients.prefill_offset_s <= MAX_OFFSET_S
    assert MIN_SCALE <= frozen.coefficients.itl_scale <= MAX_SCALE
    for x, y in ((0, 0), (1, 0), (1000, 500), (2_000_000, 2_000_000)):
        assert 0 <= frozen.prefill_s(x, y) < math.inf
        assert 0 <= frozen.itl_s(x, y) < math.inf
