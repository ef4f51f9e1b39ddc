"""How many requests each grid cell had, and how many of them met their latency targets."""

from collections.abc import Mapping
from typing import NamedTuple

from slagate.pools.member import Stage
from slagate.router.errors import Outcome
from slagate.router.policy import Decision
from slagate.router.receipts import Record

FAILURES = frozenset(
    {
        Outcome.OVERLOADED,
        Outcome.UNAVAILABLE,
        Outcome.WORKER_FAILED,
        Outcome.DEADLINE,
        Outcome.INTERNAL,
    }
)
"""Outcomes that the fleet or its gateway answers for. The others without an answer are the client's doing:
it asked for what nobody can do, did not take its tokens, cancelled or aborted."""


class CellTraffic(NamedTuple):
    """Requests of one cell that have ended.

    Failed are those that ended in this stage with one of `FAILURES`: overloaded, unavailable, worker
    failed, deadline, internal. Judged are those with a target of the stage, and with a latency to compare
    with it or a failure, which has missed it.
    """

    n_requests: int = 0
    n_met: int = 0  # of those judged, the ones with every target of the stage met
    n_judged: int = 0
    n_failed: int = 0


CellKey = tuple[Stage, tuple[int, ...]]
"""A stage, and the index of a cell in its grid."""


class Attainment:
    """Counts for one configuration version; takes no more memory than its grids have cells.

    A prefill cell is judged by TTFT, a decode cell by ITL, an agg cell by both. A request that ended
    without its answer counts up to the stage that it ended in, and not behind.
    """

    def __init__(self, version: str) -> None:
        self._version = version
        self._cells: dict[CellKey, CellTraffic] = {}

    @property
    def version(self) -> str:
        """The configuration that the counts are of."""
        return self._version

    @property
    def cells(self) -> Mapping[CellKey, CellTraffic]:
        """Those that had a request."""
        return self._cells

    def restart(self, version: str) -> None:
        """Begin at zero under another configuration: its cells are others, whatever their numbers."""
        self._version = version
        self._cells = {}

    def count(self, record: Record, outcome: Outcome) -> None:
        """Count a request that has ended, as far as it was decided under our version."""
        if record.decision is None:
            return
        is_failed = outcome in FAILURES
        ended_in = None if outcome is Outcome.COMPLETED else _ended_in(record, record.decision)
        ttft, itl = (
            # A failure without a latency has missed the target that it had.
            False if met is None and is_failed and target_ms is not None else met
            for met, target_ms in (
                (record.ttft_met(), record.sla.ttft_ms),
                (record.itl_met(), record.sla.itl_ms),
            )
        )
        of_stage = {Stage.PREFILL: (ttft,), Stage.DECODE: (itl,), Stage.AGG: (ttft, itl)}
        for choice in record.decision.stages:
            has_failed = is_failed and choice.stage is ended_in
            if choice.config_version == self._version:
                verdicts = [met for met in of_stage[choice.stage] if met is not None]
                is_met = bool(verdicts) and all(verdicts) and not has_failed
                key = (choice.stage, choice.cell.index)
                n_requests, n_met, n_judged, n_failed = self._cells.get(key, CellTraffic())
                self._cells[key] = CellTraffic(
                    n_requests + 1, n_met + is_met, n_judged + bool(verdicts), n_failed + has_failed
                )
            if choice.stage is ended_in:
                return


def _ended_in(record: Record, decision: Decision) -> Stage:
    """The stage of the last call to a worker; before there was one, the stage that had nobody."""
    if record.attempts:
        return record.attempts[-1].choice.stage
    choices = decision.stages
    return next((each for each in choices if each.row is None), choices[0]).stage
