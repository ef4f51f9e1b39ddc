"""The times of a pool's workers by its profile, idle and under load, as the linter compares them.

An idle worker has one request only. Loads are shares of a worker's time, or of its batch, for the pool's
own number of workers and limit of requests. The file does not say which load it was planned for, so pools
are compared at all of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from operator import le
from typing import NamedTuple, cast

from slagate.pools.fleet_file.models import PoolSpec
from slagate.pools.grid_build.curve import (
    Curve,
    Load,
    mixed_curves,
    planned_batch,
    profile_decode,
    profile_prefill,
    queued_prefill,
)
from slagate.workers.profiles.profile import TpProfile

LOADS = (*(step / 20 for step in range(1, 20)), 0.99)
"""The loads that pools are compared at."""

_HAIR = 0.0025
"""The share of a time by which the faster pool must be ahead under load, as times bend between `LOADS`."""

BUSY = 0.8
"""A pool that meets all of a cell at this load is enough for it."""

_N_BUSY = LOADS.index(BUSY) + 1


class Deployment(NamedTuple):
    """What a plan assumes: the workers of a pool, and how many requests each runs at once."""

    replicas: int
    batch: int


def measured_tokens(profile: TpProfile, stage: str) -> int:
    """The longest prompt or context, for agg of both, that the profile has rows for."""
    rows = cast("dict[str, list[list[int]]]", profile.to_json())
    cold = (new_tokens for new_tokens, cached, _ in rows["prefill"] if not cached)
    prefill = max(cold, default=0)
    decode = max(context_tokens for _, context_tokens, _ in rows["decode"])
    return {"prefill": prefill, "decode": decode}.get(stage, min(prefill, decode))


def plan_of(pool: PoolSpec | None) -> Deployment:
    """The plan for a pool with this entry in the fleet file; None: it has no entry."""
    if pool is None:
        pool = PoolSpec()
    return Deployment(pool.planned_workers, planned_batch(pool.batch, pool.max_inflight))


class Times(NamedTuple):
    """The times of a worker, in milliseconds.

    `idle` is without other requests, with nothing of the prompt cached: a target below it is always missed.
    `loaded` are the times at each of `LOADS`, among prompts of the same size. `busy` is the largest of
    those up to `BUSY`, and among prompts as long as the axis goes: a target above it counts as met.
    """

    idle: float
    loaded: tuple[float, ...]
    busy: float

    def at_most(self, other: "Times") -> bool:
        """Whether none of its times is above that of `other`."""
        mine, others = (self.idle, *self.loaded, self.busy), (other.idle, *other.loaded, other.busy)
        return all(map(le, mine, others))

    def less(self, other: "Times") -> bool:
        """Whether it is faster than `other`, when idle and under every load."""
        nearly = Times(other.idle, tuple(ms * (1 - _HAIR) for ms in other.loaded), other.busy)
        return self.idle < other.idle and self.at_most(nearly)


class PoolCurves:
    """The TTFT and ITL of one pool's workers at each load, by its profile."""

    def __init__(
        self, profile: TpProfile, plan: Deployment, fields: Sequence[str], *, longest_tokens: float
    ) -> None:
        self._profile = profile
        idle = profile_prefill(profile)
        idle = replace(idle, raw_ms=cache(idle.raw_ms))
        loads = [Load(share, replicas=plan.replicas, batch=plan.batch) for share in LOADS]
        # The last one is busy, among prompts that are as long as the axis goes.
        loads.append(replace(loads[_N_BUSY - 1], isl_tokens=int(longest_tokens)))
        self._curves: dict[str, list[Curve]] = {field: [] for field in fields}
        for load in loads:
            curves: tuple[Curve, ...]
            if len(fields) > 1:
                curves = mixed_curves(profile, load)
            elif fields[0] == "ttft_ms":
                curves = (queued_prefill(idle, load),)
            else:
                curves = (profile_decode(profile, load),)
            for field, curve in zip(fields, curves, strict=True):
                self._curves[field].append(curve)
        self._times: dict[tuple[float, str], Times] = {}

    def times(self, size_tokens: float, field: str) -> Times:
        """A worker's times for this prompt or context; `field` is "ttft_ms" or "itl_ms"."""
        key = size_tokens, field
        if key not in self._times:
            self._times[key] = self._computed(size_tokens, field)
        return self._times[key]

    def knots(self, field: str) -> tuple[float, ...]:
        """Sizes in tokens, in any order, between which the time of busy workers is monotone."""
        return self._curves[field][-1].knots

    def _computed(self, size_tokens: float, field: str) -> Times:
        if field == "ttft_ms":
            idle_s = self._profile.prefill_s(size_tokens, 0)
        else:
            idle_s = self._profile.itl_s(1, size_tokens)
        *loaded, longest = (curve.ms(size_tokens) for curve in self._curves[field])
        return Times(idle_s * 1000, tuple(loaded), max((*loaded[:_N_BUSY], longest)))
