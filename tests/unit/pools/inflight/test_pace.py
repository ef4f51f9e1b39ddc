"""How fast a row is beside its pool: learnt, drawn to 1, and forgotten with its worker."""

import math
import random

import pytest

from slagate.pools.inflight.engine_queue import Held, Work
from slagate.pools.inflight.table import MAX_PACE, PACE_STEP, UNSEEN_S, LoadTable

NAME = ("w0:1", None)


def table_of_two() -> LoadTable:
    table = LoadTable()
    for at in range(2):
        table.add_row(f"w{at}:1", None)
    table.step_scale = 1.0
    return table


def pace(table: LoadTable, row: int = 0) -> float:
    return table.get_s("pace", row)


@pytest.mark.parametrize("true", [0.5, 0.8, 1.25, 2.0, 3.0])
@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_the_factor_of_decode_steps_is_found_within_twenty_answers(
    *, true: float, scale: float
) -> None:
    table = table_of_two()
    table.step_scale = scale
    for _ in range(20):
        table.observe_steps(0, NAME, true * scale)
    assert pace(table) == pytest.approx(true, rel=0.1, abs=PACE_STEP + 1e-9)
    assert pace(table, 1) == 1.0
    assert table.rows().pace.tolist() == [pace(table), 1.0]


def test_equal_workers_look_alike_but_for_a_step() -> None:
    table, rng = table_of_two(), random.Random(1)
    seen = []
    for _ in range(2000):
        table.observe_steps(0, NAME, rng.lognormvariate(0, 0.05))
        seen.append(pace(table))
    assert max(abs(each - 1.0) for each in seen) <= PACE_STEP + 1e-9
    assert sum(each == 1.0 for each in seen) >= 0.8 * len(seen)


def test_it_has_bounds_and_what_is_no_factor_teaches_nothing() -> None:
    table = table_of_two()
    for factor in (0.0, -1.0, math.nan):
        table.observe_steps(0, NAME, factor)
        assert pace(table) == 1.0
    table.observe_steps(0, NAME, math.inf)
    for _ in range(200):
        table.observe_steps(1, ("w1:1", None), 1e-300)
    assert (pace(table), pace(table, 1)) == (MAX_PACE, 1 / MAX_PACE)


@pytest.mark.parametrize("load", [None, (0, 0.0)])
def test_a_slow_worker_that_gets_nothing_more_is_tried_again(
    load: tuple[int, float] | None,
) -> None:
    table = table_of_two()
    for _ in range(100):
        table.observe_steps(0, NAME, 5.0)
    assert pace(table) == MAX_PACE
    table.set_foreign_load(0, load)
    assert pace(table) == MAX_PACE
    table.now_s = lambda: UNSEEN_S + 1
    for _ in range(60):
        table.set_foreign_load(0, load)  # about once a second
    assert 1.0 < pace(table) < 3.0
    for _ in range(60):
        table.set_foreign_load(0, load)
    assert pace(table) == pytest.approx(1.0, abs=3 * PACE_STEP)


WORK_S = 0.5


class Engine:
    """The first row of a table, with an engine of some factor; its prompts end one by one or in steps."""

    def __init__(self, factor: float) -> None:
        self.factor, self.now_s = factor, 0.0
        self.table = table_of_two()
        self.table.now_s = lambda: self.now_s
        self.table.step_scale = 0.0
        self._number = 0

    def give(self, work_s: float = WORK_S) -> Held:
        self._number += 1
        return self.table.add_lease(0, Work(1000, work_s), number=self._number)

    def compute(self, *step: Held) -> None:
        self.now_s += self.factor * sum(held.work.work_s for held in step)
        for held in step:
            self.table.end_prefill(0, held, is_computed=True)


@pytest.mark.parametrize("true", [0.5, 0.8, 1.0, 1.25, 2.0, 3.0])
@pytest.mark.parametrize("in_a_step", [1, 4])
@pytest.mark.parametrize("keeps_busy", [False, True])
def test_a_rate_is_measured_from_when_prompts_end(
    *, true: float, in_a_step: int, keeps_busy: bool
) -> None:
    engine = Engine(true)
    rng, ahead = random.Random(1), []
    if keeps_busy:
        ahead = [engine.give() for _ in range(in_a_step)]
    for _ in range(40 // in_a_step):
        step = [*ahead, *(engine.give(rng.uniform(0.1, 1.0)) for _ in range(in_a_step))]
        ahead = step[in_a_step:]
        engine.compute(*step[:in_a_step])
        if not ahead:
            engine.now_s += 3.0  # it is idle
    assert pace(engine.table) == pytest.approx(true, rel=0.12, abs=PACE_STEP)


def test_a_worker_that_gets_slower_is_known_within_thirty_of_its_prompts() -> None:
    engine = Engine(1.0)
    for _ in range(100):
        engine.compute(engine.give())
    assert pace(engine.table) == 1.0
    engine.factor = 2.0
    for _ in range(30):
        engine.compute(engine.give())
    assert pace(engine.table) == pytest.approx(1.75, abs=PACE_STEP)


def test_of_a_prompt_that_was_not_computed_no_rate_is_learnt() -> None:
    engine = Engine(1.0)
    for _ in range(10):
        cancelled, behind = engine.give(), engine.give()
        engine.now_s += 7.0
        engine.table.end_prefill(0, cancelled)
        engine.compute(behind)
    assert pace(engine.table) == 1.0


def test_no_rate_is_learnt_while_others_send_to_the_worker_too() -> None:
    engine = Engine(3.0)
    engine.table.set_foreign_load(0, (1, 0.5))
    engine.compute(engine.give())
    assert pace(engine.table) == 1.0
    engine.table.set_foreign_load(0, (0, 0.0))
    engine.compute(engine.give())
    assert pace(engine.table) > 1.5


def test_a_rate_has_bounds_and_is_of_its_pool() -> None:
    engine = Engine(1000.0)
    engine.compute(engine.give())
    assert pace(engine.table) == MAX_PACE
    engine = Engine(0.0)
    for _ in range(100):
        engine.compute(engine.give())
    assert pace(engine.table) == 1 / MAX_PACE
    engine = Engine(2.0)
    engine.table.scale = 2.0
    for _ in range(10):
        engine.compute(engine.give())
    assert pace(engine.table) == 1.0, "as fast as its pool, which is half as fast as profiled"


def test_a_measured_rate_is_forgotten_with_a_restart() -> None:
    engine = Engine(2.0)
    for _ in range(50):
        engine.compute(engine.give())
    engine.table.forget_pace(0)
    assert pace(engine.table) == 1.0
    engine.factor = 1.0
    engine.compute(engine.give())
    assert pace(engine.table) == 1.0


def test_another_worker_in_the_same_row_is_as_fast_as_its_pool() -> None:
    table = table_of_two()
    for _ in range(25):
        table.observe_steps(0, NAME, 2.0)
    table.free_row(0)
    assert table.add_row("new:1", None) == 0
    assert pace(table) == 1.0
    table.observe_steps(0, NAME, 2.0)  # a request of the worker that has left ends
    assert pace(table) == 1.0
    table.observe_steps(0, ("new:1", None), 1.0)
    assert pace(table) == 1.0, "nothing is left of the old one"


def test_a_restart_is_forgotten_wholly() -> None:
    table = table_of_two()
    for _ in range(25):
        table.observe_steps(0, NAME, 2.0)
    table.forget_pace(0)
    assert pace(table) == 1.0
    table.observe_steps(0, NAME, 1.0)
    assert pace(table) == 1.0
