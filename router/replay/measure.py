"""The figures of a run: who met the targets, at what cost, and how well it had been predicted.

TTFT counts from a request's arrival at the gateway. Who was refused, failed or was late has missed. An
answer of one token has no ITL to miss.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slagate.router.replay.client import Answer
from slagate.router.replay.fleet import SimFleet
from slagate.router.replay.run import Played

Figures = dict[str, Any]

QUANTILES = tuple(range(0, 101, 5))
"""Percentiles of the distributions that plots draw."""

DIGITS = 6


def run_figures(played: Played, can_be_met: Sequence[bool], fleet: SimFleet) -> Figures:
    """All figures of one run; `can_be_met` says of each request whether an idle fleet serves it in time."""
    answers = played.answers
    found = request_figures(answers, can_be_met, gpus=fleet.gpus, seconds=played.seconds)
    found["idle_share"] = {
        name: _share(pool.n_idle, pool.n_looks) for name, pool in played.idleness.items()
    }
    found["idle_while_waiting"] = {
        name: _share(pool.n_idle_while_waiting, pool.n_looks)
        for name, pool in played.idleness.items()
    }
    found["classes"] = {}
    for name in dict.fromkeys(answer.ask.sla.name for answer in answers):
        of_class = [at for at, answer in enumerate(answers) if answer.ask.sla.name == name]
        found["classes"][name] = request_figures(
            [answers[at] for at in of_class],
            [can_be_met[at] for at in of_class],
            gpus=fleet.gpus,
            seconds=played.seconds,
            with_latencies=True,
        )
    return found


def request_figures(
    answers: Sequence[Answer],
    can_be_met: Sequence[bool],
    *,
    gpus: float,
    seconds: float,
    with_latencies: bool = False,
) -> Figures:
    """Figures of these requests, which kept all `gpus` busy for `seconds`."""
    n = len(answers)
    both = [_meets_ttft(answer) and _meets_itl(answer) for answer in answers]
    n_met = sum(both)
    answered = [answer for answer in answers if answer.is_answered]
    prompt_tokens = sum(answer.ask.row.isl_tokens for answer in answered)
    cached = sum(answer.receipt.actual.cached_tokens for answer in answered)
    mdape, p90ape = _prediction_errors(answered)
    found = {
        **schedule_figures(both, can_be_met),
        "ttft_met": _share(sum(map(_meets_ttft, answers)), n),
        "itl_met": _share(sum(map(_meets_itl, answers)), n),
        "refused": _share(sum(answer.is_refused for answer in answers), n),
        "goodput_per_gpu": _share(n_met, seconds * gpus),
        "gpu_s_per_met": _share(seconds * gpus, n_met),
        "prefix_hit": _share(cached, prompt_tokens),
        "tokens_per_s": _share(sum(len(answer.tokens) for answer in answers), seconds),
        "predict_ttft_mdape": mdape,
        "predict_ttft_p90ape": p90ape,
    }
    if with_latencies:
        found["ttft_ms"] = _distribution([answer.ttft_s for answer in answered])
        found["itl_ms"] = _distribution([answer.itl_s for answer in answered])
    return found


def schedule_figures(met: Sequence[bool], can_be_met: Sequence[bool]) -> Figures:
    """The figures that a schedule has: which requests meet both targets, and which can."""
    n, n_feasible = len(met), sum(can_be_met)
    return {
        "n": n,
        "feasible": _share(n_feasible, n),
        "both_met": _share(sum(met), n),
        "both_met_feasible": _share(
            sum(is_met for is_met, can in zip(met, can_be_met, strict=True) if can), n_feasible
        ),
    }


def _meets_ttft(answer: Answer) -> bool:
    seconds = answer.ttft_s
    return answer.is_answered and seconds is not None and seconds * 1000 <= answer.ask.sla.ttft_ms


def _meets_itl(answer: Answer) -> bool:
    seconds = answer.itl_s
    return answer.is_answered and (seconds is None or seconds * 1000 <= answer.ask.sla.itl_ms)


def _prediction_errors(answers: Sequence[Answer]) -> tuple[float | None, float | None]:
    """Median and 90th percentile of |predicted - actual| / actual TTFT; None where none was predicted."""
    errors = []
    for answer in answers:
        candidates = answer.receipt.decision.stages[0].candidates
        if answer.ttft_s and candidates and candidates[0].HasField("predicted_ttft_ms"):
            predicted_s = candidates[0].predicted_ttft_ms / 1000
            errors.append(abs(predicted_s - answer.ttft_s) / answer.ttft_s)
    if not errors:
        return None, None
    return _rounded(np.percentile(errors, 50)), _rounded(np.percentile(errors, 90))


def _distribution(seconds: Sequence[float | None]) -> Mapping[str, Any]:
    """p50 and p99 in ms, and for plots the percentiles of `QUANTILES`; of those that have one."""
    ms = [each * 1000 for each in seconds if each is not None]
    if not ms:
        return {"p50": None, "p99": None, "percentiles": []}
    return {
        "p50": _rounded(np.percentile(ms, 50)),
        "p99": _rounded(np.percentile(ms, 99)),
        "percentiles": [_rounded(each) for each in np.percentile(ms, QUANTILES)],
    }


def _share(part: float, whole: float) -> float | None:
    """A quotient; None of nothing."""
    return _rounded(part / whole) if whole else None


def _rounded(value: float) -> float:
    return round(float(value), DIGITS)
