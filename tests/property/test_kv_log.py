"""A rank's log under an engine that removes in any order, against a dumb model of what is published."""

import random

from slagate.proto import openengine_pb2 as oe
from slagate.workers.kv_events.changes import Block, Change, Cleared, Moved, Removed, Stored
from slagate.workers.kv_events.log import RankLog
from slagate.workers.kv_events.wire import token_field
from support.kv.mirror import RankMirror
from support.seeds import each_seed

N_HISTORIES = 300
N_STEPS = 40
PARENTS = (None, 0, 1, 2, 1, None, 5)

# A block's parent, if any, and what is in it.
Content = tuple[int | None, int]


class Model:
    """Every cached block by hash, and what every hash was when it was last taken."""

    def __init__(self) -> None:
        self.cached: dict[int, int] = {}  # hash -> level
        self.content: dict[int, Content] = {}

    def ancestors(self, hash_: int) -> list[int]:
        found = []
        parent = self.content[hash_][0]
        while parent is not None:
            found.append(parent)
            parent = self.content[parent][0]
        return found

    def known(self, hash_: int | None) -> bool:
        """Whether it is cached, or above something that is."""
        return hash_ is None or any(
            hash_ == one or hash_ in self.ancestors(one) for one in self.cached
        )

    def store(self, hash_: int, content: Content, level: int) -> None:
        if self.known(hash_) and self.content[hash_] != content:
            for one in list(self.cached):
                if one == hash_ or hash_ in self.ancestors(one):
                    del self.cached[one]
        if (self.known(hash_) and self.content[hash_] == content) or self.known(content[0]):
            self.cached[hash_] = level
            self.content[hash_] = content

    def published(self) -> dict[int, int]:
        return {
            hash_: level
            for hash_, level in self.cached.items()
            if all(one in self.cached for one in self.ancestors(hash_))
        }


def change(rng: random.Random, model: Model) -> Change:
    roll = rng.random()
    if roll < 0.01:
        model.cached.clear()
        return Cleared(0)
    hash_ = rng.randrange(len(PARENTS))
    if roll < 0.6:
        # Mostly where it belongs, so that blocks come back as they were.
        parent = PARENTS[hash_] if rng.random() < 0.95 else rng.choice([None, *range(7)])
        first = 1 if rng.random() < 0.97 else 2
        level = rng.randint(0, 1)
        blocks = [Block(hash_, token_field([first, hash_]), ())]
        model.store(hash_, (parent, first), level)
        if hash_ + 1 < len(PARENTS) and PARENTS[hash_ + 1] == hash_:
            blocks.append(Block(hash_ + 1, token_field([1, hash_ + 1]), ()))
            model.store(hash_ + 1, (hash_, 1), level)
        return Stored(0, parent, tuple(blocks), level, "", "")
    if roll < 0.7:
        level = rng.randint(0, 1)
        if hash_ in model.cached:
            model.cached[hash_] = level
        return Moved(0, hash_, level)
    model.cached.pop(hash_, None)
    return Removed(0, (hash_,))


def check(rng: random.Random) -> int:
    log = RankLog(0, block_tokens=2, history_batches=1000, history_bytes=1 << 20)
    model, follower = Model(), RankMirror()
    n_hidden = 0
    for _ in range(N_STEPS):
        log.apply([change(rng, model) for _ in range(rng.randint(1, 3))], 1)
        for number in range(follower.next_number or 0, log.newest + 1):
            follower.apply(oe.SubscribeKvEventsResponse.FromString(log.batch(number)).batch)
        assert follower.resident() == model.published()
        assert log.mirror.n_hidden == len(model.cached) - len(model.published())
        n_hidden += log.mirror.n_hidden > 0
    joined = RankMirror()
    for data in log.snapshot(1):
        joined.apply(oe.SubscribeKvEventsResponse.FromString(data).batch)
    assert joined.resident() == model.published()
    assert joined.tiers == follower.tiers
    return n_hidden


def test_a_follower_holds_exactly_the_blocks_whose_whole_prefix_is_cached() -> None:
    n_hidden: list[int] = []
    each_seed(N_HISTORIES, lambda seed: n_hidden.append(check(random.Random(seed))))
    assert sum(n_hidden) > 5 * len(n_hidden)
