"""The paged pool, example by example."""

from typing import Any

import pytest

from slagate.workers.sim.kv_cache.blocks import CachePrompt, block_states, seed_state, token_bytes
from slagate.workers.sim.kv_cache.cache import Allocation, SimKvCache
from slagate.workers.sim.kv_cache.events import KvEventQueue, KvEventRecorder

SEED = seed_state("m")


def prompt_of(tokens: list[int]) -> CachePrompt:
    packed = token_bytes(tokens)
    return CachePrompt(SEED, block_states(packed, SEED, 4), packed)


def allocate(cache: SimKvCache, tokens: list[int], reserve_blocks: int = 0) -> Allocation | None:
    """Room for a prompt, reused as far as TensorRT-LLM would."""
    prompt = prompt_of(tokens)
    return cache.allocate(
        prompt,
        n_blocks=len(prompt.states),
        reserve_blocks=reserve_blocks,
        reusable_tokens=len(tokens) - 1,
    )


def store(cache: SimKvCache, held: Allocation, tokens: list[int], *, partial: bool = False) -> None:
    """Store these tokens, which are all in the cache."""
    prompt = prompt_of(tokens)
    cache.store(held, prompt.states[: len(tokens) // 4], prompt.packed, partial=partial)


def run(cache: SimKvCache, tokens: list[int]) -> Allocation:
    """A whole request of one token of output."""
    held = allocate(cache, tokens)
    assert held is not None
    store(cache, held, tokens[:-1], partial=True)
    cache.release(held)
    return held


def recorded(**options: Any) -> SimKvCache:
    """A cache of four blocks with a recorder."""
    recorder = KvEventRecorder(
        KvEventQueue(0), rank=None, windows=(64,), block_tokens=4, salt=b"", newest=False
    )
    return SimKvCache(4, 4, recorder=recorder, **options)


def events_after(tokens: list[list[int]], **options: Any) -> list[dict[str, Any]]:
    """What a cache tells about one request after another."""
    queue = KvEventQueue(100)
    recorder = KvEventRecorder(
        queue, rank=None, windows=(8, 64), block_tokens=4, salt=b"", newest=False
    )
    cache = SimKvCache(20, 4, recorder=recorder, **options)
    for one in tokens:
        run(cache, one)
    recorder.flush()
    return queue.take_events()


A = list(range(100, 117))
B = list(range(200, 217))


def test_a_released_prefix_is_reused_and_counted_once() -> None:
    cache = SimKvCache(10, 4)
    first = allocate(cache, A)
    assert first is not None
    assert first.reused_tokens == 0
    store(cache, first, A[:-1])
    second = allocate(cache, A)
    assert second is not None
    assert (second.reused_tokens, second.reused_blocks, second.missed_blocks) == (16, 4, 0)
    assert cache.used_blocks == 6
    cache.release(first)
    cache.release(first)
    cache.release(second)
    assert (cache.used_blocks, cache.cached_blocks) == (0, 4)
    assert (cache.n_reused_blocks, cache.n_missed_blocks) == (4, 4)


@pytest.mark.parametrize(("n_tokens", "reused"), [(1, 0), (4, 3), (5, 4), (8, 7), (9, 8), (11, 10)])
def test_the_last_prompt_token_is_never_reused(n_tokens: int, reused: int) -> None:
    cache = SimKvCache(20, 4)
    run(cache, A)
    assert run(cache, A[:n_tokens]).reused_tokens == reused


def test_a_tail_helps_only_those_who_go_on_with_it() -> None:
    """KV-18: a partial block is copied by who begins with it, and is nobody's full block."""
    cache = SimKvCache(20, 4)
    run(cache, A[:11])  # Stores 4 + 4 + 2 tokens.
    assert run(cache, A[:12]).reused_tokens == 10
    assert cache.cached_blocks == 4
    fresh = SimKvCache(20, 4, partial_reuse=False)
    run(fresh, A[:11])
    assert run(fresh, A[:12]).reused_tokens == 8


def test_the_longest_partial_match_is_copied_and_neither_shared_nor_referred_to() -> None:
    cache = SimKvCache(20, 4)
    head = A[:4]
    for tail in ([1, 2, 9, 9], [1, 2, 3, 9], [1, 9, 3, 4], [1, 2, 3], [7]):
        run(cache, [*head, *tail, 0])
    used, cached = cache.used_blocks, cache.cached_blocks
    held = allocate(cache, [*head, 1, 2, 3, 4, 5])
    assert held is not None
    assert (held.reused_tokens, held.reused_blocks) == (7, 2)
    assert (cache.used_blocks - used, cached - cache.cached_blocks) == (3, 1)


def test_a_partial_match_needs_a_common_first_token() -> None:
    cache = SimKvCache(20, 4)
    run(cache, [*A[:4], 5, 6, 7, 8, 9])
    assert run(cache, [*A[:4], 6, 6, 7, 8, 9]).reused_tokens == 4


def test_tokens_that_differ_in_the_highest_bit_only_are_different() -> None:
    cache = SimKvCache(20, 4)
    run(cache, [*A[:4], 5, 6, 7, 8, 9])
    assert run(cache, [*A[:4], 5, 6 + (1 << 31), 7, 8, 9]).reused_tokens == 5


def test_many_blocks_after_one_prefix_are_searched_in_no_time() -> None:
    cache = SimKvCache(30_000, 4)
    for i in range(20_000):
        run(cache, [*A[:4], 1, i, i, i, 0])
    assert run(cache, [*A[:4], 1, 7_000, 7_000, 1, 0]).reused_tokens == 7


def test_a_duplicate_stays_with_who_computed_it_until_release() -> None:
    cache = SimKvCache(10, 4)
    both = [allocate(cache, A[:9]) for _ in range(2)]
    for held in both:
        assert held is not None
        store(cache, held, A[:8])
    assert cache.used_blocks == 6
    assert both[1] is not None
    cache.release(both[1])
    assert cache.used_blocks == 3


def test_a_duplicate_holds_the_prefix_of_what_is_stored_after_it() -> None:
    cache = SimKvCache(7, 4)
    first, second = (allocate(cache, A[:n]) for n in (5, 9))
    assert first is not None
    assert second is not None
    store(cache, first, A[:4])
    store(cache, second, A[:8])
    cache.release(first)
    assert run(cache, B[:8]).reused_tokens == 0
    assert run(cache, A[:9]).reused_tokens == 8


def test_storing_what_only_the_cache_holds_takes_no_room() -> None:
    """Otherwise a sequence could not grow into the blocks it reserved."""
    cache = SimKvCache(4, 4)
    first, second = allocate(cache, A[:5]), allocate(cache, A[:4], reserve_blocks=1)
    assert first is not None
    assert second is not None
    store(cache, first, A[:4])
    cache.release(first)
    assert allocate(cache, B[:4]) is not None
    store(cache, second, A[:4])
    cache.grow(second)
    assert (cache.used_blocks, cache.available_blocks) == (3, 1)


def test_the_longest_unused_leaf_is_evicted_first() -> None:
    cache = SimKvCache(8, 4)
    run(cache, A)
    run(cache, B[:13])
    assert allocate(cache, list(range(300, 312))) is not None
    assert cache.n_evicted_blocks == 2
    assert [run(cache, tokens).reused_tokens for tokens in (A[:9], B[:9])] == [8, 8]


def test_a_sequence_stores_once_however_often_it_is_told() -> None:
    cache = recorded()
    held = allocate(cache, A[:11])
    assert held is not None
    for partial in (False, False, True, True, False):
        store(cache, held, A[:10], partial=partial)
    assert cache.used_blocks == 3
    cache.release(held)
    assert cache.cached_blocks == 3
    store(cache, held, A[:10])
    assert len(cache.resident()) == 2


def test_a_block_that_must_go_waits_on_the_host() -> None:
    cache = recorded(lower_blocks=[2])
    run(cache, A[:13])
    before = cache.resident()
    assert [*before.values()] == [0, 0, 0]
    run(cache, B[:12])
    assert sorted(level for name, level in cache.resident().items() if name in before) == [0, 1, 1]
    assert (cache.n_offloaded_blocks, cache.n_evicted_blocks, cache.lower_used_blocks) == (2, 0, 2)


def test_a_match_on_the_host_comes_back_and_takes_a_block() -> None:
    cache = recorded(lower_blocks=[8])
    run(cache, A[:13])
    run(cache, B[:16])
    assert cache.lower_used_blocks == 3
    other = allocate(cache, list(range(300, 304)), reserve_blocks=1)
    assert other is not None
    assert allocate(cache, A[:9]) is None
    cache.release(other)
    held = allocate(cache, A[:9])
    assert held is not None
    assert (held.reused_tokens, held.onboarded_blocks, cache.n_onboarded_blocks) == (8, 2, 2)
    assert cache.used_blocks == 3


def test_t2_6_what_leaves_the_host_goes_to_disk_and_a_match_brings_it_back_from_there() -> None:
    cache = recorded(lower_blocks=[1, 3])
    run(cache, A[:13])
    before = cache.resident()
    run(cache, B[:16])
    levels = cache.resident()
    # Last block out first: the root of the chain is the one that is still on the host.
    assert [levels[name] for name in before] == [1, 2, 2]
    run(cache, list(range(300, 304)))
    run(cache, list(range(400, 404)))
    # The disk has room for three, and the last of the first chain is the oldest there.
    assert [cache.resident().get(name) for name in before] == [2, 2, None]
    held = allocate(cache, A[:13])
    assert held is not None
    assert (held.reused_tokens, held.onboarded_blocks) == (8, 2)
    assert [cache.resident().get(name) for name in before] == [0, 0, None]


def test_nothing_is_copied_from_the_host() -> None:
    cache = SimKvCache(4, 4, lower_blocks=[8])
    run(cache, A[:5])
    run(cache, B[:16])
    assert cache.lower_used_blocks == 1
    assert run(cache, A[:3]).reused_tokens == 0


def test_without_reuse_nothing_is_stored() -> None:
    cache = recorded(reuse=False)
    held = run(cache, A[:13])
    assert run(cache, A[:13]).reused_tokens == 0
    assert (held.missed_blocks, cache.cached_blocks, cache.n_missed_blocks) == (0, 0, 0)
    assert events_after([A, B], reuse=False) == []


def test_a_small_window_forgets_by_where_a_block_is_in_its_context() -> None:
    """KV-06: what is stored later, after a prefix that was stored before, lies further back too."""
    events = events_after([A[:9], A])
    told = [(e["window_size"], e["data"]["type"]) for e in events]
    # Sixteen tokens in the end: the two blocks stored last are the last eight of them.
    assert told[2:] == [(8, "stored"), (64, "stored")] * 2
    removed = [e["data"] for e in events_after([A[:5], A]) if e["data"]["type"] == "removed"]
    assert [len(data["block_hashes"]) for data in removed] == [1]


def test_salts_that_are_gone_leave_nothing_behind() -> None:
    cache = SimKvCache(4, 4)
    for salt in map(str, range(50)):
        seed, packed = seed_state("m", salt), token_bytes(A[:9])
        states = block_states(packed, seed, 4)
        held = cache.allocate(
            CachePrompt(seed, states, packed, salt), n_blocks=3, reusable_tokens=8
        )
        assert held is not None
        cache.store(held, states[:2], packed[:32], partial=True)
        cache.release(held)
    assert len(cache._tree._roots) == 2


def test_reserved_blocks_are_kept_for_the_one_that_reserved_them() -> None:
    cache = SimKvCache(4, 4)
    first = allocate(cache, A[:1], reserve_blocks=2)
    assert first is not None
    assert allocate(cache, B[:8]) is None
    assert allocate(cache, B[:4]) is not None
    cache.grow(first)
    cache.grow(first)
    assert cache.used_blocks == 4
    cache.release(first)
    assert (cache.used_blocks, cache.available_blocks) == (1, 3)


def test_a_hit_on_an_unreferenced_block_still_needs_room() -> None:
    """Reviving a cached block takes it from those that others could evict."""
    cache = SimKvCache(3, 4)
    run(cache, A[:9])
    assert allocate(cache, B[:8]) is not None
    assert allocate(cache, A[:5]) is None


def test_prefixes_of_other_salts_are_never_reused() -> None:
    cache = SimKvCache(10, 4)
    run(cache, A[:9])
    seed, packed = seed_state("m", "salt"), token_bytes(A[:9])
    salted = CachePrompt(seed, block_states(packed, seed, 4), packed, "salt")
    held = cache.allocate(salted, n_blocks=3, reusable_tokens=8)
    assert held is not None
    assert held.reused_tokens == 0


@pytest.mark.parametrize(
    ("sizes", "lower_blocks", "problem"),
    [((0, 4), [], "total_blocks 0"), ((4, 0), [], "block_tokens 0"), ((4, 4), [0], "lower_blocks")],
)
def test_an_impossible_pool_is_refused(
    sizes: tuple[int, int], lower_blocks: list[int], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        SimKvCache(*sizes, lower_blocks=lower_blocks)
