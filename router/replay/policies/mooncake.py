"""Mooncake's scheduling, over all workers of both stages: the least TTFT and TBT, refused where one misses.

    TTFT_i = queue_i + prefill(prompt, prefix_i)    p = argmin TTFT_i over prefill workers
    TBT_j  = a step with this request in the batch  d = argmin TBT_j over decode workers
    refuse if TTFT_p + transfer + first step of d > TTFT target, or TBT_d > TBT target

The queue is the predicted seconds of all prompts ahead. The paper moves KV while it is computed, and the
first token is the prefill worker's; here transfer and first step come after, and count. The batch of a
decode worker has the requests that are in prefill still, so that it is the load at the time this prefill
ends, as in the paper's early rejection by prediction; that some end before then is not predicted. On an
aggregated worker the queue and the prompt are the TTFT, and TBT is that worker's.

The algorithm's other half lets a prefill worker fetch a prefix from the one that has most of it, if that
is more than `kvcache_balancing_threshold` times its own. Workers here cannot, so it is left out.

Source: Qin et al., "Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving" (arXiv
2407.00079), algorithm 1 and section 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from slagate.pools.grid.grid import Stage
from slagate.router.replay.policies.view import (
    REFUSED,
    Picks,
    StageView,
    least,
    picks_of,
    total_ttft_s,
    waiting,
)


@dataclass(frozen=True)
class Mooncake:
    """A request is refused above these multiples of its targets; the paper has 1."""

    over_all_pools: ClassVar[bool] = True
    ttft_limit: float = field(default=1.0, metadata={"tune": (0.8, 0.9, 1.0, 1.1, 1.25)})
    itl_limit: float = field(default=1.0, metadata={"tune": (0.9, 1.0, 1.1, 1.25)})

    def pick(self, views: Mapping[Stage, StageView], draw: float) -> Picks | str:
        """The rows with the least TTFT and the least step, if they meet the targets."""
        rows: dict[Stage, int] = {}
        for stage, view in views.items():
            score = view.step_s(0.0) if stage is Stage.DECODE else view.prefill_s
            row = least(score, view.is_open, draw)
            if row is None:
                return waiting(views, draw)
            rows[stage] = row
        ttft_s = total_ttft_s(views, rows)
        itl_s = float(view.step_s(0.0)[row])  # of the last stage
        if view.ttft_s is not None and ttft_s > self.ttft_limit * view.ttft_s:
            return REFUSED
        if view.itl_s is not None and itl_s > self.itl_limit * view.itl_s:
            return REFUSED
        return picks_of(rows, ttft_s)
