"""The builder's one promise: no request goes to a pool that misses its target while another meets it."""

import json
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from slagate.pools.fleet_file.load import parse_config
from slagate.pools.grid_build.build import BuiltFleet, build_fleet
from slagate.pools.grid_build.spec import parse_spec
from support.seeds import n_in

Points = Sequence[Sequence[float]]
SEEDS = range(n_in(gate=12, long=40))


def value_at(points: Points, tokens: float) -> float:
    """Straight lines through the points, and on; worked out apart from the builder's."""
    right = min(max(bisect_right([p[0] for p in points], tokens), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


def random_curve(rng: random.Random) -> list[list[float]]:
    """A rising curve of 1 to 5 points, which may begin high or rise steeply."""
    tokens = sorted(rng.sample(range(1, 9000), rng.randint(1, 5)))
    ms = rng.uniform(5, 150)
    points = []
    for at in tokens:
        points.append([at, round(ms, 3)])
        ms += rng.uniform(0, 200)
    # Extrapolated to no tokens it must still be a latency.
    first = points[0]
    return [[0, round(first[1] * rng.uniform(0.3, 1.0), 3)], *points]


def random_axis(rng: random.Random, low: float, high: float) -> dict[str, Any]:
    if rng.random() < 0.5:
        start = rng.choice([0, round(rng.uniform(low, high / 2))])
        return {"min": start, "max": round(high), "resolution": rng.randint(1, 6)}
    return {"edges": sorted(rng.sample(range(int(low), int(high)), rng.randint(2, 6)))}


def random_spec(rng: random.Random) -> dict[str, Any]:
    curves = [random_curve(rng) for _ in range(rng.randint(1, 5))]
    costs = [rng.choice([1, 2, 4, 8]) for _ in curves]
    pools = [
        {"name": f"p{at}", "cost": cost, "ttft_curve": curve, "replicas": rng.randint(1, 4)}
        for at, (curve, cost) in enumerate(zip(curves, costs, strict=True))
    ]
    decode = [{"name": "d", "itl_curve": [[0, 10], [1, 10]]}]
    return {
        "utilisation": rng.choice([0.0, 0.3, 0.8]),
        "margin": rng.choice([0.0, 0.2]),
        "prefill": {
            "isl": random_axis(rng, 1, 8000),
            "ttft_ms": random_axis(rng, 10, 700),
            "pools": pools,
        },
        "decode": {
            "context_length": {"edges": [0, 10]},
            "itl_ms": {"edges": [0, 10]},
            "pools": decode,
        },
    }


def inflation(spec: dict[str, Any], pool: dict[str, Any]) -> float:
    busy, n = spec["utilisation"], pool["replicas"]
    return 1 + 0.5 * busy ** (math.sqrt(2 * (n + 1)) - 1) / (n * (1 - busy))


def latencies(spec: dict[str, Any]) -> list[Callable[[float], float]]:
    return [
        lambda x, p=pool: value_at(p["ttft_curve"], x) * inflation(spec, p)
        for pool in spec["prefill"]["pools"]
    ]  # type: ignore[misc]


def sweep_points(rng: random.Random, fleet: BuiltFleet) -> list[tuple[int, float]]:
    """Sizes and targets all over the grid and beyond it, and the edges of its bands."""
    size = fleet.stages["prefill"].size
    target = fleet.stages["prefill"].targets[0]
    assert size is not None
    # Without a band for what lies beyond there is a limit that the spec named.
    longest = max(size.far_tokens, math.ceil(size.edges[-1]) - 1)
    points = [(rng.randint(1, longest), rng.uniform(0, 1.3 * target.edges[-1])) for _ in range(400)]
    edges = [(math.ceil(s) - d, t) for s in size.edges[1:-1] for t in target.edges for d in (0, 1)]
    return [*points, *((max(1, s), float(t)) for s, t in edges)]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_pool_is_picked_that_misses_where_another_one_meets(seed: int) -> None:
    rng = random.Random(seed)
    content = random_spec(rng)
    fleet = build_fleet(parse_spec(json.dumps(content), "spec"), "spec")
    grid = parse_config(fleet.content, source="built").stages["prefill"]
    curves = latencies(content)
    contested = [
        cell for cell in fleet.stages["prefill"].cells if cell.contested_tokens is not None
    ]
    assert not contested, seed
    for tokens, target_ms in sweep_points(rng, fleet):
        picked = fleet.stages["prefill"].used[
            grid.select({"isl": tokens, "ttft_ms": target_ms}).pool
        ]
        taken = [curve(tokens) for curve in curves]
        # A hair's breadth: both sides compute the same numbers in another order.
        if taken[picked] > target_ms * (1 + 1e-9):
            best = min(taken)
            assert best > target_ms * (1 - 1e-9), (seed, tokens, target_ms, taken, picked)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_met_cell_has_the_cheapest_pool_that_meets_its_worst_request(seed: int) -> None:
    rng = random.Random(seed)
    content = random_spec(rng)
    fleet = build_fleet(parse_spec(json.dumps(content), "spec"), "spec", spill=True)
    stage = fleet.stages["prefill"]
    curves = latencies(content)
    assert stage.size is not None
    costs = [pool["cost"] for pool in content["prefill"]["pools"]]
    for cell in stage.cells:
        row, column = cell.index
        if stage.size.is_beyond(row) or stage.targets[0].is_beyond(column):
            continue
        worst = [curve(stage.size.edges[row + 1]) for curve in curves]
        limit = stage.targets[0].edges[column] * (1 - content["margin"])
        meets = {at for at, ms in enumerate(worst) if ms <= limit}
        if meets:
            order = sorted(meets, key=lambda at: (costs[at], worst[at], at))
            assert (cell.status, cell.pools) == ("met", tuple(order)), (seed, cell)
        else:
            # A band that was joined with some of what lies beyond is not met there.
            reaches_beyond = stage.size.edges[row + 1] > stage.size.asked[1]
            assert cell.status in ("infeasible", "beyond" if reaches_beyond else "-"), (seed, cell)
            assert len(cell.pools) == 1


@pytest.mark.parametrize("seed", SEEDS[:15])
def test_the_order_of_pools_decides_nothing_but_ties(seed: int) -> None:
    rng = random.Random(seed)
    content = random_spec(rng)
    names = []
    for _ in range(2):
        fleet = build_fleet(parse_spec(json.dumps(content), "spec"), "spec")
        stage = fleet.stages["prefill"]
        names.append([[stage.pools[at].name for at in cell.pools[:1]] for cell in stage.cells])
        content["prefill"]["pools"].reverse()
    assert names[0] == names[1], seed
