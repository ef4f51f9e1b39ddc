"""The blocks that the simulated KV cache has stored: a tree by prefix, over all tiers."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import islice

from slagate.workers.sim.kv_cache.blocks import TOKEN_BYTES

DEVICE = 0
"""The first level of the cache; those below it, in order, are the host and the disk, where it has them."""


class BlockNode:
    """A stored block with its packed tokens, or the root of one seed, which has none.

    `children` are the packed tokens of the children on the device, sorted: those that share most with
    other tokens are the neighbours of the place where these would be. `n_children` counts all tiers.
    """

    __slots__ = ("children", "level", "n_children", "parent", "references", "state", "tokens")

    def __init__(self, state: bytes, parent: "BlockNode | None", tokens: bytes) -> None:
        self.state = state
        self.parent = parent
        self.tokens = tokens
        self.level = DEVICE
        self.references = 1
        self.children: list[bytes] = []
        self.n_children = 0


class BlockTree:
    """Stored blocks by state. A block on the device has its whole prefix there too."""

    def __init__(self, block_tokens: int) -> None:
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._nodes: dict[bytes, BlockNode] = {}
        self._roots: dict[bytes, BlockNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, state: bytes) -> BlockNode | None:
        """The block in this state, in any tier."""
        return self._nodes.get(state)

    def match(self, states: Sequence[bytes], n_blocks: int) -> list[BlockNode]:
        """The stored blocks of the first `n_blocks` states, up to the first that is not stored."""
        path = []
        get = self._nodes.get
        for state in islice(states, n_blocks):
            node = get(state)
            if node is None:
                break
            path.append(node)
        return path

    def n_shared_tokens(self, parent: BlockNode | None, seed: bytes, wanted: bytes) -> int:
        """The most leading tokens of `wanted` that a device block below `parent` (None: the root) has."""
        if parent is None:
            parent = self._roots.get(seed)
        if parent is None or not parent.children:
            return 0
        at = bisect_left(parent.children, wanted)
        neighbours = parent.children[max(0, at - 1) : at + 1]
        return max([_n_shared_tokens(wanted, tokens) for tokens in neighbours])

    def insert(
        self, states: Sequence[bytes], parent: BlockNode | None, *, seed: bytes, packed: bytes
    ) -> list[BlockNode]:
        """Store a chain of blocks with these `packed` tokens on the device, with one reference each."""
        if parent is None:
            parent = self._roots.get(seed)
            if parent is None:
                parent = self._roots[seed] = BlockNode(seed, None, b"")
        size, chain = self._block_bytes, []
        for at, state in enumerate(states):
            tokens = packed[at * size : (at + 1) * size]
            node = self._nodes[state] = BlockNode(state, parent, tokens)
            insort(parent.children, tokens)
            parent.n_children += 1
            chain.append(node)
            parent = node
        return chain

    def to_lower(self, node: BlockNode) -> None:
        """Move a block without children on the device one level down."""
        if node.level == DEVICE:
            self._leave_device(node)
        node.level += 1

    def to_device(self, node: BlockNode) -> None:
        """Move a block whose prefix is on the device back there."""
        assert node.parent is not None
        assert node.parent.level == DEVICE, "brought back before its parent"
        insort(node.parent.children, node.tokens)
        node.level = DEVICE

    def remove(self, node: BlockNode) -> None:
        """Forget a block without children in any tier."""
        assert not node.n_children, "forgotten before its children"
        if node.level == DEVICE:
            self._leave_device(node)
        parent = node.parent
        assert parent is not None
        parent.n_children -= 1
        if parent.parent is None and not parent.n_children:
            # Every salt makes a root, and roots must not pile up.
            del self._roots[parent.state]
        del self._nodes[node.state]

    def full_blocks(self) -> Iterator[BlockNode]:
        """Every block that is filled to the end."""
        return (one for one in self._nodes.values() if len(one.tokens) == self._block_bytes)

    def _leave_device(self, node: BlockNode) -> None:
        assert not node.children, "left the device before its children"
        assert node.parent is not None
        siblings = node.parent.children
        del siblings[bisect_left(siblings, node.tokens)]


def _n_shared_tokens(a: bytes, b: bytes) -> int:
    """Length of the common prefix of two packed token strings, in tokens."""
    n = min(len(a), len(b))
    difference = int.from_bytes(a[:n], "little") ^ int.from_bytes(b[:n], "little")
    n_bytes = ((difference & -difference).bit_length() - 1) // 8 if difference else n
    return n_bytes // TOKEN_BYTES
