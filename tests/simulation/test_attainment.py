"""What `ListCells` says of a simulated run, against the receipts that its clients got."""

import random
from collections.abc import Sequence

import anyio
import grpc
import pytest

from slagate.pools.fleet_file.load import parse_config
from slagate.proto import gateway_pb2 as gw
from slagate.proto.rpc.sinks import Sink
from slagate.proto.rpc.status import Metadata, Status
from slagate.router.request.settings import Settings
from slagate.router.services.admin import AdminService
from slagate.workers.runtime import virtual_loop
from support.gateway.context import Context
from support.gateway.reloads import Nowhere
from support.gateway.simulation import Fleet, Plan, Seen, fleet_file, running, simulate

Counts = dict[tuple[int, tuple[int, ...]], tuple[int, int, int, int]]
"""Requests, judged, met and failed, by stage and cell."""

JUDGED_BY = {
    gw.STAGE_PREFILL: ("ttft",),
    gw.STAGE_DECODE: ("itl",),
    gw.STAGE_AGG: ("ttft", "itl"),
}


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
        (each.stage, tuple(each.cell)): (each.requests, each.judged, each.met, each.failed)
        for each in answer.cells
    }


def received(seen: Sequence[Seen]) -> Counts:
    counts: Counts = {}
    for one in seen:
        receipt, actual = one.receipt, one.receipt.actual
        is_answered = actual.outcome == "completed"
        stages = list(receipt.decision.stages)
        if not is_answered:
            tried = [attempt.stage for attempt in receipt.attempts]
            # Without any call: where no worker was.
            last = tried[-1] if tried else next(c.stage for c in stages if not c.worker)
            stages = stages[: [choice.stage for choice in stages].index(last) + 1]
        for choice in stages:
            is_here = not is_answered and choice is stages[-1]
            verdicts = []
            for name in JUDGED_BY[choice.stage]:
                if actual.HasField(f"{name}_met"):
                    verdicts.append(getattr(actual, f"{name}_met") and not is_here)
                elif not is_answered and receipt.decision.sla.HasField(f"{name}_ms"):
                    verdicts.append(False)
            key = (choice.stage, tuple(choice.cell))
            n_requests, n_judged, n_met, n_failed = counts.get(key, (0, 0, 0, 0))
            counts[key] = (
                n_requests + 1,
                n_judged + bool(verdicts),
                n_met + (bool(verdicts) and all(verdicts)),
                n_failed + is_here,
            )
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
            for n_requests, n_judged, n_met, n_failed in counts.values():
                assert 0 < n_met < n_judged < n_requests <= 60
                assert n_failed < n_requests
            assert sum(n_failed for *_, n_failed in counts.values()) > 0
            assert answer.config_version == fleet.app.reloader.version

            pools = {stage: {"new": [f"{stage}:1"]} for stage in stages}
            if len(stages) > 1:
                pools = {stage: {f"new-{stage}": [f"{stage}:1"]} for stage in stages}
            config = parse_config(fleet_file(pools), source="reload", serving=True)
            fleet.app.reloader.put(fleet.app.reloader.propose(lambda: config))
            empty = await list_cells(fleet)
            assert not empty.cells
            assert empty.config_version == fleet.app.reloader.version != answer.config_version
            assert "new" in empty.fleet
            more = received(await simulate(fleet, more_plans))
            assert told(await list_cells(fleet)) == more

    virtual_loop.run(main)


@pytest.mark.parametrize("down", ["prefill", "decode"])
def test_an_outage_shows_in_the_cells_of_its_stage(
    down: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request had both targets, and nobody got a token."""
    seed = 5
    slo = (("slagate-receipt", "1"), ("x-slo-ttft-ms", "900"), ("x-slo-tpot-ms", "50"))
    planned = [Plan(at / 10, list(range(100 * at, 100 * at + 50)), 5, slo) for at in range(20)]

    def refuse(request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None) -> None:
        sink.finish(Status(grpc.StatusCode.UNAVAILABLE, "connection refused"))

    async def main() -> None:
        async with running({"prefill": 2, "decode": 2}, seed=seed) as fleet:
            for address, worker in fleet.workers.items():
                if address.startswith(down):
                    monkeypatch.setattr(worker, "generate", refuse)
            seen = await simulate(fleet, planned)
            assert {one.receipt.actual.outcome for one in seen} <= {"unavailable", "worker_failed"}
            failed = (20, 20, 0, 20)
            expected = {
                "prefill": {(gw.STAGE_PREFILL, (0, 0)): failed},
                "decode": {
                    (gw.STAGE_PREFILL, (0, 0)): (20, 20, 0, 0),
                    (gw.STAGE_DECODE, (0, 0)): failed,
                },
            }
            assert told(await list_cells(fleet)) == expected[down] == received(seen)

    virtual_loop.run(main)
