"""llm-d's headroom, over all pairs of workers: one at random of those predicted to meet both targets.

    h_ttft = TTFT target - p90 TTFT     h_itl = ITL target - p90 ITL     n = (|h| - min) / (max - min)
    combined = 0.8 * n_ttft + 0.2 * n_itl
    weight = int((1 - combined) * 100) + 1 for "least", which packs, int(combined * 100) + 1 for "most"

A pair has a prefill and a decode worker, as in llm-d's optimizer of pairs: its TTFT is that of the prefill
worker, the transfer and the first step. On an aggregated fleet a pair is one worker twice. With a
probability of 0.99 the draw is among the pairs where both h are >= 0, if there are any. Else it is among
the others: those without a request first, then by deficit (-h, or 0), the smaller the likelier:

    weight = int((1 - (0.8 * n_ttft + 0.2 * n_itl)) * 80) + 1

normalised apart for pairs that miss both targets, TTFT, or ITL. A missing target counts as 0, as in llm-d.

llm-d learns the p90 from samples; here it is the predicted seconds times `p90_ratio`, which is that of a
worker's and a step's noise of 0.15 and 0.05 (standard deviations of the logarithm). Left out is its rule
that sticks to workers with most of a prompt cached.

Source: `pkg/epp/scheduling/framework/plugins/multi/slo_aware_router/selection.go` of
kubernetes-sigs/gateway-api-inference-extension and `pkg/plugins/scorer/pd_slo_pair_optimizer.go` of
llm-d/llm-d-inference-scheduler.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.rows import Flags, Floats, Ints
from slagate.router.replay.policies.view import Picks, StageView, picks_of, waiting


@dataclass(frozen=True)
class LlmdHeadroom:
    """`explore` is the probability of a pair that is predicted to miss a target where others meet both."""

    over_all_pools: ClassVar[bool] = True
    strategy: str = field(default="least", metadata={"tune": ("least", "most")})
    ttft_weight: float = field(default=0.8, metadata={"tune": (0.5, 0.8, 1.0)})
    explore: float = field(default=0.01, metadata={"tune": (0.0, 0.01)})
    p90_ratio: float = field(default=1.22, metadata={"tune": (1.0, 1.22)})

    def pick(self, views: Mapping[Stage, StageView], draw: float) -> Picks:
        """A pair, drawn by its weight."""
        if not all(view.is_open.any() for view in views.values()):
            return waiting(views, draw)
        pairs = _pairs(views)
        ttft_s: Floats = sum(
            (view.first_token_s[pairs[stage]] for stage, view in views.items()), np.zeros(1)
        )
        last, view = list(views.items())[-1]
        itl_s = view.step_s(0.0)[pairs[last]]
        h_ttft = (view.ttft_s or 0.0) - self.p90_ratio * ttft_s
        h_itl = (view.itl_s or 0.0) - self.p90_ratio * itl_s
        meets = (h_ttft >= 0) & (h_itl >= 0)
        explores, draw = draw < self.explore, _rest(draw, self.explore)
        if meets.any() and not (explores and not meets.all()):
            weights = self._headroom_weights(h_ttft, h_itl, meets)
        else:
            is_idle = ~meets
            for stage, each in views.items():
                is_idle = is_idle & (each.inflight[pairs[stage]] == 0)
            among = is_idle if is_idle.any() else ~meets
            weights = self._deficit_weights(h_ttft, h_itl, among)
        drawn = _drawn(weights, draw)
        rows: dict[Stage, int | None] = {stage: int(each[drawn]) for stage, each in pairs.items()}
        return picks_of(rows, float(ttft_s[drawn]))

    def _headroom_weights(self, h_ttft: Floats, h_itl: Floats, among: Flags) -> Floats:
        combined = self._combined(_normal(h_ttft, among, 0.5), _normal(h_itl, among, 0.5))
        if self.strategy == "least":
            combined = 1 - combined
        return np.where(among, np.floor(combined * 100) + 1, 0.0)

    def _deficit_weights(self, h_ttft: Floats, h_itl: Floats, among: Flags) -> Floats:
        weights = np.zeros(len(among))
        for misses_ttft, misses_itl in ((True, True), (True, False), (False, True)):
            alike = among & ((h_ttft < 0) == misses_ttft) & ((h_itl < 0) == misses_itl)
            deficits = [_normal(np.maximum(-h, 0.0), alike, 0.0) for h in (h_ttft, h_itl)]
            badness = self._combined(*deficits)
            weights = np.where(alike, np.floor((1 - badness) * 80) + 1, weights)
        return weights

    def _combined(self, ttft: Floats, itl: Floats) -> Floats:
        return self.ttft_weight * ttft + (1 - self.ttft_weight) * itl


def _pairs(views: Mapping[Stage, StageView]) -> Mapping[Stage, Ints]:
    """All combinations of open rows of the stages, as an index for each."""
    rows = np.meshgrid(*(view.is_open.nonzero()[0] for view in views.values()), indexing="ij")
    return {stage: each.reshape(-1) for stage, each in zip(views, rows, strict=True)}


def _normal(values: Floats, among: Flags, alike: float) -> Floats:
    """Values from 0 for the least of `among` to 1 for the most; `alike` where they do not differ."""
    if not among.any():
        return values
    low, high = values[among].min(), values[among].max()
    if high - low <= 1e-9:
        return np.full(len(values), alike)
    normal: Floats = (values - low) / (high - low)
    return normal


def _rest(draw: float, share: float) -> float:
    """What is left of a draw in [0, 1) that has decided whether it is below `share`."""
    return draw / share if draw < share else (draw - share) / (1 - share)


def _drawn(weights: Floats, draw: float) -> int:
    """An index, as likely as its weight."""
    ends = weights.cumsum()
    return int(ends.searchsorted(draw * ends[-1], side="right"))
