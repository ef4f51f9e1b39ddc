"""What decides whether a prefill worker can hand its KV cache over to a decode worker.

TensorRT-LLM's C++ transceiver refuses another data type, block size or number of layers
(`inquireSupport` in cacheFormatter.cpp and mlaCacheFormatter.cpp, ids 52388011155 and 56727280810), its
Python one another element size or block size (`_check_peer_compatible` in peer.py, id 36372961593), and
no transport talks to another. Tensor and pipeline parallel sizes may differ. docs/worker.md has the keys
by which workers tell.
"""

from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_KNOWN_PAIRS = 4096
"""Pairs of keys whose fit is remembered. Keys are what workers say, so the number has a bound."""

AUTO = "auto"
"""A value that the engine's own process resolves: it may be equal to another one."""


class PairKey(NamedTuple):
    """What a worker says of its handoffs, in lower case; "" or 0 where it says nothing."""

    transport: str = ""  # nixl, ucx, mpi, mooncake, shm
    library: str = ""  # that the transport stands on: ucx, libfabric
    runtime: str = ""  # of the transceiver: cpp, python
    kv_dtype: str = ""
    manager: str = ""  # of the KV cache: v1, v2
    block_tokens: int = 0  # tokens of a KV block
    handoff_key: str = ""  # fingerprint of the key that handoffs are sealed with, or `NO_KEY`


ANY_PAIR = PairKey()
"""The key of a worker that says nothing, which any other fits."""

NO_KEY = "none"
"""The fingerprint of a worker that does not seal its handoffs, and takes them with and without a seal."""

_NAMES = {
    "transport": "KV transport",
    "library": "library of the KV transport",
    "runtime": "transceiver runtime",
    "kv_dtype": "KV cache type",
    "manager": "KV cache manager",
    "block_tokens": "tokens per KV block",
    "handoff_key": "handoff key",
}


class PairFit(IntEnum):
    """Whether a handoff from one worker to another can work."""

    NO = 0
    MAYBE = 1  # one says auto where the other names a value
    YES = 2  # as far as the workers say


@lru_cache(MAX_KNOWN_PAIRS)
def fit(prefill: PairKey, decode: PairKey) -> PairFit:
    """Whether a decode worker can take over what a prefill worker hands over."""
    return min(_fits(name, prefill, decode) for name in PairKey._fields)


def misfit(prefill: PairKey, decode: PairKey) -> str:
    """What keeps two workers from a handoff, in words; "" where nothing is known to."""
    return ", ".join(
        f"{words} is {getattr(prefill, name)} on prefill and {getattr(decode, name)} on decode"
        for name, words in _NAMES.items()
        if _fits(name, prefill, decode) is PairFit.NO
    )


def all_fit(prefills: Iterable[PairKey], decodes: Iterable[PairKey]) -> bool:
    """Whether each of the first is known to fit each of the others."""
    return all(fit(one, other) is PairFit.YES for one in prefills for other in decodes)


def _fits(name: str, prefill: PairKey, decode: PairKey) -> PairFit:
    one, other = getattr(prefill, name), getattr(decode, name)
    if one == other:
        return PairFit.YES
    if name == "handoff_key":
        # A worker without a key takes sealed handoffs too. One that says nothing is not of slagate, and
        # seals none.
        return PairFit.YES if other in ("", NO_KEY) else PairFit.NO
    if not one or not other:
        return PairFit.YES
    if name == "block_tokens":
        # Versions of the Python transceiver differ in what they take.
        is_python = "python" in (prefill.runtime, decode.runtime)
        return PairFit.MAYBE if is_python else PairFit.NO
    return PairFit.MAYBE if AUTO in (one, other) else PairFit.NO


class RowPairs(NamedTuple):
    """What the workers of all rows say of their handoffs: most often the same."""

    keys: tuple[PairKey, ...]  # without repetition
    ids: npt.NDArray[np.int64]  # i64[n_rows], each row's place in `keys`


def row_pairs(pairs: list[PairKey]) -> RowPairs:
    """The same of a list with the key of each row."""
    keys = tuple(dict.fromkeys(pairs))
    places = {key: at for at, key in enumerate(keys)}
    return RowPairs(keys, np.array([places[pair] for pair in pairs], dtype=np.int64))
