"""Blocks of one holder whose parent is not known yet. Bounded: the oldest go first."""

from collections import OrderedDict
from typing import NamedTuple

Claim = tuple[int, int]
"""Tier and engine hash: what a holder is told to have."""


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
