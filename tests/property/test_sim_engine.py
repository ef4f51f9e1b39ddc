"""Random traffic through two simulated engines: right tokens, nothing left behind, true events."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import anyio
import pytest

from slagate.workers.kv_transfer.memory import MemoryExchange
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.outputs import RequestOutput
from slagate.workers.sim.request import SamplingParams, SchedulingParams
from support.engine.sim_llm import CONTEXT_ONLY, PROFILE, expected, llm, n_timers, prompt_of, until
from support.seeds import n_in

N_REQUESTS = 60


class EventReader:
    """What a subscriber knows of one engine's full blocks: for each rank, hash to cache level."""

    def __init__(self, engine: SimLLM) -> None:
        self._engine = engine
        self.blocks: list[dict[int, int]] = [{} for _ in engine._ranks]
        self._partial: set[int] = set()
        self._next_id = [0] * len(self.blocks)

    def read(self) -> None:
        for event in self._engine.get_kv_cache_events(0):
            rank = event.get("attention_dp_rank", 0)
            assert event["event_id"] == self._next_id[rank]
            self._next_id[rank] += 1
            self._apply(event["data"], self.blocks[rank])

    def _apply(self, data: dict[str, Any], blocks: dict[int, int]) -> None:
        if data["type"] == "stored":
            assert data["parent_hash"] is None or data["parent_hash"] in blocks
            for block in data["blocks"]:
                if len(block["tokens"]) == 32:
                    blocks[block["block_hash"]] = block["cache_level"]
        elif data["type"] == "removed":
            for block_hash in data["block_hashes"]:
                blocks.pop(block_hash, None)
        elif data["type"] == "updated" and data["block_hash"] in blocks:
            blocks[data["block_hash"]] = data["cache_level"]["new_value"]


def prompts(rng: random.Random) -> list[list[int]]:
    """Prompts of a few families, in each of which they share prefixes."""
    roots = [prompt_of(200, family) for family in range(1, 4)]
    return [
        rng.choice(roots)[: rng.randint(1, 200)] + prompt_of(rng.randint(0, 90), 10 + i)
        for i in range(N_REQUESTS)
    ]


def options(rng: random.Random, n_ranks: int) -> dict[str, Any]:
    host_blocks = rng.choice((0, 5, 40))
    return {
        "tensor_parallel_size": n_ranks,
        "enable_attention_dp": n_ranks > 1,
        "max_batch_size": rng.choice((2, 8)),
        "max_num_tokens": rng.choice((64, 400, 8192)),
        "kv_cache_blocks": rng.choice((16, 40)),
        "kv_cache_config": {
            "event_buffer_max_size": 100_000,
            "enable_partial_reuse": rng.random() < 0.5,
            "host_cache_size": host_blocks * 32 * PROFILE.kv_bytes_per_token,
        },
    }


async def one_request(
    rng: random.Random, engines: tuple[SimLLM, SimLLM], prompt: list[int], n_ranks: int
) -> None:
    """Submit at some time, locally or by way of the other engine; maybe abort; check every token."""
    prefill, decode = engines
    await until(rng.uniform(0.0, 0.3))
    n_tokens = rng.randint(1, 60)
    sampling = {"max_tokens": n_tokens, "ignore_eos": True}
    asked: dict[str, Any] = {"streaming": True}
    if rng.random() < 0.5:
        asked["scheduling_params"] = SchedulingParams(
            attention_dp_rank=rng.randrange(n_ranks), attention_dp_relax=rng.random() < 0.5
        )
    if rng.random() < 0.4:
        result = await prefill.generate_async(
            prompt, SamplingParams(**sampling), disaggregated_params=CONTEXT_ONLY, **asked
        )
        params = result.outputs[0].disaggregated_params
        assert params is not None
        if rng.random() < 0.2:
            assert params.ctx_request_id is not None
            assert prefill.release_session(params.ctx_request_id)
            return
        asked["disaggregated_params"] = replace(params, request_type="generation_only")
        n_tokens = max(n_tokens, 2)  # the first one, from elsewhere, ends nothing
    result = decode.generate_async(prompt, SamplingParams(**sampling), **asked)
    await follow(decode, result, abort_after=rng.choice((0, rng.randint(1, 60))))
    tokens = result.outputs[0].token_ids
    assert tokens == expected(prompt, n_tokens)[: len(tokens)]
    assert result.outputs[0].finish_reason == "cancelled" or len(tokens) == n_tokens


def check_line(engine: SimLLM) -> None:
    """What the line of those who wait says of them, against a look at each of them."""
    line = engine._engine.group.waiting
    prefills = [one.n_prompt for one in line if one.request_type != "generation_only"]
    pulls = [one.n_prompt for one in line if one.request_type == "generation_only"]
    assert line.totals == (len(prefills), sum(prefills), len(pulls), sum(pulls))
    for rank in range(len(engine._ranks)):
        assert line.wants(rank) == any(
            not one.rank_strict or one.rank_wanted == rank for one in line
        )


async def follow(engine: SimLLM, result: RequestOutput, *, abort_after: int) -> None:
    """Read to the end; abort after so many results, never before the first (0 = not at all)."""
    n_results = 0
    check_line(engine)
    async for _ in result:
        check_line(engine)
        n_results += 1
        if n_results == abort_after:
            result.abort()


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(n_in(gate=3, long=30)))
def test_random_traffic(n_ranks: int, seed: int) -> None:
    rng = random.Random(f"{n_ranks}/{seed}")

    async def scenario() -> None:
        exchange = MemoryExchange()
        prefill, decode = (
            llm(transport=exchange.transport(), **options(rng, n_ranks)) for _ in range(2)
        )
        async with anyio.create_task_group() as tasks:
            for prompt in prompts(rng):
                tasks.start_soon(one_request, rng, (prefill, decode), prompt, n_ranks)
        await prefill.handoffs_collected()
        for engine in (prefill, decode):
            reader = EventReader(engine)
            reader.read()
            assert reader.blocks == engine.resident()
            assert (engine.used_blocks, engine.n_running, engine.n_queued) == (0, 0, 0)
            assert (engine.n_unsafe_aborts, engine.kv_transfer_failures) == (0, 0)
        assert n_timers() == 0
        assert asyncio.get_running_loop().time() < 60.0

    run(scenario)
