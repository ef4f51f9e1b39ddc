"""The only I/O of the pools: one loop per worker that asks who it is, how it is, how busy it is.

It ends when the worker has left the fleet, and with it the channel to the worker.

A worker is looked at every second. One that gave no answer five times in a row (it has long left then) is
looked at after 1.5 s, 2.25 s and so on, at most 10 s: a fleet file may list hundreds that are not up. The
first answer, whatever it says, brings the second back. All give or take a fifth, so one that comes up is
seen within 12 s.
"""

import logging
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple

import anyio

from slagate.pools.fleet.fleet import Fleet
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Pool
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.table import State
from slagate.pools.kv_events.follower import WorkerFollower
from slagate.pools.kv_events.view import EventView
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.backoff import Backoff
from slagate.workers.errors import WorkerError, scrub
from slagate.workers.runtime.clock import unix_s
from slagate.workers.runtime.cooperative import CooperativeScheduler
from slagate.workers.worker import SCHEMA_RELEASE, Worker

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Between two looks at a worker. Load in between is known from leases, so faster buys nothing."""

JITTER_RATIO = 0.2

PATIENT_PROBES = 5
"""Without an answer, in a row, before looks become rarer: more than it takes to leave."""

BACKOFF_RATIO = 1.5
MAX_INTERVAL_S = 10.0

PROBE_LIMIT_S = 2.0
"""Workers answer these from memory; one that takes longer hangs."""

Connect = Callable[[str], AbstractAsyncContextManager[Worker]]

ROLE_OF_STAGE = {
    Stage.PREFILL: oe.ENGINE_ROLE_PREFILL,
    Stage.DECODE: oe.ENGINE_ROLE_DECODE,
    Stage.AGG: oe.ENGINE_ROLE_AGGREGATED,
}


@asynccontextmanager
async def watch_fleet(
    fleet: Fleet,
    *,
    connect: Connect,
    now_s: Callable[[], float],
    unix_s: Callable[[], float] = unix_s,
    rng: random.Random,
    drain_s: float = math.inf,
    on_cut: Callable[[], None] = lambda: None,
) -> AsyncIterator[None]:
    """Watch every worker of the fleet, and follow its KV events, for the time of the block.

    `now_s` is the gateway's clock, `unix_s` the one that workers stamp their events by. A worker that
    drains for longer than `drain_s` has its requests ended, and `on_cut` is told.
    """
    shared = _WatchContext(connect, CooperativeScheduler(), now_s, drain_s, on_cut)
    async with anyio.create_task_group() as tasks:

        def joined(pool: Pool, member: Member) -> None:
            member.events = EventView(member.address, unix_s=unix_s)
            seed = random.Random(rng.getrandbits(64))
            tasks.start_soon(_watch, pool, member, shared, seed)

        fleet.on_join(joined)
        yield
        tasks.cancel_scope.cancel()


class _WatchContext(NamedTuple):
    """What the watch loops of one fleet have in common."""

    connect: Connect
    scheduler: CooperativeScheduler
    now_s: Callable[[], float]
    drain_s: float
    on_cut: Callable[[], None]


async def _watch(pool: Pool, member: Member, shared: _WatchContext, rng: random.Random) -> None:
    if member.has_left:
        return
    left = anyio.Event()
    member.on_left.append(left.set)
    async with shared.connect(member.address) as worker, anyio.create_task_group() as tasks:
        member.worker = worker
        follower = pool.follower(member, worker, scheduler=shared.scheduler, rng=rng)
        if follower is not None:
            tasks.start_soon(follower.run)
        tasks.start_soon(_probe_forever, pool, member, worker, follower, shared, rng)
        await left.wait()
        tasks.cancel_scope.cancel()


async def _probe_forever(
    pool: Pool,
    member: Member,
    worker: Worker,
    follower: WorkerFollower | None,
    shared: _WatchContext,
    rng: random.Random,
) -> None:
    n_unanswered, interval_s = 0, INTERVAL_S
    backoff = Backoff(BACKOFF_RATIO * INTERVAL_S, MAX_INTERVAL_S, ratio=BACKOFF_RATIO)
    while True:
        if await _probe(pool, member, worker, shared.now_s):
            n_unanswered, interval_s = 0, INTERVAL_S
            backoff.reset()
        else:
            # What it said a look ago is no longer news.
            pool.set_foreign(member, None)
            n_unanswered += 1
            if n_unanswered >= PATIENT_PROBES:
                interval_s = backoff.next_s()
        if follower is not None and member.server_info is not None:
            if member.health.state is State.REFUSED:
                follower.misfit()
            else:
                follower.identified(member.server_info)
        pool.tidy()
        if member.has_drained_for(shared.drain_s, shared.now_s()) and member.cut():
            shared.on_cut()
        await anyio.sleep(interval_s * (1 + JITTER_RATIO * rng.uniform(-1, 1)))


async def _probe(pool: Pool, member: Member, worker: Worker, now_s: Callable[[], float]) -> bool:
    """One look at the worker, and what it says of its health. False where it gave no answer."""
    try:
        with anyio.fail_after(PROBE_LIMIT_S):
            health = await worker.health(oe.HealthRequest())
            await _load(pool, member, worker, now_s)
            if misfit := await _identify(pool, member, worker):
                member.refuse(misfit)
                return True
    except WorkerError as error:
        member.probe_failed(f"{error.status.code.name}: {scrub(error.status.message)}")
    except TimeoutError:
        member.probe_failed(f"does not answer within {PROBE_LIMIT_S} s")
    except Exception as error:
        # Whatever one worker answers, the others and the gateway go on.
        log.exception("member.look", extra={"worker": member.address})
        member.probe_failed(f"answers what cannot be read: {type(error).__name__}")
    else:
        if health.state == oe.HEALTH_STATE_READY:
            member.probe_ok()
        else:
            member.probe_failed(f"reports {_name(oe.HealthState, health.state)}")
        return True
    return False


async def _load(pool: Pool, member: Member, worker: Worker, now_s: Callable[[], float]) -> None:
    before, _ = member.ranks.everywhere
    try:
        load = await worker.load(oe.GetLoadRequest())
    except WorkerError:
        # TensorRT-LLM's own server has no figures when it is idle, and old ones have no such method:
        # an answer about what it can tell, not about its health.
        member.load = None
        pool.set_foreign(member, None)
    else:
        member.load, member.load_at_s = load, now_s()
        pool.set_foreign(member, _foreign(member, load, most_ours=before))


def _foreign(member: Member, load: oe.LoadInfo, *, most_ours: int) -> tuple[int, int] | None:
    """Requests on a worker, and prompt tokens waiting there, that this gateway did not send.

    Ours, in whichever of its processes, is counted as high as it was before (`most_ours`) and after the
    worker was asked: what others sent is rather too little than too much. None where it does not say.
    """
    if not load.HasField("running_requests"):
        return None
    ours, our_tokens = member.ranks.everywhere
    requests = max(0, load.running_requests - max(ours, most_ours))
    tokens = max(0, load.waiting_tokens - our_tokens) if requests else 0
    return requests, tokens


async def _identify(pool: Pool, member: Member, worker: Worker) -> str:
    """Who answers under this address; why it cannot be the configured member, or "".

    A restarted process has another instance id. Load reports carry it too, so a worker that gives them
    is asked for the whole answer only when it has changed.
    """
    known = member.server_info
    is_known = known is not None and known.instance_id != "" and bool(member.models)
    if known and is_known and _reported_instance(member) == known.instance_id:
        return _misfit(member, known)
    info = await worker.server_info()
    if misfit := _misfit(member, info):
        member.set_server_info(info)
        return misfit
    # One that did not fit before, and says no instance id, had no models.
    is_another = known is None or known.instance_id != info.instance_id or not member.models
    member.set_server_info(info)
    if is_another:
        # Until it says what it serves now, it gets nothing.
        member.set_models({})
        pool.identified(member)
        member.set_models({name: await worker.model_info(name) for name in info.supported_models})
    return ""


def _reported_instance(member: Member) -> str:
    return "" if member.load is None else member.load.instance_id


def _misfit(member: Member, info: oe.ServerInfo) -> str:
    if info.schema_revision != 1 or info.minimum_client_revision > 1:
        return f"speaks OpenEngine revision {info.schema_revision}, this gateway revision 1"
    if info.schema_release != SCHEMA_RELEASE:
        return f"speaks OpenEngine release {info.schema_release[:80]!r}, not {SCHEMA_RELEASE!r}"
    wanted = ROLE_OF_STAGE[member.stage]
    # TensorRT-LLM's own server cannot say its role, and a role of a later revision reads as unsaid: the
    # configuration is then all there is.
    if info.engine_role in ROLE_OF_STAGE.values() and info.engine_role != wanted:
        role = _name(oe.EngineRole, info.engine_role).removeprefix("ENGINE_ROLE_").lower()
        return f"is a {role} worker, but listed in {member.stage.value} pool {member.pool!r}"
    return ""


def _name(enum: Any, value: int) -> str:
    """The name of an enum value; one of a later revision has only its number."""
    return str(enum.Name(value)) if value in enum.values() else f"unknown state {value}"
