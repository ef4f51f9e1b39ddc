"""The TensorRT-LLM double gives the measured times back, whole requests through the whole engine.

The measurements are read from the profile files, and interpolated here on their own, not with `profile`.
"""

import asyncio
import json
import math
import random
from importlib import resources
from itertools import pairwise, product
from typing import Any

import pytest

from slagate.workers.profile import available_profiles, load_profile
from slagate.workers.sim_llm import SimLLM
from slagate.workers.sim_request import SamplingParams
from support.sim_llm import llm, prompt_of
from support.virtual_loop import run

CASES = [(name, size) for name in available_profiles() for size in load_profile(name).tp_sizes]
TOLERANCE = 0.03
CHUNK_TOKENS = (8192, 2048, 1000)


def table(name: str, size: int) -> dict[str, Any]:
    """The rows of one profile file for one tensor-parallel size."""
    text = (resources.files("slagate.configs") / "profiles" / f"{name}.json").read_text()
    rows: dict[str, Any] = json.loads(text)["tp"][str(size)]
    return rows


def engine(name: str, size: int, **changed: Any) -> SimLLM:
    return llm(profile=load_profile(name).tp(size), model_max_seq_len=1 << 18, **changed)


async def first_token_s(under_test: SimLLM, new_tokens: int, cached_tokens: int) -> float:
    """Time to first token of a lone request that finds this much of its prompt in the cache."""
    sampling, prefix = SamplingParams(max_tokens=1), prompt_of(cached_tokens + 1, 2)
    if cached_tokens:
        await under_test.generate_async(prefix, sampling)
    start_s = asyncio.get_running_loop().time()
    result = await under_test.generate_async(
        prefix[:cached_tokens] + prompt_of(new_tokens, 3 + new_tokens + cached_tokens), sampling
    )
    assert result.cached_tokens == cached_tokens
    return asyncio.get_running_loop().time() - start_s


async def full_batch_itl_s(under_test: SimLLM, batch_size: int, context_tokens: int) -> float:
    """Seconds between two tokens while `batch_size` sequences of one prompt decode."""
    sampling = SamplingParams(max_tokens=4, n=batch_size, top_k=50, detokenize=False)
    # The sequences beyond the first start one token later; the last two steps have all of them.
    at_s = []
    async for _ in under_test.generate_async(
        prompt_of(context_tokens - 2), sampling, streaming=True
    ):
        at_s.append(asyncio.get_running_loop().time())
    rows = [row async for row in under_test.get_stats_async(timeout=0)]
    n_steps = sum(row["inflightBatchingStats"]["numGenRequests"] == batch_size for row in rows)
    assert n_steps == (3 if batch_size == 1 else 2)
    return at_s[3] - at_s[2]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_lone_prompt_takes_what_was_measured(name: str, size: int) -> None:
    async def scenario() -> None:
        engines = [engine(name, size, max_num_tokens=n) for n in CHUNK_TOKENS]
        for i, (new_tokens, cached_tokens, ms) in enumerate(table(name, size)["prefill"]):
            seconds = await first_token_s(engines[i % len(engines)], new_tokens, cached_tokens)
            assert seconds * 1000 == pytest.approx(ms, rel=TOLERANCE), (new_tokens, cached_tokens)

    run(scenario)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_full_batch_decodes_as_fast_as_was_measured(name: str, size: int) -> None:
    async def scenario() -> None:
        under_test = engine(name, size)
        for batch_size, context_tokens, ms in table(name, size)["decode"]:
            seconds = await full_batch_itl_s(under_test, batch_size, context_tokens)
            assert seconds * 1000 == pytest.approx(ms, rel=TOLERANCE), (batch_size, context_tokens)

    run(scenario)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_between_measured_batches_and_contexts_the_times_are_interpolated_in_log_space(
    name: str, size: int
) -> None:
    rows = {(batch, context): ms for batch, context, ms in table(name, size)["decode"]}
    all_batches, all_contexts = (sorted({row[axis] for row in rows}) for axis in (0, 1))
    cells = [
        (batch, context)
        for batch in pairwise(all_batches)
        for context in pairwise(all_contexts)
        if rows.keys() >= {*product(batch, context)}
    ]
    rng = random.Random(size)

    async def scenario() -> None:
        under_test = engine(name, size)
        for batches, contexts in rng.sample(cells, 6):
            (low_batch, high_batch), (low_context, high_context) = batches, contexts
            batch_size = rng.randint(low_batch, high_batch)
            context_tokens = rng.randint(low_context, high_context)
            x = math.log(batch_size / low_batch) / math.log(high_batch / low_batch)
            y = math.log(context_tokens / low_context) / math.log(high_context / low_context)
            corners = product(batches, contexts)
            weights = ((1 - x) * (1 - y), (1 - x) * y, x * (1 - y), x * y)
            ms = math.exp(sum(w * math.log(rows[c]) for w, c in zip(weights, corners, strict=True)))
            seconds = await full_batch_itl_s(under_test, batch_size, context_tokens)
            where = (batch_size, context_tokens)
            assert seconds * 1000 == pytest.approx(ms, rel=TOLERANCE), where

    run(scenario)
