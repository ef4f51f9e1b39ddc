"""What is made of the batches that an engine streams, rule by rule."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slagate.workers.kv_events.changes import Block, Change, Cleared, Removed, Stored
from slagate.workers.kv_events.engine_stream import END, Batch, KvStreamNormaliser, batch_of
from slagate.workers.kv_events.fields import BLOCK_WORK, HASH_WORK, MAX_KEYS_BYTES, TURN_WORK
from slagate.workers.kv_events.rank_state import MAX_OLD
from slagate.workers.kv_events.wire import token_field
from support.kv.publisher import BLOCK_TOKENS, removed, stored
from support.seeds import n_in

TOKENS = token_field([1, 2, 3, 4])


class Reader:
    """A normaliser behind an engine that numbers its batches right."""

    def __init__(self, ranks: int = 1) -> None:
        self.normaliser = KvStreamNormaliser(ranks=ranks, block_tokens=BLOCK_TOKENS)
        self.number = 0

    def take(self, *events: Any) -> list[Change]:
        return self.read(Batch(0, self.number, list(events)))

    def read(self, batch: Batch) -> list[Change]:
        self.number = batch.number + 1
        return [change for portion in self.normaliser.portions([batch]) for change in portion]

    def counts(self) -> dict[str, int]:
        """Those that are not 0."""
        return {name: n for name, n in self.normaliser.counts.items() if n}


def chain(*hashes: int, parent: int | None = None, **more: Any) -> Stored:
    blocks = tuple(Block(hash_, TOKENS, ()) for hash_ in hashes)
    given: dict[str, Any] = {"level": 0, "lora_name": "", "cache_salt": "", **more}
    return Stored(0, parent, blocks, **given)


def test_events_of_tensorrt_llm() -> None:
    """Maps with a type; hashes are signed there."""
    reader = Reader()
    assert reader.take(stored(-1, 8), removed(-1, 8), {"type": "AllBlocksCleared"}) == [
        chain((1 << 64) - 1, 8),
        Removed(0, ((1 << 64) - 1, 8)),
        Cleared(0),
    ]
    assert reader.take(stored(9, parent=8, lora_name="a", lora_id=3, cache_salt="s")) == [
        chain(9, parent=8, lora_name="a", cache_salt="s")
    ]
    assert reader.counts() == {}


def test_events_of_vllms_publisher_are_lists() -> None:
    reader = Reader()
    first = ["BlockStored", [7, 8], 6, [1, 2, 3, 4] * 2, 4, None, "GPU", None, None, 0, "full"]
    assert reader.take(first, ["BlockRemoved", [8]], ["AllBlocksCleared"]) == [
        chain(7, 8, parent=6),
        Removed(0, (8,)),
        Cleared(0),
    ]
    assert reader.take(["BlockStored", [7], None, [1, 2, 3, 4], 4]) == [chain(7)]
    assert reader.counts() == {}


def test_kv_05_a_number_that_is_missing_clears_the_rank() -> None:
    reader = Reader()
    reader.take(stored(1))
    reader.number += 2
    assert reader.take(stored(2)) == [Cleared(0), chain(2)]
    assert reader.counts() == {"gaps": 1, "missed_batches": 2}
    assert Reader().read(Batch(0, 5, [])) == [Cleared(0)]


def test_kv_12_a_number_that_was_there_is_old_until_it_cannot_be() -> None:
    reader = Reader()
    reader.read(Batch(0, 500, []))
    for _ in range(MAX_OLD):
        assert reader.read(Batch(0, 0, [stored(1)])) == []
    assert reader.read(Batch(0, 0, [stored(1)])) == [Cleared(0), chain(1)]
    assert reader.normaliser.next_number(0) == 1
    assert reader.normaliser.counts["old_batches"] == MAX_OLD


def test_each_rank_has_its_own_numbers() -> None:
    reader = Reader(2)
    reader.read(Batch(0, 0, []))
    assert reader.read(Batch(1, 0, [removed(1)])) == [Removed(1, (1,))]
    assert [reader.normaliser.next_number(rank) for rank in range(2)] == [1, 1]
    assert reader.counts() == {}


def test_a_batch_that_cannot_be_read_clears_what_was_announced() -> None:
    reader = Reader()
    assert reader.read(Batch(0, 0, None)) == []
    reader.take(stored(1))
    assert reader.read(Batch(0, 2, None)) == [Cleared(0)]
    assert reader.take(stored(1)) == [chain(1)]
    assert reader.counts() == {"decode_errors": 2}


@pytest.mark.parametrize(
    ("event", "counter"),
    [
        (None, "decode_errors"),
        ([], "decode_errors"),
        ([["BlockStored"]], "decode_errors"),
        ({}, "decode_errors"),
        ({"type": ["BlockStored"]}, "decode_errors"),
        ({"type": "BlockCompressed"}, "decode_errors"),
        (stored(1) | {"block_hashes": None}, "decode_errors"),
        (stored(1) | {"block_hashes": [b"\x01"]}, "decode_errors"),
        (stored(1) | {"parent_block_hash": 1.5}, "decode_errors"),
        (stored(1) | {"token_ids": "1234"}, "decode_errors"),
        (stored(1) | {"token_ids": [1, 2, 3]}, "dropped_events"),
        (stored(1) | {"token_ids": [1, 2, 3, "4"]}, "dropped_events"),
        (stored(1) | {"token_ids": [1, 2, 3, -4]}, "dropped_events"),
        (stored(1, block_size=8), "dropped_events"),
        (stored(1, lora_id=3), "dropped_events"),
        (stored(1, lora_name=3), "decode_errors"),
        (stored(1, extra_keys=[]), "dropped_events"),
        (stored(1, extra_keys=["text"]), "decode_errors"),
        (stored(1, extra_keys=[["x" * MAX_KEYS_BYTES]]), "dropped_events"),
        (stored(1, group_idx=1), "filtered_layer_groups"),
        (stored(1, medium="CPU"), "filtered_media"),
        (removed(1, medium="DISK"), "filtered_media"),
    ],
)
def test_kv_04_what_cannot_be_told_is_counted_and_the_rest_goes_on(
    event: Any, counter: str
) -> None:
    reader = Reader()
    assert reader.take(stored(7), event, removed(7)) == [chain(7), Removed(0, (7,))]
    assert reader.counts() == {counter: 1}


def test_a_removal_of_nobody_knows_what_clears_the_rank() -> None:
    reader = Reader()
    reader.take(stored(1))
    assert reader.take(removed("x")) == [Cleared(0)]  # type: ignore[arg-type]
    assert reader.take(removed("x")) == []  # type: ignore[arg-type]


def test_a_block_that_cannot_be_told_leaves_no_orphans() -> None:
    reader = Reader()
    event = stored(1, 2, 3)
    event["token_ids"][5] = None
    assert reader.take(event) == [chain(1)]
    assert reader.counts() == {"dropped_events": 1}


def test_what_else_entered_a_hash_is_told_as_it_came() -> None:
    (change,) = Reader().take(stored(1, 2, extra_keys=[["picture", 3, None], None]))
    assert isinstance(change, Stored)
    assert [block.keys for block in change.blocks] == [('extra=["picture",3,null]',), ()]


def test_t2_7_pictures_are_told_apart_as_in_polled_events() -> None:
    """The first token of a picture is its digest, and each block has the keys of the pictures in it."""
    picture, other = "ab" * 32, "cd" * 32

    def told(digest: str) -> tuple[Block, ...]:
        event = stored(1, 2, mm_keys=[[], [{"type": "mm_key", "hash": digest, "start_offset": 0}]])
        event["token_ids"][5] = digest
        (change,) = Reader().take(event)
        assert isinstance(change, Stored)
        return change.blocks

    assert told(picture) == (
        Block(1, TOKENS, ()),
        Block(2, token_field([1, 0, 3, 4]), (f"mm={picture}@0", f"mm_token={picture}@1")),
    )
    assert told(picture)[1].keys != told(other)[1].keys


@pytest.mark.parametrize(
    "pictures",
    [[], [[]], [[], [], []], [[], ["ab" * 32]], [[], [{"hash": "a", "start_offset": 0}]]],
)
def test_t2_7_a_picture_that_cannot_be_told_leaves_its_block_out(pictures: list[Any]) -> None:
    reader = Reader()
    changes = reader.take(stored(1, 2, mm_keys=pictures))
    assert changes == ([chain(1)] if len(pictures) == 2 else [])
    assert reader.counts() == {"dropped_events": 1}


def test_what_is_more_than_a_turn_comes_in_portions() -> None:
    n_turn = TURN_WORK // (BLOCK_WORK + BLOCK_TOKENS)
    normaliser = KvStreamNormaliser(ranks=1, block_tokens=BLOCK_TOKENS)
    events = [stored(*range(1, n_turn + 3)), removed(*range(TURN_WORK // HASH_WORK + 1))]
    events += [stored(n) for n in range(3 * n_turn)]
    portions = list(normaliser.portions([Batch(0, 0, events)]))
    first, second = portions[0][0], portions[1][0]
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (len(first.blocks), len(second.blocks), second.parent) == (n_turn, 2, n_turn)
    sizes = [
        sum(
            len(one.blocks) * (BLOCK_WORK + BLOCK_TOKENS)
            if isinstance(one, Stored)
            else HASH_WORK * len(one.hashes)
            for one in portion
            if isinstance(one, Stored | Removed)
        )
        for portion in portions
    ]
    assert max(sizes) <= 2 * TURN_WORK
    assert len(sizes) > 5


# --- frames ----------------------------------------------------------------------------------------


def frames(payload: Any, number: int = 3, topic: bytes = b"kv") -> list[bytes]:
    return [topic, number.to_bytes(8, "big"), msgspec.msgpack.encode(payload)]


def test_a_message_is_a_numbered_batch() -> None:
    assert batch_of(1, frames([0.5, ["e"], 1]), topic="kv") == Batch(1, 3, ["e"])
    assert batch_of(1, frames([0.5, ["e"]]), topic="") == Batch(1, 3, ["e"])
    assert batch_of(1, frames([0.5, ["e"], None, "more"])[1:], topic="kv") == Batch(1, 3, ["e"])
    assert batch_of(1, [b"", END.to_bytes(8, "big"), b""], topic="kv") == Batch(1, END, [])
    assert END.to_bytes(8, "big") == (-1).to_bytes(8, "big", signed=True)


@pytest.mark.parametrize(
    "payload", [None, 1, {}, [], [0.5], [0.5, None], [0.5, {}], [0.5, [], 2], [0.5, [], "1"]]
)
def test_a_batch_of_another_rank_or_shape_has_a_number_and_no_events(payload: Any) -> None:
    assert batch_of(1, frames(payload), topic="kv") == Batch(1, 3, None)


def test_bytes_that_are_no_msgpack_have_a_number_and_no_events() -> None:
    for bad in (b"", b"\xc1", b"\x93\x01", b"\x91" * 100_000):
        assert batch_of(0, [b"kv", bytes(8), bad], topic="kv") == Batch(0, 0, None)


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [b""],
        [bytes(8)],
        [b"", b"1", b""],
        [b"", bytes(9), b""],
        frames([0, []], topic=b"kv2"),
        [b""] * 4,
    ],
)
def test_a_message_without_a_number_is_none(bad: list[bytes]) -> None:
    assert batch_of(0, bad, topic="kv") is None


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text()
    | st.binary() | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from([*stored(1), "extra_keys", "group_idx", "cache_salt"]), inner, max_size=8
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=n_in(gate=60, long=300), deadline=None)
@given(st.lists(_ANYTHING, max_size=5), st.integers(0, 3))
def test_nothing_an_engine_says_raises(events: list[Any], number: int) -> None:
    reader = Reader()
    reader.take(stored(1))
    batch = batch_of(0, frames([0.5, events], number), topic="kv")
    assert batch is not None
    for change in reader.read(batch):
        assert isinstance(change, Stored | Removed | Cleared)
