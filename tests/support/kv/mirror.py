"""A dumb consumer of KV event streams that insists on everything a publisher promises."""

from typing import NamedTuple

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call
from slagate.proto.rpc.status import Metadata, Status
from slagate.workers.kv_events.feed import KvFeed

LEVEL_OF_MEDIUM = {
    oe.STORAGE_MEDIUM_GPU: 0,
    oe.STORAGE_MEDIUM_CPU_PINNED: 1,
    oe.STORAGE_MEDIUM_DISK: 2,
}


class Content(NamedTuple):
    parent: int | None
    tokens: tuple[int, ...]
    lora_name: str
    keys: tuple[str, ...]


def number_of(hash_: oe.KvBlockHash) -> int:
    assert hash_.encoding == "int64"
    assert len(hash_.value) == 8
    return int.from_bytes(hash_.value, "big")


class RankMirror:
    """What one rank holds, by tier; `next_number` None: any batch may come first."""

    def __init__(self) -> None:
        self.next_number: int | None = None
        self.tiers: dict[int, dict[int, Content]] = {0: {}, 1: {}, 2: {}}

    def content(self, hash_: int) -> Content | None:
        found = [tier[hash_] for tier in self.tiers.values() if hash_ in tier]
        return found[0] if found else None

    def resident(self) -> dict[int, int]:
        """Hash -> level; fails when a block is on several, or without its parent."""
        held = {hash_: level for level in self.tiers for hash_ in self.tiers[level]}
        assert len(held) == sum(map(len, self.tiers.values())), "on two tiers"
        for level, blocks in self.tiers.items():
            for hash_, content in blocks.items():
                assert content.parent is None or content.parent in held, (hash_, level)
        return held

    def apply(self, batch: oe.KvEventBatch) -> None:
        assert self.next_number in (None, batch.sequence_number), "a hole or a repetition"
        self.next_number = batch.sequence_number + 1
        for event in batch.events:
            kind = event.WhichOneof("event")
            if kind == "block_stored":
                self.store(event.block_stored)
            elif kind == "block_removed":
                tier = self.tiers[LEVEL_OF_MEDIUM[event.block_removed.medium]]
                assert event.block_removed.block_hashes
                for hash_ in event.block_removed.block_hashes:
                    assert tier.pop(number_of(hash_), None), "removed where it was not"
            else:
                assert kind == "all_blocks_cleared"
                self.tiers = {0: {}, 1: {}, 2: {}}
        self.resident()

    def store(self, stored: oe.BlockStored) -> None:
        n_blocks, size = len(stored.block_hashes), stored.block_size
        assert n_blocks
        assert size
        assert len(stored.token_ids) == n_blocks * size
        assert len(stored.extra_keys) in (0, n_blocks)
        assert [stored.group_idx, stored.kv_cache_spec_kind, stored.lora_id] == [0, "", 0]
        parent = None
        if stored.HasField("parent_block_hash"):
            parent = number_of(stored.parent_block_hash)
            assert self.content(parent), "a child before its parent"
        tier = self.tiers[LEVEL_OF_MEDIUM[stored.medium]]
        for i, hash_ in enumerate(map(number_of, stored.block_hashes)):
            keys = tuple(stored.extra_keys[i].values) if stored.extra_keys else ()
            tokens = tuple(stored.token_ids[i * size : (i + 1) * size])
            content = Content(parent, tokens, stored.lora_name, keys)
            assert self.content(hash_) in (None, content), "other content under a hash in use"
            tier[hash_] = content
            parent = hash_


class KvMirror:
    """Follows one rank after the other, or several, over any number of streams in a row."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankMirror] = {}

    def rank(self, rank: int = 0) -> RankMirror:
        return self.ranks.setdefault(rank, RankMirror())

    def resident(self, rank: int = 0) -> dict[int, int]:
        return self.rank(rank).resident()

    def resume(self, feed: KvFeed, rank: int = 0, metadata: Metadata = ()) -> "KvStream":
        """Replay from where this mirror stands; raises `Refused`."""
        start = self.rank(rank).next_number or 0
        return KvStream(self, feed, ranks=[rank], start=start, metadata=metadata)

    def restart(self, feed: KvFeed, *ranks: int) -> "KvStream":
        """Begin with a snapshot, of all ranks unless some are named."""
        for rank in ranks or tuple(self.ranks):
            self.rank(rank).next_number = None
        return KvStream(self, feed, ranks=list(ranks), snapshot=True)


class KvStream:
    """One subscription: a sink that feeds a mirror, and its `call`."""

    def __init__(
        self,
        mirror: KvMirror,
        feed: KvFeed,
        *,
        ranks: list[int],
        start: int = 0,
        snapshot: bool = False,
        metadata: Metadata = (),
    ) -> None:
        self.mirror = mirror
        self.batches: list[oe.KvEventBatch] = []
        self.n_bytes: list[int] = []
        self.error: oe.EngineError | None = None
        self.status: Status | None = None
        self.is_paused = False
        request = oe.SubscribeKvEventsRequest(
            data_parallel_ranks=ranks, include_snapshot=snapshot, start_sequence_number=start
        )
        self.call: Call = feed.subscribe(request.SerializeToString(), metadata, self)

    def message(self, data: bytes, /) -> None:
        assert self.status is None, "a message after the end"
        assert self.error is None, "a message after the error"
        assert not self.is_paused, "a message in a pause"
        assert len(data) < 1 << 20
        response = oe.SubscribeKvEventsResponse.FromString(data)
        self.n_bytes.append(len(data))
        if response.WhichOneof("event") == "error":
            self.error = response.error
            return
        self.batches.append(response.batch)
        self.mirror.rank(response.batch.data_parallel_rank).apply(response.batch)

    def finish(self, status: Status, /) -> None:
        assert self.status is None, "a second end"
        self.status = status

    def pause(self) -> None:
        self.is_paused = True
        self.call.pause()

    def resume(self) -> None:
        self.is_paused = False
        self.call.resume()

    @property
    def numbers(self) -> list[int]:
        return [batch.sequence_number for batch in self.batches]

    @property
    def kinds(self) -> list[str | None]:
        return [event.WhichOneof("event") for batch in self.batches for event in batch.events]
