"""Iteration statistics of the simulated engine, in TensorRT-LLM's dict shape."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slagate.workers.sim_kv_cache import SimKvCache
from slagate.workers.sim_sequence import Iteration, SimSequence

# TensorRT-LLM's default `max_stats_len`: older iterations are dropped.
MAX_STATS = 1000


class IterationRecord(NamedTuple):
    """One engine iteration, as of its end; the cheap form that is kept until somebody asks."""

    ended_s: float
    iteration: int
    latency_s: float
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
    """Engine limits that every stats dict repeats."""

    max_batch_size: int
    max_num_tokens: int
    total_blocks: int
    block_tokens: int


def iteration_record(
    iteration: Iteration,
    *,
    number: int,
    n_active: int,
    queued: Sequence[SimSequence],
    n_completed: int,
    cache: SimKvCache,
) -> IterationRecord:
    """The record of an iteration that has just ended."""
    chunks, decoding = iteration.chunks, iteration.decoding
    pull_tokens = [one.n_prompt for one in queued if one.request_type == "generation_only"]
    return IterationRecord(
        ended_s=iteration.ends_s,
        iteration=number,
        latency_s=iteration.ends_s - iteration.started_s,
        n_new=iteration.n_new,
        n_active=n_active,
        n_queued=len(queued),
        n_completed=n_completed,
        n_context=len(chunks),
        context_tokens=sum([chunk.new_tokens for chunk in chunks]),
        context_kv_tokens=sum([chunk.sequence.prefilled_tokens for chunk in chunks]),
        n_generation=len(decoding),
        generation_kv_tokens=sum([one.kv_tokens for one in decoding]),
        queued_context_tokens=sum([one.n_prompt for one in queued]) - sum(pull_tokens),
        n_queued_generation=len(pull_tokens),
        queued_generation_kv_tokens=sum(pull_tokens),
        used_blocks=cache.used_blocks,
        allocated_blocks=cache.n_allocated_blocks,
        new_blocks=cache.n_new_blocks,
        reused_blocks=cache.n_reused_blocks,
        missed_blocks=cache.n_missed_blocks,
    )


def stats_dict(record: IterationRecord, limits: StatsLimits) -> dict[str, Any]:
    """The dict `LLM.get_stats` gives for one iteration (keys of `executor::IterationStats`)."""
    looked_up = record.reused_blocks + record.missed_blocks
    return {
        "timestamp": f"{record.ended_s:.6f}",
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
        "attentionDpRank": 0,
        "kvCacheStats": {
            "maxNumBlocks": limits.total_blocks,
            "freeNumBlocks": limits.total_blocks - record.used_blocks,
            "usedNumBlocks": record.used_blocks,
            "tokensPerBlock": limits.block_tokens,
            "allocTotalBlocks": record.allocated_blocks,
            "allocNewBlocks": record.new_blocks,
            "reusedBlocks": record.reused_blocks,
            "missedBlocks": record.missed_blocks,
            "cacheHitRate": record.reused_blocks / looked_up if looked_up else 0.0,
        },
        "crossKvCacheStats": None,
        "staticBatchingStats": None,
        "inflightBatchingStats": {
            "numScheduledRequests": record.n_context + record.n_generation,
            "numContextRequests": record.n_context,
            "numGenRequests": record.n_generation,
            "numPausedRequests": 0,
            "numCtxTokens": record.context_tokens,
            "microBatchId": 0,
            "avgNumDecodedTokensPerIter": 1.0 if record.n_generation else 0.0,
            "numCtxKvTokens": record.context_kv_tokens,
            "numGenKvTokens": record.generation_kv_tokens,
            "numQueuedContextRequests": record.n_queued - record.n_queued_generation,
            "numQueuedCtxTokens": record.queued_context_tokens,
            "numQueuedGenRequests": record.n_queued_generation,
            "numQueuedGenKvTokens": record.queued_generation_kv_tokens,
            "numPausedKvTokens": 0,
        },
    }


class StatsQueue:
    """Iterations not read yet; the oldest are dropped beyond `MAX_STATS`."""

    def __init__(self, limits: StatsLimits) -> None:
        self._limits = limits
        self._records: deque[IterationRecord] = deque(maxlen=MAX_STATS)
        self._waiters: set[asyncio.Future[None]] = set()

    def put(self, record: IterationRecord) -> None:
        """Add one iteration."""
        self._records.append(record)
        for waiter in self._waiters:
            _complete(waiter)

    def take(self) -> dict[str, Any] | None:
        """The oldest iteration, or None."""
        return stats_dict(self._records.popleft(), self._limits) if self._records else None

    async def wait(self, timeout_s: float) -> None:
        """Return once an iteration is there, or after `timeout_s` seconds."""
        if self._records or timeout_s <= 0:
            return
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        timer = loop.call_later(timeout_s, _complete, waiter)
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)


class IterationResult:
    """Async iterator of stats dicts; it ends when none arrives within the timeout."""

    def __init__(self, queue: StatsQueue, *, timeout_s: float) -> None:
        self._queue = queue
        self._timeout_s = timeout_s

    def __aiter__(self) -> "IterationResult":
        return self

    async def __anext__(self) -> dict[str, Any]:
        await self._queue.wait(self._timeout_s)
        stats = self._queue.take()
        if stats is None:
            raise StopAsyncIteration
        return stats


def _complete(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
