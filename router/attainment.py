"""How many requests each grid cell had, and how many of them met their latency targets."""

from collections.abc import Mapping
from typing import NamedTuple

from slagate.pools.member import Stage
from slagate.router.receipts import Record


class CellTraffic(NamedTuple):
    """Requests of one cell that have ended."""

    n_requests: int = 0
    n_met: int = 0  # of those judged, the ones with every target of the stage met
    n_judged: int = 0  # had a target of the stage, and a latency to compare with it


CellKey = tuple[Stage, tuple[int, ...]]
"""A stage, and the index of a cell in its grid."""


class Attainment:
    """Counts for one configuration version; takes no more memory than its grids have cells.

    A prefill cell is judged by TTFT, a decode cell by ITL, an agg cell by both.
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

    def count(self, record: Record) -> None:
        """Count a request that has ended, as far as it was decided under our version."""
        if record.decision is None:
            return
        ttft_met, itl_met = record.ttft_met(), record.itl_met()
        of_stage = {
            Stage.PREFILL: (ttft_met,),
            Stage.DECODE: (itl_met,),
            Stage.AGG: (ttft_met, itl_met),
        }
        for choice in record.decision.stages:
            if choice.config_version != self._version:
                continue
            verdicts = [met for met in of_stage[choice.stage] if met is not None]
            key = (choice.stage, choice.cell.index)
            n_requests, n_met, n_judged = self._cells.get(key, CellTraffic())
            self._cells[key] = CellTraffic(
                n_requests + 1,
                n_met + (bool(verdicts) and all(verdicts)),
                n_judged + bool(verdicts),
            )
