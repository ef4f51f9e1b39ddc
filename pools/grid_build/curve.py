"""Latency curves of a pool, milliseconds over tokens, and what load adds to them.

A curve is a function and its knots, between which it is monotone. Curves of a timing profile include the
stated utilisation; docs/build.md has the formulas with an example.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from slagate.workers.profiles.profile import TpProfile

DEFAULT_BATCH = 256
"""Requests that a worker runs at once by default, as `slagate worker` does."""

CHUNK_TOKENS = 8192
"""Prompt tokens in one iteration of an aggregated worker: TensorRT-LLM's default `max_num_tokens`."""

Function = Callable[[float], float]


def planned_batch(*limits: int | None) -> int:
    """Requests that a plan has a worker run at once: the least limit, else `DEFAULT_BATCH`."""
    return min((limit for limit in limits if limit is not None), default=DEFAULT_BATCH)


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds at a number of tokens; not finite or not above 0 where nothing is known.

    Beyond `measured_tokens` it is extrapolated. `knots` are numbers of tokens, in any order.
    """

    raw_ms: Function
    measured_tokens: float
    knots: tuple[float, ...] = ()

    def ms(self, tokens: float) -> float:
        """Milliseconds; infinity where the curve has none, so that no target is ever met there."""
        value = self.raw_ms(tokens)
        return value if 0.0 < value < math.inf else math.inf


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a pool's workers by other requests.

    `utilisation` is the share of prefill time, or of the decode batch, that is taken. Other prompts have
    `isl_tokens` (None: as many as this one), and `variability` is the squared coefficient of variation of
    the time that they take. Answers have `osl_tokens`.
    """

    utilisation: float
    replicas: int
    batch: int
    isl_tokens: int | None = None
    osl_tokens: int = 256
    variability: float = 0.0

    def wait(self, busy: float) -> float:
        """Mean queueing time at utilisation `busy` of the replicas, in units of one prompt's time.

        Sakasegawa's approximation for M/G/c (Ann. Inst. Stat. Math. 29, 1977), which has Poisson arrivals:
        `(1 + variability) / 2 * busy^(sqrt(2 (c + 1)) - 1) / (c (1 - busy))`. For one replica that is the
        Pollaczek-Khinchine formula, and M/D/1 with a variability of 0.
        """
        if busy <= 0.0:
            return 0.0
        power = math.sqrt(2.0 * (self.replicas + 1)) - 1.0
        return (
            (1.0 + self.variability) / 2.0 * math.pow(busy, power) / (self.replicas * (1.0 - busy))
        )


def linear_curve(points: Sequence[Sequence[float]]) -> Curve:
    """Straight lines through (tokens, ms), extended beyond the first and the last.

    `points` are two or more, in order of their tokens, none of which repeats.
    """
    xs = [float(point[0]) for point in points]
    ys = [float(point[1]) for point in points]

    def at(tokens: float) -> float:
        left = min(max(bisect_right(xs, tokens) - 1, 0), len(xs) - 2)
        slope = (ys[left + 1] - ys[left]) / (xs[left + 1] - xs[left])
        return ys[left] + slope * (tokens - xs[left])

    return Curve(at, xs[-1], tuple(xs))


def profile_prefill(profile: TpProfile) -> Curve:
    """TTFT over ISL of a single uncached prompt; infinite where the KV cache is too small."""
    capacity = profile.kv_capacity_tokens

    def at(tokens: float) -> float:
        return profile.prefill_s(tokens, 0) * 1000.0 if tokens <= capacity else math.inf

    knots = _column(profile, "prefill", 0)
    cold = max((row[0] for row in _rows(profile, "prefill") if row[1] == 0), default=0.0)
    return Curve(at, cold, (*knots, *_end(capacity)))


def queued_prefill(idle: Curve, load: Load) -> Curve:
    """TTFT over ISL of a prefill pool: the prompt's own time, and the wait for a worker."""
    wait = load.wait(load.utilisation)
    if load.isl_tokens is None:
        return replace(idle, raw_ms=lambda tokens: idle.ms(tokens) * (1.0 + wait))
    wait_ms = wait * idle.ms(load.isl_tokens)
    return replace(idle, raw_ms=lambda tokens: idle.ms(tokens) + wait_ms)


def idle_decode(profile: TpProfile) -> Curve:
    """ITL over context of a single request on an idle worker."""
    return profile_decode(profile, Load(0.0, replicas=1, batch=1))


def decode_batch(profile: TpProfile, load: Load, context_tokens: float) -> float:
    """Requests that decode together at this utilisation and context; 0 where not even one fits."""
    fits = profile.kv_capacity_tokens / max(context_tokens, 1.0)
    return 0.0 if fits < 1.0 else max(1.0, load.utilisation * min(load.batch, fits))


def _step_ms(profile: TpProfile, batch: float, context_tokens: float) -> float:
    """One step of `batch` requests, but no less than of one: measured tables are not always monotone."""
    if not batch:
        return math.inf
    return max(profile.itl_s(b, context_tokens) for b in (1.0, batch)) * 1000.0


def profile_decode(profile: TpProfile, load: Load) -> Curve:
    """ITL over context, at the batch that `decode_batch` gives for this load."""

    def at(context_tokens: float) -> float:
        return _step_ms(profile, decode_batch(profile, load, context_tokens), context_tokens)

    capacity = profile.kv_capacity_tokens
    # Below capacity / batch the engine's limit decides the batch, above it the cache. There it falls with
    # the context and passes rows of the table, until even one request exceeds the utilisation.
    room = capacity * load.utilisation
    turns = (capacity / load.batch, room, *(room / b for b in _column(profile, "decode", 0)))
    knots = _column(profile, "decode", 1)
    return Curve(at, knots[-1], (*knots, *turns, *_end(capacity)))


def mixed_curves(profile: TpProfile, load: Load) -> tuple[Curve, Curve]:
    """TTFT and ITL of an aggregated pool over ISL, each slowed by the other phase.

    The batch decodes at a mean context of the prompt and half the answer. In a steady state
    `batch / osl_tokens` prompts start for each step of it, and their prefill comes in between. This balance
    is derived here, from no publication:

        itl  = D(batch, context) + batch / osl * P(isl')
        busy = batch / osl * P(isl') / itl                       the share of time that prefills take
        ttft = P(isl) + wait(busy) * P(isl') + (1 + isl / CHUNK_TOKENS) * D(batch, context)

    with isl' the length of other prompts. A prompt waits for the step that runs when it comes, and for one
    with each of its chunks.
    """
    idle = profile_prefill(profile)

    def parts(tokens: float) -> tuple[float, float, float]:
        others = tokens if load.isl_tokens is None else float(load.isl_tokens)
        context = tokens + load.osl_tokens / 2.0
        batch = decode_batch(profile, load, context)
        step_ms = _step_ms(profile, batch, context)
        return step_ms, batch / load.osl_tokens * idle.ms(others), idle.ms(others)

    def itl(tokens: float) -> float:
        step_ms, prefill_ms, _ = parts(tokens)
        return step_ms + prefill_ms

    def ttft(tokens: float) -> float:
        step_ms, prefill_ms, others_ms = parts(tokens)
        if math.isinf(step_ms + prefill_ms):
            return math.inf
        wait_ms = load.wait(prefill_ms / (step_ms + prefill_ms)) * others_ms
        return idle.ms(tokens) + wait_ms + (1.0 + tokens / CHUNK_TOKENS) * step_ms

    half = load.osl_tokens / 2.0
    decode = profile_decode(profile, load)
    knots = (*idle.knots, *(x - half for x in decode.knots))
    measured = min(idle.measured_tokens, decode.measured_tokens - half)
    return Curve(ttft, measured, knots), Curve(itl, measured, knots)


def _rows(profile: TpProfile, table: str) -> list[list[float]]:
    return cast("list[list[float]]", profile.to_json()[table])


def _column(profile: TpProfile, table: str, column: int) -> list[float]:
    """The values of one column of the profile's table, between which it is monotone."""
    return sorted({float(row[column]) for row in _rows(profile, table)})


def _end(capacity_tokens: int) -> tuple[float, float]:
    """The last size that fits, and the first that does not."""
    return float(capacity_tokens), capacity_tokens + 1.0
