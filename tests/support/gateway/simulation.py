"""The gateway's real graph over simulated engines in one process, on virtual time.

`Plan` is one request with what its client will do to it; `simulate` plays plans against a fleet and
returns what every client saw, with the invariants of ARCHITECTURE.md checked on the way.
"""

import itertools
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import grpc

from slagate.pools.fleet_file.load import parse_config
from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import BufferedSink
from slagate.proto.rpc.status import Status
from slagate.router.app import App, build
from slagate.router.generate import generate
from slagate.router.replay.invariants import check_always
from slagate.router.replay.network import FarWorker
from slagate.router.request.call import ClientCall
from slagate.router.request.errors import Aborted
from slagate.router.request.metadata import RECEIPT_TRAILER
from slagate.router.request.settings import Settings
from slagate.workers.trtllm.worker import TrtllmWorker
from slagate.workers.worker import Worker
from support.engine.workers import expected, request, sim
from support.worker.network import Fault, FaultyWorker

REFUSALS = (
    Status(grpc.StatusCode.UNAVAILABLE, "connection refused"),
    Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"),
    Status(grpc.StatusCode.INTERNAL, "broken"),
)

SAMPLE_S = 0.005
"""About as often as anything changes: the network's delay and an iteration of an engine take as long."""

LOST = Status(grpc.StatusCode.UNAVAILABLE, "connection lost")


@dataclass(frozen=True)
class Plan:
    """One request. Times are seconds; None: the client does not do that."""

    at_s: float
    prompt: list[int]
    n_tokens: int
    metadata: tuple[tuple[str, str], ...] = (("slagate-receipt", "1"),)
    cancel_after_s: float | None = None
    abort_after_s: float | None = None
    timeout_s: float | None = None


@dataclass
class Seen:
    """What a client saw."""

    plan: Plan
    tokens: list[int] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    finished: bool = False
    code: str = ""
    receipt: gw.Receipt = field(default_factory=gw.Receipt)


def fleet_file(stages: dict[str, dict[str, list[str]]]) -> dict[str, Any]:
    """A fleet with one-cell grids per stage: stage -> pool -> addresses."""
    file: dict[str, Any] = {"mode": "agg" if "agg" in stages else "disagg", "pools": {}}
    axes = {
        "prefill": (("isl", ""), ("ttft", "_ms")),
        "decode": (("context_length", ""), ("itl", "_ms")),
        "agg": (("ttft", "_ms"), ("itl", "_ms")),
    }
    for stage, pools in stages.items():
        strategy: dict[str, object] = {f"{stage}_pool_mapping": [[0]]}
        for axis, unit in axes[stage]:
            strategy |= {f"{axis}_min{unit}": 0, f"{axis}_max{unit}": 1000}
            strategy[f"{axis}_resolution"] = 1
        file[f"num_{stage}_pools"] = len(pools)
        file[f"{stage}_pools"] = list(pools)
        file[f"{stage}_pool_selection_strategy"] = strategy
        for name, workers in pools.items():
            spec = {"workers": workers, "profile": "llama-3.1-8b-h100", "tp": 1}
            file["pools"][name] = spec
    return file


@dataclass
class Fleet:
    """A running gateway and the workers behind it, by address."""

    app: App
    workers: dict[str, TrtllmWorker]


@asynccontextmanager
async def running(
    stages: dict[str, int],
    *,
    seed: int,
    latency_s: float = 0.004,
    refusals: float = 0.0,
    losses: float = 0.0,
    settings: Settings | None = None,
    connect_to: Callable[[str, TrtllmWorker], AbstractAsyncContextManager[Worker]] | None = None,
    make: Callable[[str, str], AbstractAsyncContextManager[TrtllmWorker]] | None = None,
    file: Mapping[str, Any] | None = None,
    **options: float,
) -> AsyncIterator[Fleet]:
    """A gateway over this many workers a stage, `latency_s` away, all ready.

    With `file` they are those of a fleet file, whose pools have the stage as the first part of their names.

    Workers refuse the share `refusals` of their calls, as a dying or a full one would; of the rest they
    lose the share `losses` midway, and fall silent in half of those. With `connect_to` the way to them is
    another one. `options` are `SimOptions`, unless `make` makes the worker of a stage at an address.
    """
    luck = random.Random(seed)

    def fault() -> Fault | None:
        if luck.random() < refusals:
            return Fault(0, luck.choice(REFUSALS))
        if luck.random() < losses:
            return Fault(luck.choice([0, 1, 2, 10]), luck.choice([LOST, None]))
        return None

    async with AsyncExitStack() as stack:
        workers: dict[str, TrtllmWorker] = {}
        if file is None:
            file = fleet_file(
                {
                    stage: {f"{stage}-pool": [f"{stage}:{i + 1}" for i in range(count)]}
                    for stage, count in stages.items()
                }
            )
        for name, pool in file["pools"].items():
            stage = name.partition("-")[0]
            for address in pool["workers"]:
                made = sim(stage, served=False, **options) if make is None else make(stage, address)
                worker = await stack.enter_async_context(made)
                assert isinstance(worker, TrtllmWorker)
                workers[address] = worker

        @asynccontextmanager
        async def connect(address: str) -> AsyncIterator[Worker]:
            if connect_to is not None:
                async with connect_to(address, workers[address]) as worker:
                    yield worker
                return
            faulty = FaultyWorker(workers[address], fault)
            yield FarWorker(faulty, latency_s=latency_s)

        app = await stack.enter_async_context(
            build(
                parse_config(file, source="simulation", serving=True),
                settings or Settings(),
                connect=connect,
                now_s=anyio.current_time,
                unix_s=anyio.current_time,
                rng=random.Random(seed),
            )
        )
        await anyio.sleep(1)
        assert not app.fleet.unready_stages()
        yield Fleet(app, workers)


async def simulate(fleet: Fleet, plans: Sequence[Plan]) -> list[Seen]:
    """Play every plan to its end; all clients use the id `same`, each from a peer of its own."""
    seen = [Seen(plan) for plan in plans]
    async with anyio.create_task_group() as sampling:
        sampling.start_soon(sample, fleet)
        async with anyio.create_task_group() as tasks:
            for number, one in enumerate(seen):
                tasks.start_soon(_client, fleet, f"peer-{number}", one)
        sampling.cancel_scope.cancel()
    return seen


async def closed_loop(fleet: Fleet, plans: Sequence[Plan], *, clients: int) -> list[Seen]:
    """Play plans, `clients` at a time and each as soon as one before it has ended."""
    todo = iter([Seen(plan) for plan in plans])
    done: list[Seen] = []

    async def client() -> None:
        for one in todo:
            await _client(fleet, f"peer-{id(one)}", one)
            done.append(one)

    async with anyio.create_task_group() as tasks:
        for _ in range(clients):
            tasks.start_soon(client)
    return done


async def sample(fleet: Fleet) -> None:
    for step in itertools.count():
        check_always(fleet.app)
        # Closely while things happen, then rarely: a silent worker holds its request for minutes.
        await anyio.sleep(SAMPLE_S if step < 4 / SAMPLE_S else 1.0)


async def _client(fleet: Fleet, peer: str, seen: Seen) -> None:
    plan = seen.plan
    await anyio.sleep(plan.at_s)
    out = BufferedSink()
    call = ClientCall(
        data=request("same", plan.prompt, plan.n_tokens).SerializeToString(),
        metadata=plan.metadata,
        peer=peer,
        timeout_s=plan.timeout_s,
        out=out,
    )
    async with anyio.create_task_group() as tasks:
        if plan.abort_after_s is not None:
            tasks.start_soon(_abort, fleet, peer, plan.abort_after_s)
        tasks.start_soon(_read, out, seen, tasks.cancel_scope)
        with anyio.move_on_after(plan.cancel_after_s):
            await generate(call, fleet.app.gateway)


async def _abort(fleet: Fleet, peer: str, after_s: float) -> None:
    await anyio.sleep(after_s)
    fleet.app.gateway.live.abort(peer, "same", Aborted("aborted by the client"))


async def _read(out: BufferedSink, seen: Seen, scope: anyio.CancelScope) -> None:
    while (data := await out.next()) is not None:
        assert not seen.finished, "something after the terminal event"
        response = oe.GenerateResponse.FromString(data)
        seen.ids.add(response.request_id)
        seen.tokens += [token.token_id for token in response.token.tokens]
        seen.finished = response.HasField("finished")
    assert out.status is not None
    seen.code = out.status.code.name
    for key, value in out.status.trailers:
        if key == RECEIPT_TRAILER:
            assert isinstance(value, bytes)
            seen.receipt = gw.Receipt.FromString(value)
    scope.cancel()


def check_tokens(seen: Sequence[Seen]) -> None:
    """I7: what arrived is what the engine says, from the start, without a hole."""
    for one in seen:
        n_tokens = len(one.tokens)
        assert one.tokens == expected(one.plan.prompt, n_tokens)
        assert one.ids <= {"same"}
        if one.code == "OK":
            assert n_tokens == one.plan.n_tokens
            assert one.finished
