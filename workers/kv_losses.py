"""What is logged when an engine lost KV events: a line per rank and minute at most.

An overfull buffer loses events again and again, and each time the rank's published cache starts over
empty: whoever runs the worker must hear of it, and of nothing else.
"""

import logging
import math

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

    def add(self, n_missed: int) -> None:
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
