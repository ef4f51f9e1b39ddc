"""The pool grid: which pool serves a request of this size with this latency target.

The arithmetic is that of Dynamo's global router, bit for bit, so that a fleet can change routers without
moving traffic (docs/decisions/0003-grid-arithmetic.md). Nothing here checks a grid: `grid_config` does,
once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from slagate.pools.errors import SelectError
from slagate.pools.json_text import is_finite_number, shown

Number = int | float

AXIS_FIELDS = ("isl", "context_length", "ttft_ms", "itl_ms")
"""What a request can bring to a grid: two sizes in tokens, two latency targets in milliseconds."""

_SIZE_FIELDS = frozenset({"isl", "context_length"})
_KNOWN_FIELDS = frozenset(AXIS_FIELDS)


@dataclass(frozen=True, slots=True)
class Axis:
    """`resolution` bands of equal width from `low` to `high`, in tokens or milliseconds as `field` says."""

    field: str
    low: Number
    high: Number
    resolution: int

    @property
    def step(self) -> float:
        """The width of a band."""
        return (self.high - self.low) / self.resolution

    @property
    def midpoint(self) -> float:
        """The middle of the range, which stands in for a latency target that was not given."""
        return (self.low + self.high) / 2

    @property
    def required(self) -> bool:
        """Whether a request must bring a value: a size has no sensible stand-in."""
        return self.field in _SIZE_FIELDS

    def index(self, value: Number | None) -> int:
        """The band of `value`, the first or the last one when it lies outside.

        Raises `SelectError` when a size is missing, and when `value` is not a finite number.
        """
        if value is None:
            if self.required:
                raise SelectError(self.field, "is required")
            value = self.midpoint
        elif not is_finite_number(value):
            raise SelectError(self.field, f"must be a finite number (got {shown(value)})")
        try:
            # The step comes first and is divided by: with another order of the same operations some
            # values on the edge of a band change sides.
            index = int((value - self.low) / self.step)
        except OverflowError:
            # Either value - low is beyond the largest double, and high - low is not; or the quotient is,
            # and the resolution is not. Both ways value lies outside, on the side that the sign of
            # value - low names, and the exact quotient would be clamped to that end. The comparison is
            # exact for ints and floats of any size.
            return self.resolution - 1 if value > self.low else 0
        return max(0, min(index, self.resolution - 1))


class PriorityRule(NamedTuple):
    """Sends the priorities from `low` to `high`, both included, to one pool."""

    low: Number
    high: Number
    pool: int


class Cell(msgspec.Struct, frozen=True, gc=False):
    """Where a request landed: band per axis, the pool the grid says, and the pool after priority rules."""

    index: tuple[int, ...]
    base_pool: int
    pool: int

    @property
    def row(self) -> int:
        """The band of the last axis but one."""
        return self.index[-2]

    @property
    def col(self) -> int:
        """The band of the last axis."""
        return self.index[-1]


@dataclass(frozen=True, slots=True)
class StageGrid:
    """The pools of one stage, the grid that picks among them, and the order to try others in.

    `cells` holds the pool number of every cell with the last axis running fastest. A lower number in
    `priorities` is a faster pool.
    """

    axes: tuple[Axis, ...]
    cells: tuple[int, ...]
    pool_names: tuple[str, ...]
    priorities: tuple[int, ...]
    rules: tuple[PriorityRule, ...] = ()
    retry: bool = False

    def select(self, values: Mapping[str, Number | None], priority: Number | None = None) -> Cell:
        """The cell of a request with these `AXIS_FIELDS`; what other stages need may be among them.

        A latency target that is missing or None counts as the middle of its range. Raises `SelectError`
        when a size of this grid is missing, when a value of this grid or `priority` is not a finite
        number, and for a name that is no axis field.
        """
        if not values.keys() <= _KNOWN_FIELDS:
            unknown = min(values.keys() - _KNOWN_FIELDS)
            raise SelectError(unknown, f"is not one of {', '.join(AXIS_FIELDS)}")
        index = tuple([axis.index(values.get(axis.field)) for axis in self.axes])
        at = 0
        for axis, band in zip(self.axes, index, strict=True):
            at = at * axis.resolution + band
        base_pool = self.cells[at]
        return Cell(index, base_pool, self._after_rules(base_pool, priority))

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

    def _after_rules(self, base_pool: int, priority: Number | None) -> int:
        if priority is None:
            return base_pool
        if not is_finite_number(priority):
            raise SelectError("priority", f"must be a finite number (got {shown(priority)})")
        for rule in self.rules:
            if rule.low <= priority <= rule.high:
                return rule.pool
        return base_pool
