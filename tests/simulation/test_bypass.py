"""What a bypass of prefill workers brings, in a replay: short prompts that wait behind long ones.

Over one prefill and two decode workers: requests that meet both targets, and those that prefill has to do.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slagate.proto import gateway_pb2 as gw
from slagate.router.replay.classes import RequestClass
from slagate.router.replay.client import Answer
from slagate.router.replay.fleet import IDEAL, REAL, Imperfection, load_fleet
from slagate.router.replay.policies.choose import Router
from slagate.router.replay.run import play
from slagate.router.replay.suite import load_suite
from slagate.router.replay.trace import TraceRow
from slagate.router.scheduling.policy import choose_by_load
from support.builders import PROFILE, config

N_REQUESTS = 240
PER_S = 27.0
CHAT = RequestClass("chat", 1.0, ttft_ms=600, itl_ms=20, max_tokens=200)


def trace() -> list[TraceRow]:
    """A quarter of the prompts are long, so that one prefill worker has too much to do."""
    rng, at_s, rows = random.Random(1), 0.0, []
    for number in range(N_REQUESTS):
        at_s += rng.expovariate(PER_S)
        n_tokens = rng.randint(6000, 12_000) if rng.random() < 0.25 else rng.randint(64, 600)
        rows.append(TraceRow(number, at_s, n_tokens, rng.randint(40, 200)))
    return rows


def fleet_file(folder: Path, bypass: str | None) -> Path:
    """One prefill worker and two decode workers; None: the file does not speak of bypasses."""
    spec = {"profile": PROFILE, "tp": 1}
    pools: dict[str, dict[str, Any]] = {
        "prefill": {**spec, "workers": ["p:1"]},
        "decode": {**spec, "workers": ["d:1", "d:2"]},
    }
    scheduling = {"spill": "any", "admission": "on"}
    if bypass is not None:
        scheduling["bypass"] = bypass
    path = folder / f"{bypass}.json"
    path.write_text(config(pools=pools, scheduling=scheduling).text)
    return path


def played(
    folder: Path, bypass: str | None, like: Imperfection, router: Router | None = None
) -> list[Answer]:
    suite = load_suite("sla-small").model_copy(update={"classes": (CHAT,), "requests": N_REQUESTS})
    fleet = load_fleet(fleet_file(folder, bypass), classes=suite.classes)
    asks = suite.asks(trace(), load=1.0, seed=1)
    return play(fleet, asks, router or Router(), like, 1).answers


def both_met(answers: list[Answer]) -> int:
    return sum(
        answer.is_answered
        and answer.receipt.actual.ttft_met
        and (answer.receipt.actual.itl_met or not answer.receipt.actual.HasField("itl_met"))
        for answer in answers
    )


def stages(answers: list[Answer]) -> Counter[str]:
    """Legs that went well, by stage."""
    return Counter(
        gw.Stage.Name(attempt.stage).removeprefix("STAGE_").lower()
        for answer in answers
        for attempt in answer.receipt.attempts
        if attempt.status == "OK"
    )


@pytest.mark.parametrize("like", [REAL, IDEAL], ids=["real", "ideal"])
def test_prompts_that_prefill_would_compute_too_late_are_computed_by_decode_workers(
    tmp_path: Path, like: Imperfection
) -> None:
    off, auto = (played(tmp_path, mode, like) for mode in ("off", "auto"))
    assert stages(off)["agg"] == 0
    legs = stages(auto)
    assert legs["prefill"] == legs["decode"] > N_REQUESTS / 20
    assert legs["agg"] > N_REQUESTS / 4
    assert legs["agg"] + legs["decode"] == sum(answer.is_answered for answer in auto)
    assert both_met(auto) > both_met(off) + N_REQUESTS / 20
    # What was promised to the answers that run there is kept.
    missed = [sum(a.is_answered for a in each) - both_met(each) for each in (off, auto)]
    assert missed[1] <= max(missed[0], N_REQUESTS / 20), missed


def test_without_it_nothing_is_other_than_it_was(tmp_path: Path) -> None:
    """Though the decode workers say that they take whole requests."""
    default, off = (played(tmp_path, mode, REAL) for mode in (None, "off"))
    for one, other in zip(default, off, strict=True):
        first, second = one.receipt, other.receipt
        for each in (first, second):
            each.config_version = ""
            each.unix_s = 0.0
            for choice in each.decision.stages:
                choice.config_version = ""
        assert first == second
    assert not any(answer.receipt.decision.untaken for answer in off)


def test_other_policies_do_without_it(tmp_path: Path) -> None:
    answers = played(tmp_path, "auto", REAL, Router(choose=choose_by_load))
    assert stages(answers)["agg"] == 0
