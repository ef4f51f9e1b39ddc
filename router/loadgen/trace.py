"""A request trace as requests: prompts, times and targets.

Arrivals are open loop: they follow the trace whatever the fleet does, so a turn of a conversation may
arrive before the answer to the turn ahead of it. A closed loop would send less when the fleet is slow,
and so hide that.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slagate.workers.runtime.usage import UsageError

PACKAGED = "conversation-sample.jsonl"
BLOCK_TOKENS = 512
"""Prompt tokens that one id of `hash_ids` stands for, in every Mooncake trace."""

# SplitMix64, as published by Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
# OOPSLA 2014. Integer arithmetic only, so the tokens are the same on every machine and numpy.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class TraceError(UsageError):
    """A trace that cannot be used; the text names the file, the line and the field."""


class TraceRequest(NamedTuple):
    """One request of a trace in Mooncake's format."""

    timestamp_ms: float  # from the start of the trace
    isl_tokens: int
    osl_tokens: int
    hash_ids: tuple[int, ...]  # one for each 512 prompt tokens, the last maybe for fewer

    @property
    def conversation(self) -> int:
        """The second block: the first is a system prompt, which unrelated conversations share."""
        return self.hash_ids[min(1, len(self.hash_ids) - 1)]


class SlaClass(NamedTuple):
    """A class of requests, with its targets in ms."""

    name: str
    ttft_ms: int
    itl_ms: int


SLA_CLASSES = (
    SlaClass("interactive", 1000, 20),
    SlaClass("standard", 4000, 50),
    SlaClass("batch", 20_000, 200),
)


class Arrival(NamedTuple):
    """One request of a replay; `arrival_s` counts from its first request."""

    arrival_s: float
    trace: TraceRequest
    sla: SlaClass


def load_trace(path: str | Path | None = None) -> list[TraceRequest]:
    """The trace at `path`, or the packaged sample. Raises `TraceError`."""
    if path is None:
        source = PACKAGED
        raw = (resources.files("slagate.configs") / "traces" / PACKAGED).read_bytes()
    else:
        source = str(path)
        try:
            raw = Path(path).read_bytes()
        except OSError as error:
            raise TraceError(f"{source}: {error.strerror}") from error
    try:
        lines = raw.decode().splitlines()
    except UnicodeDecodeError as error:
        raise TraceError(f"{source}: is not UTF-8 (byte {error.start})") from None
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, start=1):
        where = f"{source}:{number}"
        request = _request(line, where)
        if requests and request.timestamp_ms < requests[-1].timestamp_ms:
            raise TraceError(f"{where}: timestamp: is before that of the line above")
        requests.append(request)
    if not requests:
        raise TraceError(f"{source}: holds no request")
    return requests


def _request(line: str, where: str) -> TraceRequest:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise TraceError(f"{where}: must be an object")
    timestamp = row.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise TraceError(f"{where}: timestamp: must be a number of ms")
    if not (math.isfinite(timestamp) and timestamp >= 0):
        raise TraceError(f"{where}: timestamp: must be finite and not negative (got {timestamp})")
    isl_tokens, osl_tokens = (
        _length(row, name, where) for name in ("input_length", "output_length")
    )
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(h) is int and 0 <= h < 2**64 for h in ids):
        raise TraceError(f"{where}: hash_ids: must be a list of integers from 0 to 2^64 - 1")
    n_blocks = -(-isl_tokens // BLOCK_TOKENS)
    if len(ids) != n_blocks:
        raise TraceError(
            f"{where}: hash_ids: {isl_tokens} prompt tokens have {n_blocks} blocks (got {len(ids)} ids)"
        )
    return TraceRequest(timestamp, isl_tokens, osl_tokens, tuple(ids))


def _length(row: dict[str, object], name: str, where: str) -> int:
    value = row.get(name)
    if type(value) is not int or value < 1:
        raise TraceError(f"{where}: {name}: must be a positive integer (got {json.dumps(value)})")
    return value


def splitmix64(seeds: Sequence[int], count: int) -> npt.NDArray[np.uint64]:
    """The first `count` outputs of SplitMix64 for each seed, shape u64[len(seeds), count]."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * _GAMMA
    z = np.array(seeds, dtype=np.uint64).reshape(-1, 1) + steps
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    words: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return words


def prompt_tokens(request: TraceRequest, vocab_size: int) -> npt.NDArray[np.uint32]:
    """The prompt, u32[isl_tokens], each below `vocab_size`.

    A block is a function of its id alone: token `j` is output `j` of SplitMix64 seeded with the id,
    modulo the size of the vocabulary. Equal ids are equal tokens, a partial block the start of a whole.
    """
    words = splitmix64(request.hash_ids, BLOCK_TOKENS).reshape(-1)[: request.isl_tokens]
    tokens: npt.NDArray[np.uint32] = (words % np.uint64(vocab_size)).astype(np.uint32)
    return tokens


def arrivals(
    trace: Sequence[TraceRequest], *, compression: float, rng: random.Random
) -> Iterator[Arrival]:
    """Yield the requests of a replay of `trace`, `compression` times as fast as it was recorded.

    All turns of a conversation are of one class. Conversations draw their classes in rounds of one of each,
    in random order, so that each class gets a third of them.
    """
    classes: dict[int, SlaClass] = {}
    remaining: list[SlaClass] = []
    for request in trace:
        if request.conversation not in classes:
            if not remaining:
                remaining = rng.sample(SLA_CLASSES, len(SLA_CLASSES))
            classes[request.conversation] = remaining.pop()
        arrival_s = (request.timestamp_ms - trace[0].timestamp_ms) / 1000 / compression
        yield Arrival(arrival_s, request, classes[request.conversation])
