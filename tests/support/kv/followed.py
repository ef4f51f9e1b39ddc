"""A worker whose KV events are followed, what it says as messages, and what the index makes of it."""

import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np

from slagate.pools.kv_events.follower import WorkerFollower
from slagate.pools.kv_events.view import EventView
from slagate.pools.prefix.holder import Holder
from slagate.pools.prefix.index import PrefixIndex
from slagate.pools.prefix.trie import Root
from slagate.proto import openengine_pb2 as oe
from slagate.workers.runtime.cooperative import CooperativeScheduler
from slagate.workers.worker import Worker
from support.builders import rng
from support.worker.fake import HANG, FakeWorker, Script

BLOCK_TOKENS = 4
EPOCH_S = 1_000_000.0
"""What the Unix clock says at virtual time 0."""

SETTLE_S = 0.01
"""Long enough for everything that does not wait, too short for any retry."""


def unix_s() -> float:
    return EPOCH_S + anyio.current_time()


def info(instance_id: str = "i1", *, ranks: int = 1, block_tokens: int = BLOCK_TOKENS) -> Any:
    return oe.ServerInfo(
        instance_id=instance_id,
        capacity=oe.DeploymentCapacity(kv_block_size=block_tokens),
        parallelism=oe.ParallelismInfo(data_parallel_size=ranks),
    )


def tokens_of(*blocks: int, size: int = BLOCK_TOKENS) -> list[int]:
    """Token ids of blocks that are told apart by a number each."""
    return [block * 1000 + at for block in blocks for at in range(size)]


def packed(*blocks: int, size: int = BLOCK_TOKENS) -> bytes:
    ids = tokens_of(*blocks, size=size)
    return struct.pack(f"<{len(ids)}I", *ids)


def name(hash_: int | bytes, encoding: str = "int64") -> oe.KvBlockHash:
    value = hash_ if isinstance(hash_, bytes) else (hash_ % 2**64).to_bytes(8, "big")
    return oe.KvBlockHash(value=value, encoding=encoding)


def names(hashes: Iterable[int | oe.KvBlockHash]) -> list[oe.KvBlockHash]:
    return [name(hash_) if isinstance(hash_, int) else hash_ for hash_ in hashes]


def stored(
    *hashes: int | oe.KvBlockHash,
    after: int | oe.KvBlockHash | None = None,
    tokens: Sequence[int] | None = None,
    keys: Sequence[Sequence[str]] = (),
    **more: Any,
) -> oe.KvEvent:
    """A chain of blocks; the tokens of block n are `tokens_of(n)` unless they are given."""
    if tokens is None:
        tokens = tokens_of(*(hash_ for hash_ in hashes if isinstance(hash_, int)))
    more = {"block_size": BLOCK_TOKENS, "medium": oe.STORAGE_MEDIUM_GPU} | more
    event = oe.BlockStored(block_hashes=names(hashes), token_ids=tokens, **more)
    event.extra_keys.extend(oe.OpaqueKeyTuple(values=values) for values in keys)
    if after is not None:
        event.parent_block_hash.CopyFrom(names([after])[0])
    return oe.KvEvent(block_stored=event)


def removed(*hashes: int | oe.KvBlockHash, **more: Any) -> oe.KvEvent:
    return oe.KvEvent(block_removed=oe.BlockRemoved(block_hashes=names(hashes), **more))


CLEARED = oe.KvEvent(all_blocks_cleared=oe.AllBlocksCleared())


def batch(
    number: int, *events: oe.KvEvent, rank: int = 0, at_s: float = 0.0
) -> oe.SubscribeKvEventsResponse:
    """A batch; without events it is a heartbeat. `at_s` is the virtual time of its publication."""
    return oe.SubscribeKvEventsResponse(
        batch=oe.KvEventBatch(
            sequence_number=number,
            timestamp_unix_nanos=int((EPOCH_S + at_s) * 1e9),
            data_parallel_rank=rank,
            events=events,
        )
    )


def engine_error(code: oe.ErrorCode.ValueType) -> oe.SubscribeKvEventsResponse:
    return oe.SubscribeKvEventsResponse(error=oe.EngineError(code=code, message="no"))


@dataclass
class Followed:
    """One worker being followed."""

    worker: Worker
    index: PrefixIndex
    turns: CooperativeScheduler
    events: EventView = field(init=False)
    follower: WorkerFollower = field(init=False)
    holders: list[tuple[int, Holder | None]] = field(default_factory=list)  # as they were told
    n_served: int = 0

    def __post_init__(self) -> None:
        self.events = EventView("w1:1", unix_s=unix_s)
        self.follower = WorkerFollower(
            self.worker,
            self.events,
            index_of=self._index_of,
            on_holder=lambda rank, holder: self.holders.append((rank, holder)),
            n_served=lambda: self.n_served,
            scheduler=self.turns,
            rng=rng(),
        )

    def _index_of(self, block_tokens: int) -> PrefixIndex:
        assert block_tokens == self.index.block_tokens
        return self.index

    def holder(self, rank: int = 0) -> Holder | None:
        return self.events.ranks[rank].holder

    def depth(
        self, *blocks: int, rank: int = 0, root: Root | None = None, device: bool = False
    ) -> int:
        """Leading blocks of a prompt that the rank is believed to have."""
        match = self.index.match(packed(*blocks), root or Root())
        return depth_of(match, self.holder(rank), device=device)


def depth_of(match: Any, holder: Holder | None, *, device: bool = False) -> int:
    bits = np.array([-1 if holder is None else holder.bit], dtype=np.int32)
    return int((match.both_depths(bits)[1] if device else match.depths(bits))[0])


@asynccontextmanager
async def followed(
    worker: Worker,
    *,
    ranks: int = 1,
    instance_id: str = "i1",
    index: PrefixIndex | None = None,
    turns: CooperativeScheduler | None = None,
) -> AsyncIterator[Followed]:
    """Follow a worker for the time of the block; it has said who it is, and had a moment to answer."""
    of = Followed(worker, index or PrefixIndex(BLOCK_TOKENS), turns or CooperativeScheduler())
    of.follower.identified(info(instance_id, ranks=ranks))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(of.follower.run)
        await anyio.sleep(SETTLE_S)
        yield of
        tasks.cancel_scope.cancel()
    assert not of.turns.n_errors


def saying(*scripts: Script) -> FakeWorker:
    """A worker that answers its subscriptions like this, one after the other, the last one for ever."""
    return FakeWorker(kv_scripts=[(*script, HANG) for script in scripts])
