"""`LoadInfo` from iteration statistics: what is known, and what stays absent."""

from typing import Any

import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers.trtllm.load import attribute, load_info, rank_loads

OLD_BATCH = {"numContextRequests": 1, "numGenRequests": 3, "numCtxTokens": 10}
NEW_BATCH = OLD_BATCH | {
    "numCtxKvTokens": 20,
    "numGenKvTokens": 300,
    "numQueuedCtxTokens": 40,
    "numQueuedGenKvTokens": 50,
    "numPausedKvTokens": 6,
}


def row(batch: Any = NEW_BATCH, **more: Any) -> dict[str, Any]:
    return {
        "numActiveRequests": 4,
        "numQueuedRequests": 2,
        "kvCacheStats": {"maxNumBlocks": 100, "usedNumBlocks": 7},
        "inflightBatchingStats": batch,
        **more,
    }


def load(rows: dict[int, Any], **changed: Any) -> oe.LoadInfo:
    given = {"n_ranks": 1, "n_live": 5, "blocks_per_rank": None} | changed
    return load_info(rows, **given)


def test_a_row_of_one_rank() -> None:
    assert load({0: row()}) == oe.LoadInfo(
        running_requests=5,
        queued_requests=2,
        used_kv_blocks=7,
        total_kv_blocks=100,
        running_tokens=330,
        waiting_tokens=96,
        prefill_batch_size=1,
        decode_batch_size=3,
    )


def test_before_the_first_row_only_the_live_requests_are_known() -> None:
    assert load({}) == oe.LoadInfo(running_requests=5)
    assert load({}, n_live=0) == oe.LoadInfo(running_requests=0, queued_requests=0)
    assert load({}, blocks_per_rank=50, n_ranks=2).total_kv_blocks == 100


def test_without_the_token_counts_of_later_versions_they_stay_absent() -> None:
    """The keys came with TensorRT-LLM's pull request #13199; zeros would look like an idle engine."""
    old = load({0: row(OLD_BATCH)})
    assert not old.HasField("running_tokens")
    assert not old.HasField("waiting_tokens")
    assert (old.prefill_batch_size, old.decode_batch_size) == (1, 3)
    assert not load({0: row(OLD_BATCH)}, n_live=0).HasField("running_tokens")


def test_an_idle_engines_last_row_runs_nothing() -> None:
    idle = load({0: row()}, n_live=0)
    assert idle == oe.LoadInfo(
        running_requests=0,
        queued_requests=0,
        total_kv_blocks=100,
        running_tokens=0,
        waiting_tokens=0,
        prefill_batch_size=0,
        decode_batch_size=0,
    )


def test_ranks_are_added_up_once_all_are_known() -> None:
    both = load({0: row(), 1: row(numQueuedRequests=0)}, n_ranks=2)
    assert (both.queued_requests, both.used_kv_blocks, both.total_kv_blocks) == (2, 14, 200)
    assert both.decode_batch_size == 6
    half = load({1: row()}, n_ranks=2)
    assert not half.HasField("used_kv_blocks")
    assert not half.HasField("total_kv_blocks")


def test_ranks_of_which_nothing_is_known_are_counted_and_have_no_figures() -> None:
    """Zeros would look like idle ranks; an engine of one rank has nobody to be mistaken for."""
    for rows, n_without in (({}, 3), ({1: row()}, 2), ({0: row(), 1: row(), 2: row()}, 0)):
        for n_live in (0, 5):
            attributes = load(rows, n_ranks=3, n_live=n_live).attributes
            assert attributes["ranks_without_stats"] == n_without
            ranks = rank_loads(rows, n_ranks=3, n_live=n_live, blocks_per_rank=None)
            for rank in ranks:
                known = rank != oe.RankLoadInfo(data_parallel_rank=rank.data_parallel_rank)
                assert known == (rank.data_parallel_rank in rows)
    for rows in ({}, {0: row()}):
        assert not load(rows).HasField("attributes")


def test_what_the_engine_holds_now_beats_the_last_row() -> None:
    assert load({0: row()}, used_blocks=3).used_kv_blocks == 3
    (rank,) = rank_loads({0: row()}, n_ranks=1, n_live=1, blocks_per_rank=None, used_blocks=3)
    assert rank.used_kv_blocks == 3


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_an_idle_engines_last_row_does_not_say_which_blocks_are_in_use(n_ranks: int) -> None:
    """Those of the requests it was about are free by now; only the engine can say."""
    rows = {rank: row() for rank in range(n_ranks)}
    idle = {"n_ranks": n_ranks, "n_live": 0}
    assert not load(rows, **idle).HasField("used_kv_blocks")
    assert load(rows, **idle, used_blocks=0).used_kv_blocks == 0
    for rank in rank_loads(rows, **idle, blocks_per_rank=None):
        assert not rank.HasField("used_kv_blocks")
    said = rank_loads(rows, **idle, blocks_per_rank=None, used_blocks=5)
    # The count is of all ranks together.
    assert [rank.HasField("used_kv_blocks") for rank in said] == [n_ranks == 1] * n_ranks
    assert said[0].used_kv_blocks == (5 if n_ranks == 1 else 0)


def test_each_rank_says_what_is_known_of_it() -> None:
    first, second = rank_loads({1: row()}, n_ranks=2, n_live=1, blocks_per_rank=60)
    assert first == oe.RankLoadInfo(data_parallel_rank=0, total_kv_blocks=60)
    assert second == oe.RankLoadInfo(
        data_parallel_rank=1,
        running_requests=4,
        queued_requests=2,
        used_kv_blocks=7,
        total_kv_blocks=60,
        prefill_batch_size=1,
        decode_batch_size=3,
    )
    (idle,) = rank_loads({0: row()}, n_ranks=1, n_live=0, blocks_per_rank=None)
    assert (idle.running_requests, idle.queued_requests, idle.decode_batch_size) == (0, 0, 0)
    assert (idle.HasField("used_kv_blocks"), idle.total_kv_blocks) == (False, 100)


@pytest.mark.parametrize("odd", [None, "4", 1.5, -1, True, [1]])
def test_odd_values_are_read_as_absent(odd: Any) -> None:
    got = load({0: row(None, numQueuedRequests=odd, kvCacheStats={"usedNumBlocks": odd})})
    assert got == oe.LoadInfo(running_requests=5)
    assert load({0: {"kvCacheStats": odd}}) == oe.LoadInfo(running_requests=5)


def test_counts_that_a_double_would_round_are_text() -> None:
    assert [attribute(2**53), attribute(2**53 + 1)] == [2**53, "9007199254740993"]
