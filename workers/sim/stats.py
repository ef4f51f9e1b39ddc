"""Iteration statistics of the simulated engine, in TensorRT-LLM's dict shape."""

from collections import deque
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from slagate.workers.sim.kv_cache.events import Arrivals
from slagate.workers.sim.rank import NONE_QUEUED, Queued, RankStep, SimRank

_EPOCH = datetime(1970, 1, 1)
_TIMESTAMP = "%m-%d-%Y %H:%M:%S.%f"


class IterationRecord(NamedTuple):
    """One rank's part of an engine iteration; the cheap form, kept until somebody asks.

    Its time, and who was new and active, are as of its start; everything else as of its end. What is
    queued waits for no rank yet; it is in the record of rank 0 and zero in the others.
    """

    started_s: float
    iteration: int
    latency_s: float
    rank: int
    n_new: int
    n_active: int
    n_queued: int
    n_completed: int
    n_context: int
    context_tokens: int
    context_kv_tokens: int
    n_generation: int
    generation_kv_tokens: int
    queued_context_tokens: int
    n_queued_generation: int
    queued_generation_kv_tokens: int
    used_blocks: int
    allocated_blocks: int
    new_blocks: int
    reused_blocks: int
    missed_blocks: int


@dataclass(frozen=True, slots=True)
class StatsLimits:
    """Limits of one rank, that every stats dict repeats; `newest` adds the keys of TensorRT-LLM 1.3."""

    max_batch_size: int
    max_num_tokens: int
    total_blocks: int
    block_tokens: int
    newest: bool = True


def iteration_record(
    rank: SimRank,
    step: RankStep,
    *,
    number: int,
    started_s: float,
    ended_s: float,
    queued: Queued,
) -> IterationRecord:
    """The record of what a rank did in an iteration that has just ended.

    What each count is of follows TensorRT-LLM's `PyExecutor`: prefill's KV tokens are those in front of the
    chunk, decode's are prompt and output, the newest token included, and who completed did so since the
    last record.
    """
    chunks, decoding, cache = step.chunks, step.decoding, rank.cache
    if rank.index > 0:
        queued = NONE_QUEUED
    return IterationRecord(
        started_s=started_s,
        iteration=number,
        latency_s=ended_s - started_s,
        rank=rank.index,
        n_new=step.n_new,
        n_active=step.n_active,
        n_queued=queued.n_prefills + queued.n_pulls,
        n_completed=rank.take_completed(),
        n_context=len(chunks),
        context_tokens=sum([chunk.new_tokens for chunk in chunks]),
        context_kv_tokens=step.context_kv_tokens,
        n_generation=len(decoding),
        generation_kv_tokens=sum([one.n_prompt + len(one.generated) for one in decoding]),
        queued_context_tokens=queued.prefill_tokens,
        n_queued_generation=queued.n_pulls,
        queued_generation_kv_tokens=queued.pull_tokens,
        used_blocks=cache.used_blocks,
        allocated_blocks=cache.n_allocated_blocks,
        new_blocks=cache.n_new_blocks,
        reused_blocks=cache.n_reused_blocks,
        missed_blocks=cache.n_missed_blocks,
    )


def stats_dict(record: IterationRecord, limits: StatsLimits) -> dict[str, Any]:
    """The dict `LLM.get_stats` gives for one iteration (keys of `executor::IterationStats`)."""
    batching = _batching_stats(record)
    stats = {
        "timestamp": (_EPOCH + timedelta(seconds=record.started_s)).strftime(_TIMESTAMP),
        "iter": record.iteration,
        "iterLatencyMS": record.latency_s * 1000,
        "newActiveRequestsQueueLatencyMS": 0.0,
        "numNewActiveRequests": record.n_new,
        "numActiveRequests": record.n_active,
        "numQueuedRequests": record.n_queued,
        "numCompletedRequests": record.n_completed,
        "maxNumActiveRequests": limits.max_batch_size,
        "maxBatchSizeStatic": limits.max_batch_size,
        "maxBatchSizeRuntime": limits.max_batch_size,
        "maxNumTokensStatic": limits.max_num_tokens,
        "maxNumTokensRuntime": limits.max_num_tokens,
        "gpuMemUsage": 0,
        "cpuMemUsage": 0,
        "pinnedMemUsage": 0,
        "kvCacheStats": _kv_cache_stats(record, limits),
        "crossKvCacheStats": None,
        "staticBatchingStats": None,
        "inflightBatchingStats": batching,
    }
    if limits.newest:
        stats["attentionDpRank"] = record.rank
        batching.update(_kv_token_stats(record))
    return stats


def _kv_cache_stats(record: IterationRecord, limits: StatsLimits) -> dict[str, Any]:
    looked_up = record.reused_blocks + record.missed_blocks
    return {
        "maxNumBlocks": limits.total_blocks,
        "freeNumBlocks": limits.total_blocks - record.used_blocks,
        "usedNumBlocks": record.used_blocks,
        "tokensPerBlock": limits.block_tokens,
        "allocTotalBlocks": record.allocated_blocks,
        "allocNewBlocks": record.new_blocks,
        "reusedBlocks": record.reused_blocks,
        "missedBlocks": record.missed_blocks,
        "cacheHitRate": record.reused_blocks / looked_up if looked_up else 0.0,
    }


def _batching_stats(record: IterationRecord) -> dict[str, Any]:
    return {
        "numScheduledRequests": record.n_context + record.n_generation,
        "numContextRequests": record.n_context,
        "numGenRequests": record.n_generation,
        "numPausedRequests": 0,
        "numCtxTokens": record.context_tokens,
        "microBatchId": 0,
        "avgNumDecodedTokensPerIter": 1.0 if record.n_generation else 0.0,
    }


def _kv_token_stats(record: IterationRecord) -> dict[str, Any]:
    return {
        "numCtxKvTokens": record.context_kv_tokens,
        "numGenKvTokens": record.generation_kv_tokens,
        "numQueuedContextRequests": record.n_queued - record.n_queued_generation,
        "numQueuedCtxTokens": record.queued_context_tokens,
        "numQueuedGenRequests": record.n_queued_generation,
        "numQueuedGenKvTokens": record.queued_generation_kv_tokens,
        "numPausedKvTokens": 0,
    }


class StatsQueue:
    """Records not read yet; the oldest are dropped beyond `max_records`."""

    def __init__(self, limits: StatsLimits, *, max_records: int) -> None:
        self._limits = limits
        self._records: deque[IterationRecord] = deque(maxlen=max_records)
        self.arrivals = Arrivals()

    def put(self, record: IterationRecord) -> None:
        """Add one rank's part of an iteration."""
        self._records.append(record)
        self.arrivals.announce()

    def take_row(self) -> dict[str, Any] | None:
        """The oldest record as a dict, or None."""
        return stats_dict(self._records.popleft(), self._limits) if self._records else None
