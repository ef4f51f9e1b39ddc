"""The TensorRT-LLM double: one dict of stats an iteration."""

import asyncio
from collections import Counter
from datetime import datetime
from typing import Any

import pytest

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.api import VERSIONS, sim_api
from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.request import SamplingParams, SamplingParams12
from support.engine.sim_llm import PROFILE, Pair, llm, n_timers, prompt_of, until


def test_stats_are_empty_before_the_first_request_and_then_one_dict_an_iteration() -> None:
    async def scenario() -> None:
        engine = llm(kv_cache_blocks=100)
        assert await rows_of(engine) == []
        first = engine.generate_async(prompt_of(64), SamplingParams(max_tokens=3), streaming=True)
        await anext(first)
        (row,) = await rows_of(engine)
        assert (row["iter"], row["numActiveRequests"], row["numQueuedRequests"]) == (1, 1, 0)
        assert row["iterLatencyMS"] == pytest.approx(PROFILE.prefill_s(64, 0) * 1000)
        assert row["kvCacheStats"]["usedNumBlocks"] == 2
        assert row["kvCacheStats"]["freeNumBlocks"] == 98
        batch = row["inflightBatchingStats"]
        assert (batch["numContextRequests"], batch["numCtxTokens"]) == (1, 64)
        await first
        rows = engine.get_stats(0)
        assert [row["iter"] for row in rows] == [2, 3]
        assert rows[-1]["kvCacheStats"]["usedNumBlocks"] == 0

    run(scenario)


def test_a_reader_of_a_queue_waits_for_the_next_iteration() -> None:
    async def scenario() -> None:
        engine = llm(api="1.1")
        result = engine.generate_async(prompt_of(64), SamplingParams12(max_tokens=1))
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


@pytest.mark.parametrize(
    ("api", "has_new_keys"), [("1.1", False), ("1.2", False), ("1.3rc", True), ("1.4rc", True)]
)
def test_the_oldest_version_has_neither_a_rank_nor_kv_token_counts(
    api: str,
    has_new_keys: bool,  # noqa: FBT001
) -> None:
    async def scenario() -> None:
        engine = llm(api=api)
        await engine.generate_async(prompt_of(64), sim_api(api).SamplingParams(max_tokens=1))
        (row,) = await rows_of(engine)
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
        (row,) = await rows_of(engine)
        batch = row["inflightBatchingStats"]
        assert (row["numActiveRequests"], row["numQueuedRequests"]) == (1, 2)
        assert (batch["numQueuedContextRequests"], batch["numQueuedCtxTokens"]) == (1, 90)
        assert (batch["numQueuedGenRequests"], batch["numQueuedGenKvTokens"]) == (1, 70)
        for result in (first, second, third):
            await result
        await pair.blocks_come_back()

    run(scenario)


def started_s(row: dict[str, Any]) -> float:
    """When a row's iteration started, by its own words."""
    at = datetime.strptime(row["timestamp"], "%m-%d-%Y %H:%M:%S.%f")
    return (at - datetime(1970, 1, 1)).total_seconds()


async def rows_of(engine: SimLLM) -> list[dict[str, Any]]:
    """Rows of iterations; the newest version has one more, before all of them."""
    return [row for row in engine.get_stats(0) if row["iter"]]


def test_a_rows_time_is_text_and_that_of_its_start() -> None:
    async def scenario() -> None:
        engine = llm()
        await until(86_400.5)
        await engine.generate_async(prompt_of(64), SamplingParams(max_tokens=3))
        rows = await rows_of(engine)
        assert rows[0]["timestamp"] == "01-02-1970 00:00:00.500000"
        due_s = 86_400.5
        for row in rows:
            assert started_s(row) == pytest.approx(due_s, abs=1e-6)
            due_s += row["iterLatencyMS"] / 1000
        assert due_s == pytest.approx(asyncio.get_running_loop().time())

    run(scenario)


def test_new_and_active_are_those_of_the_start_and_completed_those_of_this_iteration() -> None:
    """Not of all time: a reader adds them up."""

    async def scenario() -> None:
        engine = llm(max_batch_size=2)
        results = [
            engine.generate_async(prompt_of(40, i), SamplingParams(max_tokens=n))
            for i, n in enumerate((1, 3, 2))
        ]
        for result in results:
            await result
        rows = await rows_of(engine)
        names = ("numNewActiveRequests", "numActiveRequests", "numCompletedRequests")
        shown = [tuple(row[name] for name in (*names, "numQueuedRequests")) for row in rows]
        assert shown == [(2, 2, 1, 1), (1, 2, 0, 0), (0, 2, 2, 0)]

    run(scenario)


def test_an_abort_completes_with_the_next_iteration() -> None:
    async def scenario() -> None:
        engine = llm()
        first = engine.generate_async(prompt_of(40), SamplingParams(max_tokens=9), streaming=True)
        await anext(first)
        await rows_of(engine)
        first.abort()
        await first
        # The iteration died with its only request.
        assert await rows_of(engine) == []
        await engine.generate_async(prompt_of(40, 2), SamplingParams(max_tokens=1))
        (row,) = await rows_of(engine)
        assert (row["numNewActiveRequests"], row["numCompletedRequests"]) == (1, 2)

    run(scenario)


def test_prefills_kv_tokens_are_in_front_of_its_chunks_and_decodes_are_all_it_has() -> None:
    async def scenario() -> None:
        engine = llm(max_num_tokens=100)
        await engine.generate_async(prompt_of(65), SamplingParams(max_tokens=1))
        await rows_of(engine)
        asked = [prompt_of(64) + prompt_of(200, 2), prompt_of(30, 3)]
        results = [engine.generate_async(one, SamplingParams(max_tokens=3)) for one in asked]
        for result in results:
            await result
        names = ("numCtxTokens", "numCtxKvTokens", "numGenRequests", "numGenKvTokens")
        rows = [row["inflightBatchingStats"] for row in await rows_of(engine)]
        shown = [tuple(row[name] for name in names) for row in rows]
        assert shown == [
            # 64 of 264 tokens were found in the cache.
            (100, 64, 0, 0),
            (100, 164, 0, 0),
            (30, 0, 1, 266),
            (0, 0, 2, 267 + 32),
            (0, 0, 1, 33),
        ]

    run(scenario)


def kv_of(row: dict[str, Any]) -> dict[str, Any]:
    stats: dict[str, Any] = row["kvCacheStats"]
    return stats


def test_block_counts_are_what_the_events_and_the_results_tell() -> None:
    """Blocks that are new, reused and missed, counted twice: by the cache, and by who watches it.

    TensorRT-LLM counts a block as allocated when it comes off the free list, to be filled, copied into or
    brought back to from the host, and as new when it did not have to be evicted for that.
    """

    async def scenario() -> None:
        cache = {
            "event_buffer_max_size": 10_000,
            "host_cache_size": 6 * 32 * PROFILE.kv_bytes_per_token,
        }
        engine = llm(kv_cache_blocks=20, kv_cache_config=cache)
        (rank,) = engine._ranks
        n_prompt, n_output = 32 * 4 + 17, 70
        n_blocks = -(-(n_prompt + n_output - 1) // 32)
        sampling = SamplingParams(max_tokens=n_output, return_perf_metrics=True)
        n_reused = n_missed = n_at_first = n_shared = n_onboarded = n_lost = 0
        for i in range(12):
            # Two blocks and a part of the third are those of all, the others those of every fifth.
            prompt = prompt_of(70) + prompt_of(n_prompt - 70, 10 + i % 5)
            result = await engine.generate_async(prompt, sampling)
            perf = result.outputs[0].request_perf_metrics
            assert perf is not None
            told = perf.kv_cache_metrics
            assert told.num_reused_blocks == -(-result.cached_tokens // 32)
            n_reused += told.num_reused_blocks
            n_missed += told.num_missed_blocks
            n_at_first += told.num_total_allocated_blocks
            # A last block that was reused in part is a copy.
            n_shared += result.cached_tokens // 32
            types = Counter(
                (data["type"], (data.get("cache_level") or {}).get("new_value"))
                for data in (event["data"] for event in engine.get_kv_cache_events(0))
            )
            n_onboarded += types["updated", 0]
            n_lost += types["updated", 1]
            stats = kv_of((await rows_of(engine))[-1])
            n_allocated = (i + 1) * n_blocks - n_shared + n_onboarded
            assert stats["allocTotalBlocks"] == n_allocated
            assert stats["allocNewBlocks"] == n_allocated - n_lost
            assert (stats["reusedBlocks"], stats["missedBlocks"]) == (n_reused, n_missed)
            assert stats["cacheHitRate"] == pytest.approx(n_reused / (n_reused + n_missed))
            # The output takes its blocks later.
            n_grown = (i + 1) * (n_blocks - -(-n_prompt // 32))
            assert n_at_first == n_allocated - n_grown
        assert min(n_onboarded, n_lost, rank.cache.n_evicted_blocks) > 5
        assert 0.3 < stats["cacheHitRate"] < 1

    run(scenario)


@pytest.mark.parametrize("api", VERSIONS)
def test_w12_earlier_versions_count_the_hosts_blocks_as_if_they_were_in_use(api: str) -> None:
    """Those in use are all but the GPU's free ones; those by window, where it has them, are the GPU's."""

    async def scenario() -> None:
        host = {"host_cache_size": 6 * 32 * PROFILE.kv_bytes_per_token}
        engine = llm(api=api, kv_cache_blocks=20, kv_cache_config=host)
        params = sim_api(api).SamplingParams(max_tokens=2)
        await anext(engine.generate_async(prompt_of(64), params, streaming=True))
        (row,) = await rows_of(engine)
        n_host = 6 if api != "1.4rc" else 0
        shown = [kv_of(row)[name] for name in ("maxNumBlocks", "freeNumBlocks", "usedNumBlocks")]
        assert shown == [20 + n_host, 18, 2 + n_host]
        windows = row.get("kvCacheIterationStats")
        assert (windows is None) == (api in ("1.1", "1.2"))
        if windows is not None:
            ((name, window),) = windows.items()
            assert name == str(engine._checker.max_seq_len)
            assert [window[f"primary{one}NumBlocks"] for one in ("Max", "Free", "Used")] == [
                20,
                18,
                2,
            ]
            assert [window[f"secondary{one}NumBlocks"] for one in ("Max", "Free", "Used")] == [
                6,
                6,
                0,
            ]
            assert (window["iterAllocTotalBlocks"], window["iterMissedBlocks"]) == (2, 2)

    run(scenario)


@pytest.mark.parametrize(("manager", "has_groups"), [(True, True), (False, False)])
def test_w12_the_second_manager_reports_by_group_of_pools_too(
    manager: bool,  # noqa: FBT001
    has_groups: bool,  # noqa: FBT001
) -> None:
    async def scenario() -> None:
        cache = {"use_kv_cache_manager_v2": manager, "max_attention_window": [512, 4096]}
        engine = llm(kv_cache_blocks=20, kv_cache_config=cache)
        await engine.generate_async(prompt_of(64), SamplingParams(max_tokens=1))
        (row,) = await rows_of(engine)
        assert [*row["kvCacheIterationStats"]] == ["512", "4096"]
        assert ("kvCacheIterationStatsByPoolGroup" in row) == has_groups
        if has_groups:
            (group,) = row["kvCacheIterationStatsByPoolGroup"].values()
            assert (group["windowSizes"], group["primaryMaxNumBlocks"]) == ([512, 4096], 20)

    run(scenario)


@pytest.mark.parametrize("api", VERSIONS)
def test_w10_the_newest_has_a_row_before_any_request(api: str) -> None:
    async def scenario() -> None:
        rows = llm(api=api).get_stats(0)
        assert len(rows) == (api == "1.4rc")
        for row in rows:
            assert (row["numActiveRequests"], kv_of(row)["usedNumBlocks"]) == (0, 0)

    run(scenario)


def test_without_a_lookup_there_is_no_hit_rate() -> None:
    async def scenario() -> None:
        engine = llm(kv_cache_config={"enable_block_reuse": False})
        for _ in range(2):
            await engine.generate_async(prompt_of(100), SamplingParams(max_tokens=1))
        stats = kv_of((await rows_of(engine))[-1])
        assert (stats["cacheHitRate"], stats["reusedBlocks"], stats["missedBlocks"]) == (0.0, 0, 0)
        assert (stats["allocNewBlocks"], stats["allocTotalBlocks"]) == (8, 8)

    run(scenario)


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize(("given", "kept"), [({}, 1000), ({"max_stats_len": 7}, 7)])
def test_the_newest_iterations_are_kept_as_many_as_max_stats_len(
    n_ranks: int, given: dict[str, Any], kept: int
) -> None:
    """With attention DP each of them has a row a rank."""

    async def scenario() -> None:
        engine = llm(tensor_parallel_size=n_ranks, enable_attention_dp=n_ranks > 1, **given)
        await engine.generate_async(prompt_of(64), SamplingParams(max_tokens=1003, ignore_eos=True))
        rows = await rows_of(engine)
        due = [number for number in range(1004 - kept, 1004) for _ in range(n_ranks)]
        assert [row["iter"] for row in rows] == due
        await engine.generate_async(prompt_of(64), SamplingParams(max_tokens=2))
        assert [row["iter"] for row in engine.get_stats(0)][-1] == 1005

    run(scenario)
