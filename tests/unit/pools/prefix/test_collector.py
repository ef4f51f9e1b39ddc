"""What lives long is no work for the garbage collector, and goes without it: no cycle is left behind."""

import logging
import random
from collections.abc import Callable

import anyio
import grpc
import pytest

from slagate.pools.inflight.shared_counts import PoolCell
from slagate.pools.prefix.holder import Holder
from slagate.pools.prefix.index import PrefixIndex
from slagate.pools.prefix.overlap import HISTORY_S
from slagate.pools.prefix.predictions import Predictions
from slagate.pools.prefix.trie import Root
from slagate.router.receipts.ring import ReceiptRing
from slagate.workers.runtime.virtual_loop import run
from support.gateway.request_path import DECODE_OK, PREFILL_OK, Bench, bench
from support.seeds import n_in
from support.tracked import allocated, tracked
from support.worker.fake import refusal

N_PROMPTS, N_BRANCHES, RUN_BLOCKS = 100, 10, 10
N_RUNS = N_PROMPTS * N_BRANCHES
"""A trunk each, and the branches that leave it."""


def prompts() -> list[list[bytes]]:
    """Trunk and branches of each prompt, as blocks of one token."""
    numbers = iter(range(1 << 30))
    return [
        [
            b"".join(next(numbers).to_bytes(4, "little") for _ in range(RUN_BLOCKS))
            for _ in range(N_BRANCHES)
        ]
        for _ in range(N_PROMPTS)
    ]


def filled(index: PrefixIndex) -> list[Holder]:
    """Two holders that have everything: 20,000 pairs in a thousand runs."""
    holders = [index.join(), index.join()]
    for holder in holders:
        hashes = iter(range(1 << 30))
        for trunk, *branches in prompts():
            above = [next(hashes) for _ in range(RUN_BLOCKS)]
            index.stored(holder, above, None, trunk)
            for at, tokens in enumerate(branches):
                index.stored(holder, [next(hashes) for _ in range(RUN_BLOCKS)], above[at], tokens)
    return holders


def test_an_index_adds_next_to_nothing_for_the_collector_to_walk() -> None:
    index = PrefixIndex(1)
    before = tracked()
    holders = filled(index)
    added = tracked() - before
    assert (index.n_pairs, index.trie.n_runs) == (2 * N_RUNS * RUN_BLOCKS, N_RUNS)
    assert [len(holder.table) for holder in holders] == [N_RUNS, N_RUNS]
    assert added.total() <= N_RUNS // 5, added


def test_an_index_that_everyone_has_left_leaves_nothing_in_memory() -> None:
    index = PrefixIndex(1)

    def fill_and_empty() -> None:
        evicting, clearing = filled(index)
        for hash_ in range(0, N_RUNS * RUN_BLOCKS, 7):
            index.removed(evicting, [hash_])  # holes, and runs that are given up one by one
        index.cleared(clearing)
        index.leave(evicting)
        index.leave(clearing)
        while index.sweep():
            pass

    check_nothing_stays(fill_and_empty)
    assert (index.n_pairs, index.trie.n_runs, index.trie.n_blocks) == (0, 0, 0)


def test_predictions_that_have_ended_leave_nothing_in_memory() -> None:
    predictions = Predictions(1)

    def claim_and_end() -> None:
        claims = [
            predictions.predict(row, trunk + tokens, Root(), expires_s=1.0)
            for row in range(2)
            for trunk, *branches in prompts()
            for tokens in branches
        ]
        random.Random(1).shuffle(claims)
        for claim in claims:
            predictions.end_prediction(claim)
        predictions.expire(2.0)

    check_nothing_stays(claim_and_end)
    assert (len(predictions), predictions.trie.n_runs) == (0, 0)


def test_predictions_add_next_to_nothing_for_the_collector_to_walk() -> None:
    predictions = Predictions(1)
    before = tracked()
    for trunk, *branches in prompts():
        for tokens in branches:
            predictions.predict(0, trunk + tokens, Root(), expires_s=1.0)
    added = tracked() - before
    assert len(predictions) == N_PROMPTS * (N_BRANCHES - 1)
    assert added.total() <= N_RUNS // 5, added


def check_nothing_stays(round_: Callable[[], None]) -> None:
    """A second round of the same takes no more memory than the first has left."""
    round_()
    before = allocated()
    round_()
    assert allocated() - before < N_RUNS // 10


async def play(b: Bench, n_requests: int) -> None:
    """So many requests, some refused, late or retried, and time for all they leave behind to end."""
    for number in range(n_requests):
        await b.call(
            b"\xff" if number % 10 == 1 else None, timeout_s=0.0 if number % 10 == 2 else None
        )
    # Also for the timers of their limits, which the loop keeps until they are due, cancelled or not.
    await anyio.sleep(max(HISTORY_S, b.app.gateway.settings.default_timeout_s) + 1)
    for worker in b.workers.values():
        worker.calls.clear()
        worker.aborts.clear()
    for scripts in b.scripts.values():
        scripts.calls.clear()


@pytest.mark.parametrize("mode", ["disagg", "agg"])
def test_requests_leave_nothing_in_memory_once_their_receipts_have_gone(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    # What is logged is kept for the report of the test.
    caplog.set_level(logging.ERROR, logger="slagate")

    n_requests = n_in(gate=50, long=100)  # each of four times

    async def main() -> list[int]:
        no = refusal(grpc.StatusCode.RESOURCE_EXHAUSTED)
        scripts = {
            stage: [no, *[answer] * 9] * 20
            for stage, answer in (("prefill", PREFILL_OK), ("agg", DECODE_OK))
        }
        async with bench(mode, n_workers=2, scripts=scripts) as b:
            gateway, left = b.app.gateway, []
            for _ in range(4):
                await play(b, n_requests)
                gateway.receipts = ReceiptRing(gateway.receipts.config, unix_s=lambda: 1.5)
                left.append(allocated())
            n_tenth = 4 * n_requests // 10
            assert b.outcomes() == {
                "completed": 8 * n_tenth,
                "invalid": n_tenth,
                "deadline": n_tenth,
            }
            totals = [pool.table.totals for pool in b.app.fleet.pools.values()]
            assert sum(each[PoolCell.RETRIES] for each in totals) > 0.75 * n_tenth
            return left

    _, before, _, after = run(main)
    # Of two times so many, whose receipts are fifty blocks each.
    assert after - before < 2 * n_requests
