"""The changes that events make: which holder claims which blocks of the trie.

A claim is looked up by its hash and kept in a holding (both in `holder`), and shown to the run, where
queries read it. Evictions and decode steps have ways of their own: they are most of all events.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slagate.pools.prefix.holder import FOLD, ORDER, SHARD_SHIFT, HeldRun, Holder, fold
from slagate.pools.prefix.lanes import reach, show
from slagate.pools.prefix.trie import Root, Run, RunTrie, Segment, Tokens

DEVICE, HOST = 0, 1
"""Tiers; anything colder than the device is HOST."""

Hashes = Sequence[int] | NDArray[np.uint64]

_U64 = (1 << 64) - 1


class TriePosition(NamedTuple):
    """Before a block of a run, or behind its last."""

    run: Run
    at: int


class BlockHolders:
    """The claims of all holders. `tidy` must follow a step: until then nothing is given up."""

    def __init__(self, trie: RunTrie) -> None:
        self.n_blocks = 0  # held, of all holders together
        self._trie = trie
        self._thinner: list[tuple[Holder, HeldRun]] = []  # which may have to be given up

    def place(
        self, holder: Holder, tier: int, parent: int | None, root: Root
    ) -> TriePosition | None:
        """Where a child of `parent` goes; None when the holder does not have that."""
        if parent is None:
            return TriePosition(self._trie.root(root), 0)
        for one in (tier, 1 - tier):
            number, at = holder.find(one, parent)
            if number >= 0:
                return TriePosition(holder.holding(number).run, at + 1)
        return None

    def hold(
        self, holder: Holder, place: TriePosition, tier: int, hashes: "array[int]", content: bytes
    ) -> None:
        """Claim full blocks, one after the other from a place on."""
        segments = self._trie.grow(place.run, place.at, content)
        numbers = [holder.number(run) for run, _, _ in segments]
        if not self._hold_news(holder, tier, hashes, segments, numbers):
            done = 0
            for (_, at, n_blocks), number in zip(segments, numbers, strict=True):
                for offset, hash_ in enumerate(hashes[done : done + n_blocks]):
                    self._claim(holder, number, at + offset, tier, hash_)
                done += n_blocks

    def _hold_news(
        self,
        holder: Holder,
        tier: int,
        hashes: "array[int]",
        segments: Sequence[Segment],
        numbers: Sequence[int],
    ) -> bool:
        """Claim what is behind the last block of each holding, by new hashes. False: nothing is done."""
        holdings = [holder.holding(number) for number in numbers]
        for (_, at, _), holding in zip(segments, holdings, strict=True):
            if holding.past or len(holding.hashes) != 8 * at:
                return False
        spans = [
            (number, segment.n_blocks) for number, segment in zip(numbers, segments, strict=True)
        ]
        if not holder.enter_all(tier, fold(hashes), spans):
            return False
        packed, done = hashes.tobytes(), 0
        for (run, _, n_blocks), holding in zip(segments, holdings, strict=True):
            before = reach(holding)
            holding.extend(packed[done : done + 8 * n_blocks], tier)
            show(holder.bit, run, before, reach(holding))
            done += 8 * n_blocks
        self._count(holder, len(hashes))
        return True

    def go_on(self, holder: Holder, hash_: int, parent: int, block: Tokens) -> bool:
        """A decode step: claim the block behind the last of a plain holding, on the device.

        False for anything else, with nothing done.
        """
        shards = holder.maps[DEVICE]
        key = parent & FOLD
        number = shards[key >> SHARD_SHIFT].get(key)
        key = hash_ & FOLD
        claims = shards[key >> SHARD_SHIFT]
        if number is None or key in claims or hash_ >> 64 or parent >> 64 or holder.odd[DEVICE]:
            return False
        holding = holder.table[number]
        if (
            holding is None
            or holding.past
            or holding.colder
            or holding.multi
            or not holding.hashes.endswith(parent.to_bytes(8, ORDER))
            or not self._trie.append(holding.run, holding.lead, block)
        ):
            return False
        holding.hashes += hash_.to_bytes(8, ORDER)
        holding.lead += 1
        holding.run.move(holder.lanes, holding.lead - 1, holding.lead)
        claims[key] = number
        self._count(holder, 1)
        return True

    def evict_last(self, holder: Holder, hash_: int) -> bool:
        """Remove the last block of a plain holding. False for anything else, with nothing done."""
        key = hash_ & FOLD
        claims = holder.maps[DEVICE][key >> SHARD_SHIFT]
        number = claims.get(key)
        if number is None or hash_ >> 64 or holder.odd[DEVICE]:
            return False
        holding = holder.table[number]
        if (
            holding is None
            or holding.past
            or holding.colder
            or holding.multi
            or not holding.hashes.endswith(hash_.to_bytes(8, ORDER))
        ):
            return False
        del claims[key]
        del holding.hashes[-8:]
        holding.lead -= 1
        holding.run.move(holder.lanes, holding.lead + 1, holding.lead)
        self._count(holder, -1)
        if not holding.lead:
            holder.free(holding)
        self._trie.trim(holding.run)
        return True

    def evict(self, holder: Holder, hashes: "array[int]") -> Sequence[int]:
        """Remove what is the end of a plain holding, the last block first. The others are returned."""
        if holder.odd[DEVICE]:
            return hashes
        shards, table, folded = holder.maps[DEVICE], holder.table, fold(hashes)
        others: list[int] = []
        done = 0
        while done < len(hashes):
            number = shards[folded[done] >> SHARD_SHIFT].get(folded[done])
            holding = None if number is None else table[number]
            n_gone = 0 if holding is None else holding.n_evicted(hashes, done)
            if holding is None or not n_gone:
                others.append(hashes[done])
                done += 1
                continue
            for key in folded[done : done + n_gone]:
                del shards[key >> SHARD_SHIFT][key]
            done += n_gone
            holding.run.move(holder.lanes, holding.lead, holding.lead - n_gone)
            holding.lead -= n_gone
            del holding.hashes[8 * holding.lead :]
            self._count(holder, -n_gone)
            self._thinner.append((holder, holding))
        return others

    def release(self, holder: Holder, tier: int, hash_: int) -> None:
        """Remove any claim. No-op for one that is not there."""
        number, at = holder.find(tier, hash_)
        if number < 0:
            return
        holding = holder.holding(number)
        before = reach(holding)
        if holding.drop(at, (tier, hash_)):
            self._count(holder, -1)
            self._thinner.append((holder, holding))
        show(holder.bit, holding.run, before, reach(holding))
        holder.forget(tier, hash_)

    def tidy(self) -> None:
        """Give up what has been emptied."""
        while self._thinner:
            holder, holding = self._thinner.pop()
            if not holding.hashes:
                holder.free(holding)
            self._trie.trim(holding.run)

    def _claim(self, holder: Holder, number: int, at: int, tier: int, hash_: int) -> None:
        holding = holder.holding(number)
        known = holder.find(tier, hash_)
        if known == (number, at):
            return
        if known[0] >= 0:
            self.release(holder, tier, hash_)
        before = reach(holding)
        if holding.add(at, (tier, hash_)):
            self._count(holder, 1)
            if before.past and not holding.past:
                self._thinner.append((holder, holding))  # its hole kept the run from being trimmed
        show(holder.bit, holding.run, before, reach(holding))
        holder.enter(tier, hash_, number)

    def _count(self, holder: Holder, n_blocks: int) -> None:
        holder.n_blocks += n_blocks
        self.n_blocks += n_blocks


def unsigned(hashes: Hashes) -> "array[int]":
    """64-bit hashes as numbers from 0 to 2**64 - 1; producers spell them signed or unsigned.

    Raises `ValueError` for a number that is neither.
    """
    if isinstance(hashes, np.ndarray):
        return array("Q", hashes.astype(np.uint64).tobytes())
    try:
        return array("Q", hashes)
    except OverflowError:
        for hash_ in hashes:
            if not -(1 << 63) <= hash_ <= _U64:
                raise ValueError(f"hashes: {hash_} is not a 64-bit number") from None
        return array("Q", [hash_ & _U64 for hash_ in hashes])
