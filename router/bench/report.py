"""The results of `slagate bench`: figures of each level of concurrency, as a table and as CSV."""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import JustifyMethod
from rich.table import Table

from slagate.router.loadgen.loadgen import ServedRequest, percentiles_ms

QUANTILES = (50, 90, 99)
BROKEN = "BROKEN_STREAM"
"""An answer that ended with OK and broke the contract; all other errors have names of gRPC statuses."""

Figure = str | int | float | None


class Targets(NamedTuple):
    """The targets that each request asks for, and is judged by; None: no such target."""

    ttft_ms: float | None = None
    itl_ms: float | None = None


class ThroughputUnit(NamedTuple):
    """What throughput is divided by: a number of GPUs or of workers, or one fleet."""

    unit: str  # gpu, worker or fleet
    n: int = 1


@dataclass(frozen=True, slots=True)
class LevelFigures:
    """One level of concurrency, as measured."""

    concurrency: int
    served: Sequence[ServedRequest]
    seconds: float  # from the first request sent to the last one ended
    interrupted: bool  # more would have been sent
    client_busy_ratio: float  # of one core, by this process; near 1 it measures itself


def met(served: ServedRequest, targets: Targets) -> bool:
    """Whether a request was answered, and within every target that is given.

    An answer of one token has no ITL, and so cannot miss the target of it.
    """
    ttft_s, itl_s = served.ttft_s, served.itl_s
    return (
        problem(served) is None
        and (targets.ttft_ms is None or (ttft_s is not None and ttft_s * 1000 <= targets.ttft_ms))
        and (targets.itl_ms is None or itl_s is None or itl_s * 1000 <= targets.itl_ms)
    )


def problem(served: ServedRequest) -> str | None:
    """Why a request does not count as answered: a gRPC status or `BROKEN`; None: it was answered."""
    if served.failed:
        return served.status.code.name
    return BROKEN if served.fault else None


def figures(level: LevelFigures, *, targets: Targets, share: ThroughputUnit) -> dict[str, Figure]:
    """The figures of a level by column, in the order of the CSV file; None: no value.

    Latencies and tokens are those of answered requests; `sla_met` is the share of all requests.
    """
    answered = [one for one in level.served if problem(one) is None]
    n_tokens = sum(len(one.tokens) for one in answered)
    itl_ms = percentiles_ms((one.itl_s for one in answered), of=QUANTILES)
    latencies = {
        "ttft": percentiles_ms((one.ttft_s for one in answered), of=QUANTILES),
        "itl": itl_ms,
        "e2e": percentiles_ms((one.e2e_s for one in answered), of=QUANTILES),
    }
    errors = Counter(filter(None, map(problem, level.served)))
    judged = level.served if any(target is not None for target in targets) else ()
    row: dict[str, Figure] = {
        "concurrency": level.concurrency,
        "requests": len(level.served),
        "answered": len(answered),
        "seconds": round(level.seconds, 3),
        "requests_per_s": _ratio(len(answered), level.seconds),
        "output_tokens": n_tokens,
        "output_tokens_per_s": _ratio(n_tokens, level.seconds),
        # Tokens per second of a stream with the median ITL.
        "tokens_per_s_per_user": _ratio(1000, itl_ms["p50"]),
        "tokens_per_s_per_share": _ratio(n_tokens, level.seconds * share.n),
        "share": share.unit,
        "shares": share.n,
    }
    for name, percentiles in latencies.items():
        row |= {f"{name}_{q}_ms": value for q, value in percentiles.items()}
    return row | {
        "ttft_target_ms": targets.ttft_ms,
        "itl_target_ms": targets.itl_ms,
        "sla_met": (
            round(sum(met(one, targets) for one in judged) / len(judged), 4) if judged else None
        ),
        "errors": " ".join(f"{name}:{errors[name]}" for name in sorted(errors)),
        "client_busy": round(level.client_busy_ratio, 3),
        "interrupted": int(level.interrupted),
    }


def _ratio(amount: float, whole: float | None) -> float | None:
    return round(amount / whole, 3) if whole else None


def csv_text(rows: Sequence[Mapping[str, Figure]], about: Mapping[str, Figure]) -> str:
    """Rows as CSV with a header; the columns of `about` come first and are the same in each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for number, row in enumerate(rows):
        full = {**about, **row}
        if number == 0:
            writer.writerow(full)
        writer.writerow("" if value is None else value for value in full.values())
    return text.getvalue()


def table(rows: Sequence[Mapping[str, Figure]], title: str) -> Table:
    """A table, for people, of rows of figures; latencies are p50, p90 and p99."""
    shown = Table(title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    unit = {"gpu": "GPU", "worker": "worker", "fleet": "fleet"}[str(rows[0]["share"])]
    columns = ["at once", "req/s", "tokens/s", "/user", f"/{unit}"]
    columns += [f"{name} p50 p90 p99 (ms)" for name in ("TTFT", "ITL", "E2E")]
    for column in [*columns, "SLA met", "errors"]:
        justify: JustifyMethod = "left" if column == "errors" else "right"
        shown.add_column(column, justify=justify, no_wrap=" p50 " in column)
    for row in rows:
        met_share = row["sla_met"]
        shown.add_row(
            f"{row['concurrency']}{'*' if row['interrupted'] else ''}",
            _number(row["requests_per_s"], 2),
            _number(row["output_tokens_per_s"]),
            _number(row["tokens_per_s_per_user"], 1),
            _number(row["tokens_per_s_per_share"], 1),
            *(_three(row, name, digits) for name, digits in (("ttft", 0), ("itl", 1), ("e2e", 0))),
            "-" if not isinstance(met_share, float) else f"{met_share:.1%}",
            str(row["errors"]) or "-",
        )
    if any(row["interrupted"] for row in rows):
        shown.caption = "* interrupted: what had ended by then"
    return shown


def _three(row: Mapping[str, Figure], name: str, digits: int) -> str:
    return " ".join(_number(row[f"{name}_p{q}_ms"], digits).rjust(6) for q in QUANTILES)


def _number(value: Figure, digits: int = 0) -> str:
    return "-" if not isinstance(value, int | float) else f"{value:,.{digits}f}"
