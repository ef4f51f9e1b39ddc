"""Turns the KV events that an engine streams itself, in frames of ZMQ, into checked changes.

TensorRT-LLM's V2 cache manager can publish over ZMQ, in the framing of vLLM's publisher: a topic, the
batch's number in 8 bytes, and msgpack, `[timestamp, events, rank]`. Its events are maps with a `type`,
vLLM's are lists that begin with it; both are read. An event is about full blocks of one group of layers on
the GPU. A missing number means that a batch was lost, and the rank starts over with `Cleared`, as it does
where ids of polled events are missing.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from typing_extensions import override

from slagate.workers.kv_events.changes import Block, Change, Removed, Stored
from slagate.workers.kv_events.fields import (
    BLOCK_WORK,
    HASH_WORK,
    MAX_KEYS_BYTES,
    TURN_WORK,
    UnusableError,
    content_of_ids,
    hash_of,
    list_of,
    text_of,
    unusable,
)
from slagate.workers.kv_events.rank_state import Changes, Normaliser, RankState

END = (1 << 64) - 1
"""The number at the end of a replay: -1, in 8 bytes."""

_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""The fields of an event that is a list, in order; further ones are not used."""

_GPU = ("GPU", None)
_TURN_HASHES = TURN_WORK // HASH_WORK


class Batch(NamedTuple):
    """A message of a rank's socket; `events` is None if unreadable or another rank's."""

    rank: int
    number: int
    events: list[Any] | None


def batch_of(rank: int, frames: list[bytes], *, topic: str) -> Batch | None:
    """Decode a message of a rank's socket; None for one without a number, or of another topic.

    Replays of older publishers leave the topic out, and the end of a replay has an empty one.
    """
    if len(frames) not in (2, 3) or len(frames[-2]) != 8:
        return None
    number = int.from_bytes(frames[-2], "big")
    # A subscription also gets topics that only begin with this one.
    if len(frames) == 3 and topic and number != END and frames[0] != topic.encode():
        return None
    try:
        payload = msgspec.msgpack.decode(frames[-1]) if number != END else [0, []]
    except (msgspec.MsgspecError, RecursionError):
        return Batch(rank, number, None)
    if not isinstance(payload, list) or len(payload) < 2 or not isinstance(payload[1], list):
        return Batch(rank, number, None)
    is_of_rank = len(payload) == 2 or payload[2] in (None, rank)
    return Batch(rank, number, payload[1] if is_of_rank else None)


class KvStreamNormaliser(Normaliser):
    """Turns lists of `Batch`, from the engine's own stream, into checked changes."""

    def __init__(self, *, ranks: int, block_tokens: int) -> None:
        counted = ("filtered_layer_groups", "filtered_media")
        super().__init__(
            ranks=ranks, block_tokens=block_tokens, numbered="batches", counted=counted
        )

    def next_number(self, rank: int) -> int:
        """The number that a rank's next batch has, unless batches are lost."""
        return self._ranks[rank].numbering.next

    @override
    def _items(self, polled: object) -> list[Batch]:
        assert isinstance(polled, list)
        return polled

    @override
    def _changes_of(self, batch: Batch) -> Changes:
        rank = self._ranks[batch.rank]
        yield from self._check_number(rank, batch.number)
        if batch.events is None:
            self.counts["decode_errors"] += 1
            yield from rank.lost()
            return
        work = 0
        for event in batch.events:
            try:
                for change in self._of_event(event, rank):
                    work += self._work_of(change)
                    yield change
            except UnusableError as error:
                self.counts[str(error)] += 1
            if work >= TURN_WORK:
                work = 0
                yield None

    def _work_of(self, change: Change | None) -> int:
        if isinstance(change, Stored):
            return len(change.blocks) * (BLOCK_WORK + self._block_tokens)
        return HASH_WORK * len(change.hashes) if isinstance(change, Removed) else HASH_WORK

    def _of_event(self, event: object, rank: RankState) -> Changes:
        kind, fields = _named(event)
        # A missing group is group 0. An engine publishes the events of one group only.
        if fields.get("group_idx") not in (None, 0):
            unusable("filtered_layer_groups")
        if fields.get("medium") not in _GPU:
            unusable("filtered_media")
        if kind == "BlockStored":
            yield from self._stored(fields, rank)
        elif kind == "BlockRemoved":
            try:
                hashes = [hash_of(one) for one in list_of(fields.get("block_hashes"))]
            except UnusableError:
                # Some blocks are gone, and it is not known which.
                yield from rank.lost()
                raise
            for start in range(0, len(hashes), _TURN_HASHES):
                if start:
                    yield None
                yield Removed(rank.number, tuple(hashes[start : start + _TURN_HASHES]))
        else:
            yield rank.clear()

    def _stored(self, fields: Mapping[str, Any], rank: RankState) -> Changes:
        """One chain, in pieces of a turn's work; a block that cannot be used ends it."""
        size = self._block_tokens
        hashes, tokens = list_of(fields.get("block_hashes")), list_of(fields.get("token_ids"))
        extras = fields.get("extra_keys")
        extras = [None] * len(hashes) if extras is None else list_of(extras)
        lora_name, salt = text_of(fields.get("lora_name")), text_of(fields.get("cache_salt"))
        pictures = fields.get("mm_keys")
        pictures = [None] * len(hashes) if pictures is None else list_of(pictures)
        is_whole = fields.get("block_size") == size and len(tokens) == size * len(hashes)
        if not is_whole or {len(extras), len(pictures)} != {len(hashes)}:
            unusable("dropped_events")
        if fields.get("lora_id") is not None and not lora_name:
            # Without the adapter's name its blocks would pass for the base model's.
            unusable("dropped_events")
        parent = fields.get("parent_block_hash")
        parent = None if parent is None else hash_of(parent)
        for start in range(0, len(hashes), self._turn_blocks):
            if start:
                yield None
            blocks: list[Block] = []
            error: UnusableError | None = None
            for at in range(start, min(len(hashes), start + self._turn_blocks)):
                try:
                    ids = tokens[at * size : (at + 1) * size]
                    content = content_of_ids(ids, pictures[at], _extra_keys(extras[at]))
                    blocks.append(Block(hash_of(hashes[at]), *content))
                except UnusableError as raised:
                    error = raised
                    break
            if blocks:
                rank.is_empty = False
                yield Stored(rank.number, parent, tuple(blocks), 0, lora_name, salt)
                parent = blocks[-1].hash
            if error is not None:
                raise error


def _named(event: object) -> tuple[str, Mapping[str, Any]]:
    """The kind of an event and its fields by name. Raises `UnusableError` for another kind."""
    if isinstance(event, dict):
        kind, fields = event.get("type"), event
    elif isinstance(event, list) and event and isinstance(event[0], str):
        kind = event[0]
        fields = dict(zip(_FIELDS.get(kind, ()), event[1:], strict=False))
    else:
        unusable()
    if not isinstance(kind, str) or kind not in _FIELDS:
        unusable()
    return kind, fields


def _extra_keys(values: object) -> tuple[str, ...]:
    """The other inputs of a block's hash, which only the engine understands: as they came, in JSON."""
    if values is None:
        return ()
    try:
        text = msgspec.json.encode(list_of(values)).decode()
    except (TypeError, ValueError, RecursionError):  # a key that is no text, half a surrogate pair
        unusable("dropped_events")
    if len(text) > MAX_KEYS_BYTES:
        unusable("dropped_events")
    return (f"extra={text}",)
