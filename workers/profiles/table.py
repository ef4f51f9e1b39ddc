"""A table of seconds over two axes, read between its rows and beyond them.

Axes and values are interpolated in log space, except a linear second axis (`log_y=False`). Beyond the table
the last two rows of that axis set the slope, which never falls; below the first value of a second axis in
log space the seconds stay those of that value.

    y slot      0          1 .. n-1          n             (lines y[0] .. y[n-1], at growing y)
    near        0          slot-1            n-1           the line that y is measured from
    far         1          slot              n-2           the line that sets the slope with it
    falling     no         yes               no            whether the line at greater y may be below

Every rule is in the cells of a `TimingTable`; `at` and `many` only evaluate them.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_WHOLE = 1024
"""Whole numbers on the first axis up to which `TimingTable.many_whole` looks up what `many` computes."""

MAX_KNOWN = 1024
"""The most points whose seconds are kept: each request asks twice, for the choice and for learning."""


class _Line:
    """Seconds along the first axis at one value of the second: `v[i] * exp(slope[i] * (x - x[i]))`.

    Each segment starts from its own row, so a row's seconds are returned bit for bit.
    """

    __slots__ = ("_slopes", "_values_s", "log_xs")

    def __init__(self, rows: Sequence[tuple[float, float]]) -> None:
        self.log_xs = [math.log(x) for x, _ in rows]
        self._values_s = [value_s for _, value_s in rows]
        inner = [
            math.log(b / a) / (x_b - x_a)
            for (x_a, a), (x_b, b) in pairwise(zip(self.log_xs, self._values_s, strict=True))
        ]
        # Entry 0 serves points below the first row, the last entry those beyond the last row.
        outer = (max(0.0, inner[0]), max(0.0, inner[-1])) if inner else (0.0, 0.0)
        self._slopes = [outer[0], *inner, outer[1]]

    def segment(self, log_x: float) -> tuple[float, float, float]:
        """The segment at `log_x`: log x of its first row, seconds there, slope."""
        i = bisect_right(self.log_xs, log_x)
        row = i - 1 if i else 0
        return self.log_xs[row], self._values_s[row], self._slopes[i]


class TimingTable:
    """Seconds at any (x, y), from rows (x >= 1, y, milliseconds); `log_y`: y is in log space."""

    def __init__(self, rows: Sequence[tuple[int, int, float]], *, log_y: bool) -> None:
        self.rows = tuple(sorted(rows))
        by_y: dict[int, list[tuple[float, float]]] = {}
        for x, y, ms in self.rows:
            by_y.setdefault(y, []).append((x, ms / 1000.0))
        self._log_y = log_y
        raw_ys = sorted(by_y)
        self._ys = ys = [math.log(y) if log_y else float(y) for y in raw_ys]
        self._lines = [_Line(by_y[y]) for y in raw_ys]
        # Each line has its own rows, so the slots of x are between the rows of all lines.
        self._log_xs = sorted({log_x for line in self._lines for log_x in line.log_xs})
        starts = [-math.inf, *self._log_xs]
        # Of each slot of y: y of the near line, distance to the far one, which of them is at greater y
        # (1 far, -1 near), least rise from the lower y to the greater.
        self._bands: list[tuple[float, float, float, float]] = []
        self._cells: list[list[tuple[float, ...]]] = []  # by slot of y, then of x
        last = len(ys) - 1
        for slot in range(len(ys) + 1):
            near = max(0, slot - 1)
            # A single line is both: nothing rises between them, whatever the distance.
            far = near + 1 if near < last else max(0, last - 1)
            floor = -math.inf if 0 < slot <= last else 0.0
            sign = 1.0 if near < last else -1.0
            step = abs(ys[far] - ys[near]) or 1.0
            if log_y and slot == 0:
                # With the slope of large batches a full batch would soon be faster than a single request.
                step = math.inf
            self._bands.append((ys[near], step, sign, floor))
            near_line, far_line = self._lines[near], self._lines[far]
            self._cells.append([near_line.segment(x) + far_line.segment(x) for x in starts])
        self._log_xs_many = np.array(self._log_xs)
        self._ys_many = np.array(ys)
        self._whole: tuple[Floats, Floats] | None = None
        self._known: dict[tuple[float, float], float] = {}
        # f64[(log x, seconds, slope), near or far, cell] and f64[(as in a band), slot of y]
        cells = np.array(self._cells).reshape(-1, 2, 3)
        self._cells_many = np.ascontiguousarray(cells.transpose(2, 1, 0))
        self._bands_many = np.ascontiguousarray(np.array(self._bands).T)

    def at(self, x: float, y: float) -> float:
        """Seconds at (x >= 1, y); y > 0 where that axis is in log space."""
        seconds = self._known.get((x, y))
        if seconds is None:
            seconds = self._at(x, y)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[x, y] = seconds
        return seconds

    def _at(self, x: float, y: float) -> float:
        log_x = math.log(x)
        if self._log_y:
            y = math.log(y)
        slot = bisect_right(self._ys, y)
        near_y, y_step, sign, floor = self._bands[slot]
        x0, v0, slope0, x1, v1, slope1 = self._cells[slot][bisect_right(self._log_xs, log_x)]
        near_s = v0 * math.exp(slope0 * (log_x - x0))
        far_s = v1 * math.exp(slope1 * (log_x - x1))
        step = (y - near_y) / y_step
        if self._log_y:
            return near_s * math.exp(step * max(floor, sign * math.log(far_s / near_s)))
        return max(0.0, near_s + step * max(floor, sign * (far_s - near_s)))

    def many(self, x: Floats, y: Floats) -> Floats:
        """`at` of each of n points, all f64[n]; numpy's exp and log may differ in the last bit."""
        log_x = np.log(x)
        if self._log_y:
            y = np.log(y)
        slots = self._ys_many.searchsorted(y, "right")
        near_y, y_step, sign, floor = self._bands_many.take(slots, axis=1)
        slots *= len(self._log_xs) + 1
        slots += self._log_xs_many.searchsorted(log_x, "right")
        x0, v0, slope = self._cells_many.take(slots, axis=2)  # f64[near or far, n] each
        lines_s = np.subtract(log_x, x0, out=x0)
        lines_s *= slope
        np.exp(lines_s, out=lines_s)
        lines_s *= v0
        near_s: Floats = lines_s[0]
        rise: Floats = lines_s[1]
        if self._log_y:
            np.log(np.divide(rise, near_s, out=rise), out=rise)
        else:
            rise -= near_s
        rise *= sign
        np.maximum(rise, floor, out=rise)
        rise *= np.divide(np.subtract(y, near_y, out=near_y), y_step, out=y_step)
        if self._log_y:
            near_s *= np.exp(rise, out=rise)
            return near_s
        near_s += rise
        np.maximum(near_s, 0.0, out=near_s)
        return near_s

    def many_whole(self, x: Ints, y: Floats) -> Floats:
        """`many` for whole x, i64[n]: faster, and the last digits may differ.

        The second axis must be in log space. There the log of the seconds is linear in log y
        between two lines, so for each x one straight line a slot of y is kept.
        """
        if len(x) and x.item(x.argmax()) > MAX_WHOLE:
            return self.many(x.astype(np.float64), y)
        if self._whole is None:
            self._whole = self._whole_lines()
        log_y = np.log(y)
        places = self._ys_many.searchsorted(log_y, "right")
        places *= MAX_WHOLE + 1
        places += x
        starts, slopes = self._whole
        seconds: Floats = slopes.take(places)
        seconds *= log_y
        seconds += starts.take(places)
        np.exp(seconds, out=seconds)
        return seconds

    def _whole_lines(self) -> tuple[Floats, Floats]:
        """Log seconds at log y = 0, and their slope: f64[slot of y and whole x] each."""
        log_x = np.log(np.maximum(np.arange(MAX_WHOLE + 1), 1))
        slots = np.arange(len(self._bands)).reshape(-1, 1)
        near_y, y_step, sign, floor = self._bands_many.take(slots, axis=1)
        at = slots * (len(self._log_xs) + 1) + self._log_xs_many.searchsorted(log_x, "right")
        x0, v0, slope = self._cells_many.take(at, axis=2)
        near, far = slope * (log_x - x0) + np.log(v0)
        rise = np.maximum(sign * (far - near), floor) / y_step
        return (near - rise * near_y).ravel(), rise.ravel()

    def is_finite(self, far: float) -> bool:
        """Whether `at` is finite for every x and y up to `far`, however steep the last rows are."""
        xs = [1.0, *(math.exp(log_x) for log_x in self._log_xs), far]
        ys = [float(self._log_y), *(math.exp(y) if self._log_y else y for y in self._ys), far]
        try:
            return all(math.isfinite(self.at(x, y)) for x in xs for y in ys)
        except ArithmeticError:
            return False
