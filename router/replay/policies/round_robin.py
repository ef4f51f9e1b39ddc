"""Round robin: the next of the grid's pool in turn that may take the request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from slagate.pools.grid.grid import Stage
from slagate.router.replay.policies.view import Pick, Picks, StageView


@dataclass(frozen=True)
class RoundRobin:
    """It has no parameters."""

    over_all_pools: ClassVar[bool] = False
    _last: dict[tuple[str, ...], int] = field(default_factory=dict, init=False)

    def pick(self, views: Mapping[Stage, StageView], draw: float) -> Picks:
        """The open row behind the one that was chosen last."""
        del draw
        return {stage: Pick(self._next(view)) for stage, view in views.items()}

    def _next(self, view: StageView) -> int | None:
        last = self._last.get(view.names, -1)
        for step in range(1, len(view) + 1):
            row = (last + step) % len(view)
            if view.is_open[row]:
                self._last[view.names] = row
                return row
        return None
