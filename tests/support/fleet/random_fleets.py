"""Random files of Dynamo's global router, inputs that sit where its arithmetic is touchy, and damage."""

import copy
import math
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

Number = int | float

AXES = {
    "prefill": (("isl", "isl", ""), ("ttft_ms", "ttft", "_ms")),
    "decode": (("context_length", "context_length", ""), ("itl_ms", "itl", "_ms")),
    "agg": (("isl", "isl", ""), ("ttft_ms", "ttft", "_ms"), ("itl_ms", "itl", "_ms")),
}
RESOLUTIONS = (1, 1, 2, 2, 3, 4, 5, 7, 10, 50)
MAX_CELLS = 150


def random_file(rng: random.Random) -> dict[str, Any]:
    """A file that Dynamo loads and serves, with old and new keys, and everything optional at times."""
    mode = rng.choice(["disagg", "agg"])
    content: dict[str, Any] = {}
    if mode == "agg" or rng.random() < 0.5:
        content["mode"] = mode
    if rng.random() < 0.7:
        content["enable_priority_retry"] = rng.random() < 0.8
    for stage in ("agg",) if mode == "agg" else ("prefill", "decode"):
        _add_stage(content, stage, rng)
    return content


def _add_stage(content: dict[str, Any], stage: str, rng: random.Random) -> None:
    strategy: dict[str, Any] = {}
    sizes: list[int] = []
    for field, name, unit in AXES[stage]:
        low, high = random_ends(rng)
        if stage == "agg" and field == "isl" and rng.random() < 0.5:
            nulls = ["isl_min", "isl_max", "isl_resolution"]
            strategy |= dict.fromkeys(nulls[: rng.randrange(4)])
            continue
        n_bands = rng.choice(RESOLUTIONS)
        while math.prod([*sizes, n_bands]) > MAX_CELLS:
            n_bands = rng.choice(RESOLUTIONS)
        sizes.append(n_bands)
        for end, value in (("min", low), ("max", high)):
            key = f"{name}_{end}{unit}"
            if unit and rng.random() < 0.3:
                strategy[key.removesuffix(unit)] = value
                if rng.random() < 0.7:
                    continue
                strategy[key.removesuffix(unit)] = rng.choice([None, "old", value, -value])
            strategy[key] = value
        strategy[f"{name}_resolution"] = n_bands
    n_cells = math.prod(sizes)
    # With a pool for each cell the pool tells the cell.
    n_pools = n_cells if rng.random() < 0.5 else rng.randint(1, 5)
    cells = [at if n_pools == n_cells else rng.randrange(n_pools) for at in range(n_cells)]
    strategy[f"{stage}_pool_mapping"] = _nested(cells, sizes)
    if rng.random() < 0.6:
        strategy["priority_overrides"] = [
            _rule(n_pools, rng) for _ in range(rng.choice([0, 1, 1, 2, 4]))
        ]
    content[f"num_{stage}_pools"] = n_pools
    content[f"{stage}_pool_dynamo_namespaces"] = [f"{stage}-{at}" for at in range(n_pools)]
    if rng.random() < 0.6:
        speeds = [rng.choice([-1, 0, 0, 1, 2, 3, 10**30]) for _ in range(n_pools)]
        content[f"{stage}_pool_priorities"] = rng.choice([speeds, speeds, None])
    content[f"{stage}_pool_selection_strategy"] = strategy


def random_ends(rng: random.Random) -> tuple[Number, Number]:
    """A low end below a high end, mostly such as people write, at times far from it."""
    kind = rng.randrange(8)
    if kind < 4:
        low: Number = rng.choice([0, 0, 1, 10, 100, rng.randrange(1000)])
        return low, low + rng.choice([16, 490, 900, 1000, 8192, 32000, rng.randint(1, 100_000)])
    if kind < 6:
        start = round(rng.uniform(-50, 500), rng.randrange(4))
        return start, start + round(rng.uniform(0.5, 3000), rng.randrange(1, 4))
    if kind == 6:
        start = rng.choice([2**53, 2**60, -(2**55), 10**17])
        return start, start + rng.randint(1, 1000)
    scale = 10.0 ** rng.randint(-300, 300)
    return rng.uniform(-1, 0) * scale, rng.uniform(0.01, 1) * scale


def _rule(n_pools: int, rng: random.Random) -> dict[str, Any]:
    ends = [rng.choice([rng.randint(-20, 120), rng.uniform(-20, 120), 0, 10**400]) for _ in "ab"]
    target = rng.randrange(n_pools)
    return {"min_priority": min(ends), "max_priority": max(ends), "target_pool": target}


def _nested(cells: list[int], sizes: list[int]) -> Any:
    if len(sizes) == 1:
        return cells
    n = len(cells) // sizes[0]
    return [_nested(cells[at * n : (at + 1) * n], sizes[1:]) for at in range(sizes[0])]


def inputs(low: Number, high: Number, resolution: int, rng: random.Random) -> Iterator[Number]:
    """Values at the nominal edges of an axis, just beside them, far outside, and anywhere."""
    step = (high - low) / resolution
    while True:
        kind = rng.randrange(10)
        if kind < 5:
            at = rng.randrange(resolution + 1)
            edge: Number = rng.choice(
                [low, high, low + at * step, low + (high - low) * at / resolution]
            )
            yield rng.choice(
                [edge, math.nextafter(edge, math.inf), math.nextafter(edge, -math.inf), -edge]
            )
        elif kind == 5:
            near = int(low + at_random(high - low, rng)) if abs(low) < 1e300 else 0
            yield rng.choice([near, near + 1, float(near)])
        elif kind < 8:
            yield low + at_random(high - low, rng)
        else:
            yield rng.choice(
                [0, -0.0, -1, 1e308, -1e308, 5e-324, 2**53 + 1, 2**63, 10**30, -(10**30), 1e-9, 4.8]
            )


def at_random(width: Number, rng: random.Random) -> float:
    """A distance from the low end, a little outside at times."""
    return float(width) * rng.uniform(-0.1, 1.1)


JUNK = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        1.0,
        2.0,
        0.5,
        "",
        "x",
        "0",
        "ab",
        [],
        {},
        [0],
        [[0]],
        [0, 0],
    ),
    *({"a": 1}, math.nan, math.inf, -math.inf, 10**400, 10**25, 5e-324, 1e308, -1e308, "prefill-0"),
    *("\ud800", "a\nb", " ", [None], [1.5], ["a"], [True], [math.nan]),
]


def damage(content: dict[str, Any], rng: random.Random) -> None:
    """Change one place: another value, a key dropped, renamed or added, an entry more or less."""
    container, key = rng.choice(list(_places(content)))
    kind = rng.randrange(8)
    if kind < 5:
        container[key] = copy.deepcopy(rng.choice(JUNK))
    elif isinstance(container, list):
        if kind == 5:
            del container[key]
        else:
            container.insert(key, copy.deepcopy(rng.choice([container[key], rng.choice(JUNK)])))
    elif kind == 5:
        del container[key]
    elif kind == 6:
        container[rng.choice([f"{key}s", str(key)[:-1], "zzz"])] = container.pop(key)
    else:
        container[rng.choice(["zzz", "mode", "isl_min", "ttft_min", "x"])] = rng.choice(JUNK)


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield content, key
        if isinstance(value, dict | list):
            yield from _places(value)


def probes(bounds: dict[str, tuple[Any, Any]]) -> Iterator[dict[str, Any]]:
    """Requests such as come every day, at the ends of the axes and with no target too."""
    for part in (0.0, 0.4, 1.0):
        yield {field: low + (high - low) * part for field, (low, high) in bounds.items()}
    for size, target in product((1, 5000), (0, 30, 450.5, None)):
        yield {"isl": size, "context_length": size, "ttft_ms": target, "itl_ms": target}
