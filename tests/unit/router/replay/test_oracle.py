"""What a fleet could do for a trace: who can be served in time, and a schedule that knows all."""

import json
import random
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from slagate.router.replay.classes import RequestClass
from slagate.router.replay.client import Ask
from slagate.router.replay.fleet import IDEAL, REAL, SimFleet, Slow, load_fleet
from slagate.router.replay.oracle import CONTEXT_TOKENS, feasible, scheduled
from slagate.router.replay.schedules import ITERATION_TOKENS
from slagate.router.replay.trace import TraceRow
from slagate.workers.serving.sim import SimOptions
from slagate.workers.sim.args import parse_args

FLEETS = Path(__file__).resolve().parents[4] / "configs/suites/fleets"
AT_ONCE = IDEAL._replace(latency_s=0.0)
MORE_S = 0.01  # than a sum of round seconds, for targets

# On one GPU a prompt of 1,000 tokens takes a second, and a step 10 ms for each request of the batch; in the
# sizes 10 and 20, which are as fast as 1 and 2, hardly more for several.
PROFILE = {
    "schema": 1,
    "model": "round",
    "system": "none",
    "engine": "none",
    "source": "made up",
    "prefill_columns": ["new_tokens", "cached_tokens", "ms"],
    "decode_columns": ["batch_size", "context_tokens", "itl_ms"],
    "kv_bytes_per_token": 1,
    "tp": {
        str(tp): {
            "kv_capacity_tokens": 100_000,
            "prefill": [[1000, 0, 1000.0 / gpus], [2000, 0, 2000.0 / gpus]],
            "decode": [[1, 1, 10.0 / gpus], [2, 1, of_two_ms / gpus]],
        }
        for tp, gpus, of_two_ms in ((1, 1, 20.0), (2, 2, 20.0), (10, 1, 10.1), (20, 2, 10.1))
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fleets")
    (path / "round.json").write_text(json.dumps(PROFILE), encoding="utf-8")
    return path


def fleet_of(
    folder: Path,
    pools: Mapping[str, Mapping[str, object]],
    ranks: Mapping[str, int] | None = None,
) -> SimFleet:
    """A fleet of pools of the round profile, by name: prefill (p...), decode (d...), or both (a...)."""
    file: dict[str, object] = {
        "mode": "agg" if any(name.startswith("a") for name in pools) else "disagg",
        "pools": {
            name: {"profile": str(folder / "round.json"), "tp": 1, **pool}
            for name, pool in pools.items()
        },
    }
    axes = {
        "prefill": ("isl_edges", "ttft_edges_ms"),
        "decode": ("context_length_edges", "itl_edges_ms"),
        "agg": ("ttft_edges_ms", "itl_edges_ms"),
    }
    for stage, (rows, columns) in axes.items():
        names = [name for name in pools if name.startswith(stage[0])]
        if names:
            file[f"num_{stage}_pools"], file[f"{stage}_pools"] = len(names), names
            file[f"{stage}_pool_selection_strategy"] = {
                rows: [0, 1000],
                columns: [0, 1000],
                f"{stage}_pool_mapping": [[0]],
            }
    path = folder / f"{'-'.join(pools)}.json"
    path.write_text(json.dumps(file), encoding="utf-8")
    return load_fleet(path, ranks or {})


@pytest.fixture(scope="module")
def split() -> SimFleet:
    return load_fleet(FLEETS / "split.json")


@pytest.fixture(scope="module")
def single(folder: Path) -> SimFleet:
    """One worker of a stage."""
    return fleet_of(folder, {"p": {}, "d": {}})


def ask(
    number: int,
    *,
    isl: int = 1000,
    at_s: float = 0.0,
    ttft_s: float = 10.0,
    itl_s: float = 1.0,
    osl: int = 1,
    blocks: tuple[int, ...] = (),
) -> Ask:
    sla = RequestClass("c", 1.0, ttft_ms=ttft_s * 1000, itl_ms=itl_s * 1000)
    row = TraceRow(number, at_s, isl, osl, blocks)
    return Ask(row, sla, at_s, np.zeros(0, np.uint32), osl, osl, ignore_eos=True)


def met(fleet: SimFleet, asks: Sequence[Ask]) -> list[bool]:
    return scheduled(fleet, asks, AT_ONCE, 1)


def test_limits_are_those_of_the_simulated_engine() -> None:
    assert SimOptions(role="agg", profile="", tp=1).max_seq_len == CONTEXT_TOKENS
    assert parse_args("model").max_num_tokens == ITERATION_TOKENS


def test_one_request_on_an_idle_fleet_is_met_where_it_is_feasible(split: SimFleet) -> None:
    asks = [ask(0), ask(1, isl=30_000, ttft_s=1.0), ask(2, itl_s=0.003, osl=2)]
    asks += [ask(3, isl=200_000, ttft_s=999.0)]
    assert feasible(split, asks, IDEAL) == [True, False, False, False]
    for number, one in enumerate(asks):
        assert scheduled(split, [one], IDEAL, 1) == [number == 0]


def test_the_best_pair_of_pools_says_what_is_feasible(folder: Path) -> None:
    """Half a second of prefill and 5 ms a step are on two GPUs, and a prompt needs room for its answer."""
    fleet = fleet_of(folder, {"p1": {}, "p2": {"tp": 2}, "d1": {}, "d2": {"tp": 2}})
    asks = [
        ask(0, ttft_s=0.5 + MORE_S, itl_s=0.006, osl=9),
        ask(1, ttft_s=0.5 - MORE_S, itl_s=0.006, osl=9),
        ask(2, ttft_s=0.5 + MORE_S, itl_s=0.004, osl=9),
        ask(3, isl=99_000, ttft_s=99.0, osl=1000),
        ask(4, isl=99_000, ttft_s=99.0, osl=1001),
    ]
    assert feasible(fleet, asks, AT_ONCE) == [True, False, False, True, False]


def test_moore_and_hodgsons_rule_on_one_worker(single: SimFleet) -> None:
    """Example 3.3.3 of Pinedo, "Scheduling": of these five two are late at the least."""
    times = [(7, 9), (8, 17), (4, 18), (6, 19), (6, 21)]
    asks = [ask(n, isl=1000 * p, ttft_s=due + MORE_S) for n, (p, due) in enumerate(times)]
    assert sum(met(single, asks)) == 3


def test_the_longest_goes_where_not_all_are_in_time(single: SimFleet) -> None:
    """The long one is due first: in order of due times it and one of the others would be met."""
    short = [ask(n, isl=10_000, ttft_s=65.0 + n) for n in range(1, 7)]
    assert met(single, [ask(0, isl=60_000, ttft_s=60.5), *short]) == [False] + [True] * 6


def test_who_is_due_later_waits(single: SimFleet) -> None:
    asks = [ask(0, isl=8000, ttft_s=9.5), ask(1, ttft_s=1.5), ask(2, at_s=0.5, ttft_s=9.0)]
    assert met(single, asks) == [True, True, False]


def test_what_a_slow_worker_can_do_leaves_the_fast_one_free(folder: Path) -> None:
    fleet = fleet_of(folder, {"p2": {"tp": 2}, "p1": {}, "d": {}})
    asks = [ask(0, ttft_s=1.0 + MORE_S), ask(1, isl=2000, ttft_s=1.0 + MORE_S)]
    assert met(fleet, asks) == [True, True]
    assert sum(met(fleet, [*asks, ask(2, ttft_s=1.0 + MORE_S)])) == 2


def test_a_prompt_is_shorter_where_another_began_like_it(single: SimFleet) -> None:
    """Of 4,096 tokens 2,048 are computed again: six seconds for both instead of eight."""
    first = ask(0, isl=4096, ttft_s=9.0, blocks=tuple(range(8)))
    alike, other = (
        ask(1, isl=4096, ttft_s=6.2, blocks=(*range(4), 8 + k, 9 + k, 10 + k, 11 + k))
        for k in (0, 4)
    )
    first = first._replace(sla=first.sla._replace(ttft_ms=4200))
    assert met(single, [first, alike]) == [True, True]
    other = other._replace(row=other.row._replace(hash_ids=tuple(range(20, 28))))
    assert sum(met(single, [first, other])) == 1


@pytest.mark.parametrize(("ttft_s", "n_met"), [(2.0 + MORE_S, 1), (4.0, 2)])
def test_a_full_decode_worker_is_waited_for_while_there_is_time(
    folder: Path, ttft_s: float, n_met: int
) -> None:
    """Both are computed after 2 s, and the first one decodes until 2.99 s where it is alone."""
    fleet = fleet_of(folder, {"p": {"replicas": 2}, "d": {"batch": 1}})
    asks = [ask(n, isl=2000, ttft_s=ttft_s, osl=100) for n in range(2)]
    assert sum(met(fleet, asks)) == n_met


def test_a_batch_makes_nobody_late(folder: Path) -> None:
    """Three at once take 30 ms a step; a fourth would take them all over 35."""
    fleet = fleet_of(folder, {"p": {"replicas": 5}, "d": {}})
    asks = [ask(n, ttft_s=1.1, itl_s=0.035, osl=50) for n in range(5)]
    assert feasible(fleet, asks, AT_ONCE) == [True] * 5
    assert sum(met(fleet, asks)) == 3


def test_the_longest_leaves_a_batch_to_others(folder: Path) -> None:
    """While the long one decodes nobody else can; the others could one after the other."""
    fleet = fleet_of(folder, {"p": {}, "d": {"batch": 1}})
    long = ask(0, ttft_s=1.1, osl=900)
    short = [ask(n, at_s=n, ttft_s=1.1, osl=50) for n in range(1, 6)]
    assert met(fleet, [long, *short]) == [False] + [True] * 5


def test_a_prompt_waits_for_a_batch_that_it_would_make_late(folder: Path) -> None:
    """The batch of one has a second to lose in 99 steps: not to a prompt of two, nor to two of one."""
    fleet = fleet_of(folder, {"a": {}})
    first = ask(0, ttft_s=1.1, itl_s=0.0205, osl=100)
    others = [ask(1, at_s=1.1, isl=2000, ttft_s=5.0), ask(2, at_s=1.2, ttft_s=1.2)]
    assert met(fleet, [first, *others]) == [True] * 3
    soon = others[0]._replace(sla=others[0].sla._replace(ttft_ms=2100))
    assert sum(met(fleet, [first, soon, others[1]])) == 2


def test_tight_steps_go_where_they_keep_no_prompts_off(folder: Path) -> None:
    """In 199 steps of 16 ms the first one has 1.2 s to lose where a prompt takes two, and 2.2 where one.

    All prompts are computed in time only if both workers compute from the start.
    """
    fleet = fleet_of(folder, {"a1": {"tp": 10, "cost": 1}, "a2": {"tp": 20, "cost": 2}})
    tight = ask(0, isl=100, ttft_s=1.0, itl_s=0.016, osl=200)
    loose = [ask(n, at_s=0.1, isl=2000, ttft_s=2.2) for n in range(1, 4)]
    assert met(fleet, [tight, *loose]) == [True] * 4


def test_a_pool_is_slow_from_its_time_on(single: SimFleet) -> None:
    slow = AT_ONCE._replace(slow=Slow("p", 3.0, from_s=2.0))
    asks = [
        ask(0, at_s=0.5, ttft_s=1.1),
        ask(1, at_s=1.5, ttft_s=2.1),
        ask(2, at_s=4.0, ttft_s=2.9),
    ]
    assert scheduled(single, asks, slow, 1) == [True, True, False]
    assert met(single, asks) == [True, True, True]


def test_each_rank_takes_requests(folder: Path) -> None:
    asks = [ask(n, ttft_s=1.1) for n in range(3)]
    fleet = fleet_of(folder, {"p": {}, "d": {}}, {"p": 2})
    assert sum(met(fleet, asks)) == 2


def best_of_all(asks: Sequence[Ask], gpus: Sequence[int]) -> int:
    """How many prompts can be in time on workers of so many GPUs, in any order."""
    n = len(asks)
    ends_s: list[dict[int, float]] = []
    for each in gpus:
        by_set = {0: 0.0}
        for chosen in range(1, 1 << n):
            found = [
                end_s
                for last in range(n)
                if chosen >> last & 1 and (before_s := by_set.get(chosen ^ 1 << last)) is not None
                for end_s in [
                    max(before_s, asks[last].arrival_s) + asks[last].row.isl_tokens / 1000 / each
                ]
                if end_s <= asks[last].arrival_s + asks[last].sla.ttft_ms / 1000
            ]
            if found:
                by_set[chosen] = min(found)
        ends_s.append(by_set)
    sets = product(*ends_s)
    return max(sum(map(int.bit_count, each)) for each in sets if sum(each) == each[0] | each[1])


def test_it_comes_close_to_the_best_of_all_schedules(folder: Path) -> None:
    """Six requests on two workers, where all orders can be tried: never more, and hardly ever less."""
    fleet = fleet_of(folder, {"p1": {}, "p2": {"tp": 2}, "d": {"tp": 2}})
    rng, n_met, n_best = random.Random(1), [], []
    for _ in range(60):
        asks = []
        for number in range(6):
            isl, at_s = rng.randrange(500, 5000), rng.uniform(0, 4)
            asks.append(ask(number, isl=isl, at_s=at_s, ttft_s=isl / 2000 + rng.uniform(0.1, 3)))
        n_met.append(sum(met(fleet, asks)))
        n_best.append(best_of_all(asks, (1, 2)))
    assert all(a <= b for a, b in zip(n_met, n_best, strict=True))
    assert sum(n_met) >= 0.98 * sum(n_best)


def random_asks(seed: int, load: float) -> list[Ask]:
    rng = random.Random(seed)
    at_s, asks = 0.0, []
    for number in range(80):
        at_s += rng.expovariate(3.0 * load)
        ttft_s, itl_s = rng.choice([(1.0, 0.015), (4.0, 0.03), (20.0, 0.1)])
        isl, osl = rng.choice([500, 3000, 9000, 30_000]), rng.choice([1, 50, 300])
        asks.append(ask(number, isl=isl, at_s=at_s, ttft_s=ttft_s, itl_s=itl_s, osl=osl))
    return asks


@pytest.mark.parametrize("name", ["split", "aggregated"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_is_the_same_again_and_less_under_more_load(name: str, seed: int) -> None:
    fleet, shares = load_fleet(FLEETS / f"{name}.json"), []
    for load in (1.0, 4.0, 16.0):
        asks = random_asks(seed, load)
        found = scheduled(fleet, asks, REAL, seed)
        assert found == scheduled(fleet, asks, REAL, seed)
        shares.append(sum(found))
    assert shares[0] >= shares[1] >= shares[2] > 0
    assert shares[0] > shares[2]


@pytest.mark.parametrize("name", ["split", "aggregated"])
def test_nobody_is_met_who_could_not_be_on_an_idle_fleet(name: str) -> None:
    """Of workers as fast as their profiles, and prompts that share nothing."""
    fleet = load_fleet(FLEETS / f"{name}.json")
    for load in (1.0, 8.0):
        asks = random_asks(4, load)
        can_be = feasible(fleet, asks, IDEAL)
        found = scheduled(fleet, asks, IDEAL, 4)
        assert 0 < sum(found) <= sum(can_be) < len(asks)
        assert all(can for can, is_met in zip(can_be, found, strict=True) if is_met)
