"""What a fleet could do for a trace: who can be served in time, and a schedule that knows all."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from slagate.router.replay.classes import RequestClass
from slagate.router.replay.client import Ask
from slagate.router.replay.fleet import IDEAL, REAL, SimFleet, load_fleet
from slagate.router.replay.oracle import feasible, scheduled
from slagate.router.replay.trace import TraceRow

SPLIT = Path(__file__).resolve().parents[4] / "configs/suites/fleets/split.json"


@pytest.fixture(scope="module")
def split() -> SimFleet:
    return load_fleet(SPLIT)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SimFleet:
    """One worker of a stage, a GPU each."""
    file = json.loads(SPLIT.read_text())
    for pool in file["pools"].values():
        pool["tp"], pool["replicas"] = 1, 1
    for stage in ("prefill", "decode"):
        names = file.pop(f"{stage}_pools")
        file |= {f"num_{stage}_pools": 1, f"{stage}_pools": names[:1]}
        mapping = file[f"{stage}_pool_selection_strategy"][f"{stage}_pool_mapping"]
        file[f"{stage}_pool_selection_strategy"][f"{stage}_pool_mapping"] = [
            [0 for _ in row] for row in mapping
        ]
        del file["pools"][names[1]]
    path = tmp_path_factory.mktemp("fleet") / "small.json"
    path.write_text(json.dumps(file))
    return load_fleet(path)


def ask(
    number: int,
    *,
    isl: int = 4096,
    at_s: float = 0.0,
    ttft_s: float = 10.0,
    itl_s: float = 0.1,
    osl: int = 20,
) -> Ask:
    sla = RequestClass("c", 1.0, ttft_ms=ttft_s * 1000, itl_ms=itl_s * 1000)
    row = TraceRow(number, at_s, isl, osl)
    return Ask(row, sla, at_s, np.zeros(0, np.uint32), osl, osl, ignore_eos=True)


def test_one_request_on_an_idle_fleet_is_met_where_it_is_feasible(split: SimFleet) -> None:
    asks = [ask(0), ask(1, isl=30_000, ttft_s=1.0), ask(2, itl_s=0.003), ask(3, isl=200_000)]
    assert feasible(split, asks, IDEAL) == [True, False, False, False]
    for number, one in enumerate(asks):
        assert scheduled(split, [one], IDEAL, 1) == [number == 0]


def test_as_many_as_fit_before_their_due_times(small: SimFleet) -> None:
    """A prompt of 4,096 takes this worker 0.27 s: of ten at once, due after a second, three are in time."""
    asks = [ask(number, ttft_s=1.0) for number in range(10)]
    assert sum(scheduled(small, asks, IDEAL, 1)) == 3


def test_the_longest_goes_where_not_all_are_in_time(small: SimFleet) -> None:
    """One of 8,192, 0.59 s, and three of 2,048, 0.14 s each: without the long one all others are met."""
    asks = [ask(0, isl=8192, ttft_s=0.7), *(ask(n, isl=2048, ttft_s=0.7) for n in (1, 2, 3))]
    assert scheduled(small, asks, IDEAL, 1) == [False, True, True, True]


def test_who_is_due_later_waits(small: SimFleet) -> None:
    """In order of arrival the second would be late; both are met."""
    asks = [ask(0, isl=8192, ttft_s=9.0), ask(1, isl=2048, ttft_s=0.25)]
    assert scheduled(small, asks, IDEAL, 1) == [True, True]


def test_a_batch_makes_nobody_late(small: SimFleet) -> None:
    """Alone a step takes 12 ms; with as many requests as come here it would take more than the target."""
    asks = [ask(n, isl=8192, ttft_s=9.0, itl_s=0.0135, osl=2000) for n in range(12)]
    assert feasible(small, asks, IDEAL) == [True] * 12
    met = sum(scheduled(small, asks, IDEAL, 1))
    assert 1 <= met < 12


def random_asks(seed: int, load: float) -> list[Ask]:
    rng = random.Random(seed)
    at_s, asks = 0.0, []
    for number in range(80):
        at_s += rng.expovariate(3.0 * load)
        ttft_s, itl_s = rng.choice([(1.0, 0.015), (4.0, 0.03), (20.0, 0.1)])
        isl, osl = rng.choice([500, 3000, 9000, 20_000]), rng.choice([1, 50, 300])
        asks.append(ask(number, isl=isl, at_s=at_s, ttft_s=ttft_s, itl_s=itl_s, osl=osl))
    return asks


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_is_the_same_again_and_less_under_more_load(split: SimFleet, seed: int) -> None:
    shares = []
    for load in (1.0, 4.0, 16.0):
        asks = random_asks(seed, load)
        met = scheduled(split, asks, REAL, seed)
        assert met == scheduled(split, asks, REAL, seed)
        shares.append(sum(met))
    assert shares[0] >= shares[1] >= shares[2] > 0
    assert shares[0] > shares[2]
