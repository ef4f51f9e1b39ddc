"""What the simulated engine costs: decode tokens a second, and a trace on 16 workers in virtual time.

The trace is the packaged sample, or the file that `SLAGATE_BENCH_TRACE` names: an hour of one fits the
bound. Eight prefill engines, chosen by conversation, hand over to eight decode engines, the least busy
one; KV events and stats are on and read by nobody slower than once a virtual second. Progress goes to
stderr.
"""

import asyncio
import gc
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from slagate.router.loadgen.trace import TraceRequest, load_trace, prompt_tokens
from slagate.workers.kv_transfer.memory import MemoryExchange
from slagate.workers.runtime import virtual_loop
from slagate.workers.sim.kv_cache.blocks import continuation
from slagate.workers.sim.llm import SimLLM
from slagate.workers.sim.request import DisaggregatedParams, SamplingParams
from support.engine.sim_llm import MODEL, llm, until

ROUNDS = 5
RUNNING = 32
ISL_TOKENS = 500
OSL_TOKENS = 1000
BOUND_TOKENS_PER_S = 50_000

WORKERS_PER_STAGE = 8
BOUND_TRACE_S = 300.0
VOCAB = 128_256
EVENTS = {"event_buffer_max_size": 1_000_000}
CHECKED_ONE_IN = 50


def measure(folder: Path) -> dict[str, Any]:
    """Tokens per CPU second of one engine; CPU seconds of the trace."""
    del folder
    rates = [virtual_loop.run(_decode_rate) for _ in range(ROUNDS)]
    path = os.environ.get("SLAGATE_BENCH_TRACE")
    trace = load_trace(path)
    # TensorRT-LLM's own setting of its engine processes: events are dicts by the million.
    gc.set_threshold(20_000)
    started_s = time.process_time()
    n_wrong, n_tokens, cached, virtual_s = virtual_loop.run(_replay, trace)
    trace_s = time.process_time() - started_s
    rate = statistics.median(rates)
    checks = {
        f"{rate:.0f} decode tokens/s": rate >= BOUND_TOKENS_PER_S,
        f"the trace took {trace_s:.0f} s of CPU": trace_s < BOUND_TRACE_S,
        f"{n_wrong} requests had wrong tokens": n_wrong == 0,
    }
    return {
        "decode_tokens_per_cpu_s": round(rate),
        "decode_min_max": [round(min(rates)), round(max(rates))],
        "trace": "packaged sample" if path is None else Path(path).name,
        "trace_requests": len(trace),
        "trace_virtual_s": round(virtual_s, 1),
        "trace_output_tokens": n_tokens,
        "trace_cached_prompt_tokens": cached,
        "trace_cpu_s": round(trace_s, 1),
        "missed": [f"double: {what}" for what, holds in checks.items() if not holds],
    }


async def _decode_rate() -> float:
    """Decode tokens per CPU second with `RUNNING` requests, KV events on."""
    engine = llm(kv_cache_config=EVENTS)
    sampling = SamplingParams(max_tokens=OSL_TOKENS, ignore_eos=True)
    results = [
        engine.generate_async(
            [(number * 31 + at) % 4000 for at in range(ISL_TOKENS)], sampling, streaming=True
        )
        for number in range(RUNNING)
    ]
    for result in results:
        await result.__anext__()
    started_s = time.process_time()
    for result in results:
        await result.aresult()
    used_s = time.process_time() - started_s
    return RUNNING * (OSL_TOKENS - 1) / used_s


async def _replay(trace: list[TraceRequest]) -> tuple[int, int, int, float]:
    """Wrong requests, output tokens, prompt tokens from cache, virtual seconds."""
    exchange = MemoryExchange()
    stages = [
        [
            llm(
                transport=exchange.transport(),
                vocab_size=VOCAB,
                end_id=VOCAB - 1,
                instance_salt=bytes([stage, number]),
                kv_cache_config=EVENTS,
            )
            for number in range(WORKERS_PER_STAGE)
        ]
        for stage in range(2)
    ]
    loop = asyncio.get_running_loop()
    tally = {"wrong": 0, "tokens": 0, "cached": 0}
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        line = bar.add_task("Replaying in virtual time", total=len(trace))

        async def serve(number: int, request: TraceRequest) -> None:
            prompt = prompt_tokens(request, VOCAB).tolist()
            prefill = stages[0][request.conversation % WORKERS_PER_STAGE]
            tokens, cached = await _one(prefill, stages[1], prompt, request.osl_tokens)
            tally["tokens"] += len(tokens)
            tally["cached"] += cached
            if number % CHECKED_ONE_IN == 0:
                right = continuation(
                    prompt, request.osl_tokens, model=MODEL, block_tokens=32, vocab_size=VOCAB
                )
                tally["wrong"] += tokens != right
            elif len(tokens) != request.osl_tokens:
                tally["wrong"] += 1
            bar.advance(line)

        reading = [asyncio.ensure_future(_read(engine)) for stage in stages for engine in stage]
        serving = []
        for number, request in enumerate(trace):
            await until(max(loop.time(), (request.timestamp_ms - trace[0].timestamp_ms) / 1000))
            serving.append(asyncio.ensure_future(serve(number, request)))
        await asyncio.gather(*serving)
        ended_s = loop.time()
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    return tally["wrong"], tally["tokens"], tally["cached"], ended_s


async def _one(
    prefill: SimLLM, decoders: list[SimLLM], prompt: list[int], n_tokens: int
) -> tuple[list[int], int]:
    sampling = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
    ready = await prefill.generate_async(
        prompt, sampling, disaggregated_params=DisaggregatedParams(request_type="context_only")
    )
    params = ready.outputs[0].disaggregated_params
    assert params is not None
    decode = min(decoders, key=lambda engine: engine.n_running + engine.n_queued)
    result = await decode.generate_async(
        prompt,
        sampling,
        streaming=True,
        disaggregated_params=replace(params, request_type="generation_only"),
    )
    return result.outputs[0].token_ids, ready.cached_tokens


async def _read(engine: SimLLM) -> None:
    """Read what a worker would: every event, and the newest stats."""
    loop = asyncio.get_running_loop()
    while True:
        await until(loop.time() + 1.0)
        if engine.n_running or engine.n_queued:
            engine.get_kv_cache_events(0)
            engine.get_stats(0)
