"""Counts per grid cell, against a count of the same records done by hand."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import grpc
import msgspec
import pytest

from slagate.pools.grid.grid import Axis, Stage, StageGrid
from slagate.pools.inflight.row_view import State
from slagate.proto import gateway_pb2 as gw
from slagate.proto.rpc.status import OK, Status
from slagate.router.receipts.attainment import Attainment, CellTraffic
from slagate.router.receipts.record import Record
from slagate.router.request.errors import Outcome
from slagate.router.request.sla import Sla
from slagate.router.scheduling.policy import choose
from support.builders import ask, pool_view, rng, view

STAGES = {
    "disagg": (Stage.PREFILL, Stage.DECODE),
    "agg": (Stage.AGG,),
}
POOLS = {
    "pool": pool_view("pool", [view()]),
    "down": pool_view("down", [view(state=State.CONNECTING)]),
}
FAILED = Status(grpc.StatusCode.UNAVAILABLE, "gone")


def grid(field: str) -> StageGrid:
    """Two bands of 100 tokens by two of 50 ms."""
    axes = (Axis("isl", 0, 200, 2), Axis(field, 0, 100, 2))
    return StageGrid(axes, cells=((0,),) * 4, pool_names=("pool",), priorities=(0,))


GRIDS = {
    Stage.PREFILL: grid("ttft_ms"),
    Stage.DECODE: grid("itl_ms"),
    Stage.AGG: grid("itl_ms"),
}


def record(
    mode: str = "disagg",
    *,
    isl_tokens: int = 50,
    ttft_ms: float | None = None,
    itl_ms: float | None = None,
    tokens_at_s: tuple[float, ...] = (),
    version: str = "v1",
    down: Sequence[Stage] = (),
    attempts: Sequence[tuple[Stage, Status]] = (),
) -> Record:
    """A request that has ended, with a token at each of these times after its arrival.

    Stages that are `down` had no worker for it.
    """
    made = Record(10.0)
    sla = made.sla = Sla(ttft_ms, itl_ms)
    stages = {
        stage: replace(GRIDS[stage], pool_names=("down" if stage in down else "pool",))
        for stage in STAGES[mode]
    }
    asked, config = ask(isl_tokens=isl_tokens, sla=sla), gw.GatewayConfig(version=version)
    made.decision = choose(asked, stages, POOLS, rng=rng(), config=config)
    for at_s in tokens_at_s:
        made.stats.count_tokens(1, made.started_s + at_s)
    for stage, status in attempts:
        made.attempt(stage, status)
    return made


def counted(
    *records: Record, outcome: Outcome = Outcome.COMPLETED
) -> dict[str, dict[tuple[int, ...], CellTraffic]]:
    of = Attainment("v1")
    for each in records:
        of.count(each, outcome)
    found: dict[str, dict[tuple[int, ...], CellTraffic]] = {}
    for (stage, index), traffic in of.cells.items():
        found.setdefault(stage.value, {})[index] = traffic
    return found


def test_prefill_is_judged_by_ttft_and_decode_by_itl() -> None:
    slow_decode = record(ttft_ms=20.0, itl_ms=10.0, tokens_at_s=(0.019, 0.119))
    assert counted(slow_decode) == {
        "prefill": {(0, 0): CellTraffic(1, n_met=1, n_judged=1)},
        "decode": {(0, 0): CellTraffic(1, n_met=0, n_judged=1)},
    }


def test_agg_must_meet_both_targets_and_is_judged_by_the_one_it_has() -> None:
    def one(**targets: float) -> CellTraffic:
        return counted(record("agg", tokens_at_s=(0.019, 0.119), **targets))["agg"][0, 0]

    assert one(ttft_ms=20.0, itl_ms=10.0) == CellTraffic(1, n_met=0, n_judged=1)
    assert one(ttft_ms=20.0, itl_ms=40.0 + 9.0) == CellTraffic(1, n_met=0, n_judged=1)
    assert one(ttft_ms=18.0, itl_ms=10.0) == CellTraffic(1, n_met=0, n_judged=1)
    fast = record("agg", ttft_ms=20.0, itl_ms=49.0, tokens_at_s=(0.019, 0.06))
    assert counted(fast)["agg"][0, 0] == CellTraffic(1, n_met=1, n_judged=1)
    late = record("agg", ttft_ms=18.0, itl_ms=49.0, tokens_at_s=(0.019, 0.06))
    assert counted(late)["agg"][0, 0] == CellTraffic(1, n_met=0, n_judged=1)
    only_itl = record("agg", itl_ms=49.0, tokens_at_s=(5.0, 5.04))
    assert counted(only_itl)["agg"][0, 0] == CellTraffic(1, n_met=1, n_judged=1)


def test_no_target_and_no_token_are_no_verdict_but_a_request() -> None:
    without_target = record(tokens_at_s=(0.019, 0.119))
    without_token = record(ttft_ms=900.0, itl_ms=900.0)
    assert counted(without_target) == {
        "prefill": {(0, 1): CellTraffic(1)},
        "decode": {(0, 1): CellTraffic(1)},
    }
    assert counted(record("agg", tokens_at_s=(0.019,)))["agg"] == {(0, 1): CellTraffic(1)}
    assert counted(without_token)["prefill"] == {(0, 1): CellTraffic(1)}
    assert counted(Record(0.0)) == {}


def test_counts_add_up_cell_by_cell() -> None:
    seed = 11
    luck = random.Random(seed)
    n_requests: Counter[tuple[int, int]] = Counter()
    n_met: Counter[tuple[int, int]] = Counter()
    records = []
    for _ in range(300):
        isl_tokens, ttft_ms, late = luck.choice([1, 150]), luck.choice([10.0, 80.0]), luck.random()
        at_s = ttft_ms / 1000 * (0.5 + late)
        records.append(record(isl_tokens=isl_tokens, ttft_ms=ttft_ms, tokens_at_s=(at_s,)))
        cell = (int(isl_tokens == 150), int(ttft_ms == 80.0))
        n_requests[cell] += 1
        n_met[cell] += late <= 0.5
    assert counted(*records)["prefill"] == {
        cell: CellTraffic(n, n_met[cell], n) for cell, n in n_requests.items()
    }, f"seed {seed}"
    assert len(n_requests) == 4


def test_counts_are_of_one_configuration() -> None:
    of = Attainment("v1")
    of.count(record(version="v1"), Outcome.COMPLETED)
    of.restart("v2")
    assert (of.version, of.cells) == ("v2", {})
    # It was decided before the change and ends behind it.
    of.count(record(version="v1"), Outcome.COMPLETED)
    assert of.cells == {}
    of.count(record(version="v2"), Outcome.COMPLETED)
    assert len(of.cells) == 2


BOTH = {"ttft_ms": 20.0, "itl_ms": 10.0}


@pytest.mark.parametrize(
    "outcome", ["overloaded", "unavailable", "worker_failed", "deadline", "internal"]
)
def test_a_failure_of_the_fleet_has_missed_its_targets(outcome: str) -> None:
    one = record(**BOTH, down=[Stage.PREFILL])
    assert counted(one, outcome=Outcome(outcome)) == {
        "prefill": {(0, 0): CellTraffic(1, n_met=0, n_judged=1, n_failed=1)}
    }
    without_target = counted(record(down=[Stage.PREFILL]), outcome=Outcome(outcome))
    assert without_target == {"prefill": {(0, 1): CellTraffic(1, n_failed=1)}}


@pytest.mark.parametrize("outcome", ["cancelled", "slow_client", "invalid", "too_large"])
def test_what_the_client_did_is_no_failure_and_no_verdict(outcome: str) -> None:
    one = record(**BOTH, attempts=[(Stage.PREFILL, FAILED)])
    assert counted(one, outcome=Outcome(outcome)) == {"prefill": {(0, 0): CellTraffic(1)}}


def test_a_request_counts_up_to_the_stage_that_failed() -> None:
    gone = CellTraffic(1, n_met=0, n_judged=1, n_failed=1)
    missed = gone._replace(n_failed=0)
    prefill_failed = record(**BOTH, attempts=[(Stage.PREFILL, FAILED)])
    decode_failed = record(**BOTH, attempts=[(Stage.PREFILL, OK), (Stage.DECODE, FAILED)])
    no_decode = record(**BOTH, down=[Stage.DECODE])
    nobody = record(**BOTH, down=[Stage.PREFILL, Stage.DECODE])
    waited = record(**BOTH)  # in vain, while others had those that could take it
    in_prefill, in_decode = (
        {"prefill": {(0, 0): gone}},
        {"prefill": {(0, 0): missed}, "decode": {(0, 0): gone}},
    )
    for one, expected in (
        (prefill_failed, in_prefill),
        (decode_failed, in_decode),
        (no_decode, in_decode),
        (nobody, in_prefill),
        (waited, in_prefill),
    ):
        assert counted(one, outcome=Outcome.UNAVAILABLE) == expected


@pytest.mark.parametrize(
    ("met", "failed_in"),
    [
        ((True, False), Stage.DECODE),
        ((None, False), Stage.DECODE),
        ((False, True), Stage.PREFILL),
        ((False, None), Stage.PREFILL),
        ((False, False), Stage.PREFILL),
    ],
    ids=str,
)
def test_a_refusal_counts_in_the_stage_that_is_predicted_to_miss(
    met: tuple[bool | None, ...], failed_in: Stage
) -> None:
    """Whether or not the other one has a worker."""
    for down in ([], [Stage.PREFILL, Stage.DECODE]):
        made = record(**BOTH, down=down)
        assert made.decision is not None
        for choice, is_met in zip(made.decision.stages, met, strict=True):
            made.decision = made.decision.replace(msgspec.structs.replace(choice, is_met=is_met))
        made.decision = msgspec.structs.replace(made.decision, admission="refused")
        found = counted(made, outcome=Outcome.OVERLOADED)
        gone = CellTraffic(1, n_met=0, n_judged=1, n_failed=1)
        missed = {"prefill": {(0, 0): gone._replace(n_failed=0)}, "decode": {(0, 0): gone}}
        assert found == (missed if failed_in is Stage.DECODE else {"prefill": {(0, 0): gone}})


def test_a_stage_that_had_met_its_target_before_a_later_one_failed_keeps_that() -> None:
    made = record(
        **BOTH,
        tokens_at_s=(0.019, 0.02),
        attempts=[(Stage.PREFILL, OK), (Stage.DECODE, FAILED)],
    )
    assert counted(made, outcome=Outcome.WORKER_FAILED) == {
        "prefill": {(0, 0): CellTraffic(1, n_met=1, n_judged=1)},
        "decode": {(0, 0): CellTraffic(1, n_met=0, n_judged=1, n_failed=1)},
    }
    agg = record("agg", **BOTH, tokens_at_s=(0.019, 0.02), attempts=[(Stage.AGG, FAILED)])
    assert counted(agg, outcome=Outcome.WORKER_FAILED) == {
        "agg": {(0, 0): CellTraffic(1, n_met=0, n_judged=1, n_failed=1)}
    }
