"""Fits `offset_s + scale * work_s` to observed seconds, one observation at a time.

It minimises the squares of the relative errors, of which old ones are forgotten:

    sum_i FORGET^(n-i) * weight_i * (y_i - scale * w_i - offset_s)^2 / (y_i * predicted_i)
    + ((scale - now) / now)^2 + ((offset_s - now) / OFFSET_UNIT_S)^2

The last two terms are the distance to the present coefficients and weigh as much as one observation. They
decide where the observations do not: prompts of one length cannot tell scale from offset. They cause no
drift, while a pull to fixed values would keep part of every error for ever.

Outliers are clipped in ratios, so that twice as long and half as long count the same: an observation is
moved to within `CLIP` times the usual |log(seconds / predicted)| of its prediction. So a stall counts as
one ordinary observation, while a worker that has really become slower widens the limit step by step.
"""

import math

FORGET = 0.96
"""The factor on an observation's weight at each new one: about the last 25 count. With more of them a
change of the workers would show too late, with fewer queueing noise would show in the coefficients."""

CLIP = 2.0
"""In usual errors; normal noise rarely goes beyond it."""

USUAL_STEP, MIN_USUAL, MAX_USUAL = 1.15, 0.02, 3.0
"""The usual error is a running median: it rises by this factor at an error beyond it, and else falls. Its
minimum lets predictions that were exact become wrong again; its maximum is a factor of 20."""

OFFSET_UNIT_S = 0.02
"""A change of the offset that is as far as doubling the scale."""

_HOLD_OFFSET = 1.0 / OFFSET_UNIT_S**2

MIN_SCALE, MAX_SCALE = 0.01, 100.0
"""These cover any GPU against another, and a simulated engine that runs a test at ten times the speed."""

MAX_OFFSET_S = 0.5
"""The most that a leg may cost beside its prefill; more is a queue that was not counted, not a constant."""

MIN_S, MAX_S = 1e-4, 1e5
"""What a clock and a network can resolve, and more than any request takes."""


class Fit:
    """The coefficients `scale` and `offset_s`: 1 and 0 until there are `min_observed` observations."""

    __slots__ = (
        "_a",
        "_b",
        "_c",
        "_d",
        "_e",
        "_max_offset_s",
        "_min_observed",
        "_now_offset_s",
        "_now_scale",
        "_usual",
        "n_observed",
        "offset_s",
        "scale",
    )

    def __init__(self, *, min_observed: int, max_offset_s: float = MAX_OFFSET_S) -> None:
        self.scale, self.offset_s = 1.0, 0.0
        self.n_observed = 0
        self._min_observed, self._max_offset_s = min_observed, max_offset_s
        self._now_scale, self._now_offset_s = 1.0, 0.0
        self._usual = 1.0  # |log(seconds / predicted)|; the first may be far from the profile
        # Sums of the weight times ww, w, 1, wy, y.
        self._a = self._b = self._c = self._d = self._e = 0.0

    def observe(self, work_s: float, seconds: float, *, weight: float = 1.0) -> bool:
        """Learn that `work_s` took `seconds`; ignored if negative, NaN or above `MAX_S`.

        `weight` in [0, 1] is how far `work_s` can be trusted. True: the coefficients were set.
        """
        if not (0.0 <= work_s <= MAX_S and 0.0 <= seconds <= MAX_S):
            return False
        seconds = max(seconds, MIN_S)
        self.n_observed += 1
        predicted_s = max(self._now_offset_s + self._now_scale * work_s, MIN_S)
        away = math.log(seconds / predicted_s)
        limit = CLIP * self._usual
        counted_s = predicted_s * math.exp(min(limit, max(-limit, away)))
        usual = self._usual * (USUAL_STEP if abs(away) > self._usual else 1 / USUAL_STEP)
        self._usual = min(MAX_USUAL, max(MIN_USUAL, usual))
        weight /= counted_s * predicted_s
        # Added to the sums, which then give the coefficients that fit best now.
        self._a = a = FORGET * self._a + weight * work_s * work_s
        self._d = d = FORGET * self._d + weight * work_s * counted_s
        hold_scale = 1.0 / self._now_scale**2
        a += hold_scale
        d += hold_scale * self._now_scale
        if self._max_offset_s:
            self._b = b = FORGET * self._b + weight * work_s
            self._c = c = FORGET * self._c + weight
            self._e = e = FORGET * self._e + weight * counted_s
            c += _HOLD_OFFSET
            e += _HOLD_OFFSET * self._now_offset_s
            # The denominator is positive: the sums alone give >= 0, and both factors were increased.
            offset_s = (a * e - b * d) / (a * c - b * b)
            self._now_offset_s = min(self._max_offset_s, max(0.0, offset_s))
            # This is the best scale also where the offset is at its bound.
            d -= b * self._now_offset_s
        self._now_scale = min(MAX_SCALE, max(MIN_SCALE, d / a))
        if self.n_observed < self._min_observed:
            return False
        self.scale, self.offset_s = self._now_scale, self._now_offset_s
        return True
