"""The prefix index beside `RadixTree` of ai-dynamo-runtime on one trace in one process, and by itself.

`python -m bench prefix` is everything; `python -m bench.prefix_index 5000000` is memory and pauses at so
many (worker, block) pairs, as JSON. A full collection is one of the pauses: it holds up the event
loop for as long as it takes to walk what the index is made of.
"""

import gc
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bench.prefix_other import OtherIndex, available
from bench.prefix_trace import BLOCK_TOKENS, DECODED_BLOCKS, Fleet, Op, Query, Removed, Stored
from slagate.pools.prefix.claims import DEVICE
from slagate.pools.prefix.index import PrefixIndex
from slagate.proto import openengine_pb2 as oe

N_WORKERS = 64
CAPACITY_BLOCKS = 2000
N_SESSIONS = 500
N_TURNS = 2500
N_MEASURED_TURNS = 1500
ROUNDS = 5
SEGMENT_OPS = 400
PAUSE_RUNS = 3
N_PROMPTS = 16

BOUND_QUERY = 3.5
BOUND_EVENTS = 1.5
BOUND_PAIR_BYTES = 200
BOUND_PAUSE_MS = 10.0


def measure(folder: Path) -> dict[str, Any]:
    """Nanoseconds per block of both, medians of rounds; bytes, pauses, growth."""
    del folder
    if not available():
        missed = ["prefix: ai-dynamo-runtime is not installed (make bench installs it)"]
        return {"missed": missed}
    result = _beside_the_other()
    result["at_1m_pairs"] = small = _in_a_process(1_000_000)
    # The operations are the same each time, so a pause of theirs comes back; one of the machine's does not.
    runs = sorted(
        (_in_a_process(5_000_000) for _ in range(PAUSE_RUNS)),
        key=lambda run: run["longest_pause_ms"],
    )
    result["at_5m_pairs"] = large = runs[len(runs) // 2]
    large["longest_pause_ms_of_runs"] = [run["longest_pause_ms"] for run in runs]
    result["growth"] = {"holders": _by_holders(), "tokens": _by_tokens()}
    missed = result["missed"]
    if small["pair_bytes"] > BOUND_PAIR_BYTES:
        missed.append(f"prefix: {small['pair_bytes']} bytes per pair, bound {BOUND_PAIR_BYTES}")
    if large["longest_pause_ms"] > BOUND_PAUSE_MS:
        missed.append(f"prefix: pause of {large['longest_pause_ms']} ms, bound {BOUND_PAUSE_MS}")
    return result


class OurIndex:
    """Prepared operations are argument-less calls. `parsed`: a query begins with a parsed request."""

    def __init__(self, n_workers: int, *, parsed: bool = False) -> None:
        self.index = PrefixIndex(BLOCK_TOKENS)
        self.holders = [self.index.join() for _ in range(n_workers)]
        self.bits = np.array([holder.bit for holder in self.holders], np.int32)
        self._parsed = parsed

    def prepared(self, op: Op) -> Callable[[], Any]:
        index, bits = self.index, self.bits
        if isinstance(op, Query):
            tokens = op.tokens
            if not self._parsed:
                return lambda: index.match(tokens).both_depths(bits)
            ids = oe.TokenIds(ids=np.frombuffer(tokens, np.uint32).tolist()).ids
            return lambda: index.match(array("I", ids[:]).tobytes()).both_depths(bits)
        holder = self.holders[op.worker]
        if isinstance(op, Removed):
            gone = op.hashes
            return lambda: index.removed(holder, gone, tier=DEVICE)
        _, parent, hashes, tokens = op
        return lambda: index.stored(holder, hashes, parent, tokens)


def _kind(op: Op) -> str:
    if isinstance(op, Stored):
        return "stored_one" if len(op.hashes) == 1 else "stored_many"
    return "removed" if isinstance(op, Removed) else "query"


def _n_blocks(op: Op) -> int:
    return len(op.tokens) // (BLOCK_TOKENS * 4) if isinstance(op, Query) else len(op.hashes)


def _beside_the_other() -> dict[str, Any]:
    """The same trace through each, segment by segment in turn, with every answer compared."""
    fleet = Fleet(1, n_workers=N_WORKERS, capacity_blocks=CAPACITY_BLOCKS)
    warm_up = list(fleet.turns(N_TURNS, n_sessions=N_SESSIONS))
    trace = list(fleet.turns(N_MEASURED_TURNS, n_sessions=N_SESSIONS))
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    blocks: dict[str, int] = defaultdict(int)
    for op in trace:
        blocks[_kind(op)] += _n_blocks(op)
    for number in range(ROUNDS):
        sides = {
            "bytes": OurIndex(N_WORKERS),
            "parsed": OurIndex(N_WORKERS, parsed=True),
            "other": OtherIndex(),
        }
        for side in sides.values():
            for op in warm_up:
                if not isinstance(op, Query):
                    side.prepared(op)()
        spent: dict[str, dict[str, float]] = {name: defaultdict(float) for name in sides}
        for start in range(0, len(trace), SEGMENT_OPS):
            segment = trace[start : start + SEGMENT_OPS]
            answers = {}
            for name in sorted(sides, reverse=bool((start + number) % 2)):
                answers[name] = _run(sides[name], segment, spent[name])
            for ours, theirs in zip(answers["bytes"], answers["other"], strict=True):
                scores = {worker: depth for (worker, _), depth in theirs.items()}
                assert {at: int(n) for at, n in enumerate(ours[0]) if n} == scores
        for name, kinds in spent.items():
            for kind, seconds in kinds.items():
                rates[name][kind].append(seconds / blocks[kind] * 1e9)
            events_s = sum(seconds for kind, seconds in kinds.items() if kind != "query")
            n_event_blocks = sum(n for kind, n in blocks.items() if kind != "query")
            rates[name]["events"].append(events_s / n_event_blocks * 1e9)
    figures: dict[str, Any] = {
        "rounds": ROUNDS,
        "decoded_blocks_per_turn": DECODED_BLOCKS,
        "ns_per_block": {
            name: {kind: round(statistics.median(values), 1) for kind, values in kinds.items()}
            for name, kinds in rates.items()
        },
        "ns_per_block_min_max": {
            name: {kind: [round(min(v), 1), round(max(v), 1)] for kind, v in kinds.items()}
            for name, kinds in rates.items()
        },
        "blocks": dict(blocks),
        "missed": [],
    }
    bounds = (
        ("bytes", "query", BOUND_QUERY),
        ("parsed", "query", 0.0),
        ("bytes", "events", BOUND_EVENTS),
    )
    for name, kind, bound in bounds:
        ratios = [
            theirs / ours
            for ours, theirs in zip(rates[name][kind], rates["other"][kind], strict=True)
        ]
        figures[f"{kind}_{name}_times_faster"] = times = round(statistics.median(ratios), 2)
        if times < bound:
            figures["missed"].append(
                f"prefix: {kind} from {name} {times} times faster, bound {bound}"
            )
    return figures


def _run(side: Any, ops: Iterable[Op], spent: dict[str, float]) -> list[Any]:
    """Run operations, add their seconds by kind, and return what the queries found."""
    calls = [(_kind(op), side.prepared(op)) for op in ops]
    clock = time.perf_counter
    found = []
    for kind, call in calls:
        started_s = clock()
        answer = call()
        spent[kind] += clock() - started_s
        if kind == "query":
            found.append(answer)
    return found


def _in_a_process(n_pairs: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.prefix_index", str(n_pairs)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class _Pauses:
    """The longest single call of each kind, in CPU time: other processes are not what is measured."""

    def __init__(self) -> None:
        self.longest_s: dict[str, float] = defaultdict(float)
        self.total_s = 0.0

    def run(self, kind: str, call: Callable[[], Any]) -> Any:
        started_s = time.thread_time()
        answer = call()
        seconds = time.thread_time() - started_s
        self.total_s += seconds
        self.longest_s[kind] = max(self.longest_s[kind], seconds)
        return answer


def _at(n_pairs: int) -> dict[str, Any]:
    """Bytes and pauses of an index of this size: filled, a fifth of it replaced, one worker lost."""
    fleet = Fleet(2, n_workers=N_WORKERS, capacity_blocks=None)
    build = list(fleet.fill(n_pairs))
    churn: list[Op] = []
    for worker in range(N_WORKERS):
        for _ in range(max(1, n_pairs // N_WORKERS // 5 // 50)):
            churn += fleet.drain(worker, 50)
    churn += fleet.fill(n_pairs // 5)
    ours = OurIndex(N_WORKERS)
    pauses = _Pauses()
    # What the engines did is not what is weighed, nor what a collection should have to walk.
    gc.collect()
    gc.freeze()
    before = _resident_bytes()
    for op in build:
        pauses.run(f"build_{_kind(op)}", ours.prepared(op))
    n_built = ours.index.n_pairs
    pair_bytes = (_resident_bytes() - before) / n_built
    estimate = ours.index.n_bytes_estimate / n_built
    build_ns = pauses.total_s / n_built * 1e9
    for op in churn:
        pauses.run(f"churn_{_kind(op)}", ours.prepared(op))
    churned_bytes = (_resident_bytes() - before) / ours.index.n_pairs
    pauses.run("leave", lambda: ours.index.leave(ours.holders[0]))
    while pauses.run("sweep", ours.index.sweep):
        pass
    pauses.run("full_collection", gc.collect)
    return {
        "pairs": n_built,
        "pair_bytes": round(pair_bytes, 1),
        "pair_bytes_by_estimate": round(estimate, 1),
        "pair_bytes_after_churn": round(churned_bytes, 1),
        "build_ns_per_block": round(build_ns),
        "longest_ms": {kind: round(s * 1e3, 2) for kind, s in sorted(pauses.longest_s.items())},
        "longest_pause_ms": round(max(pauses.longest_s.values()) * 1e3, 2),
        "full_collection_ms": round(pauses.longest_s["full_collection"] * 1e3, 2),
        "runs": ours.index.trie.n_runs,
    }


def _query_us(n_holders: int, n_tokens: int) -> dict[str, float]:
    """Median microseconds of a query over an index of many prompts, each held to 4 different depths.

    A prompt goes through 4 runs, as what was added in a session's later turns does where others branched
    off before it.
    """
    ours = OurIndex(n_holders)
    index, bits = ours.index, ours.bits
    n_blocks = n_tokens // BLOCK_TOKENS
    numbers = np.random.default_rng(3)
    name = itertools.count(1)
    prompts = []
    for _ in range(N_PROMPTS):
        ids = numbers.integers(0, 128_000, n_tokens, dtype=np.uint32)
        other = numbers.integers(0, 128_000, BLOCK_TOKENS, dtype=np.uint32).tobytes()
        tokens = ids.tobytes()
        prompts.append(tokens)
        hashes = [next(name) for _ in range(n_blocks)]
        size = BLOCK_TOKENS * 4
        for part in range(4):
            end = n_blocks * (part + 1) // 4
            for holder in ours.holders[part::4]:
                for earlier in range(part + 1):
                    start, stop = n_blocks * earlier // 4, n_blocks * (earlier + 1) // 4
                    above = hashes[start - 1] if earlier else None
                    index.stored(
                        holder, hashes[start:stop], above, tokens[start * size : stop * size]
                    )
                index.stored(holder, [next(name)], hashes[end - 1], other)
    whole, match_only = [], []
    for tokens in itertools.islice(itertools.cycle(prompts), 20 * N_PROMPTS):
        started_s = time.perf_counter()
        match = index.match(tokens)
        matched_s = time.perf_counter()
        depths = match.both_depths(bits)
        whole.append(time.perf_counter() - started_s)
        match_only.append(matched_s - started_s)
        assert len(np.unique(depths)) == 4
    return {
        "match_us": round(statistics.median(match_only) * 1e6, 1),
        "with_depths_us": round(statistics.median(whole) * 1e6, 1),
    }


def _by_holders() -> dict[str, Any]:
    return {str(n): _query_us(n, 8192) for n in (16, 64, 256, 1024)}


def _by_tokens() -> dict[str, Any]:
    return {str(n): _query_us(N_WORKERS, n) for n in (1024, 8192, 32_768, 131_072)}


if __name__ == "__main__":
    print(json.dumps(_at(int(sys.argv[1]))))
