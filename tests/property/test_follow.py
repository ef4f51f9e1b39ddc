"""A followed worker's place in the index against what its cache really held, in random histories.

Everything between the two is real: the simulated cache, its events, the worker's feed, the wire, the
follower, the index. Connections break, calls hang, history is lost, the worker restarts.
"""

import random
from collections.abc import Iterator

import anyio
import anyio.lowlevel
import grpc

from slagate.pools.kv_events.follower import MAX_DELAY_S
from slagate.pools.kv_events.view import EventMode
from slagate.pools.prefix.index import PrefixIndex
from slagate.pools.prefix.trie import Root
from slagate.proto.rpc.sinks import Call, EndedCall, Sink
from slagate.proto.rpc.status import Metadata, Status
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
from support.kv.followed import Followed, depth_of, followed, info
from support.seeds import each_seed
from support.worker.fake import FakeWorker

BLOCK_TOKENS = 4
SALTS = ("", "s")
SEEDS = {salt: seed_state("m", salt) for salt in SALTS}
N_HISTORIES = 60

N_STEPS = 40

Held = dict[int, int]
"""Engine hash -> level."""


class Cache:
    """One rank's cache under load."""

    def __init__(self, queue: KvEventQueue, rank: int | None, rng: random.Random) -> None:
        self.rng = rng
        self.recorder = KvEventRecorder(
            queue,
            rank=rank,
            windows=(1000,),
            block_tokens=BLOCK_TOKENS,
            salt=rng.randbytes(4),
            newest=True,
        )
        self.cache = SimKvCache(
            rng.randint(4, 14),
            BLOCK_TOKENS,
            lower_blocks=rng.choice([(), (3,), (8,), (2, 4)]),
            recorder=self.recorder,
        )
        self.running: list[tuple[Allocation, list[bytes], bytes]] = []
        self.prompts: dict[tuple[str, bytes], list[int]] = {}  # -> its blocks' engine hashes

    def admit(self) -> None:
        salt = self.rng.choice(SALTS)
        tokens = [self.rng.randint(0, 1) for _ in range(self.rng.randint(2, 20))]
        packed = token_bytes(tokens)
        states = block_states(packed, SEEDS[salt], BLOCK_TOKENS)
        allocation = self.cache.allocate(
            CachePrompt(seed=SEEDS[salt], states=states, packed=packed, cache_salt=salt),
            n_blocks=len(states),
            reusable_tokens=len(tokens) - 1,
        )
        if allocation is not None:
            self.running.append((allocation, states, packed[:-TOKEN_BYTES]))
            self.prompts[salt, packed] = [
                self.recorder.engine_hash(state) for state in states[: len(tokens) // BLOCK_TOKENS]
            ]

    def act(self) -> None:
        if not self.running or self.rng.random() < 0.4:
            self.admit()
            return
        one = self.rng.choice(self.running)
        allocation, states, packed = one
        n_full = len(packed) // TOKEN_BYTES // BLOCK_TOKENS
        self.cache.store(allocation, states[:n_full], packed, partial=True)
        self.cache.release(allocation)
        self.running.remove(one)


class Engine(FakeWorker):
    """A worker with a real feed, on a bad network."""

    def __init__(self, rng: random.Random, *, n_ranks: int) -> None:
        super().__init__()
        self.rng = rng
        self.n_ranks = n_ranks
        self.n_starts = 0
        self.calls_open: list[Line] = []
        self.is_reachable = True
        self.start()

    def start(self) -> None:
        """Another incarnation, with an empty cache."""
        self.n_starts += 1
        self.queue = KvEventQueue(100_000)
        self.caches = [
            Cache(self.queue, None if self.n_ranks == 1 else rank, self.rng)
            for rank in range(self.n_ranks)
        ]
        self.feed = KvFeed(
            ranks=self.n_ranks,
            block_tokens=BLOCK_TOKENS,
            instance_id=self.id,
            unix_nanos=lambda: 1,
            history_batches=self.rng.choice([1, 3, 10, 1000]),
            history_bytes=self.rng.choice([300, 2000, 100_000]),
        )
        self.truth: dict[tuple[int, int], Held] = {}  # by rank and batch number
        self.publish()

    @property
    def id(self) -> str:
        return f"i{self.n_starts}"

    def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
        if not self.is_reachable:
            sink.finish(Status(grpc.StatusCode.UNAVAILABLE, "unreachable"))
            return EndedCall()
        line = Line(sink)
        try:
            line.call = self.feed.subscribe(request, metadata, line)
        except RequestRefused as refusal:
            sink.finish(refusal.status)
            return EndedCall()
        self.calls_open.append(line)
        return line

    def work(self) -> None:
        for cache in self.caches:
            for _ in range(self.rng.randint(0, 3)):
                cache.act()
            cache.recorder.flush()
        self.publish()

    def publish(self) -> None:
        before = [self.newest(rank) for rank in range(self.n_ranks)]
        for _ in self.feed.publish_polled(self.queue.take_events(10_000)):
            pass
        for rank, cache in enumerate(self.caches):
            assert self.newest(rank) <= before[rank] + 1
            self.truth[rank, self.newest(rank)] = cache.cache.resident()

    def held_at(self, rank: int, number: int) -> Held:
        """What was cached when a batch was published."""
        while (rank, number) not in self.truth:
            number -= 1  # it was empty: a heartbeat, or to number a snapshot
            assert number >= -1
        return self.truth[rank, number]

    def newest(self, rank: int) -> int:
        return self.feed.counters()[f"newest_number_{rank}"]

    def break_lines(self) -> None:
        for line in self.calls_open:
            line.drop()
        self.calls_open.clear()

    def crash(self) -> None:
        self.break_lines()
        self.start()


class Line:
    """A connection, which may break or go dead without a word."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._is_open = True
        self.is_dead = False
        self.call: Call = EndedCall()

    def message(self, data: bytes, /) -> None:
        if self._is_open and not self.is_dead:
            self._sink.message(data)

    def finish(self, status: Status, /) -> None:
        if self._is_open and not self.is_dead:
            self._is_open = False
            self._sink.finish(status)

    def drop(self) -> None:
        """The connection is gone, and both ends learn of it."""
        self.is_dead = False
        self.finish(Status(grpc.StatusCode.UNAVAILABLE, "connection reset"))
        self.call.cancel()

    def cancel(self) -> None:
        self.is_dead = False
        self.call.cancel()

    def pause(self) -> None:
        self.call.pause()

    def resume(self) -> None:
        self.call.resume()


def expected_depths(held: Held, hashes: list[int]) -> tuple[int, int]:
    """Leading blocks held at all, and on the device."""
    anywhere = next((n for n, hash_ in enumerate(hashes) if hash_ not in held), len(hashes))
    device = next((n for n, hash_ in enumerate(hashes) if held.get(hash_)), len(hashes))
    return anywhere, min(anywhere, device)


def depths(of: Followed, rank: int, salt: str, packed: bytes) -> tuple[int, int]:
    match = of.index.match(packed, Root(cache_salt=salt))
    holder = of.holder(rank)
    return depth_of(match, holder), depth_of(match, holder, device=True)


def compare(of: Followed, engine: Engine, *, exact: bool) -> Iterator[None]:
    """Never more than the cache held when the batch that was applied last was published."""
    if of.events.n_waiting_bytes:
        return
    for rank, cache in enumerate(engine.caches):
        number = of.events.ranks[rank].next_number
        truth = {} if number is None else engine.held_at(rank, number - 1)
        holder = of.holder(rank)
        n_blocks = 0 if holder is None else holder.n_blocks
        assert n_blocks <= len(truth)
        assert not exact or n_blocks == len(truth)
        for (salt, packed), hashes in cache.prompts.items():
            found, wanted = depths(of, rank, salt, packed), expected_depths(truth, hashes)
            assert found[0] <= wanted[0]
            assert found[1] <= wanted[1]
            assert not exact or found == wanted
        yield


async def history(rng: random.Random) -> tuple[int, int, int]:
    """How often it compared, resumed and started over."""
    n_ranks = rng.choice([1, 1, 2])
    engine = Engine(rng, n_ranks=n_ranks)
    n_compared = 0
    index = PrefixIndex(BLOCK_TOKENS, max_run_blocks=rng.choice([2, 1024]))
    async with followed(engine, ranks=n_ranks, instance_id=engine.id, index=index) as of:
        for _ in range(N_STEPS):
            engine.work()
            chance = rng.random()
            if chance < 0.08:
                engine.break_lines()
            elif chance < 0.10:
                engine.crash()
                if rng.random() < 0.5:
                    await anyio.sleep(rng.choice([0.05, 2.0]))
                of.follower.identified(info(engine.id, ranks=n_ranks))
            elif chance < 0.13:
                engine.is_reachable = not engine.is_reachable
            elif chance < 0.15:
                for line in engine.calls_open:
                    line.is_dead = True
            if rng.random() < 0.3:
                await anyio.sleep(rng.choice([0.01, 0.3, 6.0, 20.0]))
            elif rng.random() < 0.8:
                await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()
            n_compared += len(list(compare(of, engine, exact=False)))
        engine.is_reachable = True
        # Time for the longest silence and the longest delay that may be under way.
        await anyio.sleep(60)
        engine.work()
        # Where the work was more than the history keeps, the stream ends, and a delay comes first.
        await anyio.sleep(1 + 2 * MAX_DELAY_S)
        assert of.events.mode is EventMode.LIVE
        assert not of.events.is_partial
        for rank in range(n_ranks):
            assert of.events.ranks[rank].next_number == engine.newest(rank) + 1
        assert len(list(compare(of, engine, exact=True))) == n_ranks
        assert (of.events.n_errors, of.events.n_gaps, of.events.n_pending) == (0, 0, 0)
        counts = n_compared, of.events.n_resumes, of.events.n_resyncs
    while index.sweep():
        pass
    assert (index.n_pairs, index.trie.n_runs) == (0, 0)
    return counts


def test_the_index_holds_what_the_worker_holds_and_never_more() -> None:
    """KV-05, KV-09, KV-11, KV-12, OPS-06: broken off, resumed, left behind, restarted, hung."""
    counts: list[tuple[int, int, int]] = []
    each_seed(N_HISTORIES, lambda seed: counts.append(run(history, random.Random(seed))))
    n_compared, n_resumes, n_resyncs = map(sum, zip(*counts, strict=True))
    assert n_compared > 15 * len(counts)
    assert n_resumes > 2 * len(counts)
    assert n_resyncs > len(counts) // 2
