"""How long the simulated engine takes: iteration and transfer seconds from a measured profile."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slagate.workers.profiles.profile import TpProfile


class PrefillChunk(NamedTuple):
    """Prompt tokens of one request computed in one iteration.

    The prompt begins with `reused_tokens`, found in the KV cache when the request started, then come
    `earlier_tokens`, computed in earlier iterations.
    """

    new_tokens: int
    earlier_tokens: int
    reused_tokens: int


@dataclass(frozen=True, slots=True)
class Conditions:
    """What an engine meets in operation and no profile says. By default nothing.

    An iteration that starts at `now_s`, on the loop's clock, takes `step_factor(now_s)` times its seconds.
    The first transfer from each prefill worker takes `connect_s` longer, as it does where workers have to
    connect. `answer_tokens` says of a prompt, packed as uint32, how many tokens the model's answer has: the
    last one is the end of text. Without it that comes by chance.
    """

    step_factor: Callable[[float], float] | None = None
    connect_s: float = 0.0
    answer_tokens: Callable[[bytes], int] | None = None


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """Seconds of each thing the engine does, from a profile's P(new, cached) and D(batch, context).

    P and D are read from the tables as the profile says: log-log between rows, linear along the cached
    axis. A row of P is one lone prompt, measured whole. Chunks must not change its sum (each would pay
    the fixed cost of an iteration again, and its own earlier chunks do not cost what reused tokens do),
    so the N new tokens of an iteration take the difference that they make to a run:

        P(p + N, c) - P(p, c)

    with p tokens computed earlier and c tokens reused. The chunks of a lone prompt of L tokens then add
    up to P(L - c, c) whatever their sizes. Chunks of several requests run as one batch, for which p and
    c are averaged over the chunks, by new tokens: attention over the cache costs new x cached.

    `time_scale` multiplies every duration: 0.1 makes the engine ten times as fast, 0 instant.
    Raises `ValueError` naming the field when a number makes no sense.
    """

    profile: TpProfile
    time_scale: float = 1.0
    # One 400 Gb/s NIC per worker.
    transfer_bytes_per_s: float = 50e9
    # What a PCIe 4 x16 link gives in practice.
    host_link_bytes_per_s: float = 25e9

    def __post_init__(self) -> None:
        if not (math.isfinite(self.time_scale) and self.time_scale >= 0):
            raise ValueError(f"time_scale must be finite and >= 0, got {self.time_scale}")
        for field in ("transfer_bytes_per_s", "host_link_bytes_per_s"):
            value = getattr(self, field)
            if not value > 0:
                raise ValueError(f"{field} must be > 0, got {value}")

    def iteration_s(
        self,
        chunks: Sequence[PrefillChunk],
        *,
        batch_size: int,
        context_tokens: float,
        onboarded_tokens: int = 0,
    ) -> float:
        """Seconds of one iteration of one rank.

        KV cache of `onboarded_tokens` comes back from the host, the prefill chunks run, then
        `batch_size` decoding requests of mean length `context_tokens`.
        """
        new_tokens = sum([chunk.new_tokens for chunk in chunks]) if chunks else 0
        seconds = 0.0
        if new_tokens:
            earlier = sum([chunk.new_tokens * chunk.earlier_tokens for chunk in chunks])
            reused = sum([chunk.new_tokens * chunk.reused_tokens for chunk in chunks])
            earlier_mean, reused_mean = earlier / new_tokens, reused / new_tokens
            prefill_s = self.profile.prefill_s
            until_now_s = prefill_s(earlier_mean, reused_mean)
            # A table that falls somewhere must not turn the clock back.
            seconds = max(0.0, prefill_s(earlier_mean + new_tokens, reused_mean) - until_now_s)
        if batch_size:
            seconds += self.profile.itl_s(batch_size, context_tokens)
        if onboarded_tokens:
            seconds += self.kv_bytes(onboarded_tokens) / self.host_link_bytes_per_s
        return seconds * self.time_scale

    def transfer_s(self, tokens: int) -> float:
        """Seconds to pull the KV cache of `tokens` tokens from another worker, at its true size."""
        return self.kv_bytes(tokens) / self.transfer_bytes_per_s * self.time_scale

    def kv_bytes(self, tokens: int) -> int:
        """True size of the KV cache of `tokens` tokens."""
        return tokens * self.profile.kv_bytes_per_token
