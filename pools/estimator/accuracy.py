"""How right the predictions of one latency of a pool were, and what its predictions are based on for that.

Each prediction by which a request was sent is paired with what happened, and so are the two that could have
been made instead: with the coefficients that were learnt, and by the profile alone. The newest `MAX_PAIRS`
are kept as logarithms of quotients, so that half as long and twice as long are equally far off.

What the pool is based on follows from the factor by which half of these predictions are off, or by more:

    learnt     the profile, corrected by what was learnt; without a profile, what was learnt
    profile    the profile alone: what was learnt is off by more than `MAX_LEARNT`, and the profile by less
    grid       both are off by more than `MAX_FACTOR`: the latency decides nothing in this pool

It comes back from the grid once the better one is off by no more than `MAX_LEARNT`. Both go on being
paired, or it never could.
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

CLEARLY = 0.8
"""One prediction is better than another if it is off by no more than this part of what that is off by."""

MIN_S = 1e-4
"""What a clock can resolve; anything shorter counts as that."""


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
        self.n_pairs = 0  # all that there ever were
        self._has_profile = has_profile
        # ln(predicted / actual) of the prediction as made, as learnt, and of the profile alone.
        self._logs: Floats = np.zeros((MAX_PAIRS, 3))

    def add_pair(self, actual_s: float, made_s: float, learnt_s: float, profile_s: float) -> bool:
        """Add what was predicted, and what was or would have been, beside what it took; in seconds.

        True: `basis` is another one now. What is no time is ignored.
        """
        predicted = (made_s, learnt_s, profile_s)
        if min(actual_s, *predicted) < 0.0 or not actual_s + sum(predicted) < math.inf:
            return False
        actual_s = max(actual_s, MIN_S)
        logs = [math.log(max(each, MIN_S) / actual_s) for each in predicted]
        self._logs[self.n_pairs % MAX_PAIRS] = logs
        self.n_pairs += 1
        if self.n_pairs < MIN_PAIRS or self.n_pairs % EACH:
            return False
        before, self.basis = self.basis, self._next()
        return self.basis != before

    def _next(self) -> Basis:
        learnt, profile = _middle(np.abs(self._newest[:, 1:])).tolist()
        if not self._has_profile:
            profile = math.inf
        limit = MAX_LEARNT if self.basis == "grid" else MAX_FACTOR
        if min(learnt, profile) > limit:
            return "grid"
        if self.basis == "profile":
            return "learnt" if learnt <= CLEARLY * max(MAX_LEARNT, profile) else "profile"
        return "profile" if learnt > MAX_LEARNT and profile <= CLEARLY * learnt else "learnt"

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


def _middle(figures: Floats) -> Floats:
    """The upper median along the first axis; numpy's own loads modules at its first use, in a request."""
    middle: Floats = np.sort(figures, axis=0)[len(figures) // 2]
    return middle
