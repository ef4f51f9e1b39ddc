"""Merges bands of a built grid that have the same pools, and what is known of their cells.

A band beyond the range is dropped where it has the pools of the one beside it, and where its targets are
too tight for every pool even when idle. Uneven bands are joined with equal neighbours. Even bands are
joined only where the result is even too, so that they keep Dynamo's keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from slagate.pools.grid_build.bands import Bands
from slagate.pools.grid_build.cells import BEYOND, INFEASIBLE, MET, BuiltCell, Status

Slice = tuple[tuple[int, ...], ...]


def merged(
    cells: Sequence[BuiltCell], axes: Sequence[Bands], asked: Sequence[Bands], *, spill: bool
) -> tuple[list[BuiltCell], list[Bands]]:
    """The same grid in as few bands as possible; `asked` are the axes without bands beyond the range.

    With `spill` bands are equal where their cells list the same pools, otherwise where the first is equal.
    """
    left, found = list(cells), list(axes)
    for at, as_asked in enumerate(asked):
        left, bands = _joined(left, found[at], at, _beyond(left, found[at], at, spill=spill))
        if bands.edges == as_asked.edges:
            bands = replace(bands, uniform=as_asked.uniform)
        slices = _slices(left, at, bands.resolution, spill=spill)
        groups = _even(slices) if bands.uniform else _equal(slices)
        left, found[at] = _joined(left, bands, at, groups)
    return left, found


def emitted(cell: BuiltCell, *, spill: bool) -> tuple[int, ...]:
    """The pools of a cell that the fleet file names."""
    return cell.pools if spill else cell.pools[:1]


def _slices(cells: Sequence[BuiltCell], axis: int, n_bands: int, *, spill: bool) -> list[Slice]:
    return [
        tuple(emitted(cell, spill=spill) for cell in cells if cell.index[axis] == band)
        for band in range(n_bands)
    ]


def _beyond(cells: Sequence[BuiltCell], bands: Bands, axis: int, *, spill: bool) -> list[range]:
    """Groups of bands: those beyond the range with the one beside them, where they can be joined."""
    singles = [range(band, band + 1) for band in range(bands.resolution)]
    if not bands.beyond:
        return singles
    first = max(0, bands.beyond[0] - 1)
    last = bands.beyond[-1] if first < bands.beyond[0] else bands.beyond[-1] + 1
    slices = _slices(cells, axis, bands.resolution, spill=spill)[first : last + 1]
    is_dead = bands.beyond[0] == 0 and all(
        cell.dead for cell in cells if bands.is_beyond(cell.index[axis])
    )
    if len(set(slices)) > 1 and not is_dead:
        return singles
    return [*singles[:first], range(first, last + 1), *singles[last + 1 :]]


def _equal(slices: Sequence[Slice]) -> list[range]:
    groups = [
        [at for at, _ in group] for _, group in groupby(enumerate(slices), lambda item: item[1])
    ]
    return [range(group[0], group[-1] + 1) for group in groups]


def _even(slices: Sequence[Slice]) -> list[range]:
    """The fewest groups of equally many bands in which all are the same."""
    n = len(slices)
    width = next(
        width
        for width in range(n, 0, -1)
        if n % width == 0 and all(slices[at] == slices[at - at % width] for at in range(n))
    )
    return [range(at, at + width) for at in range(0, n, width)]


def _joined(
    cells: Sequence[BuiltCell], bands: Bands, axis: int, groups: Sequence[range]
) -> tuple[list[BuiltCell], Bands]:
    new = bands.joined(groups)
    # A band that took in those beyond the range counts as one that was asked for.
    aside = () if new.beyond else bands.beyond
    to = {band: at for at, group in enumerate(groups) for band in group}
    by_index: dict[tuple[int, ...], tuple[list[BuiltCell], list[BuiltCell]]] = {}
    for cell in cells:
        band = cell.index[axis]
        index = (*cell.index[:axis], to[band], *cell.index[axis + 1 :])
        by_index.setdefault(index, ([], []))[band in aside].append(cell)
    found = [_one(index, *by_index[index]) for index in sorted(by_index)]
    return found, new


def _one(
    index: tuple[int, ...], inside: Sequence[BuiltCell], beyond: Sequence[BuiltCell]
) -> BuiltCell:
    """One cell for all cells `inside`, and for those `beyond`, of which only contests count."""
    marks = [(cell.contested_beyond, cell.contested_tokens) for cell in inside]
    marks += [(True, cell.contested_tokens) for cell in beyond]
    contested_beyond, tokens = min(
        ((where, n) for where, n in marks if n is not None), default=(False, None)
    )
    statuses = {cell.status for cell in inside}
    status: Status = next(s for s in (INFEASIBLE, BEYOND, MET) if s in statuses)
    worst = tuple(
        tuple(max(values) for values in zip(*of_pool, strict=True))
        for of_pool in zip(*(cell.worst_ms for cell in inside), strict=True)
    )
    pools = tuple(at for at in inside[0].pools if all(at in cell.pools for cell in inside))
    dead = all(cell.dead for cell in inside)
    return BuiltCell(index, pools, status, worst, tokens, contested_beyond, dead)
