"""The bands of a grid that is being built: the ones asked for, and one more beyond them.

A request outside the range of an axis lands in the first or the last band. So that these need not be
planned for such requests, sizes from the last edge on get a band of their own, and so do targets below the
first edge, unless that makes no difference:

    isl      0 ... 4096 | 4096 ... 8192 | 8192 and more       asked for: 0 to 8192 in 2 bands
    ttft_ms  below 200 | 200 ... 400 | 400 and more           asked for: 200 to 600 in 2 bands

Requests without a target get the middle of the range asked for, where a spec has no default: the middle of
the built axis is moved by the bands that were added.
"""

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slagate.pools.fleet_file.models import ANY_CLASS, Objective
from slagate.pools.grid_build.spec import AxisSpec

_N_BETWEEN = 24
"""Sizes of a band that are sampled besides its ends and knots, as curves are bent in between.

Even where one band has all sizes up to 131072, the ITL of each packaged profile is then within 2 % of the
straight lines between these sizes; with 4 of them it is 18 % off, with 1 more than twice as high.
"""


@dataclass(frozen=True, slots=True)
class Bands:
    """The bands of axis `field`, between `edges`; those outside of `asked` were added.

    With `uniform` all bands are of equal width. Sizes above the last edge are judged up to
    `far_tokens`, as far as they were measured. No added edge is above `profiled_tokens`, the
    largest size that every profile has measured.
    """

    field: str
    edges: tuple[float, ...]
    uniform: bool
    asked: tuple[float, float]
    far_tokens: int = 0
    profiled_tokens: float = math.inf

    @property
    def resolution(self) -> int:
        """How many bands there are."""
        return len(self.edges) - 1

    def is_beyond(self, band: int) -> bool:
        """Whether `band` lies outside of what was asked for."""
        low, high = self.asked
        return self.edges[band] >= high or self.edges[band + 1] <= low

    @property
    def beyond(self) -> tuple[int, ...]:
        """Numbers of the bands outside of what was asked for, all at one end of the axis."""
        return tuple(band for band in range(self.resolution) if self.is_beyond(band))

    def keys(self) -> dict[str, object]:
        """The keys of the axis in a fleet file: its edges, or min, max and resolution."""
        name = self.field.removesuffix("_ms")
        unit = "_ms" if self.field.endswith("_ms") else ""
        if not self.uniform:
            return {f"{name}_edges{unit}": list(self.edges)}
        return {
            f"{name}_min{unit}": self.edges[0],
            f"{name}_max{unit}": self.edges[-1],
            f"{name}_resolution": self.resolution,
        }

    def split(self, edges: Collection[int]) -> "Bands":
        """A copy with further `edges`, for which an outermost edge may move out."""
        # All smaller sizes belong to the first band and all larger ones to the last, so that their outer
        # edges may move.
        first, last = self.edges[0], self.edges[-1]
        if min(edges) <= first:
            first = 0
        if max(edges) >= last:
            last = _tidy(min(max(edges) + last - self.edges[-2], self.profiled_tokens))
        all_edges = tuple(sorted({first, *self.edges[1:-1], *edges, last}))
        return replace(self, edges=all_edges, uniform=False)

    def joined(self, groups: Sequence[range]) -> "Bands":
        """A copy with one band for each group of bands; outer ones are cut to what was asked."""
        low, high = self.asked
        edges = [self.edges[group.start] for group in groups] + [self.edges[-1]]
        far_tokens = self.far_tokens
        if edges[0] < low < edges[1]:
            edges[0] = low
        if edges[-2] < high < edges[-1]:
            edges[-1], far_tokens = high, 0
        return replace(self, edges=tuple(edges), far_tokens=far_tokens)

    def sizes(self, band: int) -> tuple[int, int]:
        """The first and the last whole number of tokens that lands in `band`."""
        first = 1 if band == 0 else max(1, math.ceil(self.edges[band]))
        if band == self.resolution - 1 and self.is_beyond(band):
            return first, max(first, self.far_tokens)
        return first, max(first, math.ceil(self.edges[band + 1]) - 1)

    def samples(self, band: int, knots: Iterable[float]) -> list[int]:
        """Sizes of `band`, ascending: its ends, the knots of curves in it, and some in between."""
        first, last = self.sizes(band)
        found = {first, last}
        for knot in knots:
            found |= {n for n in (math.floor(knot), math.ceil(knot)) if first < n < last}
        ratio = (last / first) ** (1.0 / (_N_BETWEEN + 1))
        found |= {round(first * ratio**step) for step in range(1, _N_BETWEEN + 1)}
        return sorted(found)

    def targets(self, band: int) -> tuple[float, float]:
        """The tightest target of `band` in ms, and the first that is too loose for it."""
        low = 0.0 if self.is_beyond(band) else self.edges[band]
        return low, math.inf if band == self.resolution - 1 else self.edges[band + 1]


def size_bands(
    field: str, axis: AxisSpec, *, longest_tokens: float, profiled_tokens: float = math.inf
) -> Bands:
    """The bands of a size axis: sizes below those asked for are in the first, above in their own.

    `longest_tokens` is the largest size of which times are known for every pool, `profiled_tokens`
    for every pool with a profile.
    """
    edges, uniform = _edges(axis)
    asked = (0.0, edges[-1])
    if not axis.beyond:
        return Bands(field, edges, uniform, asked)
    if edges[0] > 0:
        edges, uniform = (0, *edges[1:]), False
    next_edge = _tidy(2 * edges[-1] - edges[-2])
    last = _tidy(min(next_edge, profiled_tokens))
    if last <= edges[-1]:
        return Bands(field, edges, uniform, asked)
    far_tokens = max(int(longest_tokens), math.ceil(last))
    is_even = uniform and last == next_edge
    return Bands(field, (*edges, last), is_even, asked, far_tokens, profiled_tokens)


def target_bands(field: str, axis: AxisSpec) -> Bands:
    """The bands of a latency axis: those asked for, and one of tighter targets if there can be."""
    edges, uniform = _edges(axis)
    asked = (edges[0], edges[-1])
    if not axis.beyond or edges[0] <= 0:
        return Bands(field, edges, uniform, asked)
    first = _tidy(2 * edges[0] - edges[1])
    if uniform and first >= 0:
        return Bands(field, (first, *edges), uniform, asked)
    return Bands(field, (0, *edges), uniform=False, asked=asked)


def as_asked(field: str, axis: AxisSpec) -> Bands:
    """The bands that were asked for, without one beyond them."""
    edges, uniform = _edges(axis)
    return Bands(field, edges, uniform, (edges[0], math.inf))


def _edges(axis: AxisSpec) -> tuple[tuple[float, ...], bool]:
    if axis.edges is not None:
        return axis.edges, False
    # The spec's rules guarantee these three.
    low, high, resolution = axis.min, axis.max, axis.resolution
    assert low is not None
    assert high is not None
    assert resolution is not None
    step = (high - low) / resolution
    inner = [_tidy(low + at * step) for at in range(resolution)]
    return (*inner, high), True


def _tidy(value: float) -> float:
    """The value as an int where it is whole, as people write it."""
    return int(value) if value == int(value) else value


_NEAR_EDGE = 0.01
"""A target nearer to an edge than this share of the band's width is moved to the band's middle."""


def assumed_targets(
    objectives: Mapping[str, Objective], axes: Iterable[Bands]
) -> dict[str, int | float]:
    """By field the middle of the targets asked for, in ms, where `objectives` has no default."""
    given = objectives.get(ANY_CLASS, Objective())
    return {axis.field: _middle_ms(axis) for axis in axes if getattr(given, axis.field) is None}


def _middle_ms(axis: Bands) -> int | float:
    middle_ms = sum(axis.asked) / 2
    band = min(max(0, bisect_right(axis.edges, middle_ms) - 1), axis.resolution - 1)
    low_ms, high_ms = axis.edges[band : band + 2]
    near_ms = _NEAR_EDGE * (high_ms - low_ms)
    if min(middle_ms - low_ms, high_ms - middle_ms) < near_ms:
        middle_ms = (low_ms + high_ms) / 2
    return int(middle_ms) if middle_ms.is_integer() else middle_ms
