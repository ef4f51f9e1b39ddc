"""Measures a live worker: times of prompts and of decoding batches over OpenEngine, as a profile's rows.

    prefill row    a prompt of fresh tokens with one token of output, on a worker that is otherwise idle;
                   for cached tokens, behind a prefix that was sent before
    decode row     a batch whose prompts are in the KV cache; the steps in which all of it decodes

Each is repeated and the median taken. Times are the client's own: they have the way to the worker in them,
as those of the gateway do.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from slagate.proto import openengine_pb2 as oe
from slagate.router.profile_bench import Bench, Stream
from slagate.workers.errors import UsageError

MIN_STEPS = 8
"""Steps of a whole batch below which its times say too little."""


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """Which rows to measure, each `repeats` times; decode rows over about `steps` tokens of output."""

    new_tokens: tuple[int, ...]
    cached_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int = 3
    steps: int = 64


class Capacity(NamedTuple):
    """What bounds the rows: the longest context, and the KV cache of a rank."""

    context_tokens: int
    kv_tokens: int


class PrefillRow(NamedTuple):
    """As a profile has it."""

    new_tokens: int
    cached_tokens: int
    ms: float


class DecodeRow(NamedTuple):
    """As a profile has it."""

    batch_size: int
    context_tokens: int
    itl_ms: float


def capacity(server: oe.ServerInfo, model: oe.ModelInfo, kv_tokens: int | None) -> Capacity:
    """What the worker says of itself; `kv_tokens`, where given, in place of the KV cache that it says.

    Raises `UsageError` where neither is known.
    """
    ranks = max(1, server.parallelism.data_parallel_size)
    said = server.capacity.total_kv_blocks * server.capacity.kv_block_size // ranks
    if kv_tokens is None and not said:
        raise UsageError("the worker does not say how much KV cache it has: give --kv-capacity")
    total = kv_tokens or said
    return Capacity(model.max_context_length or total, total)


async def measure_prefill(
    bench: Bench,
    plan: MeasurePlan,
    limit: Capacity,
    *,
    rng: random.Random,
    on_row: Callable[[str], None],
) -> list[PrefillRow]:
    """The prefill rows that fit into the worker's limits; what is left out is said to `on_row`."""
    rows = []
    for cached in plan.cached_tokens:
        prefix = fresh(cached, rng)
        for new in plan.new_tokens:
            if new + cached + 1 > min(limit):
                on_row(f"prefill {new} + {cached} cached: left out, more than the worker takes")
                continue
            seconds = []
            try:
                if cached:
                    await bench.prefill([*prefix, *fresh(1, rng)])
                for _ in range(plan.repeats):
                    timed = await bench.prefill([*prefix, *fresh(new, rng)])
                    if timed.cached_tokens == cached:
                        seconds.append(timed.seconds)
            except UsageError as error:
                on_row(f"prefill {new} + {cached} cached: left out, {error}")
                continue
            if not seconds:
                on_row(f"prefill {new} + {cached} cached: left out, the worker had not cached that")
                continue
            rows.append(PrefillRow(new, cached, median(seconds) * 1000.0))
            on_row(f"prefill {new} + {cached} cached: {rows[-1].ms:.2f} ms")
    return rows


async def measure_decode(
    bench: Bench,
    plan: MeasurePlan,
    limit: Capacity,
    *,
    max_batch: int,
    rng: random.Random,
    on_row: Callable[[str], None],
) -> list[DecodeRow]:
    """The decode rows that fit into the worker's limits; what is left out is said to `on_row`."""
    rows = []
    for context in plan.contexts:
        for batch in plan.batches:
            name = f"decode {batch} x {context}"
            longest = context + plan.steps
            if (
                batch > max_batch
                or longest > limit.context_tokens
                or batch * longest > limit.kv_tokens
            ):
                on_row(f"{name}: left out, more than the worker takes")
                continue
            found = []
            try:
                for _ in range(plan.repeats):
                    # In the middle of the output the context is the one that the row says.
                    n_prompt = max(1, context - plan.steps // 2)
                    prompts = [fresh(n_prompt, rng) for _ in range(batch)]
                    step_s = itl_s(await bench.decode(prompts, plan.steps))
                    if step_s is not None:
                        found.append(step_s)
            except UsageError as error:
                on_row(f"{name}: left out, {error}")
                continue
            if not found:
                on_row(f"{name}: left out, the batch was never whole for {MIN_STEPS} steps")
                continue
            rows.append(DecodeRow(batch, context, median(found) * 1000.0))
            on_row(f"{name}: {rows[-1].itl_ms:.3f} ms")
    return rows


def itl_s(streams: Sequence[Stream]) -> float | None:
    """Mean seconds of a step while all of these streams were decoding; None: for too few steps."""
    start_s = max(stream.ticks[0].at_s for stream in streams)
    end_s = min(stream.ticks[-1].at_s for stream in streams)
    means = []
    for stream in streams:
        inside = [tick for tick in stream.ticks if start_s <= tick.at_s <= end_s]
        n_tokens = sum(tick.n_tokens for tick in inside[1:])
        if n_tokens < MIN_STEPS:
            return None
        means.append((inside[-1].at_s - inside[0].at_s) / n_tokens)
    return fmean(means)


def fresh(n_tokens: int, rng: random.Random) -> list[int]:
    """Token ids that no prompt had before, from a range that every vocabulary has."""
    return [rng.randrange(100, 20_000) for _ in range(n_tokens)]


def measured_content(
    prefill: Sequence[PrefillRow],
    decode: Sequence[DecodeRow],
    *,
    model: str,
    system: str,
    engine: str,
    source: str,
    tp: int,
    kv_capacity_tokens: int,
    kv_bytes_per_token: int,
) -> dict[str, object]:
    """The content of a profile file with these rows. Raises `UsageError` when there are none of a kind."""
    for kind, rows in (("prefill", prefill), ("decode", decode)):
        if not rows:
            raise UsageError(f"no {kind} row could be measured")
        if any(not 0.0 < row[2] < math.inf for row in rows):
            raise UsageError(f"a {kind} row took no time at all: the worker is not a real one")
    return {
        "schema": 1,
        "model": model,
        "system": system,
        "engine": engine,
        "source": source,
        "prefill_columns": ["new_tokens", "cached_tokens", "ms"],
        "decode_columns": ["batch_size", "context_tokens", "itl_ms"],
        "kv_bytes_per_token": kv_bytes_per_token,
        "tp": {
            str(tp): {
                "kv_capacity_tokens": kv_capacity_tokens,
                "prefill": [list(_rounded(row, 4)) for row in prefill],
                "decode": [list(_rounded(row, 5)) for row in decode],
            }
        },
    }


def _rounded(row: tuple[int, int, float], digits: int) -> Iterator[float]:
    x, y, ms = row
    yield from (x, y, round(ms, digits))
