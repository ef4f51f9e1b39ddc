"""Built grids of plausible pools lint clean, whatever axes were asked for."""

import json
import random
from typing import Any

import pytest

from slagate.pools.grid_build import BuiltFleet, build_fleet
from slagate.pools.grid_build_cells import MET
from slagate.pools.grid_build_spec import parse_spec
from slagate.pools.grid_config import FleetConfig, parse_config
from slagate.pools.grid_lint import lint
from slagate.workers.profile import load_profile

QWEN = "qwen3-32b-fp8-h200"
PROFILE = load_profile(QWEN)
SIZES = (1, 2, 4, 8)
SEEDS = range(40)


def axis(rng: random.Random, low: float, high: float, *, is_closed: bool) -> dict[str, Any]:
    more = {"beyond": False} if is_closed else {}
    if rng.random() < 0.6:
        return {"min": low, "max": high, "resolution": rng.randint(1, 6), **more}
    n_between = rng.randint(0, 4)
    between = {round(rng.uniform(low, high)) for _ in range(n_between)} - {low, high}
    return {"edges": [low, *sorted(between), high], **more}


def pools(rng: random.Random, stage: str) -> list[dict[str, Any]]:
    sizes = sorted(rng.sample(SIZES, rng.randint(2, 4)))
    limit = rng.choice([{}, {"max_inflight": 8}, {"max_inflight": 32}, {"batch": 64}])
    return [{"name": f"{stage}-tp{tp}", "tp": tp, "profile": QWEN, **limit} for tp in sizes]


def spec(rng: random.Random, mode: str) -> dict[str, Any]:
    """From targets that all pools meet to some that none does."""
    is_closed = rng.random() < 0.7
    ttft_ms, itl_ms = rng.choice([200, 600, 1000, 3000]), rng.choice([8, 12, 16, 24])
    if mode == "agg":
        itl_ms *= rng.choice([2, 20])
    size = axis(rng, 0, rng.choice([2048, 4096, 8192]), is_closed=is_closed)
    ttft = axis(rng, ttft_ms, ttft_ms * rng.choice([2, 5]), is_closed=is_closed)
    itl = axis(rng, itl_ms, itl_ms * rng.choice([2, 5]), is_closed=is_closed)
    content: dict[str, Any] = {
        "mode": mode,
        "utilisation": rng.uniform(0.5, 0.9),
        "margin": rng.choice([0, 0.02, 0.1]),
    }
    if rng.random() < 0.5:
        # In the range, and on no edge.
        targets = {"ttft_ms": ttft_ms * 1.9013, "itl_ms": itl_ms * 1.9013}
        content["objectives"] = {"*": targets}
    if mode == "agg":
        stage = {"isl": size, "ttft_ms": ttft, "itl_ms": itl, "pools": pools(rng, "agg")}
        return content | {"agg": stage}
    context = axis(rng, 0, rng.choice([4096, 16384]), is_closed=is_closed)
    return content | {
        "prefill": {"isl": size, "ttft_ms": ttft, "pools": pools(rng, "prefill")},
        "decode": {"context_length": context, "itl_ms": itl, "pools": pools(rng, "decode")},
    }


def built(content: dict[str, Any]) -> tuple[BuiltFleet, FleetConfig]:
    fleet = build_fleet(parse_spec(json.dumps(content), "spec"), "spec")
    return fleet, parse_config(fleet.content, source="built")


def findings(config: FleetConfig) -> list[str]:
    profiles = {name: PROFILE.tp(pool.tp or 0) for name, pool in config.pools.items()}
    return [f"{found.code} {found.message}" for found in lint(config, profiles=profiles)]


@pytest.mark.parametrize("mode", ["disagg", "agg"])
def test_a_built_grid_lints_clean_whether_its_cells_are_met_or_not(mode: str) -> None:
    n_met = n_several = 0
    for seed in SEEDS:
        content = spec(random.Random(seed), mode)
        fleet, config = built(content)
        cells = [cell for stage in fleet.stages.values() for cell in stage.cells]
        is_met = all(cell.status == MET for cell in cells)
        n_met += is_met
        n_several += is_met and any(len(stage.used) > 1 for stage in fleet.stages.values())
        assert (findings(config), config.warnings) == ([], ()), (mode, seed)
    assert 3 <= n_met <= len(SEEDS) - 3
    assert n_several


WIDE_AXES = [
    {
        "isl": [0, 32_000, 2],
        "ttft_ms": [10, 3000, 2],
        "context_length": [0, 32_000, 2],
        "itl_ms": [10, 500, 2],
    },
    {
        "isl": [0, 131_072, 8],
        "ttft_ms": [100, 10_000, 10],
        "context_length": [0, 131_072, 8],
        "itl_ms": [5, 100, 10],
    },
    {
        "isl": [128, 32_768, 5],
        "ttft_ms": [200, 5000, 5],
        "context_length": [128, 32_768, 5],
        "itl_ms": [8, 60, 5],
    },
]


@pytest.mark.parametrize("limit", [{}, {"max_inflight": 64}, {"batch": 16}])
@pytest.mark.parametrize("utilisation", [0.0, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("axes", WIDE_AXES)
def test_four_sizes_of_pool_over_axes_that_no_pool_can_meet_all_of_lint_clean(
    axes: dict[str, list[int]], utilisation: float, limit: dict[str, int]
) -> None:
    def stage(name: str, *fields: str) -> dict[str, Any]:
        keys = ("min", "max", "resolution")
        bands = {field: dict(zip(keys, axes[field], strict=True)) for field in fields}
        all_sizes = [{"name": f"{name}-tp{tp}", "tp": tp, "profile": QWEN, **limit} for tp in SIZES]
        return {**bands, "pools": all_sizes}

    content = {
        "utilisation": utilisation,
        "prefill": stage("prefill", "isl", "ttft_ms"),
        "decode": stage("decode", "context_length", "itl_ms"),
    }
    fleet, config = built(content)
    assert (findings(config), config.warnings) == ([], ())
    assert fleet.has_gaps
