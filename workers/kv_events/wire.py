"""The bytes of KV event messages, joined from parts that are encoded once.

A snapshot and the live stream have the same blocks, each as a `KvEvent` of its own or as part of a chain in
one `BlockStored`. In protobuf the fields of a message may come in any order, a repeated field in several
pieces, and an embedded message is its length and its bytes. So a block's fields are encoded when it is
stored, and joined later.

    KvEventBatch.events:  tag length KvEvent          `event`, what a writer and a mirror hold
    KvEvent:              tag length BlockStored
    BlockStored:          [parent] (hash tokens)* [extra keys]* (block size, adapter, medium)
                                    `core`         `keys`        `tail`, the medium last

A hash is the 8 bytes, big-endian, of its unsigned value, with the encoding "int64".
"""

from array import array
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

import msgspec
import numpy as np

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.varints import varint, varints

MEDIUM_OF_LEVEL = (
    oe.STORAGE_MEDIUM_GPU,
    oe.STORAGE_MEDIUM_CPU_PINNED,
    oe.STORAGE_MEDIUM_DISK,
)
"""By level. An engine may lack one of the lower ones, and then numbers its levels without it."""

MAX_BATCH_BYTES = 512 * 1024
"""Of the events of one batch: well under 1 MiB, the least that peers accept."""

_MAX_CHAIN_BYTES = 128 * 1024
_MAX_REMOVED = 4096

_HASH_BYTES = 8
_HASH_HEAD, _HASH_TAIL = (
    oe.KvBlockHash(value=bytes(_HASH_BYTES), encoding="int64")
    .SerializeToString()
    .split(bytes(_HASH_BYTES))
)


def _tag(field: int) -> bytes:
    """The tag of a length-delimited field."""
    return varint(field << 3 | 2)


_EVENTS = _tag(oe.KvEventBatch.EVENTS_FIELD_NUMBER)
_STORED = _tag(oe.KvEvent.BLOCK_STORED_FIELD_NUMBER)
_REMOVED = _tag(oe.KvEvent.BLOCK_REMOVED_FIELD_NUMBER)
_BATCH = _tag(oe.SubscribeKvEventsResponse.BATCH_FIELD_NUMBER)
_HASHES = _tag(oe.BlockStored.BLOCK_HASHES_FIELD_NUMBER)
_TOKENS = _tag(oe.BlockStored.TOKEN_IDS_FIELD_NUMBER)
_PARENT = _tag(oe.BlockStored.PARENT_BLOCK_HASH_FIELD_NUMBER)
_GONE_HASHES = _tag(oe.BlockRemoved.BLOCK_HASHES_FIELD_NUMBER)
_HASH_FRAME = varint(len(_HASH_HEAD) + _HASH_BYTES + len(_HASH_TAIL)) + _HASH_HEAD
_MEDIUM = [oe.BlockStored(medium=medium).SerializeToString() for medium in MEDIUM_OF_LEVEL]
_NO_KEYS = oe.BlockStored(extra_keys=[oe.OpaqueKeyTuple()]).SerializeToString()


def _framed(tag: bytes, body: bytes) -> bytes:
    return tag + varint(len(body)) + body


def _event(tag: bytes, body: bytes) -> bytes:
    return _framed(_EVENTS, _framed(tag, body))


CLEARED_EVENT = _event(_tag(oe.KvEvent.ALL_BLOCKS_CLEARED_FIELD_NUMBER), b"")


def response(payload: bytes, *, number: int, unix_nanos: int, rank: int) -> bytes:
    """The serialised `SubscribeKvEventsResponse` of a batch; `payload` is its joined events."""
    head = oe.KvEventBatch(
        sequence_number=number, timestamp_unix_nanos=unix_nanos, data_parallel_rank=rank
    ).SerializeToString()
    return _BATCH + varint(len(head) + len(payload)) + head + payload


@lru_cache(maxsize=1024)
def tail(block_tokens: int, lora_name: str, level: int) -> bytes:
    """The encoded fields that all blocks of a chain share."""
    shared = oe.BlockStored(block_size=block_tokens, lora_name=lora_name)
    return shared.SerializeToString() + _MEDIUM[level]


def token_field(ids: Iterable[int]) -> bytes:
    """A block's tokens as a part of `BlockStored`. Raises `ValueError` for a number beyond uint32."""
    return oe.BlockStored(token_ids=ids).SerializeToString()


def token_fields(ids: list[int], block_tokens: int) -> list[bytes]:
    """`token_field` of each block of a chain's tokens, without a message for each.

    Raises `OverflowError` for a number beyond uint32, `TypeError` for anything but integers.
    """
    packed = varints(np.frombuffer(array("I", ids), dtype=np.uint32))
    ends = packed.n_bytes.reshape(-1, block_tokens).sum(axis=1).cumsum().tolist()
    return [_framed(_TOKENS, packed.data[start:end]) for start, end in pairwise([0, *ends])]


class WireBlock(msgspec.Struct, frozen=True, gc=False):
    """The encoded fields of a block."""

    hash: int
    parent: int | None
    core: bytes  # hash and tokens
    keys: bytes  # extra keys, empty without any
    tail: bytes  # what `tail` gives, the same for its whole chain

    def event(self) -> bytes:
        """The encoded event that stores this block alone."""
        return _event(_STORED, _parent(self.parent) + self.core + self.keys + self.tail)


def wire_block(
    hash_: int, parent: int | None, tokens: bytes, *, keys: Iterable[str], shared: bytes
) -> WireBlock:
    """Encode a full block from its `token_field`, its extra keys, and its `tail`."""
    core = _HASHES + _hash_field(hash_) + tokens
    values = tuple(keys)
    extra = (
        oe.BlockStored(extra_keys=[oe.OpaqueKeyTuple(values=values)]).SerializeToString()
        if values
        else b""
    )
    return WireBlock(hash_, parent, core, extra, shared)


def level_of(event: bytes) -> int:
    """The level of a block, from its own event."""
    return MEDIUM_OF_LEVEL.index(event[-1])


def on_level(event: bytes, level: int) -> bytes:
    """A block's own event with another level."""
    return event[:-1] + _MEDIUM[level][-1:]


def _hash_field(value: int) -> bytes:
    return _HASH_FRAME + value.to_bytes(_HASH_BYTES, "big") + _HASH_TAIL


def _parent(value: int | None) -> bytes:
    return b"" if value is None else _PARENT + _hash_field(value)


class EventWriter:
    """Collects events, in order, into the payloads of as few batches as their size allows.

    Consecutive blocks of one chain share one `BlockStored`, consecutive removals from one level one
    `BlockRemoved`.
    """

    def __init__(self) -> None:
        self._payloads: list[bytes] = []
        self._events: list[bytes] = []
        self._n_bytes = 0
        self._chain: list[WireBlock] = []
        self._n_chain_bytes = 0
        self._gone: list[int] = []
        self._gone_level = 0

    def stored(self, block: WireBlock) -> None:
        """Add a block that is cached; directly after its parent it extends the parent's chain."""
        if self._gone:
            self._close()
        chain = self._chain
        if chain and (
            block.parent != chain[-1].hash
            or block.tail != chain[-1].tail
            or self._n_chain_bytes > _MAX_CHAIN_BYTES
        ):
            self._close()
            chain = self._chain
        chain.append(block)
        self._n_chain_bytes += len(block.core) + len(block.keys)

    def removed(self, hash_: int, level: int) -> None:
        """Add the removal of a block from a level."""
        if self._chain or level != self._gone_level or len(self._gone) >= _MAX_REMOVED:
            self._close()
        self._gone_level = level
        self._gone.append(hash_)

    def event(self, event: bytes) -> None:
        """Add an event that is encoded already."""
        self._close()
        self._push(event)

    def payloads(self) -> list[bytes]:
        """All events that were added, in payloads of at most `MAX_BATCH_BYTES`; called last."""
        self._close()
        self._end_payload()
        return self._payloads

    def _close(self) -> None:
        """Finish the event of the chain, or of the removals, that is being collected."""
        if self._chain:
            chain, self._chain, self._n_chain_bytes = self._chain, [], 0
            parts = [_parent(chain[0].parent), *(block.core for block in chain)]
            if any(block.keys for block in chain):
                # The i-th tuple belongs to the i-th block, so none may be missing.
                parts += [block.keys or _NO_KEYS for block in chain]
            parts.append(chain[0].tail)
            self._push(_event(_STORED, b"".join(parts)))
        if self._gone:
            gone, self._gone = self._gone, []
            parts = [_GONE_HASHES + _hash_field(hash_) for hash_ in gone]
            medium = oe.BlockRemoved(medium=MEDIUM_OF_LEVEL[self._gone_level])
            parts.append(medium.SerializeToString())
            self._push(_event(_REMOVED, b"".join(parts)))

    def _push(self, event: bytes) -> None:
        if self._n_bytes + len(event) > MAX_BATCH_BYTES:
            self._end_payload()
        self._events.append(event)
        self._n_bytes += len(event)

    def _end_payload(self) -> None:
        if self._events:
            self._payloads.append(b"".join(self._events))
            self._events, self._n_bytes = [], 0
