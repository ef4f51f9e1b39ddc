"""Per-request performance figures, in the shape of TensorRT-LLM's `request_perf_metrics`."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

_NEVER = timedelta(0)


@dataclass(slots=True)
class TimingMetrics:
    """When things happened, as time since the loop's zero; zero: it did not happen."""

    arrival_time: timedelta = _NEVER
    first_scheduled_time: timedelta = _NEVER
    first_token_time: timedelta = _NEVER
    last_token_time: timedelta = _NEVER
    kv_cache_transfer_start: timedelta = _NEVER
    kv_cache_transfer_end: timedelta = _NEVER
    kv_cache_size: int = 0  # bytes


@dataclass(slots=True)
class KvCacheMetrics:
    """Blocks the request took, and how many of its prompt's were found."""

    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0


@dataclass(slots=True)
class SpeculativeMetrics:
    """All zero: nothing is drafted."""

    acceptance_rate: float = 0.0
    total_accepted_draft_tokens: int = 0
    total_draft_tokens: int = 0


@dataclass(slots=True)
class RequestPerfMetrics:
    """What one sequence of a request took."""

    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    speculative_decoding: SpeculativeMetrics = field(default_factory=SpeculativeMetrics)

    def mark_token(self, now_s: float) -> None:
        """A token came out."""
        timing = self.timing_metrics
        timing.last_token_time = timedelta(seconds=now_s)
        if timing.first_token_time == _NEVER:
            timing.first_token_time = timing.last_token_time


def metrics_dict(
    perf: RequestPerfMetrics, *, n_tokens: int, finish_reason: str | None
) -> dict[str, Any]:
    """`RequestOutput.metrics_dict` of a finished request; times in seconds."""
    timing = perf.timing_metrics
    decode_s = (timing.last_token_time - timing.first_token_time).total_seconds()
    return {
        "ttft": (timing.first_token_time - timing.arrival_time).total_seconds(),
        "tpot": decode_s / (n_tokens - 1) if n_tokens > 1 else 0.0,
        "e2e": (timing.last_token_time - timing.arrival_time).total_seconds(),
        "request_queue_time": (timing.first_scheduled_time - timing.arrival_time).total_seconds(),
        "arrival_timestamp": timing.arrival_time.total_seconds(),
        "finished_reason": finish_reason,
    }
