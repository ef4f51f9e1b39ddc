"""Allocates holder bits in the prefix index, and frees the blocks of removed holders step by step.

A holder has two lanes, bits of every mask: one for any tier, one for the device. To clear a holder its
lanes are taken out of `live` at once, and it gets fresh ones; its blocks are freed in small steps, and only
then is the bit used again.
"""

import heapq
from collections import deque
from typing import Any, NamedTuple

from slagate.pools.prefix.holder import HeldRun, Holder
from slagate.pools.prefix.trie import Run, RunTrie

BOTH = 0b11
"""The lanes of holder bit 0: any tier, device."""

_HELD_RUN_COST = 20
"""The work of freeing a held run, in claims."""


class HeldPart(NamedTuple):
    """Which blocks of a run a holder has, as queries see it."""

    lead: int  # leading blocks, in any tier
    device_lead: int  # leading blocks that are all on the device
    past: int  # bitmap of the blocks beyond a hole


NOTHING = HeldPart(0, 0, 0)


def held_part(held: HeldRun) -> HeldPart:
    """A frozen copy of what queries read of a held run."""
    return HeldPart(held.lead, held.device_lead, held.past)


def show_part(bit: int, run: Run, old: HeldPart, new: HeldPart) -> None:
    """Tell a run that the part of it which the holder of `bit` has changes from `old` to `new`."""
    if old.lead == old.device_lead and new.lead == new.device_lead:
        if old.lead != new.lead:
            run.move(BOTH << 2 * bit, old.lead, new.lead)
    else:
        for lane in (0, 1):
            if old[lane] != new[lane]:
                run.move(1 << 2 * bit + lane, old[lane], new[lane])
    run.n_past += (new.past != 0) - (old.past != 0)


class _RetiredHolder:
    """The blocks of a holder that was cleared or left, until they are freed."""

    def __init__(self, holder: Holder) -> None:
        self.bit = holder.bit
        self.held_runs = holder.table
        self.claims: list[dict[Any, int]] = [*holder.maps[0], *holder.maps[1], holder.by_run]


class HolderSlots:
    """The bits of an index's holders; each has two lanes."""

    def __init__(self, trie: RunTrie) -> None:
        self.live = 0  # mask of the lanes that count
        self.n_bits = 0
        self.n_changes = 0  # times that the bit of a holder changed
        self.n_retired_blocks = 0  # of holders that are gone, not freed yet
        self._trie = trie
        self._free_bits: list[int] = []
        self._retired: deque[_RetiredHolder] = deque()

    def allocate(self) -> int:
        """Allocate a bit, whose lanes count from now on."""
        if self._free_bits:
            bit = heapq.heappop(self._free_bits)
        else:
            bit = self.n_bits
            self.n_bits += 1
        self.live |= BOTH << 2 * bit
        self.n_changes += 1
        return bit

    def retire(self, holder: Holder) -> None:
        """Take a holder's lanes out of `live`, in O(1). The caller has it start empty."""
        if holder.bit >= 0:
            self.n_changes += 1
            self.live &= ~(BOTH << 2 * holder.bit)
            self.n_retired_blocks += holder.n_blocks
            self._retired.append(_RetiredHolder(holder))

    def sweep(self, n_blocks: int) -> bool:
        """Free about `n_blocks` blocks of retired holders. False when none are left."""
        while self._retired and n_blocks > 0:
            retired = self._retired[0]
            while retired.held_runs and n_blocks > 0:
                held = retired.held_runs.pop()
                n_blocks -= _HELD_RUN_COST
                if held is not None:
                    self.n_retired_blocks -= held.n_blocks
                    show_part(retired.bit, held.run, held_part(held), NOTHING)
                    self._trie.trim(held.run)
            for claims in retired.claims:
                while claims and n_blocks > 0:
                    claims.popitem()
                    n_blocks -= 1
            if not retired.held_runs and not any(retired.claims):
                self._retired.popleft()
                heapq.heappush(self._free_bits, retired.bit)
        return bool(self._retired)
