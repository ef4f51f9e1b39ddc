"""The pools of a build spec with their curves: profiles read, points taken as they stand."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from slagate.pools.curve import (
    DEFAULT_BATCH,
    Curve,
    Load,
    linear_curve,
    mixed_curves,
    profile_decode,
    profile_prefill,
    queued_prefill,
)
from slagate.pools.errors import ConfigError, Problem
from slagate.pools.grid_build_cells import BuildPool
from slagate.pools.grid_build_profiles import stage_profiles
from slagate.pools.grid_build_spec import BuildSpec, Point, PoolBuildSpec, stages_of
from slagate.workers.profile import TpProfile


class StagePools(NamedTuple):
    """The pools of one stage: their speed at the stated utilisation, and that of an idle worker.

    `idle` has what Dynamo's builders look at: one prompt for a prefill pool; there is none for ITL, which
    is of a batch, so for a decode pool it is the same curve.
    """

    loaded: list[BuildPool]
    idle: list[Curve]

    @property
    def longest_tokens(self) -> float:
        """The largest size that was measured of every pool."""
        return min(curve.measured_tokens for pool in self.loaded for curve in pool.curves)


def stage_pools(spec: BuildSpec, source: str) -> dict[str, StagePools]:
    """The pools of each stage. Raises `ConfigError` with every profile that cannot be used."""
    problems: list[Problem] = []
    found = {}
    for stage, part in stages_of(spec).items():
        named = {at: (p.profile, p.tp) for at, p in enumerate(part.pools) if p.profile is not None}
        profiles, faults = stage_profiles(stage, named)
        problems += faults
        if faults:
            continue
        stage_found = StagePools([], [])
        for at, pool in enumerate(part.pools):
            curves, idle = _curves(stage, pool, profiles.get(at), _load(spec, pool))
            stage_found.loaded.append(BuildPool(pool.name, pool.gpus, curves))
            stage_found.idle.append(idle)
        found[stage] = stage_found
    if problems:
        raise ConfigError(source, problems)
    return found


def _load(spec: BuildSpec, pool: PoolBuildSpec) -> Load:
    limits = [limit for limit in (pool.batch, pool.max_inflight) if limit is not None]
    return Load(
        utilisation=spec.utilisation,
        replicas=pool.n_workers,
        batch=min(limits, default=DEFAULT_BATCH),
        isl_tokens=spec.traffic.isl,
        osl_tokens=spec.traffic.osl,
        variability=spec.traffic.service_variability,
    )


def _curves(
    stage: str, pool: PoolBuildSpec, profile: TpProfile | None, load: Load
) -> tuple[tuple[Curve, ...], Curve]:
    if stage == "agg" and profile is not None:
        return mixed_curves(profile, load), profile_prefill(profile)
    if stage == "decode":
        itl = _given(pool.itl_curve) if profile is None else profile_decode(profile, load)
        return (itl,), itl
    idle = _given(pool.ttft_curve) if profile is None else profile_prefill(profile)
    ttft = queued_prefill(idle, load)
    return ((ttft, _given(pool.itl_curve)) if stage == "agg" else (ttft,)), idle


def _given(points: Sequence[Point] | None) -> Curve:
    # The spec's rules see to it that a pool without a profile has the curves of its stage.
    assert points is not None
    return linear_curve([(tokens, math.nan if ms is None else ms) for tokens, ms in points])
