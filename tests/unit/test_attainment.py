"""Counts per grid cell, against a count of the same records done by hand."""

import random
from collections import Counter

from slagate.pools.axis import Axis
from slagate.pools.grid import StageGrid
from slagate.pools.member import Stage
from slagate.proto import gateway_pb2 as gw
from slagate.router.attainment import Attainment, CellTraffic
from slagate.router.policy import choose
from slagate.router.receipts import Record
from slagate.router.sla import Sla
from support.builders import ask, pool_view, rng, view

STAGES = {
    "disagg": (Stage.PREFILL, Stage.DECODE),
    "agg": (Stage.AGG,),
}
ONE_POOL = {"pool": pool_view("pool", [view()])}


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
) -> Record:
    """A request that has ended, with a token at each of these times after its arrival."""
    made = Record(10.0)
    sla = made.sla = Sla(ttft_ms, itl_ms)
    stages = {stage: GRIDS[stage] for stage in STAGES[mode]}
    made.decision = choose(ask(isl_tokens=isl_tokens, sla=sla), stages, ONE_POOL, rng=rng())
    for choice in made.decision.stages:
        choice.config = gw.GatewayConfig(version=version)
    for at_s in tokens_at_s:
        made.tally.tokens(1, made.started_s + at_s)
    return made


def counted(*records: Record) -> dict[str, dict[tuple[int, ...], CellTraffic]]:
    of = Attainment("v1")
    for each in records:
        of.count(each)
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
    only_itl = record("agg", itl_ms=49.0, tokens_at_s=(5.0, 5.04))
    assert counted(only_itl)["agg"][0, 0] == CellTraffic(1, n_met=1, n_judged=1)


def test_no_target_and_no_token_are_no_verdict_but_a_request() -> None:
    without_target = record(tokens_at_s=(0.019, 0.119))
    without_token = record(ttft_ms=900.0, itl_ms=900.0)
    assert counted(without_target) == {
        "prefill": {(0, 1): CellTraffic(1)},
        "decode": {(0, 1): CellTraffic(1)},
    }
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
    of.count(record(version="v1"))
    of.restart("v2")
    assert (of.version, of.cells) == ("v2", {})
    # It was decided before the change and ends behind it.
    of.count(record(version="v1"))
    assert of.cells == {}
    of.count(record(version="v2"))
    assert len(of.cells) == 2
