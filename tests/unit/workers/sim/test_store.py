"""The TensorRT-LLM double: what a request leaves in the KV cache, and when its events can be read."""

from itertools import chain
from typing import Any

import pytest

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.api import sim_api
from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.request import SamplingParams, SamplingParams12
from support.engine.sim_llm import CONTEXT_ONLY, PROFILE, Pair, llm, n_timers, prompt_of, until
from support.kv.consumer import KvConsumer

EVENTS = {"event_buffer_max_size": 10_000}


def blocks_announced(engine: SimLLM) -> list[int]:
    """Tokens of each block in the `stored` events not read yet; nothing is removed in these tests."""
    sizes = []
    for event in engine.get_kv_cache_events(0):
        assert event["data"]["type"] in ("created", "stored")
        sizes += [len(block["tokens"]) for block in event["data"].get("blocks", ())]
    return sizes


def n_resident(engine: SimLLM) -> int:
    """Full blocks stored."""
    (blocks,) = engine.resident()
    return len(blocks)


@pytest.fixture
def engines(pair: Pair) -> Pair:
    """The pair, with KV cache events."""
    pair.prefill, pair.decode = (llm(transport=t, kv_cache_config=EVENTS) for t in pair.transports)
    return pair


@pytest.mark.parametrize(("n_prompt", "n_blocks"), [(1, 0), (32, 0), (33, 1), (64, 1), (65, 2)])
def test_the_end_of_prefill_stores_the_full_blocks_of_all_tokens_but_the_last(
    n_prompt: int, n_blocks: int
) -> None:
    async def scenario() -> None:
        engine = llm(kv_cache_config=EVENTS)
        result = engine.generate_async(prompt_of(n_prompt), streaming=True)
        await anext(result)
        assert blocks_announced(engine) == [32] * n_blocks
        assert n_resident(engine) == n_blocks
        await result

    run(scenario)


@pytest.mark.parametrize("n_tokens", [1, 4, 5, 6, 40])
def test_the_end_of_a_sequence_stores_all_that_is_in_the_cache(n_tokens: int) -> None:
    """The newest token never is, so a sequence of 60 prompt tokens and 5 new ones has 64 there."""

    async def scenario() -> None:
        engine = llm(kv_cache_config=EVENTS)
        result = await engine.generate_async(prompt_of(60), SamplingParams(max_tokens=n_tokens))
        n_cached = 60 + n_tokens - 1
        full, rest = divmod(n_cached, 32)
        assert blocks_announced(engine) == [32] * full + [rest] * (rest > 0)
        assert n_resident(engine) == full
        turn = prompt_of(60) + result.outputs[0].token_ids + prompt_of(40, 2)
        again = await engine.generate_async(turn, SamplingParams(max_tokens=1))
        assert again.cached_tokens == n_cached

    run(scenario)


def test_an_aborted_sequence_stores_what_it_has_generated() -> None:
    async def scenario() -> None:
        engine = llm(kv_cache_config=EVENTS)
        result = engine.generate_async(prompt_of(60), streaming=True)
        for _ in range(10):
            await anext(result)
        result.abort()
        # Nothing else runs, so nobody would publish it later.
        assert blocks_announced(engine) == [32, 32, 5]

    run(scenario)


def test_a_cancelled_prefill_stores_the_full_blocks_it_has_computed() -> None:
    async def scenario() -> None:
        engine = llm(kv_cache_config=EVENTS, max_num_tokens=1000)
        result = engine.generate_async(prompt_of(3000), streaming=True)
        # Inside the second of three iterations.
        await until(PROFILE.prefill_s(1000, 0) + 1e-6)
        result.abort()
        await result
        assert blocks_announced(engine) == [32] * 31
        assert (n_resident(engine), engine.used_blocks, n_timers()) == (31, 0, 0)
        again = await engine.generate_async(prompt_of(3000), SamplingParams(max_tokens=1))
        assert again.cached_tokens == 31 * 32

    run(scenario)


def test_a_handoff_stores_its_last_block_when_it_is_let_go(engines: Pair) -> None:
    async def scenario() -> None:
        engine = engines.prefill
        params = await engines.hand_off(prompt_of(70))
        assert blocks_announced(engine) == [32, 32]
        assert params.ctx_request_id is not None
        assert engine.release_session(params.ctx_request_id)
        assert blocks_announced(engine) == [6]
        assert n_timers() == 0

    run(scenario)


def test_a_handoff_that_is_collected_or_expires_while_nothing_runs_is_published(
    engines: Pair,
) -> None:
    async def scenario() -> None:
        engine = engines.prefill
        params = await engines.hand_off(prompt_of(70))
        await engine.generate_async(prompt_of(70, 2), disaggregated_params=CONTEXT_ONLY)
        assert blocks_announced(engine) == [32, 32] * 2
        await engines.resume(prompt_of(70), params, max_tokens=1)
        await until(1.0)
        assert blocks_announced(engine) == [6]
        await until(100.0)
        assert (engine.n_expired, blocks_announced(engine)) == (1, [6])

    run(scenario)


@pytest.mark.parametrize("n_tokens", [1, 2])
def test_a_pull_stores_what_it_brought(engines: Pair, n_tokens: int) -> None:
    """Two tokens in either case: the first one ends nothing."""

    async def scenario() -> None:
        engine = engines.decode
        params = await engines.hand_off(prompt_of(70))
        result = engines.resume(prompt_of(70), params, max_tokens=n_tokens)
        await anext(result)
        assert n_resident(engine) == 2
        await result
        assert blocks_announced(engine) == [32, 32, 7]
        await engines.blocks_come_back()

    run(scenario)


def test_a_pull_reuses_no_block_of_this_worker(engines: Pair) -> None:
    async def scenario() -> None:
        asked: dict[str, Any] = {"max_tokens": 1, "return_perf_metrics": True}
        for _ in range(2):
            params = await engines.hand_off(prompt_of(70))
            result = await engines.resume(prompt_of(70), params, **asked)
            perf = result.outputs[0].request_perf_metrics
            assert perf is not None
            assert perf.kv_cache_metrics.num_reused_blocks == 0
            assert perf.kv_cache_metrics.num_new_allocated_blocks == 3
            assert result.cached_tokens == 70
            transfer = perf.timing_metrics.kv_cache_transfer_end
            assert transfer > perf.timing_metrics.kv_cache_transfer_start
        await engines.blocks_come_back()

    run(scenario)


@pytest.mark.parametrize("api", ["1.3rc", "1.4rc"])
def test_a_block_that_changes_its_tier_is_updated_and_keeps_its_priority(api: str) -> None:
    """It is the same block, and so neither removed nor stored anew: last block out, first block in."""

    async def scenario() -> None:
        host = {"host_cache_size": 64 * 32 * PROFILE.kv_bytes_per_token}
        engine = llm(api=api, kv_cache_blocks=5, kv_cache_config=EVENTS | host)
        sampling = sim_api(api).SamplingParams(max_tokens=1)
        consumer = KvConsumer()
        stored: list[int] = []

        async def moves(first: int) -> list[tuple[int, int]]:
            """What moves when a prompt of five blocks, the last with one token, needs the device."""
            await engine.generate_async(prompt_of(32 * 4 + 2, first), sampling)
            polled = engine.get_kv_cache_events(0)
            moved = []
            for event in polled:
                data = event["data"]
                consumer.take(data)
                stored.extend(block["block_hash"] for block in data.get("blocks", ()))
                if data["type"] == "updated":
                    moved.append((data["block_hash"], data["cache_level"]["new_value"]))
                    assert data == {
                        "type": "updated",
                        "block_hash": moved[-1][0],
                        "cache_level": {
                            "type": "event_diff",
                            "old_value": 1 - moved[-1][1],
                            "new_value": moved[-1][1],
                        },
                        "priority": None,
                    }
            (resident,) = engine.resident()
            assert {block: consumer.levels[block] for block in resident} == resident
            return moved

        assert await moves(1) == []
        one = stored[:]
        assert await moves(2) == [(block, 1) for block in reversed(one)]
        two = stored[5:]
        back = await moves(1)
        assert [block for block, level in back if level == 0] == one
        assert [block for block, level in back if level == 1] == [*reversed(two)]
        assert (len(one), len(two), len(stored)) == (5, 5, 10)

    run(scenario)


HOST = {"host_cache_size": 64 * 32 * PROFILE.kv_bytes_per_token}


def test_t2_6_in_1_1_a_move_ends_the_events_and_the_next_request_is_told() -> None:
    """What dispatches events reads the change of a priority that does not change."""

    async def scenario() -> None:
        engine = llm(api="1.1", kv_cache_blocks=5, kv_cache_config=EVENTS | HOST)
        sampling = SamplingParams12(max_tokens=1)

        async def kinds(first: int) -> list[str]:
            await engine.generate_async(prompt_of(32 * 4 + 2, first), sampling)
            polled = engine.get_kv_cache_events(0)
            return [event["data"]["type"] for event in chain.from_iterable(polled)]

        assert await kinds(1) == ["created", "stored", "stored"]
        assert await kinds(2) == []
        with pytest.raises(AttributeError, match="new_value"):
            engine.generate_async([1], sampling)
        with pytest.raises(RuntimeError, match="shutting down"):
            engine.generate_async([1], sampling)

    run(scenario)


def test_t2_6_in_1_2_a_move_loses_all_events_of_its_poll_and_the_ids_show_it() -> None:
    async def scenario() -> None:
        engine = llm(api="1.2", kv_cache_blocks=5, kv_cache_config=EVENTS | HOST)
        sampling = SamplingParams12(max_tokens=1)

        async def ids(first: int, n_tokens: int) -> list[int]:
            await engine.generate_async(prompt_of(n_tokens, first), sampling)
            return [event["event_id"] for event in engine.get_kv_cache_events(0)]

        assert await ids(1, 32 * 4 + 2) == [0, 1, 2]
        assert await ids(2, 32 * 4 + 2) == []
        recorder = engine._ranks[0].cache._recorder
        assert recorder is not None
        assert recorder._next_id == 3 + 5 + 2

    run(scenario)
