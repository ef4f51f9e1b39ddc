"""Reloads: a source of none, and steady load through a real gateway while its configuration changes."""

import copy
import json
import math
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import grpc.aio

from slagate.pools.fleet_file.load import FleetConfig
from slagate.proto import gateway_pb2 as gw
from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.proto import openengine_pb2 as oe
from slagate.router.loadgen.loadgen import (
    LoadRequest,
    Progress,
    ServedRequest,
    mismatch,
    run_load,
)
from slagate.workers.client.client import connect_worker
from slagate.workers.worker import Worker
from support.engine.tokens import expected, prompt
from support.gateway.processes import MODEL, Cluster
from support.limits import HANG_S

MAX_ISL_TOKENS = 1000
MAX_OSL_TOKENS = 16

RECEIPT = (("slagate-receipt", "1"),)


class Nowhere:
    """A source that nobody reads."""

    def read(self) -> FleetConfig:
        raise AssertionError

    def parse(self, text: str) -> FleetConfig:
        raise AssertionError(text)

    def stamp(self) -> object:
        raise AssertionError


@dataclass
class Run:
    """What came of it."""

    served: list[ServedRequest] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # streams that are not the engine's
    versions: set[str] = field(default_factory=set)  # that were in force
    n_reloads: int = 0  # that changed something
    ended_s: list[float] = field(default_factory=list)  # since the start: when each reload was done

    @property
    def failed(self) -> list[str]:
        return [f"{one.request_id}: {one.status}" for one in self.served if one.failed]

    @property
    def named(self) -> set[str]:
        """Versions that receipts name."""
        return {"" if one.receipt is None else one.receipt.config_version for one in self.served}


def random_fleet(file: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Some workers of each pool, at times with another cell, limit, priority or name of a pool."""
    made = copy.deepcopy(file)
    for name, spec in list(made["pools"].items()):
        workers = spec["workers"]
        spec["workers"] = sorted(rng.sample(workers, rng.randint(1, len(workers))))
        if rng.random() < 0.3:
            spec["max_inflight"] = rng.choice([64, 256])
        if rng.random() < 0.2:
            other = f"{name}-other"
            made["pools"][other] = made["pools"].pop(name)
            for role in ("prefill", "decode", "agg"):
                if made.get(f"{role}_pools") == [name]:
                    made[f"{role}_pools"] = [other]
    made["objectives"] = {"*": {"ttft_ms": rng.randrange(100, 900)}}
    return made


def load(n: int, *, per_s: float, rng: random.Random) -> tuple[Iterator[LoadRequest], list[Any]]:
    """`n` requests, and what each stream has to be."""
    asked = [
        (rng.randint(1, MAX_ISL_TOKENS), rng.randint(1, MAX_OSL_TOKENS), rng.randrange(200))
        for _ in range(n)
    ]

    def requests() -> Iterator[LoadRequest]:
        for number, (isl, osl, seed) in enumerate(asked):
            data = oe.GenerateRequest(
                request_id=f"r-{number}",
                model=MODEL,
                token_ids=oe.TokenIds(ids=prompt(isl, seed=seed)),
                stopping=oe.StoppingOptions(max_tokens=osl, ignore_eos=True),
            )
            yield LoadRequest(number / per_s, f"r-{number}", data.SerializeToString(), RECEIPT)

    return requests(), asked


async def reload_under_load(
    fleet: Cluster,
    file: dict[str, Any],
    *,
    seconds: float,
    per_s: float,
    n_reloads: int,
    rng: random.Random,
) -> Run:
    """`n_reloads`, evenly spread over so many seconds of load; the last one is of `file` itself."""
    run = Run()
    requests, asked = load(round(seconds * per_s), per_s=per_s, rng=rng)
    async with _connected(fleet) as (targets, stub):
        run.versions.add((await stub.ListPools(gw.ListPoolsRequest())).config_version)
        began_s = anyio.current_time()

        async def reloads() -> None:
            for number in range(n_reloads):
                await anyio.sleep_until(began_s + (number + 1) * seconds / (n_reloads + 1))
                found = file if number == n_reloads - 1 else random_fleet(file, rng)
                await _reload(stub, found, run)
                run.ended_s.append(anyio.current_time() - began_s)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reloads)
            run.served = await run_load(targets, requests, timeout_s=60, on_change=lambda _: None)
    run.wrong = wrong(run.served, asked)
    return run


async def reload_between_requests(
    fleet: Cluster, file: dict[str, Any], *, n_requests: int, n_reloads: int, rng: random.Random
) -> Run:
    """That often so many requests at once, and a reload when the first of them has ended.

    So each version that was in force has served somebody. The last one is `file` itself.
    """
    run = Run()
    async with _connected(fleet) as (targets, stub):
        run.versions.add((await stub.ListPools(gw.ListPoolsRequest())).config_version)
        for number in range(n_reloads):
            requests, asked = load(n_requests, per_s=math.inf, rng=rng)
            found = file if number == n_reloads - 1 else random_fleet(file, rng)
            first_ended = anyio.Event()

            async def reload(found: Any, first_ended: anyio.Event = first_ended) -> None:
                await first_ended.wait()
                await _reload(stub, found, run)

            def told(progress: Progress, first_ended: anyio.Event = first_ended) -> None:
                if progress.n_done:
                    first_ended.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reload, found)
                served = await run_load(targets, requests, timeout_s=HANG_S, on_change=told)
            run.served += served
            run.wrong += wrong(served, asked)
    return run


@asynccontextmanager
async def _connected(fleet: Cluster) -> AsyncIterator[tuple[Sequence[Worker], Any]]:
    """Some connections of clients, and the gateway's own service."""
    async with AsyncExitStack() as stack:
        targets = [
            await stack.enter_async_context(connect_worker(fleet.gateway.address)) for _ in range(4)
        ]
        admin = await stack.enter_async_context(
            grpc.aio.insecure_channel(fleet.gateway.admin_address)
        )
        yield targets, gw_grpc.GatewayStub(admin)


async def _reload(stub: Any, file: dict[str, Any], run: Run) -> None:
    answer = await stub.Reload(gw.ReloadRequest(fleet=json.dumps(file)))
    assert not answer.problems, answer.problems
    run.n_reloads += answer.applied
    run.versions.add(answer.version)


def wrong(served: Sequence[ServedRequest], asked: Sequence[Any]) -> list[str]:
    found = []
    for one, (isl, osl, seed) in zip(served, asked, strict=True):
        if fault := mismatch(one, expected(prompt(isl, seed=seed), osl)):
            found.append(f"{one.request_id}: {fault}")
    return found
