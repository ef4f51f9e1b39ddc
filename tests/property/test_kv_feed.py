"""What subscribers of KV events hold against what the simulated cache really holds, in random histories."""

import random

import anyio.lowlevel

from slagate.workers.errors import RequestRefused
from slagate.workers.kv_events.feed import KvFeed
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.kv_cache.blocks import (
    TOKEN_BYTES,
    CachePrompt,
    block_states,
    seed_state,
    token_bytes,
)
from slagate.workers.sim.kv_cache.cache import Allocation, SimKvCache
from slagate.workers.sim.kv_cache.events import KvEventQueue, KvEventRecorder
from support.kv.mirror import KvMirror, KvStream
from support.seeds import each_seed

SEEDS = {salt: seed_state("m", salt) for salt in ("", "s")}
BLOCK_TOKENS = 3
N_HISTORIES = 300
N_HISTORIES_OF_LOSSES = 60
N_STEPS = 24
N_STEPS_OF_LOSSES = 40  # an engine has to fill before it loses anything


class Rank:
    """One rank's cache under load, and what it held after every flush."""

    def __init__(self, queue: KvEventQueue, rank: int | None, rng: random.Random) -> None:
        self.rng = rng
        windows = rng.choice([(1000,), (1000,), (6, 1000), (1000, 6)])
        self.recorder = KvEventRecorder(
            queue,
            rank=rank,
            windows=windows,
            block_tokens=BLOCK_TOKENS,
            salt=b"w",
            newest=rng.random() < 0.5,
        )
        self.cache = SimKvCache(
            rng.randint(4, 12),
            BLOCK_TOKENS,
            lower_blocks=rng.choice([(), (3,), (8,), (2, 4)]),
            recorder=self.recorder,
        )
        self.held: list[tuple[Allocation, list[bytes], bytes]] = []  # with states, tokens to store

    def admit(self) -> None:
        salt = self.rng.choice(("", "", "s"))
        # Few different tokens and lengths: prompts share prefixes and diverge inside them.
        tokens = [self.rng.randint(0, 1) for _ in range(self.rng.randint(2, 14))]
        packed = token_bytes(tokens)
        states = block_states(packed, SEEDS[salt], BLOCK_TOKENS)
        allocation = self.cache.allocate(
            CachePrompt(seed=SEEDS[salt], states=states, packed=packed, cache_salt=salt),
            n_blocks=len(states),
            reusable_tokens=len(tokens) - 1,
        )
        if allocation is not None:
            # The newest token of a sequence is never stored.
            self.held.append((allocation, states, packed[:-TOKEN_BYTES]))

    def act(self) -> None:
        if not self.held or self.rng.random() < 0.4:
            self.admit()
            return
        allocation, states, packed = one = self.rng.choice(self.held)
        n_full = len(packed) // TOKEN_BYTES // BLOCK_TOKENS
        if self.rng.random() < 0.3:
            packed = packed[: n_full * BLOCK_TOKENS * TOKEN_BYTES]
            self.cache.store(allocation, states[:n_full], packed, partial=False)
            return
        self.cache.store(allocation, states[:n_full], packed, partial=True)
        self.cache.release(allocation)
        self.held.remove(one)

    def say_something(self) -> int:
        """Let everything go and store one new block; gives its hash."""
        for allocation, _, _ in self.held:
            self.cache.release(allocation)
        packed = token_bytes([9] * BLOCK_TOKENS)
        states = block_states(packed, SEEDS[""], BLOCK_TOKENS)
        prompt = CachePrompt(seed=SEEDS[""], states=states, packed=packed)
        mine = self.cache.allocate(prompt, n_blocks=1, reusable_tokens=0)
        assert mine is not None
        self.cache.store(mine, states, packed, partial=False)
        self.recorder.flush()
        return self.recorder.engine_hash(states[0])


class History:
    """A random engine behind a feed, and a few subscribers with bad habits."""

    def __init__(self, rng: random.Random, *, max_events: int) -> None:
        self.rng = rng
        self.n_ranks = rng.choice([1, 1, 2])
        self.queue = KvEventQueue(max_events)
        self.ranks = [
            Rank(self.queue, None if self.n_ranks == 1 else rank, rng)
            for rank in range(self.n_ranks)
        ]
        self.feed = KvFeed(
            ranks=self.n_ranks,
            block_tokens=BLOCK_TOKENS,
            instance_id="i",
            unix_nanos=lambda: 1,
            history_batches=rng.choice([1, 3, 10, 1000]),
            history_bytes=rng.choice([300, 2000, 100_000]),
        )
        self.truth: dict[tuple[int, int], dict[int, int]] = {}  # by rank and batch number
        self.flushed: dict[int, list[dict[int, int]]] = {}  # by number of events up to there
        self.n_flushed = self.n_polled = 0
        self.mirrors = [KvMirror() for _ in range(3)]
        self.streams: list[KvStream | None] = [None] * 3
        self.n_compared = self.n_refused = 0

    def newest(self, rank: int) -> int:
        return self.feed.counters()[f"newest_number_{rank}"]

    def iterate(self) -> None:
        for rank in self.ranks:
            for _ in range(self.rng.randint(0, 3)):
                rank.act()
            rank.recorder.flush()

    def n_events(self) -> int:
        """Events flushed so far, those dropped included."""
        return sum(vars(rank.recorder)["_next_id"] for rank in self.ranks)

    def step(self) -> None:
        self.iterate()
        self.flushed[self.n_events()] = [rank.cache.resident() for rank in self.ranks]
        if self.rng.random() < 0.7:
            self.poll(self.rng.choice([1, 2, 5, 100]))

    def poll(self, limit: int) -> None:
        events = self.queue.take_events(limit)
        # Single events and lists of lists are polls, too.
        shape = self.rng.randint(0, 2)
        if shape == 1:
            cut = self.rng.randint(0, len(events))
            self.read([events[:cut], events[cut:]])
        elif shape == 2 and len(events) == 1:
            self.read(events[0])
        else:
            self.read(events)
        self.n_polled += len(events)
        resident = self.flushed.get(self.n_polled + self.queue.n_dropped)
        if resident is not None:
            for rank in range(self.n_ranks):
                at = rank, self.newest(rank)
                if not self.queue.n_dropped:
                    known = self.truth.get(at, resident[rank])
                    assert known == resident[rank], "the cache changed and no batch said so"
                self.truth[at] = resident[rank]

    def read(self, polled: object) -> None:
        for _ in self.feed.publish_polled(polled):
            pass

    def drain(self) -> None:
        while self.n_polled + self.queue.n_dropped < self.n_events():
            self.poll(100)

    def meddle(self) -> None:
        """One subscriber does something."""
        i = self.rng.randrange(len(self.streams))
        stream, mirror = self.streams[i], self.mirrors[i]
        if stream is None or stream.status is not None:
            self.streams[i] = self.join(mirror)
        elif stream.is_paused:
            stream.resume()
        elif self.rng.random() < 0.5:
            stream.pause()
        else:
            stream.call.cancel()

    def join(self, mirror: KvMirror) -> KvStream:
        rank = self.rng.randrange(self.n_ranks)
        if self.rng.random() < 0.6:
            try:
                return mirror.resume(self.feed, rank)
            except RequestRefused:
                self.n_refused += 1
        if self.rng.random() < 0.5:
            return mirror.restart(self.feed, rank)
        return mirror.restart(self.feed)

    async def settle(self) -> None:
        """Until no loop turn delivers any more."""
        n_before = -1
        while n_before != (n_now := sum(len(s.batches) for s in self.streams if s)):
            n_before = n_now
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()

    def compare(self, *, exact: bool = True) -> None:
        for mirror in self.mirrors:
            for rank, held in mirror.ranks.items():
                if held.next_number is None:
                    continue
                truth = self.truth.get((rank, held.next_number - 1))
                if truth is None:
                    continue
                self.n_compared += 1
                if exact:
                    assert held.resident() == truth
                else:
                    assert held.resident().items() <= truth.items()


async def faithful(rng: random.Random) -> int:
    history = History(rng, max_events=100_000)
    for _ in range(N_STEPS):
        history.step()
        if rng.random() < 0.4:
            history.meddle()
        if rng.random() < 0.1:
            await anyio.sleep(6.0)  # long enough for heartbeats, where somebody listens
        elif rng.random() < 0.8:
            await anyio.lowlevel.checkpoint()
        history.compare()
    history.drain()
    for i, stream in enumerate(history.streams):
        if stream is not None and stream.is_paused:
            stream.resume()
        await history.settle()
        if stream is None or stream.status is not None:
            # Whatever happened to it, a snapshot brings everything back.
            history.streams[i] = history.mirrors[i].restart(history.feed)
    await history.settle()
    history.compare()
    ends = history.flushed[history.n_events()]
    for stream, mirror in zip(history.streams, history.mirrors, strict=True):
        assert stream is not None
        assert stream.status is None
        for rank in {batch.data_parallel_rank for batch in stream.batches}:
            assert mirror.rank(rank).next_number == history.newest(rank) + 1
            assert mirror.resident(rank) == ends[rank]
    counters = history.feed.counters()
    assert not any(
        counters[name]
        for name in ("gaps", "decode_errors", "dropped_events", "orphan_blocks", "hidden_blocks")
    )
    history.feed.end_streams()
    return history.n_compared


async def overflowing(rng: random.Random) -> bool:
    history = History(rng, max_events=rng.randint(4, 8))
    for _ in range(N_STEPS_OF_LOSSES):
        history.step()
        if rng.random() < 0.3:
            history.meddle()
        await anyio.lowlevel.checkpoint()
        if history.n_ranks == 1:
            history.compare(exact=False)
    # A rank's lost events show only in its next one.
    last = []
    for rank in history.ranks:
        last.append(rank.say_something())
        history.drain()
    history.mirrors[0] = KvMirror()
    history.streams[0] = history.mirrors[0].restart(history.feed)
    for stream in history.streams:
        if stream is not None and stream.is_paused:
            stream.resume()
    await history.settle()
    for mirror in history.mirrors:
        for number, held in mirror.ranks.items():
            if held.next_number == history.newest(number) + 1:
                assert held.resident().items() <= history.ranks[number].cache.resident().items()
                assert last[number] in held.resident()
    return history.feed.counters()["gaps"] > 0


def test_every_subscriber_holds_what_the_cache_holds() -> None:
    """KV-09, KV-11, KV-12, KV-18: late, dropped and resumed, restarted, paused, left behind."""
    compared: list[int] = []
    each_seed(N_HISTORIES, lambda seed: compared.append(run(faithful, random.Random(seed))))
    assert sum(compared) > 30 * len(compared)


def test_with_an_overflowing_engine_nobody_holds_more_than_the_cache() -> None:
    """KV-05: the oldest events are lost again and again."""
    has_gaps: list[bool] = []
    each_seed(
        N_HISTORIES_OF_LOSSES, lambda seed: has_gaps.append(run(overflowing, random.Random(seed)))
    )
    assert sum(has_gaps) > 5 / 6 * len(has_gaps)
