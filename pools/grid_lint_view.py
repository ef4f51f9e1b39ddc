"""One stage of a fleet file as the linter looks at it: bands, pools, and what their profiles predict."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from operator import le
from statistics import median
from typing import NamedTuple

from slagate.pools.axis import Axis, Number, UnevenAxis
from slagate.pools.curve import (
    DEFAULT_BATCH,
    Curve,
    Load,
    mixed_curves,
    profile_decode,
    profile_prefill,
    queued_prefill,
)
from slagate.pools.grid_config import FleetConfig
from slagate.pools.grid_lint_places import Places
from slagate.pools.grid_words import number_text
from slagate.workers.profile import TpProfile

TYPICAL_TOKENS = 2048
"""The prompt that a grid without a size axis is judged by, where there is no trace."""

LOADS = tuple(step / 20 for step in range(1, 19))
"""Shares of its time, or of its batch, that a worker is looked at with; the last one is what busy means."""

_FAR_TOKENS = 2.0**32

_LOOKED_AT = 5
"""Sizes of a band, its ends included."""

Index = tuple[int, ...]
"""The bands of a cell, one for each axis."""


class Band(NamedTuple):
    """From `low` to `high`, in tokens or milliseconds."""

    low: float
    high: float


class Times(NamedTuple):
    """What a worker takes, in milliseconds.

    `idle`: with nothing else to do, and nothing of the prompt cached. What misses so misses always.
    `loaded`: at each of `LOADS`, among prompts of the same size.
    `busy`: the most of those, and of a worker among prompts that are as long as the axis goes. What meets
    so is enough.
    """

    idle: float
    loaded: tuple[float, ...]
    busy: float

    def at_most(self, other: "Times") -> bool:
        """Whether it is no slower than `other` under any load."""
        mine, others = (self.idle, *self.loaded, self.busy), (other.idle, *other.loaded, other.busy)
        return all(map(le, mine, others))

    def less(self, other: "Times") -> bool:
        """Whether it is faster than `other` when idle, and under no load slower."""
        return self.idle < other.idle and self.at_most(other)


class StageView:
    """A grid with its places in the file and the profiles of its pools."""

    def __init__(
        self,
        config: FleetConfig,
        stage: str,
        *,
        profiles: Mapping[str, TpProfile],
        traffic: Sequence[int],
    ) -> None:
        self.stage = stage
        self.grid = grid = config.stages[stage]
        self.places = Places(config, stage)
        self.names = grid.pool_names
        self.n_pools = len(self.names)
        self.profiles = tuple(profiles.get(name) for name in self.names)
        specs = [config.pools.get(name) for name in self.names]
        self.gpus = tuple(1 if spec is None else spec.gpus for spec in specs)
        self._limits = tuple(None if spec is None else spec.max_inflight for spec in specs)
        latencies = [axis.field.endswith("_ms") for axis in grid.axes]
        self.latency_axes = tuple(at for at, is_latency in enumerate(latencies) if is_latency)
        self.size_axis = latencies.index(False) if False in latencies else None
        indices = product(*(range(axis.resolution) for axis in grid.axes))
        self.cells = dict(zip(indices, grid.cells, strict=True))
        self.starts = frozenset(grid.starts())
        self.kinds = _kinds(self.profiles, self._limits)
        self._bands = tuple(_bands(axis) for axis in grid.axes)
        self._longest_seen_tokens = max(traffic, default=0)
        self._typical_tokens = median(traffic) if traffic else TYPICAL_TOKENS
        typical = Band(self._typical_tokens, self._typical_tokens)
        self.size_bands = (typical,) if self.size_axis is None else self._bands[self.size_axis]
        self._longest_tokens = max(band.high for band in self.size_bands)
        self._targets: dict[Index, dict[str, Band]] = {}
        self._curves: dict[int, dict[str, tuple[tuple[Curve, ...], tuple[Curve, ...]]]] = {}
        self._times_ms: dict[tuple[int, float, str], Times] = {}
        self._slower: dict[tuple[int, int, float, Sequence[str]], bool] = {}

    @property
    def fields(self) -> tuple[str, ...]:
        """The latencies that the grid goes by."""
        return tuple(self.grid.axes[at].field for at in self.latency_axes)

    def lines(self, axis_at: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Rows of cells that differ in one axis only, each in the order of its bands."""
        n_bands, *inner = (axis.resolution for axis in self.grid.axes[axis_at:])
        step = math.prod(inner)
        indices = tuple(self.cells)
        for block in range(0, len(indices), n_bands * step):
            for first in range(block, block + step):
                yield indices[first : block + n_bands * step : step]

    def sizes(self, index: tuple[int, ...]) -> Band:
        """The sizes of a cell; one size where the grid has no axis for it."""
        return self.size_bands[0 if self.size_axis is None else index[self.size_axis]]

    def targets(self, index: tuple[int, ...]) -> dict[str, Band]:
        """The latency targets of a cell by field."""
        key = index[self.latency_axes[0] :]  # a size comes first, if there is one
        if key not in self._targets:
            self._targets[key] = {
                self.grid.axes[at].field: self._bands[at][index[at]] for at in self.latency_axes
            }
        return self._targets[key]

    def is_open_ended(self, index: tuple[int, ...]) -> bool:
        """Whether requests outside of an axis come to the cell that are harder to serve than its own.

        Those are longer prompts in the last of several size bands, unless there is traffic and none of it
        is longer; and tighter targets in the first of several latency bands.
        """
        if any(index[at] == 0 < self.grid.axes[at].resolution - 1 for at in self.latency_axes):
            return True
        if self.size_axis is None:
            return False
        axis = self.grid.axes[self.size_axis]
        is_last = index[self.size_axis] == axis.resolution - 1 > 0
        return is_last and not 0 < self._longest_seen_tokens <= axis.high

    def is_met_when_busy(self, pool: int, index: tuple[int, ...], *, to_spare: float) -> bool:
        """Whether busy workers of the pool meet all of the cell, with this share of targets to spare.

        Not without a profile.
        """
        limits_ms = {f: band.low * (1 - to_spare) for f, band in self.targets(index).items()}
        return all(
            (times := self.times_ms(pool, size, field)) is not None and times.busy <= limit_ms
            for field, limit_ms in limits_ms.items()
            for size in (*looked_at(self.sizes(index)), *self._turns(pool, field, index))
        )

    def _turns(self, pool: int, field: str, index: Index) -> Iterator[float]:
        """The sizes inside of a cell at which what busy workers take may be at its most."""
        profile = self.profiles[pool]
        if profile is not None:
            low, high = self.sizes(index)
            alike, longest = self._curves_under_load(pool, profile)[field]
            yield from (size for size in (*alike, *longest)[-1].knots if low < size < high)

    def times_ms(self, pool: int, size_tokens: float, field: str) -> Times | None:
        """What workers of the pool take; None without a profile."""
        profile = self.profiles[pool]
        if profile is None:
            return None
        key = self.kinds[pool], size_tokens, field
        if key in self._times_ms:
            return self._times_ms[key]
        is_ttft = field == "ttft_ms"
        idle_s = profile.prefill_s(size_tokens, 0) if is_ttft else profile.itl_s(1, size_tokens)
        curves = self._curves_under_load(pool, profile)[field]
        alike, longest = ([curve.ms(size_tokens) for curve in some] for some in curves)
        times = Times(idle_s * 1000, tuple(alike), max((*alike, *longest)))
        self._times_ms[key] = times
        return times

    def _curves_under_load(
        self, pool: int, profile: TpProfile
    ) -> dict[str, tuple[tuple[Curve, ...], tuple[Curve, ...]]]:
        """By latency: at each of `LOADS` among prompts of the same size, and among the longest.

        TTFT alone is a multiple of what it is idle, so there the largest load among the longest will do.
        """
        kind = self.kinds[pool]
        if kind not in self._curves:
            batch = self._limits[pool] or DEFAULT_BATCH
            alike = [Load(share, replicas=1, batch=batch) for share in LOADS]
            longest = [replace(load, isl_tokens=int(self._longest_tokens)) for load in alike]
            if len(self.latency_axes) > 1:
                by_loads = (
                    zip(*(mixed_curves(profile, load) for load in loads), strict=True)
                    for loads in (alike, longest)
                )
                ttft, itl = zip(*by_loads, strict=True)
                self._curves[kind] = {"ttft_ms": ttft, "itl_ms": itl}
            else:
                busy = queued_prefill(profile_prefill(profile), longest[-1])
                itl = tuple(profile_decode(profile, load) for load in alike)
                self._curves[kind] = {"ttft_ms": ((), (busy,)), "itl_ms": (itl, ())}
        return self._curves[kind]

    def slower(self, a: int, b: int, size_tokens: float, fields: Sequence[str] = ()) -> bool:
        """Whether pool `a` is slower than `b` at this size, in one of `fields` and in none of them faster.

        Where both have profiles, slower is what takes longer idle, and under no load less: of two workers
        the one with less memory runs smaller batches, and may be faster when both are as full. Elsewhere
        the pool priorities say it.
        """
        if a == b:
            return False
        if self.profiles[a] is None or self.profiles[b] is None:
            return self.grid.priorities[a] > self.grid.priorities[b]
        key = self.kinds[a], self.kinds[b], size_tokens, fields
        if key not in self._slower:
            self._slower[key] = self._takes_longer(a, b, size_tokens, fields or self.fields)
        return self._slower[key]

    def takes_longer_for(self, pool: int, index: Index, *, than: Index) -> bool:
        """Whether a pool takes no less for the longest prompt of a cell than for that of another.

        It may: where there is room for fewer long prompts they have the smaller batch. Without a profile
        they are taken to take longer.
        """
        for field in self.fields:
            mine = self.times_ms(pool, self.sizes(index).high, field)
            other = self.times_ms(pool, self.sizes(than).high, field)
            if mine is not None and other is not None and not other.at_most(mine):
                return False
        return True

    def _takes_longer(self, a: int, b: int, size_tokens: float, fields: Sequence[str]) -> bool:
        pairs = []
        for field in fields:
            a_ms, b_ms = (self.times_ms(pool, size_tokens, field) for pool in (a, b))
            assert a_ms is not None, "it has a profile"
            assert b_ms is not None, "it has a profile"
            pairs.append((a_ms, b_ms))
        return all(b_ms.at_most(a_ms) for a_ms, b_ms in pairs) and any(
            b_ms.less(a_ms) for a_ms, b_ms in pairs
        )

    def why_slower(self, a: int, b: int, size_tokens: float, fields: Sequence[str] = ()) -> str:
        """The figures behind `slower`."""
        parts = []
        for field in fields or self.fields:
            a_ms, b_ms = (self.times_ms(pool, size_tokens, field) for pool in (a, b))
            if a_ms is None or b_ms is None:
                return f"pool priority {self.grid.priorities[a]} against {self.grid.priorities[b]}"
            if a_ms.idle > b_ms.idle:
                parts.append(f"{ms(a_ms.idle)} against {ms(b_ms.idle)} {word(field)}")
        return f"{' and '.join(parts)} for {tokens(size_tokens)}"

    def cell_words(self, index: tuple[int, ...]) -> str:
        """A cell and its bands."""
        parts = [
            f"{word(axis.field)} {band_words(axis, at)}"
            for axis, at in zip(self.grid.axes, index, strict=True)
        ]
        return f"cell {brackets(index)} ({', '.join(parts)})"


def looked_at(sizes: Band) -> tuple[float, ...]:
    """Some sizes of a band, the longest first."""
    low, high = sizes
    n_steps = _LOOKED_AT - 1 if high > low else 1
    return tuple(int(low + (high - low) * step / n_steps) for step in range(n_steps, -1, -1))


def band(axis: Axis | UnevenAxis, at: int) -> Band:
    """A band of an axis."""
    return Band(axis.edges[at], axis.edges[at + 1])


def band_words(axis: Axis | UnevenAxis, at: int) -> str:
    """The ends of a band."""
    unit = " ms" if axis.field.endswith("_ms") else ""
    low, high = band(axis, at)
    return f"{number_text(low)} to {number_text(high)}{unit}"


def brackets(index: tuple[int, ...]) -> str:
    """A cell as it is written behind the mapping's name."""
    return "".join(f"[{at}]" for at in index)


def word(field: str) -> str:
    """A field in words."""
    return {"context_length": "context"}.get(field, field.removesuffix("_ms").upper())


def ms(value_ms: float) -> str:
    """A time in ms, to three digits."""
    return f"{value_ms:,.0f} ms" if value_ms >= 100 else f"{value_ms:.3g} ms"


def tokens(size: Number) -> str:
    """A number of tokens."""
    return "1 token" if size == 1 else f"{number_text(size)} tokens"


def share(part: int, whole: int) -> str:
    """A part of a whole in percent."""
    return f"{part:,} of {whole:,} requests ({100 * part / whole:.3g} %)"


def _kinds(profiles: Sequence[TpProfile | None], limits: Sequence[int | None]) -> tuple[int, ...]:
    """For each pool the first one that is as fast, as both have the same profile and limit."""
    first: dict[tuple[int, int | None], int] = {}
    return tuple(
        first.setdefault((id(profile), limit), pool)
        for pool, (profile, limit) in enumerate(zip(profiles, limits, strict=True))
    )


def _bands(axis: Axis | UnevenAxis) -> tuple[Band, ...]:
    """The values of each band: targets from edge to edge, sizes from the first whole one to the last."""
    ends = list(pairwise(axis.edges))
    if axis.field.endswith("_ms"):
        return tuple(Band(low, high) for low, high in ends)
    # What lies on an inner edge is above it.
    sizes = [Band(_size(math.ceil(low)), _size(math.ceil(high) - 1)) for low, high in ends[:-1]]
    sizes.append(Band(_size(math.ceil(ends[-1][0])), _size(ends[-1][1])))
    return tuple(Band(low, max(low, high)) for low, high in sizes)


def _size(size: float) -> float:
    """A size that a profile can be asked for: a prompt has a token, and tables end somewhere."""
    return min(max(1.0, float(size)), _FAR_TOKENS)


def is_above(value: float, limit: float) -> bool:
    """Whether `value` exceeds `limit` by more than the rounding of its computation."""
    return value > limit and not math.isclose(value, limit, rel_tol=1e-9)
