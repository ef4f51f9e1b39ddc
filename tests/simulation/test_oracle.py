"""What the oracle of a replay works out by formula is what a client measures in the gateway's graph."""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from slagate.pools.grid.grid import Stage
from slagate.router.replay.batches import NO_STALL, BatchMember, DecodeBatch, Stall
from slagate.router.replay.classes import RequestClass
from slagate.router.replay.client import Answer, Ask
from slagate.router.replay.fleet import IDEAL, SimFleet, SimPool, load_fleet
from slagate.router.replay.oracle import feasible, idle_itl_s, idle_ttft_s, scheduled
from slagate.router.replay.policies.registry import make
from slagate.router.replay.run import play
from slagate.router.replay.timelines import WorkerPace
from slagate.router.replay.trace import TraceRow
from slagate.workers.sim.args import VOCAB_SIZE

FLEETS = Path(str(files("slagate.configs"))) / "suites" / "fleets"
STEP_S = 0.02
"""More than a step takes here: what comes in the middle of one waits for its end."""


def ask(number: int, at_s: float, isl: int, osl: int, *, ttft_s: float = 15.0) -> Ask:
    """One whose answer ends by itself."""
    row = TraceRow(number, at_s, isl, osl)
    sla = RequestClass("c", 1.0, ttft_ms=ttft_s * 1000, itl_ms=15)
    return Ask(row, sla, at_s, row.prompt(VOCAB_SIZE), osl, 400, ignore_eos=False)


def played(fleet: SimFleet, asks: Sequence[Ask]) -> list[Answer]:
    answers = play(fleet, asks, make("prefix", {}), IDEAL, 1).answers
    return sorted(answers, key=lambda answer: answer.ask.row.number)


def pools_of(fleet: SimFleet, answer: Answer) -> tuple[SimPool, SimPool]:
    pools = {pool.name: pool for pool in fleet.pools}
    used = [pools[stage.pool] for stage in answer.receipt.decision.stages]
    return used[0], used[-1]


@pytest.mark.parametrize("name", ["split", "aggregated"])
def test_a_lone_request_takes_as_long_as_the_formula_says(name: str) -> None:
    fleet = load_fleet(FLEETS / f"{name}.json")
    sizes = [(64, 2), (2000, 100), (9000, 1), (20_000, 20), (33_000, 3)]
    asks = [
        ask(number, number * 12.0, isl, osl, ttft_s=0.9 if number % 2 else 15.0)
        for number, (isl, osl) in enumerate(size for size in sizes for _ in range(2))
    ]
    for answer in played(fleet, asks):
        way = pools_of(fleet, answer)
        assert answer.ttft_s == pytest.approx(
            idle_ttft_s(way, answer.ask, IDEAL.latency_s), abs=1e-4
        )
        assert (answer.itl_s or 0.0) == pytest.approx(idle_itl_s(way[1], answer.ask), rel=1e-3)
    can_be = feasible(fleet, asks, IDEAL)
    assert can_be == [True] * 9 + [False]
    assert scheduled(fleet, asks, IDEAL, 1) == can_be


@pytest.fixture
def single(tmp_path: Path, request: pytest.FixtureRequest) -> SimFleet:
    """The fleet of this name with one worker of one GPU for each stage."""
    file = json.loads((FLEETS / f"{request.param}.json").read_text(encoding="utf-8"))
    for stage in ("prefill", "decode", "agg"):
        name, *others = file.pop(f"{stage}_pools", [""])
        if name:
            strategy = file[f"{stage}_pool_selection_strategy"]
            mapping = f"{stage}_pool_mapping"
            file |= {f"num_{stage}_pools": 1, f"{stage}_pools": [name]}
            strategy[mapping] = zeros(strategy[mapping])
            file["pools"][name] |= {"tp": 1, "replicas": 1}
        for other in others:
            del file["pools"][other]
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps(file), encoding="utf-8")
    return load_fleet(path)


def zeros(table: Any) -> Any:
    return [zeros(row) for row in table] if isinstance(table, list) else 0


@pytest.mark.parametrize("single", ["split", "aggregated"], indirect=True)
def test_a_batch_ends_when_it_was_said_to(single: SimFleet) -> None:
    """Eight requests of one worker, of lengths that let some leave between. Prompts do not overlap."""
    asks = [ask(n, 0.6 * n, 1000 + 700 * n, 100 + 40 * (n * 5 % 8)) for n in range(8)]
    answers = played(single, asks)
    pool = single.pools[-1]
    batch = DecodeBatch(pool.profile, WorkerPace(), pool.batch)
    began_s = answers[0].started_s
    for answer in answers:
        isl, number = answer.ask.row.isl_tokens, answer.ask.row.number
        assert answer.first_s is not None
        first_s, stall = answer.first_s - began_s, NO_STALL
        if pool.stage is Stage.AGG:
            stall = Stall(pool.profile.prefill_s(isl, 0), 1)
            batch.advance(answer.ask.arrival_s)
        else:
            batch.advance(first_s)
        assert batch.join(BatchMember(number, len(answer.tokens) - 1, isl, 0, 9.0), stall)
        assert batch.now_s == pytest.approx(first_s, abs=STEP_S)
    last_s = sorted(answer.last_s - began_s for answer in answers if answer.last_s is not None)
    left_s = [end_s for end_s in last_s if end_s > batch.now_s]
    assert len(left_s) > 3
    for end_s in left_s:
        assert batch.first_end_s == pytest.approx(end_s, abs=STEP_S)
        batch.advance(batch.first_end_s)
    assert not len(batch)
