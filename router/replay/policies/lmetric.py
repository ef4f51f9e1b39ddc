"""LMetric, over all workers of a stage: the least product of prompt tokens to compute and requests.

    score = new_prefill_tokens * batch

Both are what the worker would have with this request: `new_prefill_tokens` is what waits there and of this
prompt what is not cached, `batch` the requests that run and wait. The terms by stage:

    prefill   both
    decode    only `batch`, since no prompt is computed there; the paper has no disaggregated fleet
    agg       both

Workers of all speeds count alike: the formula has no term for speed.

Source: Zhang et al., "Simple is Better: Multiplication May Be All You Need for LLM Request Scheduling"
(OSDI 2026, arXiv 2603.15202), section 5.1. Its detector of hot prefixes, which never fired on the paper's
own traces, is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.rows import Floats
from slagate.router.replay.policies.view import Pick, Picks, StageView, least


@dataclass(frozen=True)
class LMetric:
    """It has no parameters, which is the paper's point."""

    over_all_pools: ClassVar[bool] = True

    def pick(self, views: Mapping[Stage, StageView], draw: float) -> Picks:
        """The open row with the least product in each stage."""
        return {
            stage: Pick(least(_score(view), view.is_open, draw)) for stage, view in views.items()
        }


def _score(view: StageView) -> Floats:
    batch = (view.inflight + 1).astype(np.float64)
    if view.stage is Stage.DECODE:
        return batch
    score: Floats = batch * (view.queued_tokens + view.uncached_tokens)
    return score
