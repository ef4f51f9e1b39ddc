"""Iteration statistics of the simulated engine, in TensorRT-LLM's dict shape.

With attention DP 1.1 and 1.2 have rows of rank 0 only, which do not name it (`_append_iter_stats`,
py_executor.py ids 736889464 and 3542389387). Since the fan-out (ids 51964186099, 65844652397) each rank has
one: rank 0's with the counts of that rank's own batch in it, and without what only rank 0 reports. Between
the two, TLLM_METRICS_ALL_RANKS=1 made rows that are each rank's own, and name it `rank` (base_worker.py
@0ae93999 `_stats_serializer`).

Before pull request #15075 (June 2026) `maxNumBlocks` has the host's blocks in it and `freeNumBlocks` has
not, so `usedNumBlocks`, their difference, has them all (kvCacheManager.h id 420415258 `getMaxNumBlocks`,
`getNumAllocatedBlocks`; kvCacheManager.cpp id 126178160 `WindowBlockManager::getNumFreeBlocks`).
`kvCacheIterationStats` came with #12413 (March 2026), those by group of pools with the V2 manager (id
56206286923); of the counts of one iteration in it only four are here.
"""

import os
from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from slagate.workers.sim.kv_cache.events import Arrivals
from slagate.workers.sim.rank import NONE_QUEUED, Queued, RankStep, SimRank
from slagate.workers.sim.request import ApiTraits
from slagate.workers.sim.sequence import EngineLimits

_EPOCH = datetime(1970, 1, 1)
_TIMESTAMP = "%m-%d-%Y %H:%M:%S.%f"


class IterationRecord(msgspec.Struct, frozen=True, gc=False):
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
    secondary_used_blocks: int


class BlockPools(NamedTuple):
    """The blocks of one rank, on the GPU and on the level below it, and the attention windows they are for.

    With `has_groups` they are of the V2 cache manager, which reports by group of pools too.
    """

    primary: int
    secondary: int
    windows: Sequence[int]
    has_groups: bool


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
        secondary_used_blocks=cache.lower_used_blocks,
    )


_NOTHING_DONE = IterationRecord(
    started_s=0.0, latency_s=0.0, queued=NONE_QUEUED,
    **dict.fromkeys({*IterationRecord.__struct_fields__} - {"started_s", "latency_s", "queued"}, 0),
)  # fmt: skip
_OWN_IN_A_COPY = (
    *("rank", "n_context", "context_tokens", "context_kv_tokens"),
    *("n_generation", "generation_kv_tokens"),
)


class StatsQueue:
    """Records not read yet. The oldest are dropped beyond `max_records`; 0 is off, nothing is kept."""

    def __init__(
        self, limits: EngineLimits, *, traits: ApiTraits, pools: BlockPools, max_records: int
    ) -> None:
        self._limits = limits
        self._traits = traits
        self._pools = pools
        self._max_records = max_records
        # Each with the record of its rank before it, of which rank 0's alone is known.
        self._records: deque[tuple[IterationRecord, IterationRecord]] = deque(maxlen=max_records)
        self._of_first = _NOTHING_DONE
        # TensorRT-LLM too reads this variable in the engine's process.
        all_ranks = os.environ.get("TLLM_METRICS_ALL_RANKS") == "1"
        self._gathers = traits.gathers_rows and all_ranks
        self.arrivals = Arrivals()
        if traits.reports_first:
            self.put(_NOTHING_DONE)

    def put(self, record: IterationRecord) -> None:
        """Add one rank's part of an iteration; rank 0's comes first."""
        if record.rank > 0 and not (self._traits.copies_rows or self._gathers):
            return
        before = record
        if record.rank == 0:
            before, self._of_first = self._of_first, record
        elif not self._gathers:
            own = {name: getattr(record, name) for name in _OWN_IN_A_COPY}
            none = {"n_new": 0, "n_completed": 0, "queued": NONE_QUEUED}
            record = replace(self._of_first, **own, **none)
        if self._max_records:
            self._records.append((record, before))
            self.arrivals.announce()

    def take_row(self) -> dict[str, Any] | None:
        """The oldest record as `LLM.get_stats` gives it (keys of `executor::IterationStats`), or None."""
        try:
            (record, before), limits = self._records.popleft(), self._limits
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
        if self._traits.counts_kv_tokens:
            batching.update(_kv_token_stats(record))
        if self._traits.copies_rows or self._gathers:
            row["rank" if self._gathers else "attentionDpRank"] = record.rank
        if self._traits.stats_by_window and (record.rank == 0 or self._gathers):
            row.update(self._stats_by_window(record, before))
        return row

    def _stats_by_window(self, record: IterationRecord, before: IterationRecord) -> dict[str, Any]:
        pools = self._pools
        figures = {
            "primaryMaxNumBlocks": pools.primary,
            "primaryFreeNumBlocks": pools.primary - record.used_blocks,
            "primaryUsedNumBlocks": record.used_blocks,
            "secondaryMaxNumBlocks": pools.secondary,
            "secondaryFreeNumBlocks": pools.secondary - record.secondary_used_blocks,
            "secondaryUsedNumBlocks": record.secondary_used_blocks,
            "iterAllocTotalBlocks": record.allocated_blocks - before.allocated_blocks,
            "iterAllocNewBlocks": record.new_blocks - before.new_blocks,
            "iterReusedBlocks": record.reused_blocks - before.reused_blocks,
            "iterMissedBlocks": record.missed_blocks - before.missed_blocks,
        }
        shown: dict[str, Any] = {
            "kvCacheIterationStats": {str(window): dict(figures) for window in pools.windows}
        }
        if pools.has_groups:
            group = {"poolGroupId": 0, "windowSizes": list(pools.windows), **figures}
            shown["kvCacheIterationStatsByPoolGroup"] = {"0": group}
        return shown

    def _kv_cache_stats(self, record: IterationRecord) -> dict[str, Any]:
        looked_up = record.reused_blocks + record.missed_blocks
        n_host = self._pools.secondary if self._traits.counts_host_blocks else 0
        return {
            "maxNumBlocks": self._pools.primary + n_host,
            "freeNumBlocks": self._pools.primary - record.used_blocks,
            "usedNumBlocks": record.used_blocks + n_host,
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
