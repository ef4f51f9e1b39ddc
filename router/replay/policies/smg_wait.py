"""SMG's expected wait, over all workers of a stage: the least seconds until a worker's queue is done.

    wait = (queued_tokens + dispatched_tokens) / tokens_per_s + kv_weight * k / (1 - k)

`queued_tokens` and `k`, the share of the KV cache that is in use, are of the worker's last load report;
`dispatched_tokens` are of all prompts sent to it since, cached or not. A worker with `max_waiting`
requests that wait, all sent since the report included, or with `k` at `max_kv_share` is passed over while
another one is below both. The terms by stage:

    prefill   `k` is 0, as the gateway counts no KV cache of a prompt that is only computed
    decode    no tokens are queued, so it is the KV term alone
    agg       both terms

What a worker reports is here what the gateway counts at that moment: of the requests of a prefill worker
all but one wait, of another's none, as no more are sent than it runs at once. SMG divides by the generation
rate that the engine reports, or by 2000 tokens/s where that is 0, as on a prefill worker. All of them would
be equally fast, so it is the profile's prompt tokens per second here. TTFT is predicted as the wait and
what is not cached of this prompt at that rate.

Source: `model_gateway/src/policies/least_load.rs` of smg-project/smg, with the limits of its own campaign.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
import numpy as np

from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.rows import Flags, Floats, Ints
from slagate.router.replay.policies.view import Picks, StageView, least, picks_of

FULL = 0.999
"""SMG's bound of `k`."""


class _Report(msgspec.Struct):
    """The last load reports of one stage's workers, and what was sent to them since."""

    number: float  # of the poll
    queued_tokens: Ints
    n_waiting: Ints
    kv_share: Floats
    sent_tokens: Ints
    n_sent: Ints


@dataclass(frozen=True)
class SmgWait:
    """`report_s` is between two load reports, SMG's `load_check_interval_secs`, whose default is 10."""

    over_all_pools: ClassVar[bool] = True
    kv_weight: float = field(default=0.15, metadata={"tune": (0.15, 0.5)})
    max_waiting: int = field(default=8, metadata={"tune": (4, 8, 16)})
    max_kv_share: float = field(default=0.8, metadata={"tune": (0.8, 1.0)})
    report_s: float = field(default=1.0, metadata={"tune": (1.0, 10.0)})
    _reports: dict[tuple[str, ...], _Report] = field(default_factory=dict, init=False)

    def pick(self, views: Mapping[Stage, StageView], draw: float) -> Picks:
        """The open row with the least expected wait in each stage."""
        rows: dict[Stage, int | None] = {}
        ttft_s = 0.0
        for stage, view in views.items():
            report = self._report(view)
            wait_s = self._wait_s(view, report)
            rows[stage] = row = least(wait_s, self._preferred(view, report), draw)
            if row is None:
                continue
            report.sent_tokens[row] += view.isl_tokens
            report.n_sent[row] += 1
            if stage is Stage.DECODE:
                ttft_s += float(wait_s[row])
            else:
                own_s = view.uncached_tokens[row] / view.prompt_tokens_per_s[row]
                ttft_s += float(wait_s[row] + own_s)
        return picks_of(rows, ttft_s)

    def _report(self, view: StageView) -> _Report:
        """The reports in force: those of the first request since the last poll."""
        number = view.now_s // self.report_s if self.report_s else view.now_s
        report = self._reports.get(view.names)
        if report is None or report.number != number:
            n_running = 1 if view.stage is Stage.PREFILL else view.inflight
            report = self._reports[view.names] = _Report(
                number=number,
                queued_tokens=view.queued_tokens,
                n_waiting=np.maximum(view.inflight - n_running, 0),
                kv_share=view.kv_share,
                sent_tokens=np.zeros(len(view), np.int64),
                n_sent=np.zeros(len(view), np.int64),
            )
        return report

    def _wait_s(self, view: StageView, report: _Report) -> Floats:
        share = np.clip(report.kv_share, 0.0, FULL)
        wait_s: Floats = self.kv_weight * share / (1 - share)
        if view.stage is not Stage.DECODE:
            tokens = report.queued_tokens + report.sent_tokens
            wait_s = wait_s + tokens / view.prompt_tokens_per_s
        return wait_s

    def _preferred(self, view: StageView, report: _Report) -> Flags:
        """The open rows below both limits, or all open ones where there are none."""
        waiting = report.n_waiting + report.n_sent
        below = view.is_open & (waiting < self.max_waiting)
        below &= report.kv_share < self.max_kv_share
        return below if below.any() else view.is_open
