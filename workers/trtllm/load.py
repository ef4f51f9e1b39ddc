"""`LoadInfo` of a TensorRT-LLM worker, from the newest iteration statistics of each attention-DP rank.

The row of a rank is as old as its last iteration, so the rows of an idle engine are out of date. They count
as 0 for everything that only running requests have. Their blocks in use are left out: those of requests are
free by now, those of parked handoffs may not be. Keys that a version does not have stay absent, so that a
client can tell "not known" from 0.

Since TensorRT-LLM reports every attention-DP rank, the row of a rank above 0 is a copy of rank 0's, in
which only its batch is its own (py_executor.py ids 51964186099, 65844652397): its used blocks are unknown.
A row that names `rank` instead of `attentionDpRank` is wholly its own. Early versions report rank 0 only.
"""

from collections.abc import Mapping
from typing import Any

from slagate.proto import openengine_pb2 as oe

Row = Mapping[str, Any]

RUNNING_TOKENS = ("numCtxTokens", "numCtxKvTokens", "numGenKvTokens")
WAITING_TOKENS = ("numQueuedCtxTokens", "numQueuedGenKvTokens", "numPausedKvTokens")
RANKS_WITHOUT_STATS = "ranks_without_stats"
"""Attribute: the number of ranks without a row. Where rows do not name their rank, they are rank 0's."""

_FIGURES = ("max", "used", "free")

MAX_EXACT = 2**53
"""Integers that a Struct's doubles hold exactly; larger ones travel as decimal strings."""


def load_info(
    rows: Mapping[int, Row],
    *,
    n_ranks: int,
    n_live: int,
    blocks_per_rank: int | None,
    used_blocks: int | None = None,
    has_host_blocks: bool = False,
) -> oe.LoadInfo:
    """The load of the whole worker.

    `n_live` counts requests that were accepted and have not ended, also those that wait in the engine, as
    TensorRT-LLM's own server does. `used_blocks` are those in use now, where the engine can say.
    `has_host_blocks` is of `kv_cache`.
    """
    info = oe.LoadInfo(running_requests=n_live)
    # A sum over some of the ranks would look like a smaller worker.
    has_all = len(rows) == n_ranks
    batches = [_nested(row, "inflightBatchingStats") for row in rows.values() if has_all]
    idle = n_live == 0 and bool(rows)
    _fill(
        info,
        queued_requests=0 if n_live == 0 else _sum(rows.values(), "numQueuedRequests"),
        running_tokens=_total(batches, RUNNING_TOKENS, idle=idle),
        waiting_tokens=_total(batches, WAITING_TOKENS, idle=idle),
        prefill_batch_size=_total(batches, ("numContextRequests",), idle=idle),
        decode_batch_size=_total(batches, ("numGenRequests",), idle=idle),
    )
    caches = [kv_cache(row, has_host_blocks=has_host_blocks) for row in rows.values()]
    total_blocks = None if blocks_per_rank is None else blocks_per_rank * n_ranks
    if has_all:
        if total_blocks is None:
            total_blocks = _sum(caches, "maxNumBlocks")
        if used_blocks is None:
            used = [_used_blocks(cache, blocks_per_rank) for cache in caches]
            known = [n_used for n_used in used if n_used is not None]
            used_blocks = sum(known) if len(known) == n_ranks and not idle else None
    _fill(info, used_kv_blocks=used_blocks, total_kv_blocks=total_blocks)
    if n_ranks > 1:
        info.attributes[RANKS_WITHOUT_STATS] = n_ranks - len(rows)
    return info


def rank_loads(
    rows: Mapping[int, Row],
    *,
    n_ranks: int,
    n_live: int,
    blocks_per_rank: int | None,
    used_blocks: int | None = None,
    has_host_blocks: bool = False,
) -> list[oe.RankLoadInfo]:
    """One entry for each rank; an entry without a row has only what the engine's configuration says.

    `used_blocks` are the whole engine's, as in `load_info`, so they are used where it has one rank.
    """
    loads = []
    for rank in range(n_ranks):
        load = oe.RankLoadInfo(data_parallel_rank=rank)
        row = rows.get(rank)
        idle = n_live == 0 and row is not None
        batch = _nested(row, "inflightBatchingStats")
        cache = kv_cache(row, has_host_blocks=has_host_blocks)
        used, total = used_blocks if n_ranks == 1 else None, blocks_per_rank
        if used is None and not idle:
            used = _used_blocks(cache, blocks_per_rank)
        _fill(
            load,
            running_requests=0 if idle else _running(row, batch),
            queued_requests=0 if idle else _count(row, "numQueuedRequests"),
            used_kv_blocks=used,
            total_kv_blocks=_count(cache, "maxNumBlocks") if total is None else total,
            prefill_batch_size=_total([batch], ("numContextRequests",), idle=idle),
            decode_batch_size=_total([batch], ("numGenRequests",), idle=idle),
        )
        loads.append(load)
    return loads


def kv_cache(row: Row | None, *, has_host_blocks: bool = False) -> Row | None:
    """The figures of a row's GPU blocks under the names of `kvCacheStats`; None where it has none.

    Newer versions have them by attention window; those of the largest window are used, which KV events are
    about, too. Of `kvCacheStats` only the free blocks are the GPU's where the engine `has_host_blocks` and
    may be from before TensorRT-LLM's pull request #15075.
    """
    figures = _of_largest_window(row) or _nested(row, "kvCacheStats")
    if figures is None:
        return None
    names = {"maxNumBlocks", "usedNumBlocks", "freeNumBlocks"}
    if has_host_blocks and _of_largest_window(row) is None:
        names = {"freeNumBlocks"}
    if _is_copy(row):
        names &= {"maxNumBlocks"}
    return {name: figures.get(name) for name in names}


def _is_copy(row: Row | None) -> bool:
    """Whether a row is rank 0's, with another rank's batch in it."""
    return bool(_count(row, "attentionDpRank"))


def _running(row: Row | None, batch: Row | None) -> int | None:
    """Requests that the rank of a row has taken up."""
    if not _is_copy(row):
        return _count(row, "numActiveRequests")
    counts = [_count(batch, f"num{kind}Requests") for kind in ("Context", "Gen", "Paused")]
    return None if None in counts else sum(count or 0 for count in counts)


def _used_blocks(cache: Row | None, blocks_per_rank: int | None) -> int | None:
    """Blocks of a rank that requests refer to, from the figures of `kv_cache`."""
    used, free = _count(cache, "usedNumBlocks"), _count(cache, "freeNumBlocks")
    if used is None and free is not None and blocks_per_rank is not None:
        return max(0, blocks_per_rank - free)
    return used


def _of_largest_window(row: Row | None) -> Row | None:
    windows = _nested(row, "kvCacheIterationStats") or {}
    sizes = {int(key): key for key in windows if isinstance(key, str) and key.isdecimal()}
    largest = _nested(windows, sizes[max(sizes)]) if sizes else None
    if largest is None:
        return None
    return {f"{name}NumBlocks": largest.get(f"primary{name.title()}NumBlocks") for name in _FIGURES}


def attribute(count: int) -> int | str:
    """A count as a value for a Struct: text where a double would not be exact."""
    return count if abs(count) <= MAX_EXACT else str(count)


def _fill(message: Any, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None:
            setattr(message, name, value)


def _nested(row: Row | None, name: str) -> Row | None:
    nested = None if row is None else row.get(name)
    return nested if isinstance(nested, Mapping) else None


def _count(row: Row | None, name: str) -> int | None:
    value = None if row is None else row.get(name)
    usable = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if usable else None


def _sum(rows: Any, name: str) -> int | None:
    """The sum over the rows that have the name; None where no row has it."""
    counts = [count for row in rows if (count := _count(row, name)) is not None]
    return sum(counts) if counts else None


def _total(rows: list[Row | None], names: tuple[str, ...], *, idle: bool) -> int | None:
    """The sum of all names over all rows, or 0 if `idle`; None where some name is in no row."""
    sums = [_sum(rows, name) for name in names]
    known = [count for count in sums if count is not None]
    if not known or len(known) < len(sums):
        return None
    return 0 if idle else sum(known)
