"""Measuring a worker: the profile that the simulated engine runs on comes back, in virtual time."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import anyio
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.router.profiles.measure import (
    Bench,
    DecodeRow,
    MeasurableRange,
    MeasurePlan,
    PrefillRow,
    TimedPrompt,
    TimedStream,
    TokenArrival,
    capacity,
    itl_s,
    measure_decode,
    measure_prefill,
    measured_content,
)
from slagate.workers.profiles.profile import load_profile
from slagate.workers.runtime import virtual_loop
from slagate.workers.runtime.usage import UsageError
from slagate.workers.worker import Worker
from support.engine.workers import MODEL, PROFILE, engine_worker, sim

TP1 = load_profile(PROFILE).tp(1)
PLAN = MeasurePlan(
    new_tokens=(128, 2048, 8192),
    cached_tokens=(0, 2048),
    batches=(1, 24),
    contexts=(512, 4096),
    repeats=2,
    steps=32,
)


def in_virtual_time(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with anyio.fail_after(10_000):
            await scenario()

    virtual_loop.run(main)


async def check(bench: Bench, decoder: Worker) -> None:
    """Every row of the plan comes back, as the profile of the simulated engine has it."""
    lines: list[str] = []
    rng = random.Random(1)
    limit = capacity(await decoder.server_info(), await decoder.model_info(MODEL), None)
    assert limit.kv_tokens == pytest.approx(TP1.kv_capacity_tokens, rel=0.001)
    prefill = await measure_prefill(bench, PLAN, limit, rng=rng, on_row=lines.append)
    decode = await measure_decode(bench, PLAN, limit, max_batch=256, rng=rng, on_row=lines.append)
    assert [row[:2] for row in prefill] == [(n, c) for c in (0, 2048) for n in (128, 2048, 8192)]
    assert [row[:2] for row in decode] == [(b, c) for c in (512, 4096) for b in (1, 24)]
    assert len(lines) == 10
    for prompt in prefill:
        expected_ms = TP1.prefill_s(prompt.new_tokens, prompt.cached_tokens) * 1000
        assert prompt.ms == pytest.approx(expected_ms, rel=0.03), prompt
    for step in decode:
        expected_ms = TP1.itl_s(step.batch_size, step.context_tokens) * 1000
        assert step.itl_ms == pytest.approx(expected_ms, rel=0.03), step


def test_an_agg_worker_gives_back_the_profile_it_runs_on() -> None:
    async def scenario() -> None:
        now_s = asyncio.get_running_loop().time
        async with sim("agg", served=False) as worker:
            await check(Bench(worker, MODEL, timeout_s=60, now_s=now_s), worker)

    in_virtual_time(scenario)


def test_a_prefill_and_a_decode_worker_give_it_back_too() -> None:
    async def scenario() -> None:
        now_s = asyncio.get_running_loop().time
        async with sim("prefill", served=False) as first, sim("decode", served=False) as second:
            await check(Bench(first, MODEL, decode=second, timeout_s=60, now_s=now_s), second)

    in_virtual_time(scenario)


def test_a_prefill_row_leaves_no_handoff_behind() -> None:
    async def scenario() -> None:
        async with engine_worker("prefill") as first, sim("decode", served=False) as second:
            bench = Bench(first.worker, MODEL, decode=second, timeout_s=60)
            await bench.prefill(list(range(100, 200)))
            assert first.llm.n_parked == 0

    in_virtual_time(scenario)


def test_rows_that_do_not_fit_are_left_out_and_said() -> None:
    async def scenario() -> None:
        lines: list[str] = []
        rng = random.Random(1)
        plan = MeasurePlan((64, 100_000), (0,), (1, 4, 8), (512,), repeats=1, steps=16)
        async with sim("agg", served=False, kv_blocks=64) as worker:
            now_s = asyncio.get_running_loop().time
            bench = Bench(worker, MODEL, timeout_s=60, now_s=now_s)
            limit = capacity(await worker.server_info(), await worker.model_info(MODEL), None)
            prefill = await measure_prefill(bench, plan, limit, rng=rng, on_row=lines.append)
            decode = await measure_decode(
                bench, plan, limit, max_batch=4, rng=rng, on_row=lines.append
            )
        assert [row[:2] for row in prefill] == [(64, 0)]
        assert [row[:2] for row in decode] == [(1, 512)]
        left_out = [line.split(": left out, ") for line in lines if "left out" in line]
        assert left_out == [
            ["prefill 100000 + 0 cached", "more than the worker takes"],
            ["decode 4 x 512", "more than the worker takes"],
            ["decode 8 x 512", "more than the worker takes"],
        ]

    in_virtual_time(scenario)


class Forgetful:
    """A bench whose worker caches whole blocks only, and every other time none."""

    def __init__(self) -> None:
        self._n_asked = 0

    async def prefill(self, prompt: Sequence[int]) -> TimedPrompt:
        self._n_asked += 1
        cached = 64 if len(prompt) > 64 and self._n_asked % 2 else 0
        return TimedPrompt(0.001 * (len(prompt) - cached), cached)

    async def decode(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[TimedStream]:
        return streams(*([(0.01 * at, 1) for at in range(n_tokens)] for _ in prompts))


def test_only_prompts_with_the_cached_tokens_of_their_row_count() -> None:
    async def scenario() -> None:
        lines: list[str] = []
        plan = MeasurePlan((10,), (64, 70), (), (), repeats=5)
        limit = MeasurableRange(1000, 1000)
        rows = await measure_prefill(
            Forgetful(), plan, limit, rng=random.Random(1), on_row=lines.append
        )
        assert rows == [(10, 64, pytest.approx(10.0))]
        assert lines[1:] == ["prefill 10 + 70 cached: left out, the worker had not cached that"]

    in_virtual_time(scenario)


def test_a_prompt_that_begins_as_an_earlier_one_is_followed_by_another() -> None:
    class Partly(Forgetful):
        async def prefill(self, prompt: Sequence[int]) -> TimedPrompt:
            self._n_asked += 1
            return TimedPrompt(0.001 * len(prompt), self._n_asked % 3)

    async def scenario() -> None:
        lines: list[str] = []
        plan = MeasurePlan((10, 20, 30), (0,), (), (), repeats=2)
        limit = MeasurableRange(1000, 1000)
        rows = await measure_prefill(
            Partly(), plan, limit, rng=random.Random(1), on_row=lines.append
        )
        assert [row.new_tokens for row in rows] == [10, 20, 30], lines

    in_virtual_time(scenario)


def test_in_the_middle_of_the_output_the_context_is_that_of_the_row() -> None:
    class Noting(Forgetful):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[tuple[int, int]] = []

        async def decode(
            self, prompts: Sequence[Sequence[int]], n_tokens: int
        ) -> list[TimedStream]:
            self.asked += [(len(prompt), n_tokens) for prompt in prompts]
            return await super().decode(prompts, n_tokens)

    async def scenario() -> None:
        bench = Noting()
        plan = MeasurePlan((), (), (2,), (10, 100), repeats=1, steps=32)
        limit = MeasurableRange(1000, 1000)
        rows = await measure_decode(
            bench, plan, limit, max_batch=8, rng=random.Random(1), on_row=lambda _: None
        )
        assert [row.context_tokens for row in rows] == [10, 100]
        assert bench.asked == [(1, 32), (1, 32), (84, 32), (84, 32)]

    in_virtual_time(scenario)


def streams(*ticks: list[tuple[float, int]]) -> list[TimedStream]:
    return [TimedStream(lambda: 0.0, ticks=[TokenArrival(*tick) for tick in of]) for of in ticks]


def test_only_steps_of_the_whole_batch_count() -> None:
    alone = [(float(at), 1) for at in range(10)]  # a second a step, before the other one is there
    together = [(10 + 2.0 * at, 1) for at in range(20)]
    assert itl_s(streams([*alone, *together], together)) == 2.0
    assert itl_s(streams(together[:5], together)) is None


def test_tokens_that_come_several_at_once_are_several_steps() -> None:
    assert itl_s(streams([(4.0 * at, 4) for at in range(10)])) == 1.0


def test_a_worker_that_refuses_a_prompt_ends_the_measurement_with_its_words() -> None:
    async def scenario() -> None:
        async with sim("prefill", served=False) as worker:
            with pytest.raises(UsageError, match=r"FAILED_PRECONDITION.*prefill worker"):
                await Bench(worker, MODEL, timeout_s=60).prefill([1, 2, 3])

    in_virtual_time(scenario)


def test_a_row_that_the_worker_refuses_costs_no_other() -> None:
    class Refusing(Forgetful):
        async def decode(
            self, prompts: Sequence[Sequence[int]], n_tokens: int
        ) -> list[TimedStream]:
            if len(prompts) == 2:
                raise UsageError("the worker answered RESOURCE_EXHAUSTED: full")
            return await super().decode(prompts, n_tokens)

    async def scenario() -> None:
        lines: list[str] = []
        plan = MeasurePlan((), (), (1, 2, 3), (100,), repeats=1, steps=16)
        rows = await measure_decode(
            Refusing(),
            plan,
            MeasurableRange(1000, 1000),
            max_batch=8,
            rng=random.Random(1),
            on_row=lines.append,
        )
        assert [row.batch_size for row in rows] == [1, 3]
        assert "decode 2 x 100: left out, the worker answered RESOURCE_EXHAUSTED: full" in lines

    in_virtual_time(scenario)


def test_a_refusal_in_a_batch_is_told_as_one() -> None:
    async def scenario() -> None:
        async with sim("prefill", served=False) as first, sim("agg", served=False) as second:
            bench = Bench(first, MODEL, decode=second, timeout_s=60)
            with pytest.raises(UsageError, match="the worker answered"):
                await bench.decode([[1, 2, 3], [4, 5, 6]], 8)

    in_virtual_time(scenario)


def test_what_cannot_be_a_profile_is_refused() -> None:
    with pytest.raises(UsageError, match="--kv-capacity"):
        capacity(oe.ServerInfo(), oe.ModelInfo(), None)
    assert capacity(oe.ServerInfo(), oe.ModelInfo(), 100) == (100, 100)
    says = oe.ServerInfo()
    says.capacity.total_kv_blocks, says.capacity.kv_block_size = 10, 32
    assert capacity(says, oe.ModelInfo(), None) == (320, 320)
    assert capacity(says, oe.ModelInfo(), 100) == (100, 100)
    for prefill, decode, reason in (
        ([PrefillRow(1, 0, 1.0)], [], "no decode row"),
        ([], [DecodeRow(1, 1, 1.0)], "no prefill row"),
        ([PrefillRow(1, 0, 1.0)], [DecodeRow(1, 1, 0.0)], "a decode row took no time"),
    ):
        with pytest.raises(UsageError, match=reason):
            content(prefill, decode)


def test_measured_rows_are_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(content([PrefillRow(100, 0, 12.34567)], [DecodeRow(4, 512, 5.0)])))
    profile = load_profile(path)
    assert (profile.model, profile.engine, profile.kv_bytes_per_token) == ("m", "e", 1000)
    assert profile.tp(2).prefill_s(100, 0) == pytest.approx(0.0123457)
    assert profile.tp(2).itl_s(4, 512) == pytest.approx(0.005)


def content(prefill: Sequence[PrefillRow], decode: Sequence[DecodeRow]) -> dict[str, object]:
    return measured_content(
        prefill,
        decode,
        model="m",
        system="s",
        engine="e",
        source="t",
        tp=2,
        kv_capacity_tokens=10_000,
        kv_bytes_per_token=1000,
    )
