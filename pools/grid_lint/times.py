"""What the workers of a pool take by its profile, idle and under every load, as the linter compares it.

Idle is one request and nothing else. Loads are shares of a worker's time, or of its batch, as a plan has
them: of the pool's own number of workers and limit of requests. Which one the file was planned for it does
not say, so pools are compared at all of them.
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
"""Of a time: how far ahead a pool must be under load to be the faster one; times bend between `LOADS`."""

BUSY = 0.8
"""The load at which a pool that meets all of a cell is enough for it."""

_N_BUSY = LOADS.index(BUSY) + 1


class Deployment(NamedTuple):
    """What plans count with: the workers of a pool, and how many requests each runs at once."""

    replicas: int
    batch: int


def measured_tokens(profile: TpProfile, stage: str) -> int:
    """The longest prompt that the profile has rows for."""
    rows = cast("dict[str, list[list[int]]]", profile.to_json())
    cold = (new_tokens for new_tokens, cached, _ in rows["prefill"] if not cached)
    prefill = max(cold, default=0)
    decode = max(context_tokens for _, context_tokens, _ in rows["decode"])
    return {"prefill": prefill, "decode": decode}.get(stage, min(prefill, decode))


def plan_of(pool: PoolSpec | None) -> Deployment:
    """The plan for a pool with this entry in the fleet file, if it has one."""
    if pool is None:
        pool = PoolSpec()
    return Deployment(pool.planned_workers, planned_batch(pool.batch, pool.max_inflight))


class Times(NamedTuple):
    """What a worker takes, in milliseconds.

    `idle`: with nothing else to do, and nothing of the prompt cached. What misses so misses always.
    `loaded`: at each of `LOADS`, among prompts of the same size.
    `busy`: the most of those up to `BUSY`, and of a worker among prompts that are as long as the axis goes.
    What meets so is enough.
    """

    idle: float
    loaded: tuple[float, ...]
    busy: float

    def at_most(self, other: "Times") -> bool:
        """Whether it is no slower than `other` under any load."""
        mine, others = (self.idle, *self.loaded, self.busy), (other.idle, *other.loaded, other.busy)
        return all(map(le, mine, others))

    def less(self, other: "Times") -> bool:
        """Whether it is faster than `other`, when idle and under every load."""
        nearly = Times(other.idle, tuple(ms * (1 - _HAIR) for ms in other.loaded), other.busy)
        return self.idle < other.idle and self.at_most(nearly)


class PoolCurves:
    """The curves of one pool for the latencies of its grid, each looked up once for each size."""

    def __init__(
        self, profile: TpProfile, plan: Deployment, fields: Sequence[str], *, longest_tokens: float
    ) -> None:
        self._profile = profile
        idle = profile_prefill(profile)
        idle = replace(idle, raw_ms=cache(idle.raw_ms))
        loads = [Load(share, replicas=plan.replicas, batch=plan.batch) for share in LOADS]
        # Behind them the busy one, among prompts that are as long as the axis goes.
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
        """What its workers take for a prompt or context of this size."""
        key = size_tokens, field
        if key not in self._times:
            self._times[key] = self._computed(size_tokens, field)
        return self._times[key]

    def turns(self, field: str) -> tuple[float, ...]:
        """The sizes between which what busy workers take is at its most at one of them."""
        return self._curves[field][-1].knots

    def _computed(self, size_tokens: float, field: str) -> Times:
        if field == "ttft_ms":
            idle_s = self._profile.prefill_s(size_tokens, 0)
        else:
            idle_s = self._profile.itl_s(1, size_tokens)
        *loaded, longest = (curve.ms(size_tokens) for curve in self._curves[field])
        return Times(idle_s * 1000, tuple(loaded), max((*loaded[:_N_BUSY], longest)))
