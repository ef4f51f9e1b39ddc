"""What the workers of a pool have cached of a prompt: by their own events, and by what was just sent there.

The two never mix. Events are exact, and late by the time they take; a prompt that was sent is only expected
to be cached, and that for a while. A worker without events has expectations alone, kept for longer.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from slagate.pools.inflight.rows import Ints
from slagate.pools.prefix.holder import Holder
from slagate.pools.prefix.index import PrefixIndex
from slagate.pools.prefix.match import (
    Bits,
    Cached,
    Match,
    Steps,
    cached_of,
    holders_of,
    lanes_of,
    nothing_cached,
)
from slagate.pools.prefix.predictions import Predictions
from slagate.pools.prefix.trie import TOKEN_BYTES, Root

CONFIRM_S = 0.25
"""How long a processed prompt is expected to be cached: by then the worker's events have said it.

They take milliseconds. Longer, and a small cache is believed to hold what it has evicted meanwhile.
"""

HISTORY_S = 120.0
"""The same for workers that have no events."""

PREFILL_LIMIT_S = 600.0
"""An expectation whose leg never ends goes by itself."""

DEFAULT_BLOCK_TOKENS = 32

DEFAULT_CAPACITY_BLOCKS = 16_384
"""Of a worker that does not say what its cache holds."""

_TIDY_CLAIMS = 256

_FEW_EXPECTED = 8
"""Rows with something expected that are looked at faster one by one."""

_MAX_KEPT = 64
"""Answers of events that are kept; a thousand workers' take 16 KB each."""


class Prompt(NamedTuple):
    """A prompt as prefix caches know it."""

    tokens: bytes  # uint32, little-endian
    root: Root = Root()

    @property
    def n_tokens(self) -> int:
        """Its length."""
        return len(self.tokens) // TOKEN_BYTES


class _Held(NamedTuple):
    """What rows have of a prompt by their events."""

    cached: Cached
    reached: (
        Steps  # tokens, ascending, and the lanes of rows that have so many or more on the device
    )

    def without(self, steps: Steps, block_tokens: int, most: int) -> Steps:
        """Of steps in blocks what is more than this on the device, in tokens."""
        more: list[tuple[int, int]] = []
        for depth, lanes in steps:
            tokens = min(depth * block_tokens, most)
            for reached, rows in self.reached:
                if reached >= tokens:
                    lanes &= ~rows
                    break
            if lanes and tokens:
                more.append((tokens, lanes))
        return tuple(more)


class _Cache:
    """Everything about workers of one block size."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.index = PrefixIndex(block_tokens)
        self.predictions = Predictions(block_tokens)
        self.bits: Bits = np.zeros(0, dtype=np.int32)
        self.bits_of = (-1, -1, -1)  # what they were made from
        # By steps and limit; steps are of bits, so none is kept when the bits of rows change.
        self.by_steps: dict[tuple[Steps, int | None], _Held] = {}


class PoolCaches:
    """The prefix caches of one pool's rows, as far as they are known. `now_s` is the gateway's clock."""

    def __init__(self, *, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._caches: dict[int, _Cache] = {}
        self._cache_of: dict[int, _Cache] = {}  # by row, of rows that were set
        self._holders: dict[int, Holder] = {}
        self._n_set = 0

    def index_of(self, block_tokens: int) -> PrefixIndex:
        """The index for workers of a block size."""
        return self._cache(block_tokens).index

    def set_holder(self, row: int, holder: Holder | None, *, block_tokens: int) -> None:
        """The part of an index that a row's events fill; None: it has no events now."""
        self._n_set += 1
        if holder is None:
            # What its worker says of itself may be another incarnation's by now.
            self._holders.pop(row, None)
        else:
            self._cache_of[row] = self._cache(block_tokens)
            self._holders[row] = holder

    def set_worker(self, row: int, *, block_tokens: int, capacity_blocks: int | None) -> None:
        """Another incarnation of the row's worker: nothing is expected of it any more.

        What will be, is never more than its cache holds: the oldest goes first, as it would there.
        """
        for cache in self._caches.values():
            cache.predictions.forget(row)
            cache.predictions.limit(row, None)
        cache = self._cache_of[row] = self._cache(block_tokens or DEFAULT_BLOCK_TOKENS)
        cache.predictions.limit(row, capacity_blocks or DEFAULT_CAPACITY_BLOCKS)

    def leave(self, row: int) -> None:
        """The row's worker has left, and the row may be another's next."""
        self.set_holder(row, None, block_tokens=0)
        self._cache_of.pop(row, None)
        for cache in self._caches.values():
            cache.predictions.forget(row)
            cache.predictions.limit(row, None)

    def tidy(self) -> None:
        """Let go of some of what is expected no more; a prompt to look up does so too, where one comes."""
        for cache in self._caches.values():
            cache.predictions.expire(self._now_s(), _TIDY_CLAIMS)

    def cached(self, prompt: Prompt, n_rows: int) -> Cached:
        """For each row the leading prompt tokens that are cached there.

        The last prompt token is always computed, as its logits are the first output.
        """
        found = [self._cached(cache, prompt, n_rows) for cache in self._caches.values()]
        if len(found) == 1:
            return found[0]
        device = host = np.zeros(n_rows, np.int64)
        for each in found:
            device = np.maximum(device, each.device_tokens)
            host = np.maximum(host, each.host_tokens)
        return cached_of(device, device + host)

    def expect(self, row: int, prompt: Prompt) -> Callable[..., None]:
        """A prompt was sent to a row, and will be cached there; to be told whether it was `processed`."""
        cache = self._cache_of.get(row) or self._cache(DEFAULT_BLOCK_TOKENS)
        claim = cache.predictions.claim(
            row, prompt.tokens, prompt.root, expires_s=self._now_s() + PREFILL_LIMIT_S
        )

        def settle(*, processed: bool) -> None:
            if processed:
                keep_s = CONFIRM_S if row in self._holders else HISTORY_S
                cache.predictions.renew(claim, expires_s=self._now_s() + keep_s)
            else:
                cache.predictions.end(claim)

        return settle

    def _cached(self, cache: _Cache, prompt: Prompt, n_rows: int) -> Cached:
        """As `cached`, by what is known of the workers of one block size."""
        held = cache.index.match(prompt.tokens, prompt.root)
        expected = cache.predictions.match(prompt.tokens, prompt.root, now_s=self._now_s())
        most = max(0, len(prompt.tokens) // TOKEN_BYTES - 1)
        known = self._held(cache, held, most, n_rows)
        if not expected.steps:
            return known.cached
        # Most often only of rows that have as much by their events.
        deeper = known.without(expected.steps, cache.block_tokens, most)
        if not deeper:
            return known.cached
        device = known.cached.device_tokens
        few = holders_of(deeper, _FEW_EXPECTED)
        if few is None:
            by_row = Match(expected.n_blocks, deeper, expected.n_holders).depths(np.arange(n_rows))
            device = np.maximum(device, by_row)
        else:
            device = device.copy()
            for row, tokens in few:
                device[row] = tokens
        return cached_of(device, np.maximum(device, known.cached.cached_tokens))

    def _held(self, cache: _Cache, held: Match, most: int, n_rows: int) -> _Held:
        """What rows have by their events; the same steps of the same rows give the same again."""
        if not held.steps:
            return _Held(nothing_cached(n_rows), ())
        bits = self._bits(cache, n_rows)
        # A limit that nothing reaches makes no difference.
        key = (held.steps, most if held.n_blocks * cache.block_tokens > most else None)
        known = cache.by_steps.get(key)
        if known is None:
            tokens: Ints = np.multiply(held.both_depths(bits), cache.block_tokens, dtype=np.int64)
            anywhere, on_device = np.minimum(tokens, most, out=tokens)
            reached = [(n, lanes_of(on_device >= n)) for n in np.unique(on_device).tolist() if n]
            known = _Held(cached_of(on_device, anywhere), tuple(reached))
            if len(cache.by_steps) >= _MAX_KEPT:
                cache.by_steps.clear()
            cache.by_steps[key] = known
        return known

    def _cache(self, block_tokens: int) -> _Cache:
        cache = self._caches.get(block_tokens)
        if cache is None:
            cache = self._caches[block_tokens] = _Cache(block_tokens)
        return cache

    def _bits(self, cache: _Cache, n_rows: int) -> Bits:
        """The holder's bit of each row, -1 for none. A clear changes it, so it is looked up anew then."""
        state = (cache.index.n_changes, self._n_set, n_rows)
        if cache.bits_of != state:
            cache.bits_of = state
            cache.by_steps.clear()
            cache.bits = np.full(n_rows, -1, dtype=np.int32)
            for row, holder in self._holders.items():
                if self._cache_of[row] is cache:
                    cache.bits[row] = holder.bit
        return cache.bits
