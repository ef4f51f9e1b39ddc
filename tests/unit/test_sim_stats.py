"""The TensorRT-LLM double: one dict of stats an iteration."""

import asyncio

import pytest

from slagate.workers.sim_api import sim_api
from slagate.workers.sim_request import SamplingParams
from support.sim_llm import PROFILE, Pair, llm, n_timers, prompt_of, until
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


COUNTED_SINCE_13 = {
    "numCtxKvTokens",
    "numGenKvTokens",
    "numQueuedContextRequests",
    "numQueuedCtxTokens",
    "numQueuedGenRequests",
    "numQueuedGenKvTokens",
    "numPausedKvTokens",
}


@pytest.mark.parametrize(("api", "has_new_keys"), [("1.2", False), ("1.3rc", True), ("main", True)])
def test_the_oldest_version_has_neither_a_rank_nor_kv_token_counts(
    api: str,
    has_new_keys: bool,  # noqa: FBT001
) -> None:
    async def scenario() -> None:
        engine = llm(api=api)
        await engine.generate_async(prompt_of(64), sim_api(api).SamplingParams(max_tokens=1))
        (row,) = [row async for row in engine.get_stats_async(timeout=0)]
        assert ("attentionDpRank" in row) == has_new_keys
        batch = row["inflightBatchingStats"]
        assert COUNTED_SINCE_13 & batch.keys() == (COUNTED_SINCE_13 if has_new_keys else set())
        assert batch["numCtxTokens"] == 64

    run(scenario)


def test_what_waits_is_counted_by_what_it_waits_for(pair: Pair) -> None:
    async def scenario() -> None:
        params = await pair.hand_off(prompt_of(70))
        engine = llm(transport=pair.transports[1], max_batch_size=1)
        first = engine.generate_async(prompt_of(40), SamplingParams(max_tokens=2), streaming=True)
        second = engine.generate_async(prompt_of(90, 2), SamplingParams(max_tokens=1))
        third = engine.generate_async(
            prompt_of(70), SamplingParams(max_tokens=1), disaggregated_params=params
        )
        await anext(first)
        (row,) = [row async for row in engine.get_stats_async(timeout=0)]
        batch = row["inflightBatchingStats"]
        assert (row["numActiveRequests"], row["numQueuedRequests"]) == (1, 2)
        assert (batch["numQueuedContextRequests"], batch["numQueuedCtxTokens"]) == (1, 90)
        assert (batch["numQueuedGenRequests"], batch["numQueuedGenKvTokens"]) == (1, 70)
        for result in (first, second, third):
            await result
        await pair.blocks_come_back()

    run(scenario)


def test_the_newest_row_may_be_old_and_says_when_it_was() -> None:
    async def scenario() -> None:
        engine = llm()
        await engine.generate_async(prompt_of(64), SamplingParams(max_tokens=1))
        await until(1000.0)
        (row,) = [row async for row in engine.get_stats_async(timeout=0)]
        assert float(row["timestamp"]) == pytest.approx(PROFILE.prefill_s(64, 0), abs=1e-6)
        assert [row async for row in engine.get_stats_async(timeout=0)] == []

    run(scenario)
