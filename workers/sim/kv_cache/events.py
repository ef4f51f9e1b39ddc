"""KV cache events of the simulated engine, in the dict shape of TensorRT-LLM's polling API.

    cache -> KvEventRecorder (one per rank) -- flush, once per iteration --> KvEventQueue -> take_events

In the queue an event is a compact record. Its dict, with one dict per token, is made when it is taken, in
the shape of TensorRT-LLM's `KVCacheEventSerializer`.
"""

import asyncio
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import repeat
from typing import Any, NamedTuple

from slagate.workers.sim.kv_cache.blocks import TOKEN_BYTES

# The retention priority that TensorRT-LLM gives a block when the request names none.
DEFAULT_PRIORITY = 35
V1_BLOCK_KEY = "v1_block_key"
_TOKEN = {"type": "unique_token", "token_id": 0, "token_extra_id": 0}  # copied: that is the fastest


class EventDiff(NamedTuple):
    """A value of a block that an event changes."""

    old_value: int
    new_value: int


class KVCacheEventSerializer12:
    """`tensorrt_llm._utils.KVCacheEventSerializer` of 1.1 and 1.2: the part that differs since.

    It takes no None for what an event does not change, and so raises `AttributeError` for every move of a
    block, which leaves the priority as it is (id 52995752 `_event_diff_to_json`; issue #4666).
    """

    @staticmethod
    def _event_diff_to_json(data: EventDiff | None) -> dict[str, Any] | None:
        return {
            "type": "event_diff",
            "new_value": data.new_value,  # type: ignore[union-attr]
            "old_value": data.old_value,  # type: ignore[union-attr]
        }


class KVCacheEventSerializer(KVCacheEventSerializer12):
    """That since 1.3.0rc6 (pull request #11576): what does not change is null."""

    @staticmethod
    def _event_diff_to_json(data: EventDiff | None) -> dict[str, Any] | None:
        return None if data is None else KVCacheEventSerializer12._event_diff_to_json(data)


class _Created(NamedTuple):
    window: int
    n_blocks: Sequence[int]

    def fields(self, recorder: "KvEventRecorder") -> dict[str, Any]:
        del recorder
        return {
            "type": "created",
            "num_blocks_per_cache_level": list(self.n_blocks),
        }


class _Stored(NamedTuple):
    window: int
    parent: bytes | None
    states: Sequence[bytes]
    packed: bytes
    cache_salt: str

    def fields(self, recorder: "KvEventRecorder") -> dict[str, Any]:
        size = recorder.block_tokens
        tokens = struct.unpack(f"<{len(self.packed) // TOKEN_BYTES}I", self.packed)
        shown = list(map(dict.copy, repeat(_TOKEN, len(tokens))))
        for one, token in zip(shown, tokens, strict=True):
            one["token_id"] = token
        blocks = []
        for i, state in enumerate(self.states):
            block: dict[str, Any] = {
                "type": "stored_block",
                "block_hash": recorder.spelled_hash(state),
                "tokens": shown[i * size : (i + 1) * size],
                "cache_level": 0,
                "priority": DEFAULT_PRIORITY,
            }
            if recorder.newest:
                block["mm_keys"] = []
                # The field is there with the V2 manager too, which never fills it in.
                block["cache_salt"] = None if recorder.is_v2 else self.cache_salt or None
            blocks.append(block)
        parent_hash = None if self.parent is None else recorder.spelled_hash(self.parent)
        return {"type": "stored", "parent_hash": parent_hash, "blocks": blocks}


class _Removed(NamedTuple):
    window: int
    states: Sequence[bytes]

    def fields(self, recorder: "KvEventRecorder") -> dict[str, Any]:
        hashes = [recorder.spelled_hash(state) for state in self.states]
        return {"type": "removed", "block_hashes": hashes}


class _Moved(NamedTuple):
    window: int
    state: bytes
    old_level: int
    new_level: int

    def fields(self, recorder: "KvEventRecorder") -> dict[str, Any]:
        diff = recorder.serializer._event_diff_to_json
        return {
            "type": "updated",
            "block_hash": recorder.spelled_hash(self.state),
            "cache_level": diff(EventDiff(self.old_level, self.new_level)),
            "priority": diff(None),
        }


_Record = _Created | _Stored | _Removed | _Moved


class _Batch(NamedTuple):
    """The events of one rank in one iteration; their ids count from `first_id`."""

    recorder: "KvEventRecorder"
    first_id: int
    records: Sequence[_Record]


class KvEventQueue:
    """Events of all ranks of an engine that were not taken yet.

    Beyond `max_events` the oldest are dropped and counted, which shows as a gap in the ids of a rank. With
    `max_events` 0 nothing is kept. They may be taken on any thread.

    Where a thread of the engine's process makes the dicts and puts them into a queue, `on_dispatch_error`
    is set: what one of them raises ends that thread, and no event comes any more.
    """

    def __init__(self, max_events: int) -> None:
        if max_events < 0:
            raise ValueError(f"max_events must be >= 0, got {max_events}")
        self.max_events = max_events
        self.n_dropped = 0
        self.on_dispatch_error: Callable[[Exception], None] | None = None
        self._is_dispatched = True
        # An entry is a batch, not an event: the garbage collector has less to visit in a full queue.
        self._batches: deque[_Batch] = deque()
        self._n_gone = 0  # events taken of the first batch
        self._n_events = 0
        self._lock = threading.Lock()
        self.arrivals = Arrivals()

    def put(self, batch: _Batch) -> None:
        """Add the events of one rank's iteration."""
        if not self.max_events or not self._dispatch(batch):
            return
        with self._lock:
            self._batches.append(batch)
            self._n_events += len(batch.records)
            excess = self._n_events - self.max_events
            if excess > 0:
                self.n_dropped += excess
                for _ in self._first(excess):
                    pass
        self.arrivals.announce()

    def _dispatch(self, batch: _Batch) -> bool:
        """Whether a batch gets into the queue."""
        if self.on_dispatch_error is not None and self._is_dispatched:
            try:
                for record in batch.records:
                    if isinstance(record, _Moved):  # no other one can fail
                        record.fields(batch.recorder)
            except AttributeError as error:
                self._is_dispatched = False
                self.on_dispatch_error(error)
        return self._is_dispatched

    def take_events(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Remove the oldest `limit` events, or all, and return them as dicts.

        Raises what the serializer raises; the events are gone then.
        """
        if not self._n_events:
            return []
        with self._lock:
            n = self._n_events if limit is None else min(limit, self._n_events)
            taken = list(self._first(n))
        return [
            _as_dict(batch.recorder, batch.first_id + i, batch.records[i])
            for batch, indices in taken
            for i in indices
        ]

    def _first(self, n_events: int) -> Iterator[tuple[_Batch, range]]:
        """Remove `n_events` from the front; yields each batch with the indices of its events."""
        self._n_events -= n_events
        while n_events:
            batch, start = self._batches[0], self._n_gone
            stop = min(start + n_events, len(batch.records))
            n_events -= stop - start
            self._n_gone = stop
            if stop == len(batch.records):
                self._batches.popleft()
                self._n_gone = 0
            yield batch, range(start, stop)


class KvEventRecorder:
    """Records the events of one rank's cache, in order, and keeps them until `flush`.

    A model with sliding-window layers has several `windows`; the largest covers the whole context. Every
    window announces the same blocks; a smaller one at once announces those in front of it as removed.
    `salt` makes this engine's hashes differ from those of others, and `rank` None leaves
    `attention_dp_rank` out. `newest` adds the keys of the newest TensorRT-LLM.

    With `is_v2` the events are those of the V2 cache manager: it names the group of layers, which is one
    for each window, never a salt, and spells hashes as `hash_algo` says (`_event_manager.py` id 68808230685
    `KVCacheEventManager`): `v2_sha256` are 64 hex digits, `v2_sha256_64` their first 16 as a number.
    """

    def __init__(
        self,
        queue: KvEventQueue,
        *,
        rank: int | None,
        windows: tuple[int, ...],
        block_tokens: int,
        salt: bytes,
        newest: bool,
        serializer: type[KVCacheEventSerializer12] = KVCacheEventSerializer,
        is_v2: bool = False,
        hash_algo: str = V1_BLOCK_KEY,
    ) -> None:
        if not windows or min(windows) < 1 or len({*windows}) < len(windows):
            raise ValueError(f"windows must be different and > 0, got {windows}")
        self.rank = rank
        self.windows = windows
        self.block_tokens = block_tokens
        self.newest = newest
        self.serializer = serializer
        self.is_v2 = is_v2
        self.hash_algo = hash_algo
        self._queue = queue
        self._keyed = blake2b(key=blake2b(salt, digest_size=32).digest(), digest_size=32)
        self._next_id = 0
        self._pending: list[_Record] = []
        # Removed blocks by window, to which more may be added until their event is made.
        self._removed: dict[int, list[bytes]] = {window: [] for window in windows}
        # Blocks announced and not removed, by window smaller than the largest.
        largest = max(windows)
        self._sliding: dict[int, set[bytes]] = {w: set() for w in windows if w != largest}

    def engine_hash(self, state: bytes) -> int:
        """This engine's unsigned 64-bit hash of a block."""
        return int.from_bytes(self._digest(state)[:8], "big")

    def spelled_hash(self, state: bytes) -> int | str:
        """The hash as events have it."""
        return (
            self._digest(state).hex() if self.hash_algo == "v2_sha256" else self.engine_hash(state)
        )

    def _digest(self, state: bytes) -> bytes:
        hasher = self._keyed.copy()
        hasher.update(state)
        return hasher.digest()

    def created(self, n_blocks: Sequence[int]) -> None:
        """Record that the pools exist, with this many blocks on each level: device, host, disk."""
        if not self.is_v2:
            # The V1 manager always has the two levels.
            n_blocks = (*n_blocks, 0)[:2]
        for window in self.windows:
            self._add(_Created(window, n_blocks))

    def stored(
        self,
        parent: bytes | None,
        states: Sequence[bytes],
        *,
        packed: bytes,
        cache_salt: str = "",
    ) -> None:
        """Record that blocks in these `states`, with `packed` tokens, are reusable on the device.

        `parent` is the state of the block in front of them, None at the root. Only the last block may
        be partly filled.
        """
        n_tokens = len(packed) // TOKEN_BYTES
        for window in self.windows:
            self._add(_Stored(window, parent, states, packed, cache_salt))
            live = self._sliding.get(window)
            if live is not None:
                n_out = max(0, n_tokens - window) // self.block_tokens
                self._removed[window].extend(states[:n_out])
                live.update(states[n_out:])

    def removed(self, state: bytes) -> None:
        """Record that a block is in no tier any more."""
        for window, removed in self._removed.items():
            live = self._sliding.get(window)
            if live is None:
                removed.append(state)
            elif state in live:
                live.remove(state)
                removed.append(state)

    def moved(self, state: bytes, old_level: int, new_level: int) -> None:
        """Record that a block moved between levels: 0 is the device, below it are the host and the disk."""
        for window in self.windows:
            live = self._sliding.get(window)
            if live is None or state in live:
                self._add(_Moved(window, state, old_level, new_level))

    def flush(self) -> None:
        """Put everything since the last call into the queue, with ids, at the end of an iteration."""
        for window in self.windows:
            self._close_removed(window)
        if self._pending:
            self._queue.put(_Batch(self, self._next_id, self._pending))
            self._next_id += len(self._pending)
            self._pending = []

    def _add(self, record: _Record) -> None:
        self._close_removed(record.window)
        self._pending.append(record)

    def _close_removed(self, window: int) -> None:
        if self._removed[window]:
            self._pending.append(_Removed(window, self._removed[window]))
            self._removed[window] = []


def _as_dict(recorder: KvEventRecorder, event_id: int, record: _Record) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "event_id": event_id,
        "data": record.fields(recorder),
        "window_size": record.window,
    }
    if recorder.rank is not None:
        shown["attention_dp_rank"] = recorder.rank
    if recorder.is_v2:
        shown["layer_group_id"] = recorder.windows.index(record.window)
    if recorder.newest:
        shown["hash_algo"] = recorder.hash_algo
    return shown


class Arrivals:
    """Lets pollers of a queue wait until something is added to it."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def announce(self) -> None:
        """Wake all waiting pollers."""
        for waiter in self._waiters:
            _complete(waiter)

    async def wait(self, timeout_s: float | None) -> None:
        """Return at the next announcement, or after `timeout_s` seconds; None is no limit."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, _complete, waiter)
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            self._waiters.discard(waiter)


def _complete(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
