"""One rank's KV events as they are published: numbered batches, of which the newest are kept for replay.

Batches are numbered from 0 without a gap; their bytes are shared by all subscribers. A snapshot has numbers
of the same sequence: its last batch has the newest number, so that the next published batch follows it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate

from slagate.workers.kv_events.changes import Change, Moved, Removed, Stored
from slagate.workers.kv_events.mirror import Mirror
from slagate.workers.kv_events.wire import (
    CLEARED_EVENT,
    MAX_BATCH_BYTES,
    EventWriter,
    response,
    tail,
    wire_block,
)


class RankLog:
    """A rank's published blocks (`mirror`), and its batches `oldest` to `newest`, -1 at first."""

    def __init__(
        self, rank: int, *, block_tokens: int, history_batches: int, history_bytes: int
    ) -> None:
        self._rank = rank
        self._block_tokens = block_tokens
        self._max_batches = history_batches
        self._max_bytes = history_bytes
        self._batches: dict[int, bytes] = {}
        self._n_bytes = 0
        self.mirror = Mirror()
        self.oldest = 0
        self.newest = -1

    def apply(self, changes: Iterable[Change], unix_nanos: int) -> bool:
        """Publish changes of this rank. Returns false where nothing changed for subscribers."""
        writer = EventWriter()
        for change in changes:
            if isinstance(change, Stored):
                self._store(change, writer)
            elif isinstance(change, Removed):
                for hash_ in change.hashes:
                    self.mirror.remove(hash_, writer)
            elif isinstance(change, Moved):
                self.mirror.move(change.hash, change.level, writer)
            else:
                self.mirror.clear(writer)
        payloads = writer.payloads()
        for payload in payloads:
            self.publish(payload, unix_nanos)
        return bool(payloads)

    def _store(self, change: Stored, writer: EventWriter) -> None:
        shared = tail(self._block_tokens, change.lora_name, change.level)
        salt = (f"cache_salt={change.cache_salt}",) if change.cache_salt else ()
        parent = change.parent
        for block in change.blocks:
            self.mirror.store(
                wire_block(block.hash, parent, block.tokens, keys=salt + block.keys, shared=shared),
                writer,
            )
            parent = block.hash

    def publish(self, payload: bytes, unix_nanos: int) -> None:
        """Number a batch of encoded events and keep it for replay; an empty one is a heartbeat."""
        self.newest += 1
        message = response(payload, number=self.newest, unix_nanos=unix_nanos, rank=self._rank)
        self._batches[self.newest] = message
        self._n_bytes += len(message)
        while len(self._batches) > self._max_batches or self._n_bytes > self._max_bytes:
            self._n_bytes -= len(self._batches.pop(self.oldest))
            self.oldest += 1

    def batch(self, number: int) -> bytes:
        """The encoded response with a batch; `number` must be from `oldest` to `newest`."""
        return self._batches[number]

    def snapshot(self, unix_nanos: int) -> Iterator[bytes]:
        """Encoded responses that bring a subscriber, whatever it has, to what is published now.

        The last one has the number `newest`; if there are more of them than batches so far, empty
        batches are published first. A response is encoded when the iterator reaches it.
        """
        events = list(self.mirror.visible.values())
        ends = list(accumulate(map(len, events), initial=0))
        cuts = [0]
        while len(cuts) == 1 or cuts[-1] < len(events):
            # ends[i] is the number of bytes before event i; an event is far smaller than a batch.
            cuts.append(bisect_right(ends, ends[cuts[-1]] + MAX_BATCH_BYTES) - 1)
        n_batches = len(cuts) - 1
        while self.newest < n_batches - 1:
            self.publish(b"", unix_nanos)
        return self._messages(events, cuts, self.newest - n_batches + 1, unix_nanos)

    def _messages(
        self, events: list[bytes], cuts: list[int], first: int, unix_nanos: int
    ) -> Iterator[bytes]:
        for number, start in enumerate(cuts[:-1], first):
            end = cuts[number - first + 1]
            payload = b"".join(events[start:end])
            if number == first:
                payload = CLEARED_EVENT + payload
            yield response(payload, number=number, unix_nanos=unix_nanos, rank=self._rank)
