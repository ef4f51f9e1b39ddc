"""Builds a fleet file from pools and SLA axes: for each cell the cheapest pool that meets all of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slagate.pools.fleet_file.keys import STAGES
from slagate.pools.fleet_file.load import parse_config
from slagate.pools.fleet_file.models import ANY_CLASS
from slagate.pools.grid_build.bands import (
    Bands,
    as_asked,
    assumed_targets,
    size_bands,
    target_bands,
)
from slagate.pools.grid_build.cells import (
    INFEASIBLE,
    BuildPool,
    BuiltCell,
    Status,
    build_cells,
    crossings,
)
from slagate.pools.grid_build.curve import Curve
from slagate.pools.grid_build.dynamo import Version, check_for_dynamo, dynamo_mapping, range_of
from slagate.pools.grid_build.merge import emitted, merged
from slagate.pools.grid_build.pools import StagePools, stage_pools
from slagate.pools.grid_build.spec import (
    AXES,
    AxisSpec,
    BuildSpec,
    PoolBuildSpec,
    StageSpec,
    stages_of,
)

Algorithm = Literal["slagate"] | Version
ALGORITHMS: tuple[Algorithm, ...] = ("slagate", "dynamo", "dynamo-first")

MAX_SPLITS = 8
"""Rounds of splitting bands where curves cross; each leaves fewer crossings."""


@dataclass(frozen=True, slots=True)
class BuiltStage:
    """The grid of one stage. `cells` is empty where an algorithm of Dynamo's made the mapping.

    `pools` are all pools of the spec; the file has those whose numbers are in `used`, in that order.
    """

    pools: tuple[BuildPool, ...]
    size: Bands | None  # None: a grid without sizes
    targets: tuple[Bands, ...]
    cells: tuple[BuiltCell, ...]
    used: tuple[int, ...]
    added_edges: tuple[int, ...] = ()

    def cells_of(self, status: Status) -> list[BuiltCell]:
        """The cells with this status."""
        return [cell for cell in self.cells if cell.status == status]

    @property
    def contested(self) -> list[BuiltCell]:
        """Cells that no single pool is right for, in the range asked for."""
        return [c for c in self.cells if c.contested_tokens is not None and not c.contested_beyond]

    @property
    def contested_beyond(self) -> list[BuiltCell]:
        """Cells that no single pool is right for beyond the range asked for."""
        return [c for c in self.cells if c.contested_beyond]


@dataclass(frozen=True, slots=True)
class BuiltFleet:
    """The content of a fleet file, and the grids of its stages with the reasons for them."""

    content: dict[str, object]
    stages: dict[str, BuiltStage]
    # Default targets in ms by field, where the spec has none.
    assumed: dict[str, int | float]

    @property
    def has_gaps(self) -> bool:
        """Whether some cell of the range asked for cannot be met, or is contested."""
        return any(s.cells_of(INFEASIBLE) or s.contested for s in self.stages.values())


def build_fleet(
    spec: BuildSpec,
    source: str,
    *,
    algorithm: Algorithm = "slagate",
    spill: bool = False,
    split: bool = True,
) -> BuiltFleet:
    """Build the fleet file of `spec`, which errors call `source`; it was loaded as a check.

    With `spill` a cell lists the further pools that meet it. With `split` bands are split where
    curves cross in a cell that no pool meets. Raises `ConfigError` for profiles that cannot be
    used, and for what the chosen one of Dynamo's algorithms does not support, as `spill`.
    """
    if algorithm != "slagate":
        check_for_dynamo(spec, source, algorithm, spill=spill, split=split)
    content: dict[str, object] = {"mode": spec.mode}
    if spec.enable_priority_retry:
        content["enable_priority_retry"] = True
    if scheduling := spec.scheduling.model_dump(exclude_unset=True):
        content["scheduling"] = scheduling
    objectives = {
        name: objective.model_dump(exclude_unset=True)
        for name, objective in spec.objectives.items()
    }
    stages = {}
    entries: dict[str, object] = {}
    loaded = stage_pools(spec, source)
    for stage, keys in STAGES[spec.mode].items():
        part, pools = stages_of(spec)[stage], loaded[stage]
        if algorithm == "slagate":
            built = _built(spec, stage, part, pools, spill=spill, split=split)
            mapping: Sequence[object] = _nested(built, spill=spill)
        else:
            built = _plain(stage, part, pools)
            mapping = _dynamo(part, stage, pools, algorithm)
        stages[stage] = built
        axes = {} if built.size is None else built.size.keys()
        for target in built.targets:
            axes |= target.keys()
        used = [part.pools[at] for at in built.used]
        content |= {
            keys.pool_count: len(used),
            keys.names: [pool.name for pool in used],
            keys.priorities: priorities(built, _asked_sizes(stage, part)),
            keys.strategy: {**axes, keys.mapping: mapping},
        }
        entries |= {pool.name: _entry(pool) for pool in used}
    assumed: dict[str, int | float] = {}
    if algorithm == "slagate":
        axes_of_all = [axis for built in stages.values() for axis in built.targets]
        assumed = assumed_targets(spec.objectives, axes_of_all)
        if assumed:
            objectives[ANY_CLASS] = {**objectives.get(ANY_CLASS, {}), **assumed}
    if objectives:
        content["objectives"] = objectives
    content["pools"] = entries
    parse_config(content, source=f"the file built from {source}")
    return BuiltFleet(content, stages, assumed)


def priorities(stage: BuiltStage, sizes: Sequence[float]) -> list[int]:
    """The rank of each used pool by speed, 0 the fastest; equal pools share a rank.

    A pool's speed is the mean logarithm of its latencies at `sizes`, in tokens.
    """
    slowness = [
        sum(math.log(curve.ms(tokens)) for curve in stage.pools[at].curves for tokens in sizes)
        for at in stage.used
    ]
    ranks = sorted(set(slowness))
    return [ranks.index(value) for value in slowness]


def _asked_sizes(stage: str, part: StageSpec) -> Sequence[float]:
    """The upper edges of the size bands that were asked for."""
    size_field = AXES[stage][0]
    if getattr(part, size_field) is None:
        return (1.0,)  # curves of such a stage are level
    return as_asked(size_field, _axis(part, size_field)).edges[1:]


def _built(
    spec: BuildSpec, stage: str, part: StageSpec, pools: StagePools, *, spill: bool, split: bool
) -> BuiltStage:
    size_field, *target_fields = AXES[stage]
    targets = [target_bands(field, _axis(part, field)) for field in target_fields]
    asked = [as_asked(field, _axis(part, field)) for field in target_fields]
    loaded = pools.pools
    has_sizes = getattr(part, size_field) is not None
    if has_sizes:
        size = size_bands(
            size_field,
            _axis(part, size_field),
            longest_tokens=pools.longest_tokens,
            profiled_tokens=pools.profiled_tokens,
        )
        asked = [as_asked(size_field, _axis(part, size_field)), *asked]
    else:
        assert spec.traffic.isl is not None
        loaded = [_at_one_size(pool, spec.traffic.isl) for pool in loaded]
        size = Bands(size_field, (0, 1), uniform=True, asked=(0, 1))
        asked = [size, *asked]
    cells = build_cells(loaded, size, targets, margin=spec.margin)
    added: set[int] = set()
    for _ in range(MAX_SPLITS if split and has_sizes and len(targets) == 1 else 0):
        found = crossings(loaded, size, targets[0], cells)
        if not found:
            break
        added |= found
        size = size.split(found)
        cells = build_cells(loaded, size, targets, margin=spec.margin)
    cells, (size, *targets) = merged(cells, [size, *targets], asked, spill=spill)
    return BuiltStage(
        pools=tuple(loaded),
        size=size if has_sizes else None,
        targets=tuple(targets),
        cells=tuple(cells),
        used=tuple(sorted({at for cell in cells for at in emitted(cell, spill=spill)})),
        added_edges=tuple(sorted(added.intersection(size.edges))),
    )


def _at_one_size(pool: BuildPool, tokens: int) -> BuildPool:
    curves, idle = (
        tuple(_level(curve.ms(tokens)) for curve in some) for some in (pool.curves, pool.idle)
    )
    return pool._replace(curves=curves, idle=idle)


def _level(ms: float) -> Curve:
    return Curve(lambda _: ms, math.inf)


def _nested(stage: BuiltStage, *, spill: bool) -> list[object]:
    numbers = {at: number for number, at in enumerate(stage.used)}
    named = [[numbers[at] for at in emitted(cell, spill=spill)] for cell in stage.cells]
    cells: list[object] = [pools if len(pools) > 1 else pools[0] for pools in named]
    axes = stage.targets if stage.size is None else (stage.size, *stage.targets)
    for axis in reversed(axes[1:]):
        n = axis.resolution
        cells = [cells[at : at + n] for at in range(0, len(cells), n)]
    return cells


def _plain(stage: str, part: StageSpec, pools: StagePools) -> BuiltStage:
    size, target = (as_asked(field, _axis(part, field)) for field in AXES[stage])
    return BuiltStage(tuple(pools.pools), size, (target,), (), used=tuple(range(len(pools.pools))))


def _dynamo(part: StageSpec, stage: str, pools: StagePools, version: Version) -> list[list[int]]:
    size, latency = (range_of(_axis(part, field)) for field in AXES[stage])
    return dynamo_mapping(
        [curve.raw_ms for curve in pools.for_dynamo],
        [pool.gpus for pool in pools.pools],
        size=size,
        latency=latency,
        version=version,
    )


def _axis(part: StageSpec, field: str) -> AxisSpec:
    axis: AxisSpec = getattr(part, field)
    return axis


def _entry(pool: PoolBuildSpec) -> dict[str, object]:
    """The entry of the pool in the fleet file's `pools`."""
    cost = int(pool.gpus) if pool.gpus == int(pool.gpus) else pool.gpus
    values = {
        "profile": pool.profile,
        "tp": pool.tp,
        "cost": cost,
        "workers": list(pool.workers) or None,
        # Where there are workers, their number is that of the replicas.
        "replicas": None if pool.workers else pool.replicas,
        "batch": pool.batch,
        "max_inflight": pool.max_inflight,
        "max_queued_tokens": pool.max_queued_tokens,
    }
    return {key: value for key, value in values.items() if value is not None}
