"""Predicts prefill seconds and inter-token seconds of a pool's workers."""

from typing import Protocol

from slagate.workers.profile import TpProfile


class Estimator(Protocol):
    """What the policy asks of a pool's speed."""

    @property
    def source(self) -> str:
        """Where the numbers come from, for people; "none" when there is nothing behind them."""

    @property
    def predicts(self) -> bool:
        """False: the numbers rank workers of the pool but mean nothing as seconds."""

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Seconds to prefill `new_tokens` behind `cached_tokens` on an idle worker."""

    def itl_s(self, batch_size: int, context_tokens: float) -> float:
        """Seconds of one decode step at this batch size and mean context."""


class ProfileEstimator:
    """Reads a timing profile: see `slagate.workers.profile`."""

    predicts = True

    def __init__(self, profile: TpProfile, *, source: str) -> None:
        self.source = source
        self._profile = profile

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        """As `Estimator.prefill_s`."""
        return self._profile.prefill_s(new_tokens, cached_tokens)

    def itl_s(self, batch_size: int, context_tokens: float) -> float:
        """As `Estimator.itl_s`."""
        return self._profile.itl_s(batch_size, context_tokens)


class NominalEstimator:
    """Stands in where a pool has no profile: workers of one pool are alike, so order is all it needs."""

    source = "none"
    predicts = False

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        """In proportion to the new tokens; 20,000 tokens/s is of the right order, no more."""
        return new_tokens / 20_000

    def itl_s(self, batch_size: int, context_tokens: float) -> float:
        """A constant step plus a share for each token of context that it reads."""
        return 0.01 + batch_size * context_tokens * 1e-8
