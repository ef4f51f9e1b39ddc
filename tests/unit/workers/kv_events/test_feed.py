"""Subscriptions: who gets which batches, when, and how a stream ends."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.lowlevel
import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import OK, Status
from slagate.workers.errors import RequestRefused
from slagate.workers.kv_events.feed import (
    HEARTBEAT_S,
    INSTANCE_KEY,
    MAX_SUBSCRIBERS,
    STALL_S,
    KvFeed,
)
from slagate.workers.kv_events.fields import BLOCK_WORK, TURN_WORK
from slagate.workers.runtime.virtual_loop import VirtualLoop, run
from support.engine.kv_dicts import BLOCK_TOKENS, EngineEvents, block, moved, removed, stored
from support.kv.mirror import KvMirror, KvStream

LOST = oe.ERROR_CODE_OVERLOADED


class Feed(KvFeed):
    """A feed with an engine behind it that numbers its events right."""

    def __init__(self, ranks: int = 1, **changed: Any) -> None:
        self.event = EngineEvents()
        super().__init__(
            ranks=ranks,
            block_tokens=BLOCK_TOKENS,
            instance_id="me",
            unix_nanos=lambda: 7,
            **changed,
        )

    def say(self, *data: object, rank: int | None = None) -> None:
        """One poll with these events."""
        self.read([self.event(one, rank=rank) for one in data])

    def read(self, polled: object) -> None:
        for _ in self.publish_polled(polled):
            pass

    def join(self, *ranks: int, start: int = 0, **more: Any) -> KvStream:
        return KvStream(KvMirror(), self, ranks=list(ranks), start=start, **more)

    def newest(self, rank: int = 0) -> int:
        return self.counters()[f"newest_number_{rank}"]


def refusal(feed: Feed, *ranks: int, **more: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(RequestRefused) as caught:
        feed.join(*ranks, **more)
    return caught.value.status.code, caught.value.status.message


async def settle(*streams: KvStream) -> None:
    """Until nothing is delivered any more."""
    n_before = -1
    while n_before != (n_now := sum(len(stream.batches) for stream in streams)):
        n_before = n_now
        for _ in range(3):
            await anyio.lowlevel.checkpoint()


def on_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that runs on a virtual loop."""

    def test() -> None:
        run(main)

    test.__name__ = main.__name__
    test.__doc__ = main.__doc__
    return test


def n_timers() -> int:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.n_timers


# --- snapshot, replay, live ------------------------------------------------------------------------


@on_loop
async def test_a_late_subscriber_gets_a_snapshot_and_live_follows_at_the_next_number() -> None:
    feed = Feed()
    for hash_ in range(4):
        feed.say(stored(hash_))
    feed.say(removed(1))
    stream = feed.join(snapshot=True)
    assert stream.batches == []
    feed.say(stored(9, parent=2))
    await settle(stream)
    assert stream.numbers == [4, 5]
    assert stream.kinds == ["all_blocks_cleared", *["block_stored"] * 4]
    assert stream.mirror.resident() == {0: 0, 2: 0, 3: 0, 9: 0}
    feed.say(moved(9, 0, 1))
    await settle(stream)
    assert stream.numbers == [4, 5, 6]
    assert stream.mirror.resident()[9] == 1


@on_loop
async def test_replay_begins_where_it_is_asked_to() -> None:
    feed = Feed()
    for hash_ in range(4):
        feed.say(stored(hash_))
    streams = [feed.join(start=start) for start in range(5)]
    feed.say(stored(4))
    await settle(*streams)
    assert [stream.numbers for stream in streams] == [list(range(start, 5)) for start in range(5)]


@on_loop
async def test_kv_12_missing_batches_come_before_newer_ones_and_each_once() -> None:
    """Gap 6..7 exposed by live 8; the first replay stalls after 6."""
    feed = Feed()
    mirror = KvMirror()
    stream = mirror.resume(feed)
    for hash_ in range(6):
        feed.say(stored(hash_))
    await settle(stream)
    stream.call.cancel()
    feed.say(stored(6))
    stalled = mirror.resume(feed)
    await settle(stalled)
    stalled.pause()
    feed.say(stored(7))
    await settle(stalled)
    stalled.call.cancel()
    feed.say(stored(8))
    again = mirror.resume(feed)
    feed.say(stored(9))
    await settle(again)
    assert (stalled.numbers, again.numbers) == ([6], [7, 8, 9])
    assert mirror.resident() == dict.fromkeys(range(10), 0)


@on_loop
async def test_kv_09_a_start_that_is_gone_or_not_there_yet_is_refused_with_what_is_there() -> None:
    feed = Feed(history_batches=3)
    assert refusal(feed, start=1) == (
        grpc.StatusCode.OUT_OF_RANGE,
        "start_sequence_number: rank 0 can start at 0..0, or with a snapshot; not at 1",
    )
    for hash_ in range(10):
        feed.say(stored(hash_))
    for start in (0, 6, 11, 412):
        code, message = refusal(feed, start=start)
        assert code == grpc.StatusCode.OUT_OF_RANGE
        assert "can start at 7..10" in message
        assert f"not at {start}" in message
    streams = [feed.join(start=start) for start in (7, 10)]
    await settle(*streams)
    feed.say(stored(10))
    await settle(*streams)
    assert [stream.numbers for stream in streams] == [[7, 8, 9, 10], [10]]


@on_loop
async def test_kv_11_a_replayed_batch_is_the_very_one_that_was_live() -> None:
    feed = Feed(ranks=4)
    live = feed.join(3)
    feed.say(stored(1), rank=3)
    feed.say(stored(2), rank=3)
    await settle(live)
    replayed = feed.join(3)
    await settle(replayed)
    assert replayed.batches == live.batches
    assert [batch.data_parallel_rank for batch in live.batches] == [3, 3]


@on_loop
async def test_each_rank_in_a_stream_has_its_own_numbers() -> None:
    feed = Feed(ranks=3)
    feed.say(stored(1), rank=0)
    feed.say(stored(2), rank=2)
    feed.say(stored(3), rank=2)
    whole, some = feed.join(), feed.join(2, 0, 2)
    snapshot = feed.join(snapshot=True)
    feed.say(stored(4), rank=1)
    await settle(whole, some, snapshot)
    by_rank = {
        rank: [b.sequence_number for b in whole.batches if b.data_parallel_rank == rank]
        for rank in range(3)
    }
    # Rank 1 had no number for its snapshot, so an empty batch made one.
    assert by_rank == {0: [0], 1: [0, 1], 2: [0, 1]}
    assert {batch.data_parallel_rank for batch in some.batches} == {0, 2}
    assert [(b.data_parallel_rank, b.sequence_number) for b in snapshot.batches] == [
        (0, 0),
        (1, 0),
        (2, 1),
        (1, 1),
    ]
    for rank, held in ((0, {1: 0}), (1, {4: 0}), (2, {2: 0, 3: 0})):
        assert whole.mirror.resident(rank) == snapshot.mirror.resident(rank) == held


@on_loop
async def test_kv_08_a_gap_in_the_engine_clears_every_subscriber() -> None:
    feed = Feed(ranks=2)
    stream = feed.join()
    feed.say(stored(1), rank=0)
    feed.say(stored(1), rank=1)
    feed.event.skip(2, rank=0)
    feed.say(stored(5), rank=0)
    await settle(stream)
    assert stream.mirror.resident(0) == {5: 0}
    assert stream.mirror.resident(1) == {1: 0}
    assert feed.counters()["missed_events"] == 2


@on_loop
async def test_kv_04_polls_without_news_publish_nothing() -> None:
    feed = Feed()
    polls: list[object] = [None, [], [[]], "x", 7]
    for nothing in polls:
        feed.read(nothing)
    feed.say(removed(5))
    assert feed.newest() == -1
    feed.say(stored(1))
    assert feed.newest() == 0


@on_loop
async def test_a_backlog_of_several_ranks_is_delivered_in_turns() -> None:
    feed = Feed(ranks=2)
    for hash_ in range(3):
        feed.say(stored(hash_), rank=0)
        feed.say(stored(hash_), rank=1)
    stream = feed.join()
    await settle(stream)
    assert [batch.data_parallel_rank for batch in stream.batches] == [0, 1, 0, 1, 0, 1]


@on_loop
async def test_the_empty_batches_that_number_a_snapshot_reach_the_others_at_once() -> None:
    feed = Feed()
    other = feed.join()
    await settle(other)
    joining = feed.join(snapshot=True)
    await settle(other, joining)
    assert other.numbers == joining.numbers == [0]
    assert (other.kinds, joining.kinds) == ([], ["all_blocks_cleared"])


@on_loop
async def test_a_rank_named_twice_is_one_rank() -> None:
    feed = Feed(ranks=2)
    feed.say(stored(1), rank=1)
    feed.say(stored(2), rank=1)
    streams = [feed.join(1, 1, start=1), feed.join(1, 1, snapshot=True)]
    await settle(*streams)
    assert [stream.numbers for stream in streams] == [[1], [1]]


# --- refusals --------------------------------------------------------------------------------------


@on_loop
async def test_what_no_worker_could_serve_is_refused() -> None:
    feed = Feed(ranks=2)
    feed.say(stored(1), rank=0)
    feed.say(stored(1), rank=1)
    for arguments, named in (
        ({"ranks": [2]}, "data_parallel_ranks: 2"),
        ({"ranks": [0], "start": 1, "snapshot": True}, "start_sequence_number"),
        ({"ranks": [], "start": 1}, "start_sequence_number: each rank"),
        ({"ranks": [0, 1], "start": 1}, "start_sequence_number: each rank"),
        ({"ranks": [0], "metadata": [(INSTANCE_KEY, "me")] * 2}, INSTANCE_KEY),
    ):
        with pytest.raises(RequestRefused, match=named) as caught:
            KvStream(KvMirror(), feed, **arguments)
        assert caught.value.status.code == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(RequestRefused, match="request") as caught:
        feed.subscribe(b"\xff", (), feed.join())
    assert caught.value.status.code == grpc.StatusCode.INVALID_ARGUMENT
    assert feed.counters()["subscribers"] == 1


@on_loop
async def test_a_number_of_another_incarnation_is_out_of_range() -> None:
    feed = Feed()
    feed.say(stored(1))
    code, message = refusal(feed, metadata=[(INSTANCE_KEY, "you")])
    assert code == grpc.StatusCode.OUT_OF_RANGE
    assert "'me'" in message
    stream = feed.join(metadata=[("x-other", "you"), (INSTANCE_KEY, "me")])
    await settle(stream)
    assert stream.numbers == [0]
    # What the refusal asks for is not refused: it owes nothing to an earlier incarnation.
    stream = feed.join(snapshot=True, metadata=[(INSTANCE_KEY, "you")])
    await settle(stream)
    assert stream.numbers == [0]


@on_loop
async def test_there_is_a_limit_on_subscribers() -> None:
    feed = Feed()
    streams = [feed.join() for _ in range(MAX_SUBSCRIBERS)]
    assert refusal(feed)[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    streams[0].call.cancel()
    feed.join()


# --- the call --------------------------------------------------------------------------------------


@on_loop
async def test_a_pause_is_silence_and_loses_nothing() -> None:
    feed = Feed()
    stream = feed.join()
    stream.pause()
    stream.pause()
    for hash_ in range(5):
        feed.say(stored(hash_))
    await settle(stream)
    assert stream.numbers == []
    stream.resume()
    stream.resume()
    await settle(stream)
    assert stream.numbers == [0, 1, 2, 3, 4]


@on_loop
async def test_a_pause_from_within_a_message_holds_at_once() -> None:
    feed = Feed()

    class Shy(KvStream):
        def message(self, data: bytes, /) -> None:
            super().message(data)
            self.pause()

    stream = Shy(KvMirror(), feed, ranks=[])
    for hash_ in range(3):
        feed.say(stored(hash_))
    for n_messages in (1, 2, 3):
        await settle(stream)
        assert len(stream.batches) == n_messages
        stream.resume()
    await settle(stream)
    assert len(stream.batches) == 3


@on_loop
async def test_cancel_ends_a_stream_at_once_paused_or_not() -> None:
    feed = Feed()
    for is_paused in (False, True):
        stream = feed.join(snapshot=True)
        feed.say(stored(1))
        if is_paused:
            stream.pause()
        stream.call.cancel()
        assert stream.status == Status(grpc.StatusCode.CANCELLED, "cancelled")
        stream.call.cancel()
        stream.call.resume()
        await settle(stream)
        assert stream.batches == []
    assert feed.counters()["subscribers"] == 0


@on_loop
async def test_a_cancel_from_within_a_message_is_the_last_of_it() -> None:
    feed = Feed()

    class Gone(KvStream):
        def message(self, data: bytes, /) -> None:
            super().message(data)
            self.call.cancel()

    stream = Gone(KvMirror(), feed, ranks=[])
    feed.say(stored(1))
    feed.say(stored(2))
    await settle(stream)
    assert stream.numbers == [0]


@on_loop
async def test_close_ends_all_and_takes_nobody_any_more() -> None:
    feed = Feed()
    streams = [feed.join(), feed.join(snapshot=True)]
    streams[0].pause()
    feed.say(stored(1))
    feed.end_streams()
    for stream in streams:
        assert stream.status is not None
        assert stream.status.code == grpc.StatusCode.UNAVAILABLE
    assert refusal(feed)[0] == grpc.StatusCode.UNAVAILABLE
    feed.say(stored(2))
    await settle(*streams)
    assert n_timers() == 0
    assert repr(feed) == "KvFeed(newest [2], 0 subscribers)"


# --- falling behind --------------------------------------------------------------------------------


@on_loop
async def test_kv_09_a_subscriber_that_the_history_left_behind_is_told_and_starts_over() -> None:
    feed = Feed(history_batches=3)
    mirror = KvMirror()
    stream = mirror.resume(feed)
    feed.say(stored(0))
    await settle(stream)
    stream.pause()
    for hash_ in range(1, 5):
        feed.say(stored(hash_))
    await settle(stream)
    # A pause is silence: the end waits, too.
    assert (stream.error, stream.status) == (None, None)
    stream.resume()
    await settle(stream)
    assert stream.error is not None
    assert (stream.error.code, stream.error.retryable) == (LOST, True)
    assert stream.status == OK
    assert stream.numbers == [0]
    assert feed.counters()["slow_subscribers"] == 1
    again = mirror.restart(feed)
    await settle(again)
    assert mirror.resident() == dict.fromkeys(range(5), 0)


@on_loop
async def test_a_subscriber_just_inside_the_history_is_not_slow() -> None:
    feed = Feed(history_batches=3)
    stream = feed.join()
    stream.pause()
    for hash_ in range(3):
        feed.say(stored(hash_))
    stream.resume()
    await settle(stream)
    assert stream.numbers == [0, 1, 2]


@on_loop
async def test_a_paused_snapshot_is_let_go_once_it_leads_nowhere() -> None:
    feed = Feed(history_batches=3)
    feed.say(stored(1))
    stream = feed.join(snapshot=True)
    stream.pause()
    for hash_ in range(2, 6):
        feed.say(stored(hash_))
    assert vars(stream.call)["_snapshot"] is None
    stream.resume()
    await settle(stream)
    assert stream.batches == []
    assert stream.error is not None
    assert stream.status == OK


@on_loop
async def test_one_rank_left_behind_ends_the_stream_of_several() -> None:
    feed = Feed(ranks=2, history_batches=2)
    stream = feed.join()
    stream.pause()
    feed.say(stored(1), rank=0)
    for hash_ in range(3):
        feed.say(stored(hash_), rank=1)
    stream.resume()
    await settle(stream)
    assert stream.error is not None
    assert stream.batches == []


@on_loop
async def test_a_subscriber_that_takes_nothing_for_three_heartbeats_gives_up_its_place() -> None:
    """Or those who never read would keep everybody else out until the history has left them behind."""
    feed = Feed()
    streams = [feed.join() for _ in range(MAX_SUBSCRIBERS)]
    for stream in streams[1:]:
        stream.pause()
    await anyio.sleep(STALL_S - 1)
    assert refusal(feed)[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    streams[1].resume()  # slow, but it reads
    streams[1].pause()
    await anyio.sleep(HEARTBEAT_S + 1)
    assert [stream.status for stream in streams[:2]] == [None, None]
    for stream in streams[2:]:
        assert stream.status is not None
        assert stream.status.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        stream.resume()
        stream.call.cancel()
    assert feed.counters()["slow_subscribers"] == MAX_SUBSCRIBERS - 2
    late = feed.join(snapshot=True)
    await settle(streams[0], late)
    assert late.numbers[-1:] == streams[0].numbers[-1:]


@on_loop
async def test_a_subscriber_asked_twice_to_wait_waits_since_the_first_time_and_leaves_no_timer() -> (
    None
):
    feed = Feed()
    stream = feed.join()
    for _ in range(3):
        stream.pause()
        await anyio.sleep(HEARTBEAT_S)
    await anyio.sleep(HEARTBEAT_S)
    assert stream.status is not None
    assert n_timers() == 0
    assert feed.counters()["subscribers"] == 0


# --- work and time ---------------------------------------------------------------------------------


@on_loop
async def test_a_large_backlog_is_delivered_in_slices_and_fairly() -> None:
    """KV-16: 2,000 batches, two readers, and the loop is never kept for long."""
    feed = Feed()
    for hash_ in range(2000):
        feed.say(stored(hash_))
    first, second = feed.join(), feed.join()
    for _ in range(100):
        first.resume()  # who asks often is not served more often
    slices = []
    while len(second.batches) < 2000:
        n_before = len(first.batches) + len(second.batches)
        await anyio.lowlevel.checkpoint()
        slices.append(len(first.batches) + len(second.batches) - n_before)
        assert abs(len(first.batches) - len(second.batches)) <= 1
        assert len(slices) < 200
    assert max(slices) <= 256
    assert first.numbers == second.numbers == list(range(2000))


@on_loop
async def test_between_the_steps_of_a_long_event_all_subscribers_have_the_same_whole_blocks() -> (
    None
):
    """Also those who come in between, with a snapshot or a number; no child is before its parent."""
    feed = Feed()
    n_blocks = 5000
    follower = feed.join()
    joined: list[KvStream] = []
    sizes = []
    chain = feed.event(stored(*[block(hash_, first=hash_) for hash_ in range(n_blocks)]))
    gone = feed.event(removed(*reversed(range(n_blocks))))
    for _ in itertools.chain(feed.publish_polled(chain), feed.publish_polled(gone)):
        joined.append(feed.join(snapshot=True))
        joined.append(feed.join(start=feed.newest() + 1))
        await settle(follower, *joined)
        joined.pop().call.cancel()
        held = follower.mirror.resident()
        assert list(held) == list(range(len(held)))
        sizes.append(len(held))
        for stream in joined:
            assert stream.mirror.resident() == held
    # It grows and shrinks in steps of a turn's work.
    assert sizes[-1] == 0
    assert max(sizes) == n_blocks
    steps = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(steps) <= TURN_WORK // (BLOCK_WORK + BLOCK_TOKENS)
    assert follower.numbers == list(range(len(follower.numbers)))


@on_loop
async def test_kv_16_a_burst_of_single_block_removals_is_few_messages() -> None:
    feed = Feed()
    n_blocks = 20_000
    feed.say(*[stored(block(hash_, first=hash_)) for hash_ in range(n_blocks)])
    stream = feed.join(snapshot=True)
    await settle(stream)
    n_before = len(stream.batches)
    feed.say(*[removed(hash_) for hash_ in range(n_blocks)])
    await settle(stream)
    assert len(stream.batches) - n_before <= 3
    assert stream.mirror.resident() == {}


@on_loop
async def test_a_rank_without_news_sends_heartbeats_while_somebody_listens() -> None:
    feed = Feed(ranks=2)
    feed.say(stored(1), rank=0)
    assert n_timers() == 0
    await anyio.sleep(60.0)
    assert (feed.newest(0), feed.newest(1)) == (0, -1)
    stream = feed.join()
    assert n_timers() == 1
    await anyio.sleep(HEARTBEAT_S - 1)
    feed.say(stored(2), rank=0)
    await anyio.sleep(2.0)
    # Rank 0 had something to say meanwhile.
    assert (feed.newest(0), feed.newest(1)) == (1, 0)
    await anyio.sleep(HEARTBEAT_S)
    assert (feed.newest(0), feed.newest(1)) == (2, 1)
    await settle(stream)
    last = [(b.data_parallel_rank, b.sequence_number, len(b.events)) for b in stream.batches]
    assert last[-2:] == [(0, 2, 0), (1, 1, 0)]
    stream.call.cancel()
    assert n_timers() == 0
    await anyio.sleep(60.0)
    assert (feed.newest(0), feed.newest(1)) == (2, 1)


def test_lost_events_are_logged_once_a_minute_and_rank(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        feed = Feed(ranks=2)
        for rank in (0, 1):
            feed.say(stored(1), rank=rank)
        assert not caplog.records
        for second in range(130):
            if second < 50:
                feed.event.skip(3, rank=1)
            if second == 10:
                feed.event.skip(1, rank=0)
            for rank in (0, 1):
                feed.say(stored(2), rank=rank)
            await anyio.sleep(1.0)

    run(main)
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("WARNING", "kv_events.lost")
    ] * 3
    told = [
        [vars(one)[name] for name in ("rank", "gaps", "missed_events", "missed_events_so_far")]
        for one in caplog.records
    ]
    # The rest is told when the minute is over, although nothing is lost any more.
    assert told == [[1, 1, 3, 3], [0, 1, 1, 1], [1, 49, 147, 150]]


@on_loop
async def test_counters_name_what_was_lost_and_where_the_stream_stands() -> None:
    feed = Feed(ranks=2)
    feed.join()
    feed.say(stored(1, block(2, 1)), stored(9, parent=8), rank=0)
    feed.event.skip(1, rank=1)
    feed.say(stored(1), stored(2, parent=1), removed(7), "x", rank=1)
    counters = feed.counters()
    assert {name: n for name, n in counters.items() if n} == {
        "gaps": 1,
        "missed_events": 1,
        "decode_errors": 1,
        "partial_blocks": 1,
        "orphan_blocks": 1,
        "unknown_removed": 1,
        "published_blocks": 1,
        "subscribers": 1,
    }
    assert {"newest_number_0", "newest_number_1", "slow_subscribers", "hidden_blocks"} <= set(
        counters
    )
