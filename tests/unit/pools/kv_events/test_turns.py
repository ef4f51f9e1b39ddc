"""How the work of following is spread over turns of the event loop, and what waits meanwhile."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from slagate.pools.kv_events.decode import PIECE_EVENTS
from slagate.pools.kv_events.follower import WAITING_BYTES
from slagate.pools.prefix.holder import Holder
from slagate.pools.prefix.index import PrefixIndex
from slagate.proto import openengine_pb2 as oe
from slagate.workers.runtime.cooperative import CooperativeScheduler
from slagate.workers.runtime.virtual_loop import run
from support.kv.followed import (
    BLOCK_TOKENS,
    CLEARED,
    SETTLE_S,
    Followed,
    batch,
    followed,
    removed,
    saying,
    stored,
)
from support.seeds import n_in
from support.worker.fake import HANG, FakeWorker

MOST_BLOCKS = 2048 // BLOCK_TOKENS
"""Of one slice of a chain, and more than any other step may touch."""


class CountedIndex(PrefixIndex):
    """Counts the calls and the blocks of each turn."""

    def __init__(self) -> None:
        super().__init__(BLOCK_TOKENS)
        self.calls: list[int] = [0]
        self.blocks: list[int] = [0]

    def stored(self, holder: Holder, hashes: Any, *args: Any, **kwargs: Any) -> None:
        self._count(hashes)
        super().stored(holder, hashes, *args, **kwargs)

    def removed(self, holder: Holder, hashes: Any, *args: Any, **kwargs: Any) -> None:
        self._count(hashes)
        super().removed(holder, hashes, *args, **kwargs)

    def _count(self, hashes: Sequence[int]) -> None:
        self.calls[-1] += 1
        self.blocks[-1] += len(hashes)


async def every_turn(of: Followed) -> None:
    """Stands for a decision that wants its turn whenever it can get one; ends when nothing waits."""
    assert isinstance(of.index, CountedIndex)
    while of.events.n_waiting_bytes:
        of.index.calls.append(0)
        of.index.blocks.append(0)
        await anyio.lowlevel.checkpoint()


N_REMOVALS = n_in(gate=12_000, long=48_000)


@pytest.mark.parametrize("n_a_batch", [1, 64, 3000])
def test_kv_16_a_burst_of_single_removals_yields_after_each_piece(n_a_batch: int) -> None:
    async def main() -> None:
        chains = [list(range(start, start + 1000)) for start in range(1, N_REMOVALS, 1000)]
        worker = saying((batch(0, CLEARED, *(stored(*chain) for chain in chains)),))
        async with followed(worker, index=CountedIndex()) as of:
            assert of.events.n_blocks == N_REMOVALS
            hashes = [hash_ for chain in chains for hash_ in reversed(chain)]
            burst = [
                batch(1 + at // n_a_batch, *map(removed, hashes[at : at + n_a_batch]))
                for at in range(0, N_REMOVALS, n_a_batch)
            ]
            worker.kv_calls[0].say(*burst)
            await every_turn(of)
            assert of.events.n_blocks == 0
            assert isinstance(of.index, CountedIndex)
            assert max(of.index.calls) <= 2 * PIECE_EVENTS
            assert len(of.index.calls) >= N_REMOVALS / (2 * PIECE_EVENTS)
            assert of.events.n_errors == 0

    run(main)


def test_kv_16_one_huge_event_is_cut_too() -> None:
    async def main() -> None:
        blocks = list(range(1, 20_001))
        worker = saying((batch(0, CLEARED),))
        async with followed(worker, index=CountedIndex()) as of:
            worker.kv_calls[0].say(batch(1, stored(*blocks)), batch(2, removed(*blocks)))
            await every_turn(of)
            assert isinstance(of.index, CountedIndex)
            assert sum(of.index.blocks) == 2 * len(blocks)
            assert max(of.index.blocks) <= MOST_BLOCKS
            assert of.events.n_blocks == 0

    run(main)


def test_many_bursting_workers_cost_no_more_a_turn_than_one_and_are_served_in_turn() -> None:
    async def main() -> None:
        index, turns = CountedIndex(), CooperativeScheduler()
        workers = [saying((batch(0, CLEARED),)) for _ in range(8)]
        async with anyio.create_task_group() as tasks:
            of: list[Followed] = []

            async def follow(worker: FakeWorker) -> None:
                async with followed(worker, index=index, turns=turns) as one:
                    of.append(one)
                    await anyio.sleep_forever()

            for worker in workers:
                tasks.start_soon(follow, worker)
            await anyio.sleep(2 * SETTLE_S)
            for worker in workers:
                worker.kv_calls[0].say(
                    *(batch(1 + n, *map(stored, range(n * 500, n * 500 + 500))) for n in range(10))
                )
            served = set()
            while any(one.events.n_waiting_bytes for one in of):
                index.calls.append(0)
                blocks = [one.events.n_blocks for one in of]
                await anyio.lowlevel.checkpoint()
                moved = [n for n, one in enumerate(of) if one.events.n_blocks != blocks[n]]
                assert len(moved) <= 1
                served.update(moved)
                if len(index.calls) == 20:
                    assert served == set(range(8))
                    assert max(one.events.n_blocks for one in of) <= 4 * 2 * PIECE_EVENTS
            assert max(index.calls) <= 2 * PIECE_EVENTS
            assert [one.events.n_blocks for one in of] == [5000] * 8
            tasks.cancel_scope.cancel()

    run(main)


def big(number: int) -> oe.SubscribeKvEventsResponse:
    """A batch of some 500 KB that holds nothing."""
    return batch(number, oe.KvEvent(request_id="x" * 500_000))


def test_what_waits_is_bounded_by_pausing_the_worker_and_nothing_is_lost() -> None:
    async def main() -> None:
        worker = saying((batch(0, CLEARED),))
        async with followed(worker) as of:
            call = worker.kv_calls[0]
            call.say(*(big(1 + n) for n in range(40)), batch(41, stored(5)))
            assert call.is_paused
            most = of.events.n_waiting_bytes
            assert WAITING_BYTES < most < WAITING_BYTES + 600_000
            while call.is_paused:
                left = of.events.n_waiting_bytes
                await anyio.lowlevel.checkpoint()
            assert left <= WAITING_BYTES // 4 + 600_000
            await anyio.sleep(SETTLE_S)
            assert call.n_pauses > 2
            assert of.events.ranks[0].next_number == 42
            assert of.depth(5) == 1

    run(main)


def test_the_room_is_shared_by_the_ranks_of_a_worker() -> None:
    async def main() -> None:
        worker = FakeWorker(kv_scripts=[(HANG,)])
        async with followed(worker, ranks=4) as of:
            for rank, call in enumerate(worker.kv_calls):
                call.say(
                    *(batch(n, oe.KvEvent(request_id="x" * 500_000), rank=rank) for n in range(9))
                )
            assert of.events.n_waiting_bytes < WAITING_BYTES + 4 * 600_000

    run(main)


def test_a_message_that_cannot_be_applied_is_a_lost_stream_and_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(PrefixIndex):
        def stored(self, *args: object, **kwargs: object) -> None:
            raise ZeroDivisionError

    async def main() -> None:
        worker = saying((batch(0, stored(1)),), (batch(0, CLEARED),))
        async with followed(worker, index=Broken(BLOCK_TOKENS)) as of:
            assert of.events.reason == "batch that cannot be applied: ZeroDivisionError"
            assert of.events.n_errors == 1
            await anyio.sleep(0.2)
            assert len(worker.kv_calls) == 2

    run(main)
    errors = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in errors] == ["events.apply"]


def test_a_holder_that_lacks_blocks_starts_over_but_not_all_the_time() -> None:
    async def main() -> None:
        worker = saying((batch(0, CLEARED, stored(2), stored(1)),))
        async with followed(worker, index=PrefixIndex(BLOCK_TOKENS, max_pairs=1)) as of:
            holder = of.holder()
            assert holder is not None
            assert holder.has_gap
            for _ in range(200):
                worker.kv_calls[-1].say(batch(of.events.ranks[0].next_number or 0))
                await anyio.sleep(5)
            assert of.events.n_gaps == 0
            assert 8 <= len(worker.kv_calls) <= 25

    run(main)


def test_turns_take_one_step_each_in_rotation_and_outlive_a_broken_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        turns, taken = CooperativeScheduler(), []

        def steps(name: str, n: int) -> Iterator[bool]:
            for left in reversed(range(n)):
                taken.append(name)
                yield left > 0

        def broken() -> bool:
            taken.append("broken")
            raise ZeroDivisionError

        first, second = steps("first", 3), steps("second", 2)
        turns.add_step(first.__next__)
        turns.add_step(broken)
        turns.add_step(second.__next__)
        turns.add_step(second.__next__)
        n_turns = 0
        while "(0 waiting" not in repr(turns):
            n_turns += 1
            await anyio.lowlevel.checkpoint()
        assert taken == ["first", "broken", "second", "first", "second", "first"]
        assert n_turns >= len(taken)
        turns.add_step(steps("again", 1).__next__)
        await anyio.lowlevel.checkpoint()
        assert taken[-1] == "again"

    with caplog.at_level(logging.ERROR):
        run(main)
    assert [record.getMessage() for record in caplog.records] == ["turns.step"]
