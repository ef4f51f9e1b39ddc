"""The builder's promise for requests with two targets: a pool that meets both, or the mark of a cell."""

import json
import random
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from slagate.pools.fleet_file.load import parse_config
from slagate.pools.grid_build.build import BuiltStage, build_fleet
from slagate.pools.grid_build.report import report_json
from slagate.pools.grid_build.spec import parse_spec
from support.seeds import each_seed

N_SEEDS = 30
LONGEST = 8000


def random_curve(rng: random.Random, low: float, high: float) -> list[list[float]]:
    """A rising curve from no tokens to the longest prompt, of up to 4 lines."""
    ms, points = rng.uniform(low, high), []
    for tokens in [0, *sorted(rng.sample(range(1, LONGEST), rng.randint(0, 3))), LONGEST]:
        points.append([tokens, round(ms, 3)])
        ms += rng.uniform(0, high / 2)
    return points


def value_at(points: Sequence[Sequence[float]], tokens: float) -> float:
    right = min(max(bisect_right([p[0] for p in points], tokens), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


def random_axis(rng: random.Random, low: int, high: int) -> dict[str, Any]:
    first, last = sorted(rng.sample(range(low, high), 2))
    if rng.random() < 0.5:
        return {"min": first, "max": last, "resolution": rng.randint(1, 4)}
    return {"edges": sorted({first, last, *rng.sample(range(low, high), rng.randint(0, 3))})}


def random_spec(rng: random.Random) -> dict[str, Any]:
    """Idle pools, so that the times of the spec are those of the builder; some slow in one thing only."""
    pools = [
        {
            "name": f"p{at}",
            "cost": rng.choice([1, 1, 2, 4]),
            "ttft_curve": random_curve(rng, 5, 150),
            "itl_curve": random_curve(rng, 3, 40),
        }
        for at in range(rng.randint(2, 4))
    ]
    stage = {"ttft_ms": random_axis(rng, 20, 900), "itl_ms": random_axis(rng, 5, 120)}
    traffic = {"isl": rng.randint(1, LONGEST)}
    if rng.random() < 0.5:
        stage["isl"] = {"edges": [0, rng.randint(1, LONGEST)]}
    return {
        "mode": "agg",
        "utilisation": 0,
        "traffic": traffic,
        "agg": {**stage, "pools": pools},
    }


def is_marked(stage: BuiltStage, index: tuple[int, ...]) -> bool:
    band = index if stage.size is not None else (0, *index)
    (cell,) = (cell for cell in stage.cells if cell.index == band)
    return cell.contested_tokens is not None


def test_a_request_gets_a_pool_that_meets_both_targets_or_its_cell_is_marked() -> None:
    """Targets below the first edges and above the last, and sizes beyond the range, too."""
    each_seed(N_SEEDS, check)


def check(seed: int) -> None:
    rng = random.Random(seed)
    content = random_spec(rng)
    spec = parse_spec(json.dumps(content), "spec")
    fleet = build_fleet(spec, "spec")
    stage = fleet.stages["agg"]
    grid = parse_config(fleet.content, source="built").stages["agg"]
    told: Any = report_json(fleet, spec, "slagate")["stages"]
    told_marks = [cell["contested_tokens"] for cell in told["agg"]["cells"]]
    assert told_marks == [cell.contested_tokens for cell in stage.cells]
    for _ in range(300):
        tokens = rng.randint(1, LONGEST) if "isl" in content["agg"] else content["traffic"]["isl"]
        taken = [
            (value_at(pool["ttft_curve"], tokens), value_at(pool["itl_curve"], tokens))
            for pool in content["agg"]["pools"]
        ]
        # Just what one of the pools meets, or anything.
        ttft_ms, itl_ms = (ms * rng.uniform(1, 1.2) for ms in rng.choice(taken))
        if rng.random() < 0.3:
            ttft_ms, itl_ms = rng.uniform(0, 1200), rng.uniform(0, 160)
        values = {"isl": tokens, "ttft_ms": ttft_ms, "itl_ms": itl_ms}
        picked = grid.select(values)
        meets = [ttft <= ttft_ms and itl <= itl_ms for ttft, itl in taken]
        if any(meets) and not meets[stage.used[picked.pool]]:
            assert is_marked(stage, picked.index), (seed, values, taken, picked)
