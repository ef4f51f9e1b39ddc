"""Figures of a run, from answers made by hand."""

from typing import Any

import grpc
import numpy as np
import pytest

from slagate.proto import gateway_pb2 as gw
from slagate.proto.rpc.status import OK, Status
from slagate.router.replay.classes import RequestClass
from slagate.router.replay.client import Answer, Ask
from slagate.router.replay.measure import request_figures
from slagate.router.replay.trace import TraceRow

CLASS = RequestClass("fast", 1.0, ttft_ms=1000, itl_ms=20)


def answer(
    ttft_s: float | None,
    itl_s: float = 0.01,
    *,
    n_tokens: int = 11,
    status: Status = OK,
    predicted_ms: float | None = None,
    cached: int = 0,
) -> Answer:
    ask = Ask(
        TraceRow(0, 0.0, 100, n_tokens),
        CLASS,
        0.0,
        np.zeros(0, np.uint32),
        n_tokens,
        n_tokens,
        ignore_eos=True,
    )
    found = Answer(ask, lambda: 5.0)
    found.status = status
    if ttft_s is not None:
        found.tokens = [1] * n_tokens
        found.first_s = 5.0 + ttft_s
        found.last_s = found.first_s + itl_s * (n_tokens - 1)
    found.receipt.actual.cached_tokens = cached
    candidate = gw.Candidate()
    if predicted_ms is not None:
        candidate.predicted_ttft_ms = predicted_ms
    found.receipt.decision.stages.add().candidates.append(candidate)
    return found


def figures(*answers: Answer, can: list[bool] | None = None) -> dict[str, Any]:
    return request_figures(
        answers, can or [True] * len(answers), gpus=4, seconds=10.0, with_latencies=True
    )


REFUSED = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
FAILED = Status(grpc.StatusCode.UNAVAILABLE, "gone")


def test_who_is_late_refused_or_failed_has_missed() -> None:
    found = figures(
        answer(1.0),  # at its target
        answer(1.001),
        answer(0.5, 0.0201),
        answer(None, status=REFUSED),
        answer(0.5, status=FAILED),
    )
    shares = {name: found[name] for name in ("both_met", "ttft_met", "itl_met", "refused")}
    assert shares == {"both_met": 0.2, "ttft_met": 0.4, "itl_met": 0.4, "refused": 0.2}
    assert found["goodput_per_gpu"] == 1 / 40
    assert found["gpu_s_per_met"] == 40
    assert found["tokens_per_s"] == pytest.approx(4.4)


def test_an_answer_of_one_token_has_no_itl_to_miss() -> None:
    found = figures(answer(0.5, n_tokens=1))
    assert found["both_met"] == 1
    assert found["itl_ms"]["p50"] is None


def test_of_the_feasible_only_those_count() -> None:
    found = figures(answer(0.5), answer(2.0), answer(9.0), can=[True, True, False])
    assert (found["feasible"], found["both_met_feasible"]) == (pytest.approx(0.666667), 0.5)


def test_prediction_errors_are_relative_to_what_happened() -> None:
    found = figures(answer(1.0, predicted_ms=900), answer(0.5, predicted_ms=1000), answer(0.5))
    assert found["predict_ttft_mdape"] == pytest.approx(0.55)
    assert found["predict_ttft_p90ape"] == pytest.approx(0.91)


def test_the_hit_rate_counts_tokens() -> None:
    assert figures(answer(0.5, cached=64), answer(0.5))["prefix_hit"] == 0.32


def test_nothing_gives_no_figures_and_no_error() -> None:
    found = figures(answer(None, status=REFUSED), can=[False])
    for name in ("gpu_s_per_met", "prefix_hit", "both_met_feasible", "predict_ttft_mdape"):
        assert found[name] is None
    assert found["ttft_ms"] == {"p50": None, "p99": None, "percentiles": []}
