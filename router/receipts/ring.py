"""The newest receipts of a gateway, kept in memory for readers.

A request that ends costs no more than an entry here: its receipt is made when somebody reads it. Readers
hold nothing up: one that falls behind goes on at the oldest entry, and is told how many it missed.

Entries live long, and are no work for the garbage collector: they are made of values without cycles
(`gc=False`), arrays and exact tuples only.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

import anyio
import msgspec

from slagate.proto import gateway_pb2 as gw
from slagate.router.receipts.attainment import Attainment
from slagate.router.receipts.record import ReceiptNumber, Record
from slagate.router.request.errors import Outcome
from slagate.router.scheduling.policy import StageChoice
from slagate.workers.runtime.cooperative import Steps

MAX_RECEIPTS = 2048
MAX_BYTES = 64 << 20
"""Of memory; with two pools of a thousand workers this limit is reached before the other."""

RECEIPT_BYTES, CHOICE_BYTES, ROW_BYTES = 4096, 4096, 280
"""Estimated memory of an entry: for itself, for each choice, for each row that a choice looked at."""


class EndedRequest(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One request that has ended: its record, from which the receipt is made when somebody reads it."""

    record: Record
    outcome: Outcome
    ended_s: float
    stamp: ReceiptNumber
    n_bytes: int  # of memory, an estimate

    @property
    def configs(self) -> list[gw.GatewayConfig]:
        """The configurations that the request's choices were made under, each once."""
        return _configs(self.record.choices)

    def receipt(self) -> Steps[gw.Receipt]:
        """Make the full receipt, in steps."""
        return self.record.full(self.outcome, self.ended_s, self.stamp)


class ReceiptRing:
    """Keeps the newest ended requests: at most `max_receipts`, and `max_bytes` of memory."""

    def __init__(
        self,
        config: gw.GatewayConfig,
        *,
        unix_s: Callable[[], float],
        max_receipts: int = MAX_RECEIPTS,
        max_bytes: int = MAX_BYTES,
        number: Callable[[int], int] = int,
    ) -> None:
        """`config` is in force. `number` makes a receipt's number of its place here, counted from 1."""
        self.config = config
        self.attainment = Attainment(config.version)
        self.n_bytes = 0
        self._unix_s = unix_s
        self._number = number
        self._max_receipts = max_receipts
        self._max_bytes = max_bytes
        self._entries: deque[EndedRequest] = deque()
        self._next_number = 1
        self._last_version = ""
        self._closed = False
        self._news: anyio.Event | None = None  # somebody waits for it

    def __len__(self) -> int:
        return len(self._entries)

    def put_in_force(self, config: gw.GatewayConfig) -> None:
        """Set the configuration that requests are decided under from now on."""
        self.config = config
        if config.version != self.attainment.version:
            self.attainment.restart(config.version)

    def add_receipt(self, record: Record, outcome: Outcome, now_s: float) -> ReceiptNumber:
        """Keep the record of an ended request, which must not change any more; returns its number."""
        decided = record.decision
        version = (self.config if decided is None else decided.stages[-1].config).version
        stamp = ReceiptNumber(self._number(self._next_number), self._unix_s(), version)
        self.attainment.count(record, outcome)
        choices = record.choices
        if decided is not None and decided.untaken:
            choices += decided.untaken
        n_rows = sum(len(scored.pool.rows.names) for choice in choices for scored in choice.scored)
        n_bytes = RECEIPT_BYTES + CHOICE_BYTES * len(choices) + ROW_BYTES * n_rows
        if version != self._last_version and decided is not None:
            # Receipts of one version share its configuration: the first one of each is charged for it.
            self._last_version = version
            n_bytes += sum(config.ByteSize() for config in _configs(choices))
        self._next_number += 1
        self._entries.append(EndedRequest(record, outcome, now_s, stamp, n_bytes))
        self.n_bytes += n_bytes
        while len(self._entries) > self._max_receipts or self.n_bytes > self._max_bytes:
            self.n_bytes -= self._entries.popleft().n_bytes
        if self._news is not None:
            self._wake_watchers()
        return stamp

    def end_watches(self) -> None:
        """End each `watch` that follows, once it has given all entries."""
        self._closed = True
        self._wake_watchers()

    async def watch(
        self, *, limit: int | None = None, follow: bool = False
    ) -> AsyncIterator[tuple[EndedRequest, int]]:
        """Yield the newest `limit` entries (None: all that are kept), oldest first, then stop or `follow`.

        Following yields new entries until `end_watches`. With each entry comes how many right before it
        were dropped before this reader got to them.
        """
        stop_at = self._next_number
        n_kept = len(self) if limit is None else min(limit, len(self))
        wanted = stop_at - n_kept
        while True:
            while self._entries and wanted < (self._next_number if follow else stop_at):
                oldest = self._next_number - len(self._entries)
                missed = max(0, oldest - wanted)
                entry = self._entries[max(0, wanted - oldest)]
                wanted = max(oldest, wanted) + 1
                yield entry, missed
            if not follow or self._closed:
                return
            if self._news is None:
                self._news = anyio.Event()
            await self._news.wait()

    def _wake_watchers(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None


def _configs(choices: Iterable[StageChoice]) -> list[gw.GatewayConfig]:
    return list({each.config.version: each.config for each in choices}.values())
