"""Answers to queries: how much of a prompt each holder has cached, and each row of a pool."""

from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from slagate.pools.inflight.rows import Ints

Bits = NDArray[np.signedinteger[Any]]
"""Holder bits by row, int[n_rows]; -1 where a row has no holder."""

Steps = tuple[tuple[int, int], ...]
"""Numbers of leading blocks, each with the mask of the lanes that hold exactly so many."""

_MANY_STEPS = 16


class Match(NamedTuple):
    """How many leading blocks of a query each holder has, in masks of lanes.

    The holder of bit b has lane 2b for blocks in any tier, and 2b + 1 for those on the device.
    """

    n_blocks: int  # full blocks of the query
    steps: Steps = ()
    n_holders: int = 0  # all bits are below this
    capped: bool = False  # the hop cap was reached, so that depths may be too low

    def depths(self, bits: Bits) -> NDArray[np.int32]:
        """Leading blocks that are held in any tier, i32[len(bits)]; 0 where a bit is -1."""
        depths: NDArray[np.int32] = self.both_depths(bits)[0]
        return depths

    def both_depths(self, bits: Bits) -> NDArray[np.int32]:
        """Leading blocks held in any tier, and those all on the device, i32[2, len(bits)]."""
        if not self.steps:
            return np.zeros((2, len(bits)), np.int32)
        steps = self.steps
        if len(steps) > _MANY_STEPS:
            # The sum of masks by depth is also one of masks by power of two, which are fewer.
            planes = [0] * max(depth for depth, _ in steps).bit_length()
            for depth, mask in steps:
                for power in range(depth.bit_length()):
                    if depth >> power & 1:
                        planes[power] |= mask
            steps = tuple((1 << power, plane) for power, plane in enumerate(planes))
        # There is one more pair of lanes, for rows that have no bit.
        n_bytes = 2 * self.n_holders // 8 + 1
        packed = b"".join([mask.to_bytes(n_bytes, "little") for _, mask in steps])
        held = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        # Floats multiply faster than integers, and represent integers up to 2**24 exactly.
        by_step = np.array([depth for depth, _ in steps], np.float32)  # f32[n_steps]
        by_lane = by_step.dot(held.reshape(len(steps), -1))  # f32[8 * n_bytes]
        by_bit = by_lane.astype(np.int32).reshape(-1, 2)  # i32[4 * n_bytes, 2]
        depths: NDArray[np.int32] = by_bit.take(np.minimum(bits, self.n_holders), axis=0).T
        return depths


def holders_of(steps: Steps, most: int) -> list[tuple[int, int]] | None:
    """(bit, depth) of each holder in some steps; None: more than `most`. O(holders returned).

    In each step both lanes of a holder must agree.
    """
    found: list[tuple[int, int]] = []
    for depth, mask in steps:
        while mask:
            if len(found) == most:
                return None
            bit = (mask & -mask).bit_length() >> 1
            found.append((bit, depth))
            mask &= ~(0b11 << 2 * bit)
    return found


def lanes_of(flags: NDArray[np.bool_]) -> int:
    """The mask of both lanes of each holder whose flag is set."""
    return int.from_bytes(np.packbits(np.repeat(flags, 2), bitorder="little").tobytes(), "little")


class Cached(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Leading prompt tokens that each row of a pool has cached. Decisions share the arrays: read-only."""

    cached_tokens: Ints  # i64[n_rows], on the device or the host
    device_tokens: Ints  # i64[n_rows], the leading ones of these that are all on the device
    depths: tuple[int, ...]  # the distinct values of `cached_tokens`, ascending
    places: NDArray[np.signedinteger[Any]]  # i64[n_rows], where each row's value is in `depths`
    has_host: bool

    @property
    def host_tokens(self) -> Ints:
        """Tokens behind those of the device that are cached, but not all there, i64[n_rows]."""
        return self.cached_tokens - self.device_tokens


def cached_of(device_tokens: Ints, cached_tokens: Ints) -> Cached:
    """Make a `Cached` of the tokens on the device and anywhere, i64[n_rows] each; they become read-only."""
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
    """The `Cached` of `n_rows` rows that have nothing of a prompt."""
    zeros = np.zeros(n_rows, np.int64)
    return cached_of(zeros, zeros)
