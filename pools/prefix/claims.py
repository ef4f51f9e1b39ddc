"""Applies KV events to the prefix index: which holder has which blocks of the trie.

A claim is found by its hash and kept in a held run (see `holder`), and shown to the run of the trie, where
queries read it. Evictions and decode steps have fast paths: they are most of all events.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slagate.pools.prefix.holder import FOLD, ORDER, SHARD_SHIFT, HeldRun, Holder, fold
from slagate.pools.prefix.holder_slots import held_part, show_part
from slagate.pools.prefix.trie import Root, Run, RunTrie, Segment, Tokens

DEVICE, HOST = 0, 1
"""Tiers; anything colder than the device is HOST."""

Hashes = Sequence[int] | NDArray[np.uint64]

_U64 = (1 << 64) - 1


class TriePosition(NamedTuple):
    """The place in front of block `at` of a run, or behind its last block."""

    run: Run
    at: int


class BlockHolders:
    """The claims of all holders. Call `free_emptied` after each event: nothing is freed before."""

    def __init__(self, trie: RunTrie) -> None:
        self.n_blocks = 0  # held, of all holders together
        self._trie = trie
        self._emptied: list[tuple[Holder, HeldRun]] = []  # that may have to be freed

    def find_position(
        self, holder: Holder, tier: int, parent: int | None, root: Root
    ) -> TriePosition | None:
        """Find where a child of block `parent` goes; None when the holder does not have it."""
        if parent is None:
            return TriePosition(self._trie.root(root), 0)
        for one in (tier, 1 - tier):
            number, at = holder.find(one, parent)
            if number >= 0:
                return TriePosition(holder.held_run(number).run, at + 1)
        return None

    def add_blocks(
        self,
        holder: Holder,
        position: TriePosition,
        tier: int,
        hashes: "array[int]",
        content: bytes,
    ) -> None:
        """Claim a chain of full blocks, which begins at a position; `content` is their tokens."""
        segments = self._trie.grow(position.run, position.at, content)
        numbers = [holder.number(run) for run, _, _ in segments]
        if not self._add_new_blocks(holder, tier, hashes, segments, numbers):
            done = 0
            for (_, at, n_blocks), number in zip(segments, numbers, strict=True):
                for offset, hash_ in enumerate(hashes[done : done + n_blocks]):
                    self._claim(holder, number, at + offset, tier, hash_)
                done += n_blocks

    def _add_new_blocks(
        self,
        holder: Holder,
        tier: int,
        hashes: "array[int]",
        segments: Sequence[Segment],
        numbers: Sequence[int],
    ) -> bool:
        """Claim blocks behind the last one of each held run, all by new hashes.

        False: some are not such, and nothing is done.
        """
        held_runs = [holder.held_run(number) for number in numbers]
        for (_, at, _), held in zip(segments, held_runs, strict=True):
            if held.past or len(held.hashes) != 8 * at:
                return False
        spans = [
            (number, segment.n_blocks) for number, segment in zip(numbers, segments, strict=True)
        ]
        if not holder.enter_all(tier, fold(hashes), spans):
            return False
        packed, done = hashes.tobytes(), 0
        for (run, _, n_blocks), held in zip(segments, held_runs, strict=True):
            before = held_part(held)
            held.extend(packed[done : done + 8 * n_blocks], tier)
            show_part(holder.bit, run, before, held_part(held))
            done += 8 * n_blocks
        self._count(holder, len(hashes))
        return True

    def append_block(self, holder: Holder, hash_: int, parent: int, block: Tokens) -> bool:
        """Claim the block behind the last one of a held run, on the device: a step of decoding.

        False, and nothing is done, where that is not so simple: then use `add_blocks`.
        """
        shards = holder.maps[DEVICE]
        key = parent & FOLD
        number = shards[key >> SHARD_SHIFT].get(key)
        key = hash_ & FOLD
        claims = shards[key >> SHARD_SHIFT]
        if number is None or key in claims or hash_ >> 64 or parent >> 64 or holder.odd[DEVICE]:
            return False
        held = holder.table[number]
        if (
            held is None
            or held.past
            or held.colder
            or held.multi
            or not held.hashes.endswith(parent.to_bytes(8, ORDER))
            or not self._trie.append(held.run, held.lead, block)
        ):
            return False
        held.hashes += hash_.to_bytes(8, ORDER)
        held.lead += 1
        held.run.move(holder.lanes, held.lead - 1, held.lead)
        claims[key] = number
        self._count(holder, 1)
        return True

    def evict_last(self, holder: Holder, hash_: int) -> bool:
        """Remove the last block of a held run. False, and nothing is done: use `release`."""
        key = hash_ & FOLD
        claims = holder.maps[DEVICE][key >> SHARD_SHIFT]
        number = claims.get(key)
        if number is None or hash_ >> 64 or holder.odd[DEVICE]:
            return False
        held = holder.table[number]
        if (
            held is None
            or held.past
            or held.colder
            or held.multi
            or not held.hashes.endswith(hash_.to_bytes(8, ORDER))
        ):
            return False
        del claims[key]
        del held.hashes[-8:]
        held.lead -= 1
        held.run.move(holder.lanes, held.lead + 1, held.lead)
        self._count(holder, -1)
        if not held.lead:
            holder.free(held)
        self._trie.trim(held.run)
        return True

    def evict(self, holder: Holder, hashes: "array[int]") -> Sequence[int]:
        """Remove blocks that end a held run, last first; returns hashes left for `release`."""
        if holder.odd[DEVICE]:
            return hashes
        shards, table, folded = holder.maps[DEVICE], holder.table, fold(hashes)
        others: list[int] = []
        done = 0
        while done < len(hashes):
            number = shards[folded[done] >> SHARD_SHIFT].get(folded[done])
            held = None if number is None else table[number]
            n_gone = 0 if held is None else held.n_evicted(hashes, done)
            if held is None or not n_gone:
                others.append(hashes[done])
                done += 1
                continue
            for key in folded[done : done + n_gone]:
                del shards[key >> SHARD_SHIFT][key]
            done += n_gone
            held.run.move(holder.lanes, held.lead, held.lead - n_gone)
            held.lead -= n_gone
            del held.hashes[8 * held.lead :]
            self._count(holder, -n_gone)
            self._emptied.append((holder, held))
        return others

    def release(self, holder: Holder, tier: int, hash_: int) -> None:
        """Remove one claim of a holder. No-op for one that is not there."""
        number, at = holder.find(tier, hash_)
        if number < 0:
            return
        held = holder.held_run(number)
        before = held_part(held)
        if held.drop_claim(at, (tier, hash_)):
            self._count(holder, -1)
            self._emptied.append((holder, held))
        show_part(holder.bit, held.run, before, held_part(held))
        holder.forget(tier, hash_)

    def free_emptied(self) -> None:
        """Free held runs that have no blocks left, and what no holder has of the trie any more."""
        while self._emptied:
            holder, held = self._emptied.pop()
            if not held.hashes:
                holder.free(held)
            self._trie.trim(held.run)

    def _claim(self, holder: Holder, number: int, at: int, tier: int, hash_: int) -> None:
        held = holder.held_run(number)
        known = holder.find(tier, hash_)
        if known == (number, at):
            return
        if known[0] >= 0:
            self.release(holder, tier, hash_)
        before = held_part(held)
        if held.add_claim(at, (tier, hash_)):
            self._count(holder, 1)
            if before.past and not held.past:
                self._emptied.append((holder, held))  # its hole kept the run from being trimmed
        show_part(holder.bit, held.run, before, held_part(held))
        holder.enter(tier, hash_, number)

    def _count(self, holder: Holder, n_blocks: int) -> None:
        holder.n_blocks += n_blocks
        self.n_blocks += n_blocks


def unsigned(hashes: Hashes) -> "array[int]":
    """64-bit hashes, signed or not, as unsigned numbers. Raises `ValueError` for any others."""
    if isinstance(hashes, np.ndarray):
        return array("Q", hashes.astype(np.uint64).tobytes())
    try:
        return array("Q", hashes)
    except OverflowError:
        for hash_ in hashes:
            if not -(1 << 63) <= hash_ <= _U64:
                raise ValueError(f"hashes: {hash_} is not a 64-bit number") from None
        return array("Q", [hash_ & _U64 for hash_ in hashes])
