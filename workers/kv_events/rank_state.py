"""What is remembered between polls about one rank's KV events, and what is logged when some were lost.

That is a line per rank and minute at most. An overfull buffer loses events again and again, and each time
the rank's published cache starts over empty: whoever runs the worker must hear of it, and of nothing else.
"""

import logging
import math
from typing import Any, NamedTuple

from slagate.workers.kv_events.changes import Cleared
from slagate.workers.kv_events.fields import unusable

MAX_OLD = 64
"""In a row that may be old news; one more, and the engine counts anew or a number before was wrong."""


class SequenceCheck(NamedTuple):
    """Where a number stands: in its place, old, or behind a gap of so many, where that is known."""

    is_old: bool = False
    is_gap: bool = False
    n_missed: int = 0


class SequenceNumbers:
    """Numbers from 0, each one more than the last, of which some may be lost."""

    __slots__ = ("_n_old", "next")

    def __init__(self) -> None:
        self.next = 0
        self._n_old = 0  # in a row

    def place(self, number: int) -> SequenceCheck:
        """Take a number; an old one changes nothing."""
        if number < self.next and self._n_old < MAX_OLD:
            self._n_old += 1
            return SequenceCheck(is_old=True)
        self._n_old = 0
        is_gap, n_missed = number != self.next, max(0, number - self.next)
        self.next = number + 1
        return SequenceCheck(is_gap=is_gap, n_missed=n_missed)


class RankState:
    """One rank: its numbers, which of its windows and layers count, its partial blocks."""

    __slots__ = (
        "_algorithm",
        "group",
        "is_empty",
        "number",
        "numbering",
        "partial",
        "window",
        "window_is_named",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.numbering = SequenceNumbers()
        self.window = 0
        self.window_is_named = False
        self.group: int | None = None  # of the layers with that window; None where nothing says it
        self.is_empty = True  # nothing was announced since the last clearing
        self.partial: dict[int, None] = {}  # in order of arrival
        self._algorithm = ""  # that makes the hashes; "" where nothing says it

    def clear(self) -> Cleared:
        """Nothing is known of it any more."""
        self.is_empty = True
        self.partial.clear()
        return Cleared(self.number)

    def lost(self) -> list[Cleared]:
        """What follows from a change that nobody can tell: anything that was announced may be gone."""
        return [] if self.is_empty else [self.clear()]

    def of_group(self, event: dict[str, Any]) -> list[Cleared]:
        """Clears where hashes have another meaning from this event on.

        Raises `UnusableError` for an event of other layers with the same window, of which the first ones
        count: all of them announce the same blocks, and what is gone there need not be gone here.
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


log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0


class Losses:
    """One rank's gaps in the engine's numbers, and how many were lost `of` what has numbers."""

    def __init__(self, rank: int, *, of: str = "events") -> None:
        self._rank = rank
        self._of = of
        self._n_gaps = self._n_missed = 0
        self._n_logged_gaps = self._n_logged_missed = 0
        self._logged_at_s = -math.inf

    def count_gap(self, n_missed: int) -> None:
        """There was a gap of so many; 0 where the engine counts anew and nobody knows."""
        self._n_gaps += 1
        self._n_missed += n_missed

    def report(self, now_s: float) -> None:
        """Log what was not logged yet, unless the last line is too new."""
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
