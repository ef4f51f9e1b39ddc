"""Iteration statistics in the dict shapes of TensorRT-LLM's versions, written by hand."""

from typing import Any

SINCE_13199 = {
    "numCtxKvTokens": 20,
    "numGenKvTokens": 300,
    "numQueuedContextRequests": 1,
    "numQueuedCtxTokens": 40,
    "numQueuedGenRequests": 1,
    "numQueuedGenKvTokens": 50,
    "numPausedKvTokens": 6,
}
"""What `inflightBatchingStats` has since that pull request."""


def early_row(**changed: Any) -> dict[str, Any]:
    """A row of 1.2: no rank, and no tokens of KV caches."""
    return {
        "timestamp": "11-28-2026 17:00:00.000000",
        "iter": 7,
        "iterLatencyMS": 12.5,
        "newActiveRequestsQueueLatencyMS": 0.4,
        "numNewActiveRequests": 1,
        "numActiveRequests": 4,
        "numQueuedRequests": 2,
        "numCompletedRequests": 1,
        "maxNumActiveRequests": 256,
        "maxBatchSizeStatic": 256,
        "maxBatchSizeTunerRecommended": 0,
        "maxBatchSizeRuntime": 256,
        "maxNumTokensStatic": 8192,
        "maxNumTokensTunerRecommended": 0,
        "maxNumTokensRuntime": 8192,
        "gpuMemUsage": 70_000_000_000,
        "cpuMemUsage": 0,
        "pinnedMemUsage": 16_777_216,
        "kvCacheStats": {
            "maxNumBlocks": 5358,
            "freeNumBlocks": 5351,
            "usedNumBlocks": 7,
            "tokensPerBlock": 32,
            "allocTotalBlocks": 30,
            "allocNewBlocks": 28,
            "reusedBlocks": 9,
            "missedBlocks": 21,
            "cacheHitRate": 0.3,
        },
        "crossKvCacheStats": None,
        "staticBatchingStats": None,
        "inflightBatchingStats": {
            "numScheduledRequests": 4,
            "numContextRequests": 1,
            "numGenRequests": 3,
            "numPausedRequests": 0,
            "numCtxTokens": 10,
            "microBatchId": 0,
            "avgNumDecodedTokensPerIter": 1.0,
        },
        "specDecodingStats": None,
        **changed,
    }


def row(**changed: Any) -> dict[str, Any]:
    """A row since pull request #13199."""
    made = early_row()
    made["inflightBatchingStats"].update(SINCE_13199)
    return {**made, **changed}


def window_row(n_max: int, n_used: int) -> dict[str, Any]:
    """One window of `kvCacheIterationStats`."""
    return {
        "primaryMaxNumBlocks": n_max,
        "primaryFreeNumBlocks": n_max - n_used,
        "primaryUsedNumBlocks": n_used,
        "secondaryMaxNumBlocks": 0,
        "secondaryFreeNumBlocks": 0,
        "secondaryUsedNumBlocks": 0,
        "iterAllocTotalBlocks": 1,
        "iterAllocNewBlocks": 1,
        "iterReusedBlocks": 0,
        "iterFullReusedBlocks": 0,
        "iterPartialReusedBlocks": 0,
        "iterMissedBlocks": 1,
        "iterCacheHitRate": 0.0,
        "iterGenAllocBlocks": 0,
        "iterOnboardBlocks": 0,
        "iterOnboardBytes": 0,
        "iterOffloadBlocks": 0,
        "iterOffloadBytes": 0,
    }


def main_row(rank: int = 0, **changed: Any) -> dict[str, Any]:
    """A row of the newest source, with two attention windows."""
    return {
        **row(),
        "attentionDpRank": rank,
        "hostStepTimeMS": 1.5,
        "prevDeviceStepTimeMS": 11.0,
        "gpuForwardTimeMS": 10.5,
        "schedulerMode": "overlap",
        "specDecodingStats": {
            "numDraftTokens": 12,
            "numAcceptedTokens": 9,
            "numRequestsWithDraftTokens": 4,
            "acceptanceLength": 3.25,
            "iterLatencyMS": 12.5,
            "draftOverhead": 0.1,
        },
        "requestStats": [{"id": 5, "stage": "GENERATION_IN_PROGRESS"}],
        "kvCacheIterationStats": {"512": window_row(900, 3), "32768": window_row(5358, 7)},
        "iterCachedTokensByLevel": [4, 0],
        "kvCacheLevelTiers": ["GPU", "HOST"],
        "iterDiskPrefetchBlocks": 0,
        **changed,
    }
