"""Dynamo's global router: the grid's pool, and in it each worker in turn, whatever the load.

    index = clamp(int((x - min) / ((max - min) / resolution)), 0, resolution - 1)

on each axis, of prefill (ISL, TTFT) and of decode (context length, ITL). `pools/grid` has that arithmetic,
and has placed the request before a policy is asked. Load has no part in it. Where a worker is full the
request waits for it, as it would in the engine's own queue: Dynamo's router knows no limit.

Source: `dynamo.global_router` of ai-dynamo 1.6.1. It leaves the worker to the pool's own router, for which
the turn stands here; `dynamo_kv` is the other one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from slagate.pools.grid.grid import Stage
from slagate.router.replay.policies.view import Pick, Picks, StageView, in_turn


@dataclass(frozen=True)
class StaticGrid:
    """It has no parameters but the grid."""

    over_all_pools: ClassVar[bool] = False

    def pick(self, views: Mapping[Stage, StageView], draw: float) -> Picks:
        """The row whose turn it is; none while that one is full."""
        del draw
        return {stage: Pick(_turn(view)) for stage, view in views.items()}


def _turn(view: StageView) -> int | None:
    row = in_turn(view, view.is_open | view.is_full)
    return row if row is not None and view.is_open[row] else None
