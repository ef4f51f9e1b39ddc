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

from slagate.workers.profiles.profile import available_profiles, load_profile
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.request import SamplingParams
from support.engine.sim_llm import llm, prompt_of
from support.seeds import is_long_run

CASES = [(name, size) for name in available_profiles() for size in load_profile(name).tp_sizes]
if not is_long_run():
    CASES = [CASES[0], CASES[-1]]  # of a size that stands alone, and of one that shares its work
TOLERANCE = 0.03
CHUNK_TOKENS = (8192, 2048, 1000)


def table(name: str, size: int) -> dict[str, Any]:
    """The rows of one profile file for one tensor-parallel size."""
    text = (resources.files("slagate.configs") / "profiles" / f"{name}.json").read_text()
    rows: dict[str, Any] = json.loads(text)["tp"][str(size)]
    return rows


def decode_rows(name: str, size: int) -> dict[tuple[int, int], float]:
    """Measured ms between two tokens, by batch size and context."""
    return {(batch, context): ms for batch, context, ms in table(name, size)["decode"]}


def log_share(low: float, value: float, high: float) -> float:
    """How far `value` is on the way from `low` to `high` in log space."""
    return math.log(value / low) / math.log(high / low)


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
    rows = under_test.get_stats(0)
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
def test_between_measured_prompts_the_times_are_interpolated(name: str, size: int) -> None:
    """In log space along the new tokens, and linearly along those found in the cache."""
    lines: dict[int, dict[int, float]] = {}
    for new_tokens, cached_tokens, ms in table(name, size)["prefill"]:
        lines.setdefault(cached_tokens, {})[new_tokens] = ms

    def on_line(cached_tokens: int, new_tokens: int) -> float | None:
        line = sorted(lines[cached_tokens].items())
        for (low, low_ms), (high, high_ms) in pairwise(line):
            if low <= new_tokens <= high:
                return float(low_ms * (high_ms / low_ms) ** log_share(low, new_tokens, high))
        return None

    rng = random.Random(f"{name}/{size}")

    async def scenario() -> None:
        engines = [engine(name, size, max_num_tokens=n) for n in CHUNK_TOKENS]
        n_between = 0
        for low_cached, high_cached in [(0, 0), *pairwise(sorted(lines))]:
            for low, high in pairwise(sorted(lines[low_cached])):
                new_tokens = rng.randint(low, high)
                cached_tokens = rng.randint(low_cached, high_cached)
                ends = [on_line(cached, new_tokens) for cached in (low_cached, high_cached)]
                if ends[0] is None or ends[1] is None:
                    continue
                y = (cached_tokens - low_cached) / max(1, high_cached - low_cached)
                under_test = engines[n_between % len(engines)]
                seconds = await first_token_s(under_test, new_tokens, cached_tokens)
                due_ms = ends[0] * (1 - y) + ends[1] * y
                where = (new_tokens, cached_tokens)
                assert seconds * 1000 == pytest.approx(due_ms, rel=TOLERANCE), where
                n_between += 1
        assert n_between > 20

    run(scenario)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_batch_of_unequal_contexts_takes_the_time_of_their_mean(name: str, size: int) -> None:
    """Not of the longest, nor of the mean that the table's log axis would suggest."""
    lengths = [512, 512, 512, 1024, 2000, 4096, 32_000, 60_000]
    of_eight = sorted((at, ms) for (batch, at), ms in decode_rows(name, size).items() if batch == 8)

    def due_s(context_tokens: float) -> float:
        for (low, low_ms), (high, high_ms) in pairwise(of_eight):
            if low <= context_tokens <= high:
                share = log_share(low, context_tokens, high)
                return float(low_ms * (high_ms / low_ms) ** share / 1000)
        raise AssertionError(context_tokens)

    async def scenario() -> None:
        under_test = engine(name, size, max_num_tokens=1 << 17)
        sampling = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
        results = [
            under_test.generate_async(prompt_of(n, n + i), sampling, streaming=True)
            for i, n in enumerate(lengths)
        ]
        at_s = []
        for _ in range(4):
            for result in results:
                await anext(result)
            at_s.append(asyncio.get_running_loop().time())
        mean = sum(lengths) / len(lengths)
        for i, (before_s, after_s) in enumerate(pairwise(at_s)):
            assert after_s - before_s == pytest.approx(due_s(mean + i), rel=TOLERANCE)
        log_mean = math.exp(sum(math.log(n) for n in lengths) / len(lengths))
        assert due_s(log_mean) * (1 + 2 * TOLERANCE) < due_s(mean)
        assert due_s(mean) * (1 + 2 * TOLERANCE) < due_s(max(lengths))

    run(scenario)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_between_measured_batches_and_contexts_the_times_are_interpolated_in_log_space(
    name: str, size: int
) -> None:
    rows = decode_rows(name, size)
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
            x = log_share(low_batch, batch_size, high_batch)
            y = log_share(low_context, context_tokens, high_context)
            corners = product(batches, contexts)
            weights = ((1 - x) * (1 - y), (1 - x) * y, x * (1 - y), x * y)
            ms = math.exp(sum(w * math.log(rows[c]) for w, c in zip(weights, corners, strict=True)))
            seconds = await full_batch_itl_s(under_test, batch_size, context_tokens)
            where = (batch_size, context_tokens)
            assert seconds * 1000 == pytest.approx(ms, rel=TOLERANCE), where

    run(scenario)
