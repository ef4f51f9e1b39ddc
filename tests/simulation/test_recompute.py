"""What a gateway decides under overload, with workers that fail, comes out the same from its receipts.

2,000 requests in the long run, 500 in the gate. Their receipts are read as `slagate receipts` does, and
decided again as `slagate recompute` does.
"""

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from slagate.pools.fleet_file.load import parse_config
from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call, EndedCall, Sink
from slagate.proto.rpc.status import OK, Metadata
from slagate.router.cli.receipts import Recomputer, json_line, parse_line
from slagate.router.receipts.config import RecordedConfig, read_config
from slagate.router.receipts.recompute import decide_again
from slagate.router.replay.network import FarWorker
from slagate.router.request.settings import Settings
from slagate.router.services.admin import AdminService
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.trtllm.worker import TrtllmWorker
from slagate.workers.worker import Worker
from support.builders import engine_error
from support.gateway.context import Context
from support.gateway.reloads import Nowhere
from support.gateway.simulation import (
    LOST,
    REFUSALS,
    Fleet,
    Plan,
    check_tokens,
    fleet_file,
    running,
    simulate,
)
from support.seeds import is_long_run, n_in
from support.worker.network import Fault, FaultyWorker

N_REQUESTS = n_in(gate=500, long=2000)
SECONDS = N_REQUESTS / 200
SEED = 23

POOLS = {
    "prefill": {"prefill-cheap": 3, "prefill-fast": 2, "prefill-more": 2},
    "decode": {"decode-cheap": 2, "decode-fast": 2},
}
COSTS = {"prefill-fast": 3.0, "decode-fast": 2.0}
CLASSES: Mapping[str, Mapping[str, Any]] = {
    "chat": {"ttft_ms": 400, "itl_ms": 12, "priority": 2},
    "tool": {"ttft_ms": 150, "policy": "shed"},
    "report": {"ttft_ms": 3000, "itl_ms": 40, "policy": "protect"},
    "batch": {"ttft_ms": 300, "policy": "relegate"},
    "*": {"itl_ms": 60},
}


def file(bypass: str) -> dict[str, Any]:
    """A fleet with classes, of several pools a stage, between which load decides; nobody waits for ever."""
    content = fleet_file(
        {
            stage: {name: [f"{name}:{at + 1}" for at in range(n)] for name, n in pools.items()}
            for stage, pools in POOLS.items()
        }
    )
    for name, pool in content["pools"].items():
        pool |= {"cost": COSTS.get(name, 1.0), "max_inflight": 5}
    content["scheduling"] = {"spill": "any", "admission": "on", "bypass": bypass}
    content["objectives"] = CLASSES
    content["enable_priority_retry"] = True
    return content


def plans(rng: random.Random) -> list[Plan]:
    """Conversations of a few turns, of each class and of none, more of them than the fleet can serve."""
    made: list[Plan] = []
    while len(made) < N_REQUESTS:
        first, at_s = rng.randrange(100_000), rng.uniform(0, SECONDS)
        name = rng.choice(["chat", "chat", "tool", "report", "batch", "", "unheard-of"])
        metadata = [("x-gateway-inference-objective", name)] if name else []
        if rng.random() < 0.2:
            metadata.append(("x-slo-ttft-ms", str(rng.choice([80, 1000]))))
        n_tokens = rng.choice([100, 1500, 3000])
        for turn in range(rng.randint(1, 4)):
            prompt = list(range(first, first + n_tokens + 200 * turn))
            made.append(
                Plan(
                    at_s + SECONDS / 5 * turn,
                    prompt,
                    n_tokens=rng.choice([1, 3, 12]),
                    metadata=tuple(metadata),
                    timeout_s=rng.choice([None, None, None, 0.4]),
                )
            )
    return made[:N_REQUESTS]


async def receipt_lines(fleet: Fleet) -> list[bytes]:
    """What `slagate receipts` prints of a gateway."""
    gateway = fleet.app.gateway
    service = AdminService(
        gateway.dispatcher,
        Settings(),
        reloader=fleet.app.reloader,
        source=Nowhere(),
        receipts=gateway.receipts,
        now_s=anyio.current_time,
    )
    found = service.WatchReceipts(gw.WatchReceiptsRequest(), Context())
    return [json_line(response).encode() + b"\n" async for response in found]


def kinds_of(receipt: gw.Receipt) -> set[str]:
    """What was special about a request."""
    choices = [*receipt.replaced, *receipt.decision.stages]
    stages = [attempt.stage for attempt in receipt.attempts]
    ended_well = [attempt.status == "OK" for attempt in receipt.attempts]
    prefilled = [
        ok for stage, ok in zip(stages, ended_well, strict=True) if stage == gw.STAGE_PREFILL
    ]
    found = {
        "spill of prefill": any(_is_spill(c) for c in choices if c.stage == gw.STAGE_PREFILL),
        "spill of decode": any(_is_spill(c) for c in choices if c.stage == gw.STAGE_DECODE),
        "shed": receipt.decision.admission == "refused",
        "served late": receipt.decision.admission == "served",
        "met": all(c.is_met for c in choices),
        "not judged": any(not c.HasField("is_met") for c in choices),
        "prefill again": stages.count(gw.STAGE_PREFILL) > 1 and not all(prefilled),
        "decode again": stages.count(gw.STAGE_DECODE) > 1,
        "started over": len(prefilled) > 1 and prefilled[0],
        "waited": receipt.actual.waited_ms > 0,
        "cached": any(c.candidates[0].device_tokens for c in choices if c.candidates),
        "no workers": any(not c.worker for c in choices),
        "another configuration": len({c.config_version for c in choices}) > 1,
        "bypass": receipt.decision.stages[0].stage == gw.STAGE_AGG,
        "bypass not taken": {c.stage for c in receipt.decision.untaken} == {gw.STAGE_AGG},
        "bypass again": stages.count(gw.STAGE_AGG) > 1,
        "handed over behind a bypass": stages[:1] == [gw.STAGE_AGG] and gw.STAGE_DECODE in stages,
        receipt.actual.outcome: True,
    }
    return {name for name, is_so in found.items() if is_so}


def _is_spill(choice: gw.StageChoice) -> bool:
    return choice.worker != "" and choice.pool != choice.pool_order[0]


def check_admission(receipt: gw.Receipt) -> None:
    """What is refused is predicted to miss, of a class that is shed, and got no worker."""
    decision = receipt.decision
    if decision.admission != "refused":
        return
    assert any(c.HasField("is_met") and not c.is_met for c in decision.stages)
    assert CLASSES.get(decision.sla.objective, {}).get("policy", "shed") == "shed"
    assert not receipt.attempts


BECAME = {
    *((mode, told) for mode in ("off", "shadow", "on") for told in ("", "served")),
    ("shadow", "shadow"),
    ("on", "refused"),
    ("on", "relegated"),
}
"""Modes of admission, and what becomes of requests in them."""

ADMISSIONS = ("", "refused", "served", "shadow", "relegated", "waits", "nonsense")


def check_changed_admission(rules: Mapping[str, RecordedConfig], receipt: gw.Receipt) -> None:
    """Whatever else is said of what became of a request as it came is found."""
    for told in ADMISSIONS:
        changed = gw.Receipt()
        changed.CopyFrom(receipt)
        changed.decision.admission = told
        found = [each for each in decide_again(changed, rules) if each is not None]
        was = receipt.decision.admission
        is_found = told != was and (was, told) != ("waits", "refused")
        assert [each.stage for each in found] == ["admission"] * is_found


class Forgetful(FaultyWorker):
    """A decode worker that does not find some of the handoffs it is sent, besides."""

    def __init__(
        self, worker: Worker, fault: Callable[[], Fault | None], luck: random.Random
    ) -> None:
        super().__init__(worker, fault)
        self._luck = luck

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        if self._luck.random() < 0.05:
            error = engine_error(oe.ERROR_CODE_KV_SESSION_NOT_FOUND, "no such session")
            sink.message(error.SerializeToString())
            sink.finish(OK)
            return EndedCall()
        return super().generate(request, metadata, sink, timeout_s=timeout_s)


@asynccontextmanager
async def connect(address: str, worker: TrtllmWorker) -> AsyncIterator[Worker]:
    """To a worker that refuses some calls, and loses some midway."""
    luck = random.Random(address)

    def fault() -> Fault | None:
        if luck.random() < 0.04:
            return Fault(0, luck.choice(REFUSALS))
        if luck.random() < 0.04:
            return Fault(luck.choice([0, 1, 2, 10]), luck.choice([LOST, None]))
        return None

    decodes = address.startswith("decode")
    faulty = Forgetful(worker, fault, luck) if decodes else FaultyWorker(worker, fault)
    yield FarWorker(faulty, latency_s=0.004)


async def played(bypass: str) -> list[bytes]:
    """The lines of receipts of all requests, each of which has got its own tokens, or the first of them."""
    async with running({}, seed=SEED, file=file(bypass), connect_to=connect) as fleet:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_reload, fleet, bypass)
            seen = await simulate(fleet, plans(random.Random(SEED)))
        check_tokens(seen)
        return await receipt_lines(fleet)


async def _reload(fleet: Fleet, bypass: str) -> None:
    """The fleet file changes again and again; now and then another mode of admission is set in between."""
    for cost in range(2, 10):
        await anyio.sleep(SECONDS / 8)
        content = file(bypass)
        content["pools"]["prefill-more"]["cost"] = float(cost)
        config = parse_config(content, source="reload", serving=True)
        fleet.app.reloader.put(fleet.app.reloader.propose(lambda config=config: config))
        if cost in (4, 7):
            fleet.app.gateway.dispatcher.set_admission("off" if cost == 4 else "shadow")


@pytest.mark.parametrize("bypass", ["off", "auto"])
def test_every_decision_of_an_overloaded_fleet_comes_out_the_same(bypass: str) -> None:
    lines = run(played, bypass)
    recheck = Recomputer()
    assert list(recheck.read(lines)) == []
    receipts: Sequence[gw.Receipt] = [
        each.receipt for each in map(parse_line, lines) if each.HasField("receipt")
    ]
    configs = [each.config for each in map(parse_line, lines) if each.HasField("config")]
    rules = {config.version: read_config(config) for config in configs}
    seen: Counter[str] = Counter()
    became: Counter[tuple[str, str]] = Counter()
    for receipt in receipts:
        seen.update(kinds_of(receipt))
        check_admission(receipt)
        kind = receipt.decision.admission_mode, receipt.decision.admission
        became[kind] += 1
        if became[kind] <= 3:
            check_changed_admission(rules, receipt)
    assert became.keys() >= BECAME, became
    assert (recheck.n_receipts, recheck.n_missed) == (N_REQUESTS, 0)
    assert recheck.n_choices > 2 * N_REQUESTS
    many = {"spill of prefill", "spill of decode", "shed", "met", "cached", "waited", "completed"}
    some = {"prefill again", "decode again", "started over", "served late", "not judged"}
    some |= {"another configuration", *(["no workers"] if is_long_run() else [])}
    of_bypass = {"bypass again", "handed over behind a bypass"}
    if bypass == "off":
        assert not any(receipt.decision.untaken for receipt in receipts)
        assert not seen.keys() & {"bypass", *of_bypass}
    else:
        many, some = many | {"bypass", "bypass not taken"}, some | of_bypass
    assert {kind for kind in many if seen[kind] < N_REQUESTS / 20} == set(), seen
    assert {kind for kind in some if not seen[kind]} == set(), seen
