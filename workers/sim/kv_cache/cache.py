"""The simulated KV cache: a paged pool that shares blocks by prefix, with lower tiers on host and disk.

Follows TensorRT-LLM's KV cache manager with its defaults (`enable_block_reuse`, `enable_partial_reuse`,
`copy_on_partial_reuse`, GUARANTEED_NO_EVICT); contents and states of blocks are those of `blocks`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from slagate.workers.sim.kv_cache.blocks import STATE_BYTES, TOKEN_BYTES, CachePrompt
from slagate.workers.sim.kv_cache.events import KvEventRecorder
from slagate.workers.sim.kv_cache.tree import DEVICE, BlockNode, BlockTree


@dataclass(slots=True, eq=False)
class Allocation:
    """One sequence's blocks: those it refers to in the tree, its own, and those it may still take.

    `reused_tokens` leading prompt tokens need no compute. Their `reused_blocks` are shared, but for a last
    one that was copied in part; `onboarded_blocks` of them came back from a lower level. At first it took
    `allocated_blocks` of the pool, to fill or to copy into, of which `new_blocks` held nothing.
    """

    prompt: CachePrompt
    path: list[BlockNode]
    n_blocks: int
    private_blocks: int
    reserved_blocks: int
    reused_tokens: int
    reused_blocks: int
    missed_blocks: int
    onboarded_blocks: int
    allocated_blocks: int
    new_blocks: int
    closed: bool = False


class SimKvCache:
    """A pool of `total_blocks` blocks on the device and `lower_blocks` on each lower level, highest first.

        total = referenced stored + private (used) | unreferenced stored (evictable) | never filled

    Stored blocks form a tree by prefix. Three rules keep it whole:

    * a sequence that refers to a block refers to its whole prefix, and releases its last block first. So in
      the order of release, which is the order of eviction, every child on the device precedes its parent;
    * eviction moves blocks one level down in that same order, so children come first there too, and a match
      brings blocks back root first: no block on the device has a parent below it;
    * a block that two sequences computed is stored once. The later one refers to it, to keep the prefix of
      what it stores next, and keeps its own copy, as TensorRT-LLM does. Where no other sequence refers to
      the stored block, the later one's copy takes its place, so that storing never needs room.

    A sequence reserves all that it may grow to, so `grow` cannot fail. Without `reuse` nothing is stored
    and nothing recorded.
    """

    def __init__(
        self,
        total_blocks: int,
        block_tokens: int,
        *,
        lower_blocks: Sequence[int] = (),
        reuse: bool = True,
        partial_reuse: bool = True,
        recorder: KvEventRecorder | None = None,
    ) -> None:
        if total_blocks < 1 or block_tokens < 1:
            raise ValueError(
                f"total_blocks {total_blocks} and block_tokens {block_tokens} must be > 0"
            )
        if any(n_blocks < 1 for n_blocks in lower_blocks):
            raise ValueError(f"lower_blocks must be > 0, got {lower_blocks}")
        self.total_blocks = total_blocks
        self.block_tokens = block_tokens
        self.lower_blocks = lower_blocks
        self._reuse = reuse
        self._partial_reuse = partial_reuse
        self._recorder = recorder if reuse else None
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._tree = BlockTree(block_tokens)
        # By level, in order of release, the first to go in front; on the device the unreferenced ones.
        self._idle: list[OrderedDict[BlockNode, None]] = [
            OrderedDict() for _ in range(1 + len(lower_blocks))
        ]
        self._private_blocks = 0
        self._reserved_blocks = 0
        self.n_allocated_blocks = 0
        self.n_new_blocks = 0
        self.n_reused_blocks = 0
        self.n_missed_blocks = 0
        self.n_evicted_blocks = 0
        self.n_offloaded_blocks = 0
        self.n_onboarded_blocks = 0
        if self._recorder is not None:
            self._recorder.created((total_blocks, *lower_blocks))

    @property
    def used_blocks(self) -> int:
        """Device blocks that some sequence refers to."""
        return self._filled_blocks - self.cached_blocks

    @property
    def cached_blocks(self) -> int:
        """Stored device blocks that no sequence refers to: reusable until evicted."""
        return len(self._idle[DEVICE])

    @property
    def available_blocks(self) -> int:
        """Device blocks a new sequence could take or reserve."""
        return self.total_blocks - self.used_blocks - self._reserved_blocks

    @property
    def lower_used_blocks(self) -> int:
        """Stored blocks on all levels below the device."""
        return sum(map(len, self._idle[1:])) if self.lower_blocks else 0

    @property
    def _filled_blocks(self) -> int:
        return len(self._tree) - self.lower_used_blocks + self._private_blocks

    def allocate(
        self, prompt: CachePrompt, *, n_blocks: int, reserve_blocks: int = 0, reusable_tokens: int
    ) -> Allocation | None:
        """Take `n_blocks` blocks for a prompt, the leading ones from the cache.

        `reserve_blocks` more are kept for `grow`. None when the pool cannot give both now. At most
        `reusable_tokens` leading tokens are reused. After the last full match, the block that shares most
        tokens with the rest of the prompt is copied into a private one, which does not refer to it.
        """
        if not self._reuse:
            reusable_tokens = 0
        path = self._tree.match(prompt.states, reusable_tokens // self.block_tokens)
        n_idle = sum([not node.references for node in path])
        n_private = n_blocks - len(path)
        if n_idle + n_private + reserve_blocks > self.available_blocks:
            return None
        # The search precedes eviction: the source itself may have to make room for its copy.
        copied_tokens = self._copied_tokens(prompt, path, reusable_tokens)
        n_onboarded = sum([self._refer(node) for node in path])
        self._private_blocks += n_private
        self._reserved_blocks += reserve_blocks
        n_allocated = n_private + n_onboarded
        n_new = n_allocated - self._evict_overflow()
        round_up = self.block_tokens - 1 if self._partial_reuse else 0
        n_wanted = (reusable_tokens + round_up) // self.block_tokens
        n_reused = len(path) + (copied_tokens > 0)
        self.n_allocated_blocks += n_allocated
        self.n_new_blocks += n_new
        self.n_reused_blocks += n_reused
        self.n_missed_blocks += n_wanted - n_reused
        self.n_onboarded_blocks += n_onboarded
        return Allocation(
            prompt=prompt,
            path=path,
            n_blocks=n_blocks,
            private_blocks=n_private,
            reserved_blocks=reserve_blocks,
            reused_tokens=len(path) * self.block_tokens + copied_tokens,
            reused_blocks=n_reused,
            missed_blocks=n_wanted - n_reused,
            onboarded_blocks=n_onboarded,
            allocated_blocks=n_allocated,
            new_blocks=n_new,
        )

    def grow(self, allocation: Allocation) -> None:
        """Turn one reserved block into a private one."""
        assert allocation.reserved_blocks > 0, "grew past the reservation"
        allocation.reserved_blocks -= 1
        self._reserved_blocks -= 1
        allocation.n_blocks += 1
        allocation.private_blocks += 1
        self._private_blocks += 1
        self.n_allocated_blocks += 1
        self.n_new_blocks += 1 - self._evict_overflow()

    def store(
        self, allocation: Allocation, states: Sequence[bytes], packed: bytes, *, partial: bool
    ) -> None:
        """Make the blocks of the leading tokens `packed` reusable; `states` are of the full ones.

        Blocks that this allocation has stored before stay as they are. With `partial`, at the end of a
        sequence, the last and partly filled block is stored too, and nothing can be stored after it.
        """
        if not self._reuse or allocation.closed:
            return
        path, size = allocation.path, self._block_bytes
        assert len(packed) // size == len(states), "states are not of the full blocks of packed"
        states = list(states[len(path) :])
        if partial:
            allocation.closed = True
            tail = packed[len(packed) - len(packed) % size :]
            if tail:
                shared = path[-1].state if path else allocation.prompt.seed
                parent = states[-1] if states else shared
                states.append(blake2b(parent + tail, digest_size=STATE_BYTES).digest())
        assert len(path) + len(states) <= allocation.n_blocks, "stored more blocks than it holds"
        known = self._tree.match(states, len(states))
        n_taken = 0  # of its own blocks
        for node in known:
            if node.references:
                node.references += 1
            else:
                self._refer(node)
                n_taken += 1
        path += known
        # Below a new block everything is new, so one event covers it.
        new, first_new = states[len(known) :], len(path)
        n_taken += len(new)
        allocation.private_blocks -= n_taken
        self._private_blocks -= n_taken
        if not new:
            return
        last, rest = path[-1] if path else None, packed[first_new * size :]
        path += self._tree.insert(new, last, seed=allocation.prompt.seed, packed=rest)
        if self._recorder is not None:
            self._recorder.stored(
                None if last is None else last.state,
                new,
                packed=rest,
                cache_salt=allocation.prompt.cache_salt,
            )

    def release(self, allocation: Allocation) -> None:
        """Give all blocks back; stored ones stay reusable. No-op the second time."""
        idle = self._idle[DEVICE]
        for node in reversed(allocation.path):
            node.references -= 1
            if not node.references:
                idle[node] = None
        self._private_blocks -= allocation.private_blocks
        self._reserved_blocks -= allocation.reserved_blocks
        allocation.path = []
        allocation.private_blocks = allocation.reserved_blocks = 0
        allocation.closed = True

    def resident(self) -> dict[int, int]:
        """Engine hash -> level (0 device, then those below) of every full block, as events announce it."""
        assert self._recorder is not None, "hashes are the recorder's"
        engine_hash = self._recorder.engine_hash
        return {engine_hash(node.state): node.level for node in self._tree.full_blocks()}

    def _copied_tokens(
        self, prompt: CachePrompt, path: list[BlockNode], reusable_tokens: int
    ) -> int:
        """How many reusable tokens after the matched path some stored block begins with."""
        start = len(path) * self.block_tokens
        end = min(reusable_tokens, start + self.block_tokens)
        if not self._partial_reuse or start >= end:
            return 0
        wanted = prompt.packed[start * TOKEN_BYTES : end * TOKEN_BYTES]
        return self._tree.n_shared_tokens(path[-1] if path else None, prompt.seed, wanted)

    def _refer(self, node: BlockNode) -> bool:
        """Add a reference; True when the block had to come back to the device for it."""
        node.references += 1
        if node.references > 1:
            return False
        level = node.level
        del self._idle[level][node]
        if level == DEVICE:
            return False
        self._tree.to_device(node)
        if self._recorder is not None:
            self._recorder.moved(node.state, level, DEVICE)
        return True

    def _evict_overflow(self) -> int:
        """Evict blocks until the filled ones fit the pool again; returns how many."""
        n_over = max(0, self._filled_blocks - self.total_blocks)
        for _ in range(n_over):
            self._move_down(DEVICE)
        return n_over

    def _move_down(self, level: int) -> None:
        """Move the block that is unused for longest one level down; forget it on the lowest."""
        node, _ = self._idle[level].popitem(last=False)
        lower = level + 1
        if lower == len(self._idle):
            self._forget(node)
            return
        if len(self._idle[lower]) == self.lower_blocks[level]:
            self._move_down(lower)
        self._idle[lower][node] = None
        self._tree.to_lower(node)
        self.n_offloaded_blocks += level == DEVICE
        if self._recorder is not None:
            self._recorder.moved(node.state, level, lower)

    def _forget(self, node: BlockNode) -> None:
        self._tree.remove(node)
        self.n_evicted_blocks += 1
        if self._recorder is not None:
            self._recorder.removed(node.state)
