"""The only I/O of the pools: one loop per worker that asks who it is, how it is, how busy it is."""

import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio

from slagate.pools.fleet import Fleet
from slagate.pools.member import Member, Stage
from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import WorkerError, scrub
from slagate.workers.trtllm_info import SCHEMA_RELEASE
from slagate.workers.worker import Worker

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Between two looks at a worker. Load in between is known from leases, so faster buys nothing."""

JITTER_RATIO = 0.2

Connect = Callable[[str], AbstractAsyncContextManager[Worker]]

ROLE_OF_STAGE = {
    Stage.PREFILL: oe.ENGINE_ROLE_PREFILL,
    Stage.DECODE: oe.ENGINE_ROLE_DECODE,
    Stage.AGG: oe.ENGINE_ROLE_AGGREGATED,
}


@asynccontextmanager
async def watch_fleet(
    fleet: Fleet, *, connect: Connect, now_s: Callable[[], float], rng: random.Random
) -> AsyncIterator[None]:
    """Watch every worker of the fleet for the time of the block."""
    async with anyio.create_task_group() as tasks:
        for member in fleet.members():
            seed = random.Random(rng.getrandbits(64))
            tasks.start_soon(_watch, member, connect, now_s, seed)
        yield
        tasks.cancel_scope.cancel()


async def _watch(
    member: Member, connect: Connect, now_s: Callable[[], float], rng: random.Random
) -> None:
    async with connect(member.address) as worker:
        member.worker = worker
        while True:
            if await _look(member, worker, now_s):
                log.info(
                    "member.state",
                    extra={
                        "worker": member.address,
                        "pool": member.pool,
                        "state": member.state.value,
                        "reason": member.reason,
                    },
                )
            await anyio.sleep(INTERVAL_S * (1 + JITTER_RATIO * rng.uniform(-1, 1)))


async def _look(member: Member, worker: Worker, now_s: Callable[[], float]) -> bool:
    """One look at the worker. True when its state changed."""
    try:
        health = await worker.health(oe.HealthRequest())
        # A restarted process answers under the same address with another instance id, and asking is
        # cheap: so who it is comes with every look, and never from memory.
        info = await worker.server_info()
        if misfit := _misfit(member, info):
            return member.refuse(misfit)
        if member.info is None or member.info.instance_id != info.instance_id:
            member.models = {name: await worker.model_info(name) for name in info.supported_models}
        member.info = info
        await _load(member, worker, now_s)
    except WorkerError as error:
        return member.probe_failed(f"{error.status.code.name}: {scrub(error.status.message)}")
    if health.state != oe.HEALTH_STATE_READY:
        return member.probe_failed(f"reports {oe.HealthState.Name(health.state)}")
    return member.probe_ok()


async def _load(member: Member, worker: Worker, now_s: Callable[[], float]) -> None:
    member.load = await worker.load(oe.GetLoadRequest())
    member.load_at_s = now_s()


def _misfit(member: Member, info: oe.ServerInfo) -> str:
    """Why this server cannot be the member the configuration says it is; empty when it can."""
    if info.schema_revision != 1 or info.minimum_client_revision > 1:
        return f"speaks OpenEngine revision {info.schema_revision}, this gateway revision 1"
    if info.schema_release != SCHEMA_RELEASE:
        return f"speaks OpenEngine release {info.schema_release!r}, not {SCHEMA_RELEASE!r}"
    # TensorRT-LLM's own server cannot say its role: the configuration is then all there is.
    if info.engine_role not in (oe.ENGINE_ROLE_UNSPECIFIED, ROLE_OF_STAGE[member.stage]):
        role = oe.EngineRole.Name(info.engine_role).removeprefix("ENGINE_ROLE_").lower()
        return f"is a {role} worker, but listed in {member.stage.value} pool {member.pool!r}"
    return ""
