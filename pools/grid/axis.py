"""One axis of a pool grid: which band a size or a latency target falls in.

The arithmetic of `Axis` is that of Dynamo's global router, bit for bit
(docs/decisions/0003-grid-arithmetic.md). `number_text` shows numbers of a fleet file to people.
"""

from bisect import bisect_right
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from math import isfinite

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
        """Whether a request must have a value: there is no sensible default for a size."""
        return self.field in SIZE_FIELDS

    @property
    def midpoint(self) -> Number:
        """The middle of the range, the default for a value that was not given.

        For a size, where a grid has such a default, it is rounded down. Both are Dynamo's arithmetic.
        """
        total = self.low + self.high
        middle = total // 2 if self.field in SIZE_FIELDS else total / 2
        # The sum of two large doubles can be infinite.
        return middle if isfinite(middle) else self.low / 2 + self.high / 2

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
    """Bands of equal width."""

    field: str
    low: Number
    high: Number
    resolution: int

    @property
    def step(self) -> float:
        """The width of a band."""
        return (self.high - self.low) / self.resolution

    @property
    def edges(self) -> tuple[Number, ...]:
        """Where each band begins, and where the last one ends; for people, as `index` rounds otherwise."""
        step = self.step
        if not isfinite(step):  # the ends are further apart than the largest double
            step = self.high / self.resolution - self.low / self.resolution
        return (*(self.low + at * step for at in range(self.resolution)), self.high)

    def index(self, value: Number | None) -> int:
        """The band of `value`; the first or the last one when it lies outside.

        Raises `SelectError` when a required value is missing, and when `value` is not a finite number.
        """
        # Nearly all values are plain ints or finite floats.
        if type(value) is not int and (type(value) is not float or not isfinite(value)):
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
    """Bands between ascending `edges`; a value on an inner edge belongs to the band above it."""

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
        """The band of `value`, under the conditions of `Axis.index`."""
        # The outer edges are left out of the search, which clamps.
        return bisect_right(self.edges, self._checked(value), 1, self.resolution) - 1


AnyAxis = Axis | UnevenAxis


def number_text(value: Number) -> str:
    """A number of tokens or milliseconds, to six digits or more where it is no whole number.

    >>> number_text(16384.0), number_text(1333.333333333), number_text(1028806.58), number_text(1e300)
    ('16,384', '1,333.33', '1,028,807', '1e+300')
    """
    if abs(value) < 1e15 and (value == int(value) or abs(value) >= 1e5):
        return f"{round(value):,}"
    return f"{value:,.6g}"
