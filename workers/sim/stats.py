"""Iteration statistics of the simulated engine, in TensorRT-LLM's dict shape."""

from collections import deque
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from slagate.workers.sim.kv_cache.events import Arrivals
from slagate.workers.sim.rank import NONE_QUEUED, Queued, RankStep, SimRank
from slagate.workers.sim.sequence import EngineLimits

_EPOCH = datetime(1970, 1, 1)
_TIMESTAMP = "%m-%d-%Y %H:%M:%S.%f"


class IterationRecord(NamedTuple):
    """One rank's part of an engine iteration: the cheap form, kept until somebody asks for the dict.

    Its time, `n_new` and `n_active` are as of its start, everything else as of its end. Queued sequences
    wait for no rank yet: they are in the record of rank 0, and none in the others.
    """

    started_s: float
    iteration: int
    latency_s: float
    rank: int
    n_new: int
    n_active: int
    n_completed: int
    n_context: int
    context_tokens: int
    context_kv_tokens: int
    n_generation: int
    generation_kv_tokens: int
    queued: Queued
    used_blocks: int
    allocated_blocks: int
    new_blocks: int
    reused_blocks: int
    missed_blocks: int


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

    The counts are those of TensorRT-LLM's `PyExecutor`: prefill's KV tokens are in front of the chunk,
    decode's are prompt and output with the newest token, and `n_completed` counts since the last record.
    """
    chunks, decoding, cache = step.chunks, step.decoding, rank.cache
    return IterationRecord(
        started_s=started_s,
        iteration=number,
        latency_s=ended_s - started_s,
        rank=rank.index,
        n_new=step.n_new,
        n_active=step.n_active,
        n_completed=rank.take_completed(),
        n_context=len(chunks),
        context_tokens=sum([chunk.new_tokens for chunk in chunks]),
        context_kv_tokens=step.context_kv_tokens,
        n_generation=len(decoding),
        generation_kv_tokens=sum([one.n_prompt + len(one.generated) for one in decoding]),
        queued=NONE_QUEUED if rank.index > 0 else queued,
        used_blocks=cache.used_blocks,
        allocated_blocks=cache.n_allocated_blocks,
        new_blocks=cache.n_new_blocks,
        reused_blocks=cache.n_reused_blocks,
        missed_blocks=cache.n_missed_blocks,
    )


class StatsQueue:
    """Records not read yet. The oldest are dropped beyond `max_records`; 0 is off, nothing is kept.

    `total_blocks` are of one rank; `newest` adds the keys of TensorRT-LLM 1.3 to the dicts.
    """

    def __init__(
        self, limits: EngineLimits, *, total_blocks: int, newest: bool, max_records: int
    ) -> None:
        self._limits = limits
        self._total_blocks = total_blocks
        self._newest = newest
        self._max_records = max_records
        self._records: deque[IterationRecord] = deque(maxlen=max_records)
        self.arrivals = Arrivals()

    def put(self, record: IterationRecord) -> None:
        """Add one rank's part of an iteration."""
        if self._max_records:
            self._records.append(record)
            self.arrivals.announce()

    def take_row(self) -> dict[str, Any] | None:
        """The oldest record as `LLM.get_stats` gives it (keys of `executor::IterationStats`), or None."""
        try:
            record, limits = self._records.popleft(), self._limits
        except IndexError:
            return None
        batching = _batching_stats(record)
        row = {
            "timestamp": (_EPOCH + timedelta(seconds=record.started_s)).strftime(_TIMESTAMP),
            "iter": record.iteration,
            "iterLatencyMS": record.latency_s * 1000,
            "newActiveRequestsQueueLatencyMS": 0.0,
            "numNewActiveRequests": record.n_new,
            "numActiveRequests": record.n_active,
            "numQueuedRequests": record.queued.n_prefills + record.queued.n_pulls,
            "numCompletedRequests": record.n_completed,
            "maxNumActiveRequests": limits.max_batch_size,
            "maxBatchSizeStatic": limits.max_batch_size,
            "maxBatchSizeRuntime": limits.max_batch_size,
            "maxNumTokensStatic": limits.max_num_tokens,
            "maxNumTokensRuntime": limits.max_num_tokens,
            "gpuMemUsage": 0,
            "cpuMemUsage": 0,
            "pinnedMemUsage": 0,
            "kvCacheStats": self._kv_cache_stats(record),
            "crossKvCacheStats": None,
            "staticBatchingStats": None,
            "inflightBatchingStats": batching,
        }
        if self._newest:
            row["attentionDpRank"] = record.rank
            batching.update(_kv_token_stats(record))
        return row

    def _kv_cache_stats(self, record: IterationRecord) -> dict[str, Any]:
        looked_up = record.reused_blocks + record.missed_blocks
        return {
            "maxNumBlocks": self._total_blocks,
            "freeNumBlocks": self._total_blocks - record.used_blocks,
            "usedNumBlocks": record.used_blocks,
            "tokensPerBlock": self._limits.block_tokens,
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
        "numQueuedContextRequests": record.queued.n_prefills,
        "numQueuedCtxTokens": record.queued.prefill_tokens,
        "numQueuedGenRequests": record.queued.n_pulls,
        "numQueuedGenKvTokens": record.queued.pull_tokens,
        "numPausedKvTokens": 0,
    }
