"""Which lanes of the prefix index count, and the orderly taking apart of those that do not any more.

A holder's lanes are two bits of every mask: any tier, and the device. To clear a holder is to take away its
lanes at once and to give it fresh ones; what hung on the old ones is given up in small steps, and only then
is their bit used again.
"""

import heapq
from collections import deque
from typing import Any, NamedTuple

from slagate.pools.prefix.holder import HeldRun, Holder
from slagate.pools.prefix.trie import Run, RunTrie

BOTH = 0b11
"""The lanes of bit 0: any tier, device."""

_HOLDING_COST = 20  # what giving up a holding takes, in claims


class HeldPart(NamedTuple):
    """What a holder has of a run, as far as queries can tell."""

    lead: int
    device_lead: int
    past: int  # bitmap of what it has beyond a hole


NOTHING = HeldPart(0, 0, 0)


def reach(holding: HeldRun) -> HeldPart:
    """Of a holding, as it is now."""
    return HeldPart(holding.lead, holding.device_lead, holding.past)


def show(bit: int, run: Run, old: HeldPart, new: HeldPart) -> None:
    """Tell a run what a holder has of it now."""
    if old.lead == old.device_lead and new.lead == new.device_lead:
        if old.lead != new.lead:
            run.move(BOTH << 2 * bit, old.lead, new.lead)
    else:
        for lane in (0, 1):
            if old[lane] != new[lane]:
                run.move(1 << 2 * bit + lane, old[lane], new[lane])
    run.n_past += (new.past != 0) - (old.past != 0)


class _RetiredHolder:
    """What is left of a holder that was cleared or left."""

    def __init__(self, holder: Holder) -> None:
        self.bit = holder.bit
        self.holdings = holder.table
        self.claims: list[dict[Any, int]] = [*holder.maps[0], *holder.maps[1], holder.by_run]


class HolderSlots:
    """The lanes of an index's holders."""

    def __init__(self, trie: RunTrie) -> None:
        self.live = 0
        self.n_bits = 0
        self.n_changes = 0  # times that a holder's bit has become another one
        self.n_dead_blocks = 0  # of holders that are gone, not given up yet
        self._trie = trie
        self._free_bits: list[int] = []
        self._graves: deque[_RetiredHolder] = deque()

    def take(self) -> int:
        """A bit whose lanes count from now on."""
        if self._free_bits:
            bit = heapq.heappop(self._free_bits)
        else:
            bit = self.n_bits
            self.n_bits += 1
        self.live |= BOTH << 2 * bit
        self.n_changes += 1
        return bit

    def bury(self, holder: Holder) -> None:
        """A holder's lanes count no more, in O(1). It is started anew by the caller."""
        if holder.bit >= 0:
            self.n_changes += 1
            self.live &= ~(BOTH << 2 * holder.bit)
            self.n_dead_blocks += holder.n_blocks
            self._graves.append(_RetiredHolder(holder))

    def sweep(self, n_blocks: int) -> bool:
        """Give up about so many blocks of the dead. False when nothing is left to do."""
        while self._graves and n_blocks > 0:
            grave = self._graves[0]
            while grave.holdings and n_blocks > 0:
                holding = grave.holdings.pop()
                n_blocks -= _HOLDING_COST
                if holding is not None:
                    self.n_dead_blocks -= holding.n_blocks
                    show(grave.bit, holding.run, reach(holding), NOTHING)
                    self._trie.trim(holding.run)
            for claims in grave.claims:
                while claims and n_blocks > 0:
                    claims.popitem()
                    n_blocks -= 1
            if not grave.holdings and not any(grave.claims):
                self._graves.popleft()
                heapq.heappush(self._free_bits, grave.bit)
        return bool(self._graves)
