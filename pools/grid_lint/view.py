"""One stage of a fleet file for the linter: bands, pools, predictions of profiles, JSON paths."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from statistics import median
from typing import Any, NamedTuple

from slagate.pools.fleet_file.keys import EPP_KEYS, OVERRIDES, STAGES, AxisKeys, form_of
from slagate.pools.fleet_file.load import FleetConfig
from slagate.pools.fleet_file.models import PoolSpec
from slagate.pools.grid.grid import Axis, Number, UnevenAxis, number_text
from slagate.pools.grid.json_text import json_path
from slagate.pools.grid_lint.times import Deployment, PoolCurves, Times, measured_tokens, plan_of
from slagate.workers.profiles.profile import TpProfile

_EPP_NAMES = {keys: name for name, keys in EPP_KEYS.items()}


class JsonPaths:
    """JSON paths into one file for one stage, in the spelling that the file uses."""

    def __init__(self, config: FleetConfig, stage: str) -> None:
        content: Mapping[str, Any] = json.loads(config.text)
        self._content = content
        self._keys = STAGES[config.mode][stage]
        short = self._keys.short_names
        self._names = short if short in content else self._keys.names
        self._axes = {axis.field: axis for axis in self._keys.axes}
        self._epp = stage == "prefill" and form_of(content).epp
        self._strategy: Mapping[str, Any] = content if self._epp else content[self._keys.strategy]

    def _path(self, keys: tuple[str, ...], *rest: int) -> str:
        if self._epp and keys in _EPP_NAMES:
            keys = (_EPP_NAMES[keys],)
        return json_path((*keys, *rest))

    def cell(self, index: tuple[int, ...]) -> str:
        """The path of a cell of the mapping; with no index that of the mapping."""
        return self._path((self._keys.strategy, self._keys.mapping), *index)

    def bands(self, field: str) -> str:
        """The path of the key that cuts an axis into bands: its edges, or its resolution."""
        axis = self._axes[field]
        key = axis.edges if axis.edges in self._strategy else axis.resolution
        return self._path((self._keys.strategy, key))

    def axis_end(self, field: str, *, last: bool) -> str:
        """The path of the first or the last edge of an axis."""
        axis: AxisKeys = self._axes[field]
        if axis.edges in self._strategy:
            at = len(self._strategy[axis.edges]) - 1 if last else 0
            return self._path((self._keys.strategy, axis.edges), at)
        return self._path((self._keys.strategy, axis.high if last else axis.low))

    def rule(self, at: int) -> str:
        """The path of a priority override."""
        return self._path((self._keys.strategy, OVERRIDES), at)

    def pool(self, at: int) -> str:
        """The path of the name of a pool in the list of pools."""
        return self._path((self._names,), at)

    @property
    def has_priorities(self) -> bool:
        """Whether the file says the pool priorities of the stage."""
        return self._content.get(self._keys.priorities) is not None

    def priorities(self) -> str:
        """The path of the pool priorities of the stage; without any, of the names, which are in order."""
        return self._path((self._keys.priorities if self.has_priorities else self._names,))


class SpeedOrder(NamedTuple):
    """Which pools of a stage are slower where profiles do not say it: those of higher rank, and why."""

    ranks: tuple[float, ...]
    figures: tuple[float, ...]  # what the ranks are from
    words: str  # with the figures of two pools: why the first is slower


TYPICAL_TOKENS = 2048
"""The prompt that a grid without a size axis is judged by without a trace."""

_FAR_TOKENS = 2.0**32

_N_SAMPLES = 5
"""How many sizes of a band are sampled, its ends included."""

Index = tuple[int, ...]
"""The band of a cell on each axis."""


class Band(NamedTuple):
    """From `low` to `high`, in tokens or milliseconds."""

    low: float
    high: float


class LintedStage:
    """One stage of a file as rules see it: its grid, JSON paths, and the times of its pools."""

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
        self.paths = JsonPaths(config, stage)
        self.names = grid.pool_names
        self.n_pools = len(self.names)
        self.profiles = tuple(profiles.get(name) for name in self.names)
        specs = [config.pools.get(name) for name in self.names]
        self.gpus = tuple(1 if spec is None else spec.gpus for spec in specs)
        self._plans = tuple(map(plan_of, specs))
        latencies = [axis.field.endswith("_ms") for axis in grid.axes]
        self.latency_axes = tuple(at for at, is_latency in enumerate(latencies) if is_latency)
        self.size_axis = latencies.index(False) if False in latencies else None
        indices = product(*(range(axis.resolution) for axis in grid.axes))
        self.cells = dict(zip(indices, grid.cells, strict=True))
        self.order = self._speed_order([spec for spec in specs if spec and (spec.cost or spec.tp)])
        self.starts = frozenset(grid.starts())  # pools of cells and live rules
        self.kinds = _kinds(self.profiles, self._plans)  # by pool; equal: same times
        self._bands = tuple(_bands(axis) for axis in grid.axes)
        self._longest_seen_tokens = max(traffic, default=0)
        self._typical_tokens = median(traffic) if traffic else TYPICAL_TOKENS
        typical = Band(self._typical_tokens, self._typical_tokens)
        self.size_bands = (typical,) if self.size_axis is None else self._bands[self.size_axis]
        self._longest_tokens = max(band.high for band in self.size_bands)
        measured = [measured_tokens(found, stage) for found in self.profiles if found is not None]
        self._measured_tokens = float(min(measured, default=0))
        self._targets: dict[Index, dict[str, Band]] = {}
        self._curves: dict[int, PoolCurves] = {}
        self._slower: dict[tuple[int, int, float, Sequence[str]], bool] = {}

    def _speed_order(self, priced: Sequence[PoolSpec]) -> SpeedOrder:
        """The order of the pools by their priorities, else by GPUs per worker if all are `priced`.

        A retry takes pools without priorities for listed from fast to slow. Otherwise they may as well be
        listed from slow to fast: if cells say so along some axis, and along none the opposite.
        """
        if self.paths.has_priorities or self.grid.retry:
            numbers = self.grid.priorities
            return SpeedOrder(numbers, numbers, "pool priority {} against {}")
        if len(priced) == self.n_pools and len({*self.gpus}) > 1:
            ranks = tuple(-gpus for gpus in self.gpus)
            return SpeedOrder(ranks, self.gpus, "{} GPUs per worker against {}")
        places, votes = tuple(range(self.n_pools)), []
        for axis_at in range(len(self.grid.axes)):
            pairs = [pair for line in self.lines(axis_at) for pair in pairwise(line)]
            steps = [self.cells[after][0] - self.cells[before][0] for before, after in pairs]
            # From tight to loose pools may get slower; from short to long they may get faster.
            sign = -1 if axis_at == self.size_axis else 1
            votes.append(sign * sum((step > 0) - (step < 0) for step in steps))
        if max(votes) <= 0 > min(votes):
            return SpeedOrder(places[::-1], places, "place {} of a list, slowest first, against {}")
        return SpeedOrder(places, places, "place {} of a list, fastest first, against {}")

    @property
    def fields(self) -> tuple[str, ...]:
        """The latency fields of the grid."""
        return tuple(self.grid.axes[at].field for at in self.latency_axes)

    def lines(self, axis_at: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Yield the lines of cells along an axis: indices that differ in its band, in order."""
        n_bands, *inner = (axis.resolution for axis in self.grid.axes[axis_at:])
        step = math.prod(inner)
        indices = tuple(self.cells)
        for block in range(0, len(indices), n_bands * step):
            for first in range(block, block + step):
                yield indices[first : block + n_bands * step : step]

    def sizes(self, index: tuple[int, ...]) -> Band:
        """The sizes of a cell in tokens; a typical one where the grid has no size axis."""
        return self.size_bands[0 if self.size_axis is None else index[self.size_axis]]

    def targets(self, index: tuple[int, ...]) -> dict[str, Band]:
        """The latency targets of a cell in ms, by field."""
        key = index[self.latency_axes[0] :]  # a size comes first, if there is one
        if key not in self._targets:
            self._targets[key] = {
                self.grid.axes[at].field: self._bands[at][index[at]] for at in self.latency_axes
            }
        return self._targets[key]

    def is_open_ended(self, index: tuple[int, ...]) -> bool:
        """Whether requests from outside of an axis come to the cell that are harder to serve than its own.

        These are longer prompts in the last of several size bands, unless a trace has none, and tighter
        targets in the first of several latency bands.
        """
        if any(index[at] == 0 < self.grid.axes[at].resolution - 1 for at in self.latency_axes):
            return True
        if self.size_axis is None:
            return False
        axis = self.grid.axes[self.size_axis]
        is_last = index[self.size_axis] == axis.resolution - 1 > 0
        return is_last and not 0 < self._longest_seen_tokens <= axis.high

    def is_met_when_busy(self, pool: int, index: tuple[int, ...], *, to_spare: float) -> bool:
        """Whether a busy pool with a profile is below a cell's targets by the share `to_spare`."""
        limits_ms = {f: band.low * (1 - to_spare) for f, band in self.targets(index).items()}
        return all(
            (times := self.times_ms(pool, size, field)) is not None and times.busy <= limit_ms
            for field, limit_ms in limits_ms.items()
            for size in (*sampled_sizes(self.sizes(index)), *self._knots(pool, field, index))
        )

    def _knots(self, pool: int, field: str, index: Index) -> Iterator[float]:
        """The sizes inside of a cell at which the time of busy workers may be largest."""
        curves = self._curves_of(pool)
        if curves is not None:
            low, high = self.sizes(index)
            yield from (size for size in curves.knots(field) if low < size < high)

    def times_ms(self, pool: int, size_tokens: float, field: str) -> Times | None:
        """Predicted TTFT or ITL (`field`) of a pool's workers, in ms; None without a profile."""
        curves = self._curves_of(pool)
        return None if curves is None else curves.times(size_tokens, field)

    def _curves_of(self, pool: int) -> PoolCurves | None:
        profile, kind = self.profiles[pool], self.kinds[pool]
        if profile is None:
            return None
        if kind not in self._curves:
            self._curves[kind] = PoolCurves(
                profile, self._plans[pool], self.fields, longest_tokens=self._longest_tokens
            )
        return self._curves[kind]

    def slower(self, a: int, b: int, size_tokens: float, fields: Sequence[str] = ()) -> bool:
        """Whether pool `a` is slower than `b` at this size, in one of `fields` and in no latency faster.

        Where both have profiles, the slower pool takes longer when idle, and under no load less: of two
        workers the one with less memory runs smaller batches, and may be faster when both are as full.
        Otherwise `order` decides.
        """
        if a == b:
            return False
        if self.profiles[a] is None or self.profiles[b] is None:
            return self.order.ranks[a] > self.order.ranks[b]
        key = self.kinds[a], self.kinds[b], size_tokens, fields
        if key not in self._slower:
            self._slower[key] = self._takes_longer(a, b, size_tokens, fields or self.fields)
        return self._slower[key]

    def slower_in(self, index: Index, a: int, b: int, fields: Sequence[str] = ()) -> bool:
        """Whether pool `a` is slower than `b` for the longest prompts of a cell."""
        return all(self.slower(a, b, size, fields) for size in self.longest(self.sizes(index)))

    def longest(self, sizes: Band) -> tuple[float, ...]:
        """The longest sizes of a band, by which pools are compared.

        That is the upper edge, also in the last of several bands, to which all longer prompts come. There,
        with two latencies, the largest size that all profiles have measured counts too.
        """
        is_last = len(self.size_bands) > 1 and sizes == self.size_bands[-1]
        if is_last and len(self.latency_axes) > 1:
            return sizes.high, max(sizes.high, self._measured_tokens)
        return (sizes.high,)

    def takes_longer_for(self, pool: int, index: Index, *, than: Index) -> bool:
        """Whether a pool takes no less for the longest prompt of a cell than for any of another cell.

        It may take less, as fewer long prompts fit, which then have the smaller batch. Without a profile
        longer prompts are assumed to take longer.
        """
        for field in self.fields:
            mine = self.times_ms(pool, self.sizes(index).high, field)
            for size in (*sampled_sizes(self.sizes(than)), *self._knots(pool, field, than)):
                other = self.times_ms(pool, size, field)
                if mine is not None and other is not None and not other.at_most(mine):
                    return False
        return True

    def _takes_longer(self, a: int, b: int, size_tokens: float, fields: Sequence[str]) -> bool:
        is_slower = False
        for field in self.fields:
            a_ms, b_ms = (self.times_ms(pool, size_tokens, field) for pool in (a, b))
            assert a_ms is not None, "it has a profile"
            assert b_ms is not None, "it has a profile"
            if not b_ms.at_most(a_ms):
                return False
            is_slower = is_slower or (field in fields and b_ms.less(a_ms))
        return is_slower

    def why_slower(self, a: int, b: int, size_tokens: float, fields: Sequence[str] = ()) -> str:
        """Why pool `a` is slower than `b`, where `slower` is true: the figures, as text."""
        parts = []
        for field in fields or self.fields:
            a_ms, b_ms = (self.times_ms(pool, size_tokens, field) for pool in (a, b))
            if a_ms is None or b_ms is None:
                figures = self.order.figures
                return self.order.words.format(number_text(figures[a]), number_text(figures[b]))
            if a_ms.idle > b_ms.idle:
                parts.append(f"{ms(a_ms.idle)} against {ms(b_ms.idle)} {word(field)}")
        return f"{' and '.join(parts)} for {tokens(size_tokens)}"

    def cell_words(self, index: tuple[int, ...]) -> str:
        """The index of a cell and its bands on all axes, as text."""
        parts = [
            f"{word(axis.field)} {band_words(axis, at)}"
            for axis, at in zip(self.grid.axes, index, strict=True)
        ]
        return f"cell {brackets(index)} ({', '.join(parts)})"


def sampled_sizes(sizes: Band) -> tuple[float, ...]:
    """Some sizes of a band with its ends, the longest first."""
    low, high = sizes
    n_steps = _N_SAMPLES - 1 if high > low else 1
    return tuple(int(low + (high - low) * step / n_steps) for step in range(n_steps, -1, -1))


def band(axis: Axis | UnevenAxis, at: int) -> Band:
    """The edges of band number `at` of an axis."""
    return Band(axis.edges[at], axis.edges[at + 1])


def band_words(axis: Axis | UnevenAxis, at: int) -> str:
    """The edges of a band of an axis with their unit, as text."""
    unit = " ms" if axis.field.endswith("_ms") else ""
    low, high = band(axis, at)
    return f"{number_text(low)} to {number_text(high)}{unit}"


def brackets(index: tuple[int, ...]) -> str:
    """The index of a cell as in a JSON path: `[0][1]`."""
    return "".join(f"[{at}]" for at in index)


def word(field: str) -> str:
    """An axis field as people write it: "ISL", "TTFT", "context"."""
    return {"context_length": "context"}.get(field, field.removesuffix("_ms").upper())


def ms(value_ms: float) -> str:
    """A time in ms as text, to three digits."""
    return f"{value_ms:,.0f} ms" if value_ms >= 100 else f"{value_ms:.3g} ms"


def tokens(size: Number) -> str:
    """A number of tokens as text."""
    return "1 token" if size == 1 else f"{number_text(size)} tokens"


def share(part: int, whole: int) -> str:
    """A part of the requests as text, with percent."""
    return f"{part:,} of {whole:,} requests ({100 * part / whole:.3g} %)"


def _kinds(profiles: Sequence[TpProfile | None], plans: Sequence[Deployment]) -> tuple[int, ...]:
    """For each pool the number of the first one with the same profile and plan."""
    first: dict[tuple[int, Deployment], int] = {}
    return tuple(
        first.setdefault((id(profile), plan), pool)
        for pool, (profile, plan) in enumerate(zip(profiles, plans, strict=True))
    )


def _bands(axis: Axis | UnevenAxis) -> tuple[Band, ...]:
    """The values of each band: targets from edge to edge, sizes from the first whole one to the last."""
    ends = list(pairwise(axis.edges))
    if axis.field.endswith("_ms"):
        return tuple(Band(low, high) for low, high in ends)
    # A size on an inner edge belongs to the band above it.
    sizes = [Band(_size(math.ceil(low)), _size(math.ceil(high) - 1)) for low, high in ends[:-1]]
    sizes.append(Band(_size(math.ceil(ends[-1][0])), _size(ends[-1][1])))
    return tuple(Band(low, max(low, high)) for low, high in sizes)


def _size(size: float) -> float:
    """The size within the limits of what a profile can be asked for."""
    return min(max(1.0, float(size)), _FAR_TOKENS)


def is_above(value: float, limit: float) -> bool:
    """Whether `value` exceeds `limit` by more than the rounding of its computation."""
    return value > limit and not math.isclose(value, limit, rel_tol=1e-9)
