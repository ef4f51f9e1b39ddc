"""Iteration statistics of the simulated engine, in TensorRT-LLM's dict shape."""

import asyncio
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from slagate.workers.sim_rank import RankStep, SimRank
from slagate.workers.sim_sequence import SimSequence

# TensorRT-LLM's default `max_stats_len`: older iterations are dropped.
MAX_STATS = 1000


class IterationRecord(NamedTuple):
    """One rank's part of an engine iteration, as of its end; the cheap form, kept until somebody asks.

    What is queued waits for no rank yet; it is in the record of rank 0 and zero in the others.
    """

    ended_s: float
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
    queued: Collection[SimSequence],
) -> IterationRecord:
    """The record of what a rank did in an iteration that has just ended."""
    chunks, decoding, cache = step.chunks, step.decoding, rank.cache
    n_queued = context_tokens = n_pulls = pull_tokens = 0
    if queued and rank.index == 0:
        sizes = [one.n_prompt for one in queued if one.is_pull]
        n_queued, n_pulls, pull_tokens = len(queued), len(sizes), sum(sizes)
        context_tokens = sum([one.n_prompt for one in queued]) - pull_tokens
    return IterationRecord(
        ended_s=ended_s,
        iteration=number,
        latency_s=ended_s - started_s,
        rank=rank.index,
        n_new=step.n_new,
        n_active=rank.schedule.n_running,
        n_queued=n_queued,
        n_completed=rank.n_completed,
        n_context=len(chunks),
        context_tokens=sum([chunk.new_tokens for chunk in chunks]),
        context_kv_tokens=sum([chunk.sequence.prefilled_tokens for chunk in chunks]),
        n_generation=len(decoding),
        generation_kv_tokens=sum([one.kv_tokens for one in decoding]),
        queued_context_tokens=context_tokens,
        n_queued_generation=n_pulls,
        queued_generation_kv_tokens=pull_tokens,
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
    """Records not read yet; the oldest are dropped beyond `MAX_STATS`."""

    def __init__(self, limits: StatsLimits) -> None:
        self._limits = limits
        self._records: deque[IterationRecord] = deque(maxlen=MAX_STATS)
        self._waiters: set[asyncio.Future[None]] = set()

    def put(self, record: IterationRecord) -> None:
        """Add one rank's part of an iteration."""
        self._records.append(record)
        for waiter in self._waiters:
            _complete(waiter)

    def take(self) -> dict[str, Any] | None:
        """The oldest record as a dict, or None."""
        return stats_dict(self._records.popleft(), self._limits) if self._records else None

    async def wait(self, timeout_s: float) -> None:
        """Return once a record is there, or after `timeout_s` seconds."""
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
