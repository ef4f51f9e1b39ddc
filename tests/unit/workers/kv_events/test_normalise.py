"""What is made of one poll of engine events, rule by rule."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slagate.workers.kv_events.changes import Block, Change, Cleared, Moved, Removed, Stored
from slagate.workers.kv_events.fields import (
    BLOCK_WORK,
    HASH_WORK,
    MAX_KEYS_BYTES,
    MAX_TEXT_BYTES,
    TURN_WORK,
)
from slagate.workers.kv_events.normalise import MAX_PARTIAL, KvEventNormaliser
from slagate.workers.kv_events.rank_state import MAX_OLD
from slagate.workers.kv_events.wire import token_field
from support.engine.kv_dicts import (
    BLOCK_TOKENS,
    EngineEvents,
    block,
    created,
    moved,
    removed,
    stored,
    tokens_of,
)
from support.seeds import n_in

TOKENS = token_field([1, 2, 3, 4])
TOP = (1 << 64) - 1


class Poller:
    """A normaliser behind an engine that numbers its events right."""

    def __init__(self, ranks: int = 1) -> None:
        self.event = EngineEvents()
        self.normaliser = KvEventNormaliser(ranks=ranks, block_tokens=BLOCK_TOKENS)

    def take(self, *data: object, **more: Any) -> list[Change]:
        return self.read([self.event(one, **more) for one in data])

    def read(self, polled: object) -> list[Change]:
        """The changes in one poll's answer."""
        return [change for portion in self.normaliser.portions(polled) for change in portion]

    def counts(self) -> dict[str, int]:
        """Those that are not 0."""
        return {name: n for name, n in self.normaliser.counts.items() if n}


def hashes(changes: list[Change]) -> list[int]:
    return [one.hash for change in changes if isinstance(change, Stored) for one in change.blocks]


def test_a_stored_chain_has_its_tokens_parent_level_and_names() -> None:
    poller = Poller()
    blocks = [block(8, level=1, cache_salt="s"), block(9, first=5, level=1)]
    assert poller.take(stored(*blocks, parent=7, lora_name="a")) == [
        Stored(
            rank=0,
            parent=7,
            blocks=(Block(8, TOKENS, ()), Block(9, token_field([5, 6, 7, 8]), ())),
            level=1,
            lora_name="a",
            cache_salt="s",
        )
    ]
    assert poller.counts() == {}


def test_blocks_of_one_event_on_two_levels_are_two_changes_of_one_chain() -> None:
    changes = Poller().take(stored(1, block(2, level=1), block(3, level=1)))
    assert [(c.parent, hashes([c]), c.level) for c in changes if isinstance(c, Stored)] == [
        (None, [1], 0),
        (1, [2, 3], 1),
    ]


# --- the shape of a poll ---------------------------------------------------------------------------


def test_kv_04_flat_nested_single_and_empty_polls() -> None:
    event = EngineEvents()
    first, second, third = (event(stored(hash_)) for hash_ in (1, 2, 3))
    polls: list[list[object]] = [
        [[first, second, third]],
        [[[first, second], [third]]],
        [[[first], second, [], third]],
        [first, [second], (third,)],
        [None, [], [[]], first, None, [[second, third]]],
    ]
    for answers in polls:
        poller = Poller()
        changes = [change for answer in answers for change in poller.read(answer)]
        assert hashes(changes) == [1, 2, 3]
        assert poller.counts() == {}


def test_kv_04_other_shapes_are_decode_errors_and_the_rest_goes_on() -> None:
    poller = Poller()
    for shape in (7, "text", b"bytes", True, {1, 2}, ["x"], [None], [[["nested"]]], object()):
        assert poller.read(shape) == []
    assert poller.counts() == {"decode_errors": 9}
    event = poller.event(stored(1))
    assert hashes(poller.read([3, event, "x"])) == [1]
    assert poller.counts() == {"decode_errors": 11}


# --- ids and ranks ---------------------------------------------------------------------------------


def test_kv_05_a_jump_of_the_ids_clears_the_rank_and_counts_what_is_missing() -> None:
    poller = Poller()
    poller.take(*(stored(hash_) for hash_ in range(6)))
    poller.event.skip(3)
    changes = poller.take(stored(9), stored(10))
    assert changes[0] == Cleared(0)
    assert hashes(changes[1:]) == [9, 10]
    assert poller.counts() == {"gaps": 1, "missed_events": 3}


def test_kv_05_the_first_id_is_0_so_a_late_start_is_a_gap() -> None:
    poller = Poller()
    poller.event.skip(412)
    assert poller.take(stored(1))[0] == Cleared(0)
    assert poller.counts() == {"gaps": 1, "missed_events": 412}


def test_kv_05_ids_count_before_anything_is_filtered() -> None:
    poller = Poller()
    poller.take(created(), window=512)
    poller.take(created(), window=8192)
    poller.take(stored(1), window=8192)
    assert poller.take(stored(2), window=512) == []
    assert poller.take("not an event") == [Cleared(0)]
    assert poller.take({"type": "updated", "block_hash": 1}) == []
    assert hashes(poller.take(stored(3), window=8192)) == [3]
    assert "gaps" not in poller.counts()


def test_kv_12_an_id_that_was_taken_already_is_old_news() -> None:
    poller = Poller()
    event = poller.event(stored(1))
    assert hashes(poller.read([event, event])) == [1]
    assert poller.read(event) == []
    assert poller.counts() == {"old_events": 2}


def test_a_gap_shows_although_the_event_that_shows_it_is_of_no_use() -> None:
    poller = Poller()
    poller.take(stored(1))
    poller.event.skip(1)
    assert poller.take({"type": "stored"}) == [Cleared(0)]
    assert poller.counts() == {"gaps": 1, "missed_events": 1, "decode_errors": 1}


def test_each_rank_has_its_own_ids() -> None:
    poller = Poller(ranks=2)
    assert hashes(poller.take(stored(1), rank=0)) == [1]
    assert [change.rank for change in poller.take(stored(2), rank=1)] == [1]
    poller.event.skip(1, rank=1)
    assert [change.rank for change in poller.take(stored(3), rank=1)] == [1, 1]
    assert hashes(poller.take(stored(4), rank=0)) == [4]
    assert poller.counts() == {"gaps": 1, "missed_events": 1}


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"event_id": 0},
        {"event_id": 0, "data": []},
        {"event_id": 0, "data": {}},
        {"event_id": 0, "data": {"type": ["stored"]}},
        {"event_id": 0, "data": {"type": "defragmented"}},
        {"event_id": "0", "data": stored(1)},
        {"event_id": True, "data": stored(1)},
        {"event_id": -1, "data": stored(1)},
        {"event_id": 10**30, "data": stored(1)},
        {"event_id": 0, "data": stored(1), "attention_dp_rank": 1},
        {"event_id": 0, "data": stored(1), "attention_dp_rank": -1},
        {"event_id": 0, "data": stored(1), "attention_dp_rank": "0"},
        {"event_id": 0, "data": stored(1), "window_size": "1000"},
        {"event_id": 0, "data": stored(1), "window_size": True},
        {"event_id": 0, "data": stored(1, parent="x")},
        {"event_id": 0, "data": stored(1, lora_name=7)},
        {"event_id": 0, "data": {"type": "stored", "blocks": None}},
        {"event_id": 0, "data": {"type": "stored", "blocks": [1]}},
        {"event_id": 0, "data": stored({"block_hash": 1})},
        {"event_id": 0, "data": stored({"block_hash": 1, "tokens": [1, 2, 3, 4]})},
        {"event_id": 0, "data": stored({"block_hash": 1, "tokens": [{}] * 4})},
        {"event_id": 0, "data": moved("x", 0, 1)},
    ],
)
def test_an_event_that_cannot_be_read_is_a_decode_error(event: object) -> None:
    poller = Poller()
    assert poller.read([event]) == []
    assert poller.counts() == {"decode_errors": 1}


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.sampled_from([0, 1, 1.5, float("nan"), "", "stored", "7", "\ud800"])
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "token_id", "hash", "start_offset", "new_value"]), inner
        )
    ),
    max_leaves=4,
)


@settings(max_examples=n_in(gate=100, long=500), deadline=None)
@given(data=st.data())
def test_nothing_an_engine_says_raises(data: st.DataObject) -> None:
    """KV-03: a sound event with any one part, at any depth, replaced by anything."""
    poller = Poller()
    events: list[Any] = [
        poller.event(created()),
        poller.event(
            stored(block(1, mm_keys=[{"type": "mm_key", "hash": "ab", "start_offset": 0}]), 2)
        ),
        poller.event(moved(1, 0, 1)),
        poller.event(removed(1, 2)),
    ]
    place: Any = events
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        place = inner
    place[key] = data.draw(json_like)
    poller.read(events)
    # Whatever it was, the next poll is read as ever; no engine comes as far as this id.
    last = {"event_id": (1 << 63) - 1, "data": stored(5)}
    assert hashes(poller.read(last)) in ([5], [])
    assert hashes(poller.read([last] * (MAX_OLD + 1))) == [5]


def test_an_engine_that_counts_anew_is_followed_from_then_on() -> None:
    """A few old ids are old news; a long run of them means that what was known is void."""
    poller = Poller()
    poller.read({"event_id": 1 << 40, "data": stored(1)})
    again = [{"event_id": i, "data": stored(100 + i)} for i in range(MAX_OLD + 2)]
    changes = poller.read(again)
    assert changes[0] == Cleared(0)
    assert hashes(changes) == [100 + MAX_OLD, 101 + MAX_OLD]
    assert poller.normaliser.counts["old_events"] == MAX_OLD


# --- windows ---------------------------------------------------------------------------------------


def test_kv_06_only_the_largest_created_window_counts_from_the_first_event_on() -> None:
    poller = Poller()
    poller.take(created(), window=8192)
    poller.take(created(), window=512)
    assert poller.take(stored(1), window=512) == []
    assert hashes(poller.take(stored(1), window=8192)) == [1]
    assert poller.take(removed(1), window=512) == []
    assert poller.take(removed(1), window=8192) == [Removed(0, (1,))]
    # No window that was not created is waited for.
    assert poller.take(stored(2), window=16384) == []
    assert poller.counts() == {"filtered_windows": 3}


def test_kv_06_events_without_a_window_always_pass() -> None:
    poller = Poller()
    poller.take(created(), window=8192)
    assert hashes(poller.take(stored(1), window=None)) == [1]


def test_kv_06_without_created_events_the_largest_seen_counts_and_a_larger_starts_over() -> None:
    poller = Poller()
    assert hashes(poller.take(stored(1), window=512)) == [1]
    changes = poller.take(stored(1), window=8192)
    assert changes[0] == Cleared(0)
    assert hashes(changes) == [1]
    assert poller.take(removed(1), window=512) == []
    assert poller.take(removed(1), window=8192) == [Removed(0, (1,))]
    assert poller.counts() == {"filtered_windows": 1}


def test_kv_06_of_layer_groups_with_one_window_the_first_counts() -> None:
    """A block that is gone from one group of layers is still announced by the other."""
    poller = Poller()

    def take(data: object, group: int, window: int) -> list[Change]:
        return poller.read({**poller.event(data, window=window), "layer_group_id": group})

    take(created(), 0, 512)
    take(created(), 1, 8192)
    take(created(), 2, 8192)
    assert hashes(take(stored(1), 1, 8192)) == [1]
    assert take(stored(1), 2, 8192) == []
    assert take(removed(1), 2, 8192) == []
    assert take(stored(1), 0, 512) == []
    assert take(removed(1), 1, 8192) == [Removed(0, (1,))]
    assert poller.counts() == {"filtered_layer_groups": 3, "filtered_windows": 1}


def test_a_wider_window_has_layers_of_its_own() -> None:
    poller = Poller()
    first = {**poller.event(stored(1), window=512), "layer_group_id": 0}
    wider = {**poller.event(stored(1), window=8192), "layer_group_id": 1}
    assert hashes(poller.read([first, wider])) == [1, 1]


def test_kv_14_hashes_of_another_algorithm_are_of_other_blocks() -> None:
    poller = Poller()

    def take(data: object, algorithm: object) -> list[Change]:
        return poller.read({**poller.event(data), "hash_algo": algorithm})

    assert hashes(take(stored(1), "v1_block_key")) == [1]
    assert hashes(take(stored(2), None)) == [2]
    assert len(take(stored(3), "v1_block_key")) == 1
    changes = take(stored(1), "v2_sha256_64")
    assert (changes[0], hashes(changes)) == (Cleared(0), [1])


def test_a_gap_and_a_larger_window_in_one_event_clear_once() -> None:
    poller = Poller()
    poller.take(stored(1), window=512)
    poller.event.skip(1)
    changes = poller.take(stored(1), window=8192)
    assert (changes[0], hashes(changes), len(changes)) == (Cleared(0), [1], 2)


def test_created_events_say_nothing_themselves() -> None:
    poller = Poller()
    assert poller.take(created(), window=512) + poller.take(created(), window=8192) == []
    assert poller.counts() == {}


# --- hashes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "value"),
    [
        (TOP, TOP),
        (-1, TOP),
        (str(TOP), TOP),
        ("-1", TOP),
        (-(1 << 63), 1 << 63),
        (0, 0),
        ("12", 12),
        # Of a SHA-256 the first 8 bytes, as `v2_sha256_64` has them.
        ("ff" * 8 + "ab" * 24, TOP),
        ("0" * 15 + "C" + "9" * 48, 12),
        ("1" * 64, 0x1111111111111111),
    ],
)
def test_kv_14_w11_signed_unsigned_decimal_and_sha_256_spellings_meet(
    spelling: object, value: int
) -> None:
    poller = Poller()
    changes = poller.take(stored(spelling), stored(5, parent=spelling), removed(spelling))
    changes += poller.take(moved(spelling, 0, 1))
    assert hashes(changes[:1]) == [value]
    assert isinstance(changes[1], Stored)
    assert changes[1].parent == value
    assert changes[2:] == [Removed(0, (value,)), Moved(0, value, 1)]
    assert poller.counts() == {}


@pytest.mark.parametrize(
    "bad",
    [
        *(True, 1.0, "0x1", "", " 1", "1 ", "\u0661", "1" * 21, 1 << 64, -(1 << 63) - 1, b"1", [1]),
        *("ab" * 31, "ab" * 33, "zz" * 32, "ab" * 8),
    ],
)
def test_kv_14_other_spellings_are_refused_and_counted(bad: object) -> None:
    poller = Poller()
    assert poller.take(stored(bad)) == []
    assert poller.take(stored(1, parent=bad)) == []
    # Something else is gone, and nobody knows what.
    assert hashes(poller.take(stored(1, 2))) == [1, 2]
    assert poller.take(removed(1, bad, 2)) == [Cleared(0)]
    assert poller.counts() == {"decode_errors": 3}


@pytest.mark.parametrize(
    "event",
    [
        {"data": None},
        {"data": removed(1), "window_size": "1000"},
        {"data": moved("x", 0, 1)},
        {"data": removed(1, None)},
    ],
)
def test_a_change_that_nobody_can_tell_clears_what_was_announced(event: dict[str, Any]) -> None:
    poller = Poller()
    assert hashes(poller.take(stored(1, 2))) == [1, 2]
    assert poller.read({"event_id": 1, **event}) == [Cleared(0)]
    assert poller.counts() == {"decode_errors": 1}
    assert poller.read({"event_id": 2, "data": stored(3)}) != []


def test_a_removal_of_nobody_knows_what_clears_the_rank() -> None:
    poller = Poller()
    assert poller.take({"type": "removed", "block_hashes": 5}) == [Cleared(0)]
    assert poller.counts() == {"decode_errors": 1}


# --- partial blocks --------------------------------------------------------------------------------


def test_kv_18_a_partial_block_and_what_follows_it_are_not_published() -> None:
    poller = Poller()
    assert hashes(poller.take(stored(1, 2, block(3, 3), 4))) == [1, 2]
    assert poller.take(stored(block(5, 0), parent=2)) == []
    assert poller.take(removed(3, 5)) == []
    assert poller.counts() == {"partial_blocks": 2}
    # Once swallowed, it is forgotten.
    assert poller.take(removed(3)) == [Removed(0, (3,))]


def test_kv_18_a_partial_block_that_comes_back_full_is_an_ordinary_block() -> None:
    poller = Poller()
    poller.take(stored(block(3, 3)))
    assert hashes(poller.take(stored(3))) == [3]
    assert poller.take(removed(3)) == [Removed(0, (3,))]


def test_a_move_of_a_partial_block_is_swallowed() -> None:
    poller = Poller()
    poller.take(stored(block(3, 3)))
    assert poller.take(moved(3, 0, 1)) == []


def test_after_a_gap_partial_blocks_are_unknown_too() -> None:
    poller = Poller()
    poller.take(stored(block(3, 3)))
    poller.event.skip(1)
    assert poller.take(removed(3)) == [Cleared(0), Removed(0, (3,))]


def test_only_so_many_partial_blocks_are_remembered() -> None:
    poller = Poller()
    for hash_ in range(MAX_PARTIAL + 1):
        poller.take(stored(block(hash_, 1)))
    assert poller.take(removed(0, 1, MAX_PARTIAL)) == [Removed(0, (0,))]


def test_too_many_tokens_drop_the_whole_event() -> None:
    poller = Poller()
    assert poller.take(stored(1, block(2, BLOCK_TOKENS + 1))) == []
    assert poller.counts() == {"dropped_events": 1}


def test_a_block_without_hash_leaves_no_orphans_behind() -> None:
    poller = Poller()
    assert hashes(poller.take(stored(1, block(None), 3))) == [1]
    assert poller.take(stored(block(None), 3)) == []
    assert poller.counts() == {"decode_errors": 2}


# --- updates ---------------------------------------------------------------------------------------


def test_kv_03_an_update_without_a_level_is_ignored_and_the_next_event_is_not() -> None:
    poller = Poller()
    null = {"type": "updated", "block_hash": 1, "cache_level": None, "priority": None}
    priority = {"type": "event_diff", "old_value": 35, "new_value": 80}
    assert hashes(poller.take(null, {**null, "priority": priority}, stored(1))) == [1]
    assert poller.counts() == {"ignored_updates": 2}


def test_a_move_between_levels() -> None:
    assert Poller().take(moved(1, 0, 1), moved(1, 1, 0)) == [Moved(0, 1, 1), Moved(0, 1, 0)]


def test_t2_6_a_block_on_disk_is_there_and_comes_back() -> None:
    """It used to count as removed, so that its way back was that of an unknown block."""
    poller = Poller()
    moves = [moved(1, 0, 1), moved(1, 1, 2), moved(1, 2, 1), moved(1, 1, 2), moved(1, 2, 0)]
    assert [one.level for one in poller.take(*moves) if isinstance(one, Moved)] == [1, 2, 1, 2, 0]
    assert poller.counts() == {}


def test_t2_6_without_a_host_the_disk_is_the_engines_first_level_below_the_gpu() -> None:
    poller = Poller()
    poller.normaliser = KvEventNormaliser(ranks=1, block_tokens=BLOCK_TOKENS, levels=(0, 2))
    changes = poller.take(stored(block(1, level=1)), moved(2, 0, 1), moved(2, 1, 0))
    assert [one.level for one in changes if isinstance(one, Stored | Moved)] == [2, 2, 0]
    assert poller.take(moved(2, 1, 2)) == [Removed(0, (2,))]


def test_t2_6_an_update_of_the_priority_alone_moves_nothing() -> None:
    """What did not change is null since TensorRT-LLM's pull request #11576; before, it raised there."""
    poller = Poller()
    priority = {"type": "event_diff", "old_value": 35, "new_value": 80}
    alone = {"type": "updated", "block_hash": 1, "cache_level": None, "priority": priority}
    both = moved(1, 0, 1) | {"priority": priority}
    assert poller.take(stored(1), alone, both)[1:] == [Moved(0, 1, 1)]
    assert poller.counts() == {"ignored_updates": 1}


@pytest.mark.parametrize("level", [3, -1, None, True, "1"])
def test_a_block_that_moved_nobody_knows_where_is_gone(level: object) -> None:
    poller = Poller()
    assert poller.take(moved(1, 0, level)) == [Removed(0, (1,))]
    assert poller.take({**moved(1, 0, 1), "cache_level": "host"}) == [Removed(0, (1,))]
    assert poller.counts() == {"dropped_events": 2}


# --- contents --------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_id", ["ab" * 31, "zz" * 32, "7", 1.0, True, None, -1, 1 << 32])
def test_tokens_that_are_no_token_ids_end_the_chain(token_id: object) -> None:
    tokens = [*tokens_of(3), {"type": "unique_token", "token_id": token_id, "token_extra_id": 0}]
    poller = Poller()
    assert hashes(poller.take(stored(1, {**block(2), "tokens": tokens}, 4))) == [1]
    assert poller.counts() == {"dropped_events": 1}
    assert hashes(poller.take(stored(3))) == [3]


@pytest.mark.parametrize("level", [3, -1, "0", True, 0.0])
def test_a_stored_block_on_an_unknown_level_ends_the_chain(level: object) -> None:
    poller = Poller()
    assert hashes(poller.take(stored(1, block(2, level=level), 3))) == [1]
    assert poller.counts() == {"dropped_events": 1}


def keys_of(*mm_keys: Any, **more: Any) -> tuple[str, ...] | None:
    """Extra keys of a block with these multimodal keys, None when it is refused."""
    changes = Poller().take(stored(block(1, mm_keys=list(mm_keys), **more)))
    return changes[0].blocks[0].keys if isinstance(changes[0], Stored) else None


def mm(hash_: object, offset: object = 0, **more: Any) -> dict[str, Any]:
    return {"type": "mm_key", "hash": hash_, "start_offset": offset, **more}


def test_secmm_04_a_block_carries_the_pictures_it_is_part_of() -> None:
    picture, other = "ab" * 32, "cd" * 32
    assert keys_of(mm(picture, 3), mm(other)) == (f"mm={picture}@3", f"mm={other}@0")
    assert keys_of(mm(picture)) != keys_of(mm(other))
    assert keys_of(mm(picture)) != keys_of(mm(picture, 1))
    assert keys_of() == ()


def test_secmm_04_what_the_caller_named_a_picture_is_told_too() -> None:
    """It is how a router knows the picture; the hash is the engine's own."""
    picture = "ab" * 32
    assert keys_of(mm(picture, 3, uuid="mine")) == (f"mm={picture}@3", "mm_uuid=mine@3")
    assert keys_of(mm(picture, uuid=None)) == (f"mm={picture}@0",)


def test_secmm_04_a_digest_in_place_of_a_token_is_a_key() -> None:
    """The V2 cache manager puts one where a picture begins; the picture's other tokens are numbers."""

    def taken(*token_ids: object) -> Block:
        tokens = [
            {"type": "unique_token", "token_id": one, "token_extra_id": 0} for one in token_ids
        ]
        changes = Poller().take(stored({**block(1, mm_keys=[mm("ab" * 32)]), "tokens": tokens}))
        assert isinstance(changes[0], Stored)
        return changes[0].blocks[0]

    one = taken(7, "AB" * 32, 128_257, 8)
    assert one.tokens == token_field([7, 0, 128_257, 8])
    assert one.keys == (f"mm={'ab' * 32}@0", f"mm_token={'ab' * 32}@1")
    assert taken(7, "cd" * 32, 128_257, 8).keys != one.keys


def test_secmm_05_t2_6_every_bit_of_a_picture_hash_counts_and_case_does_not() -> None:
    low, high = f"{1:064x}", f"{1 << 255:064x}"
    assert len({keys_of(mm(spelling)) for spelling in (low, high, f"{2:064x}", "0" * 64)}) == 4
    assert keys_of(mm("AB" * 32)) == keys_of(mm("ab" * 32))


@pytest.mark.parametrize("name", ["mine", "00ab", f"{1:016x}"])
def test_secmm_05_t2_6_a_name_in_place_of_a_hash_ends_the_chain(name: str) -> None:
    """Two pictures may have one name. Nor are the first digits of a hash enough, as others shorten it."""
    poller = Poller()
    for key in (mm(name), mm(None, uuid=name)):
        assert hashes(poller.take(stored(1, block(2, mm_keys=[key]), 3))) == [1]
    assert poller.counts() == {"dropped_events": 2}


@pytest.mark.parametrize(
    "key",
    [
        mm(None),
        mm(""),
        mm("x" * (MAX_TEXT_BYTES + 1)),
        mm("\ud800"),
        mm("a", None),
        mm("a", "0"),
        mm("a", 10**5000),
        "a",
    ],
)
def test_a_picture_that_cannot_be_told_ends_the_chain(key: object) -> None:
    poller = Poller()
    assert hashes(poller.take(stored(1, block(2, mm_keys=[key]), 3))) == [1]
    assert poller.counts() == {"dropped_events": 1}


def test_extra_keys_that_would_not_fit_a_message_drop_the_event() -> None:
    poller = Poller()
    n_keys = MAX_KEYS_BYTES // MAX_TEXT_BYTES
    assert poller.take(stored(block(2, mm_keys=[mm("x" * MAX_TEXT_BYTES)] * n_keys))) == []
    assert poller.counts() == {"dropped_events": 1}


def test_virtual_tokens_differ_by_their_extra_id() -> None:
    tokens = tokens_of(4)
    tokens[2]["token_extra_id"] = 77
    changes = Poller().take(stored({**block(1), "tokens": tokens}))
    assert isinstance(changes[0], Stored)
    assert changes[0].blocks[0].keys == ("token_extra=77@2",)
    tokens[1]["token_extra_id"] = "x"
    assert Poller().take(stored({**block(1), "tokens": tokens})) == []
    del tokens[2]["token_extra_id"], tokens[1]["token_extra_id"]
    assert hashes(Poller().take(stored({**block(1), "tokens": tokens}))) == [1]


def test_secmm_06_the_adapter_is_part_of_what_is_stored() -> None:
    names = []
    for name in ("adapter-7", "adapter-8", None):
        (change,) = Poller().take(stored(1, lora_name=name))
        assert isinstance(change, Stored)
        names.append(change.lora_name)
    assert names == ["adapter-7", "adapter-8", ""]


def test_secmm_06_blocks_of_two_adapters_are_not_one_chain() -> None:
    poller = Poller()
    assert poller.take(stored(block(1, lora_name="a"), block(2, lora_name="b"))) == []
    (change,) = poller.take(stored(block(1, lora_name="a"), lora_name="a"))
    assert isinstance(change, Stored)
    assert (change.lora_name, poller.counts()) == ("a", {"dropped_events": 1})


@pytest.mark.parametrize(
    ("event", "salt"),
    [
        (stored(1, 2), ""),
        (stored(1, 2, cache_salt="s"), "s"),
        (stored(1, block(2, cache_salt="s")), "s"),
        (stored(block(1, cache_salt="s"), block(2, cache_salt="s"), cache_salt="s"), "s"),
        (stored(block(1, cache_salt="s"), block(2, cache_salt="t")), None),
        (stored(block(1, cache_salt="s"), cache_salt="t"), None),
        (stored(1, cache_salt="x" * (MAX_TEXT_BYTES + 1)), None),
    ],
)
def test_one_event_has_one_cache_salt_or_is_dropped(event: object, salt: str | None) -> None:
    poller = Poller()
    changes = poller.take(event)
    assert [change.cache_salt for change in changes if isinstance(change, Stored)] == (
        [] if salt is None else [salt]
    )
    assert poller.counts() == ({"dropped_events": 1} if salt is None else {})


# --- more than a turn of the loop may take ---------------------------------------------------------

N_TURN_BLOCKS = TURN_WORK // (BLOCK_WORK + BLOCK_TOKENS)
N_TURN_HASHES = TURN_WORK // HASH_WORK


def portions(poller: Poller, *data: object) -> list[list[Change]]:
    return list(poller.normaliser.portions([poller.event(one) for one in data]))


def test_a_chain_of_more_than_a_turn_comes_in_portions_that_go_on_where_the_last_one_ended() -> (
    None
):
    n_blocks = 2 * N_TURN_BLOCKS + 5
    chain = portions(Poller(), stored(*range(n_blocks), parent=n_blocks))
    changes = [change for portion in chain for change in portion]
    assert hashes(changes) == list(range(n_blocks))
    assert all(len(hashes(portion)) <= N_TURN_BLOCKS for portion in chain)
    # What is read of it takes turns, too.
    assert chain[:2] == [[], []]
    assert [one.parent for one in changes if isinstance(one, Stored)] == [
        n_blocks,
        N_TURN_BLOCKS - 1,
        2 * N_TURN_BLOCKS - 1,
    ]


def test_a_long_chain_is_dropped_whole_for_what_its_last_block_says() -> None:
    poller = Poller()
    salted = block(N_TURN_BLOCKS, cache_salt="s")
    chain = stored(block(0, cache_salt="t"), *range(1, N_TURN_BLOCKS), salted)
    assert hashes(poller.take(chain)) == []
    assert poller.counts() == {"dropped_events": 1}


def test_removals_of_more_than_a_turn_come_in_portions() -> None:
    gone = list(range(N_TURN_HASHES + 1))
    assert portions(Poller(), removed(*gone)) == [
        [Removed(0, tuple(gone[:-1]))],
        [Removed(0, tuple(gone[-1:]))],
    ]


def test_what_fits_a_turn_is_one_portion() -> None:
    chain = stored(*range(N_TURN_BLOCKS - 1))
    (portion,) = portions(Poller(), chain, removed(*range(N_TURN_HASHES)), chain)
    assert len(portion) == 3


def test_kv_18_a_tail_that_does_not_fill_a_block_gives_no_credit() -> None:
    """KV-18: block size 32, a prompt of 70 tokens, announced as blocks of 32, 32 and 6."""
    event = EngineEvents()
    normaliser = KvEventNormaliser(ranks=1, block_tokens=32)

    def read(data: object) -> list[Change]:
        return [one for portion in normaliser.portions(event(data)) for one in portion]

    (change,) = read(stored(block(1, 32), block(2, 32, first=33), block(3, 6, first=65)))
    assert isinstance(change, Stored)
    wanted = [(1, token_field(range(1, 33))), (2, token_field(range(33, 65)))]
    assert [(one.hash, one.tokens) for one in change.blocks] == wanted
    # A longer prompt fills that tail, as a block of another name that hangs from the second one.
    (longer,) = read(stored(block(4, 32, first=65), parent=2))
    assert (longer.parent, hashes([longer])) == (2, [4])  # type: ignore[union-attr]
    assert read(removed(3)) == []
    assert read(removed(4, 2)) == [Removed(0, (4, 2))]
    assert normaliser.counts["partial_blocks"] == 1
