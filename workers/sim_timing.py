"""How long the simulated engine takes: iteration and transfer seconds from a measured profile."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slagate.workers.profile import TpProfile


class PrefillChunk(NamedTuple):
    """Prompt tokens of one request computed in one iteration, after those already in its KV cache."""

    new_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """Seconds of each thing the engine does.

    `time_scale` multiplies every duration: 0.1 makes the engine ten times as fast, 0 instant.
    Raises `ValueError` naming the field when a number makes no sense.
    """

    profile: TpProfile
    time_scale: float = 1.0
    # One 400 Gb/s NIC per worker.
    transfer_bytes_per_s: float = 50e9

    def __post_init__(self) -> None:
        if not (math.isfinite(self.time_scale) and self.time_scale >= 0):
            raise ValueError(f"time_scale must be finite and >= 0, got {self.time_scale}")
        if not self.transfer_bytes_per_s > 0:
            raise ValueError(f"transfer_bytes_per_s must be > 0, got {self.transfer_bytes_per_s}")

    def iteration_s(
        self, chunks: Sequence[PrefillChunk], *, batch_size: int, context_tokens: float
    ) -> float:
        """Seconds of one iteration: its prefill chunks, then `batch_size` decoding requests.

        Chunks run as one batch. Their cached lengths are averaged by new tokens, because attention
        over the cache costs new x cached.
        """
        new_tokens = sum(chunk.new_tokens for chunk in chunks)
        seconds = 0.0
        if new_tokens:
            reads = sum(chunk.new_tokens * chunk.cached_tokens for chunk in chunks)
            seconds += self.profile.prefill_s(new_tokens, reads / new_tokens)
        if batch_size:
            seconds += self.profile.itl_s(batch_size, context_tokens)
        return seconds * self.time_scale

    def transfer_s(self, tokens: int) -> float:
        """Seconds to pull the KV cache of `tokens` tokens from another worker, at its true size."""
        n_bytes = tokens * self.profile.kv_bytes_per_token
        return n_bytes / self.transfer_bytes_per_s * self.time_scale
