"""The figures of a demo run: attribution to pools, percentiles, targets, problems."""

import io
from collections.abc import Callable

import grpc
import pytest
from rich.console import Console
from rich.table import Table

from slagate.pools.grid.grid import Stage
from slagate.proto import gateway_pb2 as gw
from slagate.proto.rpc.status import OK, Status
from slagate.router.demo.report import (
    DemoRow,
    build_report,
    class_table,
    example,
    figures,
    pool_of,
    table,
)
from slagate.router.loadgen.loadgen import ServedRequest
from slagate.router.loadgen.trace import SLA_CLASSES, Arrival, SlaClass, TraceRequest

INTERACTIVE, STANDARD, BATCH = SLA_CLASSES
POOLS = [(Stage.PREFILL, "p1"), (Stage.PREFILL, "p2"), (Stage.DECODE, "d1")]


def receipt(prefill: str = "p1", *, retried_at: str = "", text: str = "") -> gw.Receipt:
    predicted = 90 if prefill == "p1" else 110
    answer = gw.Receipt(actual=gw.Actual(cached_tokens=100, predicted_cached_tokens=predicted))
    answer.decision.text = text
    for stage, pool in ((gw.STAGE_PREFILL, prefill), (gw.STAGE_DECODE, "d1")):
        answer.decision.stages.add(stage=stage, pool=pool)
        answer.attempts.add(stage=stage, pool=pool, status="OK")
    if retried_at:
        answer.attempts.insert(1, gw.Attempt(stage=gw.STAGE_PREFILL, pool=retried_at, status="OK"))
    return answer


def row(
    *,
    ttft_s: float | None = 0.1,
    itl_s: float | None = 0.01,
    sla: SlaClass = INTERACTIVE,
    status: Status = OK,
    mismatch: str = "",
    got: gw.Receipt | None = None,
) -> DemoRow:
    served = ServedRequest("r1", 0.0, ttft_s, itl_s, (1, 2), status, mismatch, got, 1.0)
    return DemoRow(Arrival(0.0, TraceRequest(0, 1000, 2, (0, 1)), sla), served, mismatch)


def test_pool_is_the_last_one_tried_then_the_one_chosen() -> None:
    assert pool_of(receipt("p1"), Stage.PREFILL) == "p1"
    assert pool_of(receipt("p1", retried_at="p2"), Stage.PREFILL) == "p2"
    assert pool_of(receipt("p1", retried_at="p2"), Stage.DECODE) == "d1"
    chosen_only = receipt("p1")
    chosen_only.ClearField("attempts")
    assert pool_of(chosen_only, Stage.PREFILL) == "p1"
    assert pool_of(chosen_only, Stage.AGG) == ""
    assert pool_of(None, Stage.PREFILL) == ""


def test_targets_are_each_requests_own_and_count_when_just_met() -> None:
    rows = [
        row(ttft_s=1.0, itl_s=0.02),
        row(ttft_s=1.001, itl_s=0.021),
        row(ttft_s=1.001, itl_s=0.021, sla=STANDARD),
        row(ttft_s=20.001, itl_s=0.2, sla=BATCH),
    ]
    shown = figures(rows)
    assert (shown["ttft_met"], shown["itl_met"], shown["both_met"]) == (0.5, 0.75, 0.5)


def test_both_are_met_by_what_was_answered_to_its_end_and_missed_neither() -> None:
    gone = Status(grpc.StatusCode.UNAVAILABLE, "gone")
    assert figures([row(itl_s=None)])["both_met"] == 1.0
    for missed in (
        row(ttft_s=1.001),
        row(itl_s=0.021),
        row(status=gone),
        row(ttft_s=None, itl_s=None),
    ):
        assert figures([missed])["both_met"] == 0.0


def test_what_admission_refused_is_no_failure_and_has_missed_its_targets() -> None:
    told = receipt()
    told.decision.admission = "refused"
    full = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "predicted to miss")
    rows = [
        row(got=receipt()),
        row(ttft_s=None, itl_s=None, status=full, got=told, sla=STANDARD),
        row(ttft_s=None, itl_s=None, status=full, got=receipt(), sla=STANDARD),
    ]
    report = build_report(rows, POOLS)
    counts = ("requests", "completed", "refused", "failed", "both_met")
    assert [report[name] for name in counts] == [3, 1, 1, 1, 0.3333]
    assert report["errors"] == ["RESOURCE_EXHAUSTED: predicted to miss"]
    classes = report["classes"]
    assert isinstance(classes, dict)
    standard = classes["standard"]
    assert (standard["requests"], standard["refused"], standard["both_met"]) == (2, 1, 0.0)


def test_a_request_without_tokens_misses_ttft_and_has_no_itl() -> None:
    shown = figures([row(), row(ttft_s=None, itl_s=None)])
    assert (shown["requests"], shown["ttft_met"], shown["itl_met"]) == (2, 0.5, 1.0)
    assert shown["ttft_ms"] == {"p50": 100.0, "p99": 100.0}


def test_percentiles_are_of_milliseconds() -> None:
    shown = figures([row(ttft_s=n / 1000) for n in range(101)])
    assert shown["ttft_ms"] == {"p50": 50.0, "p99": 99.0}


def test_a_group_without_requests_has_no_figures() -> None:
    none = {"p50": None, "p99": None}
    assert figures([]) == {
        "requests": 0,
        "refused": 0,
        "ttft_ms": none,
        "itl_ms": none,
        "ttft_met": None,
        "itl_met": None,
        "both_met": None,
    }


def test_report_counts_failures_mismatches_and_missing_receipts_apart() -> None:
    gone = Status(grpc.StatusCode.UNAVAILABLE, "gone")
    rows = [
        row(got=receipt("p1")),
        row(got=receipt("p2"), sla=BATCH),
        row(got=receipt("p2"), mismatch="token 3 is 4, not 5"),
        row(got=receipt("p1"), status=gone),
        row(status=gone),
    ]
    report = build_report(rows, POOLS)
    counts = ("requests", "completed", "failed", "token_mismatches", "receipts_missing")
    assert [report[name] for name in counts] == [5, 3, 2, 1, 1]
    assert report["errors"] == ["mismatch: token 3 is 4, not 5", "UNAVAILABLE: gone"]
    assert report["prefix"] == {
        "predicted_tokens": 400,
        "engine_cached_tokens": 400,
        "abs_error_tokens": 40,
        "prompt_tokens": 5000,
    }
    pools = report["pools"]
    assert isinstance(pools, dict)
    assert [(name, pool["stage"], pool["requests"]) for name, pool in pools.items()] == [
        ("p1", "prefill", 2),
        ("p2", "prefill", 2),
        ("d1", "decode", 4),
    ]
    classes = report["classes"]
    assert isinstance(classes, dict)
    assert {name: group["requests"] for name, group in classes.items()} == {
        "interactive": 4,
        "standard": 0,
        "batch": 1,
    }


def test_only_the_first_different_errors_are_kept() -> None:
    rows = [row(mismatch=f"fault {n // 2}") for n in range(20)]
    assert build_report(rows, POOLS)["errors"] == [f"mismatch: fault {n}" for n in range(5)]


def test_the_explained_request_is_the_first_tight_one_with_words() -> None:
    rows = [
        row(got=receipt(text="relaxed"), sla=BATCH),
        row(got=receipt(), sla=INTERACTIVE),
        row(got=receipt(text="first"), sla=INTERACTIVE),
        row(got=receipt(text="second"), sla=INTERACTIVE),
    ]
    assert example(rows) is rows[2]
    assert example(rows[:2]) is rows[0]
    assert example([row()]) is None


@pytest.mark.parametrize(
    ("group", "made", "columns"),
    [
        ("pools", table, ["TTFT p50", "ITL met", "12345.6", "123.0"]),
        (
            "classes",
            class_table,
            ["refused", "TTFT p99", "ITL met", "both met", "12345.6", "123.0"],
        ),
    ],
)
def test_table_fits_80_columns_and_shows_every_name(
    group: str, made: Callable[[str, object], Table], columns: list[str]
) -> None:
    report = build_report([row(ttft_s=12.3456, itl_s=0.123, got=receipt())], POOLS)
    out = io.StringIO()
    Console(file=out, width=80).print(made("Title", report[group]))
    groups = report[group]
    assert isinstance(groups, dict)
    text = out.getvalue()
    for name in [*groups, *columns, "0.0%"]:
        assert name in text
