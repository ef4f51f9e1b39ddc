"""Curves of pools: their figures against the formulas worked out by hand, and against a queue."""

import math
import random
from itertools import pairwise

import pytest

from slagate.pools.grid_build.bands import Bands
from slagate.pools.grid_build.curve import (
    Curve,
    Load,
    decode_batch,
    linear_curve,
    mixed_curves,
    profile_decode,
    profile_prefill,
    queued_prefill,
)
from slagate.workers.profiles.profile import available_profiles, load_profile

TP1 = load_profile("llama-3.1-8b-h100").tp(1)


def load(**changed: float) -> Load:
    given = {"utilisation": 0.5, "replicas": 1, "batch": 64, **changed}
    return Load(**given)  # type: ignore[arg-type]


def test_lines_go_through_their_points_and_straight_on() -> None:
    curve = linear_curve([(100, 10), (200, 20), (400, 100)])
    assert [curve.ms(x) for x in (100, 150, 200, 300, 400)] == [10, 15, 20, 60, 100]
    assert (curve.ms(50), curve.ms(500)) == (5, 140)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_what_is_no_latency_meets_no_target(value: float) -> None:
    """Dynamo's builder took a missing value for 0 ms: a pool that takes no time."""
    assert Curve(lambda _: value, 0.0).ms(1) == math.inf
    assert linear_curve([(0, 10), (10, math.nan), (20, 10)]).ms(15) == math.inf


@pytest.mark.parametrize(
    ("replicas", "variability", "expected"),
    [(1, 0.0, 2.0), (1, 1.0, 4.0), (4, 1.0, 0.8 ** (math.sqrt(10) - 1) / (4 * 0.2))],
)
def test_the_wait_at_four_fifths(replicas: int, variability: float, expected: float) -> None:
    """For one worker it is M/D/1, and with a variability of 1 M/M/1."""
    wait = load(replicas=replicas, variability=variability).wait(0.8)
    assert wait == pytest.approx(expected)


def simulated_wait(rng: random.Random, *, n_servers: int, busy: float, n: int) -> float:
    """Mean wait in services of length 1, for Poisson arrivals to one queue."""
    free_s = [0.0] * n_servers
    now_s = total_s = 0.0
    for _ in range(n):
        now_s += rng.expovariate(busy * n_servers)
        start_s = max(now_s, min(free_s))
        total_s += start_s - now_s
        free_s[free_s.index(min(free_s))] = start_s + 1.0
    return total_s / n


@pytest.mark.parametrize(("n_servers", "busy"), [(1, 0.7), (2, 0.8), (4, 0.9)])
def test_the_wait_is_that_of_a_simulated_queue(n_servers: int, busy: float) -> None:
    seed = 5
    seen = simulated_wait(random.Random(seed), n_servers=n_servers, busy=busy, n=100_000)
    assert load(replicas=n_servers).wait(busy) == pytest.approx(seen, rel=0.15), seed


def test_a_prefill_pool_is_its_profile_and_the_wait() -> None:
    idle = profile_prefill(TP1)
    assert idle.ms(1000) == TP1.prefill_s(1000, 0) * 1000
    assert idle.ms(TP1.kv_capacity_tokens + 1) == math.inf
    assert queued_prefill(idle, load()).ms(1000) == pytest.approx(1.5 * idle.ms(1000))
    behind = queued_prefill(idle, load(isl_tokens=4000))
    assert behind.ms(1000) == pytest.approx(idle.ms(1000) + 0.5 * idle.ms(4000))
    assert queued_prefill(idle, load(utilisation=0.0)).ms(1000) == idle.ms(1000)


def test_a_decode_batch_is_what_the_limit_or_the_cache_leaves() -> None:
    capacity = TP1.kv_capacity_tokens
    assert decode_batch(TP1, load(), 1000) == 32
    assert decode_batch(TP1, load(), capacity / 10) == pytest.approx(5)
    assert decode_batch(TP1, load(), capacity) == 1
    assert decode_batch(TP1, load(), capacity + 1) == 0
    assert profile_decode(TP1, load()).ms(1000) == TP1.itl_s(32, 1000) * 1000
    assert profile_decode(TP1, load()).ms(capacity + 1) == math.inf


def test_a_decode_curve_turns_where_its_batch_is_that_of_a_row() -> None:
    capacity = TP1.kv_capacity_tokens
    curve = profile_decode(TP1, load())
    assert {capacity / 64, capacity / 2, capacity, capacity + 1} <= set(curve.knots)
    for batch in (2, 4, 8, 16):
        turn = capacity / 2 / batch
        assert decode_batch(TP1, load(), turn) == batch
        assert turn in curve.knots


def test_an_agg_pool_has_prefills_between_its_steps() -> None:
    """A worked example: 32 requests of 1000 + 256 tokens, 32/256 prompts a step."""
    ttft, itl = mixed_curves(TP1, load())
    step_ms = TP1.itl_s(32, 1128) * 1000
    prompt_ms = TP1.prefill_s(1000, 0) * 1000
    prefill_ms = prompt_ms * 32 / 256
    assert itl.ms(1000) == pytest.approx(step_ms + prefill_ms)
    busy = prefill_ms / (step_ms + prefill_ms)
    wait_ms = prompt_ms * busy / (2 * (1 - busy))
    assert ttft.ms(1000) == pytest.approx(prompt_ms + wait_ms + step_ms * (1 + 1000 / 8192))
    assert ttft.ms(TP1.kv_capacity_tokens) == itl.ms(TP1.kv_capacity_tokens) == math.inf


def test_more_utilisation_never_makes_a_pool_faster() -> None:
    for tokens in (100, 3000, 40_000):
        for low, high in ((0.1, 0.5), (0.5, 0.9)):
            at = [load(utilisation=u) for u in (low, high)]
            ttft = [queued_prefill(profile_prefill(TP1), one).ms(tokens) for one in at]
            itl = [profile_decode(TP1, one).ms(tokens) for one in at]
            assert ttft[0] < ttft[1]
            assert itl[0] <= itl[1] * 1.1  # the measurements of short contexts are that noisy


@pytest.mark.parametrize("name", available_profiles())
def test_a_curve_is_nearly_straight_between_the_sizes_that_are_looked_at(name: str) -> None:
    """In the widest of bands; the builder looks for crossings as if it were straight there."""
    band = Bands("context_length", (0, 131_072), uniform=True, asked=(0, 131_072))
    for tp in load_profile(name).tp_sizes.values():
        at = load(utilisation=0.7, batch=256)
        for curve, limit in (
            (profile_decode(tp, at), 0.02),
            (queued_prefill(profile_prefill(tp), at), 0.04),
        ):
            for a, b in pairwise(band.samples(0, curve.knots)):
                for share in (0.2, 0.4, 0.6, 0.8):
                    line_ms = curve.ms(a) + share * (curve.ms(b) - curve.ms(a))
                    assert curve.ms(a + share * (b - a)) == pytest.approx(line_ms, rel=limit)
