"""How many requests each grid cell had, and how many of them met their latency targets."""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from slagate.pools.grid.grid import Stage
from slagate.router.receipts.record import Record
from slagate.router.request.errors import Outcome
from slagate.router.scheduling.policy import Decision

FAILURES = frozenset(
    {
        Outcome.OVERLOADED,
        Outcome.UNAVAILABLE,
        Outcome.WORKER_FAILED,
        Outcome.DEADLINE,
        Outcome.INTERNAL,
    }
)
"""Outcomes for which the fleet or its gateway is to blame. The other ones without an answer are the
client's doing: it asked for what nobody can do, did not read its tokens, cancelled or aborted."""


class CellTraffic(NamedTuple):
    """Counts of ended requests that were placed in one cell of a grid."""

    n_requests: int = 0
    n_met: int = 0  # judged, and every target of the stage was met
    n_judged: int = 0  # with a target of the stage, and a latency to compare or a failure (a miss)
    n_failed: int = 0  # ended in this stage with one of `FAILURES`


CellKey = tuple[Stage, tuple[int, ...]]
"""A stage, and the index of a cell in its grid."""


class Attainment:
    """Counts how many requests each grid cell had, and how many met their targets, under one configuration.

    A prefill cell is judged by TTFT, a decode cell by ITL, an agg cell by both. What a decode worker
    serves alone counts in its decode cell, and in none of prefill. A request that ended without its answer
    counts up to the stage in which it ended, and not in later ones; one that was refused for a prediction
    ended in the first stage that is predicted to miss.
    """

    def __init__(self, version: str) -> None:
        self.restart(version)

    @property
    def cells(self) -> Mapping[CellKey, CellTraffic]:
        """The counts so far of each cell that had a request; the others are absent."""
        return {key: CellTraffic(*counts) for key, counts in self._cells.items()}

    def restart(self, version: str) -> None:
        """Begin at zero under another configuration: its cells are others, even with equal numbers."""
        self.version = version  # of the configuration that the counts are of
        # The fields of a `CellTraffic` each.
        self._cells: defaultdict[CellKey, list[int]] = defaultdict(lambda: [0, 0, 0, 0])

    def count(self, record: Record, outcome: Outcome) -> None:
        """Count a request that has ended, in the stages that were decided under `version`."""
        decision = record.decision
        if decision is None:
            return
        _, _, ttft_met, itl_met = record.latencies()
        ended_in = failed_in = None
        if outcome is not Outcome.COMPLETED:
            ended_in = _ended_in(record, decision)
            if outcome in FAILURES:
                failed_in = ended_in
                # A failure without a latency has missed the target that it had.
                if ttft_met is None and record.sla.ttft_ms is not None:
                    ttft_met = False
                if itl_met is None and record.sla.itl_ms is not None:
                    itl_met = False
        for choice in decision.stages:
            stage = choice.stage
            if choice.config.version == self.version:
                of_ttft = ttft_met if choice.pool_stage is not Stage.DECODE else None
                of_itl = itl_met if stage is not Stage.PREFILL else None
                is_judged = of_ttft is not None or of_itl is not None
                is_met = is_judged and of_ttft is not False and of_itl is not False
                counts = self._cells[choice.pool_stage, choice.cell.index]
                counts[0] += 1
                counts[1] += is_met and stage is not failed_in
                counts[2] += is_judged
                counts[3] += stage is failed_in
            if stage is ended_in:
                return


def _ended_in(record: Record, decision: Decision) -> Stage:
    """The stage of the last call to a worker; before there was one, that which had nobody, or is late."""
    if record.attempts:
        return record.attempts[-1].choice.stage
    choices = decision.stages
    if decision.admission == "refused":
        return next(each for each in choices if each.is_met is False).stage
    return next((each for each in choices if each.row is None), choices[0]).stage
