"""One worker's attention-DP rank in the prefix index: its claims, found by the engine's block hashes.

    maps[tier]: hash, folded to 60 bits ─▶ number ─▶ table: Holding ─▶ run, and the hashes by block number

Many blocks share one number object, so a claim costs a dict slot, the folded hash (two digits of a Python
int, where 64 bits take three) and 8 bytes in the holding. Ints only: the collector never walks such a dict.
A map is several dicts, by the hash's top bits: one large dict grows in one long pause.

A `Holding` is a holder's part of one run: which of its blocks, by what engine hashes, in which tiers. An
engine's event names a block by a hash that means something to that engine only. Each (tier, hash) a holder
was told of is a claim on one block; a block is held until its last claim goes.

    block     0    1    2    3    4
    hashes   h0   h1    -   h3   h4     lead 2, past 0b11000 (a hole at 2), colder 0b10000: h4 is not on the
    tier      D    D         D    H     device, so the device's lead is 2 as well
"""

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from slagate.pools.prefix.trie import Run

ORDER = sys.byteorder
"""Of the bytes of hashes in memory."""

Claim = tuple[int, int]
"""Tier and engine hash: what a holder is told to have."""

_ONE_EACH: dict[int, list[Claim]] = {}


class HeldRun(msgspec.Struct, gc=False, eq=False):
    """A holder's part of one run.

    Hashes are 8 bytes each, in the machine's order: bytes are no work for the garbage collector. Nor is a
    holding itself (`gc=False`), and no cycle goes through one: a run knows nothing of holdings.
    """

    run: Run
    # By block number, up to the last held; anything in a hole.
    hashes: bytearray = msgspec.field(default_factory=bytearray)
    # Block -> its claims, where there are several; one dict for all without.
    multi: dict[int, list[Claim]] = msgspec.field(default_factory=lambda: _ONE_EACH)
    lead: int = 0  # leading blocks held
    past: int = 0  # bitmap of the blocks held beyond a hole
    colder: int = 0  # bitmap of the blocks held, but not on the device

    @property
    def n_blocks(self) -> int:
        """Blocks held."""
        return self.lead + bin(self.past).count("1")

    @property
    def device_lead(self) -> int:
        """Leading blocks that are all on the device."""
        colder = self.colder
        return min(self.lead, (colder & -colder).bit_length() - 1) if colder else self.lead

    def holds(self, at: int) -> bool:
        """Whether a block is held."""
        return at < self.lead or bool(self.past >> at & 1)

    def find(self, tier: int, hash_: int) -> int:
        """The block a claim of this holding is on; -1: it is not of this holding."""
        wanted = hash_.to_bytes(8, ORDER)
        last = len(self.hashes) // 8 - 1
        # Decoding goes on from the last block, and engines evict leaves first.
        if not self.multi and self.hashes.endswith(wanted) and self._tier(last) == tier:
            return last
        position = self.hashes.find(wanted)
        while position >= 0:
            at, rest = divmod(position, 8)
            if not rest and self.holds(at) and at not in self.multi and self._tier(at) == tier:
                return at
            position = self.hashes.find(wanted, position + 1)
        for at, claims in self.multi.items():
            if (tier, hash_) in claims:
                return at
        return -1

    def n_evicted(self, hashes: "array[int]", start: int) -> int:
        """How many of some hashes, from a place on, are the last blocks here, the last one first.

        Only of a holding that is nothing but leading blocks on the device, with one claim each.
        """
        wanted = hashes[start : start + len(self.hashes) // 8]
        if self.past or self.colder or self.multi or not wanted:
            return 0
        last = array("Q", bytes(self.hashes[-8 * len(wanted) :]))
        last.reverse()
        if last == wanted:
            return len(last)
        return next(
            at for at, pair in enumerate(zip(last, wanted, strict=True)) if pair[0] != pair[1]
        )

    def claims(self, at: int) -> list[Claim]:
        """All claims on a held block."""
        return self.multi.get(at) or [
            (self._tier(at), int.from_bytes(self.hashes[8 * at : 8 * at + 8], ORDER))
        ]

    def extend(self, hashes: bytes, tier: int) -> None:
        """Blocks more behind the last one, of a holding without holes."""
        n_blocks = len(hashes) // 8
        if tier:
            self.colder |= (1 << n_blocks) - 1 << self.lead
        self.hashes += hashes
        self.lead += n_blocks

    def add(self, at: int, claim: Claim) -> bool:
        """A claim more on a block. True when the block was not held."""
        tier, hash_ = claim
        bit = 1 << at
        if self.holds(at):
            self._set_claims(at, [*self.claims(at), claim])
            if not tier:
                self.colder &= ~bit
            return False
        self.hashes += bytes(max(0, 8 * (at + 1) - len(self.hashes)))
        self.hashes[8 * at : 8 * at + 8] = hash_.to_bytes(8, ORDER)
        if tier:
            self.colder |= bit
        self.past |= bit
        if at == self.lead:
            reached = self.past >> at
            n_more = (~reached & reached + 1).bit_length() - 1
            self.lead += n_more
            self.past = reached >> n_more << self.lead
        return True

    def drop(self, at: int, claim: Claim) -> bool:
        """A claim less on a block. True when the block is not held any more."""
        bit = 1 << at
        claims = [one for one in self.multi.pop(at, ()) if one != claim] if self.multi else []
        if claims:
            if all(tier for tier, _ in claims):
                self.colder |= bit
            if len(claims) > 1:
                self._set_claims(at, claims)
            else:
                self.hashes[8 * at : 8 * at + 8] = claims[0][1].to_bytes(8, ORDER)
            return False
        if at < self.lead:
            self.past |= (1 << self.lead) - (bit << 1)
            self.lead = at
        else:
            self.past &= ~bit
        self.colder &= ~bit
        del self.hashes[8 * max(self.lead, self.past.bit_length()) :]
        return True

    def _set_claims(self, at: int, claims: list[Claim]) -> None:
        if self.multi is _ONE_EACH:
            self.multi = {}
        self.multi[at] = claims

    def _tier(self, at: int) -> int:
        """The tier of the only claim on a block."""
        return self.colder >> at & 1


class PendingBlock(NamedTuple):
    """A block that waits; `number` grows with the time of arrival."""

    number: int
    parent: int
    content: bytes


class PendingBlocks:
    """At most `limit` blocks, by claim, and by the parent's hash."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # In the order of arrival; a plain dict looks for its first key past all that were removed.
        self.blocks: OrderedDict[Claim, PendingBlock] = OrderedDict()
        self._children: dict[int, dict[Claim, None]] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def put(self, claim: Claim, parent: int, content: bytes) -> bool:
        """Let a block wait; the newest word on a claim counts. False when the oldest had to go."""
        self.cancel(claim)
        self.blocks[claim] = PendingBlock(self._next_number, parent, content)
        self._next_number += 1
        self._children.setdefault(parent, {})[claim] = None
        if len(self.blocks) <= self.limit:
            return True
        self.cancel(next(iter(self.blocks)))
        return False

    def cancel(self, claim: Claim) -> None:
        """Wait for a block no more. No-op for one that does not wait."""
        block = self.blocks.pop(claim, None)
        if block is not None:
            siblings = self._children[block.parent]
            del siblings[claim]
            if not siblings:
                del self._children[block.parent]

    def below(self, parent: int) -> list[tuple[int, Claim]]:
        """Arrival number and claim of the blocks that wait for a parent."""
        return [(self.blocks[claim].number, claim) for claim in self._children.get(parent, ())]


FOLD = (1 << 60) - 1
SHARD_SHIFT = 56
"""What is left of a folded hash says which dict of a map it is in."""

_N_SHARDS = 16

Shards = tuple[dict[int, int], ...]


class Holder:
    """One worker's attention-DP rank; changed by its `PrefixIndex` only."""

    __slots__ = (
        "_free",
        "bit",
        "by_run",
        "has_gap",
        "lanes",
        "maps",
        "n_blocks",
        "n_dropped",
        "odd",
        "pending",
        "table",
    )

    def __init__(self, bit: int, max_pending: int) -> None:
        self.n_dropped = (
            0  # blocks that were not taken: the index is full, or too many were pending
        )
        self.start(bit, PendingBlocks(max_pending))

    def start(self, bit: int, pending: PendingBlocks) -> None:
        """Begin with nothing."""
        self.bit = bit  # -1 after it left
        self.lanes = 0b11 << 2 * bit if bit >= 0 else 0  # any tier, device
        self.n_blocks = 0
        self.has_gap = False  # blocks were not taken: it holds more than is known here
        self.maps: tuple[Shards, Shards] = (_shards(), _shards())
        # Claims whose folded hash another claim has taken: whole hash -> number.
        self.odd: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self.table: list[HeldRun | None] = []
        self.by_run: dict[Run, int] = {}
        self.pending = pending
        self._free: list[int] = []

    @property
    def n_pending(self) -> int:
        """Blocks whose parent is not known (yet)."""
        return len(self.pending)

    def find(self, tier: int, hash_: int) -> tuple[int, int]:
        """Number of the holding and block that a claim is on; (-1, -1): there is no such claim."""
        number = self.odd[tier].get(hash_) if self.odd[tier] else None
        if number is None:
            key = hash_ & FOLD
            number = self.maps[tier][key >> SHARD_SHIFT].get(key)
            if number is None:
                return -1, -1
        holding = self.table[number]
        at = -1 if holding is None else holding.find(tier, hash_)
        return (number, at) if at >= 0 else (-1, -1)

    def holding(self, number: int) -> HeldRun:
        """The holding of a number that is in use."""
        holding = self.table[number]
        assert holding is not None
        return holding

    def number(self, run: Run) -> int:
        """The number of its holding of a run; an empty one is made."""
        number = self.by_run.get(run)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.table[number] = HeldRun(run)
            else:
                number = len(self.table)
                self.table.append(HeldRun(run))
            self.by_run[run] = number
        return number

    def enter(self, tier: int, hash_: int, number: int) -> None:
        """Note where a claim that is not there yet is found."""
        key = hash_ & FOLD
        shard = self.maps[tier][key >> SHARD_SHIFT]
        if key in shard:
            self.odd[tier][hash_] = number
        else:
            shard[key] = number

    def enter_all(self, tier: int, keys: Sequence[int], spans: Iterable[tuple[int, int]]) -> bool:
        """Note where claims are found, by folded hash: so many each in the holdings of these numbers.

        False when one of them is there already, or twice here; then none is noted.
        """
        if self.odd[tier]:
            return False
        shards = self.maps[tier]
        done = 0
        for number, n_keys in spans:
            for at, key in enumerate(keys[done : done + n_keys], done):
                shard = shards[key >> SHARD_SHIFT]
                if key in shard:
                    for entered in keys[:at]:
                        del shards[entered >> SHARD_SHIFT][entered]
                    return False
                shard[key] = number
            done += n_keys
        return True

    def forget(self, tier: int, hash_: int) -> None:
        """Note that a claim is gone."""
        if self.odd[tier].pop(hash_, None) is None:
            key = hash_ & FOLD
            del self.maps[tier][key >> SHARD_SHIFT][key]

    def free(self, holding: HeldRun) -> None:
        """Give up a holding that is empty. No-op for one that was given up."""
        number = self.by_run.get(holding.run)
        if number is not None and self.table[number] is holding:
            del self.by_run[holding.run]
            self.table[number] = None
            self._free.append(number)


def _shards() -> Shards:
    return tuple({} for _ in range(_N_SHARDS))


def fold(hashes: "array[int]") -> list[int]:
    """Hashes as keys of a holder's maps."""
    if len(hashes) < 16:
        return [hash_ & FOLD for hash_ in hashes]
    keys: list[int] = (np.frombuffer(hashes, np.uint64) & np.uint64(FOLD)).tolist()
    return keys
