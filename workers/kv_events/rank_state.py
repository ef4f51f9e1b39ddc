"""What readers of an engine's KV events share: the state of each rank, and how lost events are handled.

A full buffer loses events again and again, and each time the rank's published cache starts over empty. The
operator must hear of that, in at most one line of the log for each rank and minute.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from slagate.workers.kv_events.changes import Change, Cleared
from slagate.workers.kv_events.fields import BLOCK_WORK, TURN_WORK, UnusableError, unusable

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0

MAX_OLD = 64
"""Old numbers in a row that are let pass; one more, and the sender counts anew, or a number was wrong."""


class SequenceCheck(NamedTuple):
    """How a number follows the one before: in order, old, or behind a gap."""

    is_old: bool = False
    is_gap: bool = False
    n_missed: int = 0  # numbers in the gap; 0 where the sender counts anew


class SequenceNumbers:
    """Checks a stream's numbers, each one more than the last, of which some are lost or come again.

    `next` is the number expected next. A smaller one is old; after `MAX_OLD` old ones in a row the sender
    must count anew, and the number behind them is a gap of unknown size, from which counting goes on.
    """

    __slots__ = ("_n_old", "next")

    def __init__(self, first: int = 0) -> None:
        self.next = first
        self._n_old = 0  # in a row

    def check(self, number: int) -> SequenceCheck:
        """Check a number, after which the next one is expected; an old one changes nothing."""
        if number < self.next and self._n_old < MAX_OLD:
            self._n_old += 1
            return SequenceCheck(is_old=True)
        self._n_old = 0
        is_gap, n_missed = number != self.next, max(0, number - self.next)
        self.next = number + 1
        return SequenceCheck(is_gap=is_gap, n_missed=n_missed)


class RankState:
    """One rank: its numbers, the window and layers that count, its partial blocks, its losses."""

    __slots__ = (
        "_algorithm",
        "group",
        "is_empty",
        "losses",
        "number",
        "numbering",
        "partial",
        "window",
        "window_is_named",
    )

    def __init__(self, number: int, losses: "Losses") -> None:
        self.number = number
        self.losses = losses
        self.numbering = SequenceNumbers()
        self.window = 0
        self.window_is_named = False
        self.group: int | None = None  # of layers with that window; None where no event names one
        self.is_empty = True  # no block was announced since the last clearing
        self.partial: dict[int, None] = {}  # in order of arrival
        self._algorithm = ""  # of the hashes; "" where no event names it

    def clear(self) -> Cleared:
        """Forget what is cached, and return the change that says so."""
        self.is_empty = True
        self.partial.clear()
        return Cleared(self.number)

    def lost(self) -> list[Cleared]:
        """What an unreadable event means: [Cleared], as any block may be gone; [] without any."""
        return [] if self.is_empty else [self.clear()]

    def of_group(self, event: dict[str, Any]) -> list[Cleared]:
        """Check an event's layers and hash algorithm; [`Cleared`] where the algorithm changes.

        Several groups of layers with one window announce the same blocks, and may drop them at
        different times, so only that of the first event counts. Raises `UnusableError` for others.
        """
        group, algorithm = event.get("layer_group_id"), event.get("hash_algo")
        if type(group) is int:
            if self.group is None:
                self.group = group
            if group != self.group:
                unusable("filtered_layer_groups")
        if not isinstance(algorithm, str) or algorithm == self._algorithm:
            return []
        known, self._algorithm = self._algorithm, algorithm
        return self.lost() if known else []


class Losses:
    """Counts and logs the gaps in a rank's numbers; `of` names what has numbers, as "batches"."""

    def __init__(self, rank: int, *, of: str) -> None:
        self._rank = rank
        self._of = of
        self._n_gaps = self._n_missed = 0
        self._n_logged_gaps = self._n_logged_missed = 0
        self._logged_at_s = -math.inf

    def count_gap(self, n_missed: int) -> None:
        """Count a gap of `n_missed`; 0 where the engine counts anew, and the number is not known."""
        self._n_gaps += 1
        self._n_missed += n_missed

    def report(self, now_s: float) -> None:
        """Log the gaps that were not logged yet, in at most one line each `LOG_EVERY_S`."""
        if self._n_gaps > self._n_logged_gaps and now_s >= self._logged_at_s + LOG_EVERY_S:
            log.warning(
                "kv_events.lost",
                extra={
                    "rank": self._rank,
                    "gaps": self._n_gaps - self._n_logged_gaps,
                    f"missed_{self._of}": self._n_missed - self._n_logged_missed,
                    "gaps_so_far": self._n_gaps,
                    f"missed_{self._of}_so_far": self._n_missed,
                },
            )
            self._n_logged_gaps, self._n_logged_missed = self._n_gaps, self._n_missed
            self._logged_at_s = now_s


Changes: TypeAlias = Iterator[Change | None]
"""None where a turn's work is done."""


class Normaliser(ABC):
    """Turns an engine's events into checked changes of its ranks. Never raises, whatever they are.

    `counts` has what was lost or left out.
    """

    def __init__(
        self, *, ranks: int, block_tokens: int, numbered: str, counted: Iterable[str]
    ) -> None:
        """The engine numbers `numbered`, "events" or "batches"; `counted` are further counts."""
        self._numbered = numbered
        self._ranks = [RankState(rank, Losses(rank, of=numbered)) for rank in range(ranks)]
        self._block_tokens = block_tokens
        self._turn_blocks = max(1, TURN_WORK // (BLOCK_WORK + block_tokens))
        names = ("gaps", f"missed_{numbered}", f"old_{numbered}", "decode_errors", "dropped_events")
        self.counts: Counter[str] = Counter(dict.fromkeys((*names, *counted), 0))

    def portions(self, polled: object) -> Iterator[list[Change]]:
        """Yields the changes that a poll brought, in portions of a turn's work, perhaps empty."""
        portion: list[Change] = []
        for item in self._items(polled):
            try:
                for change in self._changes_of(item):
                    if change is None:
                        yield portion
                        portion = []
                    else:
                        portion.append(change)
            except UnusableError as error:
                self.counts[str(error)] += 1
        yield portion

    def report_losses(self, now_s: float) -> None:
        """Log the losses of each rank that were not logged yet."""
        for rank in self._ranks:
            rank.losses.report(now_s)

    @abstractmethod
    def _items(self, polled: object) -> Iterable[Any]:
        """The items of a poll, in order."""

    @abstractmethod
    def _changes_of(self, item: Any) -> Changes:
        """The changes in an item. Raises `UnusableError` for one that is left out."""

    def _check_number(self, rank: RankState, number: int) -> Iterator[Cleared]:
        """Clears the rank where numbers are missing. Raises `UnusableError` for an old one."""
        check = rank.numbering.check(number)
        if check.is_old:
            unusable(f"old_{self._numbered}")
        if check.is_gap:
            self.counts["gaps"] += 1
            self.counts[f"missed_{self._numbered}"] += check.n_missed
            rank.losses.count_gap(check.n_missed)
            yield rank.clear()
