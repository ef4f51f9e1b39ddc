"""A trie of token prefixes, and how deep each lane holds a query.

    root ─▶ run  b0 b1 b2 b3 b4        a run: tokens of consecutive blocks, uint32 little-endian
                       └─▶ run  b3'    a child branches off at any block of its parent

A run is never split nor moved, so (run, block number) is a stable address. What follows a block is unique:
the run's own next block and the children at that block all differ. A lane is a bit of a mask, for a holder
and tier. A run has, for each number of leading blocks (`lead`), the mask of the lanes that hold exactly so
many of it; blocks that a lane holds past a hole do not count in a query, and the run does not know them.

Hashes only choose buckets: a match is a comparison of tokens, so it cannot be forged.
"""

from typing import NamedTuple

import msgspec

from slagate.pools.prefix.match import Match

TOKEN_BYTES = 4

_SHARDS = 256
"""Dicts of the children at one block: a dict of a million would grow in one long pause."""

Tokens = bytes | bytearray | memoryview


class Root(msgspec.Struct, frozen=True, gc=False):
    """What besides tokens must be equal for prompts to share KV: adapter and salt."""

    lora_name: str = ""
    cache_salt: str = ""


_NO_KIDS: "dict[int, dict[bytes, Run]]" = {}


class Run(msgspec.Struct, gc=False, eq=False):
    """Consecutive blocks (see the module). Changed by `RunTrie`, and `n_past` by `show_part`.

    There may be a million, so the garbage collector does not track them (`gc=False`). A parent and its
    child refer to each other: only dropping the child cuts that cycle.
    """

    tokens: bytearray
    parent: "Run | None"  # None for a root, and once dropped
    at: int  # block number in the parent before which it branches off
    groups: dict[int, int] = msgspec.field(default_factory=dict)  # lead > 0 -> lanes
    # Block number and shard -> first block -> child. Runs without children share one dict.
    kids: "dict[int, dict[bytes, Run]]" = msgspec.field(default_factory=lambda: _NO_KIDS)
    kid_top: int = 0  # the last block number with children
    n_past: int = 0  # holders that have blocks past a hole, so that the tail must be kept

    def move(self, lanes: int, old: int, new: int) -> None:
        """Note that lanes which all held `old` leading blocks now hold `new`."""
        groups = self.groups
        if old:
            left = groups[old] & ~lanes
            if left:
                groups[old] = left
            else:
                del groups[old]
        if new:
            groups[new] = groups.get(new, 0) | lanes


class _RootRun(Run, kw_only=True):
    root: Root


class Segment(NamedTuple):
    """`n_blocks` consecutive blocks of a run, from block number `at` on."""

    run: Run
    at: int
    n_blocks: int


class RunTrie:
    """All runs below all roots. Runs that are left when the trie is dropped stay in memory, see `Run`."""

    def __init__(self, block_tokens: int, *, max_hops: int, max_run_blocks: int) -> None:
        self.block_bytes = block_tokens * TOKEN_BYTES
        self.n_runs = 0
        self.n_blocks = 0  # distinct ones
        self._max_hops = max_hops
        self._max_run_bytes = max_run_blocks * self.block_bytes
        self._roots: dict[Root, _RootRun] = {}

    def root(self, root: Root) -> Run:
        """The run without blocks whose children are the first blocks of prompts."""
        run = self._roots.get(root)
        if run is None:
            run = self._roots[root] = _RootRun(bytearray(), None, 0, root=root)
        return run

    def grow(
        self, run: Run, at: int, content: bytes, *, max_segments: int | None = None
    ) -> list[Segment]:
        """The addresses of full blocks that follow block `at - 1` of a run: a segment for each run.

        Missing blocks are added; with a limit, those beyond so many segments are left out. The caller must
        then say who holds them (`Run.move`), or trim them.
        """
        block_bytes = self.block_bytes
        segments: list[Segment] = []
        position, end = 0, len(content) - len(content) % block_bytes
        view = memoryview(content)
        while position < end and len(segments) != max_segments:
            if at * block_bytes < len(run.tokens):
                if at == 0 and content.startswith(run.tokens, position):
                    n_blocks = len(run.tokens) // block_bytes
                else:
                    n_blocks = self._n_shared(run, at, content, position)
                if n_blocks:
                    segments.append(Segment(run, at, n_blocks))
                    at += n_blocks
                    position += n_blocks * block_bytes
                    if position == end or len(segments) == max_segments:
                        break
            # The next block of the run, if there is one, is another block.
            first = content[position : position + block_bytes]
            child = self._child(run, at, first)
            if child is not None:
                run, at = child, 0
                continue
            room = self._max_run_bytes - len(run.tokens)
            if at * block_bytes == len(run.tokens) and room and run.parent is not None:
                n_bytes = min(room, end - position)
                run.tokens += view[position : position + n_bytes]
            else:
                n_bytes = min(self._max_run_bytes, end - position)
                run = self._branch(run, at, first, view[position : position + n_bytes])
                at = 0
            n_blocks = n_bytes // block_bytes
            self.n_blocks += n_blocks
            if segments and segments[-1].run is run:
                n_before = segments[-1].n_blocks
                segments[-1] = Segment(run, at - n_before, n_before + n_blocks)
            else:
                segments.append(Segment(run, at, n_blocks))
            at += n_blocks
            position += n_bytes
        return segments

    def append(self, run: Run, at: int, block: Tokens) -> bool:
        """Add a block behind block `at - 1` of the run itself. False when it cannot follow there."""
        start = at * self.block_bytes
        tokens = run.tokens
        if start < len(tokens):
            return tokens.startswith(block, start)
        if start >= self._max_run_bytes or (
            run.kids and self._child(run, at, bytes(block)) is not None
        ):
            return False
        tokens += block
        self.n_blocks += 1
        return True

    def match(self, content: bytes, root: Root, *, lanes: int, n_holders: int) -> Match:
        """How deep each of the lanes holds a prefix. O(hops and tokens compared)."""
        block_bytes = self.block_bytes
        n_blocks = len(content) // block_bytes
        steps: list[tuple[int, int]] = []
        depth = n_hops = 0
        run: Run | None = self._roots.get(root)
        if run is not None:
            run = self._child(run, 0, content[:block_bytes])
        while run is not None and lanes:
            if n_hops == self._max_hops:
                if depth:
                    steps.append((depth, lanes))
                return Match(n_blocks, tuple(steps), n_holders, capped=True)
            n_hops += 1
            position, top, child = depth * block_bytes, run.kid_top, None
            if top:
                # Most prefixes that go past this run go on where its last children branch off.
                n_bytes = top * block_bytes
                end = position + n_bytes
                child = self._child(run, top, content[end : end + block_bytes])
            if child is not None and content.startswith(memoryview(run.tokens)[:n_bytes], position):
                at = top  # the run's own next block is another one than that of the child
            else:
                if content.startswith(run.tokens, position):
                    at = len(run.tokens) // block_bytes
                else:
                    at = self._n_shared(run, 0, content, position)
                if at != top:
                    end = position + at * block_bytes
                    first = content[end : end + block_bytes]
                    child = self._child(run, at, first) if at < top else None
            kept, gone = 0, lanes
            for lead, group in run.groups.items():
                group &= lanes
                if group:
                    gone ^= group
                    if lead >= at:
                        kept |= group
                    else:
                        steps.append((depth + lead, group))
            if gone and depth:
                steps.append((depth, gone))
            lanes = kept
            depth += at
            run = child
        if depth and lanes:
            steps.append((depth, lanes))
        return Match(n_blocks, tuple(steps), n_holders)

    def trim(self, run: Run) -> None:
        """Drop the tail that no lane holds and no child needs; empty runs and parents go, too."""
        while not run.n_past:
            keep = max(run.groups) if run.groups else 0
            if run.kid_top > keep:
                keep = run.kid_top
            if keep or run.kids:
                left = len(run.tokens) - keep * self.block_bytes
                if left > 0:
                    del run.tokens[keep * self.block_bytes :]
                    self.n_blocks -= left // self.block_bytes
                return
            parent = run.parent
            if parent is None:
                if isinstance(run, _RootRun):
                    self._roots.pop(run.root, None)
                return
            self.n_blocks -= len(run.tokens) // self.block_bytes
            self._unlink(run, parent)
            run = parent

    def _child(self, run: Run, at: int, first: bytes) -> Run | None:
        shard = run.kids.get(at * _SHARDS + hash(first) % _SHARDS)
        return None if shard is None else shard.get(first)

    def _branch(self, parent: Run, at: int, first: bytes, tokens: memoryview) -> Run:
        run = Run(bytearray(tokens), parent, at)
        if parent.kids is _NO_KIDS:
            parent.kids = {}
        parent.kids.setdefault(at * _SHARDS + hash(first) % _SHARDS, {})[first] = run
        parent.kid_top = max(parent.kid_top, at)
        self.n_runs += 1
        return run

    def _unlink(self, run: Run, parent: Run) -> None:
        first = bytes(run.tokens[: self.block_bytes])
        slot = run.at * _SHARDS + hash(first) % _SHARDS
        shard = parent.kids[slot]
        del shard[first]
        if not shard:
            del parent.kids[slot]
            if run.at == parent.kid_top:
                parent.kid_top = max(parent.kids, default=0) // _SHARDS
        run.parent = None
        self.n_runs -= 1

    def _n_shared(self, run: Run, at: int, content: bytes, position: int) -> int:
        """Leading blocks that are equal, from block `at` of a run and a byte of `content` on."""
        block_bytes = self.block_bytes
        tokens, start = run.tokens, at * block_bytes
        low, high = 0, min(len(tokens) - start, len(content) - position) // block_bytes
        # Not used in a `with`: a slice of it may still be open at the end of this function.
        view = memoryview(tokens)
        starts_with = content.startswith
        # Most prefixes differ first where one of the two ends, where other children branch off, or just
        # before the end.
        if high <= 0 or starts_with(view[start : start + high * block_bytes], position):
            return max(0, high)
        high -= 1
        known = run.kid_top - at
        probe = known if 0 < known < high else high
        while low < high:
            # What is known to be equal is not compared again.
            part = view[start + low * block_bytes : start + probe * block_bytes]
            if not starts_with(part, position + low * block_bytes):
                high = probe - 1
            elif probe == known:
                low, known, probe = probe, 0, probe + 1
                continue
            else:
                low = probe
            probe = (low + high + 1) // 2
        return low
