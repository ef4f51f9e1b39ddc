"""The pool grid: which pools serve a request of this size with this latency target, in which order.

Selection, priority rules and retry order are those of Dynamo's global router (docs/grid.md). Nothing here
checks a grid: `fleet_file` does, once.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec

from slagate.pools.grid.axis import AXIS_FIELDS, Axis, Number, UnevenAxis
from slagate.pools.grid.errors import SelectError
from slagate.pools.grid.json_text import is_finite_number, shown

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
    """Sends the priorities from `low` to `high`, both included, to one pool."""

    low: Number
    high: Number
    pool: int


class Cell(msgspec.Struct, frozen=True, gc=False):
    """The cell of a request: its band on each axis, and the pools of the grid and of priority rules.

    `spill` has the further pools of the cell, in order; none where a rule named the pool.
    """

    index: tuple[int, ...]
    base_pool: int
    pool: int
    spill: tuple[int, ...] = ()

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

    `cells` has the pools of every cell, the last axis running fastest: first choice, then where to spill. A
    lower number in `priorities` is a faster pool. With `size_optional` a missing size counts as the middle
    of its range, as a missing latency target does. With `negative_is_none` latency targets and priorities
    below 0 count as not given, and other priorities are cut to their whole part.
    """

    axes: tuple[Axis | UnevenAxis, ...]
    cells: tuple[tuple[int, ...], ...]
    pool_names: tuple[str, ...]
    priorities: tuple[int, ...]
    rules: tuple[PriorityRule, ...] = ()
    retry: bool = False
    size_optional: bool = False
    negative_is_none: bool = False
    # Results of `place` by bands and rule, kept for ever, as a grid never changes.
    _places: dict[tuple[tuple[int, ...], PriorityRule | None], tuple[Cell, tuple[str, ...]]] = (
        field(default_factory=dict, init=False, repr=False, compare=False)
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
        return self.place(values, priority)[0]

    def place(
        self, values: Mapping[str, Number | None], priority: Number | None = None
    ) -> tuple[Cell, tuple[str, ...]]:
        """The cell as `select` finds it, and the names of all pools that the request may use, in order.

        Unknown fields are not refused, to save time: those of the policy are always the same.
        """
        if self.size_optional or self.negative_is_none:
            values = {axis.field: self._given(axis, values) for axis in self.axes}
        index = tuple([axis.index(values.get(axis.field)) for axis in self.axes])
        rule = None if priority is None else self._rule(priority)
        place = self._places.get((index, rule))
        if place is None:
            pools = self.pools_at(index)
            if rule is not None:
                cell = Cell(index, pools[0], rule.pool)
            else:
                cell = Cell(index, pools[0], pools[0], pools[1:])
            place = cell, tuple([self.pool_names[at] for at in self.pool_order(cell)])
            self._places[index, rule] = place
        return place

    def pools_at(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """The pools of the cell with these bands, one for each axis: first choice, then spill order."""
        at = 0
        for axis, band in zip(self.axes, index, strict=True):
            at = at * axis.resolution + band
        return self.cells[at]

    def pool_order(self, cell: Cell) -> tuple[int, ...]:
        """All pools a request of this cell may use, in order: those of the cell, then those of a retry."""
        return self.order((cell.pool, *cell.spill))

    def order(self, pools: tuple[int, ...]) -> tuple[int, ...]:
        """The order of pools for a request that has these by its cell or rule."""
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
        """The lists of pools of all cells, and of all rules that can match."""
        live = [rule for rule, left in zip(self.rules, self.matched(), strict=True) if left]
        return [*self.cells, *((rule.pool,) for rule in live)]

    def reached(self) -> set[int]:
        """The pools that some request can reach, by cell, by rule or by retry."""
        starts = set(self.starts())
        listed = {pool for pools in starts for pool in pools}
        if not self.retry:
            return listed
        slowest = max(self.priorities[pools[0]] for pools in starts)
        return listed | {at for at, priority in enumerate(self.priorities) if priority < slowest}

    def sendable(self, rule: PriorityRule) -> _Range | None:
        """The range of a rule's priorities that a request can have; None: there are none."""
        least = 0 if self.negative_is_none else INT32[0]
        low, high = max(math.ceil(rule.low), least), min(math.floor(rule.high), INT32[1])
        return (low, high) if low <= high else None

    def matched(self) -> Iterator[list[_Range]]:
        """For each rule the ranges of priorities that match it and none of the rules before it."""
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
