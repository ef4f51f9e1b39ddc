"""Turns the KV cache events that were polled of TensorRT-LLM into a sequence of checked changes.

The engine's events are dicts whose shape differs between versions, in one stream for all attention-DP
ranks and all attention windows, with ids that jump where its bounded buffer overflowed. The changes are
those of full blocks of the widest window, in the engine's order. An event that cannot be understood makes
the published cache smaller than the real one, never larger.

The parts of an event are checked in this order:

    id       counts from 0 for each rank; a lower one than expected is old, a higher one means lost events,
             and as no engine can be asked for a snapshot, the rank starts over with `Cleared`
    window   a block is announced once for each window size; prefixes are reused from the widest one;
             newer engines announce it once for each group of layers, of which one is used
    content  `stored`, `removed` and `updated`, which is a move between the tiers; see below
"""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from slagate.workers.kv_events.changes import Block, Moved, Removed, Stored
from slagate.workers.kv_events.fields import (
    HASH_WORK,
    TURN_WORK,
    UnusableError,
    content_of,
    hash_of,
    list_of,
    plain_contents,
    text_of,
    unusable,
)
from slagate.workers.kv_events.rank_state import Changes, Normaliser, RankState
from slagate.workers.kv_events.wire import MEDIUM_OF_LEVEL

MAX_PARTIAL = 65_536
"""Partial blocks remembered of each rank; the removal of a forgotten one is that of an unknown block."""

_MAX_EVENT_ID = 1 << 63

_TURN_HASHES = TURN_WORK // HASH_WORK


class KvEventNormaliser(Normaliser):
    """Turns polled events into checked changes; a poll is an event, lists of events, or None."""

    def __init__(
        self, *, ranks: int, block_tokens: int, levels: Sequence[int] = range(len(MEDIUM_OF_LEVEL))
    ) -> None:
        """`levels` are those of `MEDIUM_OF_LEVEL` that the engine has, by its own numbers."""
        self._levels = levels
        counted = (
            "filtered_windows", "filtered_layer_groups", "ignored_updates", "partial_blocks",
        )  # fmt: skip
        super().__init__(ranks=ranks, block_tokens=block_tokens, numbered="events", counted=counted)

    @override
    def _items(self, polled: object) -> list[dict[str, Any]]:
        if polled is None:
            return []
        events: list[dict[str, Any]] = []
        for entry in polled if isinstance(polled, list | tuple) else (polled,):
            for event in entry if isinstance(entry, list | tuple) else (entry,):
                if isinstance(event, dict):
                    events.append(event)
                else:
                    self.counts["decode_errors"] += 1
        return events

    @override
    def _changes_of(self, event: dict[str, Any]) -> Changes:
        number, event_id = event.get("attention_dp_rank"), event.get("event_id")
        number = 0 if number is None else number
        if type(number) is not int or not 0 <= number < len(self._ranks):
            unusable()
        if type(event_id) is not int or not 0 <= event_id < _MAX_EVENT_ID:
            unusable()
        rank = self._ranks[number]
        yield from self._check_number(rank, event_id)
        yield from self._filtered(event, rank)

    def _filtered(self, event: dict[str, Any], rank: RankState) -> Changes:
        data, window = event.get("data"), event.get("window_size")
        if not isinstance(data, dict):
            yield from rank.lost()
            unusable()
        kind = data.get("type")
        is_created = kind == "created"
        if window is not None:
            if type(window) is not int:
                if kind != "stored":
                    yield from rank.lost()
                unusable()
            if window > rank.window and (is_created or not rank.window_is_named):
                rank.window, rank.group = window, None
                if not rank.is_empty:
                    yield rank.clear()
            if window != rank.window and not is_created:
                unusable("filtered_windows")
        if window == rank.window or window is None:
            yield from rank.of_group(event)
        if is_created:
            rank.window_is_named |= window is not None
        elif kind == "stored":
            yield from self._stored(data, rank)
        elif kind == "removed":
            yield from self._removed(data, rank)
        elif kind == "updated":
            yield from self._updated(data, rank)
        else:
            unusable()

    def _stored(self, data: dict[str, Any], rank: RankState) -> Changes:
        """A change for each run of blocks on one level; none where the first block is not a full one.

        A block that cannot be used ends the chain. The blocks before it are kept, as the engine will not
        announce them again.
        """
        parent = data.get("parent_hash")
        parent = None if parent is None else hash_of(parent)
        names, salts = {text_of(data.get("lora_name"))}, {text_of(data.get("cache_salt"))}
        runs: list[tuple[int, list[Block]]] = []
        entries, plain = list_of(data.get("blocks")), list[bytes]()
        for n_read, entry in enumerate(entries):
            at = n_read % self._turn_blocks
            if at == 0:
                if n_read:
                    yield None
                turn = entries[n_read : n_read + self._turn_blocks]
                plain = plain_contents(turn, self._block_tokens)
            if not isinstance(entry, dict):
                unusable()
            tokens = list_of(entry.get("tokens"))
            if len(tokens) > self._block_tokens:
                unusable("dropped_events")
            try:
                hash_ = hash_of(entry.get("block_hash"))
                if len(tokens) < self._block_tokens:
                    self._remember_partial(rank, hash_)
                    break
                level = self._level_of(entry.get("cache_level", 0))
                if level is None:
                    unusable("dropped_events")
                salt, name = text_of(entry.get("cache_salt")), text_of(entry.get("lora_name"))
                if plain and entry.get("mm_keys") in (None, []):
                    block = Block(hash_, plain[at], ())
                else:
                    block = Block(hash_, *content_of(tokens, entry.get("mm_keys")))
            except UnusableError as error:
                # The blocks after one that is left out would have no parent.
                self.counts[str(error)] += 1
                break
            salts.add(salt)
            names.add(name)
            rank.partial.pop(hash_, None)
            if not runs or runs[-1][0] != level or len(runs[-1][1]) == self._turn_blocks:
                runs.append((level, []))
            runs[-1][1].append(block)
        salt, lora_name = _only(salts), _only(names)
        for level, blocks in runs:
            rank.is_empty = False
            yield Stored(rank.number, parent, tuple(blocks), level, lora_name, salt)
            parent = blocks[-1].hash
            if len(blocks) == self._turn_blocks:
                yield None

    def _remember_partial(self, rank: RankState, hash_: int) -> None:
        self.counts["partial_blocks"] += 1
        rank.partial[hash_] = None
        if len(rank.partial) > MAX_PARTIAL:
            del rank.partial[next(iter(rank.partial))]

    def _removed(self, data: dict[str, Any], rank: RankState) -> Changes:
        values = data.get("block_hashes")
        if not isinstance(values, list):
            # Some blocks are gone, and it is not known which.
            yield rank.clear()
            unusable()
        for start in range(0, len(values), _TURN_HASHES):
            if start:
                yield None
            hashes = []
            for value in values[start : start + _TURN_HASHES]:
                try:
                    hash_ = hash_of(value)
                except UnusableError:
                    yield rank.clear()
                    raise
                if hash_ in rank.partial:
                    del rank.partial[hash_]
                else:
                    hashes.append(hash_)
            if hashes:
                yield Removed(rank.number, tuple(hashes))

    def _updated(self, data: dict[str, Any], rank: RankState) -> Changes:
        diff = data.get("cache_level")
        if diff is None:
            unusable("ignored_updates")
        try:
            hash_ = hash_of(data.get("block_hash"))
        except UnusableError:
            yield from rank.lost()
            raise
        if hash_ in rank.partial:
            return
        level = self._level_of(diff.get("new_value") if isinstance(diff, dict) else None)
        if level is not None:
            yield Moved(rank.number, hash_, level)
        else:
            # It is not on the tier where it was.
            yield Removed(rank.number, (hash_,))
            unusable("dropped_events")

    def _level_of(self, number: object) -> int | None:
        """The level that the engine has under this number."""
        if type(number) is not int or not 0 <= number < len(self._levels):
            return None
        return self._levels[number]


def _only(values: set[str]) -> str:
    """The one value that all blocks of an event have, or "". Raises `UnusableError` for two values."""
    values.discard("")
    if len(values) > 1:
        unusable("dropped_events")
    return values.pop() if values else ""
