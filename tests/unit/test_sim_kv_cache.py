"""Block contents and the paged pool, example by example."""

import numpy as np
import pytest

from slagate.workers.sim_kv_cache import (
    SimKvCache,
    TokenChain,
    block_contents,
    block_states,
    continuation,
    next_token,
    seed_state,
    state_of,
    token_bytes,
    verify,
)

SEED = seed_state("m")


def states(n: int, first: int = 0) -> list[bytes]:
    return block_states(token_bytes(range(first, first + n * 4)), SEED, 4)


def test_a_state_covers_everything_before_it() -> None:
    a, b = states(3), block_states(token_bytes([9, *range(1, 12)]), SEED, 4)
    assert len({*a, *b}) == 6
    assert block_states(token_bytes(range(8)), SEED, 4) == a[:2]


def test_states_differ_by_model_and_salt() -> None:
    seeds = [seed_state("m"), seed_state("n"), seed_state("m", "s"), seed_state("m", "t")]
    assert len(set(seeds)) == 4


def test_a_chain_agrees_with_the_states_of_the_whole_context() -> None:
    tokens = list(range(100, 123))
    for split in range(len(tokens)):
        whole = split - split % 4
        head = block_states(token_bytes(tokens[:whole]), SEED, 4)
        tail = token_bytes(tokens[whole:split])
        chain = TokenChain(head[-1] if head else SEED, tail, 4)
        for token in tokens[split:]:
            chain.append(token)
        expected = block_states(token_bytes(tokens), SEED, 4)
        assert chain.state == expected[-1]
        assert head + chain.filled == expected[:-1]


@pytest.mark.parametrize("n_prompt", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("n_first", [0, 1, 3, 4, 9])
def test_a_resumed_continuation_goes_on_where_it_stopped(n_prompt: int, n_first: int) -> None:
    prompt = list(range(n_prompt))
    whole = continuation(prompt, 12, model="m", block_tokens=4, vocab_size=1000)
    resumed = continuation(
        prompt + whole[:n_first], 12 - n_first, model="m", block_tokens=4, vocab_size=1000
    )
    assert whole[:n_first] + resumed == whole


def test_a_continuation_depends_on_prompt_model_and_salt() -> None:
    def of(prompt: list[int], model: str = "m", salt: str = "") -> tuple[int, ...]:
        return tuple(
            continuation(prompt, 6, model=model, block_tokens=4, vocab_size=50_000, cache_salt=salt)
        )

    assert len({of([1, 2]), of([2, 2]), of([1, 2], "n"), of([1, 2], "m", "s")}) == 4
    assert all(0 <= token < 50_000 for token in of([1, 2]))


def test_next_tokens_use_the_whole_vocabulary() -> None:
    seen = {next_token(state, 7) for state in states(200)}
    assert seen == set(range(7))


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [1.5], ["a"]])
def test_tokens_that_are_not_uint32_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        token_bytes(tokens)


@pytest.mark.parametrize("block_bytes", [16, 32, 4096])
def test_contents_give_their_state_back(block_bytes: int) -> None:
    chain = states(5)
    blocks = block_contents(chain, block_bytes)
    assert blocks.shape == (5, block_bytes)
    assert [state_of(block) for block in blocks] == chain
    assert verify(blocks, chain) == []


def test_any_changed_byte_is_found_in_its_block() -> None:
    chain = states(3)
    blocks = block_contents(chain, 64)
    for block in range(3):
        for byte in range(64):
            changed = blocks.copy()
            changed[block, byte] ^= 1
            assert verify(changed, chain) == [block]


def test_swapped_and_shifted_bytes_are_found() -> None:
    chain = states(2)
    blocks = block_contents(chain, 64)
    assert verify(blocks[::-1], chain) == [0, 1]
    assert verify(np.roll(blocks, 16, axis=1), chain) == [0, 1]


@pytest.mark.parametrize("block_bytes", [0, 8, 17])
def test_block_bytes_must_be_a_multiple_of_16(block_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        block_contents(states(1), block_bytes)


def test_a_released_prefix_is_reused_and_counted_once() -> None:
    cache = SimKvCache(10, 4)
    chain = states(4)
    first = cache.allocate(chain[:3], n_blocks=4)
    assert first is not None
    assert cache.match(chain) == 0
    cache.commit(first, chain[:3])
    second = cache.allocate(chain[:3], n_blocks=4)
    assert second is not None
    assert (second.shared, second.private_blocks) == (chain[:3], 1)
    assert cache.used_blocks == 5
    cache.release(first)
    cache.release(first)
    cache.release(second)
    assert (cache.used_blocks, cache.cached_blocks) == (0, 3)
    assert cache.match(chain) == 3
    assert (cache.n_reused_blocks, cache.n_missed_blocks) == (3, 3)


def test_two_sequences_that_computed_the_same_block_share_it() -> None:
    cache = SimKvCache(10, 4)
    chain = states(2)
    both = [cache.allocate([], n_blocks=2) for _ in range(2)]
    for allocation in both:
        assert allocation is not None
        cache.commit(allocation, chain)
    assert cache.used_blocks == 2


def test_the_longest_unused_leaf_is_evicted_first() -> None:
    cache = SimKvCache(6, 4)
    old, new = states(3), states(3, first=1000)
    for chain in (old, new):
        allocation = cache.allocate(chain, n_blocks=3)
        assert allocation is not None
        cache.commit(allocation, chain)
        cache.release(allocation)
    other = cache.allocate([], n_blocks=2)
    assert other is not None
    assert (cache.match(old), cache.match(new)) == (1, 3)
    assert cache.n_evicted_blocks == 2


def test_reserved_blocks_are_kept_for_the_one_that_reserved_them() -> None:
    cache = SimKvCache(4, 4)
    first = cache.allocate([], n_blocks=1, reserve_blocks=2)
    assert first is not None
    assert cache.allocate([], n_blocks=2) is None
    assert cache.allocate([], n_blocks=1) is not None
    cache.grow(first)
    cache.grow(first)
    assert cache.used_blocks == 4
    cache.release(first)
    assert (cache.used_blocks, cache.available_blocks) == (1, 3)


def test_a_hit_on_an_unreferenced_block_still_needs_room() -> None:
    """Reviving a cached block takes it from those that others could evict."""
    cache = SimKvCache(3, 4)
    chain = states(2)
    allocation = cache.allocate(chain, n_blocks=2)
    assert allocation is not None
    cache.commit(allocation, chain)
    cache.release(allocation)
    assert cache.allocate([], n_blocks=2) is not None
    assert cache.allocate(chain, n_blocks=2) is None


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be > 0"):
        SimKvCache(*sizes)
