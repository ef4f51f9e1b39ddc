"""The two versions of Dynamo's own grid builder, for comparison and for grids that must not move.

Facts of `build_isl_latency_grid` at ai-dynamo/dynamo 1b8d9356 (first) and 4f2da0ea (current):

    version    size of a band    target of a band
    first      its middle        its upper edge
    current    its upper edge    its lower edge

Pools whose latency at that size is at most that target qualify. The cheapest of them gets the cell; where
there is none, the pool with the lowest latency does; equals go in list order. Neither version knows load.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from slagate.pools.grid.errors import ConfigError, Problem
from slagate.pools.grid.json_text import shown
from slagate.pools.grid_build.curve import Function
from slagate.pools.grid_build.spec import AXES, AxisSpec, BuildSpec, DisaggBuildSpec, stages_of

Version = Literal["dynamo", "dynamo-first"]


class Range(NamedTuple):
    """`resolution` equal bands from `low` to `high`, in tokens or ms."""

    low: float
    high: float
    resolution: int


def range_of(axis: AxisSpec) -> Range:
    """The range of an axis of a spec that `check_for_dynamo` let pass."""
    # The spec's rules guarantee these three where there are no edges.
    assert axis.min is not None
    assert axis.max is not None
    assert axis.resolution is not None
    return Range(axis.min, axis.max, axis.resolution)


def check_for_dynamo(
    spec: BuildSpec, source: str, algorithm: str, *, spill: bool, split: bool
) -> None:
    """Raise `ConfigError` naming all that the algorithms of Dynamo do not support."""
    problems = []
    if spill:
        problems.append(Problem("--spill", f"does not go together with the algorithm {algorithm}"))
    if not split:
        reason = f"does not go together with the algorithm {algorithm}, which parts no bands"
        problems.append(Problem("--no-split", reason))
    if not isinstance(spec, DisaggBuildSpec):
        problems.append(Problem("mode", f"must be disagg with the algorithm {algorithm}"))
    if spec.margin:
        reason = f"must be 0 with the algorithm {algorithm} (got {shown(spec.margin)})"
        problems.append(Problem("margin", reason))
    for stage, part in stages_of(spec).items():
        for field in AXES[stage]:
            axis: AxisSpec | None = getattr(part, field)
            if axis is None:
                continue
            if axis.edges is not None:
                reason = f"must be min, max and resolution with the algorithm {algorithm}"
                problems.append(Problem(f"{stage}.{field}.edges", reason))
            if axis.beyond and "beyond" in axis.model_fields_set:
                reason = f"must be false or left out with the algorithm {algorithm}"
                problems.append(Problem(f"{stage}.{field}.beyond", reason))
    if problems:
        raise ConfigError(source, problems)


def dynamo_mapping(
    curves: Sequence[Function],
    costs: Sequence[float],
    *,
    size: Range,
    latency: Range,
    version: Version,
) -> list[list[int]]:
    """For each cell, as `[size][latency]`, the position in `curves` of the pool that gets it.

    That is the cheapest pool that meets the cell's target at its size, or else the fastest there.
    `curves` are by pool, milliseconds over tokens; `costs` by pool, such as GPUs per worker.
    Raises `ValueError` where `curves` is empty or `costs` has another length; with version
    "dynamo" also where a range ends at or below its start, or a resolution is below 1.
    """
    if not curves:
        raise ValueError("curves must not be empty")
    if len(curves) != len(costs):
        raise ValueError(f"there are {len(curves)} curves and {len(costs)} costs")
    current = version == "dynamo"
    for name, axis in (("size", size), ("latency", latency)):
        if current and axis.resolution <= 0:
            raise ValueError(f"{name} resolution must be above 0 (got {axis.resolution})")
        if current and axis.high <= axis.low:
            raise ValueError(f"{name} max must be above min {axis.low} (got {axis.high})")
    size_step = (size.high - size.low) / size.resolution
    latency_step = (latency.high - latency.low) / latency.resolution
    mapping = []
    for row in range(size.resolution):
        tokens = size.low + (row + (1.0 if current else 0.5)) * size_step
        latencies = [curve(tokens) for curve in curves]
        targets = [
            latency.low + (column + (0 if current else 1)) * latency_step
            for column in range(latency.resolution)
        ]
        mapping.append([_pool(latencies, costs, target) for target in targets])
    return mapping


def _pool(latencies: Sequence[float], costs: Sequence[float], target: float) -> int:
    meets = [at for at, latency in enumerate(latencies) if latency <= target]
    # min keeps the first of equals. A NaN latency never meets a target, but as the first of the list min
    # returns it, and so does Dynamo's code.
    if meets:
        return min(meets, key=lambda at: costs[at])
    return min(range(len(latencies)), key=lambda at: latencies[at])
