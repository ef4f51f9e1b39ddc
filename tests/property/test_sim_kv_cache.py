"""The block pool against a dumb model: lists of token tuples, looked through from the start each time."""

import random
from collections import ChainMap
from operator import le
from typing import Any

from slagate.workers.sim.kv_cache.blocks import CachePrompt, block_states, seed_state, token_bytes
from slagate.workers.sim.kv_cache.cache import Allocation, SimKvCache
from slagate.workers.sim.kv_cache.events import KvEventQueue, KvEventRecorder
from support.kv.consumer import KvConsumer
from support.seeds import each_seed

SALTS = ("", "s")
SEEDS = {salt: seed_state("m", salt) for salt in SALTS}
WINDOWS = (6, 1000)
N_SEEDS = 80
N_STEPS = 60

# A block by its salt and every token up to its end.
Key = tuple[str, tuple[int, ...]]


class Model:
    """What is where: `idle` and each of `lower` are keys in order of release, `held` the sequences."""

    def __init__(self, rng: random.Random) -> None:
        self.total = rng.randint(2, 30)
        self.lower_totals = rng.choice([(), (), (1,), (4,), (20,), (1, 3), (4, 20)])
        self.block_tokens = rng.randint(1, 3)
        self.partial = rng.random() < 0.7
        self.idle: list[Key] = []
        self.lower: list[list[Key]] = [[] for _ in self.lower_totals]
        self.held: list[Held] = []

    def referenced(self) -> set[Key]:
        return {key for one in self.held for key in one.path}

    def used(self) -> int:
        return len(self.referenced()) + sum(one.n_private for one in self.held)

    def available(self) -> int:
        return self.total - self.used() - sum(one.n_reserved for one in self.held)

    def stored(self) -> dict[Key, int]:
        on_device = self.referenced() | {*self.idle}
        levels = [dict.fromkeys(keys, level) for level, keys in enumerate(self.lower, 1)]
        return dict(ChainMap(dict.fromkeys(on_device, 0), *levels))

    def path_of(self, salt: str, tokens: list[int]) -> list[Key]:
        """Keys of the blocks of these tokens, a partial last one included."""
        size = self.block_tokens
        return [(salt, (*tokens[: i + size],)) for i in range(0, len(tokens), size)]

    def parent(self, key: Key) -> Key:
        salt, tokens = key
        return salt, tokens[: (len(tokens) - 1) // self.block_tokens * self.block_tokens]

    def children(self, key: Key, *, level: int) -> list[Key]:
        return [one for one, at in self.stored().items() if at == level and self.parent(one) == key]

    def match(self, salt: str, tokens: list[int]) -> list[Key]:
        path = []
        for key in self.path_of(
            salt, tokens[: len(tokens) // self.block_tokens * self.block_tokens]
        ):
            if key not in self.stored():
                break
            path.append(key)
        return path

    def copied(self, path: list[Key], salt: str, tokens: list[int]) -> int:
        """Tokens after the path that some device block after it begins with."""
        n_before = len(path) * self.block_tokens
        parent = path[-1] if path else (salt, ())
        best = 0
        for _, other in self.children(parent, level=0):
            n = 0
            while n_before + n < min(len(other), len(tokens)) and (
                other[n_before + n] == tokens[n_before + n]
            ):
                n += 1
            best = max(best, n)
        return best if self.partial else 0

    def make_room(self) -> tuple[int, int]:
        """Evict from the device, and from lower levels for it; how many left the device, and the cache."""
        n_moved = n_forgotten = 0
        while self.used() + len(self.idle) > self.total:
            key = self.idle.pop(0)
            assert not self.children(key, level=0), "the device is not leaf first"
            n_moved += len(self.lower) > 0
            for level, (keys, total) in enumerate(
                zip(self.lower, self.lower_totals, strict=True), 1
            ):
                keys.append(key)
                if len(keys) <= total:
                    break
                key = keys.pop(0)
                assert not self.children(key, level=level), "a level is not leaf first"
            else:
                n_forgotten += 1
        return n_moved, n_forgotten


class Held:
    """One sequence in both worlds: `tokens` are those in the cache, prompt and generated."""

    def __init__(self, allocation: Allocation, salt: str, tokens: list[int]) -> None:
        self.allocation = allocation
        self.salt = salt
        self.tokens = tokens
        self.path: list[Key] = []
        self.n_private = 0
        self.n_reserved = 0


class World:
    """The cache, the model, a consumer of the events, and one step of what an engine does to them."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.model = model = Model(rng)
        self.queue = KvEventQueue(10_000)
        self.recorder = KvEventRecorder(
            self.queue,
            rank=None,
            windows=WINDOWS,
            block_tokens=model.block_tokens,
            salt=b"e",
            newest=True,
        )
        self.cache = SimKvCache(
            model.total,
            model.block_tokens,
            lower_blocks=model.lower_totals,
            partial_reuse=model.partial,
            recorder=self.recorder,
        )
        self.consumers = {window: KvConsumer() for window in WINDOWS}
        self.next_event_id = 0
        self.contexts: list[tuple[str, list[int]]] = []
        self.n_moved = self.n_forgotten = 0

    def hash_of(self, key: Key) -> int:
        salt, tokens = key
        states = block_states(token_bytes(tokens), SEEDS[salt], self.model.block_tokens)
        return self.recorder.engine_hash(states[-1])

    def step(self) -> None:
        growing = [one for one in self.model.held if not one.allocation.closed]
        kind = self.rng.random()
        if kind < 0.4 or not self.model.held:
            self.allocate()
        elif kind < 0.55 and growing:
            self.extend(self.rng.choice(growing))
        elif kind < 0.75 and growing:
            self.store(self.rng.choice(growing), partial=self.rng.random() < 0.3)
        else:
            self.release(self.rng.choice(self.model.held))
        self.recorder.flush()
        self.check()

    def some_prompt(self) -> tuple[str, list[int]]:
        """Most of the time a context seen before, cut somewhere and gone on with."""
        rng = self.rng
        salt, tokens = rng.choice(SALTS), list[int]()
        if self.contexts and rng.random() < 0.7:
            salt, tokens = rng.choice(self.contexts)
            if rng.random() < 0.6:
                tokens = tokens[: rng.randint(0, len(tokens))]
        return salt, (tokens + [rng.randint(0, 2) for _ in range(rng.randint(1, 6))])[:20]

    def allocate(self) -> None:
        model, size = self.model, self.model.block_tokens
        salt, prompt = self.some_prompt()
        packed = token_bytes(prompt)
        states = block_states(packed, SEEDS[salt], size)
        n_reserved = self.rng.randint(0, 2)
        pulled = self.rng.random() < 0.1
        reusable = [] if pulled else prompt[:-1]
        path = model.match(salt, reusable)
        copied = model.copied(path, salt, reusable)
        n_idle = sum(key not in model.referenced() for key in path)
        fits = n_idle + len(states) - len(path) + n_reserved <= model.available()
        allocation = self.cache.allocate(
            CachePrompt(SEEDS[salt], states, packed, salt),
            n_blocks=len(states),
            reserve_blocks=n_reserved,
            reusable_tokens=len(reusable),
        )
        assert (allocation is not None) == fits
        if allocation is None:
            return
        n_looked_up = len(model.path_of(salt, reusable)) if model.partial else len(reusable) // size
        assert allocation.reused_tokens == len(path) * size + copied <= len(reusable)
        assert allocation.reused_blocks == len(path) + (copied > 0)
        assert allocation.missed_blocks == n_looked_up - allocation.reused_blocks
        assert allocation.onboarded_blocks == sum(
            key in keys for key in path for keys in model.lower
        )
        held = Held(allocation, salt, prompt)
        held.n_private = len(states) - len(path)
        held.n_reserved = n_reserved
        model.held.append(held)
        self.refer(held, path)
        self.make_room()
        self.contexts.append((salt, prompt))

    def refer(self, held: Held, path: list[Key]) -> None:
        model = self.model
        held.path += path
        model.idle = [key for key in model.idle if key not in path]
        model.lower = [[key for key in keys if key not in path] for keys in model.lower]

    def make_room(self) -> None:
        n_moved, n_forgotten = self.model.make_room()
        self.n_moved += n_moved
        self.n_forgotten += n_forgotten

    def extend(self, held: Held) -> None:
        """One decode step, with the block it may need."""
        if len(held.tokens) % self.model.block_tokens == 0:
            if not held.n_reserved:
                return
            self.cache.grow(held.allocation)
            held.n_reserved -= 1
            held.n_private += 1
            self.make_room()
        held.tokens = [*held.tokens, self.rng.randint(0, 2)]
        self.contexts.append((held.salt, held.tokens))

    def store(self, held: Held, *, partial: bool) -> None:
        model, size = self.model, self.model.block_tokens
        tokens = held.tokens[:-1]
        packed = token_bytes(tokens)
        states = block_states(packed, SEEDS[held.salt], size)[: len(tokens) // size]
        for _ in range(self.rng.randint(1, 2)):
            self.cache.store(held.allocation, states, packed, partial=partial)
        path = model.path_of(held.salt, tokens)[: None if partial else len(states)]
        for key in path[len(held.path) :]:
            # Ours becomes the stored one, unless somebody else is using that.
            held.n_private -= key not in model.referenced()
            self.refer(held, [key])

    def release(self, held: Held) -> None:
        for _ in range(self.rng.randint(1, 2)):
            self.cache.release(held.allocation)
        self.model.held.remove(held)
        still = self.model.referenced()
        self.model.idle += [key for key in held.path[::-1] if key not in still]

    def check(self) -> None:
        model, cache = self.model, self.cache
        stored = model.stored()
        assert cache.used_blocks == model.used()
        assert cache.cached_blocks == len(model.idle)
        assert cache.lower_used_blocks == sum(map(len, model.lower))
        assert all(map(le, map(len, model.lower), model.lower_totals))
        assert cache.available_blocks == model.available() >= 0
        assert cache.used_blocks + cache.cached_blocks <= model.total
        assert cache.n_evicted_blocks == self.n_forgotten
        assert cache.n_offloaded_blocks == self.n_moved
        full = {key for key in stored if len(key[1]) % model.block_tokens == 0}
        assert cache.resident() == {self.hash_of(key): stored[key] for key in full}
        for event in self.queue.take_events():
            assert event["event_id"] == self.next_event_id
            self.next_event_id += 1
            self.consumers[event["window_size"]].take(event["data"])
            if event["data"]["type"] == "stored":
                self.check_stored(event["data"], {self.hash_of(key): key for key in stored})
        small, largest = (self.consumers[window].levels for window in WINDOWS)
        assert largest == {self.hash_of(key): level for key, level in stored.items()}
        assert small.items() <= largest.items()
        for key, level in stored.items():
            parent = model.parent(key)
            assert not parent[1] or stored[parent] <= level, "a block above its parent"

    def check_stored(self, data: dict[str, Any], keys: dict[int, Key]) -> None:
        """Every block of the event has the tokens of its key, and follows the one it says."""
        parent_hash = data["parent_hash"]
        for block in data["blocks"]:
            salt, tokens = keys[block["block_hash"]]
            before = self.model.parent((salt, tokens))
            assert parent_hash == (self.hash_of(before) if before[1] else None)
            own = [token["token_id"] for token in block["tokens"]]
            assert own == [*tokens[len(before[1]) :]]
            assert block["cache_salt"] == (salt or None)
            parent_hash = block["block_hash"]


def test_the_pool_is_the_dumb_model() -> None:
    def history(seed: int) -> None:
        world = World(seed)
        for _ in range(N_STEPS):
            world.step()
        for held in world.model.held:
            world.cache.release(held.allocation)
        assert world.cache.used_blocks == 0
        assert world.cache.available_blocks == world.model.total

    each_seed(N_SEEDS, history)
