"""Tokens of KV events, read all at once, against what reading them block by block gives."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slagate.workers.kv_events.fields import UnusableError, content_of, plain_contents
from slagate.workers.kv_events.wire import token_field, token_fields

SIZE = 3

ids = st.one_of(
    st.integers(0, 2**32 - 1),
    st.builds(
        lambda bits, less: (1 << bits) - less, st.sampled_from([7, 14, 21, 28]), st.integers(0, 1)
    ),
)


@given(st.lists(st.lists(ids, min_size=SIZE, max_size=SIZE), max_size=5))
def test_the_bytes_are_those_of_one_block_after_the_other(blocks: list[list[int]]) -> None:
    tokens = [one for block in blocks for one in block]
    assert token_fields(tokens, SIZE) == [token_field(block) for block in blocks]


def unique(token_id: object, extra: object = 0) -> dict[str, object]:
    return {"type": "unique_token", "token_id": token_id, "token_extra_id": extra}


plain = st.builds(unique, ids, st.sampled_from([0, 0, 0, None]))
odd = st.one_of(
    st.builds(unique, st.sampled_from([True, None, "7", "ab" * 32, -1, 2**32, 1.0])),
    st.builds(unique, ids, st.integers(1, 9)),
    st.sampled_from([{}, {"token_id": 7}, 7, None, "token", []]),
)


def block_of(tokens: object) -> dict[str, object]:
    return {"type": "stored_block", "tokens": tokens}


plain_block = st.builds(block_of, st.lists(plain, min_size=SIZE, max_size=SIZE))
partial_block = st.builds(block_of, st.lists(plain, max_size=SIZE - 1))
odd_block = st.one_of(
    st.builds(block_of, st.lists(odd, min_size=1, max_size=SIZE + 1)),
    st.builds(block_of, st.sampled_from([None, 7, "abc", ("a", "b", "c"), [[1], [2], [3]]])),
    st.builds(block_of, st.lists(plain, min_size=SIZE + 1, max_size=SIZE + 2)),
    st.sampled_from([{}, None, "block", 7, []]),
)


@given(st.lists(plain_block, max_size=4), st.lists(partial_block, max_size=1))
def test_blocks_like_most_are_read_at_once(blocks: list[Any], partial: list[Any]) -> None:
    expected = [content_of(block["tokens"], None) for block in blocks]
    read = plain_contents([*blocks, *partial], SIZE)
    assert [(field, ()) for field in read] == expected


@given(
    st.lists(st.one_of(plain_block, partial_block, odd_block), max_size=5),
    odd_block,
    st.integers(0, 5),
)
def test_what_is_odd_is_left_to_those_who_can_say_what_it_is(
    blocks: list[Any], one: Any, at: int
) -> None:
    blocks.insert(at, one)
    read = plain_contents(blocks, SIZE)
    if not read:
        return
    # Only what may be left out, and only where a partial block could be.
    assert blocks[-1] is one or one not in blocks[: len(read)]
    for block, field in zip(blocks, read, strict=False):
        try:
            assert content_of(block["tokens"], None) == (field, ())
        except UnusableError:
            raise AssertionError(block) from None
