"""Probes each worker in a loop: who it is, whether it is healthy, how busy it is.

The loop ends when the worker has left the fleet, and so does the connection to it.

A worker is probed every second. After five probes in a row without an answer (it is not ready long before
that) the interval grows to 1.5 s, 2.25 s and so on, at most 10 s: a fleet file may list hundreds of workers
that are not up. Any answer brings the interval back to a second. Intervals vary by a fifth, so a worker
that comes up is seen within 12 s.
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
from slagate.pools.fleet.pairing import UnpairedWorkers
from slagate.pools.fleet.pool import Pool
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.row_view import State
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
"""Between two probes of a worker. Load in between is known from leases, so probing faster gains nothing."""

JITTER_RATIO = 0.2

PATIENT_PROBES = 5
"""Probes in a row without an answer before they become rarer: more than it takes to be not ready."""

BACKOFF_RATIO = 1.5
MAX_INTERVAL_S = 10.0

PROBE_LIMIT_S = 2.0
"""Workers answer probes from memory; one that takes longer hangs."""

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
    """Probe every worker of the fleet and follow its KV events while the `async with` runs.

    `connect` opens the worker at an address. `now_s` is the gateway's clock, `unix_s` the one that
    workers stamp their events by. When a worker drains for longer than `drain_s` its requests are
    ended, and `on_cut` is called.
    """
    unpaired = UnpairedWorkers(fleet.members, now_s)
    shared = _WatchContext(connect, CooperativeScheduler(), now_s, drain_s, on_cut, unpaired)
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
    unpaired: UnpairedWorkers


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
            # What it reported before may be wrong by now.
            pool.set_foreign_load(member, None)
            n_unanswered += 1
            if n_unanswered >= PATIENT_PROBES:
                interval_s = backoff.next_s()
        if follower is not None and member.server_info is not None:
            if member.health.state is State.REFUSED:
                follower.misfit()
            else:
                follower.identified(member.server_info)
        pool.expire_predictions()
        shared.unpaired.look()
        if member.has_drained_for(shared.drain_s, shared.now_s()) and member.force_drain():
            shared.on_cut()
        await anyio.sleep(interval_s * (1 + JITTER_RATIO * rng.uniform(-1, 1)))


async def _probe(pool: Pool, member: Member, worker: Worker, now_s: Callable[[], float]) -> bool:
    """Probe the worker once. False where it gave no answer."""
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
        # Whatever one worker answers must not stop the other loops or the gateway.
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
    before, _ = member.ranks.gateway_load
    try:
        load = await worker.load(oe.GetLoadRequest())
    except WorkerError:
        # TensorRT-LLM's own server has no figures when it is idle, and old ones have no such method, so
        # this error says nothing about its health.
        member.load = None
        pool.set_foreign_load(member, None)
    else:
        member.load, member.load_at_s = load, now_s()
        pool.set_foreign_load(member, _foreign(member, load, most_ours=before))


def _foreign(member: Member, load: oe.LoadInfo, *, most_ours: int) -> tuple[int, int] | None:
    """Requests on a worker, and prompt tokens waiting there, that this gateway did not send.

    The gateway's own, over all its processes, are the more of what they were before the report
    (`most_ours`) and after it, so that the result is rather too low than too high. None: not reported.
    """
    if not load.HasField("running_requests"):
        return None
    ours, our_tokens = member.ranks.gateway_load
    requests = max(0, load.running_requests - max(ours, most_ours))
    tokens = max(0, load.waiting_tokens - our_tokens) if requests else 0
    return requests, tokens


async def _identify(pool: Pool, member: Member, worker: Worker) -> str:
    """Ask who answers at this address; returns why it cannot be the configured member, or "".

    A restarted process has another instance id. Load reports carry it too, so a worker that sends them is
    asked for all its information only when the id has changed.
    """
    known = member.server_info
    is_known = known is not None and known.instance_id != "" and bool(member.models)
    if known and is_known and _reported_instance(member) == known.instance_id:
        return _misfit(member, known)
    info = await worker.server_info()
    if misfit := _misfit(member, info):
        member.set_server_info(info)
        return misfit
    # A worker that did not fit before has no models, also where it reports no instance id.
    is_another = known is None or known.instance_id != info.instance_id or not member.models
    member.set_server_info(info)
    if is_another:
        # It gets no requests until it has said what it serves now.
        member.set_models({})
        pool.worker_replaced(member)
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
    # TensorRT-LLM's own server does not report its role, and a role of a later revision counts as not
    # reported: then the configuration decides.
    if info.engine_role in ROLE_OF_STAGE.values() and info.engine_role != wanted:
        role = _name(oe.EngineRole, info.engine_role).removeprefix("ENGINE_ROLE_").lower()
        return f"is a {role} worker, but listed in {member.stage.value} pool {member.pool!r}"
    return ""


def _name(enum: Any, value: int) -> str:
    """The name of an enum value, or its number where it is of a later revision."""
    return str(enum.Name(value)) if value in enum.values() else f"unknown state {value}"
