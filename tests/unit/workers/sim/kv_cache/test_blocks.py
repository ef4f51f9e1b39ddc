"""Block contents and tokens, example by example."""

import numpy as np
import pytest

from slagate.workers.sim.kv_cache.blocks import (
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


def test_branches_of_one_request_take_different_tokens() -> None:
    for state in states(20):
        tokens = [next_token(state, 7, branch) for branch in range(7)]
        assert sorted(tokens) == list(range(7))
        assert next_token(state, 7) == tokens[0]
        assert next_token(state, 1, 3) == 0


def test_a_branch_has_a_continuation_of_its_own_that_can_be_resumed() -> None:
    def tokens(prompt: list[int], n: int, branch: int) -> list[int]:
        return continuation(prompt, n, model="m", block_tokens=4, vocab_size=1000, branch=branch)

    both = [tokens([1, 2, 3], 12, branch) for branch in range(2)]
    assert both[0] == continuation([1, 2, 3], 12, model="m", block_tokens=4, vocab_size=1000)
    assert not {*enumerate(both[0])} & {*enumerate(both[1])}
    assert both[1][:5] + tokens([1, 2, 3, *both[1][:5]], 7, 1) == both[1]
