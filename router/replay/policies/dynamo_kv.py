"""Dynamo's KV router, within the grid's pool: the least cost in KV blocks, equals at random.

    cost   = scale * max(prefill_blocks - credit, 0) + decode_blocks + weight * active_requests
    credit = overlap * device_blocks / (1 + decay * excess_blocks / request_blocks) + 0.75 * host_blocks

`prefill_blocks` are those to compute on the worker with this prompt, cached ones of it included;
`excess_blocks` those that wait there beyond the least loaded worker's. The terms by stage:

    prefill   no decode_blocks: Dynamo's prefill router does not track them
    decode    no prefill blocks and no credit: KV is pulled, whatever is cached
    agg       all of them

Source: `lib/kv-router/src/scheduling/selector/default.rs` of ai-dynamo/dynamo, at temperature 0. Its credit
for blocks on disk has no place here: no worker reports any.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.rows import Floats
from slagate.router.replay.policies.view import Pick, Picks, StageView, least

BLOCK_TOKENS = 32
"""TensorRT-LLM's default."""

HOST_CREDIT = 0.75
"""For a block on the host, Dynamo's `host_cache_hit_weight`."""


@dataclass(frozen=True)
class DynamoKv:
    """The parameters have Dynamo's names and defaults."""

    over_all_pools: ClassVar[bool] = False
    prefill_load_scale: float = field(default=1.0, metadata={"tune": (0.5, 1.0, 2.0)})
    overlap_score_credit: float = field(default=1.0, metadata={"tune": (0.5, 1.0)})
    overlap_score_credit_decay: float = field(default=0.0, metadata={"tune": (0.0, 1.0)})
    decode_active_request_weight: float = field(default=0.0, metadata={"tune": (0.0, 8.0)})

    def pick(self, views: Mapping[Stage, StageView], draw: float) -> Picks:
        """The open row with the least cost in each stage."""
        return {
            stage: Pick(least(self._cost(view), view.is_open, draw))
            for stage, view in views.items()
        }

    def _cost(self, view: StageView) -> Floats:
        cost = self.decode_active_request_weight * view.inflight.astype(np.float64)
        if view.stage is not Stage.DECODE:
            tokens = view.queued_tokens + view.isl_tokens - self._credit_tokens(view)
            cost = cost + self.prefill_load_scale * np.maximum(tokens, 0.0) / BLOCK_TOKENS
        if view.stage is not Stage.PREFILL:
            cost = cost + (view.context_tokens + view.isl_tokens) / BLOCK_TOKENS
        return cost

    def _credit_tokens(self, view: StageView) -> Floats:
        waiting = view.queued_tokens
        floor = waiting[view.is_open].min() if view.is_open.any() else 0
        excess = np.maximum(waiting - floor, 0) / view.isl_tokens
        device = view.device_tokens / (1 + self.overlap_score_credit_decay * excess)
        host = view.cached_tokens - view.device_tokens
        credit: Floats = self.overlap_score_credit * device + HOST_CREDIT * host
        return credit
