"""Which worker's cache holds how much of a prompt, from the KV events of the engines.

    stored, removed, cleared ─▶ PrefixIndex ─▶ match(tokens): leading blocks per holder, exact
                                   │ tokens in runs (trie), claims by engine hash (holder),
                                   │ blocks of unknown parents (pending)

Rules:
* Overlap is the leading consecutive full blocks that are held, in any tier or all on the device.
* The newest event about a (tier, hash) wins; removing what is unknown is no error.
* A block counts once its parent is known. Until then it is pending; when too many are, or more is stored
  than `max_pairs`, the holder `has_gap`: it has more than is known here, never less.
* An event is one step: all its blocks are added, then those that were pending for them, oldest first.

An index is for one thread, that of the event loop: no method waits, so each is one step to all tasks.
"""

import hashlib
import heapq
from array import array
from collections.abc import Mapping

from slagate.pools.prefix.claims import DEVICE, HOST, BlockHolders, Hashes, unsigned
from slagate.pools.prefix.holder import BlockRef, Holder
from slagate.pools.prefix.holder_slots import HolderSlots
from slagate.pools.prefix.match import Match
from slagate.pools.prefix.trie import TOKEN_BYTES, Root, RunTrie, Tokens

MAX_PENDING = 4096

_BASE = Root()


class PrefixIndex:
    """All holders of blocks of one size. `stored` is O(blocks), `match` O(runs and their distinct leads).

    Before an index is dropped all holders must leave and be swept, as `RankFollower` has it: the garbage
    collector does not find blocks that are left (see `Run`).

    Raises `ValueError` for a block or a run of less than one.
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        max_pairs: int = 16_000_000,
        max_hops: int = 512,
        max_run_blocks: int = 1024,
        max_pending: int = MAX_PENDING,
    ) -> None:
        if block_tokens < 1 or max_run_blocks < 1:
            raise ValueError(f"blocks of {block_tokens} tokens, runs of {max_run_blocks} blocks")
        self.block_tokens = block_tokens
        self.max_pairs = max_pairs
        self.trie = RunTrie(block_tokens, max_hops=max_hops, max_run_blocks=max_run_blocks)
        self._slots = HolderSlots(self.trie)
        self._block_bytes = self.trie.block_bytes
        self._max_pending = max_pending
        self._claims = BlockHolders(self.trie)

    @property
    def n_pairs(self) -> int:
        """(holder, block) pairs, with those of retired holders until they are swept."""
        return self._claims.n_blocks + self._slots.n_retired_blocks

    @property
    def n_bytes_estimate(self) -> int:
        """Bytes of memory, roughly: tokens of distinct blocks, claims, runs."""
        trie = self.trie
        return trie.n_blocks * self._block_bytes + 90 * self.n_pairs + 1000 * trie.n_runs

    @property
    def n_changes(self) -> int:
        """Times that the bit of a holder changed: with it, what is kept by bit is out of date."""
        return self._slots.n_changes

    def join(self) -> Holder:
        """Make a new holder, without blocks."""
        return Holder(self._slots.allocate(), self._max_pending)

    def leave(self, holder: Holder) -> None:
        """Remove a holder, in O(1); `sweep` frees its memory. Idempotent."""
        self._retire(holder)
        holder.start_empty(-1)

    def cleared(self, holder: Holder) -> None:
        """Remove all blocks of a holder, in O(1). Raises `ValueError` for a holder that left."""
        if holder.bit < 0:
            raise ValueError("holder: it has left")
        self._retire(holder)
        holder.start_empty(self._slots.allocate())

    def stored(
        self,
        holder: Holder,
        hashes: Hashes,
        parent: int | None,
        tokens: Tokens,
        *,
        root: Root = _BASE,
        tier: int = DEVICE,
        keys: Mapping[int, bytes] | None = None,
    ) -> None:
        """Add a chain of blocks to a holder, by their tokens (uint32, little-endian).

        `parent` is the hash of the block before them; None: they are the first of prompts, below `root`.
        `keys` are further inputs of a block's identity, by block number in this chain. Raises `ValueError`
        where the tokens are not those of so many blocks, for a hash beyond 64 bits, a negative block number
        in keys, and a holder that left.
        """
        claims = self._claims
        if (
            len(hashes) == 1
            and tier == DEVICE
            and parent is not None
            and not keys
            and not holder.pending.blocks
            and type(hashes[0]) is int
            and len(tokens) == self._block_bytes
            and claims.n_blocks + self._slots.n_retired_blocks < self.max_pairs
            and claims.append_block(holder, hashes[0], parent, tokens)
        ):
            return
        content = self._content(tokens, len(hashes))
        if holder.bit < 0:
            raise ValueError("holder: it has left")
        if keys:
            content = substituted(content, keys, self._block_bytes)
        names = unsigned(hashes)
        if not names:
            return
        if parent is not None:
            (parent,) = unsigned([parent])
        if self.n_pairs + len(names) > self.max_pairs:
            # There is no room for them, but these hashes no longer name what they named before.
            self.removed(holder, names, tier=tier)
            self._drop(holder, len(names))
            return
        woken: list[tuple[int, BlockRef]] = []
        position = self._claims.find_position(holder, tier, parent, root)
        if position is not None:
            self._claims.add_blocks(holder, position, tier, names, content)
            for name in names if len(holder.pending) else ():
                holder.pending.cancel((tier, name))
                woken += holder.pending.children_of(name)
        elif parent is not None:
            woken = self._wait(holder, parent, tier, names, content)
        if woken:
            self._wake(holder, woken)
        self._claims.free_emptied()

    def removed(self, holder: Holder, hashes: Hashes, *, tier: int | None = None) -> None:
        """Remove blocks from a holder, in one tier or (None) in all; unknown hashes are ignored.

        Raises `ValueError` for a hash beyond 64 bits.
        """
        if (
            len(hashes) == 1
            and tier == DEVICE
            and not holder.pending.blocks
            and self._claims.evict_last(holder, hashes[0])
        ):
            return
        names = unsigned(hashes)
        for one in (DEVICE, HOST) if tier is None else (tier,):
            if len(holder.pending):
                for name in names:
                    holder.pending.cancel((one, name))
            for name in self._claims.evict(holder, names) if one == DEVICE else names:
                self._claims.release(holder, one, name)
        self._claims.free_emptied()

    def match(
        self, tokens: Tokens, root: Root = _BASE, *, keys: Mapping[int, bytes] | None = None
    ) -> Match:
        """How much of a prompt each holder has; `ValueError` for a negative number in `keys`."""
        content = tokens if type(tokens) is bytes else bytes(tokens)
        if keys:
            content = substituted(content, keys, self._block_bytes)
        slots = self._slots
        return self.trie.match(content, root, lanes=slots.live, n_holders=slots.n_bits)

    def sweep(self, n_blocks: int = 1000) -> bool:
        """Free about `n_blocks` blocks of holders that left or were cleared. False: no more."""
        return self._slots.sweep(n_blocks)

    def _content(self, tokens: Tokens, n_blocks: int) -> bytes:
        content = bytes(tokens)
        if len(content) != n_blocks * self._block_bytes:
            raise ValueError(
                f"tokens: {len(content)} bytes, but {n_blocks} hashes"
                f" of {self.block_tokens} tokens need {n_blocks * self._block_bytes}"
            )
        return content

    def _retire(self, holder: Holder) -> None:
        self._claims.n_blocks -= holder.n_blocks
        self._slots.retire(holder)

    def _drop(self, holder: Holder, n_blocks: int) -> None:
        holder.n_dropped += n_blocks
        holder.has_gap = True

    def _wait(
        self, holder: Holder, parent: int, tier: int, names: "array[int]", content: bytes
    ) -> list[tuple[int, BlockRef]]:
        """Put blocks among the pending ones; those whose parents are known after all are returned."""
        pending = holder.pending
        for name in names:
            # The hash names another block now, wherever that will be.
            self._claims.release(holder, tier, name)
        for at, (name, above) in enumerate(zip(names, [parent, *names], strict=False)):
            start = at * self._block_bytes
            if not pending.put((tier, name), above, content[start : start + self._block_bytes]):
                self._drop(holder, 1)
        known = [
            name
            for name in names
            if self._claims.find_position(holder, tier, name, _BASE) is not None
        ]
        return [one for name in known for one in pending.children_of(name)]

    def _wake(self, holder: Holder, woken: list[tuple[int, BlockRef]]) -> None:
        """Add pending blocks whose parents are known now, the oldest first, and then their children."""
        heapq.heapify(woken)
        while woken:
            number, claim = heapq.heappop(woken)
            block = holder.pending.blocks.get(claim)
            if block is None or block.number != number:
                continue
            tier, name = claim
            position = self._claims.find_position(holder, tier, block.parent, _BASE)
            if position is None:
                continue
            holder.pending.cancel(claim)
            if self.n_pairs >= self.max_pairs:
                self._drop(holder, 1)
                continue
            self._claims.add_blocks(holder, position, tier, array("Q", [name]), block.content)
            for below in holder.pending.children_of(name):
                heapq.heappush(woken, below)


def substituted(content: bytes, keys: Mapping[int, bytes], block_bytes: int) -> bytes:
    """Full blocks, of which those with a key are replaced; numbers beyond the last one are ignored.

    Placeholder tokens of two pictures are the same; the pictures are not. A block whose engine hash has
    more inputs than tokens is replaced by a digest of its tokens and that key, with the top bit of each
    word set: no vocabulary has such token ids, so it never equals a plain block.

    Raises `ValueError` for a negative block number.
    """
    blocks = bytearray(content)
    for number, key in keys.items():
        if number < 0:
            raise ValueError(f"keys: block number {number} is negative")
        start = number * block_bytes
        block = content[start : start + block_bytes]
        if len(block) == block_bytes:
            blocks[start : start + block_bytes] = _stand_in(block, key)
    return bytes(blocks)


def _stand_in(block: bytes, key: bytes) -> bytes:
    # The block's length is fixed, so joining is unambiguous.
    digest = hashlib.shake_128(block + key).digest(len(block))
    marks = int.from_bytes(b"\0\0\0\x80" * (len(block) // TOKEN_BYTES), "little")
    return (int.from_bytes(digest, "little") | marks).to_bytes(len(block), "little")
