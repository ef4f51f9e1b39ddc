"""Simulated fleets: which workers a fleet file has, and what they meet."""

import json
import math
from pathlib import Path

import pytest

from slagate.pools.fleet_file.load import parse_config
from slagate.pools.fleet_file.models import Objective
from slagate.router.replay.classes import RequestClass
from slagate.router.replay.fleet import IDEAL, REAL, Slow, load_fleet, step_factor
from slagate.workers.runtime.usage import UsageError

PROFILE = {"profile": "qwen3-32b-fp8-h200", "tp": 1}


def agg_fleet(folder: Path, **pools: dict[str, object]) -> Path:
    path = folder / "fleet.json"
    content = {
        "mode": "agg",
        "num_agg_pools": len(pools),
        "agg_pools": list(pools),
        "agg_pool_selection_strategy": {
            "ttft_edges_ms": [0, 1000],
            "itl_edges_ms": [0, 20],
            "agg_pool_mapping": [[0]],
        },
        "pools": pools,
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_pool_has_its_workers_or_as_many_as_its_replicas(tmp_path: Path) -> None:
    fleet = load_fleet(
        agg_fleet(
            tmp_path,
            one={**PROFILE, "tp": 4},
            several={**PROFILE, "replicas": 3, "batch": 9},
            listed={**PROFILE, "replicas": 3, "workers": ["a:1", "b:1"]},
        )
    )
    assert [len(pool.addresses) for pool in fleet.pools] == [1, 3, 2]
    assert [pool.batch for pool in fleet.pools] == [256, 9, 256]
    assert fleet.pools[2].addresses == ("a:1", "b:1")
    assert fleet.gpus == 4 + 3 + 2


def test_ranks_have_the_gpus_of_the_profile_each_unless_a_cost_is_given(tmp_path: Path) -> None:
    path = agg_fleet(
        tmp_path,
        plain={**PROFILE, "tp": 2},
        wide={**PROFILE, "tp": 2},
        named={**PROFILE, "tp": 2, "cost": 3.5},
    )
    pools = load_fleet(path, {"wide": 4, "named": 4, "elsewhere": 2}).pools
    assert [(pool.ranks, pool.gpus) for pool in pools] == [(1, 2.0), (4, 8.0), (4, 3.5)]


def test_classes_are_laid_over_the_objectives_of_the_file(tmp_path: Path) -> None:
    path = agg_fleet(tmp_path, one=PROFILE)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["objectives"] = {
        "chat": {"ttft_ms": 300, "policy": "protect", "weight": 2, "priority": 9},
        "*": {"policy": "relegate", "weight": 3},
        "other": {"itl_ms": 5},
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    classes = [
        RequestClass("chat", 0.5, 100, 10, priority=4, weight=0.5),
        RequestClass("batch", 0.25, 100, 10),
        RequestClass("bulk", 0.25, 100, 10, policy="shed"),
    ]
    config = load_fleet(path, classes=classes).config
    assert config.objectives == {
        "chat": Objective(ttft_ms=300, policy="protect", weight=0.5, priority=4),
        "*": Objective(policy="relegate", weight=3),
        "other": Objective(itl_ms=5),
        "batch": Objective(policy="relegate", weight=3, priority=0),
        "bulk": Objective(policy="shed", weight=3, priority=0),
    }
    assert parse_config(json.loads(config.text), source="text").objectives == config.objectives
    plain = load_fleet(agg_fleet(tmp_path, one=PROFILE), classes=classes[1:]).config
    assert plain.objectives["batch"] == Objective(policy="shed", weight=1, priority=0)


def test_a_pool_without_a_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pools\.bare\.profile: is missing"):
        load_fleet(agg_fleet(tmp_path, good=PROFILE, bare={"tp": 1}))


def test_a_pool_is_slow_from_its_time_on() -> None:
    slow = IDEAL._replace(slow=Slow("a", 3.0, from_s=10.0))
    factor = step_factor(slow, 1, "w:1", pool="a", first_s=1.5)
    assert factor is not None
    assert [factor(now_s) for now_s in (0.0, 11.4, 11.5, 99.0)] == [1.0, 1.0, 3.0, 3.0]
    assert step_factor(slow, 1, "w:1", pool="b", first_s=1.5) is None
    assert step_factor(IDEAL, 1, "w:1", pool="a") is None


def test_step_times_vary_by_worker_and_step_and_not_by_run() -> None:
    def factors(address: str, *, seed: int = 1, slow: Slow | None = None) -> list[float]:
        factor = step_factor(REAL._replace(slow=slow), seed, address, pool="a")
        assert factor is not None
        return [factor(now_s) for now_s in range(400)]

    one = factors("w:1")
    assert one == factors("w:1")
    assert one != factors("w:2")
    assert one != factors("w:1", seed=2)
    assert factors("w:1", slow=Slow("a", 2.0)) == [2 * each for each in one]
    logs = [math.log(each) for each in one]
    mean = math.fsum(logs) / len(logs)
    sigma = math.sqrt(math.fsum((each - mean) ** 2 for each in logs) / len(logs))
    assert sigma == pytest.approx(REAL.step_sigma, rel=0.2)
    means = [math.log(factors(f"w:{n}")[0]) for n in range(400)]
    spread = math.sqrt(math.fsum(each**2 for each in means) / len(means))
    assert spread == pytest.approx(math.hypot(REAL.worker_sigma, REAL.step_sigma), rel=0.2)
