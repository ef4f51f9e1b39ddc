"""The state of a worker's KV-event streams, for metrics, `ListWorkers` and scoring."""

import logging
from collections.abc import Callable
from enum import Enum

from slagate.pools.prefix.holder import Holder

log = logging.getLogger(__name__)


class EventMode(Enum):
    """How far a worker's events can be relied on. The value is the label in metrics and the CLI."""

    OFF = "off"  # they are not followed
    NONE = "none"  # the worker has no usable events
    STARTING = "starting"
    RESYNC = "resync"  # a stream was lost: the index has what was known, or starts over
    LIVE = "live"


_NOT_YET = "not subscribed yet"
_UNWANTED = "not followed: no decision asks for them here"

_WORST_FIRST = (EventMode.NONE, EventMode.RESYNC, EventMode.STARTING, EventMode.LIVE)


class RankEvents:
    """The state of one rank's event stream, written by its follower."""

    def __init__(self) -> None:
        self.mode = EventMode.STARTING
        self.reason = _NOT_YET
        self.holder: Holder | None = None
        self.next_number: int | None = None  # of the batch behind those applied; None: start over
        self.is_partial = False  # began in the middle, without a snapshot
        self.n_waiting_bytes = 0  # of batches that have come and are not applied yet
        self.applied_unix_s = 0.0  # publish time of the newest batch applied, or being applied
        # From the last subscription until all batches that had come were applied.
        self.rebuild_s = 0.0


class EventView:
    """The state of a worker's event streams, by rank, and counts over all of them."""

    def __init__(self, worker: str, *, unix_s: Callable[[], float]) -> None:
        """`worker` is its name in the log, `unix_s` the clock that workers stamp their batches by."""
        self.worker = worker
        self._unix_s = unix_s
        self._logged = EventMode.OFF
        self._idle = EventMode.OFF  # the mode while there are no ranks
        self._why_none = ""
        self.ranks: dict[int, RankEvents] = {}
        self.is_silent = False  # it processes prompts, and yet no event comes
        self.n_events = 0
        self.n_batches = 0  # with empty ones
        self.n_gaps = 0  # places where batches were missing
        self.n_resyncs = 0  # times that a rank's blocks were dropped, to start over with a snapshot
        self.n_resumes = 0  # times that a rank asked to go on where a stream had ended
        self.n_errors = 0  # batches and events that made no sense

    def __repr__(self) -> str:
        """State in one line, for people and for tests."""
        return f"EventView({self.worker}, {self.mode.value}, {self.n_events} events, {self.reason})"

    @property
    def mode(self) -> EventMode:
        """The mode of its worst rank."""
        if self._why_none:
            return EventMode.NONE
        modes = {rank.mode for rank in self.ranks.values()}
        return next((mode for mode in _WORST_FIRST if mode in modes), self._idle)

    @property
    def reason(self) -> str:
        """Why the mode is not live; empty when it is."""
        if self._why_none:
            return self._why_none
        mode, idle = self.mode, _UNWANTED if self._idle is EventMode.OFF else _NOT_YET
        return next((rank.reason for rank in self.ranks.values() if rank.mode is mode), idle)

    @property
    def is_partial(self) -> bool:
        """Whether a rank may have more than the index knows, as it had no snapshot."""
        return any(rank.is_partial for rank in self.ranks.values())

    @property
    def lag_s(self) -> float:
        """Age of the newest batch applied while others wait, by the clocks of two hosts; else 0."""
        now_s = self._unix_s()
        lags_s = [
            now_s - rank.applied_unix_s
            for rank in self.ranks.values()
            if rank.n_waiting_bytes and rank.applied_unix_s
        ]
        return max(0.0, *lags_s) if lags_s else 0.0

    @property
    def rebuild_s(self) -> float:
        """Seconds that the slowest rank's last subscription took to apply all that had come."""
        return max((rank.rebuild_s for rank in self.ranks.values()), default=0.0)

    @property
    def n_waiting_bytes(self) -> int:
        """Bytes of batches that have come and are not applied yet."""
        return sum(rank.n_waiting_bytes for rank in self.ranks.values())

    @property
    def n_blocks(self) -> int:
        """Blocks in the index, over all ranks."""
        return sum(rank.holder.n_blocks for rank in self.ranks.values() if rank.holder)

    @property
    def n_pending(self) -> int:
        """Blocks whose parents are not known, over all ranks."""
        return sum(rank.holder.n_pending for rank in self.ranks.values() if rank.holder)

    def set_mode(self, rank: RankEvents, mode: EventMode, reason: str) -> None:
        """Set the mode of a rank, and why it is not live."""
        rank.mode, rank.reason = mode, reason
        self._log()

    def start_incarnation(self, *, n_ranks: int = 0, why_none: str = "") -> None:
        """Begin with another incarnation of the worker, with ranks to follow or why there are none.

        With neither, it is not known yet.
        """
        self._idle = EventMode.STARTING
        self._why_none = why_none
        self.ranks = {rank: RankEvents() for rank in range(n_ranks)}
        self.is_silent = False
        self._log()

    def _log(self) -> None:
        mode = self.mode
        if mode is not self._logged:
            self._logged = mode
            about = {"worker": self.worker, "mode": mode.value, "reason": self.reason}
            log.info("events.mode", extra=about)
