"""The load that each version's iteration statistics give, from a poll's answer to the message."""

from typing import Any

import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.trtllm.load import kv_cache, load_info, rank_loads
from slagate.workers.trtllm.poll import NewestRows
from support.engine.stats_dicts import early_row, main_row, row, window_row

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
    assert (info.queued_requests, info.total_kv_blocks) == (2, 16074)
    assert [rank.queued_requests for rank in ranks] == [2, 0, 0]
    assert info.attributes["ranks_without_stats"] == 0


def test_w10_the_row_of_another_rank_is_the_first_ones_but_for_its_batch() -> None:
    batch = main_row()["inflightBatchingStats"] | {"numContextRequests": 5, "numPausedRequests": 1}
    copy = main_row(1, inflightBatchingStats=batch, kvCacheIterationStats=None)
    info, ranks = load(main_row(), copy, n_ranks=2)
    assert [rank.running_requests for rank in ranks] == [4, 5 + 3 + 1]
    assert [rank.HasField("used_kv_blocks") for rank in ranks] == [True, False]
    assert [rank.total_kv_blocks for rank in ranks] == [5358, 5358]
    # Rank 0's twice would be wrong, and once as well.
    assert not info.HasField("used_kv_blocks")
    assert (info.prefill_batch_size, info.decode_batch_size) == (1 + 5, 3 + 3)


def test_w10_a_row_that_names_its_rank_otherwise_is_its_own() -> None:
    rows = [row(rank=n, numActiveRequests=n) for n in range(2)]
    info, ranks = load(*rows, n_ranks=2)
    assert [rank.running_requests for rank in ranks] == [0, 1]
    assert (info.used_kv_blocks, info.total_kv_blocks) == (14, 2 * 5358)
    assert info.attributes["ranks_without_stats"] == 0


def test_w10_rows_that_do_not_say_their_rank_are_the_first_ones() -> None:
    info, (first, second) = load(early_row(), early_row(), n_ranks=2)
    assert (info.queued_requests, info.attributes["ranks_without_stats"]) == (2, 1)
    assert not info.HasField("used_kv_blocks")
    assert not info.HasField("decode_batch_size")
    assert (first.running_requests, first.used_kv_blocks) == (4, 7)
    assert second == oe.RankLoadInfo(data_parallel_rank=1)


def test_w10_keys_that_nobody_knows_yet_change_nothing() -> None:
    more = {"statsSequence": 7, "statsDroppedFrames": 0, "rank": 0, "someDay": [None]}
    assert load(main_row(**more)) == load(main_row())


def test_w12_blocks_of_a_window_are_the_gpus_and_go_before_those_that_may_be_the_hosts_too() -> (
    None
):
    both = main_row(
        kvCacheStats={"maxNumBlocks": 9000, "usedNumBlocks": 3649, "freeNumBlocks": 5351}
    )
    for has_host_blocks in (False, True):
        cache = kv_cache(both, has_host_blocks=has_host_blocks)
        assert cache == {"maxNumBlocks": 5358, "usedNumBlocks": 7, "freeNumBlocks": 5351}


def test_w12_with_blocks_on_the_host_only_the_free_ones_of_an_early_row_are_the_gpus() -> None:
    """Its other counts have the host's blocks in them, all as if they were in use."""
    early = early_row(
        kvCacheStats={"maxNumBlocks": 5958, "usedNumBlocks": 607, "freeNumBlocks": 5351}
    )
    scope: dict[str, Any] = {"n_ranks": 1, "n_live": 5, "has_host_blocks": True}
    for known, used in ((5358, 7), (5351, 0), (5000, 0)):
        info = load_info({0: early}, blocks_per_rank=known, **scope)
        assert (info.used_kv_blocks, info.total_kv_blocks) == (used, known)
        (rank,) = rank_loads({0: early}, blocks_per_rank=known, **scope)
        assert (rank.used_kv_blocks, rank.total_kv_blocks) == (used, known)
    info = load_info({0: early}, blocks_per_rank=None, **scope)
    assert not info.HasField("used_kv_blocks")
    assert not info.HasField("total_kv_blocks")


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
