"""KV cache events of the simulated engine: TensorRT-LLM's dict shape, ids, windows and overflow."""

import asyncio
from typing import Any

import pytest

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.kv_cache.blocks import block_states, seed_state, token_bytes
from slagate.workers.sim.kv_cache.events import KvEventQueue, KvEventRecorder
from slagate.workers.sim.polls import IterationResult
from support.kv.consumer import KvConsumer

TOKENS = [11, 12, 13, 14, 15, 16, 17, 18, 19]
PACKED = token_bytes(TOKENS)
STATES = block_states(PACKED, seed_state("m"), 4)


def recorder_of(queue: KvEventQueue, **changed: Any) -> KvEventRecorder:
    settings = {"rank": None, "windows": (100,), "block_tokens": 4, "salt": b"e", "newest": False}
    return KvEventRecorder(queue, **{**settings, **changed})


def told(**changed: Any) -> tuple[KvEventRecorder, list[dict[str, Any]]]:
    """Events of a prompt of nine tokens, of which one block then goes away and one to the host."""
    queue = KvEventQueue(100)
    recorder = recorder_of(queue, **changed)
    recorder.created((50, 7))
    recorder.stored(None, STATES[:1], packed=PACKED[:16], cache_salt="s")
    recorder.stored(STATES[0], STATES[1:], packed=PACKED[16:], cache_salt="s")
    recorder.removed(STATES[2])
    recorder.removed(STATES[1])
    recorder.moved(STATES[0], 0, 1)
    recorder.flush()
    return recorder, queue.take_events()


def block(recorder: KvEventRecorder, state: bytes, tokens: list[int]) -> dict[str, Any]:
    return {
        "type": "stored_block",
        "block_hash": recorder.engine_hash(state),
        "tokens": [
            {"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens
        ],
        "cache_level": 0,
        "priority": 35,
    }


def test_the_dicts_are_those_of_tensorrt_llm() -> None:
    """KV-18: the last block is announced with the one token it has."""
    recorder, events = told()
    first, second, third = [recorder.engine_hash(state) for state in STATES]
    data = [
        {"type": "created", "num_blocks_per_cache_level": [50, 7]},
        {
            "type": "stored",
            "parent_hash": None,
            "blocks": [block(recorder, STATES[0], TOKENS[:4])],
        },
        {
            "type": "stored",
            "parent_hash": first,
            "blocks": [
                block(recorder, STATES[1], TOKENS[4:8]),
                block(recorder, STATES[2], TOKENS[8:]),
            ],
        },
        {"type": "removed", "block_hashes": [third, second]},
        {
            "type": "updated",
            "block_hash": first,
            "cache_level": {"type": "event_diff", "old_value": 0, "new_value": 1},
            "priority": None,
        },
    ]
    assert events == [
        {"event_id": i, "data": one, "window_size": 100} for i, one in enumerate(data)
    ]


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for event in events for one in event["data"].get("blocks", [])]


def test_newer_versions_say_more() -> None:
    _, events = told(newest=True, windows=(4, 100))
    assert {(e["window_size"], e["hash_algo"]) for e in events} == {
        (4, "v1_block_key"),
        (100, "v1_block_key"),
    }
    assert not any("layer_group_id" in event for event in events)
    assert {(one["cache_salt"], *one["mm_keys"]) for one in blocks_of(events)} == {("s",)}
    assert not any("cache_salt" in one for one in blocks_of(told()[1]))


def test_w11_the_second_manager_names_groups_of_layers_and_no_salt() -> None:
    _, events = told(newest=True, is_v2=True, windows=(4, 100))
    assert {(e["window_size"], e["layer_group_id"]) for e in events} == {(4, 0), (100, 1)}
    assert {one["cache_salt"] for one in blocks_of(events)} == {None}
    assert events[0]["data"]["num_blocks_per_cache_level"] == [50, 7]


@pytest.mark.parametrize(("is_v2", "told_levels"), [(False, [5, 0]), (True, [5])])
def test_the_first_manager_always_tells_of_two_levels(
    is_v2: bool,  # noqa: FBT001
    told_levels: list[int],
) -> None:
    queue = KvEventQueue(10)
    recorder = recorder_of(queue, newest=True, is_v2=is_v2)
    recorder.created((5,))
    recorder.flush()
    (event,) = queue.take_events()
    assert event["data"]["num_blocks_per_cache_level"] == told_levels


def test_w11_a_hash_is_a_digest_its_first_digits_or_a_number() -> None:
    """`v2_sha256_64` is made of the first half of the first 32 digits of `v2_sha256`, unsigned."""

    def hashes(algorithm: str) -> list[Any]:
        _, events = told(newest=True, is_v2=True, hash_algo=algorithm)
        assert {event["hash_algo"] for event in events} == {algorithm}
        named = [one["block_hash"] for one in blocks_of(events)]
        parents = [event["data"]["parent_hash"] for event in events[1:3]]
        assert parents == [None, named[0]]
        assert events[3]["data"]["block_hashes"] == named[:0:-1]
        assert events[4]["data"]["block_hash"] == named[0]
        return named

    digests, numbers = hashes("v2_sha256"), hashes("v2_sha256_64")
    assert {len(one) for one in digests} == {64}
    assert [int(one[:16], 16) for one in digests] == numbers


def test_a_rank_is_named_where_there_is_one() -> None:
    assert {event["attention_dp_rank"] for event in told(rank=0)[1]} == {0}
    assert not any("attention_dp_rank" in event for event in told()[1])


def test_hashes_are_unsigned_64_bit_and_of_this_engine() -> None:
    """KV-14: half of them are above 2^63, where signed and unsigned spellings part."""
    states = block_states(token_bytes(range(400)), seed_state("m"), 4)
    here = [recorder_of(KvEventQueue(0)).engine_hash(state) for state in states]
    there = [recorder_of(KvEventQueue(0), salt=b"f").engine_hash(state) for state in states]
    assert not {*here} & {*there}
    assert all(0 <= one < 1 << 64 for one in here)
    assert 30 < sum(one >= 1 << 63 for one in here) < 70


def test_nothing_is_readable_before_the_flush() -> None:
    queue = KvEventQueue(10)
    recorder = recorder_of(queue)
    recorder.created((1,))
    recorder.removed(STATES[0])
    assert queue.take_events() == []
    recorder.flush()
    recorder.flush()
    assert [event["data"]["type"] for event in queue.take_events()] == ["created", "removed"]
    assert queue.take_events() == []


def test_removals_are_not_merged_over_what_comes_between() -> None:
    queue = KvEventQueue(10)
    recorder = recorder_of(queue)
    recorder.removed(STATES[0])
    recorder.stored(None, STATES[:1], packed=PACKED[:16])
    recorder.removed(STATES[0])
    recorder.flush()
    recorder.removed(STATES[1])
    recorder.flush()
    kinds = [event["data"]["type"] for event in queue.take_events()]
    assert kinds == ["removed", "stored", "removed", "removed"]


def test_the_oldest_are_dropped_and_the_ids_show_it() -> None:
    """KV-05: beyond the buffer's size there is a gap in the ids of a rank, and it is counted."""
    queue = KvEventQueue(6)
    ranks = [recorder_of(queue, rank=rank) for rank in range(2)]

    def iteration() -> None:
        for recorder in ranks:
            recorder.created((1,))
            recorder.removed(STATES[0])
            recorder.flush()

    def ids(n: int | None = None) -> list[tuple[int, int]]:
        return [(event["attention_dp_rank"], event["event_id"]) for event in queue.take_events(n)]

    iteration()
    assert ids(3) == [(0, 0), (0, 1), (1, 0)]
    iteration()
    assert queue.n_dropped == 0
    iteration()
    assert queue.n_dropped == 3
    assert ids() == [(1, 2), (1, 3), (0, 4), (0, 5), (1, 4), (1, 5)]
    assert queue.n_dropped == 3


def test_a_batch_larger_than_the_buffer_keeps_its_end() -> None:
    queue = KvEventQueue(3)
    recorder = recorder_of(queue)
    for _ in range(10):
        recorder.created((1,))
    recorder.flush()
    assert [event["event_id"] for event in queue.take_events(2)] == [7, 8]
    assert [event["event_id"] for event in queue.take_events(2)] == [9]
    assert queue.n_dropped == 7


def test_a_buffer_of_no_size_keeps_and_counts_nothing() -> None:
    queue = KvEventQueue(0)
    recorder = recorder_of(queue)
    recorder.created((1,))
    recorder.flush()
    assert (queue.take_events(), queue.n_dropped) == ([], 0)


def test_every_window_tells_and_a_small_one_forgets_what_slid_out_of_it() -> None:
    """KV-06: the same hash is stored once per window, and removed from the small one first."""
    queue = KvEventQueue(100)
    recorder = recorder_of(queue, windows=(4, 100))
    consumers = {4: KvConsumer(), 100: KvConsumer()}
    names = [recorder.engine_hash(state) for state in STATES]

    def consume() -> list[tuple[int, str]]:
        recorder.flush()
        events = queue.take_events()
        for event in events:
            consumers[event["window_size"]].take(event["data"])
        return [(event["window_size"], event["data"]["type"]) for event in events]

    recorder.created((50,))
    assert consume() == [(4, "created"), (100, "created")]
    recorder.stored(None, STATES, packed=PACKED)
    # Nine tokens: the first block ends before the last four, the second does not.
    assert sorted(consume()) == [(4, "removed"), (4, "stored"), (100, "stored")]
    assert [*consumers[4].levels] == names[1:]
    assert [*consumers[100].levels] == names
    recorder.moved(STATES[0], 0, 1)
    assert consume() == [(100, "updated")]
    recorder.removed(STATES[0])
    assert consume() == [(100, "removed")]
    recorder.moved(STATES[1], 0, 1)
    recorder.removed(STATES[1])
    assert sorted(consume()) == [(4, "removed"), (4, "updated"), (100, "removed"), (100, "updated")]
    assert [*consumers[4].levels] == [*consumers[100].levels] == names[2:]


@pytest.mark.parametrize("windows", [(), (0,), (8, 8)])
def test_windows_that_make_no_sense_are_refused(windows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="windows"):
        recorder_of(KvEventQueue(1), windows=windows)


def test_a_negative_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="max_events"):
        KvEventQueue(-1)


def test_a_reader_waits_for_the_flush_but_not_for_ever() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        queue = KvEventQueue(10)
        recorder = recorder_of(queue)

        async def poll(timeout_s: float) -> list[Any]:
            result = IterationResult(lambda: queue.take_events() or None, queue.arrivals)
            result.set_timeout(timeout_s)
            return [item async for item in result]

        assert await poll(5.0) == []
        assert loop.time() == 5.0
        recorder.created((1,))
        loop.call_at(7.0, recorder.flush)
        assert len(await poll(5.0)) == 1
        # (After what came it has waited for more.)
        assert loop.time() == 12.0

    run(scenario)
