"""The pool grid: which pools serve a request of this size with this latency target, in which order.

Selection, priority rules and retry order are those of Dynamo's global router (docs/grid.md), and the
arithmetic of `Axis` is, bit for bit (docs/decisions/0003-grid-arithmetic.md). Nothing here checks a grid:
`fleet_file` does, once.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from enum import Enum
from typing import NamedTuple

import msgspec

from slagate.pools.grid.errors import SelectError
from slagate.pools.grid.json_text import is_finite_number, shown

Number = int | float

AXIS_FIELDS = ("isl", "context_length", "ttft_ms", "itl_ms")
"""The values of a request that select a cell: two sizes in tokens, two latency targets in milliseconds."""

SIZE_FIELDS = frozenset({"isl", "context_length"})


class _Bands:
    """What both kinds of axes have: `resolution` bands from `low` to `high`, in the unit of `field`."""

    __slots__ = ()

    field: str
    low: Number
    high: Number
    resolution: int

    @property
    def required(self) -> bool:
        """Whether a request must give a value: a size, for which no default is sensible."""
        return self.field in SIZE_FIELDS

    @property
    def midpoint(self) -> Number:
        """The middle of the range, the default for a value that was not given.

        For a size, where a grid has such a default, it is rounded down. Both are Dynamo's arithmetic.
        """
        total = self.low + self.high
        middle = total // 2 if self.field in SIZE_FIELDS else total / 2
        # The sum of two large doubles can be infinite.
        return middle if math.isfinite(middle) else self.low / 2 + self.high / 2

    def _checked(self, value: Number | None) -> Number:
        """The value, or the default for None. Raises `SelectError` where there is none."""
        if value is None:
            if self.required:
                raise SelectError(self.field, "is required")
            return self.midpoint
        if not is_finite_number(value):
            raise SelectError(self.field, f"must be a finite number (got {shown(value)})")
        return value


@dataclass(frozen=True, slots=True)
class Axis(_Bands):
    """An axis with `resolution` bands of equal width, from `low` to `high`."""

    field: str
    low: Number
    high: Number
    resolution: int

    @property
    def step(self) -> float:
        """The width of a band, in tokens or milliseconds."""
        return (self.high - self.low) / self.resolution

    @property
    def edges(self) -> tuple[Number, ...]:
        """The edges of the bands, one more than bands, for people: `index` may round otherwise."""
        step = self.step
        if not math.isfinite(step):  # the ends are further apart than the largest double
            step = self.high / self.resolution - self.low / self.resolution
        return (*(self.low + at * step for at in range(self.resolution)), self.high)

    def index(self, value: Number | None) -> int:
        """The number of the band of `value` (None: of `midpoint`), the first or last if outside.

        Raises `SelectError` when a required value is missing, and when `value` is not a finite number.
        """
        # Nearly all values are plain ints or finite floats.
        if type(value) is not int and (type(value) is not float or not math.isfinite(value)):
            value = self._checked(value)
        last = self.resolution - 1
        try:
            # The step comes first and is divided by: with another order of the same operations some
            # values on the edge of a band change sides.
            index = int((value - self.low) / ((self.high - self.low) / self.resolution))
        except (OverflowError, ValueError):
            # A difference or the quotient is beyond the largest double, or the quotient of two infinite
            # differences is NaN. In each case the exact quotient would be clamped to the end on the side
            # of `value - low`. This comparison is exact for ints and floats of any size.
            return last if value > self.low else 0
        return 0 if index < 0 else last if index > last else index


@dataclass(frozen=True, slots=True)
class UnevenAxis(_Bands):
    """An axis with bands between ascending `edges`; an inner edge belongs to the band above it."""

    field: str
    edges: tuple[Number, ...]
    low: Number = dataclass_field(init=False)
    high: Number = dataclass_field(init=False)
    resolution: int = dataclass_field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", self.edges[0])
        object.__setattr__(self, "high", self.edges[-1])
        object.__setattr__(self, "resolution", len(self.edges) - 1)

    def index(self, value: Number | None) -> int:
        """The number of the band of `value`, found and raising as `Axis.index` does."""
        # The outer edges are left out of the search, which clamps.
        return bisect_right(self.edges, self._checked(value), 1, self.resolution) - 1


AnyAxis = Axis | UnevenAxis


def upper_edge(axis: AnyAxis, value: Number) -> Number:
    """The upper edge of the band of `value`, in the unit of the axis."""
    return axis.edges[axis.index(value) + 1]


def number_text(value: Number) -> str:
    """A number of tokens or milliseconds, to six digits or more where it is no whole number.

    >>> number_text(16384.0), number_text(1333.333333333), number_text(1028806.58), number_text(1e300)
    ('16,384', '1,333.33', '1,028,807', '1e+300')
    """
    if abs(value) < 1e15 and (value == int(value) or abs(value) >= 1e5):
        return f"{round(value):,}"
    return f"{value:,.6g}"


INT32 = (-(2**31), 2**31 - 1)
"""The range of a request's priority, both ends included."""

_KNOWN_FIELDS = frozenset(AXIS_FIELDS)

_Range = tuple[int, int]


class Stage(Enum):
    """What a pool does with a request. The value is the label in metrics and the CLI."""

    __hash__ = object.__hash__  # a member is one object; `Enum` hashes its name, in Python

    PREFILL = "prefill"
    DECODE = "decode"
    AGG = "agg"


class PriorityRule(NamedTuple):
    """Sends requests of priority `low` to `high`, both included, to the pool of number `pool`."""

    low: Number
    high: Number
    pool: int


class Cell(msgspec.Struct, frozen=True, gc=False):
    """The cell of a request: its band on each axis, and numbers of the pools for it.

    `base_pool` is the grid's first choice, and `pool` that of a priority rule, or else the same.
    `spill` has the further pools of the cell, in order; none where a rule named the pool (`by_rule`).
    """

    index: tuple[int, ...]
    base_pool: int
    pool: int
    spill: tuple[int, ...] = ()
    by_rule: bool = False

    @property
    def row(self) -> int:
        """The number of the band on the last axis but one."""
        return self.index[-2]

    @property
    def col(self) -> int:
        """The number of the band on the last axis."""
        return self.index[-1]


class Placement(NamedTuple):
    """Where a grid places a request: its cell, and names of pools.

    `order` has all pools that it may use, in order. `spill` has those among which load decides: the first
    pool of `order`, and those to go to where that cannot serve the request in time, as they are preferred.
    """

    cell: Cell
    order: tuple[str, ...]
    spill: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageGrid:
    """The pools of one stage, the grid that picks among them, and the order to try others in.

    `cells` has the pools of every cell, the last axis running fastest: first choice, then where to spill. A
    lower number in `priorities` is a faster pool. With `size_optional` a missing size counts as the middle
    of its range, as a missing latency target does. With `negative_is_none` latency targets and priorities
    below 0 count as not given, and other priorities are cut to their whole part. `spill` says which pools a
    request may go to that its first one cannot serve in time (none, listed, any), and `costs` what a worker
    of each pool costs, without which all cost the same.
    """

    axes: tuple[Axis | UnevenAxis, ...]
    cells: tuple[tuple[int, ...], ...]
    pool_names: tuple[str, ...]
    priorities: tuple[int, ...]
    rules: tuple[PriorityRule, ...] = ()
    retry: bool = False
    size_optional: bool = False
    negative_is_none: bool = False
    spill: str = "listed"
    costs: tuple[Number, ...] = ()
    # Results of `place` by bands and rule, kept for ever, as a grid never changes.
    _places: dict[tuple[tuple[int, ...], PriorityRule | None], Placement] = dataclass_field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def select(self, values: Mapping[str, Number | None], priority: Number | None = None) -> Cell:
        """The cell of a request with these `AXIS_FIELDS`; those of other stages may be among them.

        A latency target that is missing or None counts as the middle of its range. Raises `SelectError`
        when a size of this grid is missing, when a value of this grid or `priority` is not a finite
        number, and for a name that is no axis field.
        """
        if not values.keys() <= _KNOWN_FIELDS:
            unknown = min(values.keys() - _KNOWN_FIELDS)
            raise SelectError(unknown, f"is not one of {', '.join(AXIS_FIELDS)}")
        return self.place(values, priority).cell

    def place(
        self, values: Mapping[str, Number | None], priority: Number | None = None
    ) -> Placement:
        """The cell as `select` finds it, with the pools that the request may use.

        Raises `SelectError` as `select` does, but ignores names that are no axis field.
        """
        if self.size_optional or self.negative_is_none:
            values = {axis.field: self._given(axis, values) for axis in self.axes}
        index = tuple([axis.index(values.get(axis.field)) for axis in self.axes])
        rule = None if priority is None else self._rule(priority)
        place = self._places.get((index, rule))
        if place is None:
            pools = self.pools_at(index)
            if rule is not None:
                cell = Cell(index, pools[0], rule.pool, by_rule=True)
            else:
                cell = Cell(index, pools[0], pools[0], pools[1:])
            order, spill = self.pool_order(cell), self._spill(cell)
            order = (*order, *(at for at in spill if at not in order))
            place = Placement(cell, self._named(order), self._named(spill))
            self._places[index, rule] = place
        return place

    def _named(self, pools: tuple[int, ...]) -> tuple[str, ...]:
        return tuple([self.pool_names[at] for at in pools])

    def _spill(self, cell: Cell) -> tuple[int, ...]:
        """Numbers of the pools of `Placement.spill`; whom a rule has placed does not spill."""
        own = (cell.pool, *cell.spill)
        if cell.by_rule or self.spill == "none":
            return own[:1]
        if self.spill == "listed":
            return own
        all_pools = (*own, *(at for at in range(len(self.pool_names)) if at not in own))
        # Of pools that cost the same the cell's come first, in their order.
        return tuple(sorted(all_pools, key=lambda at: self.costs[at] if self.costs else 0))

    def pools_at(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Pool numbers of the cell at `index`, a band for each axis: first choice, then spill."""
        at = 0
        for axis, band in zip(self.axes, index, strict=True):
            at = at * axis.resolution + band
        return self.cells[at]

    def pool_order(self, cell: Cell) -> tuple[int, ...]:
        """Numbers of all pools for a request of `cell`, in order: the cell's, then a retry's."""
        return self.order((cell.pool, *cell.spill))

    def order(self, pools: tuple[int, ...]) -> tuple[int, ...]:
        """The given pool numbers, of a cell or rule, followed by those that a retry may go to."""
        retries = self.retry_order(pools[0])
        if len(pools) == 1:
            return retries
        return (*pools, *(at for at in retries if at not in pools))

    def retry_order(self, pool_index: int) -> tuple[int, ...]:
        """The pools to try for a request of pool `pool_index`: itself, then the strictly faster ones.

        The slowest of those comes first, equals in index order: a retry costs as little of a faster tier
        as it can. Without retry only the pool itself.
        """
        if not self.retry:
            return (pool_index,)
        mine = self.priorities[pool_index]
        faster = [at for at, priority in enumerate(self.priorities) if priority < mine]
        return (pool_index, *sorted(faster, key=lambda at: (-self.priorities[at], at)))

    def starts(self) -> list[tuple[int, ...]]:
        """The pool numbers of each cell (first choice, spill), and of each rule that can match."""
        live = [rule for rule, left in zip(self.rules, self.matched(), strict=True) if left]
        return [*self.cells, *((rule.pool,) for rule in live)]

    def reached(self) -> set[int]:
        """Numbers of the pools that some request can reach, by cell, by rule or by retry."""
        starts = set(self.starts())
        listed = {pool for pools in starts for pool in pools}
        if self.spill == "any":
            return set(range(len(self.pool_names)))
        if not self.retry:
            return listed
        slowest = max(self.priorities[pools[0]] for pools in starts)
        return listed | {at for at, priority in enumerate(self.priorities) if priority < slowest}

    def sendable(self, rule: PriorityRule) -> _Range | None:
        """The first and last priority of a rule that a request can have; None: there is none."""
        least = 0 if self.negative_is_none else INT32[0]
        low, high = max(math.ceil(rule.low), least), min(math.floor(rule.high), INT32[1])
        return (low, high) if low <= high else None

    def matched(self) -> Iterator[list[_Range]]:
        """Yield for each rule the ranges of priorities, ends included, that earlier ones leave."""
        free: list[_Range] = [INT32]
        for rule in self.rules:
            sendable = self.sendable(rule)
            if sendable is None:
                yield []
                continue
            low, high = sendable
            yield [(max(a, low), min(b, high)) for a, b in free if a <= high and b >= low]
            below = [(a, min(b, low - 1)) for a, b in free if a < low]
            free = below + [(max(a, high + 1), b) for a, b in free if b > high]

    def _given(self, axis: Axis | UnevenAxis, values: Mapping[str, Number | None]) -> Number | None:
        value = values.get(axis.field)
        if value is None:
            return axis.midpoint if axis.required and self.size_optional else None
        if self.negative_is_none and not axis.required and is_finite_number(value) and value < 0:
            return None
        return value

    def _rule(self, priority: Number) -> PriorityRule | None:
        if not is_finite_number(priority):
            raise SelectError("priority", f"must be a finite number (got {shown(priority)})")
        if self.negative_is_none:
            priority = int(priority)
            if priority < 0:
                return None
        for rule in self.rules:
            if rule.low <= priority <= rule.high:
                return rule
        return None
