"""Following a worker's KV events: sequence, resume, snapshot, incarnation, and when to ask again."""

import logging

import anyio
import grpc
import pytest

from slagate.pools.kv_events.follower import KEEP_S, MAX_DELAY_S, PROBE_S
from slagate.pools.kv_events.subscription import SILENCE_S
from slagate.pools.kv_events.view import EventMode, EventView
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, Sink
from slagate.proto.rpc.status import OK, Metadata, Status
from slagate.workers.kv_events.rank_state import MAX_OLD
from slagate.workers.runtime.virtual_loop import run
from support.kv.followed import (
    CLEARED,
    EPOCH_S,
    SETTLE_S,
    Followed,
    batch,
    engine_error,
    followed,
    info,
    removed,
    saying,
    stored,
)
from support.worker.fake import HANG, FakeWorker, Script

SNAPSHOT: Script = (batch(4, CLEARED, stored(1, 2)),)
UNAVAILABLE = Status(grpc.StatusCode.UNAVAILABLE, "gone: 10.1.2.3:50051")
OUT_OF_RANGE = Status(grpc.StatusCode.OUT_OF_RANGE, "no such batch")

RETRY_S = 0.2
"""The first retry after a stream has come that far by then."""


def starts(worker: FakeWorker) -> list[int | None]:
    """Where each subscription began; None: with a snapshot."""
    return [
        None if call.request.include_snapshot else call.request.start_sequence_number
        for call in worker.kv_calls
    ]


def test_ops_06_a_new_gateway_has_what_a_snapshot_says_and_goes_on_live() -> None:
    async def main() -> None:
        worker = saying(SNAPSHOT)
        async with followed(worker) as of:
            assert of.depth(1, 2, 3) == 2
            assert (of.events.mode, of.events.reason) == (EventMode.LIVE, "")
            assert not of.events.is_partial
            assert [rank for rank, holder in of.holders if holder is not None] == [0]
            worker.kv_calls[0].say(batch(5), batch(6, stored(3, after=2), removed(1)))
            await anyio.sleep(SETTLE_S)
            assert of.depth(1, 2, 3) == 0
            assert of.events.n_blocks == 2
            assert of.events.ranks[0].next_number == 7
            assert (of.events.n_batches, of.events.n_events) == (3, 4)
            assert starts(worker) == [None]

    run(main)


def test_ops_06_the_time_to_rebuild_is_told() -> None:
    async def main() -> None:
        worker = saying(())
        async with followed(worker) as of:
            assert of.events.mode is EventMode.STARTING
            assert of.events.rebuild_s == 0.0
            await anyio.sleep(2.5 - SETTLE_S)
            worker.kv_calls[0].say(*SNAPSHOT)
            await anyio.sleep(SETTLE_S)
            assert of.events.mode is EventMode.LIVE
            assert of.events.rebuild_s == pytest.approx(2.5)

    run(main)


def test_kv_09_a_view_that_began_in_the_middle_is_partial_until_it_is_cleared() -> None:
    async def main() -> None:
        worker = saying((batch(412, stored(1)),))
        async with followed(worker) as of:
            assert worker.kv_calls[0].request.include_snapshot
            assert of.events.is_partial
            assert of.depth(1) == 1
            worker.kv_calls[0].say(batch(413, CLEARED, stored(1)))
            await anyio.sleep(SETTLE_S)
            assert not of.events.is_partial

    run(main)


def test_a_stream_from_the_first_batch_is_whole_without_a_snapshot() -> None:
    async def main() -> None:
        async with followed(saying((batch(0, stored(1)),))) as of:
            assert not of.events.is_partial

    run(main)


def test_kv_10_batches_not_newer_than_the_last_are_skipped() -> None:
    async def main() -> None:
        worker = saying((*SNAPSHOT, batch(4, removed(1)), batch(2, CLEARED), batch(5, stored(9))))
        async with followed(worker) as of:
            assert of.depth(1, 2) == 2
            assert of.depth(9) == 1
            assert of.events.n_gaps == 0
            assert len(worker.kv_calls) == 1

    run(main)


def test_a_worker_that_counts_anew_is_believed_after_some_old_batches() -> None:
    async def main() -> None:
        again = tuple(batch(number, stored(7)) for number in range(MAX_OLD + 1))
        worker = saying((batch(500, CLEARED, stored(1)), *again[:-1]), SNAPSHOT)
        async with followed(worker) as of:
            await anyio.sleep(RETRY_S)
            assert (starts(worker), of.depth(1), of.events.n_gaps) == ([None], 1, 0)
            worker.kv_calls[0].say(again[-1])
            await anyio.sleep(RETRY_S)
            assert (starts(worker), of.events.n_gaps) == ([None, None], 1)

    run(main)


def test_kv_05_a_gap_is_counted_and_replayed_from_the_first_missing_batch() -> None:
    """What is known stays, as it is right as of the last batch that was applied."""

    async def main() -> None:
        worker = saying(
            (*SNAPSHOT, batch(6, removed(2))),
            (batch(5, stored(3, after=2)), batch(6, removed(2))),
        )
        async with followed(worker) as of:
            assert of.events.n_gaps == 1
            assert of.events.mode is EventMode.RESYNC
            assert of.events.reason == "gap: batch 6 instead of 5"
            assert of.depth(1, 2) == 2
            await anyio.sleep(RETRY_S)
            assert starts(worker) == [None, 5]
            assert (of.depth(1, 2), of.events.n_blocks) == (1, 2)
            assert (of.events.n_resumes, of.events.n_resyncs) == (1, 0)
            assert of.events.mode is EventMode.LIVE

    run(main)


def test_a_worker_that_skips_again_where_it_was_to_go_on_is_asked_for_a_snapshot() -> None:
    async def main() -> None:
        worker = saying((*SNAPSHOT, batch(6)), (batch(6),), (batch(9, CLEARED, stored(5)),))
        async with followed(worker) as of:
            await anyio.sleep(2.5 * RETRY_S)
            assert starts(worker) == [None, 5, None]
            assert (of.depth(1), of.depth(5)) == (0, 1)
            assert (of.events.n_gaps, of.events.n_resyncs) == (2, 1)

    run(main)


def test_kv_12_a_replay_that_stalls_is_taken_up_where_it_stalled_and_nothing_is_applied_twice() -> (
    None
):
    async def main() -> None:
        six, seven, eight = (batch(n, stored(n, after=n - 1)) for n in (6, 7, 8))
        first = batch(5, CLEARED, stored(1, 2, 3, 4, 5))
        worker = saying((first, eight), (six,), (six, seven, eight))
        async with followed(worker) as of:
            await anyio.sleep(RETRY_S)
            assert of.depth(1, 2, 3, 4, 5, 6, 7, 8) == 6
            await anyio.sleep(SILENCE_S + RETRY_S)
            assert starts(worker) == [None, 6, 7]
            assert [call.cancelled for call in worker.kv_calls] == [True, True, False]
            assert of.depth(1, 2, 3, 4, 5, 6, 7, 8) == 8
            assert of.events.n_batches == 4
            assert (of.events.n_gaps, of.events.n_resyncs) == (1, 0)

    run(main)


def test_a_dropped_connection_resumes_with_the_instance_id_and_keeps_the_view() -> None:
    async def main() -> None:
        worker = saying((*SNAPSHOT, UNAVAILABLE), (batch(5, stored(3, after=2)),))
        async with followed(worker, instance_id="i9") as of:
            assert of.depth(1, 2) == 2
            assert (of.events.mode, of.events.reason) == (
                EventMode.RESYNC,
                "UNAVAILABLE: gone: (address)",
            )
            await anyio.sleep(RETRY_S)
            assert starts(worker) == [None, 5]
            assert worker.kv_calls[0].metadata == ()
            assert worker.kv_calls[1].metadata == (("x-slagate-instance-id", "i9"),)
            assert of.depth(1, 2, 3) == 3
            assert [holder is None for _, holder in of.holders] == [False]

    run(main)


def test_without_an_instance_id_nobody_can_tell_a_restart_so_there_is_no_resume() -> None:
    async def main() -> None:
        worker = saying((*SNAPSHOT, UNAVAILABLE), (batch(5, stored(3, after=2)),))
        async with followed(worker, instance_id="") as of:
            assert of.depth(1, 2) == 0
            await anyio.sleep(RETRY_S)
            assert starts(worker) == [None, None]

    run(main)


@pytest.mark.parametrize(
    "end",
    [
        (OUT_OF_RANGE,),
        (engine_error(oe.ERROR_CODE_OVERLOADED), OK),
        (b"\x0a\x05xx",),
        (batch(5, rank=3),),
    ],
)
def test_what_no_resume_can_mend_drops_the_view_and_asks_for_a_snapshot(end: Script) -> None:
    """KV-11: a batch of another rank is nobody's."""

    async def main() -> None:
        worker = saying((*SNAPSHOT, *end), (batch(9, CLEARED, stored(5)),))
        async with followed(worker) as of:
            assert of.depth(1, 2) == 0
            assert of.events.mode is EventMode.RESYNC
            await anyio.sleep(RETRY_S)
            assert starts(worker) == [None, None]
            assert of.depth(5) == 1
            assert of.events.n_resyncs == 1
            assert of.events.n_errors == (0 if isinstance(end[0], Status) or len(end) > 1 else 1)

    run(main)


def test_any_other_error_in_the_stream_is_a_broken_stream() -> None:
    async def main() -> None:
        worker = saying((*SNAPSHOT, engine_error(oe.ERROR_CODE_INTERNAL), OK))
        async with followed(worker) as of:
            await anyio.sleep(RETRY_S)
            assert starts(worker) == [None, 5]
            assert of.depth(1, 2) == 2

    run(main)


def test_the_view_of_a_worker_that_does_not_come_back_is_kept_for_a_while_only() -> None:
    async def main() -> None:
        worker = saying((*SNAPSHOT, UNAVAILABLE), (UNAVAILABLE,))
        async with followed(worker) as of:
            await anyio.sleep(KEEP_S / 3)
            assert of.depth(1, 2) == 2
            assert set(starts(worker)[1:]) == {5}
            await anyio.sleep(KEEP_S * 2 / 3)
            assert of.depth(1, 2) == 0
            await anyio.sleep(1.25 * MAX_DELAY_S)
            assert starts(worker)[-1] is None
            assert of.events.n_resyncs == 1

    run(main)


def test_another_incarnation_drops_everything_at_once_and_the_old_stream_is_left() -> None:
    async def main() -> None:
        worker = saying(SNAPSHOT, (batch(0, CLEARED, stored(5)),))
        async with followed(worker) as of:
            old = of.holder()
            of.follower.identified(info("i2"))
            assert of.holder() is None
            assert old is not None
            assert old.bit == -1
            assert of.depth(1, 2) == 0
            worker.kv_calls[0].say(batch(5, stored(6)))
            await anyio.sleep(SETTLE_S)
            assert worker.kv_calls[0].cancelled
            assert starts(worker) == [None, None]
            assert (of.depth(5), of.depth(6)) == (1, 0)
            assert [holder is None for _, holder in of.holders] == [False, True, False]

    run(main)


def test_another_incarnation_is_asked_at_once_whatever_was_waited_for() -> None:
    async def main() -> None:
        worker = saying((Status(grpc.StatusCode.UNIMPLEMENTED, "no"),), SNAPSHOT)
        async with followed(worker) as of:
            assert of.events.mode is EventMode.NONE
            of.follower.identified(info("i2"))
            await anyio.sleep(SETTLE_S)
            assert of.depth(1, 2) == 2

    run(main)


def test_batches_that_waited_when_the_worker_restarted_are_not_applied() -> None:
    async def main() -> None:
        worker = saying(SNAPSHOT)
        async with followed(worker) as of:
            worker.kv_calls[0].say(batch(5, stored(6)))
            of.follower.identified(info("i2"))
            await anyio.sleep(SETTLE_S)
            assert of.depth(6) == 0
            assert of.events.n_events == 4  # two snapshots of two events

    run(main)


def test_the_same_answer_again_changes_nothing() -> None:
    async def main() -> None:
        worker = saying(SNAPSHOT)
        async with followed(worker) as of:
            of.follower.identified(info("i1"))
            await anyio.sleep(SETTLE_S)
            assert starts(worker) == [None]
            assert of.depth(1, 2) == 2

    run(main)


def test_a_worker_that_is_not_the_configured_one_is_not_followed() -> None:
    async def main() -> None:
        worker = saying(SNAPSHOT)
        async with followed(worker) as of:
            of.follower.misfit()
            of.follower.misfit()
            assert of.events.mode is EventMode.NONE
            await anyio.sleep(10 * PROBE_S)
            assert worker.kv_calls[0].cancelled
            assert starts(worker) == [None]
            assert [holder is None for _, holder in of.holders] == [False, True]

    run(main)


def test_a_worker_that_does_not_say_its_block_size_is_not_followed() -> None:
    async def main() -> None:
        worker = saying(SNAPSHOT)
        async with followed(worker) as of:
            of.follower.identified(info("i2", block_tokens=0))
            await anyio.sleep(10 * PROBE_S)
            assert of.events.mode is EventMode.NONE
            assert of.events.reason == "does not say how many tokens a KV block has"
            assert starts(worker) == [None]

    run(main)


def test_each_rank_has_its_own_stream_and_its_own_numbers() -> None:
    async def main() -> None:
        worker = FakeWorker(
            kv_scripts=[
                (batch(7, CLEARED, stored(1), rank=0), HANG),
                (batch(0, CLEARED, stored(2), rank=1), UNAVAILABLE),
                (batch(1, stored(3), rank=1), HANG),
            ]
        )
        async with followed(worker, ranks=2) as of:
            assert of.events.mode is EventMode.RESYNC
            await anyio.sleep(RETRY_S)
            assert of.events.mode is EventMode.LIVE
            asked = [list(call.request.data_parallel_ranks) for call in worker.kv_calls]
            assert (asked, starts(worker)) == ([[0], [1], [1]], [None, None, 1])
            assert [of.depth(n, rank=0) for n in (1, 2, 3)] == [1, 0, 0]
            assert [of.depth(n, rank=1) for n in (1, 2, 3)] == [0, 1, 1]
            numbers = [of.events.ranks[rank].next_number for rank in (0, 1)]
            assert numbers == [8, 2]

    run(main)


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION]
)
def test_kv_10_a_final_answer_is_taken_for_one_and_asked_for_again_slowly(
    code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        worker = saying((Status(code, "no events here"),))
        async with followed(worker) as of:
            await anyio.sleep(0.7 * PROBE_S)
            assert len(worker.kv_calls) == 1
            assert of.events.mode is EventMode.NONE
            assert of.events.reason == f"{code.name}: no events here"
            assert of.holders == []
            await anyio.sleep(9.3 * PROBE_S)
            assert 8 <= len(worker.kv_calls) <= 14
            worker.kv_scripts = [(*SNAPSHOT, HANG)]
            for _ in range(int(1.3 * PROBE_S)):
                await anyio.sleep(1)
                if of.events.mode is EventMode.LIVE:
                    break
            assert of.depth(1, 2) == 2

    caplog.set_level(logging.INFO, logger="slagate.pools")
    run(main)
    modes = [vars(record)["mode"] for record in caplog.records]
    assert modes == ["starting", "none", "live"]


def test_a_worker_that_stops_offering_events_is_let_go() -> None:
    async def main() -> None:
        no = Status(grpc.StatusCode.FAILED_PRECONDITION, "no")
        worker = saying((*SNAPSHOT, UNAVAILABLE), (no,))
        async with followed(worker) as of:
            await anyio.sleep(RETRY_S)
            assert of.events.mode is EventMode.NONE
            assert of.holder() is None
            assert [holder is None for _, holder in of.holders] == [False, True]
            assert of.events.n_blocks == 0

    run(main)


@pytest.mark.parametrize(
    "answer",
    [
        (UNAVAILABLE,),
        (OUT_OF_RANGE,),
        (OK,),
        (batch(4, CLEARED), UNAVAILABLE),
        (batch(4, CLEARED), batch(4), batch(9)),
        (b"garbage",),
        (engine_error(oe.ERROR_CODE_OVERLOADED), OK),
    ],
)
def test_kv_10_whatever_the_answer_subscriptions_back_off(answer: Script) -> None:
    async def main() -> None:
        worker = saying(answer)
        async with followed(worker):
            await anyio.sleep(60)
            # 0.1 s, twice that each time, then every 10 s; each a quarter more or less.
            assert 9 <= len(worker.kv_calls) <= 16
            await anyio.sleep(600)
            assert 55 <= len(worker.kv_calls) <= 100

    run(main)


def test_a_stream_that_was_stable_earns_a_quick_retry() -> None:
    async def main() -> None:
        worker = saying((UNAVAILABLE,))
        async with followed(worker) as of:
            await anyio.sleep(100)
            worker.kv_scripts = [(*SNAPSHOT, HANG)]
            await anyio.sleep(1.3 * MAX_DELAY_S)
            assert of.events.mode is EventMode.LIVE
            for number in range(5, 15):
                worker.kv_calls[-1].say(batch(number))
                await anyio.sleep(5)
            n_before = len(worker.kv_calls)
            worker.kv_calls[-1].say(UNAVAILABLE)
            await anyio.sleep(RETRY_S)
            assert len(worker.kv_calls) == n_before + 1

    run(main)


def test_workers_do_not_retry_in_step() -> None:
    async def main() -> None:
        times: set[float] = set()

        class Refusing(FakeWorker):
            def kv_events(self, request: bytes, metadata: Metadata, sink: Sink) -> Call:
                times.add(anyio.current_time())
                return super().kv_events(request, metadata, sink)

        worker = Refusing(kv_scripts=[(UNAVAILABLE,)])
        async with followed(worker, ranks=4):
            await anyio.sleep(5)
        assert len(times) == len(worker.kv_calls) - 3

    run(main)


def test_silence_for_three_heartbeats_is_a_broken_stream_and_heartbeats_are_not_silence() -> None:
    async def main() -> None:
        worker = saying(SNAPSHOT, (batch(6),))
        async with followed(worker) as of:
            await anyio.sleep(SILENCE_S - 1)
            worker.kv_calls[0].say(batch(5))
            await anyio.sleep(SILENCE_S - 1)
            assert len(worker.kv_calls) == 1
            await anyio.sleep(1 + RETRY_S)
            assert starts(worker) == [None, 6]
            assert worker.kv_calls[0].cancelled
            assert of.depth(1, 2) == 2

    run(main)


def test_a_worker_that_hangs_loses_its_view_after_the_second_silence() -> None:
    async def main() -> None:
        worker = saying(SNAPSHOT, ())
        async with followed(worker) as of:
            await anyio.sleep(2 * SILENCE_S + 1)
            assert starts(worker) == [None, 5, None]
            assert of.depth(1, 2) == 0

    run(main)


def test_what_came_before_the_end_is_applied_before_it() -> None:
    async def main() -> None:
        many = tuple(batch(number, stored(number)) for number in range(5, 500))
        worker = saying((*SNAPSHOT, *many, UNAVAILABLE), ())
        async with followed(worker) as of:
            await anyio.sleep(RETRY_S)
            assert starts(worker) == [None, 500]
            assert of.depth(499) == 1

    run(main)


def served(of: Followed, n: int) -> None:
    """A look at the worker, after so many prompts in all."""
    of.n_served = n
    of.follower.identified(info())


def test_kv_02_a_worker_that_works_and_says_nothing_is_flagged_and_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        worker = saying((batch(0),))
        async with followed(worker) as of:
            for second in range(58):
                served(of, 2 * second)
                worker.kv_calls[-1].say(batch(second + 1))
                assert of.events.is_silent == (second >= 50)
                await anyio.sleep(1)
            assert of.events.mode is EventMode.LIVE
            worker.kv_calls[-1].say(batch(59, stored(1)))
            await anyio.sleep(SETTLE_S)
            assert not of.events.is_silent
            served(of, 150)
            served(of, 230)
            served(of, 251)
            assert of.events.is_silent

    run(main)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warnings] == ["events.silent"]
    assert vars(warnings[0])["worker"] == "w1:1"


def test_kv_02_an_idle_worker_is_not_silent() -> None:
    async def main() -> None:
        async with followed(saying((batch(0),))) as of:
            for second in range(600):
                served(of, second)
                await anyio.sleep(1)
            assert not of.events.is_silent

    run(main)


def test_lag_is_the_age_of_the_newest_batch_applied_while_others_wait() -> None:
    async def main() -> None:
        worker = saying((batch(4, CLEARED, at_s=-2),))
        async with followed(worker) as of:
            assert of.events.lag_s == 0.0
            many = [batch(5 + n, *(stored(k) for k in range(64)), at_s=-1) for n in range(20)]
            worker.kv_calls[0].say(*many)
            assert of.events.lag_s == pytest.approx(2.0 + SETTLE_S)
            assert of.events.n_waiting_bytes > 0
            while of.events.ranks[0].next_number != 10:
                await anyio.lowlevel.checkpoint()
            assert of.events.lag_s == pytest.approx(1.0 + SETTLE_S)
            await anyio.sleep(SETTLE_S)
            assert (of.events.lag_s, of.events.n_waiting_bytes) == (0.0, 0)

    run(main)


def test_kv_15_where_nobody_follows_the_view_says_so() -> None:
    view = EventView("w1:1", unix_s=lambda: EPOCH_S)
    assert (view.mode, view.lag_s, view.n_blocks, view.n_pending) == (EventMode.OFF, 0.0, 0, 0)


def test_i9_nothing_is_left_when_following_ends() -> None:
    async def main() -> None:
        worker = saying(SNAPSHOT)
        async with followed(worker, ranks=1) as of:
            assert of.index.n_pairs == 2
        assert worker.kv_calls[0].cancelled
        assert of.holders[-1] == (0, None)
        await anyio.sleep(10 * PROBE_S)
        assert (of.index.n_pairs, of.index.trie.n_runs) == (0, 0)
        assert starts(worker) == [None]

    run(main)


def test_a_worker_whose_blocks_have_another_size_has_no_usable_events() -> None:
    async def main() -> None:
        worker = saying((batch(0, CLEARED, stored(1, block_size=8)),))
        async with followed(worker) as of:
            assert of.events.mode is EventMode.NONE
            assert of.events.reason == (
                "its KV events have blocks of 8 tokens, its server info of 4"
            )
            assert (of.events.n_errors, of.events.n_blocks) == (1, 0)
            assert of.holder() is None
            await anyio.sleep(0.7 * PROBE_S)
            assert len(worker.kv_calls) == 1

    run(main)
