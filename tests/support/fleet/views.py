"""Fleet files of every shape that a table or a picture has to cope with."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slagate.pools.fleet_file.load import FleetConfig, load_config, parse_config
from slagate.router.grid_view.view import Traffic
from slagate.router.receipts.attainment import CellTraffic
from support.fleet.files import agg_file, disagg_file

REPOSITORY = Path(__file__).parents[3]
EVEN = {"isl_min": 0, "isl_max": 16_384, "ttft_min_ms": 0, "ttft_max_ms": 4000}


def example(name: str) -> FleetConfig:
    """A fleet file of this repository, under the name that it has from its root."""
    source = f"configs/grids/{name}.json"
    return replace(load_config(REPOSITORY / source), source=source)


def prefill_config(
    names: Sequence[str],
    mapping: Sequence[Sequence[Any]],
    *,
    source: str = "fleet.json",
    objectives: Mapping[str, Any] | None = None,
    **keys: Any,
) -> FleetConfig:
    """A fleet with these prefill pools in this table; `keys` are more of the strategy."""
    file = disagg_file()
    axes = EVEN | {"isl_resolution": len(mapping), "ttft_resolution": len(mapping[0])}
    if "isl_edges" in keys:
        axes = {}
    strategy = axes | keys | {"prefill_pool_mapping": mapping}
    file |= {
        "num_prefill_pools": len(names),
        "prefill_pools": list(names),
        "prefill_pool_priorities": list(range(len(names))),
        "prefill_pool_selection_strategy": strategy,
        "pools": {
            name: {"workers": [f"h{at}:1", f"h{at}:2"], "profile": "llama-3.1-8b-h100", "tp": 2}
            for at, name in enumerate(names)
        },
    }
    if objectives is not None:
        file["objectives"] = objectives
    return parse_config(file, source=source)


def twelve_pools(n_rows: int, n_columns: int) -> FleetConfig:
    """Twelve pools in stripes."""
    names = [f"prefill-tp{1 + at % 4}-{letter}" for at, letter in enumerate("abcdefghijkl")]
    mapping = [[(row + col) % 12 for col in range(n_columns)] for row in range(n_rows)]
    return prefill_config(names, mapping)


def spilling(objectives: Mapping[str, Any] | None = None) -> FleetConfig:
    """Three pools, uneven edges, cells with an order of pools, two overrides."""
    overrides = [
        {"min_priority": 90, "max_priority": 100, "target_pool": 0},
        {"min_priority": -3, "max_priority": 0.5, "target_pool": 2},
    ]
    return prefill_config(
        ["fast", "mid", "bulk"],
        [[[0, 1], 1, [2, 1]], [0, 0, [1, 0, 2]], [0, 0, 0]],
        isl_edges=[0, 512, 4096, 131_072],
        ttft_edges_ms=[0, 200, 500, 5000],
        priority_overrides=overrides,
        objectives=objectives,
    )


def long_names() -> FleetConfig:
    """Names of up to two hundred characters, and a path that is as long."""
    names = ["the-interactive-tier-of-eu-west-1/h200-nvl", "short", "W" * 60, "namespace." * 20]
    return prefill_config(names, [[0, 1], [2, 3]], source="a/very/long/folder/" * 12 + "fleet.json")


def layers() -> FleetConfig:
    """An agg grid of three axes."""
    return parse_config(agg_file(), source="agg.json")


def some_traffic(config: FleetConfig, seed: int = 1) -> Traffic:
    """Counts for most cells: with and without targets, met by all, most, and few; some with failures."""
    rng = random.Random(seed)
    found = {}
    for stage, grid in config.stages.items():
        for index in itertools.product(*(range(axis.resolution) for axis in grid.axes)):
            n_requests = rng.choice([0, 1, 30, 400, 9000])
            n_judged = rng.choice([0, n_requests // 2, n_requests])
            if n_requests:
                n_met = int(n_judged * rng.choice([1, 1, 0.97, 0.8, 0.3]))
                n_failed = int((n_requests - n_met) * rng.choice([0, 0, 0.02, 0.5, 1]))
                found[stage, index] = CellTraffic(n_requests, n_met, n_judged, n_failed)
    return found
