"""Another configuration under load, over simulated engines in virtual time."""

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

from slagate.pools.fleet.member import Member
from slagate.pools.fleet_file.load import parse_config
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.row_view import State
from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.router.app import build
from slagate.router.receipts.config import read_config
from slagate.router.receipts.recompute import decide_again
from slagate.router.reload.reload import Reloaded
from slagate.router.replay.invariants import check_idle, check_index
from slagate.router.replay.network import Delay
from slagate.router.request.settings import Settings
from slagate.workers.runtime import virtual_loop
from slagate.workers.runtime.cooperative import run_cooperatively
from slagate.workers.worker import Worker
from support.gateway.simulation import (
    Fleet,
    Plan,
    Seen,
    check_tokens,
    fleet_file,
    running,
    simulate,
)
from support.seeds import n_in

Files = dict[str, dict[str, list[str]]]


def put(fleet: Fleet, pools: Files) -> Reloaded:
    """Put pools with these workers in force, at once."""
    reloader = fleet.app.reloader
    config = parse_config(fleet_file(pools), source="reload", serving=True)
    return reloader.put(reloader.propose(lambda: config))


def some(workers: list[str], rng: random.Random) -> list[str]:
    return sorted(rng.sample(workers, rng.randint(1, len(workers))))


def random_files(stages: dict[str, int], rng: random.Random) -> Files:
    """Some of the workers of each stage, at times under another name of the pool."""
    return {
        stage: {
            rng.choice([f"{stage}-pool", f"{stage}-other"]): some(
                [f"{stage}:{number + 1}" for number in range(count)], rng
            )
        }
        for stage, count in stages.items()
    }


def steady(rng: random.Random, count: int, *, seconds: float) -> list[Plan]:
    plans = []
    for _ in range(count):
        first = rng.randrange(50_000)
        prompt = list(range(first, first + rng.choice([10, 300, 1000])))
        plans.append(Plan(rng.uniform(0, seconds), prompt, rng.choice([1, 2, 16])))
    return plans


async def receipts(fleet: Fleet) -> list[tuple[gw.Receipt, list[gw.GatewayConfig]]]:
    ring = fleet.app.gateway.receipts
    return [
        (await run_cooperatively(entry.receipt()), entry.configs) async for entry, _ in ring.watch()
    ]


async def while_playing(
    fleet: Fleet, plans: list[Plan], does: Callable[[], Coroutine[Any, Any, None]]
) -> list[Seen]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(does)
        seen = await simulate(fleet, plans)
    return seen


@pytest.mark.parametrize("seed", range(n_in(gate=1, long=2)))
@pytest.mark.parametrize("stages", [{"prefill": 3, "decode": 3}, {"agg": 3}], ids=["disagg", "agg"])
def test_no_request_fails_by_reloads_and_each_receipt_names_what_it_was_decided_by(
    stages: dict[str, int], seed: int
) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        async with running(stages, seed=seed) as fleet:
            versions = {fleet.app.reloader.version}

            async def reloads() -> None:
                for _ in range(20):
                    await anyio.sleep(rng.choice([0.0, 0.01, 0.15]))
                    versions.add(put(fleet, random_files(stages, rng)).version)

            seen = await while_playing(fleet, steady(rng, 60, seconds=1.5), reloads)
            assert Counter(one.code for one in seen) == {"OK": 60}, f"seed {seed}"
            check_tokens(seen)
            await check_idle(fleet.app, fleet.workers, n_requests=60)
            listed = {m.address for m in fleet.app.fleet.members()}
            assert {m.address for m in fleet.app.fleet.all_members()} == listed
            named = set()
            for receipt, configs in await receipts(fleet):
                named.add(receipt.config_version)
                known = {each.version: read_config(each) for each in configs}
                assert {choice.config_version for choice in receipt.decision.stages} <= set(known)
                assert list(decide_again(receipt, known)) == [None] * len(stages), f"seed {seed}"
            assert 5 < len(named) <= len(versions)
            assert named <= versions

    virtual_loop.run(main)


SLOWLY = 100
"""Times slower than it is: a long stream of few tokens, which cost the test less."""


def slow(seconds: float) -> Plan:
    """A stream that takes about so long: ITL is some 6 ms."""
    return Plan(0.0, list(range(100)), round(seconds / 0.006 / SLOWLY))


def drained(fleet: Fleet, address: str) -> tuple[Member, list[float]]:
    """Take a worker out of the file; its record, and when it has left."""
    (member,) = (m for m in fleet.app.fleet.members() if m.address == address)
    files: Files = {}
    for name, pool in fleet.app.fleet.pools.items():
        files.setdefault(pool.stage.value, {})[name] = [a for a in pool.members if a != address]
    left_s: list[float] = []
    member.on_left.append(lambda: left_s.append(anyio.current_time()))
    put(fleet, files)
    return member, left_s


async def ended_s(fleet: Fleet, address: str) -> list[float]:
    """When the requests of a worker ended."""
    found = []
    async for entry, _ in fleet.app.gateway.receipts.watch():
        receipt = await run_cooperatively(entry.receipt())
        if any(attempt.worker == address for attempt in receipt.attempts):
            found.append(entry.ended_s)
    return sorted(found)


def test_ops_01_a_drained_worker_gets_nothing_new_and_leaves_with_its_last_request() -> None:
    async def main() -> None:
        settings = Settings(worker_drain_s=60)
        async with running({"agg": 2}, seed=1, settings=settings, time_scale=SLOWLY) as fleet:
            left_s: list[float] = []

            async def drain() -> None:
                await anyio.sleep(1)
                member, times_s = drained(fleet, "agg:1")
                assert (member.state, member.ranks.inflight) == (State.DRAINING, 3)
                member.on_left.append(lambda: left_s.extend(times_s))

            later = [Plan(2.0, [7] * 50, 5) for _ in range(10)]
            plans = [slow(seconds) for seconds in (10, 10, 15, 15, 20, 20)]
            seen = await while_playing(fleet, plans + later, drain)
            assert {one.code for one in seen} == {"OK"}
            check_tokens(seen)
            by_worker = Counter(
                (one.plan.at_s, one.receipt.decision.stages[0].worker) for one in seen
            )
            assert (by_worker[0.0, "agg:1"], by_worker[2.0, "agg:1"]) == (3, 0)
            assert left_s == pytest.approx([(await ended_s(fleet, "agg:1"))[-1]])
            assert fleet.app.gateway.metrics.drains_cut._value.get() == 0

    virtual_loop.run(main)


def test_ops_01_what_takes_longer_than_the_limit_is_cut() -> None:
    async def main() -> None:
        settings = Settings(worker_drain_s=10)
        async with running({"agg": 2}, seed=1, settings=settings, time_scale=SLOWLY) as fleet:
            began_s, left_s = anyio.current_time(), list[float]()

            async def drain() -> None:
                await anyio.sleep(1)
                member, times_s = drained(fleet, "agg:1")
                member.on_left.append(lambda: left_s.extend(times_s))

            seen = await while_playing(fleet, [slow(40) for _ in range(6)], drain)
            for one in seen:
                was_cut = one.receipt.attempts[0].worker == "agg:1"
                assert one.code == ("UNAVAILABLE" if was_cut else "OK")
            assert Counter(one.code for one in seen)["UNAVAILABLE"] == 3
            # Within a look after the ten seconds.
            assert left_s == pytest.approx([began_s + 11], abs=1.3)
            assert left_s[0] > began_s + 11
            assert fleet.app.gateway.metrics.drains_cut._value.get() == 1

    virtual_loop.run(main)


def test_ops_02_a_prefill_worker_stays_until_a_slow_decode_worker_has_its_handoff() -> None:
    async def main() -> None:
        async with running({"prefill": 2, "decode": 1}, seed=1) as fleet:
            (decode,) = fleet.app.fleet.pools["decode-pool"].members.values()
            far = vars(decode.worker)
            near, far["_there"] = far["_there"], Delay(3.0)
            state: list[object] = []

            async def drain() -> None:
                await anyio.sleep(0.5)
                far["_there"] = near  # of calls to come
                (holder,) = (m for m in fleet.app.fleet.members() if m._n_retained)
                member, left_s = drained(fleet, holder.address)
                assert (member.stage, member.ranks.inflight) == (Stage.PREFILL, 0)
                await anyio.sleep(2)
                load = await fleet.workers[holder.address].load(oe.GetLoadRequest())
                state.append((load.active_kv_sessions, member.state, list(left_s)))

            seen = await while_playing(fleet, [Plan(0.0, list(range(300)), 20)], drain)
            assert [one.code for one in seen] == ["OK"]
            check_tokens(seen)
            assert state == [(1, State.DRAINING, [])]
            assert [m.stage for m in fleet.app.fleet.all_members()].count(Stage.PREFILL) == 1
            await check_idle(fleet.app, fleet.workers, n_requests=1)

    virtual_loop.run(main)


@asynccontextmanager
async def beside(fleet: Fleet) -> AsyncIterator[Fleet]:
    """Another gateway over the same workers, which knows nothing yet."""
    workers = {member.address: member.worker for member in fleet.app.fleet.members()}

    @asynccontextmanager
    async def connect(address: str) -> AsyncIterator[Worker]:
        worker = workers[address]
        assert worker is not None
        yield worker

    async with build(
        parse_config(
            fleet_file({"agg": {"agg-pool": list(workers)}}), source="again", serving=True
        ),
        Settings(),
        connect=connect,
        now_s=anyio.current_time,
        unix_s=anyio.current_time,
        rng=random.Random(9),
    ) as app:
        yield Fleet(app, fleet.workers)


def test_ops_06_a_gateway_that_restarts_over_warm_workers_knows_their_caches_again() -> None:
    async def main() -> None:
        async with running({"agg": 3}, seed=1) as fleet:
            rng = random.Random(5)
            warm = steady(rng, 30, seconds=1)
            assert {one.code for one in await simulate(fleet, warm)} == {"OK"}
            await anyio.sleep(1)
            async with beside(fleet) as restarted:
                # By load, as soon as it is ready.
                await anyio.sleep(0.05)
                assert restarted.app.fleet.not_ready() == ""
                cold = [Plan(0.0, [at] * 300, 2) for at in range(6)]
                seen = await simulate(restarted, cold)
                by_worker = Counter(one.receipt.decision.stages[0].worker for one in seen)
                assert by_worker == dict.fromkeys(fleet.workers, 2)
                await anyio.sleep(1)
                check_index(restarted.app, restarted.workers)
                for member in restarted.app.fleet.members():
                    assert member.events is not None
                    assert (member.events.n_errors, member.events.is_partial) == (0, False)
                    assert 0 < member.events.rebuild_s < 1
                again = [replace(one, at_s=0.0) for one in warm if len(one.prompt) == 1000][:1]
                (found,) = await simulate(restarted, again)
                actual = found.receipt.actual
                assert (actual.predicted_cached_tokens, actual.cached_tokens) == (992, 999)

    virtual_loop.run(main)
