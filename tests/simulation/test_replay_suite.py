"""What a suite asks for, in runs: slow pools, ranks, noise on predictions, prompts of any length."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import grpc
import pytest

from slagate.pools.grid.grid import Stage
from slagate.proto import gateway_pb2 as gw
from slagate.router.replay.classes import RequestClass
from slagate.router.replay.client import Answer
from slagate.router.replay.fleet import load_fleet
from slagate.router.replay.policies.registry import make
from slagate.router.replay.run import play
from slagate.router.replay.suite import parse_suite
from slagate.router.replay.trace import TraceRow

FLEETS = Path(str(files("slagate.configs"))) / "suites" / "fleets"
CLASS = RequestClass("a", 1, 4000, 30, max_tokens=40)
ROWS = [TraceRow(n, n * 0.3, 1000 + 700 * (n % 5), 12, (0, n % 6)) for n in range(16)]


def played(
    rows: Sequence[TraceRow], *, policy: str = "prefix", fleet: str = "split", **changes: Any
) -> list[Answer]:
    """The answers of a run, by number of the row; `play` checks all invariants."""
    content = {
        "traces": [__file__],
        "fleets": [str(FLEETS / f"{fleet}.json")],
        "classes": [CLASS._asdict()],
        "policies": [policy],
        "loads": [1],
        "seeds": [1],
        "requests": len(rows),
        **changes,
    }
    suite = parse_suite(content, source="test")
    answers = play(
        load_fleet(suite.fleets[0], suite.ranks),
        suite.asks(rows, load=1, seed=1),
        make(policy, {}),
        suite.imperfection,
        1,
    ).answers
    return sorted(answers, key=lambda answer: answer.ask.row.number)


def stage_of(answer: Answer, stage: Stage) -> gw.StageChoice:
    wire = {Stage.PREFILL: gw.STAGE_PREFILL, Stage.DECODE: gw.STAGE_DECODE}.get(stage, gw.STAGE_AGG)
    (choice,) = (each for each in answer.receipt.decision.stages if each.stage == wire)
    return choice


def predicted(answers: Sequence[Answer]) -> list[float]:
    return [stage_of(answer, Stage.PREFILL).candidates[0].predicted_ttft_ms for answer in answers]


def test_a_slow_pool_is_slow_from_its_time_on() -> None:
    usual = played(ROWS, ideal=True)
    slow = played(ROWS, ideal=True, slow={"pool": "p1", "factor": 4, "from_s": 2.4})
    ratios = [
        after.ttft_s / before.ttft_s
        for before, after in zip(usual, slow, strict=True)
        if before.ttft_s and after.ttft_s
    ]
    assert {stage_of(each, Stage.PREFILL).pool for each in slow} == {"p1"}
    assert ratios[:7] == pytest.approx([1.0] * 7)
    assert min(ratios[8:]) > 2, "but for what the transfer and decode take"


@pytest.mark.parametrize("policy", ["prefix", "round_robin"])
def test_workers_have_the_ranks_that_are_asked_for(policy: str) -> None:
    answers = played(ROWS, policy=policy, ranks={"p1": 2, "d1": 3})
    assert all(answer.is_answered for answer in answers)
    for stage, n_ranks in ((Stage.PREFILL, 2), (Stage.DECODE, 3)):
        choices = [stage_of(answer, stage) for answer in answers]
        ranks = {choice.rank for choice in choices}
        assert ranks == set(range(n_ranks)) if policy == "round_robin" else ranks <= {0, 1, 2}
        assert {choice.candidates_total for choice in choices} == {4 * n_ranks}


def test_an_aggregated_fleet_has_ranks_too() -> None:
    answers = played(ROWS, fleet="aggregated", ranks={"a1": 2})
    assert all(answer.is_answered for answer in answers)
    assert {stage_of(answer, Stage.AGG).candidates_total for answer in answers} == {16}


def test_noise_is_on_predictions_and_the_same_in_each_run() -> None:
    usual, noisy = played(ROWS), played(ROWS, prediction_noise=0.6)
    assert predicted(noisy) == predicted(played(ROWS, prediction_noise=0.6))
    assert all(a != b for a, b in zip(predicted(usual), predicted(noisy), strict=True))
    assert all(answer.is_answered for answer in noisy)


def test_an_answer_ends_with_the_context_window_and_a_longer_prompt_is_refused() -> None:
    lengths = (131_050, 131_071, 131_072, 200_000, 1)
    answers = played([TraceRow(n, 40.0 * n, isl, 500) for n, isl in enumerate(lengths)])
    assert [len(answer.tokens) for answer in answers] == [22, 1, 0, 0, 40]
    for answer in answers[2:4]:
        assert answer.status is not None
        assert answer.status.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "context window" in answer.status.message


def test_requests_may_come_all_at_once() -> None:
    answers = played([row._replace(time_s=7.0) for row in ROWS])
    assert [answer.started_s for answer in answers] == [answers[0].started_s] * len(ROWS)
    assert all(answer.is_answered for answer in answers)
