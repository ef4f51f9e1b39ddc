"""The prefix index done naively: each holder's claims with their full token prefixes, walked every time."""

from collections.abc import Sequence
from typing import NamedTuple

from slagate.pools.prefix.trie import Root

# The root, and all blocks from the first one on.
Path = tuple[Root | bytes, ...]
Claim = tuple[int, int]


class Waiting(NamedTuple):
    parent: int
    block: bytes


class NaiveHolder:
    def __init__(self) -> None:
        self.claims: dict[Claim, Path] = {}
        self.pending: dict[Claim, Waiting] = {}  # in the order of arrival
        self.n_dropped = 0
        self.has_gap = False

    @property
    def held(self) -> set[Path]:
        return set(self.claims.values())

    def where(self, tier: int, hash_: int) -> Path | None:
        own = self.claims.get((tier, hash_))
        return self.claims.get((1 - tier, hash_)) if own is None else own

    def depth(self, query: Sequence[bytes], root: Root, *, device_only: bool) -> int:
        held = {path for (tier, _), path in self.claims.items() if not (device_only and tier)}
        depth = 0
        while depth < len(query) and (root, *query[: depth + 1]) in held:
            depth += 1
        return depth


class NaiveIndex:
    def __init__(self, *, max_pairs: int, max_pending: int) -> None:
        self.max_pairs = max_pairs
        self.max_pending = max_pending
        self.holders: list[NaiveHolder] = []

    @property
    def n_pairs(self) -> int:
        return sum(len(holder.held) for holder in self.holders)

    @property
    def n_distinct(self) -> int:
        """Blocks with a place in a trie: what somebody holds, and all above that."""
        held: set[Path] = set().union(*(holder.held for holder in self.holders))
        return len({path[:n] for path in held for n in range(2, len(path) + 1)})

    @property
    def has_holes(self) -> bool:
        return any(
            len(path) > 2 and path[:-1] not in holder.held
            for holder in self.holders
            for path in holder.held
        )

    def stored(
        self,
        holder: NaiveHolder,
        hashes: Sequence[int],
        parent: int | None,
        blocks: Sequence[bytes],
        *,
        root: Root,
        tier: int,
    ) -> None:
        if self.n_pairs + len(hashes) > self.max_pairs:
            self.removed(holder, hashes, tier=tier)
            holder.n_dropped += len(hashes)
            holder.has_gap = True
            return
        path: Path | None = (root,)
        if parent is not None:
            path = holder.where(tier, parent)
        if path is None:
            assert parent is not None
            for hash_, block in zip(hashes, blocks, strict=True):
                holder.claims.pop((tier, hash_), None)
                holder.pending.pop((tier, hash_), None)
                holder.pending[tier, hash_] = Waiting(parent, block)
                if len(holder.pending) > self.max_pending:
                    del holder.pending[next(iter(holder.pending))]
                    self._dropped(holder)
                parent = hash_
        else:
            for hash_, block in zip(hashes, blocks, strict=True):
                path = (*path, block)
                holder.claims[tier, hash_] = path
            for hash_ in hashes:
                holder.pending.pop((tier, hash_), None)
        self._wake(holder)

    def removed(self, holder: NaiveHolder, hashes: Sequence[int], *, tier: int | None) -> None:
        for one in (0, 1) if tier is None else (tier,):
            for hash_ in hashes:
                holder.claims.pop((one, hash_), None)
                holder.pending.pop((one, hash_), None)

    def cleared(self, holder: NaiveHolder) -> None:
        holder.claims.clear()
        holder.pending.clear()
        holder.has_gap = False

    def _wake(self, holder: NaiveHolder) -> None:
        while True:
            above = {
                claim: holder.where(claim[0], one.parent) for claim, one in holder.pending.items()
            }
            claim = next((claim for claim, path in above.items() if path is not None), None)
            if claim is None:
                return
            block = holder.pending.pop(claim).block
            if self.n_pairs >= self.max_pairs:
                self._dropped(holder)
            else:
                holder.claims[claim] = (*(above[claim] or ()), block)

    def _dropped(self, holder: NaiveHolder) -> None:
        holder.n_dropped += 1
        holder.has_gap = True
