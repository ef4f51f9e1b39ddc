"""The TensorRT-LLM double: one dict of stats an iteration."""

import asyncio

import pytest

from slagate.workers.sim_request import SamplingParams
from support.sim_llm import PROFILE, llm, n_timers, prompt_of
from support.virtual_loop import run


def test_stats_are_empty_before_the_first_request_and_then_one_dict_an_iteration() -> None:
    async def scenario() -> None:
        engine = llm(kv_cache_blocks=100)
        assert [row async for row in engine.get_stats_async(timeout=5)] == []
        assert asyncio.get_running_loop().time() == 0
        first = engine.generate_async(prompt_of(64), SamplingParams(max_tokens=3), streaming=True)
        await anext(first)
        (row,) = [row async for row in engine.get_stats_async(timeout=0)]
        assert (row["iter"], row["numActiveRequests"], row["numQueuedRequests"]) == (1, 1, 0)
        assert row["iterLatencyMS"] == pytest.approx(PROFILE.prefill_s(64, 0) * 1000)
        assert row["kvCacheStats"]["usedNumBlocks"] == 2
        assert row["kvCacheStats"]["freeNumBlocks"] == 98
        batch = row["inflightBatchingStats"]
        assert (batch["numContextRequests"], batch["numCtxTokens"]) == (1, 64)
        await first
        rows = [row async for row in engine.get_stats_async(timeout=0.01)]
        assert [row["iter"] for row in rows] == [2, 3]
        assert rows[-1]["numActiveRequests"] == rows[-1]["kvCacheStats"]["usedNumBlocks"] == 0
        assert rows[-1]["numCompletedRequests"] == 1

    run(scenario)


def test_a_stats_reader_waits_for_the_next_iteration() -> None:
    async def scenario() -> None:
        engine = llm()
        result = engine.generate_async(prompt_of(64), SamplingParams(max_tokens=1))
        row = await anext(engine.get_stats_async(timeout=2))
        assert row["iter"] == 1
        await result
        assert n_timers() == 0

    run(scenario)
