"""Built grids of plausible pools lint clean, whatever axes were asked for."""

import json
import random
from itertools import product
from typing import Any

import pytest

from slagate.pools.fleet_file.load import FleetConfig, parse_config
from slagate.pools.grid_build.build import BuiltFleet, build_fleet
from slagate.pools.grid_build.cells import MET
from slagate.pools.grid_build.spec import parse_spec
from slagate.pools.grid_lint.lint import lint
from slagate.pools.grid_lint.times import BUSY
from slagate.workers.profiles.profile import load_profile
from support.seeds import is_long_run, n_in

QWEN = "qwen3-32b-fp8-h200"
PROFILE = load_profile(QWEN)
SIZES = (1, 2, 4, 8)
SEEDS = range(n_in(gate=12, long=40))


def axis(rng: random.Random, low: float, high: float, *, is_closed: bool) -> dict[str, Any]:
    more = {"beyond": False} if is_closed else {}
    if rng.random() < 0.6:
        return {"min": low, "max": high, "resolution": rng.randint(1, 6), **more}
    n_between = rng.randint(0, 4)
    between = {round(rng.uniform(low, high)) for _ in range(n_between)} - {low, high}
    return {"edges": [low, *sorted(between), high], **more}


def pools(rng: random.Random, stage: str) -> list[dict[str, Any]]:
    sizes = sorted(rng.sample(SIZES, rng.randint(2, 4)))
    limits = [{}, {"max_inflight": 8}, {"max_inflight": 32}, {"batch": 64}, {"batch": 512}]
    alike, mixed = rng.choice(limits), rng.random() < 0.25
    counted = rng.choice([None, None, "replicas", "workers"])
    found = []
    for tp in sizes:
        pool = {"name": f"{stage}-tp{tp}", "tp": tp, "profile": QWEN}
        pool |= rng.choice(limits) if mixed else alike
        n = rng.choice([1, 2, 4, 8])
        if counted == "replicas":
            pool["replicas"] = n
        elif counted == "workers":
            pool["workers"] = [f"{stage}-{tp}-{at}:1" for at in range(n)]
        found.append(pool)
    return found


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
        "utilisation": rng.uniform(0.5, 0.95),
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


def findings(config: FleetConfig, *, utilisation: float) -> list[str]:
    """All but those of pools that would do at the load that lint calls busy, when more was planned for."""
    profiles = {name: PROFILE.tp(pool.tp or 0) for name, pool in config.pools.items()}
    found = lint(config, profiles=profiles)
    return [f"{f.code} {f.message}" for f in found if f.code != "G304" or utilisation <= BUSY]


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
        found = findings(config, utilisation=content["utilisation"])
        assert (found, config.warnings) == ([], ()), (mode, seed)
    assert 0.075 * len(SEEDS) <= n_met <= 0.925 * len(SEEDS)
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


LIMITS: list[dict[str, int]] = [{}, {"max_inflight": 64}, {"batch": 16}]
# Every fourth has each axis, each utilisation and each limit in it, as 4 divides none of their numbers.
WIDE = list(product(WIDE_AXES, [0.0, 0.5, 0.7, 0.9, 0.95], LIMITS))[:: 1 if is_long_run() else 4]


@pytest.mark.parametrize(("axes", "utilisation", "limit"), WIDE)
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
    assert (findings(config, utilisation=utilisation), config.warnings) == ([], ())
    assert fleet.has_gaps


def bands(low: float, high: float, resolution: int) -> dict[str, float]:
    return {"min": low, "max": high, "resolution": resolution}


def four(name: str, limits: list[dict[str, int]]) -> list[dict[str, Any]]:
    """TP 1 to 8, with these further figures."""
    tp_limits = zip(SIZES, limits, strict=True)
    return [{"name": f"{name}-tp{tp}", "tp": tp, "profile": QWEN, **more} for tp, more in tp_limits]


NO_LIMITS: list[dict[str, int]] = [{}] * 4
AXES = (bands(0, 8192, 4), bands(400, 2000, 4), bands(0, 16384, 4), bands(8, 24, 4))
HARD = {
    "as many GPUs in each pool": (0.7, *AXES, [{"replicas": 8 // tp} for tp in SIZES], NO_LIMITS),
    "batches of 512": (
        0.7,
        *AXES[:2],
        bands(0, 4096, 2),
        bands(16, 32, 2),
        NO_LIMITS,
        [{"batch": 512}] * 4,
    ),
    "a limit for each pool": (
        0.7,
        *AXES[:2],
        bands(128, 131072, 1),
        bands(12, 62, 10),
        NO_LIMITS,
        [{"max_inflight": n} for n in (128, 4, 32, 32)],
    ),
    "targets below what any pool takes idle": (
        0.7,
        *AXES[:3],
        bands(4, 8, 1),
        NO_LIMITS,
        NO_LIMITS,
    ),
    "curves that cross where profiles end": (
        0.85,
        *AXES[:2],
        bands(0, 32768, 1),
        bands(10, 60, 1),
        NO_LIMITS,
        [{"max_inflight": 256}] * 4,
    ),
    "bands of a few tokens": (
        0.684,
        *AXES[:2],
        {"edges": [0, 22090, 30316, 32768]},
        {"edges": [6, 7, 8, 9, 10]},
        NO_LIMITS,
        NO_LIMITS,
    ),
}


@pytest.mark.parametrize("name", HARD)
def test_what_once_had_findings_lints_clean(name: str) -> None:
    utilisation, isl, ttft, context, itl, prefill, decode = HARD[name]
    content = {
        "utilisation": utilisation,
        "margin": 0.1,
        "prefill": {"isl": isl, "ttft_ms": ttft, "pools": four("prefill", prefill)},
        "decode": {"context_length": context, "itl_ms": itl, "pools": four("decode", decode)},
    }
    _, config = built(content)
    assert (findings(config, utilisation=utilisation), config.warnings) == ([], ())


def test_the_last_band_of_a_grid_with_two_latencies_lints_clean() -> None:
    """Longer prompts come to it, for which TP 1 steps faster at 70 % than TP 2, in smaller batches."""
    llama = load_profile("llama-3.1-8b-h100")
    pools = [{"name": f"tp{tp}", "tp": tp, "profile": "llama-3.1-8b-h100"} for tp in (1, 2)]
    itl = {"edges": [4, 20, 51, 52, 104]}
    stage = {"isl": bands(0, 2048, 5), "ttft_ms": bands(200, 1200, 4), "itl_ms": itl}
    _, config = built({"mode": "agg", "agg": {**stage, "pools": pools}})
    assert lint(config, profiles={f"tp{tp}": llama.tp(tp) for tp in (1, 2)}) == []
