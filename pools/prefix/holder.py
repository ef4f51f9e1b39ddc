"""One worker's attention-DP rank in the prefix index: its claims, found by the engine's block hashes.

    maps[tier]: hash, folded to 60 bits ─▶ number ─▶ table: HeldRun ─▶ run, and the hashes by block number

Many blocks share one number object, so a claim costs a dict slot, the folded hash (two digits of a Python
int, where 64 bits take three) and 8 bytes in the held run. The dicts have only ints, so the garbage
collector never walks them. A map is several dicts, by the hash's top bits: one large dict would grow in one
long pause.

A `HeldRun` is a holder's part of one run: which of its blocks, by what engine hashes, in which tiers. An
engine's event names a block by a hash that means something to that engine only. Each `BlockRef` that an
event stores is a claim on one block; a block is held until its last claim goes.

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
"""The order of the bytes of hashes in memory."""

BlockRef = tuple[int, int]
"""Tier and engine hash, by which events name a block."""

_ONE_EACH: dict[int, list[BlockRef]] = {}


class HeldRun(msgspec.Struct, gc=False, eq=False):
    """A holder's part of one run. No cycle goes through it, so the collector need not see it."""

    run: Run
    # 8 bytes by block number, in the machine's order, up to the last one held; in a hole, any.
    hashes: bytearray = msgspec.field(default_factory=bytearray)
    # Block -> its claims, where it has several. Held runs without such blocks share one dict.
    multi: dict[int, list[BlockRef]] = msgspec.field(default_factory=lambda: _ONE_EACH)
    lead: int = 0  # leading blocks held
    past: int = 0  # bitmap of the blocks held beyond a hole
    colder: int = 0  # bitmap of the blocks held, but not on the device

    @property
    def n_blocks(self) -> int:
        """How many blocks of the run are held."""
        return self.lead + bin(self.past).count("1")

    @property
    def device_lead(self) -> int:
        """Leading blocks that are all on the device."""
        colder = self.colder
        return min(self.lead, (colder & -colder).bit_length() - 1) if colder else self.lead

    def holds(self, at: int) -> bool:
        """Whether block number `at` of the run is held."""
        return at < self.lead or bool(self.past >> at & 1)

    def find(self, tier: int, hash_: int) -> int:
        """The number of the block in the run that a claim is on; -1: it is on none of this run."""
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
        """How many of `hashes` from `start` on are the last blocks here, the last one first.

        0 unless all blocks here are leading ones on the device with one claim each.
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

    def claims(self, at: int) -> list[BlockRef]:
        """All claims on a held block."""
        return self.multi.get(at) or [
            (self._tier(at), int.from_bytes(self.hashes[8 * at : 8 * at + 8], ORDER))
        ]

    def extend(self, hashes: bytes, tier: int) -> None:
        """Add blocks behind the last one, by hashes of 8 bytes each. There must be no hole."""
        n_blocks = len(hashes) // 8
        if tier:
            self.colder |= (1 << n_blocks) - 1 << self.lead
        self.hashes += hashes
        self.lead += n_blocks

    def add_claim(self, at: int, claim: BlockRef) -> bool:
        """Add a claim on block number `at`. True when the block was not held."""
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

    def drop_claim(self, at: int, claim: BlockRef) -> bool:
        """Drop a claim on block number `at`. True when the block is not held any more."""
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

    def _set_claims(self, at: int, claims: list[BlockRef]) -> None:
        if self.multi is _ONE_EACH:
            self.multi = {}
        self.multi[at] = claims

    def _tier(self, at: int) -> int:
        """The tier of the only claim on a block."""
        return self.colder >> at & 1


class PendingBlock(NamedTuple):
    """A block whose parent is not known yet."""

    number: int  # grows with the time of arrival
    parent: int  # its hash
    content: bytes


class PendingBlocks:
    """The blocks of one holder whose parents are not known yet: at most `limit`, the oldest go first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # In the order of arrival; a plain dict would search for its first key past all removed ones.
        self.blocks: OrderedDict[BlockRef, PendingBlock] = OrderedDict()
        self._children: dict[int, dict[BlockRef, None]] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def put(self, claim: BlockRef, parent: int, content: bytes) -> bool:
        """Add a block, in place of another by the same claim. False when the oldest had to go."""
        self.cancel(claim)
        self.blocks[claim] = PendingBlock(self._next_number, parent, content)
        self._next_number += 1
        self._children.setdefault(parent, {})[claim] = None
        if len(self.blocks) <= self.limit:
            return True
        self.cancel(next(iter(self.blocks)))
        return False

    def cancel(self, claim: BlockRef) -> None:
        """Drop a block. No-op for one that is not there."""
        block = self.blocks.pop(claim, None)
        if block is not None:
            siblings = self._children[block.parent]
            del siblings[claim]
            if not siblings:
                del self._children[block.parent]

    def children_of(self, parent: int) -> list[tuple[int, BlockRef]]:
        """(arrival number, claim) of each block that waits for the parent with this hash."""
        return [(self.blocks[claim].number, claim) for claim in self._children.get(parent, ())]


FOLD = (1 << 60) - 1
SHARD_SHIFT = 56
"""A folded hash shifted by this is the number of its dict in a map."""

_N_SHARDS = 16

Shards = tuple[dict[int, int], ...]


class Holder:
    """An attention-DP rank of a worker, with its blocks; only its `PrefixIndex` changes it."""

    __slots__ = (
        "_free",
        "_max_pending",
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
        # Blocks that were not taken, as the index was full or too many were pending.
        self.n_dropped = 0
        self._max_pending = max_pending
        self.start_empty(bit)

    def start_empty(self, bit: int) -> None:
        """Begin with nothing, at first and after a clearing."""
        self.bit = bit  # -1 after it left
        self.lanes = 0b11 << 2 * bit if bit >= 0 else 0  # any tier, device
        self.n_blocks = 0
        self.has_gap = False  # it holds more than is known here, as blocks were not taken
        self.maps: tuple[Shards, Shards] = (_shards(), _shards())
        # Claims whose folded hash another claim has taken: whole hash -> number.
        self.odd: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self.table: list[HeldRun | None] = []
        self.by_run: dict[Run, int] = {}
        self.pending = PendingBlocks(self._max_pending)
        self._free: list[int] = []

    @property
    def n_pending(self) -> int:
        """Blocks whose parents are not known yet."""
        return len(self.pending)

    def find(self, tier: int, hash_: int) -> tuple[int, int]:
        """(number of the held run, block in it) that a claim is on; (-1, -1): no such claim."""
        number = self.odd[tier].get(hash_) if self.odd[tier] else None
        if number is None:
            key = hash_ & FOLD
            number = self.maps[tier][key >> SHARD_SHIFT].get(key)
            if number is None:
                return -1, -1
        held = self.table[number]
        at = -1 if held is None else held.find(tier, hash_)
        return (number, at) if at >= 0 else (-1, -1)

    def held_run(self, number: int) -> HeldRun:
        """The held run of a number that is in use."""
        held = self.table[number]
        assert held is not None
        return held

    def number(self, run: Run) -> int:
        """The number of its held run of `run`; an empty one is made where it has none."""
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
        """Note that a new claim is in the held run of this number."""
        key = hash_ & FOLD
        shard = self.maps[tier][key >> SHARD_SHIFT]
        if key in shard:
            self.odd[tier][hash_] = number
        else:
            shard[key] = number

    def enter_all(self, tier: int, keys: Sequence[int], spans: Iterable[tuple[int, int]]) -> bool:
        """Note new claims by folded hash; `spans` are numbers of held runs, and how many are in each.

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

    def free(self, held: HeldRun) -> None:
        """Free an empty held run. No-op for one that was freed."""
        number = self.by_run.get(held.run)
        if number is not None and self.table[number] is held:
            del self.by_run[held.run]
            self.table[number] = None
            self._free.append(number)


def _shards() -> Shards:
    return tuple({} for _ in range(_N_SHARDS))


def fold(hashes: "array[int]") -> list[int]:
    """Hashes as keys of a holder's maps: folded to 60 bits."""
    if len(hashes) < 16:
        return [hash_ & FOLD for hash_ in hashes]
    keys: list[int] = (np.frombuffer(hashes, np.uint64) & np.uint64(FOLD)).tolist()
    return keys
