"""From what one poll of TensorRT-LLM's KV cache events gave to a sequence of checked changes.

The engine's events are dicts whose shape differs between versions, in one stream for all attention-DP
ranks and all attention windows, with ids that jump where its bounded buffer overflowed. What comes out
is about full blocks of the widest window only, in the engine's order, and errs on one side: a change
that cannot be understood makes the published cache smaller than the real one, never larger.

An event passes, in this order:

    id       per rank, from 0: lower than expected is old news; higher means lost events, and as no
             engine can be asked for a snapshot, the rank starts over with `Cleared`
    window   a block is announced once per window size; the widest is what prefixes can be reused from;
             newer engines announce it once per group of layers, of which one has to do
    content  `stored`, `removed` and `updated` (a move between the tiers), see below
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeGuard

from slagate.workers.kv_events.changes import Block, Change, Moved, Removed, Stored
from slagate.workers.kv_events.fields import (
    BLOCK_WORK,
    HASH_WORK,
    TURN_WORK,
    UnusableError,
    content_of,
    hash_of,
    list_of,
    text_of,
    unusable,
)
from slagate.workers.kv_events.rank_state import Losses, RankState
from slagate.workers.kv_events.wire import MEDIUM_OF_LEVEL

MAX_PARTIAL = 65_536
"""Partial blocks remembered per rank; the removal of a forgotten one counts as one of an unknown block."""

_MAX_EVENT_ID = 1 << 63

_TURN_HASHES = TURN_WORK // HASH_WORK

_Changes: TypeAlias = Iterator[Change | None]
"""None where a turn's work is done."""


class KvEventNormaliser:
    """Turns polls into changes. Whatever it is given it never raises.

    `counts` tells what was lost, `losses` what the engine lost of each rank.
    """

    def __init__(self, *, ranks: int, block_tokens: int) -> None:
        self._ranks = [RankState(rank) for rank in range(ranks)]
        self.losses = [Losses(rank) for rank in range(ranks)]
        self._block_tokens = block_tokens
        self._turn_blocks = max(1, TURN_WORK // (BLOCK_WORK + block_tokens))
        self.counts: Counter[str] = Counter(
            gaps=0,
            missed_events=0,
            old_events=0,
            decode_errors=0,
            dropped_events=0,
            filtered_windows=0,
            filtered_layer_groups=0,
            ignored_updates=0,
            partial_blocks=0,
        )

    def portions(self, polled: object) -> Iterator[list[Change]]:
        """The changes in one poll's answer: events, lists of events, a single event, or nothing.

        Only what is in an event of more than `TURN_WORK` comes in several portions, some of them empty.
        """
        portion: list[Change] = []
        for event in self._events(polled):
            try:
                for change in self._of_event(event):
                    if change is None:
                        yield portion
                        portion = []
                    else:
                        portion.append(change)
            except UnusableError as error:
                self.counts[str(error)] += 1
        yield portion

    def _events(self, polled: object) -> list[dict[str, Any]]:
        if polled is None:
            return []
        if not isinstance(polled, list | tuple):
            polled = [polled]
        events: list[dict[str, Any]] = []
        for entry in polled:
            for event in entry if isinstance(entry, list | tuple) else (entry,):
                if isinstance(event, dict):
                    events.append(event)
                else:
                    self.counts["decode_errors"] += 1
        return events

    def _of_event(self, event: dict[str, Any]) -> _Changes:
        number, event_id = event.get("attention_dp_rank"), event.get("event_id")
        number = 0 if number is None else number
        if type(number) is not int or not 0 <= number < len(self._ranks):
            unusable()
        if type(event_id) is not int or not 0 <= event_id < _MAX_EVENT_ID:
            unusable()
        rank = self._ranks[number]
        place = rank.numbering.place(event_id)
        if place.is_old:
            unusable("old_events")
        if place.is_gap:
            self.counts["gaps"] += 1
            self.counts["missed_events"] += place.n_missed
            self.losses[number].count_gap(place.n_missed)
            yield rank.clear()
        yield from self._filtered(event, rank, number)

    def _filtered(self, event: dict[str, Any], rank: RankState, number: int) -> _Changes:
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
            yield from self._stored(data, rank, number)
        elif kind == "removed":
            yield from self._removed(data, rank, number)
        elif kind == "updated":
            yield from self._updated(data, rank, number)
        else:
            unusable()

    def _stored(self, data: dict[str, Any], rank: RankState, number: int) -> _Changes:
        """One change per run of blocks on one level; none when no full block leads the event.

        A block that cannot be told ends the chain: those in front of it are as good as ever, and the
        engine will not announce them again.
        """
        parent = data.get("parent_hash")
        parent = None if parent is None else hash_of(parent)
        names, salts = {text_of(data.get("lora_name"))}, {text_of(data.get("cache_salt"))}
        runs: list[tuple[int, list[Block]]] = []
        for n_read, entry in enumerate(list_of(data.get("blocks"))):
            if n_read and n_read % self._turn_blocks == 0:
                yield None
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
                level = entry.get("cache_level", 0)
                if not _is_level(level):
                    unusable("dropped_events")
                salt, name = text_of(entry.get("cache_salt")), text_of(entry.get("lora_name"))
                block = Block(hash_, *content_of(tokens, entry.get("mm_keys")))
            except UnusableError as error:
                # Whatever comes after a block that is left out would have no parent.
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
            yield Stored(number, parent, tuple(blocks), level, lora_name, salt)
            parent = blocks[-1].hash
            if len(blocks) == self._turn_blocks:
                yield None

    def _remember_partial(self, rank: RankState, hash_: int) -> None:
        self.counts["partial_blocks"] += 1
        rank.partial[hash_] = None
        if len(rank.partial) > MAX_PARTIAL:
            del rank.partial[next(iter(rank.partial))]

    def _removed(self, data: dict[str, Any], rank: RankState, number: int) -> _Changes:
        values = data.get("block_hashes")
        if not isinstance(values, list):
            # Something is gone and nobody knows what.
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
                yield Removed(number, tuple(hashes))

    def _updated(self, data: dict[str, Any], rank: RankState, number: int) -> _Changes:
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
        level = diff.get("new_value") if isinstance(diff, dict) else None
        if _is_level(level):
            yield Moved(number, hash_, level)
        else:
            # It has left the tier it was on.
            yield Removed(number, (hash_,))
            unusable("dropped_events")


def _only(values: set[str]) -> str:
    """What all blocks of one event say, which may be nothing. Raises `UnusableError` for two things."""
    values.discard("")
    if len(values) > 1:
        unusable("dropped_events")
    return values.pop() if values else ""


def _is_level(value: object) -> TypeGuard[int]:
    return type(value) is int and value in range(len(MEDIUM_OF_LEVEL))
