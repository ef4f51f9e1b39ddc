"""Reports about a built grid: which cells cannot be met, and which targets could be."""

import math
from collections.abc import Iterator

from slagate.pools.grid.grid import number_text
from slagate.pools.grid_build.bands import Bands
from slagate.pools.grid_build.build import BuiltFleet, BuiltStage
from slagate.pools.grid_build.cells import BEYOND, INFEASIBLE, MET, BuiltCell
from slagate.pools.grid_build.spec import BuildSpec

_NAMES = {"isl": "ISL", "context_length": "context", "ttft_ms": "TTFT", "itl_ms": "ITL"}


def report_json(fleet: BuiltFleet, spec: BuildSpec, algorithm: str) -> dict[str, object]:
    """The report as JSON values, with the worst time of every pool in every cell; null: infinite."""
    # Dynamo's algorithms have no margin; utilisation counts only for the ITL of profiles and priorities.
    ours = algorithm == "slagate"
    own = {"margin": spec.margin, "assumed_targets": fleet.assumed} if ours else {}
    return {
        "algorithm": algorithm,
        "utilisation": spec.utilisation,
        **own,
        "stages": {name: _stage_json(stage, spec.margin) for name, stage in fleet.stages.items()},
    }


def report_lines(fleet: BuiltFleet, spec: BuildSpec) -> Iterator[str]:
    """Yield what an operator must see: defaults, how many cells are met, which are not and why."""
    if not any(stage.cells for stage in fleet.stages.values()):
        yield (
            "Dynamo's algorithms do not look for cells that no pool meets; utilisation"
            f" {spec.utilisation:g} counts for the ITL of profiles and for pool priorities only"
        )
    for field, ms in fleet.assumed.items():
        yield (
            f"{_NAMES[field]}: a request that names no target counts as {number_text(ms)} ms, the middle of"
            f' what was asked for; objectives["*"].{field} is where to say otherwise'
        )
    for name, stage in fleet.stages.items():
        if not stage.cells:
            continue
        n_met, n_beyond = len(stage.cells_of(MET)), len(stage.cells_of(BEYOND))
        n_infeasible = len(stage.cells_of(INFEASIBLE))
        yield (
            f"{name}: {n_met} of {len(stage.cells)} cells are met at utilisation"
            f" {spec.utilisation:g} with margin {spec.margin:g}{_others(n_infeasible, n_beyond)}"
        )
        for pool, why in _left_out(stage).items():
            yield f"{name}: {pool} is in no cell, and left out: {why}"
        if stage.added_edges and stage.size is not None:
            edges = ", ".join(map(str, stage.added_edges))
            yield f"{name}: {_NAMES[stage.size.field]} bands were parted at {edges}: curves cross there"
        bands = {cell.index[0] for cell in stage.cells_of(INFEASIBLE)}
        for band in sorted(bands):
            for line in _infeasible(stage, band, spec.margin):
                yield f"{name}: infeasible{_size(stage.size, band)}: {line}"
        for cell in stage.contested:
            yield (
                f"{name}: cell {list(cell.index)} is contested: at {cell.contested_tokens} tokens"
                f" {stage.pools[cell.pools[0]].name} misses targets that another pool meets"
            )
        if n_contested := len(stage.contested_beyond):
            are = "1 cell is" if n_contested == 1 else f"{n_contested} cells are"
            yield (
                f"{name}: {are} contested beyond the range asked for: there some targets are missed"
                " that another pool meets"
            )


def _stage_json(stage: BuiltStage, margin: float) -> dict[str, object]:
    axes = (() if stage.size is None else (stage.size,)) + stage.targets
    found: dict[str, object] = {
        "axes": {axis.field: list(axis.edges) for axis in axes},
        "pools": [
            {"name": stage.pools[at].name, "gpus": stage.pools[at].gpus} for at in stage.used
        ],
    }
    if not stage.cells:
        return found
    bands = sorted({cell.index[0] for cell in stage.cells})
    return found | {
        "left_out": _left_out(stage),
        "added_edges": list(stage.added_edges),
        "attainable_from_ms": [
            [
                [_number(ms) for ms in values]
                for values in _attainable_ms(stage, band, margin).values()
            ]
            for band in bands
        ],
        "cells": [_cell_json(stage, cell) for cell in stage.cells],
    }


def _others(n_infeasible: int, n_beyond: int) -> str:
    """The rest of a sentence, about cells that are not met."""
    infeasible = [f"{n_infeasible} cannot be met by any pool"] if n_infeasible else []
    beyond = [f"{n_beyond} that are not met are beyond the range asked for"] if n_beyond else []
    return "".join(f"; {words}" for words in infeasible + beyond)


def _left_out(stage: BuiltStage) -> dict[str, str]:
    """The pools of the spec that are not in the fleet file, and why."""
    found = {}
    for at, pool in enumerate(stage.pools):
        if at in stage.used:
            continue
        if not any(all(map(math.isfinite, cell.worst_ms[at])) for cell in stage.cells):
            found[pool.name] = "each band has sizes for which no time of it is known"
        elif any(cell.status == MET and at in cell.pools for cell in stage.cells):
            found[pool.name] = "what it meets, a pool meets that is cheaper, or equal and before it"
        else:
            found[pool.name] = (
                "it meets no cell, and where none does, another pool counts as faster"
            )
    return found


def _cell_json(stage: BuiltStage, cell: BuiltCell) -> dict[str, object]:
    worst = zip(stage.pools, cell.worst_ms, strict=True)
    return {
        "index": list(cell.index if stage.size is not None else cell.index[1:]),
        "pools": [stage.pools[at].name for at in cell.pools],
        "status": cell.status,
        "contested_tokens": cell.contested_tokens,
        "contested_beyond": cell.contested_beyond,
        "worst_ms": {pool.name: [_number(value) for value in values] for pool, values in worst},
    }


def _infeasible(stage: BuiltStage, band: int, margin: float) -> Iterator[str]:
    """Which targets no pool meets for every size of the band."""
    names = [_NAMES[axis.field] for axis in stage.targets]
    attainable = _attainable_ms(stage, band, margin)
    if not attainable:
        yield "every target"
    for pool, found in attainable.items():
        if len(names) == 1:
            yield f"{names[0]} targets below {found[0]:.4g} ms"
        else:
            limits = (f"{what} {ms:.4g} ms" for what, ms in zip(names, found, strict=True))
            yield f"what no pool meets; {stage.pools[pool].name} meets from {' and '.join(limits)}"


def _attainable_ms(stage: BuiltStage, band: int, margin: float) -> dict[int, tuple[float, ...]]:
    """By pool the tightest targets that it meets together for every size of the band.

    Pools without a time are left out, and those than which another one is nowhere slower.
    """
    worst = next(cell.worst_ms for cell in stage.cells if cell.index[0] == band)
    front: dict[int, tuple[float, ...]] = {}
    for pool in sorted(range(len(worst)), key=lambda at: worst[at]):
        covered = any(
            all(a <= b for a, b in zip(worst[other], worst[pool], strict=True)) for other in front
        )
        if not covered and all(map(math.isfinite, worst[pool])):
            front[pool] = worst[pool]
    return {pool: tuple(ms / (1.0 - margin) for ms in values) for pool, values in front.items()}


def _size(size: Bands | None, band: int) -> str:
    if size is None:
        return ""
    low, high = size.edges[band], size.edges[band + 1]
    return f" for {_NAMES[size.field]} {low:g} to {high:g}"


def _number(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
