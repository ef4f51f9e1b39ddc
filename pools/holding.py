"""A holder's part of one run: which of its blocks, by what engine hashes, in which tiers.

An engine's event names a block by a hash that means something to that engine only. Each (tier, hash) a
holder was told of is a claim on one block; a block is held until its last claim goes.

    block     0    1    2    3    4
    hashes   h0   h1    -   h3   h4     lead 2, past 0b11000 (a hole at 2), colder 0b10000: h4 is not on the
    tier      D    D         D    H     device, so the device's lead is 2 as well
"""

import sys
from array import array

import msgspec

from slagate.pools.pending import Claim
from slagate.pools.run_trie import Run

ORDER = sys.byteorder
"""Of the bytes of hashes in memory."""

_ONE_EACH: dict[int, list[Claim]] = {}


class Holding(msgspec.Struct, gc=False, eq=False):
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
