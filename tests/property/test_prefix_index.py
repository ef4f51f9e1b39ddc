"""The prefix index against one that walks sets of full token prefixes.

Hashes and tokens are few, so restated hashes, cycles, holes, blocks that wait, and hashes that agree in the
60 bits the index keys by all come about within a history.
"""

import random
import struct

import numpy as np
import pytest

from slagate.pools.prefix.claims import DEVICE, HOST
from slagate.pools.prefix.holder import Holder
from slagate.pools.prefix.index import PrefixIndex
from slagate.pools.prefix.trie import Root
from support.kv.naive_index import NaiveHolder, NaiveIndex
from support.seeds import each_seed

N_SEEDS = 100
N_STEPS = 120
ROOTS = (Root(), Root(), Root(lora_name="a"), Root(cache_salt="a"))
HASHES = (0, 2**64 - 1, 1, 2**60 + 1, 2**61 + 1, 2**60, 2, 3, 4, 2**63 + 4)
KEYS = (b"", b"\0", b"picture")


class World:
    """The index, the model, and which holder is which."""

    def __init__(self, rng: random.Random, max_run_blocks: int) -> None:
        self.rng = rng
        self.block_tokens = rng.choice((1, 2))
        few = rng.random() < 0.3
        self.max_pairs = rng.randint(1, 12) if few else 10_000
        self.sweeps_at_once = few or rng.random() < 0.5  # the dead count as pairs until swept
        max_pending = rng.choice((2, 5, 1000))
        self.index = PrefixIndex(
            self.block_tokens,
            max_pairs=self.max_pairs,
            max_run_blocks=max_run_blocks,
            max_pending=max_pending,
        )
        self.model = NaiveIndex(max_pairs=self.max_pairs, max_pending=max_pending)
        self.holders: list[Holder] = []
        for _ in range(rng.randint(1, 5)):
            self.join()

    def join(self) -> None:
        self.holders.append(self.index.join())
        self.model.holders.append(NaiveHolder())

    def step(self) -> None:
        rng = self.rng
        roll = rng.random()
        who = rng.randrange(len(self.holders))
        if roll < 0.55:
            self.store(who)
        elif roll < 0.9:
            hashes = rng.sample(HASHES, rng.randint(1, 3))
            tier = rng.choice((None, DEVICE, DEVICE, HOST))
            self.index.removed(self.holders[who], hashes, tier=tier)
            self.model.removed(self.model.holders[who], hashes, tier=tier)
        elif roll < 0.93:
            self.index.cleared(self.holders[who])
            self.model.cleared(self.model.holders[who])
        elif roll < 0.95:
            self.index.leave(self.holders.pop(who))
            del self.model.holders[who]
            self.join()
        else:
            self.index.sweep(rng.randint(1, 40))
        while self.sweeps_at_once and self.index.sweep(7):
            pass

    def tokens(self, n_blocks: int) -> bytes:
        ids = [self.rng.randrange(2) for _ in range(n_blocks * self.block_tokens)]
        return struct.pack(f"<{len(ids)}I", *ids)

    def keyed(self, n_blocks: int) -> dict[int, bytes]:
        if self.rng.random() < 0.8:
            return {}
        return {self.rng.randrange(n_blocks): self.rng.choice(KEYS)}

    def blocks(self, tokens: bytes, keys: dict[int, bytes]) -> list[bytes]:
        """As the model compares them: tokens, and the key behind them if there is one."""
        size = self.block_tokens * 4
        blocks = [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
        for number, key in keys.items():
            if number < len(blocks):
                blocks[number] += b"key" + key
        return blocks

    def store(self, who: int) -> None:
        rng = self.rng
        n_blocks = rng.choice((1, 1, 2, 3, 5))
        hashes = [rng.choice(HASHES) for _ in range(n_blocks)]
        if rng.random() < 0.8:
            hashes = rng.sample(HASHES, n_blocks)
        parent = rng.choice((None, *HASHES))
        root, tier = rng.choice(ROOTS), rng.choice((DEVICE, DEVICE, HOST))
        tokens, keys = self.tokens(n_blocks), self.keyed(n_blocks)
        self.index.stored(
            self.holders[who],
            np.array(hashes, np.uint64) if rng.random() < 0.5 else hashes,
            parent,
            tokens,
            root=root,
            tier=tier,
            keys=keys,
        )
        self.model.stored(
            self.model.holders[who],
            hashes,
            parent,
            self.blocks(tokens, keys),
            root=root,
            tier=tier,
        )

    def check(self) -> None:
        for holder, naive in zip(self.holders, self.model.holders, strict=True):
            assert holder.n_blocks == len(naive.held)
            assert holder.n_pending == len(naive.pending)
            assert (holder.n_dropped, holder.has_gap) == (naive.n_dropped, naive.has_gap)
        bits = np.array([-1, *(holder.bit for holder in self.holders)], np.int32)
        for _ in range(3):
            tokens = self.tokens(self.rng.randint(0, 6)) + b"\0\0\0"
            root, keys = self.rng.choice(ROOTS), self.keyed(4)
            match = self.index.match(tokens, root, keys=keys)
            query = self.blocks(tokens, keys)
            assert match.n_blocks == len(query)
            for device_only in (False, True):
                wanted = [0] + [
                    naive.depth(query, root, device_only=device_only)
                    for naive in self.model.holders
                ]
                got = match.both_depths(bits)[1] if device_only else match.depths(bits)
                assert got.tolist() == wanted
        if self.sweeps_at_once:
            assert self.index.n_pairs == self.model.n_pairs
            if not self.model.has_holes:
                assert self.index.trie.n_blocks == self.model.n_distinct

    def end(self) -> None:
        """Everything is given up, by removal or by leaving, and nothing is left."""
        if self.rng.random() < 0.5:
            for holder in self.holders:
                self.index.removed(holder, HASHES)
                assert holder.n_blocks == holder.n_pending == 0
                assert not holder.by_run
                assert not any((*holder.maps[DEVICE], *holder.maps[HOST], *holder.odd))
                assert not any(holder.table)
        else:
            for holder in self.holders:
                self.index.leave(holder)
                self.index.leave(holder)
        while self.index.sweep(3):
            pass
        assert self.index.n_pairs == self.index.trie.n_runs == self.index.trie.n_blocks == 0
        assert not self.index.trie._roots


@pytest.mark.parametrize("max_run_blocks", [2, 1024])
def test_agrees_with_sets_of_full_prefixes_and_leaks_nothing(max_run_blocks: int) -> None:
    def history(seed: int) -> None:
        world = World(random.Random(seed), max_run_blocks)
        for _ in range(N_STEPS):
            world.step()
            world.check()
        world.end()

    each_seed(N_SEEDS, history)
