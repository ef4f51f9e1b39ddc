"""What `ListCells` says of a simulated run, against the receipts that its clients got."""

import random
from collections.abc import Sequence

import anyio
import pytest

from slagate.pools.grid_config import FleetConfig, parse_config
from slagate.proto import gateway_pb2 as gw
from slagate.router.admin import AdminService
from slagate.router.settings import Settings
from support import virtual_loop
from support.context import Context
from support.simulation import Fleet, Plan, Seen, fleet_file, running, simulate

Counts = dict[tuple[int, tuple[int, ...]], tuple[int, int, int]]
"""Requests, judged and met, by stage and cell."""

JUDGED_BY = {
    gw.STAGE_PREFILL: ("ttft_met",),
    gw.STAGE_DECODE: ("itl_met",),
    gw.STAGE_AGG: ("ttft_met", "itl_met"),
}


class Nowhere:
    """A source that nobody reads."""

    def read(self) -> FleetConfig:
        raise AssertionError

    def parse(self, text: str) -> FleetConfig:
        raise AssertionError(text)

    def stamp(self) -> object:
        raise AssertionError


async def list_cells(fleet: Fleet) -> gw.ListCellsResponse:
    gateway = fleet.app.gateway
    service = AdminService(
        gateway.dispatcher,
        Settings(),
        reloader=fleet.app.reloader,
        source=Nowhere(),
        receipts=gateway.receipts,
        now_s=anyio.current_time,
    )
    return await service.ListCells(gw.ListCellsRequest(), Context())


def told(answer: gw.ListCellsResponse) -> Counts:
    return {
        (each.stage, tuple(each.cell)): (each.requests, each.judged, each.met)
        for each in answer.cells
    }


def received(seen: Sequence[Seen]) -> Counts:
    counts: Counts = {}
    for one in seen:
        actual = one.receipt.actual
        for choice in one.receipt.decision.stages:
            fields = [name for name in JUDGED_BY[choice.stage] if actual.HasField(name)]
            met = bool(fields) and all(getattr(actual, name) for name in fields)
            key = (choice.stage, tuple(choice.cell))
            n_requests, n_judged, n_met = counts.get(key, (0, 0, 0))
            counts[key] = (n_requests + 1, n_judged + bool(fields), n_met + met)
    return counts


def plans(rng: random.Random, count: int) -> list[Plan]:
    made = []
    for _ in range(count):
        first = rng.randrange(50_000)
        metadata = [("slagate-receipt", "1")]
        for key, choices in (("x-slo-ttft-ms", (20, 80, 900)), ("x-slo-tpot-ms", (4, 8, 50))):
            if rng.random() < 0.8:
                metadata.append((key, str(rng.choice(choices))))
        prompt = list(range(first, first + rng.choice([10, 300, 3000])))
        made.append(Plan(rng.uniform(0, 3), prompt, rng.choice([1, 2, 30]), tuple(metadata)))
    return made


@pytest.mark.parametrize("stages", [{"prefill": 2, "decode": 2}, {"agg": 2}], ids=["disagg", "agg"])
def test_cells_count_what_clients_were_told(stages: dict[str, int]) -> None:
    seed = 4
    rng = random.Random(seed)
    first_plans, more_plans = plans(rng, 60), plans(rng, 20)

    async def main() -> None:
        async with running(stages, seed=seed, refusals=0.1) as fleet:
            counts = received(await simulate(fleet, first_plans))
            answer = await list_cells(fleet)
            assert told(answer) == counts, f"seed {seed}"
            for n_requests, n_judged, n_met in counts.values():
                assert 0 < n_met < n_judged < n_requests == 60
            assert answer.config_version == fleet.app.reloader.version

            pools = {stage: {"new": [f"{stage}:1"]} for stage in stages}
            if len(stages) > 1:
                pools = {stage: {f"new-{stage}": [f"{stage}:1"]} for stage in stages}
            config = parse_config(fleet_file(pools), source="reload")
            fleet.app.reloader.put(fleet.app.reloader.propose(lambda: config))
            empty = await list_cells(fleet)
            assert not empty.cells
            assert empty.config_version == fleet.app.reloader.version != answer.config_version
            assert "new" in empty.fleet
            more = received(await simulate(fleet, more_plans))
            assert told(await list_cells(fleet)) == more

    virtual_loop.run(main)
