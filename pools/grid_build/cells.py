"""Decides which pool gets a cell: the cheapest that meets every request of it, or else the fastest.

Every request is met where the slowest size of the band meets the tightest target of the cell. A cell that
no pool meets as a whole is infeasible, but its requests with looser targets may still be met. Such a cell
gets a pool that meets each request that any pool meets. Where there is none, because curves cross inside of
the band, the cell is contested. Where no request at all is met under the planned load, the cell gets the
pool that is the fastest when idle.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Final, Literal, NamedTuple

from slagate.pools.grid_build.bands import Bands
from slagate.pools.grid_build.curve import Curve

Status = Literal["met", "infeasible", "beyond"]
MET: Final = "met"
INFEASIBLE: Final = "infeasible"
BEYOND: Final = "beyond"

_HAIR = 1e-9
"""Curves that cross in less than this share of a segment only touch."""


class BuildPool(NamedTuple):
    """A pool with a curve over sizes for each latency that has a target.

    `curves` are under the planned load, `idle` are those of a single request.
    """

    name: str
    gpus: float
    curves: tuple[Curve, ...]
    idle: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class BuiltCell:
    """One cell: its pools in order, of which the first gets it, and why.

    `worst_ms` is by pool and latency. `contested_tokens` is a size at which another pool meets a target of
    this cell that the first one misses, with `contested_beyond` only outside of the range asked for. The
    cell is `dead` where no pool meets any of its requests even when idle.
    """

    index: tuple[int, ...]
    pools: tuple[int, ...]
    status: Status
    worst_ms: tuple[tuple[float, ...], ...]
    contested_tokens: int | None = None
    contested_beyond: bool = False
    dead: bool = False


class _BandTimes(NamedTuple):
    """The times of pools over one band of sizes: `ms[pool][latency][sample]`, `idle_ms` without load."""

    samples: list[int]
    ms: list[list[list[float]]]
    idle_ms: list[list[list[float]]]
    worst_ms: tuple[tuple[float, ...], ...]
    is_beyond: bool


class _Cell(NamedTuple):
    """The targets of one cell, by latency: the tightest, and the first that is too loose for it."""

    low_ms: tuple[float, ...]
    high_ms: tuple[float, ...]
    is_beyond: bool


def build_cells(
    pools: Sequence[BuildPool], size: Bands, targets: Sequence[Bands], *, margin: float
) -> list[BuiltCell]:
    """Decide all cells, the last axis fastest; `margin` is the share of targets to spare."""
    cells = []
    for band in range(size.resolution):
        row = _row(pools, size, band)
        for index in product(*(range(axis.resolution) for axis in targets)):
            lows, highs = zip(
                *(axis.targets(at) for axis, at in zip(targets, index, strict=True)), strict=True
            )
            beyond = row.is_beyond or any(
                axis.is_beyond(at) for axis, at in zip(targets, index, strict=True)
            )
            cell = _Cell(lows, highs, beyond)
            cells.append(_built((band, *index), pools, row, cell, margin=margin))
    return cells


def crossings(
    pools: Sequence[BuildPool], size: Bands, target: Bands, cells: Sequence[BuiltCell]
) -> set[int]:
    """Sizes in tokens at which another pool becomes the fastest in a contested cell.

    Splitting bands there helps such cells. The grid must have one latency.
    """
    found: set[int] = set()
    contested = [cell for cell in cells if cell.contested_tokens is not None]
    for cell in contested:
        low, high = target.targets(cell.index[1])
        row = _row(pools, size, cell.index[0])
        for at, (a, b) in enumerate(pairwise(row.samples)):
            before, after = _fastest(pools, a), _fastest(pools, b)
            values = [[row.ms[pool][0][at + end] for end in (0, 1)] for pool in (before, after)]
            matters = min(map(min, values)) < high and max(map(max, values)) > low
            if before != after and matters:
                found.add(_change(pools, a, b))
    return found.difference(size.edges)


def _row(pools: Sequence[BuildPool], size: Bands, band: int) -> _BandTimes:
    samples = size.samples(
        band, [x for pool in pools for curve in pool.curves for x in curve.knots]
    )
    ms = [[[curve.ms(x) for x in samples] for curve in pool.curves] for pool in pools]
    idle_ms = [[[curve.ms(x) for x in samples] for curve in pool.idle] for pool in pools]
    # The edge itself counts too: it belongs to the next band, but rounding may put it into this one.
    edge = size.edges[band + 1]
    worst = tuple(
        tuple(
            max(*values, curve.ms(edge)) for values, curve in zip(of_pool, pool.curves, strict=True)
        )
        for of_pool, pool in zip(ms, pools, strict=True)
    )
    return _BandTimes(samples, ms, idle_ms, worst, size.is_beyond(band))


def _built(
    index: tuple[int, ...],
    pools: Sequence[BuildPool],
    row: _BandTimes,
    cell: _Cell,
    *,
    margin: float,
) -> BuiltCell:
    limits = [low * (1.0 - margin) for low in cell.low_ms]
    meets = [
        at
        for at, worst in enumerate(row.worst_ms)
        if all(ms <= limit for ms, limit in zip(worst, limits, strict=True))
    ]
    slowness = [_slowness(row.worst_ms[at], row.ms[at], row, cell) for at in range(len(pools))]
    if meets:
        order = sorted(meets, key=lambda at: (pools[at].gpus, slowness[at], at))
        return BuiltCell(index, tuple(order), MET, row.worst_ms)
    status: Status = BEYOND if cell.is_beyond else INFEASIBLE
    if not any(_meets_some(values, cell) for values in row.ms):
        idle = [_slowness([max(v) for v in values], values, row, cell) for values in row.idle_ms]
        order = sorted(
            range(len(pools)), key=lambda at: (idle[at], slowness[at], pools[at].gpus, at)
        )
        dead = not any(_meets_some(values, cell) for values in row.idle_ms)
        return BuiltCell(index, (order[0],), status, row.worst_ms, dead=dead)
    order = sorted(range(len(pools)), key=lambda at: (slowness[at], pools[at].gpus, at))
    missed = [_missed(row, at, cell) for at in order]
    if None in missed:
        return BuiltCell(index, (order[missed.index(None)],), status, row.worst_ms)
    return BuiltCell(index, (order[0],), status, row.worst_ms, missed[0], cell.is_beyond)


def _slowness(
    worst_ms: Sequence[float], ms: Sequence[Sequence[float]], row: _BandTimes, cell: _Cell
) -> float:
    """The worst latency of a pool, as a multiple of the target; of an endless band that of its start."""
    found = 0.0
    for at, (low, high) in enumerate(zip(cell.low_ms, cell.high_ms, strict=True)):
        unit = low or (high if high < math.inf else 1.0)
        found = max(found, (ms[at][0] if row.is_beyond else worst_ms[at]) / unit)
    return found


def _meets_some(ms: Sequence[Sequence[float]], cell: _Cell) -> bool:
    """Whether a pool meets any target of the cell at any of the sizes."""
    return any(
        all(value < high for value, high in zip(values, cell.high_ms, strict=True))
        for values in zip(*ms, strict=True)
    )


def _missed(row: _BandTimes, pool: int, cell: _Cell) -> int | None:
    """A size at which `pool` misses a target of the cell that another pool meets; None: there is none."""
    for other in range(len(row.ms)):
        if other == pool:
            continue
        for at, tokens in enumerate(row.samples):
            if _misses_at(row, pool, other, cell, at):
                return tokens
            if at and _misses_between(row, pool, other, cell, at):
                return tokens
    return None


def _misses_at(row: _BandTimes, pool: int, other: int, cell: _Cell, at: int) -> bool:
    mine = [values[at] for values in row.ms[pool]]
    others = [values[at] for values in row.ms[other]]
    # There is a target that the other pool meets and this one misses.
    return all(ms < high for ms, high in zip(others, cell.high_ms, strict=True)) and any(
        ms > max(o, low) for ms, o, low in zip(mine, others, cell.low_ms, strict=True)
    )


def _misses_between(row: _BandTimes, pool: int, other: int, cell: _Cell, at: int) -> bool:
    """`_misses_at` anywhere between this sample and the one before, as if curves were straight there.

    Curves through points are. Those of profiles are power laws, or bent more, but samples are so close that
    this matters little.
    """
    if row.samples[at] - row.samples[at - 1] < 2:
        return False
    mine = [values[at - 1 : at + 1] for values in row.ms[pool]]
    others = [values[at - 1 : at + 1] for values in row.ms[other]]
    if not all(math.isfinite(ms) for ends in (*mine, *others) for ms in ends):
        return False  # a curve only ends between two neighbours, which are both samples
    met = [(high - a, high - b) for (a, b), high in zip(others, cell.high_ms, strict=True)]
    for (a, b), (o_a, o_b), low in zip(mine, others, cell.low_ms, strict=True):
        if _all_positive([*met, (a - o_a, b - o_b), (a - low, b - low)]):
            return True
    return False


def _all_positive(lines: Sequence[tuple[float, float]]) -> bool:
    """Whether straight lines with these values at 0 and 1 are all above 0 somewhere in between."""
    start, end = 0.0, 1.0
    for a, b in lines:
        if a <= 0.0 and b <= 0.0:
            return False
        if math.isinf(a):
            continue
        if a <= 0.0:
            start = max(start, a / (a - b))
        elif b <= 0.0:
            end = min(end, a / (a - b))
    return end - start > _HAIR


def _fastest(pools: Sequence[BuildPool], tokens: int) -> int:
    return min(range(len(pools)), key=lambda at: pools[at].curves[0].ms(tokens))


def _change(pools: Sequence[BuildPool], a: int, b: int) -> int:
    """A size after `a`, up to `b`, at which the fastest pool is not the one before it."""
    first = _fastest(pools, a)
    while b - a > 1:
        middle = (a + b) // 2
        if _fastest(pools, middle) == first:
            a = middle
        else:
            b = middle
    return b
