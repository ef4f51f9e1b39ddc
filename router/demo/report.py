"""The report of a demo run: figures of each pool and class, as JSON and as tables."""

from collections.abc import Callable, Sequence, Set
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from rich.table import Table

from slagate.pools.grid.grid import Stage
from slagate.proto import gateway_pb2 as gw
from slagate.router.loadgen.loadgen import ServedRequest, percentiles_ms
from slagate.router.loadgen.trace import SLA_CLASSES, Arrival
from slagate.router.receipts.messages import WIRE_STAGE

MAX_ERRORS = 5


class DemoRow(NamedTuple):
    """One request of the run, its answer, and how that differs from the reference (empty: it does not)."""

    arrival: Arrival
    served: ServedRequest
    mismatch: str

    @property
    def refused(self) -> bool:
        """Whether admission refused it, which is no failure of the fleet; it has missed its targets."""
        receipt = self.served.receipt
        return receipt is not None and receipt.decision.admission == "refused"

    @property
    def failed(self) -> bool:
        """Whether it ended with an error, other than being refused by admission."""
        return self.served.failed and not self.refused

    @property
    def ttft_met(self) -> bool:
        """Whether its first token came in time."""
        ttft_s = self.served.ttft_s
        return ttft_s is not None and ttft_s * 1000 <= self.arrival.sla.ttft_ms

    @property
    def itl_met(self) -> bool | None:
        """Whether the others did, in the mean; None: there were none."""
        itl_s = self.served.itl_s
        return None if itl_s is None else itl_s * 1000 <= self.arrival.sla.itl_ms


def pool_of(receipt: gw.Receipt | None, stage: Stage) -> str:
    """The pool that served a stage, or was chosen for it; empty when the receipt does not say."""
    if receipt is None:
        return ""
    wire = WIRE_STAGE[stage]
    tried = [attempt.pool for attempt in receipt.attempts if attempt.stage == wire]
    chosen = [choice.pool for choice in receipt.decision.stages if choice.stage == wire]
    return (tried or chosen or [""])[-1]


def figures(rows: Sequence[DemoRow]) -> dict[str, object]:
    """Figures of these requests: latency in ms as the client saw it, and shares (0 to 1) of targets met.

    A request without a token has missed its TTFT target. ITL is a request's mean; requests of fewer than
    two tokens have none and do not count for it. Both are met by an answer that came to its end and missed
    neither, so not by what was refused or failed.
    """
    ttft_met = [row.ttft_met for row in rows]
    itl_met = [row.itl_met for row in rows if row.itl_met is not None]
    both_met = [row.ttft_met and row.itl_met is not False and not row.served.failed for row in rows]
    return {
        "requests": len(rows),
        "refused": sum(row.refused for row in rows),
        "ttft_ms": percentiles_ms(row.served.ttft_s for row in rows),
        "itl_ms": percentiles_ms(row.served.itl_s for row in rows),
        "ttft_met": _ratio(ttft_met),
        "itl_met": _ratio(itl_met),
        "both_met": _ratio(both_met),
    }


def _ratio(met: Sequence[bool]) -> float | None:
    return round(sum(met) / len(met), 4) if met else None


def build_report(rows: Sequence[DemoRow], pools: Sequence[tuple[Stage, str]]) -> dict[str, object]:
    """The part of the report that comes from the requests: figures of all, of each pool, of each class."""
    problems = [
        f"{row.served.status.code.name}: {row.served.status.message}"
        if row.failed
        else f"mismatch: {row.mismatch}"
        for row in rows
        if row.failed or row.mismatch
    ]
    receipts = [row.served.receipt for row in rows if row.served.receipt is not None]
    n_failed, n_refused = sum(row.failed for row in rows), sum(row.refused for row in rows)
    return {
        "requests": len(rows),
        "completed": len(rows) - n_failed - n_refused,
        "refused": n_refused,
        "failed": n_failed,
        "both_met": figures(rows)["both_met"],
        "token_mismatches": sum(bool(row.mismatch) for row in rows),
        "receipts_missing": len(rows) - len(receipts),
        "output_tokens": sum(len(row.served.tokens) for row in rows),
        # Two runs of one seed give the same tokens, whichever transport the KV cache used.
        "tokens_sha256": _digest(rows),
        "pools": {
            name: {"stage": stage.value}
            | figures([row for row in rows if pool_of(row.served.receipt, stage) == name])
            for stage, name in pools
        },
        "classes": {
            sla.name: {"ttft_target_ms": sla.ttft_ms, "itl_target_ms": sla.itl_ms}
            | figures([row for row in rows if row.arrival.sla == sla])
            for sla in SLA_CLASSES
        },
        "ttft_ms": percentiles_ms(row.served.ttft_s for row in rows),
        "prefix": _prefix(receipts)
        | {"prompt_tokens": sum(row.arrival.trace.isl_tokens for row in rows)},
        # How late the client sent; the figures above do not have it in them.
        "send_late_ms": percentiles_ms(row.served.late_s for row in rows),
        "errors": list(dict.fromkeys(problems))[:MAX_ERRORS],
    }


def _prefix(receipts: Sequence[gw.Receipt]) -> dict[str, int]:
    """Predicted and real numbers of cached prompt tokens; the error is a sum of absolute differences."""
    pairs = [
        (receipt.actual.predicted_cached_tokens, receipt.actual.cached_tokens)
        for receipt in receipts
        if receipt.actual.HasField("cached_tokens")
    ]
    return {
        "predicted_tokens": sum(predicted for predicted, _ in pairs),
        "engine_cached_tokens": sum(cached for _, cached in pairs),
        "abs_error_tokens": sum(abs(predicted - cached) for predicted, cached in pairs),
    }


def _digest(rows: Sequence[DemoRow]) -> str:
    """SHA-256 of all tokens as little-endian u32, those of a request after their number."""
    digest = sha256()
    for row in rows:
        tokens = row.served.tokens
        digest.update(len(tokens).to_bytes(4, "little"))
        digest.update(np.array(tokens, dtype="<u4").tobytes())
    return digest.hexdigest()


def example(rows: Sequence[DemoRow]) -> DemoRow | None:
    """The request to explain: of those whose receipt has words, the first with the tightest TTFT target."""
    told = [row for row in rows if row.served.receipt and row.served.receipt.decision.text]
    return min(told, key=lambda row: row.arrival.sla.ttft_ms, default=None)


_COLUMNS: dict[str, Callable[[dict[str, dict[str, object]]], str]] = {
    "requests": lambda group: str(group["requests"]),
    "refused": lambda group: str(group["refused"]),
    "TTFT p50": lambda group: _number(group["ttft_ms"]["p50"]),
    "TTFT p99": lambda group: _number(group["ttft_ms"]["p99"]),
    "TTFT met": lambda group: _percent(group["ttft_met"]),
    "ITL p50": lambda group: _number(group["itl_ms"]["p50"]),
    "ITL p99": lambda group: _number(group["itl_ms"]["p99"]),
    "ITL met": lambda group: _percent(group["itl_met"]),
    "both met": lambda group: _percent(group["both_met"]),
}


def table(title: str, groups: object) -> Table:
    """A table of `pools` of the report."""
    return _table(title, groups, without={"refused", "both met"})


def class_table(title: str, groups: object) -> Table:
    """A table of `classes` of the report."""
    return _table(title, groups, without={"TTFT p50", "ITL p50"})


def _table(title: str, groups: object, *, without: Set[str]) -> Table:
    assert isinstance(groups, dict)
    columns = {name: text for name, text in _COLUMNS.items() if name not in without}
    shown = Table(title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    shown.add_column("", no_wrap=True)
    for column in columns:
        shown.add_column(column, justify="right")
    for name, group in groups.items():
        shown.add_row(name, *(text(group) for text in columns.values()))
    return shown


def _number(value: object) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(value: object) -> str:
    return "-" if not isinstance(value, float) else f"{value:.1%}"
