"""Predictions against a list of claims that is walked every time."""

import math
import random
import struct
from typing import NamedTuple

import numpy as np

from slagate.pools.prefix.predictions import Prediction, Predictions
from slagate.pools.prefix.trie import Root
from support.seeds import each_seed

N_SEEDS = 300
N_STEPS = 100
N_ROWS = 4
ROOTS = (Root(), Root(), Root(cache_salt="a"))


class Naive(NamedTuple):
    row: int
    root: Root
    blocks: tuple[bytes, ...]
    expires_s: float


class World:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_s = 0.0
        self.max_claims = rng.choice((3, 1000))
        self.predictions = Predictions(1, max_predictions=self.max_claims)
        self.claims: dict[Prediction, Naive] = {}  # the oldest first
        self.ended: list[Prediction] = []
        self.limits: dict[int, int] = {}

    def tokens(self) -> bytes:
        ids = [self.rng.randrange(2) for _ in range(self.rng.randint(0, 8))]
        return struct.pack(f"<{len(ids)}I", *ids) + b"\0" * self.rng.randrange(4)

    def expiry_s(self) -> float:
        return self.now_s + self.rng.choice((-1.0, 0.0, 0.5, 2.0, 1000.0))

    def step(self) -> None:
        rng, predictions = self.rng, self.predictions
        roll = rng.random()
        if roll < 0.5:
            row, root = rng.randrange(N_ROWS), rng.choice(ROOTS)
            tokens, expires_s = self.tokens(), self.expiry_s()
            claim = predictions.predict(row, tokens, root, expires_s=expires_s)
            self.claims[claim] = Naive(row, root, blocks_of(tokens), expires_s)
            while len(self.claims) > self.max_claims:
                self.drop(next(iter(self.claims)))
            self.bound(row)
        elif roll < 0.65 and self.claims:
            claim = rng.choice([*self.claims, *self.ended])
            expires_s = self.expiry_s()
            predictions.renew(claim, expires_s=expires_s)
            if claim in self.claims:
                self.claims[claim] = self.claims[claim]._replace(expires_s=expires_s)
        elif roll < 0.8 and self.claims:
            claim = rng.choice([*self.claims, *self.ended])
            predictions.end_prediction(claim)
            self.drop(claim)
        elif roll < 0.83:
            row = rng.randrange(N_ROWS)
            predictions.forget_row(row)
            for claim in [claim for claim, naive in self.claims.items() if naive.row == row]:
                self.drop(claim)
        elif roll < 0.88:
            row, most = rng.randrange(N_ROWS), rng.choice((None, 0, 4, 9))
            predictions.limit_row(row, most)
            self.limits.pop(row, None)
            if most is not None:
                self.limits[row] = most
                self.bound(row)
        else:
            self.now_s += rng.choice((0.1, 0.5, 5.0))
        while predictions.expire(self.now_s, n=2):
            pass
        for claim, naive in list(self.claims.items()):
            if math.ceil(naive.expires_s * 16) / 16 <= self.now_s:
                self.drop(claim)

    def drop(self, claim: Prediction) -> None:
        if self.claims.pop(claim, None) is not None:
            self.ended.append(claim)

    def bound(self, row: int) -> None:
        while row in self.limits and self.n_blocks(row) > self.limits[row]:
            self.drop(next(claim for claim, naive in self.claims.items() if naive.row == row))

    def n_blocks(self, row: int) -> int:
        return len(
            {
                (naive.root, naive.blocks[: n + 1])
                for naive in self.claims.values()
                if naive.row == row
                for n in range(len(naive.blocks))
            }
        )

    def check(self) -> None:
        assert len(self.predictions) == len(self.claims)
        tokens, root = self.tokens(), self.rng.choice(ROOTS)
        match = self.predictions.match(tokens, root, now_s=self.now_s)
        query = blocks_of(tokens)
        wanted = [0] * (N_ROWS + 1)
        for naive in self.claims.values():
            if naive.root == root:
                depth = 0
                while depth < min(len(query), len(naive.blocks)) and (
                    query[depth] == naive.blocks[depth]
                ):
                    depth += 1
                wanted[naive.row] = max(wanted[naive.row], depth)
        assert match.n_blocks == len(query)
        rows = np.arange(N_ROWS + 1)  # one more than was ever claimed
        assert match.depths(rows).tolist() == wanted
        assert match.both_depths(rows)[1].tolist() == wanted


def blocks_of(tokens: bytes) -> tuple[bytes, ...]:
    return tuple(tokens[at : at + 4] for at in range(0, len(tokens) - 3, 4))


def test_agrees_with_a_list_of_claims_and_leaks_nothing() -> None:
    def history(seed: int) -> None:
        world = World(random.Random(seed))
        for _ in range(N_STEPS):
            world.step()
            world.check()
        for claim in [*world.claims, *world.ended]:
            world.predictions.end_prediction(claim)
        assert len(world.predictions) == world.predictions.trie.n_runs == 0
        assert world.predictions.n_bytes_estimate == 0

    each_seed(N_SEEDS, history)


def test_however_long_the_prompts_are_claims_keep_to_their_memory() -> None:
    """MEM-06: at each claim, not when some timer fires; the oldest go first."""
    n_blocks, max_bytes = 100, 1 << 20
    predictions = Predictions(32, max_bytes=max_bytes)
    prompts = [struct.pack("<I", at) * 32 * n_blocks for at in range(200)]
    for at, prompt in enumerate(prompts):
        predictions.predict(at % 2, prompt, Root(), expires_s=9.0)
        assert predictions.n_bytes_estimate <= max_bytes
    found = [
        predictions.match(prompt, Root(), now_s=0.0).depths(np.arange(2)).max()
        for prompt in prompts
    ]
    n_kept = len(predictions)
    assert found == [0] * (200 - n_kept) + [n_blocks] * n_kept
    assert n_kept * len(prompts[0]) > 0.8 * max_bytes
    # One that is more than all of it is not kept, and does no harm.
    predictions.predict(0, bytes(max_bytes), Root(), expires_s=9.0)
    assert len(predictions) == predictions.n_bytes_estimate == 0


def test_a_comb_of_prompts_costs_a_claim_no_more_than_the_cap() -> None:
    """Every prompt that branches before the next goes on makes a run more, which a claim then walks."""
    predictions = Predictions(1)
    n_blocks = 700
    ids = [struct.pack("<I", at) for at in range(n_blocks)]
    for at in range(1, n_blocks):
        predictions.predict(0, b"".join([*ids[:at], b"\xff\xff\xff\xff"]), Root(), expires_s=9.0)
    claim = predictions.predict(1, b"".join(ids), Root(), expires_s=9.0)
    match = predictions.match(b"".join(ids), Root(), now_s=0.0)
    assert match.depths(np.arange(2)).tolist() == [claim.n_blocks] * 2
    assert claim.n_blocks == 512
