"""What a decision takes, beside a plain loop over the same rows.

A decision is what the dispatcher does to choose a prefill worker for a request without targets: look at the
pool, which asks the prefix index, and choose. Every prompt is cached to four depths, a quarter of the
workers each; every worker has requests of other prompts in flight. Memory is managed as in the gateway
process. `p99_on_cpu` is without what other processes took of the machine meanwhile, and what is bounded of
the tail.
Whole arrivals, of a pair of workers by its targets and with leases, are those of `arrivals`.

Bounds: 60 us for a prefill stage of 256 workers and 8k tokens; case MEM-09 (512 workers against 16); those
of `arrivals`.

python -m bench.decisions 256 8192    with so many workers and tokens, as JSON
"""

import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count, cycle, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import arrivals
from slagate.pools.fleet.fleet import Fleet
from slagate.pools.fleet.pool import Pool
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.pair_key import PairKey
from slagate.pools.prefix.overlap import Prompt
from slagate.router.request.sla import Sla
from slagate.router.scheduling.policy import choose, choose_stage
from slagate.router.scheduling.score import RoutingRequest
from slagate.workers.runtime.clock import monotonic_s
from support.builders import MODEL, PROFILE, fleet

BLOCK_TOKENS = 32
ROUNDS = 10
DECISIONS = 300
REFERENCES = 15

N_WORKERS, N_TOKENS = 256, 8192
SIZES = (
    *((n, N_TOKENS) for n in (16, 64, 256, 512, 1024)),
    *((N_WORKERS, n) for n in (1024, 32_768, 131_072)),
    (1024, 131_072),
)
MAX_PAIRS = 2_600_000
MAX_PROMPTS = 16

BOUND_US = 60.0
BOUND_GROWTH = 8.0
BOUND_P99_US = 2000.0
"""MEM-09: p50 with 512 workers against 16, and `p99_on_cpu` with 512."""


def measure(folder: Path) -> dict[str, Any]:
    """Microseconds by number of workers and tokens."""
    del folder
    sizes = {
        f"{n_workers} workers, {n_tokens} tokens": _in_a_process(n_workers, n_tokens)
        for n_workers, n_tokens in SIZES
    }
    bounded = sizes[f"{N_WORKERS} workers, {N_TOKENS} tokens"]["prefill_us"]["p50"]
    few, many = (sizes[f"{n} workers, {N_TOKENS} tokens"]["prefill_us"] for n in (16, 512))
    growth = round(many["p50"] / few["p50"], 2)
    checks = {
        f"p50 {bounded} us, bound {BOUND_US}": bounded <= BOUND_US,
        f"MEM-09: 512 workers take {growth} times what 16 do": growth <= BOUND_GROWTH,
        f"MEM-09: p99 {many['p99_on_cpu']} us with 512 workers": many["p99_on_cpu"] <= BOUND_P99_US,
    }
    arrivals_us = {
        name: in_us([Taken(*each) for each in rounds])
        for name, rounds in arrivals.seconds_of_rounds().items()
    }
    checks |= arrivals.checks_of(arrivals_us)
    return {
        "rounds": ROUNDS,
        "growth_16_to_512": growth,
        "sizes": sizes,
        "arrivals_us": arrivals_us,
        "missed": [f"decision: {what}" for what, holds in checks.items() if not holds],
    }


def _in_a_process(n_workers: int, n_tokens: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.decisions", str(n_workers), str(n_tokens)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


class Scene(NamedTuple):
    """A busy fleet, and the prompts that its workers have cached."""

    fleet: Fleet
    prompts: list[Prompt]
    rng: random.Random

    @property
    def pool(self) -> Pool:
        """Of prefill workers."""
        return self.fleet.pools["prefill"]


def busy_fleet(n_workers: int, n_tokens: int) -> Scene:
    """As many workers a stage."""
    pools = {
        stage: {"workers": [f"{stage}{n}:1" for n in range(n_workers)], "profile": PROFILE, "tp": 1}
        for stage in ("prefill", "decode")
    }
    n_prompts = max(1, min(MAX_PROMPTS, MAX_PAIRS // (n_workers * n_tokens // BLOCK_TOKENS)))
    numbers = np.random.default_rng(1)
    prompts = [_prompt(numbers, n_tokens) for _ in range(n_prompts)]
    scene = Scene(fleet("disagg", pools=pools), prompts, random.Random(1))
    _cache(scene, numbers)
    _keep_busy(scene, numbers)
    return scene


def _prompt(numbers: np.random.Generator, n_tokens: int) -> Prompt:
    return Prompt(numbers.integers(0, 128_000, n_tokens, dtype=np.uint32).tobytes())


def _cache(scene: Scene, numbers: np.random.Generator) -> None:
    """Each prompt to a quarter, a half, three quarters of it, and whole, and there another turn's block.

    So a prompt goes through 4 runs, as one that was added to turn by turn does.
    """
    overlaps = scene.pool.overlaps
    assert overlaps is not None
    index, names = overlaps.index_of(BLOCK_TOKENS), count(1)
    holders = [index.join() for _ in scene.pool.members]
    for row, holder in enumerate(holders):
        overlaps.set_holder(row, holder, block_tokens=BLOCK_TOKENS)
    for prompt in scene.prompts:
        n_blocks = prompt.n_tokens // BLOCK_TOKENS
        hashes = list(islice(names, n_blocks))
        other = _prompt(numbers, BLOCK_TOKENS).tokens
        for part in range(4):
            cuts = [n_blocks * quarter // 4 for quarter in range(part + 2)]
            for holder in holders[part::4]:
                for start, end in pairwise(cuts):
                    above = hashes[start - 1] if start else None
                    tokens = prompt.tokens[start * BLOCK_TOKENS * 4 : end * BLOCK_TOKENS * 4]
                    index.stored(holder, hashes[start:end], above, tokens)
                index.stored(holder, [next(names)], hashes[cuts[-1] - 1], other)


def _keep_busy(scene: Scene, numbers: np.random.Generator) -> None:
    """Two requests each, of prompts of their own, after so many that nobody counts as starved or new.

    All were promised what their class asks for. The engines compute 8192 tokens in a step.
    """
    for pool in scene.fleet.pools.values():
        for _ in range(12):
            for row in range(len(pool.members)):
                pool.lease(row, Work()).release()
        for row in range(len(pool.members)):
            pool.table.set_step_tokens(row, 8192)
            for _ in range(2):
                work = Work(1000, 0.1 * scene.rng.randrange(7), due_s=monotonic_s() + 1e6)
                if pool.stage is Stage.DECODE:
                    work = Work(context_tokens=1000, itl_limit_s=0.05)
                pool.lease(row, work, _prompt(numbers, 1000))


def mix_kinds(scene: Scene) -> None:
    """Half of the workers of each stage, by chance, have another type of KV than the others."""
    for pool in scene.fleet.pools.values():
        for row in range(len(pool.members)):
            pool.table.set_pair(row, PairKey(kv_dtype=scene.rng.choice(["bfloat16", "fp8"])))


def prefill_decision(scene: Scene) -> Callable[[Prompt], Any]:
    """One stage's, as a call."""
    grid, pool, rng = scene.fleet.grids[Stage.PREFILL], scene.pool, scene.rng
    ask = RoutingRequest(MODEL, scene.prompts[0].n_tokens, Sla())

    def decide(prompt: Prompt) -> Any:
        return choose_stage(
            Stage.PREFILL, ask, grid, {"prefill": pool.snapshot(prompt)}, draw=rng.random()
        )

    return decide


def both_decisions(scene: Scene) -> Callable[[Prompt], Any]:
    """Of prefill and of decode."""
    of, rng = scene.fleet, scene.rng
    ask = RoutingRequest(MODEL, scene.prompts[0].n_tokens, Sla())
    return lambda prompt: choose(ask, of.grids, of.views(prompt), rng=rng)


class _Row:
    """What a balancer without arrays has of a worker."""

    def __init__(self, scene: Scene, row: int) -> None:
        view = scene.pool.snapshot().view(row)
        self.models = view.models
        self.is_ready = True
        self.inflight, self.max_inflight = view.worker_inflight, view.max_inflight
        self.queued_tokens, self.max_queued_tokens = view.queued_tokens, view.max_queued_tokens
        self.queued_s, self.foreign_s = view.queued_s, view.foreign_s
        self.last_chosen = view.last_chosen


def plain_loop(scene: Scene) -> Callable[[Prompt], Any]:
    """The same choice of a prefill worker from the same index, row by row."""
    rows = [_Row(scene, row) for row in range(len(scene.pool.members))]
    overlaps = scene.pool.overlaps
    assert overlaps is not None
    index = overlaps.index_of(BLOCK_TOKENS)
    bits = np.arange(len(rows), dtype=np.int32)
    estimator = scene.pool.estimator.frozen
    isl_tokens = scene.prompts[0].n_tokens

    def decide(prompt: Prompt) -> int:
        depths = index.match(prompt.tokens, prompt.root).depths(bits).tolist()
        best, best_key = -1, (float("inf"), 0)
        for at, row in enumerate(rows):
            if not row.is_ready or MODEL not in row.models or row.inflight >= row.max_inflight:
                continue
            if row.queued_tokens >= row.max_queued_tokens:
                continue
            cached = min(depths[at] * BLOCK_TOKENS, isl_tokens - 1)
            work_s = row.queued_s + row.foreign_s + estimator.work_s(isl_tokens - cached, cached)
            key = (estimator.ttft_s(work_s), row.last_chosen)
            if key < best_key:
                best, best_key = at, key
        return best

    return decide


def _at(n_workers: int, n_tokens: int) -> dict[str, Any]:
    """Interleaved rounds of each way to decide."""
    scene = busy_fleet(n_workers, n_tokens)
    # As the gateway does once it serves.
    gc.collect()
    gc.freeze()
    ways = {
        "prefill": (prefill_decision(scene), DECISIONS),
        "plain_loop": (plain_loop(scene), REFERENCES),
    }
    first = scene.prompts[0]
    assert ways["prefill"][0](first).row == ways["plain_loop"][0](first)
    rounds: dict[str, list[Taken]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name in sorted(ways, reverse=bool(number % 2)):
            decide, n = ways[name]
            rounds[name].append(_timed(decide, islice(cycle(scene.prompts), n)))
    result = {f"{name}_us": in_us(timed) for name, timed in rounds.items()}
    ratio = result["prefill_us"]["p50"] / result["plain_loop_us"]["p50"]
    result["prefill_to_plain_loop"] = round(ratio, 3)
    # Once more, with all prompts expected where they were just sent.
    for at, prompt in enumerate(scene.prompts):
        scene.pool.lease(at % n_workers, Work(), prompt)
    timed = [_timed(ways["prefill"][0], islice(cycle(scene.prompts), DECISIONS)) for _ in range(3)]
    result["prefill_just_sent_us"] = in_us(timed)
    return result


class Taken:
    """Seconds that decisions took, by the clock and of the CPU."""

    def __init__(self, seconds: Iterable[float] = (), cpu_s: Iterable[float] = ()) -> None:
        self.seconds = list(seconds)
        self.cpu_s = list(cpu_s)

    def time(self, decide: Callable[[Prompt], Any], prompt: Prompt) -> None:
        """Make a decision."""
        cpu_s, started_s = time.thread_time(), time.perf_counter()
        decide(prompt)
        self.seconds.append(time.perf_counter() - started_s)
        self.cpu_s.append(time.thread_time() - cpu_s)


def _timed(decide: Callable[[Prompt], Any], prompts: Iterable[Prompt]) -> Taken:
    taken = Taken()
    for prompt in prompts:
        taken.time(decide, prompt)
    return taken


def in_us(rounds: Sequence[Taken]) -> dict[str, Any]:
    """p50 and p99 over all rounds, and the least and the greatest p50 of a round."""
    medians = [round(statistics.median(taken.seconds) * 1e6, 1) for taken in rounds]
    return {
        **percentiles_us([each for taken in rounds for each in taken.seconds]),
        "p99_on_cpu": percentiles_us([each for taken in rounds for each in taken.cpu_s])["p99"],
        "p50_of_rounds": [min(medians), max(medians)],
    }


def percentiles_us(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": round(cuts[49] * 1e6, 1), "p99": round(cuts[98] * 1e6, 1)}


if __name__ == "__main__":
    print(json.dumps(_at(int(sys.argv[1]), int(sys.argv[2]))))
