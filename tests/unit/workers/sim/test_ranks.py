"""The TensorRT-LLM double with attention data parallelism: who goes where, and what is each rank's own."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slagate.workers.kv_transfer.shm import SharedMemoryTransport
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.api import VERSIONS, sim_api
from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.outputs import RequestOutput
from slagate.workers.sim.request import SamplingParams, SchedulingParams
from support.engine.sim_llm import (
    CONTEXT_ONLY,
    PROFILE,
    expected,
    llm,
    n_timers,
    prompt_of,
    tokens_of,
)

EVENTS = {"event_buffer_max_size": 1000}


def ranked(n_ranks: int = 2, **changed: Any) -> SimLLM:
    """An engine of several ranks; limits are those of one rank."""
    return llm(tensor_parallel_size=n_ranks, enable_attention_dp=True, **changed)


def on_rank(rank: int, *, relax: bool = False) -> SchedulingParams:
    return SchedulingParams(attention_dp_rank=rank, attention_dp_relax=relax)


def submit(
    engine: SimLLM,
    prompt: list[int],
    n_tokens: int = 1,
    scheduling: SchedulingParams | None = None,
) -> RequestOutput:
    return engine.generate_async(
        prompt,
        SamplingParams(max_tokens=n_tokens),
        streaming=True,
        scheduling_params=scheduling,
    )


async def rows_of(engine: SimLLM) -> list[dict[str, Any]]:
    """Rows of iterations; the newest version has one more, before all of them."""
    return [row for row in engine.get_stats(0) if row["iter"]]


async def active(engine: SimLLM) -> list[int]:
    """Running sequences on each rank as of the newest iteration."""
    rows = await rows_of(engine)
    n_ranks = len(engine._ranks)
    assert [row["attentionDpRank"] for row in rows[-n_ranks:]] == [*range(n_ranks)]
    batches = [row["inflightBatchingStats"] for row in rows[-n_ranks:]]
    return [batch["numContextRequests"] + batch["numGenRequests"] for batch in batches]


def test_requests_without_a_wish_go_to_the_least_loaded_rank() -> None:
    async def scenario() -> None:
        engine = ranked(3)
        results = [submit(engine, prompt_of(40, 0), 5, on_rank(1))]
        results += [submit(engine, prompt_of(40, i), 5) for i in range(1, 5)]
        await anext(results[0])
        assert await active(engine) == [2, 2, 1]
        for i, result in enumerate(results):
            assert await tokens_of(result) == expected(prompt_of(40, i), 5)
        assert (engine.used_blocks, engine.n_running, n_timers()) == (0, 0, 0)

    run(scenario)


def test_a_strict_wish_waits_for_its_rank_and_holds_up_only_those_who_want_it_too() -> None:
    async def scenario() -> None:
        engine = ranked(max_batch_size=1)
        first = submit(engine, prompt_of(40, 1), 4, on_rank(0))
        second = submit(engine, prompt_of(40, 2), 1, on_rank(0))
        third = submit(engine, prompt_of(40, 3), 9)
        fourth = submit(engine, prompt_of(40, 4), 1, on_rank(0))
        await anext(first)
        assert (await active(engine), engine.n_queued) == ([1, 1], 2)
        await second
        assert first.outputs[0].length == 1
        await anext(first)
        assert first.finished
        assert (fourth.outputs[0].length, third.finished) == (0, False)
        await fourth
        await third

    run(scenario)


def test_those_in_front_who_want_a_full_rank_are_passed_and_keep_their_order() -> None:
    async def scenario() -> None:
        engine = ranked(max_batch_size=40)
        running = [submit(engine, prompt_of(40, i), 9, on_rank(0)) for i in range(40)]
        await anext(running[0])
        wanted = [i // 3 % 2 for i in range(80)]
        waiting = [
            submit(engine, prompt_of(40, 40 + i), 9, on_rank(r)) for i, r in enumerate(wanted)
        ]
        await anext(running[0])
        line = [one.feed.result for one in engine._engine.group.waiting]
        assert line == [result for result, rank in zip(waiting, wanted, strict=True) if rank == 0]
        there = [one.feed.result for one in engine._ranks[1].sequences()]
        assert there == [result for result, rank in zip(waiting, wanted, strict=True) if rank == 1]
        for result in [*running, *waiting]:
            await result

    run(scenario)


def test_a_relaxed_wish_goes_elsewhere_only_when_its_rank_is_full() -> None:
    async def scenario() -> None:
        engine = ranked(3, max_batch_size=2)
        results = [submit(engine, prompt_of(40, i), 5, on_rank(1, relax=True)) for i in range(4)]
        await anext(results[0])
        assert await active(engine) == [1, 2, 1]
        for result in results:
            await result

    run(scenario)


def test_a_rank_without_room_in_its_cache_is_full_too() -> None:
    async def scenario() -> None:
        engine = ranked(kv_cache_blocks=4)
        results = [submit(engine, prompt_of(90, 0), 9, on_rank(0))]
        results += [submit(engine, prompt_of(90, 1), 9, on_rank(0, relax=True))]
        results += [submit(engine, prompt_of(90, 2), 9)]
        await anext(results[0])
        assert (await active(engine), engine.n_queued) == ([1, 1], 1)
        for result in results:
            await result
        assert engine.used_blocks == 0

    run(scenario)


def test_each_rank_reuses_its_own_blocks_only() -> None:
    async def scenario() -> None:
        engine = ranked(kv_cache_config=EVENTS)
        cached = [
            (await submit(engine, prompt_of(100), 1, on_rank(rank))).cached_tokens
            for rank in (0, 1, 0, 1)
        ]
        assert cached == [0, 0, 99, 99]
        assert [len(blocks) for blocks in engine.resident()] == [3, 3]

    run(scenario)


def test_ranks_step_together_at_the_pace_of_the_slowest() -> None:
    async def scenario() -> None:
        engine = ranked()
        loop = asyncio.get_running_loop()
        slow = submit(engine, prompt_of(4000), 2, on_rank(0))
        fast = submit(engine, prompt_of(64, 2), 2, on_rank(1))
        await anext(fast)
        due_s = PROFILE.prefill_s(4000, 0)
        assert loop.time() == pytest.approx(due_s)
        await anext(slow)
        await anext(fast)
        # Each rank decodes its own batch: one request, not two.
        due_s += PROFILE.itl_s(1, 4000)
        assert loop.time() == pytest.approx(due_s)

    run(scenario)


def test_each_rank_has_a_token_budget_of_its_own() -> None:
    async def scenario() -> None:
        engine = ranked(max_num_tokens=1000)
        results = [submit(engine, prompt_of(1000, i), 1) for i in range(2)]
        for result in results:
            await result
        assert asyncio.get_running_loop().time() == pytest.approx(PROFILE.prefill_s(1000, 0))

    run(scenario)


@pytest.mark.parametrize("api", VERSIONS)
def test_w10_only_the_batch_is_a_ranks_own_in_its_row(api: str) -> None:
    """In 1.1 and 1.2 the other ranks have no row, and the first one's does not say whose it is."""

    async def scenario() -> None:
        engine = ranked(api=api, max_batch_size=2, kv_cache_blocks=50)
        params = sim_api(api).SamplingParams(max_tokens=2)
        results = [engine.generate_async(prompt_of(64 + i, i), params) for i in range(3)]
        await results[0]
        first, *others = await rows_of(engine)
        if api in ("1.1", "1.2"):
            assert "attentionDpRank" not in first
            assert [row["iter"] for row in others] == [2]
            assert first["numActiveRequests"] == 2
            return
        second = others[0]
        assert [row["attentionDpRank"] for row in (first, second)] == [0, 1]
        assert [row["numActiveRequests"] for row in (first, second)] == [2, 2]
        assert second["kvCacheStats"] == first["kvCacheStats"]
        batches = [row["inflightBatchingStats"] for row in (first, second)]
        assert [batch["numContextRequests"] for batch in batches] == [2, 1]
        assert [batch["numScheduledRequests"] for batch in batches] == [2, 1]
        assert [batch["numCtxTokens"] for batch in batches] == [64 + 66, 65]
        assert ["kvCacheIterationStats" in row for row in (first, second)] == [True, False]

    run(scenario)


@pytest.mark.parametrize("api", VERSIONS)
def test_w10_a_variable_made_rows_of_each_ranks_own_for_a_while(
    monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    monkeypatch.setenv("TLLM_METRICS_ALL_RANKS", "1")

    async def scenario() -> None:
        engine = ranked(api=api, kv_cache_blocks=50)
        params = sim_api(api).SamplingParams(max_tokens=1)
        results = [engine.generate_async(prompt_of(64 + i, i), params) for i in range(3)]
        await results[0]
        rows = await rows_of(engine)
        assert {row.get("rank") for row in rows} == ({0, 1} if api == "1.3rc" else {None})
        if api == "1.3rc":
            assert not any("attentionDpRank" in row for row in rows)
            assert [row["numActiveRequests"] for row in rows] == [2, 1]
            assert all("kvCacheIterationStats" in row for row in rows)

    run(scenario)


def test_stats_have_a_row_a_rank_and_the_queue_on_rank_0_only() -> None:
    async def scenario() -> None:
        engine = ranked(max_batch_size=1, kv_cache_blocks=50)
        results = [submit(engine, prompt_of(64 + i, i), 1) for i in range(5)]
        await anext(results[0])
        first, second = await rows_of(engine)
        assert [row["iter"] for row in (first, second)] == [1, 1]
        assert (first["numQueuedRequests"], second["numQueuedRequests"]) == (3, 0)
        batches = [row["inflightBatchingStats"] for row in (first, second)]
        assert [batch["numQueuedContextRequests"] for batch in batches] == [3, 0]
        assert [batch["numQueuedCtxTokens"] for batch in batches] == [66 + 67 + 68, 0]
        assert [batch["numCtxTokens"] for batch in batches] == [64, 65]
        assert {row["iterLatencyMS"] for row in (first, second)} == {first["iterLatencyMS"]}
        assert first["iterLatencyMS"] == pytest.approx(PROFILE.prefill_s(65, 0) * 1000)
        assert [row["kvCacheStats"]["allocTotalBlocks"] for row in (first, second)] == [2, 2]
        assert [row["kvCacheStats"]["maxNumBlocks"] for row in (first, second)] == [50, 50]
        assert [row["numCompletedRequests"] for row in (first, second)] == [1, 0]
        for result in results:
            await result

    run(scenario)


def test_events_say_their_rank() -> None:
    async def scenario() -> None:
        engine = ranked(kv_cache_config=EVENTS)
        for rank in (1, 1, 0):
            await submit(engine, prompt_of(100, rank), 1, on_rank(rank))
        events = engine.get_kv_cache_events(0)
        stored = Counter(
            event["attention_dp_rank"] for event in events if event["data"]["type"] == "stored"
        )
        assert stored.keys() == {0, 1}
        for rank in (0, 1):
            ids = [event["event_id"] for event in events if event["attention_dp_rank"] == rank]
            assert ids == [*range(len(ids))]

    run(scenario)


@pytest.mark.parametrize(("n_ranks", "named"), [(1, [None, None]), (2, [0, 1])])
def test_a_handoff_names_its_rank_where_there_are_several(
    tmp_path: Path, n_ranks: int, named: list[int | None]
) -> None:
    async def scenario() -> None:
        transports = [SharedMemoryTransport(tmp_path) for _ in range(2)]
        prefill, decode = (ranked(n_ranks, transport=one) for one in transports)
        for rank, name in enumerate(named):
            result = await prefill.generate_async(
                prompt_of(50, rank),
                disaggregated_params=CONTEXT_ONLY,
                scheduling_params=on_rank(rank) if n_ranks > 1 else None,
            )
            params = result.outputs[0].disaggregated_params
            assert params is not None
            assert params.ctx_dp_rank == name
            resumed = await decode.generate_async(
                prompt_of(50, rank),
                disaggregated_params=replace(params, request_type="generation_only"),
            )
            assert resumed.outputs[0].token_ids == expected(prompt_of(50, rank), 32)
        prefill.shutdown()
        assert (prefill.used_blocks, decode.used_blocks, n_timers()) == (0, 0, 0)
        for transport in transports:
            transport.close()

    run(scenario)


def test_an_abort_of_all_that_one_rank_runs_does_not_stop_the_other() -> None:
    async def scenario() -> None:
        engine = ranked()
        results = [submit(engine, prompt_of(3000, i), 20) for i in range(2)]
        await anext(results[0])
        results[0].abort()
        assert await tokens_of(results[1]) == expected(prompt_of(3000, 1), 20)
        assert (engine.used_blocks, n_timers()) == (0, 0)

    run(scenario)


def test_a_fatal_error_ends_what_runs_on_every_rank() -> None:
    async def scenario() -> None:
        engine = ranked()
        results = [submit(engine, prompt_of(50, i), 20) for i in range(4)]
        await anext(results[0])
        engine.inject_fatal(OSError("bus error"))
        for result in results:
            with pytest.raises(OSError, match="bus error"):
                await result
        assert (engine.used_blocks, engine.n_running, n_timers()) == (0, 0, 0)

    run(scenario)


def test_parallel_outputs_run_where_their_prompt_is_and_reuse_it() -> None:
    async def scenario() -> None:
        engine = ranked(kv_cache_config=EVENTS)
        sampling = SamplingParams(max_tokens=20, n=3, top_k=50)
        result = await engine.generate_async(prompt_of(1024), sampling)
        assert [output.length for output in result.outputs] == [20, 20, 20]
        assert len({tuple(output.token_ids) for output in result.outputs}) == 3
        assert [len(blocks) for blocks in engine.resident()] == [32, 0]
        rows = [row for row in await rows_of(engine) if row["attentionDpRank"] == 0]
        # The last of 32 blocks is not stored yet, so the two others compute it again.
        assert [row["inflightBatchingStats"]["numCtxTokens"] for row in rows[:3]] == [1024, 64, 0]

    run(scenario)
