"""How right the predictions of one latency of a pool were, and what its predictions are based on for that.

Each prediction by which a request was sent is paired with what happened, and so are the two that could have
been made instead: with the coefficients that were learnt, and by the profile alone. The newest `MAX_PAIRS`
are kept as logarithms of quotients, so that half as long and twice as long are equally far off.

What the pool is based on follows from the factor by which half of these predictions are off, or by more:

    learnt     the profile, corrected by what was learnt; without a profile, what was learnt
    profile    the profile alone: what was learnt is off by more than `MAX_LEARNT`, and the profile by less
    grid       also calibrated, they are off by more than `MAX_FACTOR`: the latency decides nothing here

It comes back from the grid once the better one is off by no more than `MAX_LEARNT`. Both go on being
paired, or it never could.

Predictions of which half are off by more than `CALIBRATE_FROM` are calibrated, see `Calibration`. Of many
that are off by chance the least is the most optimistic, so who is chosen by them takes longer than that.
"""

import math
from typing import Literal, NamedTuple

import numpy as np

from slagate.workers.profiles.table import Floats

Basis = Literal["learnt", "profile", "grid"]

BASES: tuple[Basis, ...] = ("learnt", "profile", "grid")
"""What predictions may be based on; the later, the less they are trusted."""

MAX_PAIRS, MIN_PAIRS = 256, 64
"""Pairs that count, and that there are before anything is concluded. A pool that becomes half as fast is
learnt within some tens of requests, which are far from half of them; the first ones may be of a profile
that was not corrected yet."""

EACH = 16
"""The basis is looked at once in so many pairs: a median is more work than all else here."""

MAX_LEARNT, MAX_FACTOR = math.log(1.6), math.log(2.0)
"""Of |ln(predicted / actual)|. Lognormal noise with a sigma of 0.6 makes it ln(1.5)."""

CALIBRATE_FROM, CALIBRATE_TO = math.log(1.25), math.log(1.15)
"""Of |ln(predicted / actual)|: from where on predictions are calibrated, and until when."""

CAREFUL, HOPEFUL = 1.0, -0.3
"""Spreads by which what a request typically takes is made longer to tell whether it fits, and shorter to
tell whether it is late. The part of a target that no prediction may fill comes on top of both."""

FARTHER = 1.35
"""A line that is no nearer to what requests took still tells how far off predictions are. One that is
farther by so much is drawn by a few that are off by a lot, while the others are right."""

MAX_LOG = 30.0
"""More than the logarithm of any time, in seconds, by any other."""

CLEARLY = 0.8
"""One prediction is better than another if it is off by no more than this part of what that is off by."""

_LEAST_SQUARE = 1e-9
"""Of differences of predictions; less is rounding."""

MIN_S = 1e-4
"""What a clock can resolve; anything shorter counts as that."""


class Calibration(NamedTuple):
    """What requests took by what had been predicted, as a line through the logarithms of both.

    The less predictions tell, the flatter it is: at a slope of 0 the mean of what requests took is all.
    """

    offset: float
    slope: float  # in [0, 1]
    spread: float  # standard deviation of ln(actual) about the line
    # The least and the most ln(predicted) of the pairs, between which it holds; what is shorter or longer
    # than these by a factor is taken to be so by the same factor.
    low: float
    high: float

    def parts(self, seconds: Floats, limit_s: float) -> tuple[Floats, Floats]:
        """How much of `limit_s` these predicted seconds take by `CAREFUL` and by `HOPEFUL`, f64[n] each."""
        typical = self.typical_s(seconds) / limit_s
        careful, hopeful = (math.exp(n * self.spread) for n in (CAREFUL, HOPEFUL))
        return typical * careful, typical * hopeful

    def typical_s(self, seconds: Floats) -> Floats:
        """What requests of which these seconds, f64[n], are predicted take in the middle."""
        logs = np.log(np.maximum(seconds, MIN_S))
        inside = np.clip(logs, self.low, self.high)
        typical_s: Floats = np.exp(self.offset + self.slope * inside + (logs - inside))
        return typical_s


class Figures(NamedTuple):
    """How right the newest predictions were, as they were made."""

    n_pairs: int
    bias: float  # the geometric mean of predicted / actual, less 1
    median_error: float  # of |predicted - actual| / actual
    coverage: float  # the share that took no longer than predicted / `share`


class Accuracy:
    """Pairs of predictions and outcomes of one latency, and what predictions of it are based on."""

    def __init__(self, *, has_profile: bool) -> None:
        self.basis: Basis = "learnt"
        self.calibration: Calibration | None = None  # None: predictions need none
        self.n_pairs = 0  # all that there ever were
        self._has_profile = has_profile
        # ln(predicted / actual) of the prediction as made, as learnt, and of the profile alone; ln(actual);
        # and in seconds the part of all three that is no work of the pool's.
        self._logs: Floats = np.zeros((MAX_PAIRS, 5))

    def add_pair(
        self,
        actual_s: float,
        made_s: float,
        learnt_s: float,
        profile_s: float,
        *,
        later_s: float = 0.0,
        now: tuple[float, float] = (1.0, 0.0),
    ) -> bool:
        """Add what was predicted, and what was or would have been, beside what it took; in seconds.

        `now` is by what factor, and how many seconds more, a prediction is longer than the profile's, but
        for the `later_s` that all of them have in common.
        True: `basis` or `calibration` is another one now. What is no time is ignored.
        """
        predicted = (made_s, learnt_s, profile_s)
        if min(actual_s, *predicted) < 0.0 or not actual_s + sum(predicted) < math.inf:
            return False
        actual_s = max(actual_s, MIN_S)
        logs = [math.log(max(each, MIN_S) / actual_s) for each in predicted]
        self._logs[self.n_pairs % MAX_PAIRS] = *logs, math.log(actual_s), later_s
        self.n_pairs += 1
        if self.n_pairs < MIN_PAIRS or self.n_pairs % EACH:
            return False
        before = self.basis, self.calibration
        self._look(*now)
        return before != (self.basis, self.calibration)

    def _look(self, scale: float, offset_s: float) -> None:
        """Set `basis` and `calibration` by the newest pairs."""
        newest = self._newest
        learnt, profile = _middle(np.abs(newest[:, 1:3])).tolist()
        if not self._has_profile:
            profile = math.inf
        if self.basis == "profile":
            is_learnt = learnt <= CLEARLY * max(MAX_LEARNT, profile)
        else:
            is_learnt = learnt <= MAX_LEARNT or profile > CLEARLY * learnt
        off = learnt if is_learnt else profile
        # As it would be predicted now, or what was learnt since would be put right once more.
        predicted = newest[:, 2] + newest[:, 3]
        if is_learnt:
            later_s = newest[:, 4]
            work_s = np.exp(predicted) - later_s
            predicted = np.log(np.maximum(MIN_S, scale * work_s + offset_s + later_s))
        now = _middle(np.abs(predicted - newest[:, 3])).item()
        before, self.calibration = self.calibration, None
        if now > (CALIBRATE_FROM if before is None else CALIBRATE_TO):
            line, left = _calibration(predicted, newest[:, 3])
            if left < FARTHER * now:
                self.calibration, off = line, min(off, left)
        limit = MAX_LEARNT if self.basis == "grid" else MAX_FACTOR
        self.basis = "learnt" if is_learnt else "profile"
        if off > limit:
            self.basis, self.calibration = "grid", None

    def figures(self, share: float) -> Figures | None:
        """The figures; `share` is the part of a target that a prediction may fill. None: no pair yet."""
        if not self.n_pairs:
            return None
        made = self._newest[:, 0]
        return Figures(
            len(made),
            math.expm1(float(made.mean())),
            _middle(np.abs(np.expm1(made))).item(),
            float(np.mean(made >= math.log(share))),
        )

    @property
    def _newest(self) -> Floats:
        return self._logs[: min(self.n_pairs, MAX_PAIRS)]


def _calibration(predicted: Floats, actual: Floats) -> tuple[Calibration, float]:
    """The line through logarithms of actual by predicted seconds, and how far half of them are from it."""
    x, y = predicted - predicted.mean(), actual - actual.mean()
    square = float(x @ x)
    slope = min(1.0, max(0.0, float(x @ y) / square)) if square > _LEAST_SQUARE * len(x) else 0.0
    offset = float(actual.mean()) - slope * float(predicted.mean())
    left = y - slope * x
    low, high = float(predicted.min()), float(predicted.max())
    figures = (offset, slope, float(np.std(left)), low, high)
    line = Calibration(*(min(MAX_LOG, max(-MAX_LOG, each)) for each in figures))
    return line, _middle(np.abs(left)).item()


def _middle(figures: Floats) -> Floats:
    """The upper median along the first axis; numpy's own loads modules at its first use, in a request."""
    middle: Floats = np.sort(figures, axis=0)[len(figures) // 2]
    return middle
