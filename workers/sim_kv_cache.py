"""The simulated KV cache: what a block contains, and a paged pool that shares blocks by prefix.

A block's *state* is a 128-bit hash of every token up to its end, chained block by block:

    state[i] = blake2b-128(state[i - 1] || tokens of block i as little-endian uint32)

with a seed over the model name and the cache salt in place of `state[-1]`; a partial last block hashes
the tokens it has. Block bytes, block reuse and output tokens are all functions of states, so a run on
one worker, a run split over two, and a run resumed from its own output give the same tokens, and a
block with any other content gives different ones.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import islice

import numpy as np
import numpy.typing as npt

STATE_BYTES = 16
_TOKEN_BYTES = 4
_WORD = np.dtype("<u8")

Blocks = npt.NDArray[np.uint8]


def seed_state(model: str, cache_salt: str = "") -> bytes:
    """The state in front of the first block; differs by model and by cache salt."""
    salt = blake2b(cache_salt.encode(), digest_size=STATE_BYTES).digest()
    return blake2b(model.encode(), key=salt, digest_size=STATE_BYTES).digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian uint32. Raises `ValueError` when one does not fit."""
    try:
        packed = np.frombuffer(array("I", tokens), dtype=np.uint32)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers in [0, 2^32): {error}") from error
    return packed.astype("<u4", copy=False).tobytes()


def block_states(packed: bytes, seed: bytes, block_tokens: int) -> list[bytes]:
    """The state of each block of `packed` tokens (see `token_bytes`), a partial last one included."""
    states = []
    state, size = seed, block_tokens * _TOKEN_BYTES
    for start in range(0, len(packed), size):
        state = blake2b(state + packed[start : start + size], digest_size=STATE_BYTES).digest()
        states.append(state)
    return states


def next_token(state: bytes, vocab_size: int) -> int:
    """The token, in [0, vocab_size), that the model puts after the context ending in `state`."""
    return int.from_bytes(state[:8], "little") % vocab_size


class TokenChain:
    """A growing context: the state of its last block, and the states of the blocks it has filled.

    Starts after `parent`, the state of the full block in front of `tail` (packed tokens, fewer than a
    block, maybe none).
    """

    __slots__ = ("_block_tokens", "_hasher", "_room", "filled", "state")

    def __init__(self, parent: bytes, tail: bytes, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._room = block_tokens - len(tail) // _TOKEN_BYTES
        self._hasher = blake2b(parent + tail, digest_size=STATE_BYTES)
        self.state = self._hasher.digest() if tail else parent
        self.filled: list[bytes] = []

    def append(self, token: int) -> None:
        """Extend the context by one token."""
        self._hasher.update(token.to_bytes(_TOKEN_BYTES, "little"))
        self.state = state = self._hasher.digest()
        self._room -= 1
        if not self._room:
            self.filled.append(state)
            self._room = self._block_tokens
            self._hasher = blake2b(state, digest_size=STATE_BYTES)


def continuation(
    prompt_tokens: Sequence[int],
    n_tokens: int,
    *,
    model: str,
    block_tokens: int,
    vocab_size: int,
    cache_salt: str = "",
) -> list[int]:
    """The `n_tokens` the model generates after a prompt: what any correct stream must equal."""
    packed = token_bytes(prompt_tokens)
    whole = len(packed) - len(packed) % (block_tokens * _TOKEN_BYTES)
    seed = seed_state(model, cache_salt)
    parent = block_states(packed[:whole], seed, block_tokens)[-1] if whole else seed
    chain = TokenChain(parent, packed[whole:], block_tokens)
    tokens: list[int] = []
    for _ in range(n_tokens):
        token = next_token(chain.state, vocab_size)
        tokens.append(token)
        chain.append(token)
    return tokens


@lru_cache(maxsize=8)
def _multipliers(block_bytes: int) -> npt.NDArray[np.uint64]:
    """Odd constants, shape u64[block_bytes / 16, 2]; multiplying by one is a bijection on words."""
    if block_bytes < STATE_BYTES or block_bytes % STATE_BYTES:
        raise ValueError(f"block_bytes must be a positive multiple of 16, got {block_bytes}")
    count = np.arange(block_bytes // _WORD.itemsize, dtype=_WORD)
    # The golden-ratio step gives well-spread words, all different within a block.
    odd: npt.NDArray[np.uint64] = (
        count * np.uint64(0x9E3779B97F4A7C15) << np.uint64(1)
    ) | np.uint64(1)
    odd[:2] = (0xD1342543DE82EF95, 0xAF251AF3B0F025B5)
    return odd.reshape(-1, 2)


def block_contents(states: Sequence[bytes], block_bytes: int) -> Blocks:
    """The KV bytes of blocks in these states, shape u8[n_blocks, block_bytes].

    Raises `ValueError` when `block_bytes` is not a positive multiple of 16.
    """
    multipliers = _multipliers(block_bytes)
    words = np.frombuffer(b"".join(states), dtype=_WORD).reshape(-1, 1, 2)
    return (words * multipliers).reshape(len(states), -1).view(np.uint8)


def state_of(block: Blocks) -> bytes:
    """The state a block's bytes were made from; inverts its first two words."""
    first = block[:STATE_BYTES].view(_WORD) * _inverses(len(block))
    return first.astype(_WORD, copy=False).tobytes()


@lru_cache(maxsize=8)
def _inverses(block_bytes: int) -> npt.NDArray[np.uint64]:
    first = _multipliers(block_bytes)[0]
    return np.array([pow(int(odd), -1, 1 << 64) for odd in first], dtype=_WORD)


def verify(blocks: Blocks, states: Sequence[bytes]) -> list[int]:
    """Indices of blocks that are not, byte for byte, the content of their state; empty = all are."""
    wrong = (blocks != block_contents(states, blocks.shape[1])).any(axis=1)
    return [int(i) for i in np.flatnonzero(wrong)]


@dataclass(slots=True, eq=False)
class Allocation:
    """One sequence's blocks: shared ones first, in order, then its own, then those it may still take."""

    shared: list[bytes] = field(default_factory=list)
    private_blocks: int = 0
    reserved_blocks: int = 0


class SimKvCache:
    """A pool of `total_blocks` blocks with reference counts and reuse of full blocks by state.

        total = referenced shared + private (used) | unreferenced shared (evictable) | never filled

    Eviction takes the least recently released block. `release` lets a sequence's blocks go last one
    first, and whoever holds a block holds its whole prefix, so a parent is never evicted before its
    children. Sequences reserve all they may grow to (TensorRT-LLM's GUARANTEED_NO_EVICT), so `grow`
    cannot fail.
    """

    def __init__(self, total_blocks: int, block_tokens: int) -> None:
        if total_blocks < 1 or block_tokens < 1:
            raise ValueError(
                f"total_blocks {total_blocks} and block_tokens {block_tokens} must be > 0"
            )
        self.total_blocks = total_blocks
        self.block_tokens = block_tokens
        self._references: dict[bytes, int] = {}
        self._evictable: OrderedDict[bytes, None] = OrderedDict()
        self._private_blocks = 0
        self._reserved_blocks = 0
        self.n_allocated_blocks = 0
        self.n_new_blocks = 0
        self.n_reused_blocks = 0
        self.n_missed_blocks = 0
        self.n_evicted_blocks = 0

    @property
    def used_blocks(self) -> int:
        """Blocks some sequence refers to."""
        return len(self._references) + self._private_blocks

    @property
    def cached_blocks(self) -> int:
        """Filled blocks nobody refers to: reusable until evicted."""
        return len(self._evictable)

    @property
    def available_blocks(self) -> int:
        """Blocks a new sequence could take or reserve."""
        return self.total_blocks - self.used_blocks - self._reserved_blocks

    def match(self, states: Sequence[bytes]) -> int:
        """How many leading blocks of `states` are in the cache."""
        for i, state in enumerate(states):
            if state not in self._references and state not in self._evictable:
                return i
        return len(states)

    def allocate(
        self, states: Sequence[bytes], *, n_blocks: int, reserve_blocks: int = 0
    ) -> Allocation | None:
        """Take `n_blocks` blocks, the leading ones from the cache where `states` match, or None.

        `reserve_blocks` more are kept for `grow`. None when the pool cannot give both now. Pass only
        the states that may be reused; the blocks after the matched ones are private until committed.
        """
        hits = states[: self.match(states)]
        revived = sum(1 for state in hits if state in self._evictable)
        n_private = n_blocks - len(hits)
        if revived + n_private + reserve_blocks > self.available_blocks:
            return None
        for state in hits:
            self._refer(state)
        self._private_blocks += n_private
        self._reserved_blocks += reserve_blocks
        self._evict_overflow()
        self.n_allocated_blocks += n_blocks
        self.n_new_blocks += n_private
        self.n_reused_blocks += len(hits)
        self.n_missed_blocks += len(states) - len(hits)
        return Allocation(list(hits), n_private, reserve_blocks)

    def grow(self, allocation: Allocation) -> None:
        """Turn one reserved block into a private one."""
        assert allocation.reserved_blocks > 0, "grew past the reservation"
        allocation.reserved_blocks -= 1
        self._reserved_blocks -= 1
        allocation.private_blocks += 1
        self._private_blocks += 1
        self.n_allocated_blocks += 1
        self.n_new_blocks += 1
        self._evict_overflow()

    def commit(self, allocation: Allocation, states: Sequence[bytes]) -> None:
        """Make the next private blocks reusable: they are full and in `states`, in order.

        Where another sequence committed the same block first, that one is shared and ours is freed.
        """
        assert len(states) <= allocation.private_blocks, "committed more blocks than it holds"
        for state in states:
            self._refer(state)
        allocation.shared.extend(states)
        allocation.private_blocks -= len(states)
        self._private_blocks -= len(states)

    def release(self, allocation: Allocation) -> None:
        """Give everything back; committed blocks stay reusable. Again on the same allocation: no-op."""
        for state in reversed(allocation.shared):
            count = self._references.pop(state) - 1
            if count:
                self._references[state] = count
            else:
                self._evictable[state] = None
        self._private_blocks -= allocation.private_blocks
        self._reserved_blocks -= allocation.reserved_blocks
        allocation.shared = []
        allocation.private_blocks = allocation.reserved_blocks = 0

    def _refer(self, state: bytes) -> None:
        self._references[state] = self._references.get(state, 0) + 1
        self._evictable.pop(state, None)

    def _evict_overflow(self) -> None:
        excess = self.used_blocks + len(self._evictable) - self.total_blocks
        if excess > 0:
            for state in list(islice(self._evictable, excess)):
                del self._evictable[state]
            self.n_evicted_blocks += excess
