"""Predicts prefill seconds and inter-token seconds of a pool's workers, and learns from what they took.

    work_s      P(new, cached)
    ttft_s      prefill_offset_s + prefill_scale * (work queued on the worker + the prompt's own)
    itl_s       itl_scale * D(batch, context)

P and D come from the pool's timing profile, or without one from `NominalTiming`. Queues are sums of work in
uncorrected seconds of P. If they were corrected, the coefficients would be learnt from numbers that they
had made themselves, late by the length of a queue: in overload that oscillates without bound.
"""

import math
from collections.abc import Mapping
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import structs

from slagate.pools.estimator.accuracy import Accuracy, Basis, Calibration
from slagate.pools.estimator.fit import MAX_OFFSET_S, MIN_SCALE, Fit
from slagate.workers.profiles.profile import HOST_LINK_BYTES_PER_S, TpProfile, tp_profile_from_json
from slagate.workers.profiles.table import Floats, Ints

LINK_BYTES_PER_S = 50e9
"""What KV cache moves at between workers to begin with: one 400 Gb/s NIC each."""

NOMINAL_KV_BYTES_PER_TOKEN = 131_072
"""KV cache of an 8B model in 16 bits: 32 layers, 8 KV heads of 128, K and V."""

MIN_OBSERVED = 8
"""Observations before a profile is corrected: the first few requests may all be slow."""

MIN_OBSERVED_NOMINAL = 32
"""Observations before there are predictions without a profile."""


class Coefficients(msgspec.Struct, frozen=True, gc=False):
    """Corrections of a profile's times. The defaults change nothing."""

    prefill_scale: float = 1.0
    prefill_offset_s: float = 0.0
    itl_scale: float = 1.0

    @property
    def prefill(self) -> tuple[float, float]:
        """The pair (`prefill_scale`, `prefill_offset_s`)."""
        return self.prefill_scale, self.prefill_offset_s


UNCORRECTED = Coefficients()

_WorkT = TypeVar("_WorkT", float, Floats)


class NominalTiming:
    """Assumed times of a pool without a profile: enough to rank its workers, which are alike."""

    kv_bytes_per_token = NOMINAL_KV_BYTES_PER_TOKEN

    def prefill_s(self, new_tokens: float, cached_tokens: float) -> float:
        """Seconds to prefill `new_tokens` at 20,000 tokens/s; `cached_tokens` take no time."""
        return max(0.0, new_tokens) / 20_000

    def itl_s(self, batch_size: float, context_tokens: float) -> float:
        """Seconds of one decode step: 10 ms, and 10 ns for each token of context in the batch."""
        return 0.01 + max(0.0, batch_size) * max(0.0, context_tokens) * 1e-8

    def prefill_many(self, new_tokens: Floats, cached_tokens: Floats) -> Floats:
        """`prefill_s` for f64[n] token counts each: seconds, f64[n]."""
        return np.maximum(0.0, new_tokens) / 20_000

    def itl_of_batches(self, batch_size: Ints, context_tokens: Floats) -> Floats:
        """`itl_s` for i64[n] batch sizes >= 1 and f64[n] contexts, but for the last digits."""
        seconds: Floats = batch_size * context_tokens
        seconds *= 1e-8
        seconds += 0.01
        return seconds


NOMINAL = NominalTiming()

TimingModel = TpProfile | NominalTiming
"""P(new, cached) and D(batch, context), for one point and for arrays."""


class FrozenEstimator(msgspec.Struct, frozen=True, gc=False):
    """A pool's speed as known at one moment. It never changes, so decisions can be made again."""

    profile: TpProfile | None = None
    profile_source: str = "none"
    coefficients: Coefficients = UNCORRECTED  # in force: without those that are not trusted
    ttft_basis: Basis = "learnt"
    itl_basis: Basis = "learnt"
    learnt: Coefficients = UNCORRECTED  # whether in force or not; decides nothing
    # How predictions, which do not have them in them, are held against targets; None: as they are.
    ttft_calibration: Calibration | None = None
    itl_calibration: Calibration | None = None
    _speed: TimingModel = NOMINAL  # always the profile's, whatever is given

    def __post_init__(self) -> None:
        """Raises `ValueError` naming a coefficient that is negative or no number."""
        of = self.coefficients
        # A negative, infinite or NaN coefficient fails one of these comparisons.
        if not (
            of.prefill_scale >= 0.0
            and of.prefill_offset_s >= 0.0
            and of.itl_scale >= 0.0
            and of.prefill_scale + of.prefill_offset_s + of.itl_scale < math.inf
        ):
            for name, value in structs.asdict(of).items():
                if not 0.0 <= value < math.inf:
                    raise ValueError(f"{name} must be finite and >= 0, got {value}")
        structs.force_setattr(self, "_speed", _speed(self.profile))

    @property
    def source(self) -> str:
        """What predictions come from, for people: a profile, "learned", or "none" if nominal."""
        if self.profile is None:
            return "learned" if self.predicts else "none"
        return self.profile_source

    @property
    def predicts_prefill(self) -> bool:
        """Whether prefill times are real seconds; else they only rank workers of the pool."""
        return self.profile is not None or self.coefficients.prefill != UNCORRECTED.prefill

    @property
    def predicts_itl(self) -> bool:
        """Whether inter-token times are real seconds; else they only rank workers of the pool."""
        return self.profile is not None or self.coefficients.itl_scale != UNCORRECTED.itl_scale

    @property
    def predicts(self) -> bool:
        """Whether prefill or inter-token times are real seconds."""
        return self.predicts_prefill or self.predicts_itl

    def work_s(self, new_tokens: float, cached_tokens: float) -> float:
        """The work that a prefill adds to its worker's queue, in uncorrected seconds."""
        return self._speed.prefill_s(new_tokens, cached_tokens)

    def work_many(self, new_tokens: Floats, cached_tokens: Floats) -> Floats:
        """`work_s` for f64[n] token counts each: seconds, f64[n]."""
        return self._speed.prefill_many(new_tokens, cached_tokens)

    def ttft_s(self, work_s: _WorkT) -> _WorkT:
        """Seconds from a leg's start to its first response, for work in the queue and its own."""
        scale, offset_s = self.coefficients.prefill
        return work_s * scale + offset_s

    def prefill_s(self, new_tokens: float, cached_tokens: float) -> float:
        """Seconds from a leg's start to its first response on an idle worker."""
        return self.ttft_s(self.work_s(new_tokens, cached_tokens))

    def itl_s(self, batch_size: float, context_tokens: float) -> float:
        """Seconds of one decode step at this batch size and mean context."""
        return self.coefficients.itl_scale * self._speed.itl_s(batch_size, context_tokens)

    def ttft_many(self, work_s: Floats) -> Floats:
        """`ttft_s` for f64[n] of work; `work_s` itself is overwritten and returned."""
        work_s *= self.coefficients.prefill_scale
        work_s += self.coefficients.prefill_offset_s
        return work_s

    def itl_of_batches(self, batch_size: Ints, context_tokens: Floats) -> Floats:
        """`itl_s` for i64[n] batch sizes >= 1 and f64[n] contexts, but for the last digits."""
        seconds = self._speed.itl_of_batches(batch_size, context_tokens)
        seconds *= self.coefficients.itl_scale
        return seconds

    def work_of(self, seconds: _WorkT) -> _WorkT:
        """The work that takes so many seconds, at the pace of the pool: the inverse of its scale."""
        return seconds / max(MIN_SCALE, self.coefficients.prefill_scale)

    def transfer_s(self, tokens: int) -> float:
        """Nominal seconds for a decode worker to pull the KV of a prompt of `tokens`."""
        return tokens * self._speed.kv_bytes_per_token / LINK_BYTES_PER_S

    def host_s(self, tokens: float) -> float:
        """Nominal seconds of a prefill to copy the KV of `tokens` from host to device."""
        return max(0.0, tokens) * self._speed.kv_bytes_per_token / HOST_LINK_BYTES_PER_S

    def with_itl_of(self, other: "FrozenEstimator") -> "FrozenEstimator":
        """This one, with inter-token seconds as `other`, of the same profile, predicts them."""
        mine, learnt = self.coefficients, self.learnt
        return FrozenEstimator(
            self.profile,
            self.profile_source,
            Coefficients(*mine.prefill, other.coefficients.itl_scale),
            self.ttft_basis,
            other.itl_basis,
            Coefficients(*learnt.prefill, other.learnt.itl_scale),
            self.ttft_calibration,
            other.itl_calibration,
        )

    def table_json(self) -> dict[str, object]:
        """What `from_json` takes beside `coefficients`: "source", from `profile_source`, and "profile"."""
        profile = None if self.profile is None else self.profile.to_json()
        return {"source": self.profile_source, "profile": profile}

    @classmethod
    def from_json(
        cls, table: Mapping[str, object], coefficients: Coefficients
    ) -> "FrozenEstimator":
        """The estimator with this `table_json` and `coefficients`; it predicts exactly the same.

        Raises `ValueError` naming the field that is wrong.
        """
        source, profile = table.get("source"), table.get("profile")
        if not isinstance(source, str):
            raise ValueError(f"source must be text, got {source!r}")
        if profile is not None and not isinstance(profile, Mapping):
            raise ValueError(f"profile must be a table or null, got {profile!r}")
        read = None if profile is None else tp_profile_from_json(profile)
        return cls(read, source, coefficients)


class Estimator:
    """Learns a pool's speed. An observation replaces `frozen`; copies that were taken stay as they are."""

    def __init__(self, profile: TpProfile | None = None, *, source: str = "none") -> None:
        self._speed = _speed(profile)
        self._prefill = _fit(profile)
        self._itl = _fit(profile, max_offset_s=0.0)
        self.profile = profile
        self.ttft = Accuracy(has_profile=profile is not None)
        self.itl = Accuracy(has_profile=profile is not None)
        # The estimator as it stands; the same object until an observation changes the numbers.
        self.frozen = FrozenEstimator(profile, source)

    def starts_as(self, other: "Estimator") -> bool:
        """Whether both were made with the same profile and source; they may have learnt since."""
        return self.frozen.table_json() == other.frozen.table_json()

    def observe_first_response(
        self, work_s: float, seconds: float, *, queued_s: float = 0.0
    ) -> None:
        """Learn that a leg's first response took `seconds`, for `work_s` and `queued_s` before it.

        Times that are negative, not finite or above `fit.MAX_S` are ignored, also by `observe_itl`.
        """
        total_s = work_s + queued_s
        # The prompt is known, the queue a guess: part of it may be done, and others may send too.
        weight = work_s / total_s if total_s > 0 else 1.0
        if self._prefill.observe(total_s, seconds, weight=weight):
            self._freeze_again()

    def profiled_itl_s(self, batch_size: float, context_tokens: float) -> float:
        """Seconds of one decode step at this batch size and mean context, before any correction."""
        return self._speed.itl_s(batch_size, context_tokens)

    def observe_itl(self, batch_size: float, context_tokens: float, seconds: float) -> None:
        """Learn that a decode step at this batch size and mean context took `seconds`."""
        if self._itl.observe(self._speed.itl_s(batch_size, context_tokens), seconds):
            self._freeze_again()

    def pair_ttft(
        self, before: FrozenEstimator, predicted_s: float, later_s: float, actual_s: float
    ) -> None:
        """Pair a prediction of `before` with what became of it: seconds from the choice to the first token.

        `later_s` was predicted besides, from the leg's first response on.
        """
        used, learnt = before.coefficients, before.learnt
        work_s = (predicted_s - used.prefill_offset_s) / used.prefill_scale
        learnt_s = learnt.prefill_offset_s + learnt.prefill_scale * work_s
        made, others = predicted_s + later_s, (learnt_s + later_s, work_s + later_s)
        now = self._prefill.scale, self._prefill.offset_s
        if self.ttft.add_pair(actual_s, made, *others, later_s=later_s, now=now):
            self._freeze_again()

    def pair_itl(self, before: FrozenEstimator, predicted_s: float, actual_s: float) -> None:
        """Pair a prediction of `before` with what became of it: seconds from token to token."""
        profile_s = predicted_s / before.coefficients.itl_scale
        learnt_s = profile_s * before.learnt.itl_scale
        if self.itl.add_pair(
            actual_s, predicted_s, learnt_s, profile_s, now=(self._itl.scale, 0.0)
        ):
            self._freeze_again()

    def _freeze_again(self) -> None:
        """Bring `frozen` in line with what was learnt, and with what predictions are based on."""
        learnt = Coefficients(self._prefill.scale, self._prefill.offset_s, self._itl.scale)
        before, ttft, itl = self.frozen, self.ttft.basis, self.itl.basis
        calibrations = self.ttft.calibration, self.itl.calibration
        if (learnt, ttft, itl, *calibrations) == (
            before.learnt,
            before.ttft_basis,
            before.itl_basis,
            before.ttft_calibration,
            before.itl_calibration,
        ):
            return
        in_force = learnt
        if ttft == "profile":
            in_force = Coefficients(*UNCORRECTED.prefill, in_force.itl_scale)
        if itl == "profile":
            in_force = Coefficients(*in_force.prefill, UNCORRECTED.itl_scale)
        self.frozen = FrozenEstimator(
            before.profile, before.profile_source, in_force, ttft, itl, learnt, *calibrations
        )

    @property
    def n_observed(self) -> int:
        """How many observations of TTFT and ITL were not ignored."""
        return self._prefill.n_observed + self._itl.n_observed


def _fit(profile: TpProfile | None, *, max_offset_s: float = MAX_OFFSET_S) -> Fit:
    min_observed = MIN_OBSERVED_NOMINAL if profile is None else MIN_OBSERVED
    return Fit(min_observed=min_observed, max_offset_s=max_offset_s)


def _speed(profile: TpProfile | None) -> TimingModel:
    return NOMINAL if profile is None else profile
