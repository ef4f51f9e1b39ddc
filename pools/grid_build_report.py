"""What a grid that was built says of itself: which cells cannot be met, and what targets could be."""

import math
from collections.abc import Iterator

from slagate.pools.grid_build import BuiltFleet, BuiltStage
from slagate.pools.grid_build_bands import Bands
from slagate.pools.grid_build_cells import BEYOND, INFEASIBLE, MET, BuiltCell
from slagate.pools.grid_build_spec import BuildSpec

_NAMES = {"isl": "ISL", "context_length": "context", "ttft_ms": "TTFT", "itl_ms": "ITL"}


def report_json(fleet: BuiltFleet, spec: BuildSpec, algorithm: str) -> dict[str, object]:
    """Everything, as JSON values: what every pool takes in the worst case of every cell; null: never."""
    return {
        "algorithm": algorithm,
        "utilisation": spec.utilisation,
        "margin": spec.margin,
        "stages": {name: _stage_json(stage, spec.margin) for name, stage in fleet.stages.items()},
    }


def report_lines(fleet: BuiltFleet, spec: BuildSpec) -> Iterator[str]:
    """What an operator must know, a line each."""
    for name, stage in fleet.stages.items():
        if not stage.cells:
            continue
        n_met, n_beyond = len(stage.cells_of(MET)), len(stage.cells_of(BEYOND))
        n_infeasible = len(stage.cells_of(INFEASIBLE))
        yield (
            f"{name}: {n_met} of {len(stage.cells)} cells are met at utilisation"
            f" {spec.utilisation:g} with margin {spec.margin:g}; the fastest pool has the"
            f" {n_infeasible} infeasible ones and {n_beyond} beyond the range asked for"
        )
        used = {at for cell in stage.cells for at in cell.pools}
        for at, pool in enumerate(stage.pools):
            if at not in used:
                yield (
                    f"{name}: {pool.name} gets no cell: another pool is cheaper where it is fast"
                    " enough, and faster elsewhere"
                )
        if stage.added_edges and stage.size is not None:
            edges = ", ".join(map(str, stage.added_edges))
            yield f"{name}: {_NAMES[stage.size.field]} bands were parted at {edges}: curves cross there"
        bands = {cell.index[0] for cell in stage.cells_of(INFEASIBLE)}
        for band in sorted(bands):
            limits = _attainable_ms(stage, band, spec.margin)
            parts = [
                f"{_NAMES[axis.field]} targets below {_ms(limit)}"
                for axis, limit in zip(stage.targets, limits, strict=True)
            ]
            yield f"{name}: infeasible{_size(stage.size, band)}: {' and '.join(parts)}"
        for cell in stage.contested:
            yield (
                f"{name}: cell {list(cell.index)} is contested: at {cell.contested_tokens} tokens"
                f" {stage.pools[cell.pools[0]].name} misses targets that another pool meets"
            )


def _stage_json(stage: BuiltStage, margin: float) -> dict[str, object]:
    axes = (() if stage.size is None else (stage.size,)) + stage.targets
    bands = sorted({cell.index[0] for cell in stage.cells})
    return {
        "axes": {axis.field: list(axis.edges) for axis in axes},
        "added_edges": list(stage.added_edges),
        "pools": [{"name": pool.name, "gpus": pool.gpus} for pool in stage.pools],
        "attainable_from_ms": [
            [_number(ms) for ms in _attainable_ms(stage, band, margin)] for band in bands
        ],
        "cells": [_cell_json(stage, cell) for cell in stage.cells],
    }


def _cell_json(stage: BuiltStage, cell: BuiltCell) -> dict[str, object]:
    worst = zip(stage.pools, cell.worst_ms, strict=True)
    return {
        "index": list(cell.index if stage.size is not None else cell.index[1:]),
        "pools": [stage.pools[at].name for at in cell.pools],
        "status": cell.status,
        "contested_tokens": cell.contested_tokens,
        "worst_ms": {pool.name: [_number(value) for value in values] for pool, values in worst},
    }


def _attainable_ms(stage: BuiltStage, band: int, margin: float) -> list[float]:
    """The tightest target of each latency that some pool meets for every size of the band."""
    worst = next(cell.worst_ms for cell in stage.cells if cell.index[0] == band)
    return [min(values) / (1.0 - margin) for values in zip(*worst, strict=True)]


def _size(size: Bands | None, band: int) -> str:
    if size is None:
        return ""
    low, high = size.edges[band], size.edges[band + 1]
    return f" for {_NAMES[size.field]} {low:g} to {high:g}"


def _ms(value: float) -> str:
    return f"{value:.4g} ms" if math.isfinite(value) else "any limit"


def _number(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
