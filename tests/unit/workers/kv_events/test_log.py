"""One rank's log: what is said on the wire about changes, and how it is numbered and kept."""

import gc
import tracemalloc
from collections import deque
from itertools import islice

from slagate.proto import openengine_pb2 as oe
from slagate.workers.kv_events.changes import Block, Change, Cleared, Moved, Removed, Stored
from slagate.workers.kv_events.log import RankLog
from slagate.workers.kv_events.wire import MAX_BATCH_BYTES, token_field
from support.kv.mirror import RankMirror, number_of
from support.seeds import n_in

SIZE = 4
GPU, HOST = oe.STORAGE_MEDIUM_GPU, oe.STORAGE_MEDIUM_CPU_PINNED


def block(hash_: int, *keys: str, first: int = 1) -> Block:
    return Block(hash_, token_field(range(first, first + SIZE)), keys)


def stored(
    *blocks: int | Block, parent: int | None = None, level: int = 0, lora: str = "", salt: str = ""
) -> Stored:
    listed = tuple(one if isinstance(one, Block) else block(one) for one in blocks)
    return Stored(0, parent, listed, level, lora, salt)


def removed(*hashes: int) -> Removed:
    return Removed(0, hashes)


class Log(RankLog):
    """A log whose whole history a checking consumer has read."""

    def __init__(self, *, batches: int = 1000, n_bytes: int = 1 << 26, rank: int = 0) -> None:
        super().__init__(rank, block_tokens=SIZE, history_batches=batches, history_bytes=n_bytes)
        self.follower = RankMirror()

    def say(self, *changes: Change) -> list[oe.KvEvent]:
        """Apply one poll; gives the events that were published for it."""
        before = self.newest
        assert self.apply(changes, 99) == (self.newest > before)
        first = self.follower.next_number or 0
        batches = [batch_of(self.batch(number)) for number in range(first, self.newest + 1)]
        for batch in batches:
            self.follower.apply(batch)
        assert self.follower.resident().keys() == self.mirror.visible.keys()
        joined = snapshot(self)
        assert joined.resident() == self.follower.resident()
        assert joined.tiers == self.follower.tiers
        return [event for batch in batches for event in batch.events]


def batch_of(data: bytes) -> oe.KvEventBatch:
    assert len(data) < 1 << 20
    return oe.SubscribeKvEventsResponse.FromString(data).batch


def snapshot(log: RankLog) -> RankMirror:
    joined = RankMirror()
    for data in log.snapshot(98):
        joined.apply(batch_of(data))
    return joined


def stored_in(events: list[oe.KvEvent]) -> list[tuple[int | None, list[int], int]]:
    """Of each BlockStored: parent, hashes, medium."""
    return [
        (
            number_of(one.parent_block_hash) if one.HasField("parent_block_hash") else None,
            [number_of(hash_) for hash_ in one.block_hashes],
            one.medium,
        )
        for one in (event.block_stored for event in events if event.HasField("block_stored"))
    ]


def removed_in(events: list[oe.KvEvent]) -> list[tuple[list[int], int]]:
    return [
        ([number_of(hash_) for hash_ in one.block_hashes], one.medium)
        for one in (event.block_removed for event in events if event.HasField("block_removed"))
    ]


def orphans(log: RankLog) -> int:
    return log.mirror.n_orphans


# --- what is on the wire ---------------------------------------------------------------------------


def test_a_chain_is_one_event_with_all_it_needs() -> None:
    log = Log()
    (event,) = log.say(stored(1, 2, block(3, first=9), lora="a"))
    one = event.block_stored
    assert stored_in([event]) == [(None, [1, 2, 3], GPU)]
    assert list(one.token_ids) == [1, 2, 3, 4, 1, 2, 3, 4, 9, 10, 11, 12]
    assert (one.block_size, one.lora_name, list(one.extra_keys)) == (SIZE, "a", [])
    assert one.block_hashes[0] == oe.KvBlockHash(value=bytes([0] * 7 + [1]), encoding="int64")


def test_the_event_is_what_the_generated_code_would_write() -> None:
    """The joined bytes parse to the same message, unknown fields included."""
    log = Log(rank=3)
    log.say(stored(block(1 << 63, "mm=x@0"), level=1, salt="s"))
    assert oe.SubscribeKvEventsResponse.FromString(log.batch(0)) == oe.SubscribeKvEventsResponse(
        batch=oe.KvEventBatch(
            sequence_number=0,
            timestamp_unix_nanos=99,
            data_parallel_rank=3,
            events=[
                oe.KvEvent(
                    block_stored=oe.BlockStored(
                        block_hashes=[oe.KvBlockHash(value=b"\x80" + bytes(7), encoding="int64")],
                        token_ids=[1, 2, 3, 4],
                        block_size=SIZE,
                        medium=HOST,
                        extra_keys=[oe.OpaqueKeyTuple(values=["cache_salt=s", "mm=x@0"])],
                    )
                )
            ],
        )
    )


def test_extra_keys_stay_with_their_block() -> None:
    """SECMM-04: a picture in the middle of a chain, and one by itself in a snapshot."""
    log = Log()
    (event,) = log.say(stored(1, block(2, "mm=a@0", "mm=b@1"), 3))
    assert [list(keys.values) for keys in event.block_stored.extra_keys] == [
        [],
        ["mm=a@0", "mm=b@1"],
        [],
    ]
    contents = snapshot(log).tiers[0]
    assert [contents[hash_].keys for hash_ in (1, 2, 3)] == [(), ("mm=a@0", "mm=b@1"), ()]


def test_secmm_06_an_adapter_and_a_salt_are_on_every_block() -> None:
    log = Log()
    log.say(stored(1, 2, lora="a"), stored(3, 4, salt="s"))
    contents = snapshot(log).tiers[0]
    assert [contents[hash_].lora_name for hash_ in (1, 2, 3, 4)] == ["a", "a", "", ""]
    assert [contents[hash_].keys for hash_ in (2, 4)] == [(), ("cache_salt=s",)]


def test_events_that_go_on_with_a_chain_join_it_and_others_do_not() -> None:
    log = Log()
    events = log.say(
        stored(1),
        stored(2, parent=1),
        stored(3, parent=2, level=1),
        stored(4, parent=3, level=1, lora="x"),
        stored(5, parent=1),
        stored(6),
    )
    assert stored_in(events) == [
        (None, [1, 2], GPU),
        (2, [3], HOST),
        (3, [4], HOST),
        (1, [5], GPU),
        (None, [6], GPU),
    ]


def test_removals_name_the_tier_and_join_where_they_can() -> None:
    log = Log()
    log.say(stored(1), stored(2), stored(3, level=1), stored(4))
    assert removed_in(log.say(removed(1), removed(2), removed(3, 4))) == [
        ([1, 2], GPU),
        ([3], HOST),
        ([4], GPU),
    ]


def test_a_removal_and_a_return_in_one_poll_keep_their_order() -> None:
    log = Log()
    log.say(stored(1))
    kinds = [event.WhichOneof("event") for event in log.say(removed(1), stored(1), removed(1))]
    assert kinds == ["block_removed", "block_stored", "block_removed"]


def test_a_move_stores_before_it_removes() -> None:
    log = Log()
    log.say(stored(1, block(2, "mm=a@0"), lora="x"))
    before = log.follower.tiers[0][2]
    events = log.say(Moved(0, 2, 1))
    assert [event.WhichOneof("event") for event in events] == ["block_stored", "block_removed"]
    assert stored_in(events) == [(1, [2], HOST)]
    assert removed_in(events) == [([2], GPU)]
    assert log.follower.tiers[1] == {2: before}
    # To where it is already, or of what is not there: no news.
    assert log.say(Moved(0, 2, 1), Moved(0, 7, 1)) == []
    assert removed_in(log.say(removed(2))) == [([2], HOST)]


def test_kv_08_clear_all_empties_both_tiers_and_life_goes_on() -> None:
    log = Log()
    log.say(stored(1, 2), stored(3, level=1))
    (event,) = log.say(Cleared(0))
    assert event.WhichOneof("event") == "all_blocks_cleared"
    assert log.follower.resident() == {}
    assert stored_in(log.say(stored(2, parent=1), stored(3))) == [(None, [3], GPU)]
    assert orphans(log) == 1


# --- the tree --------------------------------------------------------------------------------------


def test_kv_01_blocks_hang_where_their_parent_says() -> None:
    log = Log()
    assert stored_in(log.say(stored(1), stored(2, 3, parent=1))) == [(None, [1, 2, 3], GPU)]
    other = Log()
    other.say(stored(2, 3))
    assert other.follower.tiers[0][2].parent is None


def test_a_block_with_an_unknown_parent_is_not_published_nor_what_follows_it() -> None:
    log = Log()
    assert log.say(stored(2, 3, parent=1), stored(4, parent=3), stored(5, parent=5)) == []
    assert orphans(log) == 4
    assert stored_in(log.say(stored(1))) == [(None, [1], GPU)]
    assert log.say(removed(2)) == []
    assert log.mirror.n_unknown_removed == 1


def test_a_block_told_twice_is_no_news() -> None:
    log = Log()
    log.say(stored(1, 2))
    assert log.say(stored(1, 2)) == []
    assert log.newest == 0


def test_a_block_told_again_on_another_tier_has_moved() -> None:
    log = Log()
    log.say(stored(1, 2))
    events = log.say(stored(2, parent=1, level=1))
    assert (stored_in(events), removed_in(events)) == ([(1, [2], HOST)], [([2], GPU)])


def test_a_hash_with_other_content_replaces_the_old_block_and_all_below_it() -> None:
    log = Log()
    log.say(stored(1, 2, 3), stored(4, parent=2))
    events = log.say(stored(block(2, first=50), parent=1))
    (gone,) = removed_in(events)
    assert gone[0][-1] == 2
    assert sorted(gone[0]) == [2, 3, 4]
    assert log.follower.resident() == {1: 0, 2: 0}
    assert log.say(stored(9, parent=3)) == []


def test_a_removed_parent_hides_what_is_below_and_brings_it_back() -> None:
    log = Log()
    log.say(stored(1, 2, 3, 4), stored(5, parent=2), stored(6))
    assert sorted(removed_in(log.say(removed(2)))[0][0]) == [2, 3, 4, 5]
    assert log.mirror.n_hidden == 3
    # What happens below meanwhile is not told, and not forgotten.
    assert log.say(removed(4), stored(7, parent=5), Moved(0, 5, 1), removed(2)) == []
    assert log.mirror.n_unknown_removed == 1
    log.say(stored(2, parent=1))
    assert log.follower.resident() == {1: 0, 2: 0, 3: 0, 5: 1, 6: 0, 7: 0}
    assert log.mirror.n_hidden == 0


def test_two_holes_above_a_block_both_have_to_be_filled() -> None:
    log = Log()
    log.say(stored(1, 2, 3, 4))
    log.say(removed(1), removed(3))
    log.say(stored(3, parent=2))
    assert log.follower.resident() == {}
    log.say(stored(1), removed(3))
    assert log.follower.resident() == {1: 0, 2: 0}
    log.say(stored(3, parent=2))
    assert log.follower.resident() == {1: 0, 2: 0, 3: 0, 4: 0}


def test_a_gone_parent_is_forgotten_with_the_last_block_below_it() -> None:
    log = Log()
    log.say(stored(1, 2, 3), stored(4, parent=2))
    log.say(removed(1, 2))
    log.say(removed(3), removed(4))
    assert log.say(stored(5, parent=2)) == []
    assert orphans(log) == 1
    fresh = vars(Log().mirror)
    assert {name: value for name, value in vars(log.mirror).items() if value != fresh[name]} == {
        "n_orphans": 1
    }


def test_a_gone_parent_that_returns_with_other_content_brings_nothing_back() -> None:
    log = Log()
    log.say(stored(1, 2))
    log.say(removed(1))
    log.say(stored(block(1, first=50)))
    assert log.follower.resident() == {1: 0}
    assert log.mirror.n_hidden == 0


# --- numbers and history ---------------------------------------------------------------------------


def test_batches_are_numbered_from_0_and_one_poll_is_one_batch() -> None:
    log = Log(rank=2)
    log.say(stored(1), stored(2), removed(1))
    log.say(stored(3))
    log.publish(b"", 77)
    batches = [batch_of(log.batch(number)) for number in range(3)]
    assert [batch.sequence_number for batch in batches] == [0, 1, 2]
    assert [batch.data_parallel_rank for batch in batches] == [2, 2, 2]
    assert [batch.timestamp_unix_nanos for batch in batches] == [99, 99, 77]
    assert [len(batch.events) for batch in batches] == [3, 1, 0]


def test_the_history_is_bounded_in_batches_and_in_bytes() -> None:
    by_count = Log(batches=3)
    for hash_ in range(10):
        by_count.say(stored(hash_))
    assert (by_count.oldest, by_count.newest) == (7, 9)
    size = len(by_count.batch(9))
    by_bytes = Log(n_bytes=2 * size + size // 2)
    for hash_ in range(10):
        by_bytes.say(stored(hash_))
    assert (by_bytes.oldest, by_bytes.newest) == (8, 9)
    assert [batch_of(by_bytes.batch(n)).sequence_number for n in (8, 9)] == [8, 9]


def test_a_poll_too_large_for_one_message_is_split_and_stays_whole() -> None:
    """Long chains are continued in a further event, long removals too."""
    log = Log()
    many = [block(hash_, "k" * 4000) for hash_ in range(400)]
    events = log.say(stored(*many), stored(*range(1000, 40_000)))
    assert log.newest >= 4
    chains = stored_in(events)
    assert chains[1][0] == chains[0][1][-1]
    log.say(removed(*range(39_999, 999, -1)), removed(*range(399, -1, -1)))
    assert log.follower.resident() == {}
    assert all(len(log.batch(n)) < MAX_BATCH_BYTES + 100 for n in range(log.newest + 1))


def test_a_snapshot_ends_with_the_newest_number_and_begins_with_a_clearing() -> None:
    log = Log()
    for hash_ in range(6):
        log.say(stored(block(hash_, "k" * 60_000)))
    log.publish(b"", 1)
    batches = [batch_of(data) for data in log.snapshot(55)]
    assert [batch.sequence_number for batch in batches] == [6]
    assert batches[0].timestamp_unix_nanos == 55
    log.say(*[stored(block(hash_, "k" * 60_000)) for hash_ in range(6, 30)])
    newest = log.newest
    batches = [batch_of(data) for data in log.snapshot(55)]
    assert [batch.sequence_number for batch in batches] == list(range(newest - 3, newest + 1))
    kinds = [event.WhichOneof("event") for batch in batches for event in batch.events]
    assert kinds == ["all_blocks_cleared"] + ["block_stored"] * 30


def test_a_snapshot_of_nothing_is_a_clearing_numbered_0() -> None:
    log = Log()
    (data,) = log.snapshot(55)
    batch = batch_of(data)
    assert (log.newest, batch.sequence_number, len(batch.events)) == (0, 0, 1)
    assert not batch_of(log.batch(0)).events


def test_a_snapshot_with_more_batches_than_numbers_advances_the_number_with_empty_batches() -> None:
    log = Log()
    log.say(*[stored(block(hash_, "k" * 60_000)) for hash_ in range(50)])
    # The same in fewer messages, as a log that was compacted would have it.
    assert log.newest > 4
    young = Log()
    young.mirror.visible.update(log.mirror.visible)
    batches = [batch_of(data) for data in young.snapshot(55)]
    assert [batch.sequence_number for batch in batches] == list(range(len(batches)))
    assert len(batches) > 4
    assert young.newest == len(batches) - 1
    assert not any(batch_of(young.batch(n)).events for n in range(len(batches)))


def test_a_snapshot_is_of_the_moment_it_was_asked_for() -> None:
    log = Log()
    log.say(stored(1, 2))
    messages = log.snapshot(55)
    log.say(removed(2), Moved(0, 1, 1), stored(3))
    joined = RankMirror()
    for data in messages:
        joined.apply(batch_of(data))
    assert joined.resident() == {1: 0, 2: 0}
    assert joined.next_number == 1
    joined.apply(batch_of(log.batch(1)))
    assert joined.resident() == {1: 1, 3: 0}


def test_mem_05_what_was_stored_and_removed_leaves_nothing_behind() -> None:
    """MEM-05 with prefixes of four blocks: 5,000, and 50,000 in `make test-long`; a million take a minute.

    Removed as an engine evicts: those stored first go first, leaves before what they hang from.
    """
    n_prefixes, cached = n_in(gate=5_000, long=50_000), 500
    log = RankLog(0, block_tokens=SIZE, history_batches=100, history_bytes=1 << 20)
    hashes = iter(range(1, 1 << 62))
    prefixes: deque[tuple[int, ...]] = deque()

    def store() -> None:
        prefixes.append(tuple(islice(hashes, 4)))
        assert log.apply([stored(*(block(hash_, first=hash_) for hash_ in prefixes[-1]))], 1)

    def evict() -> None:
        assert log.apply([removed(*reversed(prefixes.popleft()))], 1)

    def churn(n: int) -> None:
        for _ in range(n):
            store()
            if len(prefixes) > cached:
                evict()
        while prefixes:
            evict()

    def traced_bytes() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        # The history is full then, and dicts are as large as they get.
        churn(5 * cached)
        start_bytes = traced_bytes()
        churn(n_prefixes)
        assert traced_bytes() < 1.2 * start_bytes
    finally:
        tracemalloc.stop()
    nodes = [node for node in vars(log.mirror).values() if isinstance(node, dict)]
    assert len(nodes) == 5
    assert not any(nodes)
