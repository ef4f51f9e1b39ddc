"""Round robin: of the grid's pool the worker that may take the request and had none for longest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from slagate.pools.grid.grid import Stage
from slagate.router.replay.policies.view import Pick, Picks, StageView, in_turn


@dataclass(frozen=True)
class RoundRobin:
    """It has no parameters."""

    over_all_pools: ClassVar[bool] = False

    def pick(self, views: Mapping[Stage, StageView], draw: float) -> Picks:
        """The open row that was chosen longest ago: where all are open, the next one."""
        del draw
        return {stage: Pick(in_turn(view, view.is_open)) for stage, view in views.items()}
