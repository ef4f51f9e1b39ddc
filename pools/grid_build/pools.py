"""The pools of a build spec with their curves, from timing profiles or from points."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from slagate.pools.grid.errors import ConfigError, Problem
from slagate.pools.grid_build.cells import BuildPool
from slagate.pools.grid_build.curve import (
    Curve,
    Load,
    idle_decode,
    linear_curve,
    mixed_curves,
    planned_batch,
    profile_decode,
    profile_prefill,
    queued_prefill,
)
from slagate.pools.grid_build.spec import BuildSpec, Point, PoolBuildSpec, stage_profiles, stages_of
from slagate.workers.profiles.profile import TpProfile


class StagePools(NamedTuple):
    """The pools of one stage, and lists in the same order.

    `for_dynamo` has the curve that Dynamo's builders use: TTFT on an idle worker for a prefill pool, ITL
    under the planned load for a decode pool. They take no aggregated pools, whose curve nobody uses.
    """

    pools: list[BuildPool]
    for_dynamo: list[Curve]
    profiled: list[bool]  # whether it has a profile

    @property
    def longest_tokens(self) -> float:
        """The largest size with known times of every pool."""
        return min(_known_tokens(pool) for pool in self.pools)

    @property
    def profiled_tokens(self) -> float:
        """The largest size with measured times of every pool with a profile; infinity without any."""
        pools = zip(self.pools, self.profiled, strict=True)
        return min((_known_tokens(pool) for pool, has in pools if has), default=math.inf)


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
        stage_found = StagePools([], [], [])
        for at, pool in enumerate(part.pools):
            curves, idle = _curves(stage, pool, profiles.get(at), _load(spec, pool))
            stage_found.pools.append(BuildPool(pool.name, pool.gpus, curves, idle))
            stage_found.profiled.append(at in profiles)
            stage_found.for_dynamo.append((idle if stage == "prefill" else curves)[0])
        found[stage] = stage_found
    if problems:
        raise ConfigError(source, problems)
    return found


def _known_tokens(pool: BuildPool) -> float:
    return min(curve.measured_tokens for curve in pool.curves)


def _load(spec: BuildSpec, pool: PoolBuildSpec) -> Load:
    return Load(
        utilisation=spec.utilisation,
        replicas=pool.planned_workers,
        batch=planned_batch(pool.batch, pool.max_inflight),
        isl_tokens=spec.traffic.isl,
        osl_tokens=spec.traffic.osl,
        variability=spec.traffic.service_variability,
    )


def _curves(
    stage: str, pool: PoolBuildSpec, profile: TpProfile | None, load: Load
) -> tuple[tuple[Curve, ...], tuple[Curve, ...]]:
    """The curves by latency, under the load and idle; a curve of points for ITL counts as both."""
    if stage == "decode":
        if profile is None:
            itl = _given(pool.itl_curve)
            return (itl,), (itl,)
        return (profile_decode(profile, load),), (idle_decode(profile),)
    idle = _given(pool.ttft_curve) if profile is None else profile_prefill(profile)
    if stage == "prefill":
        return (queued_prefill(idle, load),), (idle,)
    if profile is not None:
        return mixed_curves(profile, load), (idle, idle_decode(profile))
    itl = _given(pool.itl_curve)
    return (queued_prefill(idle, load), itl), (idle, itl)


def _given(points: Sequence[Point] | None) -> Curve:
    # The spec's rules guarantee that a pool without a profile has the curves of its stage.
    assert points is not None
    return linear_curve([(tokens, math.nan if ms is None else ms) for tokens, ms in points])
