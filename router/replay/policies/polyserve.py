"""PolyServe, over all workers of a stage: the fullest one that is predicted to meet the targets.

    admitted if ttft <= TTFT and ttft + step_now <= TTFT + TPOT and step(batch + 1, most KV) <= TPOT
    load     = max(ttft / TTFT, step(batch + 1, most KV) / TPOT)

`most KV` is what the batch has once each of its requests has grown by the mean length of an answer. A
decode or aggregated worker belongs to the tier, a TPOT target, of the request that found it idle, until it
is idle again. A request looks at the workers of its own tier, then at those of tighter ones, where it is
admitted by the tier's TPOT, then at idle ones; each time the fullest that admits it. The terms by stage:

    prefill   TTFT with transfer and first step of the decode worker chosen before; no tiers, since a prompt
              at the end of a queue costs nobody else anything
    decode    the last condition, and its load
    agg       all of them

A prompt cached on a worker makes it less full, so less liked: prefixes have no part in the paper.

Where nobody admits a request the paper lets it wait, in a queue apart. A worker's queue gets shorter no
faster than the time that is left of the request's TTFT, so it is admitted after that only if a prediction
was wrong, and else has missed its target. In the gateway's one queue it would hold up all others, so here
it is refused: the attainment is that of waiting, but nobody gets a late answer. With `late` "least" it goes
to the least late worker instead, where it delays others.

Source: Zhu et al., "PolyServe: Efficient Multi-SLO Serving at Scale" (arXiv 2507.17769), sections 4.3 to
4.7, without its scaling of the fleet.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.rows import Flags, Floats
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
class PolyServe:
    """Targets count times their limits, in the paper 1, as its mean answer is that of the trace at hand.

    343 tokens is that of Mooncake's conversations.
    """

    over_all_pools: ClassVar[bool] = True
    answer_tokens: float = field(default=343.0, metadata={"tune": (100.0, 343.0)})
    ttft_limit: float = field(default=1.0, metadata={"tune": (0.9, 1.0)})
    itl_limit: float = field(default=1.0, metadata={"tune": (0.7, 0.85, 1.0)})
    late: str = field(default="refuse", metadata={"tune": ("refuse", "least")})
    _tiers: dict[str, float] = field(default_factory=dict, init=False)  # TPOT by row

    def pick(self, views: Mapping[Stage, StageView], draw: float) -> Picks | str:
        """The fullest rows that admit the request."""
        if not all(view.is_open.any() for view in views.values()):
            return waiting(views, draw)
        rows: dict[Stage, int] = {}
        step_s = 0.0
        # The last stage first, whose seconds are part of TTFT.
        for stage in reversed(list(views)):
            view = views[stage]
            if stage is Stage.PREFILL:
                row = self._prefill_row(view, total_ttft_s(views, rows), step_s, draw)
            else:
                row = self._token_row(view, draw)
            if row is None:
                if self.late == "refuse":
                    return REFUSED
                row = least(view.first_token_s, view.is_open, draw)
                assert row is not None, "one is open, as was looked at above"
            rows[stage] = row
            step_s = float(view.step_s(0.0)[row])
        self._claim(views, rows)
        return picks_of(rows, total_ttft_s(views, rows))

    def _prefill_row(
        self, view: StageView, later_s: float, step_s: float, draw: float
    ) -> int | None:
        """The fullest prefill row that admits, given the seconds of the decode row and its step."""
        ttft_s = view.prefill_s + later_s
        return least(-ttft_s, view.is_open & self._is_in_time(view, ttft_s, step_s), draw)

    def _is_in_time(self, view: StageView, ttft_s: Floats, step_s: Floats | float) -> Flags:
        """Whether the first two tokens are in time, by row."""
        if view.ttft_s is None:
            return np.ones(len(view), np.bool_)
        limit_s = self.ttft_limit * view.ttft_s
        second_s = limit_s + (math.inf if view.itl_s is None else view.itl_s)
        in_time: Flags = (ttft_s <= limit_s) & (ttft_s + step_s <= second_s)
        return in_time

    def _token_row(self, view: StageView, draw: float) -> int | None:
        """The fullest decode or aggregated row that admits, by tier."""
        itl_s = math.inf if view.itl_s is None else view.itl_s
        most_s = view.step_s(self.answer_tokens)
        load = most_s / itl_s
        is_open = view.is_open
        if view.stage is Stage.AGG:
            is_open = is_open & self._is_in_time(view, view.prefill_s, view.step_s(0.0))
            if view.ttft_s is not None:
                load = np.maximum(load, view.prefill_s / view.ttft_s)
        is_idle = view.inflight == 0
        tier_s = np.array([self._tiers.get(name, math.inf) for name in view.names])
        ladder = (
            (~is_idle & (tier_s == itl_s), tier_s),
            (~is_idle & (tier_s < itl_s), tier_s),
            (is_idle, itl_s),
        )
        for rows, budget_s in ladder:
            is_admitted = is_open & rows & (most_s <= self.itl_limit * budget_s)
            row = least(-load, is_admitted, draw)
            if row is not None:
                return row
        return None

    def _claim(self, views: Mapping[Stage, StageView], rows: Mapping[Stage, int]) -> None:
        """Note the tier of a row that was idle."""
        for stage, view in views.items():
            row = rows[stage]
            if stage is not Stage.PREFILL and not view.inflight[row]:
                self._tiers[view.names[row]] = math.inf if view.itl_s is None else view.itl_s
