"""What the workers of a pool have cached of a prompt: by their KV events, and by prompts just sent to them.

The two are kept apart. Events are exact, and late by the time they take; a prompt that was just sent to a
worker is only predicted to be cached, for a while; for longer where the worker has no events.
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
"""How long a processed prompt is predicted to be cached: by then the worker's events have come.

They take milliseconds. Were it longer, a small cache would be believed to hold what it has evicted.
"""

HISTORY_S = 120.0
"""The same for workers that have no events."""

PREFILL_LIMIT_S = 600.0
"""How long a prompt is predicted whose prefill has not ended: a leg that never ends leaves none behind."""

DEFAULT_BLOCK_TOKENS = 32

DEFAULT_CAPACITY_BLOCKS = 16_384
"""The size of a worker's cache where it does not say."""

_TIDY_CLAIMS = 256

_FEW_EXPECTED = 8
"""Up to so many rows with predictions are faster handled one by one."""

_MAX_KEPT = 64
"""Answers of the index that are kept; those about a thousand workers take 16 KB each."""


class Prompt(NamedTuple):
    """A prompt as prefix caches know it."""

    tokens: bytes  # uint32, little-endian
    root: Root = Root()

    @property
    def n_tokens(self) -> int:
        """The length of the prompt in tokens."""
        return len(self.tokens) // TOKEN_BYTES


class _Held(NamedTuple):
    """What rows have of a prompt by their events."""

    cached: Cached
    # Tokens, ascending, and the lanes of the rows that have so many or more on the device.
    reached: Steps

    def deeper(self, steps: Steps, block_tokens: int, most: int) -> Steps:
        """The steps in blocks that are deeper than this on the device, as steps in tokens up to `most`."""
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
    """The index and the predictions for workers of one block size."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.index = PrefixIndex(block_tokens)
        self.predictions = Predictions(block_tokens)
        self.bits: Bits = np.zeros(0, dtype=np.int32)  # i32[n_rows]
        self.bits_of = (-1, -1, -1)  # what they were made from
        # By steps and limit; steps are of bits, so all are dropped when the bits of rows change.
        self.by_steps: dict[tuple[Steps, int | None], _Held] = {}


class PoolCaches:
    """What is known of the prefix caches of one pool's rows. `now_s` is the gateway's clock."""

    def __init__(self, *, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._caches: dict[int, _Cache] = {}
        self._cache_of: dict[int, _Cache] = {}  # by row, of rows that were set
        self._holders: dict[int, Holder] = {}
        self._n_set = 0

    def index_of(self, block_tokens: int) -> PrefixIndex:
        """The index for workers whose KV blocks have `block_tokens` tokens."""
        return self._cache(block_tokens).index

    def set_holder(self, row: int, holder: Holder | None, *, block_tokens: int) -> None:
        """Set the holder that a row's events fill; None: it has no events now."""
        self._n_set += 1
        if holder is None:
            # `block_tokens` may be another incarnation's by now.
            self._holders.pop(row, None)
        else:
            self._cache_of[row] = self._cache(block_tokens)
            self._holders[row] = holder

    def set_worker(self, row: int, *, block_tokens: int, capacity_blocks: int | None) -> None:
        """Drop a row's predictions: its worker is another incarnation, with an empty cache.

        Later predictions never exceed its cache: the oldest go first, as they would there.
        """
        for cache in self._caches.values():
            cache.predictions.forget_row(row)
            cache.predictions.limit_row(row, None)
        cache = self._cache_of[row] = self._cache(block_tokens or DEFAULT_BLOCK_TOKENS)
        cache.predictions.limit_row(row, capacity_blocks or DEFAULT_CAPACITY_BLOCKS)

    def forget_row(self, row: int) -> None:
        """Forget a row: its worker has left, and the row may be another's next."""
        self.set_holder(row, None, block_tokens=0)
        self._cache_of.pop(row, None)
        for cache in self._caches.values():
            cache.predictions.forget_row(row)
            cache.predictions.limit_row(row, None)

    def expire_predictions(self) -> None:
        """Drop some expired predictions; each prompt that is looked up does so too."""
        for cache in self._caches.values():
            cache.predictions.expire(self._now_s(), _TIDY_CLAIMS)

    def cached(self, prompt: Prompt, n_rows: int) -> Cached:
        """The leading prompt tokens that each row has cached.

        The last prompt token never counts: it is always computed, as its logits are the first output.
        """
        found = [self._cached(cache, prompt, n_rows) for cache in self._caches.values()]
        if len(found) == 1:
            return found[0]
        device = host = np.zeros(n_rows, np.int64)  # tokens
        for each in found:
            device = np.maximum(device, each.device_tokens)
            host = np.maximum(host, each.host_tokens)
        return cached_of(device, device + host)

    def predict(self, row: int, prompt: Prompt) -> Callable[..., None]:
        """Predict that a prompt will be cached at a row, as it is sent there.

        Call what is returned once the prefill has ended, with whether the prompt was `processed`.
        """
        cache = self._cache_of.get(row) or self._cache(DEFAULT_BLOCK_TOKENS)
        claim = cache.predictions.predict(
            row, prompt.tokens, prompt.root, expires_s=self._now_s() + PREFILL_LIMIT_S
        )

        def settle(*, processed: bool) -> None:
            if processed:
                keep_s = CONFIRM_S if row in self._holders else HISTORY_S
                cache.predictions.renew(claim, expires_s=self._now_s() + keep_s)
            else:
                cache.predictions.end_prediction(claim)

        return settle

    def _cached(self, cache: _Cache, prompt: Prompt, n_rows: int) -> Cached:
        """The leading prompt tokens that each row has cached, by one block size's index and predictions."""
        held = cache.index.match(prompt.tokens, prompt.root)
        expected = cache.predictions.match(prompt.tokens, prompt.root, now_s=self._now_s())
        most = max(0, len(prompt.tokens) // TOKEN_BYTES - 1)
        known = self._held(cache, held, most, n_rows)
        if not expected.steps:
            return known.cached
        # Mostly none: rows have as much by their events.
        deeper = known.deeper(expected.steps, cache.block_tokens, most)
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
        """What rows have by their events; kept, and found again for the same steps and rows."""
        if not held.steps:
            return _Held(nothing_cached(n_rows), ())
        bits = self._bits(cache, n_rows)
        # A limit that nothing reaches makes no difference.
        key = (held.steps, most if held.n_blocks * cache.block_tokens > most else None)
        known = cache.by_steps.get(key)
        if known is None:
            # Two rows of i64[n_rows]: anywhere, and on the device.
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
        """The holder's bit of each row, i32[n_rows]. Made anew after a clearing, which changes a bit."""
        state = (cache.index.n_changes, self._n_set, n_rows)
        if cache.bits_of != state:
            cache.bits_of = state
            cache.by_steps.clear()
            cache.bits = np.full(n_rows, -1, dtype=np.int32)
            for row, holder in self._holders.items():
                if self._cache_of[row] is cache:
                    cache.bits[row] = holder.bit
        return cache.bits
