"""What each row of a pool has cached of one prompt."""

from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from slagate.pools.inflight.rows import Ints


class Cached(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Leading prompt tokens by row. Decisions share the arrays, so nobody can write to them."""

    cached_tokens: Ints
    device_tokens: Ints
    depths: tuple[int, ...]  # the different ones of `cached_tokens`, ascending
    places: NDArray[np.signedinteger[Any]]  # each row's in `depths`
    has_host: bool

    @property
    def host_tokens(self) -> Ints:
        """Tokens behind those of the device that are cached, but not all there."""
        return self.cached_tokens - self.device_tokens


def cached_of(device_tokens: Ints, cached_tokens: Ints) -> Cached:
    """From what is cached on the device, and anywhere."""
    ordered = np.sort(cached_tokens)
    # Rows share a few depths. `np.unique` takes twice as long.
    is_first = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    depths = ordered[is_first]
    has_host = device_tokens is not cached_tokens and bool((device_tokens != cached_tokens).any())
    places = depths.searchsorted(cached_tokens)
    for array in (device_tokens, cached_tokens, places):
        array.flags.writeable = False
    return Cached(cached_tokens, device_tokens, tuple(depths.tolist()), places, has_host)


@lru_cache(maxsize=64)
def nothing_cached(n_rows: int) -> Cached:
    """Nothing, on so many rows."""
    zeros = np.zeros(n_rows, np.int64)
    return cached_of(zeros, zeros)
