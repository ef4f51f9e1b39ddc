"""What the engines of a fleet tell about their caches while sessions talk to them, made up beforehand.

Sessions share one of 20 system prompts; a quarter of them move between two workers. A turn is a query, what
its worker evicts (least recently used, leaves first), what it stores at once, and one block per decoded 32
tokens. Engine hashes are a function of the prefix, as the other index requires.
"""

import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

BLOCK_TOKENS = 32
BLOCK_BYTES = BLOCK_TOKENS * 4
N_SHARED = 20
SHARED_BLOCKS = 64
DECODED_BLOCKS = (4, 24)
"""Of a turn, at least and at most: 128 to 768 tokens. The ratio of events depends on it: the other pays a
thread hop for each event, so it gains where a turn is mostly prompt."""

_VOCABULARY = 128_000


class Stored(NamedTuple):
    worker: int
    parent: int | None
    hashes: list[int]
    tokens: bytes


class Removed(NamedTuple):
    worker: int
    hashes: list[int]


class Query(NamedTuple):
    tokens: bytes


Op = Stored | Removed | Query


class Session:
    """A conversation: its blocks' tokens and hashes so far."""

    def __init__(self, fleet: "Fleet", shared: "Session | None", n_blocks: int) -> None:
        self.tokens = bytearray() if shared is None else bytearray(shared.tokens)
        self.hashes: list[int] = [] if shared is None else list(shared.hashes)
        self.fleet = fleet
        self.grow(n_blocks)
        n_workers = 2 if fleet.rng.random() < 0.25 else 1
        self.workers = fleet.rng.sample(range(fleet.n_workers), n_workers)

    def grow(self, n_blocks: int) -> None:
        numbers = self.fleet.numbers
        ids = numbers.integers(0, _VOCABULARY, n_blocks * BLOCK_TOKENS, dtype=np.uint32)
        self.tokens += ids.tobytes()
        # Chained in the engine by content; here the content is random, so random numbers will do.
        self.hashes += numbers.integers(0, 1 << 64, n_blocks, dtype=np.uint64).tolist()


class Fleet:
    """Workers that cache at most `capacity_blocks` each (None: all), and the sessions they serve."""

    def __init__(self, seed: int, *, n_workers: int, capacity_blocks: int | None) -> None:
        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.n_workers = n_workers
        self._capacity = capacity_blocks
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(n_workers)]
        self._shared = [Session(self, None, SHARED_BLOCKS) for _ in range(N_SHARED)]
        self._sessions: list[Session] = []

    def turns(self, n_turns: int, *, n_sessions: int) -> Iterator[Op]:
        """Queries and events of so many turns, each with `DECODED_BLOCKS` of output.

        A session ends at random, and then another begins.
        """
        for _ in range(n_turns):
            if len(self._sessions) < n_sessions:
                shared = self.rng.choice(self._shared)
                self._sessions.append(Session(self, shared, self.rng.randint(20, 160)))
                session = self._sessions[-1]
            else:
                at = self.rng.randrange(n_sessions)
                session = self._sessions[at]
                if self.rng.random() < 0.2:
                    shared = self.rng.choice(self._shared)
                    session = self._sessions[at] = Session(self, shared, self.rng.randint(20, 160))
                else:
                    session.grow(self.rng.randint(4, 60))
            yield Query(bytes(session.tokens))
            yield from self._serve(
                session, self.rng.choice(session.workers), self.rng.randint(*DECODED_BLOCKS)
            )

    def fill(self, n_pairs: int) -> Iterator[Op]:
        """Sessions of one turn on all their workers, until so many (worker, block) pairs are cached."""
        while n_pairs > 0:
            session = Session(self, self.rng.choice(self._shared), self.rng.randint(40, 240))
            workers, hashes, tokens = session.workers, list(session.hashes), bytes(session.tokens)
            for worker in workers:
                del session.hashes[len(hashes) :]
                del session.tokens[len(tokens) :]
                for op in self._serve(session, worker, self.rng.randint(0, 8)):
                    if isinstance(op, Stored):
                        n_pairs -= len(op.hashes)
                    yield op

    def drain(self, worker: int, n_blocks: int) -> Iterator[Op]:
        """The least recently used blocks of a worker go."""
        cached = self._cached[worker]
        hashes = [cached.popitem(last=False)[0] for _ in range(min(n_blocks, len(cached)))]
        if hashes:
            yield Removed(worker, hashes)

    def _serve(self, session: Session, worker: int, n_decoded_blocks: int) -> Iterator[Op]:
        yield from self._store(session, worker)
        for _ in range(n_decoded_blocks):
            session.grow(1)
            yield from self._store(session, worker)

    def _store(self, session: Session, worker: int) -> Iterator[Op]:
        cached = self._cached[worker]
        hashes = session.hashes
        first = len(hashes)
        while first and hashes[first - 1] not in cached:
            first -= 1
        for hash_ in reversed(hashes):  # leaves are older than what they hang from
            if hash_ in cached or self._capacity is not None:
                cached[hash_] = None
                cached.move_to_end(hash_)
            else:
                cached[hash_] = None
        if self._capacity is not None:
            yield from self.drain(worker, len(cached) - self._capacity)
        parent = hashes[first - 1] if first else None
        tokens = bytes(session.tokens[first * BLOCK_BYTES :])
        yield Stored(worker, parent, hashes[first:], tokens)
