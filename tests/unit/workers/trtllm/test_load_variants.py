"""The load that each version's iteration statistics give, from a poll's answer to the message."""

from typing import Any

import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers.trtllm.load import kv_cache, load_info, rank_loads
from slagate.workers.trtllm.poll import NewestRows
from support.engine.stats_dicts import early_row, main_row, row, window_row
from support.virtual_loop import run

KNOWN = oe.LoadInfo(
    running_requests=5,
    queued_requests=2,
    used_kv_blocks=7,
    total_kv_blocks=5358,
    prefill_batch_size=1,
    decode_batch_size=3,
)
TOKENS = oe.LoadInfo(running_tokens=330, waiting_tokens=96)


def load(*polled: Any, n_ranks: int = 1) -> tuple[oe.LoadInfo, list[oe.RankLoadInfo]]:
    async def main() -> NewestRows:
        rows = NewestRows(n_ranks)
        rows.take_rows(list(polled))
        return rows

    rows = run(main).of_rank
    scope: dict[str, Any] = {"n_ranks": n_ranks, "n_live": 5, "blocks_per_rank": None}
    return load_info(rows, **scope), rank_loads(rows, **scope)


def merged(*parts: oe.LoadInfo) -> oe.LoadInfo:
    made = oe.LoadInfo()
    for part in parts:
        made.MergeFrom(part)
    return made


@pytest.mark.parametrize(
    ("polled", "expected"),
    [
        pytest.param(early_row(), KNOWN, id="1.2"),
        pytest.param(row(), merged(KNOWN, TOKENS), id="since-13199"),
        pytest.param(main_row(), merged(KNOWN, TOKENS), id="1.4rc"),
        pytest.param(main_row(kvCacheStats=None), merged(KNOWN, TOKENS), id="main-windows-only"),
        pytest.param(row(attentionDpRank=None), merged(KNOWN, TOKENS), id="rank-null"),
        pytest.param(
            main_row(specDecodingStats=None, requestStats=None, kvCacheIterationStats=None),
            merged(KNOWN, TOKENS),
            id="main-nulls",
        ),
        pytest.param(
            main_row(inflightBatchingStats=None, kvCacheStats=None, kvCacheIterationStats=None),
            oe.LoadInfo(running_requests=5, queued_requests=2),
            id="nothing-nested",
        ),
    ],
)
def test_a_version_says_what_it_knows_and_nothing_else(polled: Any, expected: oe.LoadInfo) -> None:
    info, (rank,) = load(polled)
    assert info == expected
    assert rank.HasField("used_kv_blocks") == expected.HasField("used_kv_blocks")
    assert (rank.running_requests, rank.queued_requests) == (4, 2)
    assert rank.used_kv_blocks == expected.used_kv_blocks


def test_attention_dp_has_a_row_a_rank_and_queues_on_the_first() -> None:
    rows = [main_row(), main_row(1, numQueuedRequests=0), main_row(2, numQueuedRequests=0)]
    info, ranks = load(*rows, n_ranks=3)
    assert (info.queued_requests, info.used_kv_blocks, info.total_kv_blocks) == (2, 21, 16074)
    assert [rank.queued_requests for rank in ranks] == [2, 0, 0]
    assert info.attributes["ranks_without_stats"] == 0


def test_rows_that_do_not_say_their_rank_are_nobodys() -> None:
    info, ranks = load(early_row(), early_row(), n_ranks=2)
    assert not info.HasField("used_kv_blocks")
    assert info.attributes["ranks_without_stats"] == 2
    assert not any(rank.HasField("used_kv_blocks") for rank in ranks)


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"512": None},
        {"all": window_row(9, 1)},
        {512: window_row(9, 1)},
        [window_row(9, 1)],
        "512",
    ],
)
def test_windows_that_cannot_be_read_say_nothing(odd: Any) -> None:
    assert kv_cache(main_row(kvCacheStats=None, kvCacheIterationStats=odd)) is None
