"""Fifty reloads in a minute of steady load: what they cost requests, which is no failure and little time.

Each takes some workers out and others in, at times with other limits, targets or names of pools. The
figures without reloads are of the same load on the same processes just before.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from bench.figures import figures
from support.gateway.processes import Cluster, Pool, cluster, eventually, fleet_config
from support.gateway.reloads import Run, reload_under_load

PER_S = 100.0
SECONDS = 60.0
QUIET_S = 20.0
N_RELOADS = 50

# Eight times as fast as it is, so that one worker can do it all.
FAST = ("--time-scale", "0.125")


def measure(folder: Path) -> dict[str, Any]:
    """100 requests/s of at most 1,000 prompt and 16 output tokens, disaggregated."""
    rng = random.Random(6)
    with cluster(folder, {"p": Pool("prefill", 2, FAST), "d": Pool("decode", 2, FAST)}) as fleet:
        addresses = {"p": ("prefill", fleet.addresses("p")), "d": ("decode", fleet.addresses("d"))}
        file = fleet_config(addresses)
        quiet = _run(fleet, file, seconds=QUIET_S, n_reloads=0, rng=rng)
        run = _run(fleet, file, seconds=SECONDS, n_reloads=N_RELOADS, rng=rng)
        missed = [f"{len(run.failed)} requests failed: {run.failed[:3]}"] if run.failed else []
        missed += [f"{len(run.wrong)} wrong streams: {run.wrong[:3]}"] if run.wrong else []
        if run.n_reloads != N_RELOADS:
            missed.append(f"{run.n_reloads} of {N_RELOADS} reloads changed something")
        if strange := run.named - run.versions:
            missed.append(f"receipts name versions that were not in force: {strange}")
        listed = {each for _, some in addresses.values() for each in some}
        missed += _left(fleet, listed)
    return {
        "requests": len(run.served),
        "failed": len(run.failed),
        "wrong": len(run.wrong),
        "reloads": run.n_reloads,
        "seconds": round(run.ended_s[-1], 1),
        "versions_named": len(run.named),
        **_figures("reloading", run),
        **_figures("quiet", quiet),
        "missed": missed,
    }


def _run(fleet: Cluster, file: dict[str, Any], **more: Any) -> Run:
    return anyio.run(lambda: reload_under_load(fleet, file, per_s=PER_S, **more))


def _left(fleet: Cluster, listed: set[str]) -> Sequence[str]:
    """What is still there of workers that were removed, or of requests."""
    try:
        eventually(lambda: {w.worker for w in fleet.gateway.workers()} == listed, "gone")
        eventually(fleet.gateway.is_idle, "idle")
    except AssertionError as error:
        return [f"workers that were removed: {error}"]
    return []


def _figures(name: str, run: Run) -> dict[str, Any]:
    ttfts_s = [one.ttft_s for one in run.served if one.ttft_s is not None]
    late_s = [one.late_s for one in run.served]
    return figures(f"{name}_ttft", ttfts_s) | {
        f"{name}_ttft_p99_ms": round(sorted(ttfts_s)[int(0.99 * len(ttfts_s))] * 1000, 1),
        f"{name}_client_late_p99_ms": round(sorted(late_s)[int(0.99 * len(late_s))] * 1000, 1),
    }
