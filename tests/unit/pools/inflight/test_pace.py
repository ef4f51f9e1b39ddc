"""How fast a row is beside its pool: learnt, drawn to 1, and forgotten with its worker."""

import math
import random

import pytest

from slagate.pools.inflight.table import MAX_PACE, PACE_STEP, LoadTable

NAME = ("w0:1", None)


def table_of_two() -> LoadTable:
    table = LoadTable()
    for at in range(2):
        table.add_row(f"w{at}:1", None)
    return table


def pace(table: LoadTable, row: int = 0) -> float:
    return table.get_s("pace", row)


@pytest.mark.parametrize("true", [0.5, 0.8, 1.25, 2.0, 3.0])
def test_a_workers_factor_is_found_within_twenty_five_observations(true: float) -> None:
    table = table_of_two()
    for _ in range(25):
        table.observe_pace(0, NAME, true / pace(table))
    assert pace(table) == pytest.approx(true, rel=0.1, abs=PACE_STEP + 1e-9)
    assert pace(table, 1) == 1.0
    assert table.rows().pace.tolist() == [pace(table), 1.0]


def test_equal_workers_look_alike_but_for_a_step() -> None:
    table, rng = table_of_two(), random.Random(1)
    seen = []
    for _ in range(2000):
        table.observe_pace(0, NAME, rng.lognormvariate(0, 0.05) / pace(table))
        seen.append(pace(table))
    assert max(abs(each - 1.0) for each in seen) <= PACE_STEP + 1e-9
    assert sum(each == 1.0 for each in seen) >= 0.8 * len(seen)


def test_it_has_bounds_and_what_is_no_factor_teaches_nothing() -> None:
    table = table_of_two()
    for factor in (0.0, -1.0, math.nan):
        table.observe_pace(0, NAME, factor)
        assert pace(table) == 1.0
    for _ in range(200):
        table.observe_pace(0, NAME, math.inf)
        table.observe_pace(1, ("w1:1", None), 1e-300)
    assert (pace(table), pace(table, 1)) == (MAX_PACE, 1 / MAX_PACE)


def test_of_an_observation_that_weighs_nothing_nothing_is_learnt() -> None:
    table = table_of_two()
    table.observe_pace(0, NAME, 2.0, 0.0)
    assert pace(table) == 1.0


def test_another_worker_in_the_same_row_is_as_fast_as_its_pool() -> None:
    table = table_of_two()
    for _ in range(25):
        table.observe_pace(0, NAME, 2.0)
    table.free_row(0)
    assert table.add_row("new:1", None) == 0
    assert pace(table) == 1.0
    table.observe_pace(0, NAME, 2.0)  # a request of the worker that has left ends
    assert pace(table) == 1.0
    table.observe_pace(0, ("new:1", None), 1.0)
    assert pace(table) == 1.0, "nothing is left of the old one"


def test_a_restart_is_forgotten_wholly() -> None:
    table = table_of_two()
    for _ in range(25):
        table.observe_pace(0, NAME, 2.0)
    table.forget_pace(0)
    assert pace(table) == 1.0
    table.observe_pace(0, NAME, 1.0)
    assert pace(table) == 1.0
