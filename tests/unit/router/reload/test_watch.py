"""Workers that come and go by reloads, looked at and used, on the virtual loop."""

import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import anyio
import grpc
import pytest

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Lease
from slagate.pools.fleet.watch import INTERVAL_S, JITTER_RATIO, watch_fleet
from slagate.pools.fleet_file.load import FleetConfig
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.row_view import State
from slagate.pools.kv_events.view import EventMode
from slagate.pools.prefix.overlap import Prompt
from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import OK, Status
from slagate.router.cli.receipts import Recomputer, json_line
from slagate.router.receipts.config import read_config
from slagate.router.receipts.recompute import decide_again
from slagate.router.request.errors import Outcome
from slagate.router.request.settings import Settings
from slagate.router.services.admin import AdminService
from slagate.workers.runtime.cooperative import run_cooperatively
from slagate.workers.runtime.virtual_loop import run
from support.builders import PROFILE, config, finished, prefill_ready, request, rng, token
from support.fleet.watched import LOOK_S
from support.gateway.context import Context
from support.gateway.reloads import Nowhere
from support.gateway.request_path import Bench, bench
from support.kv.followed import BLOCK_TOKENS, CLEARED, batch, stored, tokens_of
from support.worker.fake import HANG, ROLES, FakeWorker, Wait

WORK = Work(10, 0.1, 10)

DOWN = Status(grpc.StatusCode.UNAVAILABLE, "connection refused")


@dataclass
class Probed(FakeWorker):
    """Notes when it was asked for its health, and who is connected to it."""

    role: oe.EngineRole.ValueType = ROLES["agg"]
    probes_s: list[float] = field(default_factory=list)
    n_connects: int = 0
    n_connected: int = 0

    async def health(self, request: oe.HealthRequest) -> oe.HealthResponse:
        assert self.n_connected, "over a channel that is closed"
        self.probes_s.append(anyio.current_time())
        return await super().health(request)


class Probing:
    """A fleet of aggregated workers that are watched; none is there before it is connected to."""

    def __init__(self, *addresses: str) -> None:
        self.workers: dict[str, Probed] = {}
        self.fleet = Fleet(prepare(listing(*addresses)), now_s=anyio.current_time)
        self.n_cut = 0

    @asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator[FakeWorker]:
        worker = self.workers.setdefault(address, Probed())
        worker.n_connects += 1
        worker.n_connected += 1
        try:
            yield worker
        finally:
            worker.n_connected -= 1

    def put(self, *addresses: str) -> None:
        self.fleet.apply(prepare(listing(*addresses)))

    def member(self, address: str) -> Member:
        return self.fleet.pools["agg"].members[address]

    def cut(self) -> None:
        self.n_cut += 1


def listing(*addresses: str) -> FleetConfig:
    return config("agg", {"agg": {"workers": list(addresses)}})


@asynccontextmanager
async def probing(*addresses: str, drain_s: float = 600.0) -> AsyncIterator[Probing]:
    of = Probing(*addresses)
    async with watch_fleet(
        of.fleet,
        connect=of.connect,
        now_s=anyio.current_time,
        rng=rng(),
        drain_s=drain_s,
        on_cut=of.cut,
    ):
        await anyio.sleep(0.01)
        yield of


def test_ops_05_after_reloads_each_worker_has_one_prober_and_who_left_none() -> None:
    async def main() -> None:
        async with probing("w1:1", "w2:1", "w3:1") as of:
            for number in range(20):
                of.put("w1:1", "w2:1", "w4:1" if number % 2 == 0 else "w3:1")
                await anyio.sleep(0.37 * (number % 4))
            of.put("w1:1", "w2:1", "w4:1")
            await anyio.sleep(LOOK_S)
            n_probes = len(of.workers["w3:1"].probes_s)
            began_s = anyio.current_time()
            await anyio.sleep(30)
            w3 = of.workers["w3:1"]
            assert (len(w3.probes_s), w3.n_connected) == (n_probes, 0)
            for address in ("w1:1", "w2:1", "w4:1"):
                worker = of.workers[address]
                assert worker.n_connected == 1, address
                times_s = [at for at in worker.probes_s if at >= began_s]
                gaps_s = [b - a for a, b in pairwise(times_s)]
                assert len(gaps_s) >= 23, address
                assert gaps_s == pytest.approx([INTERVAL_S] * len(gaps_s), rel=JITTER_RATIO)
            # Those that stayed were never connected to again.
            assert (of.workers["w1:1"].n_connects, of.workers["w2:1"].n_connects) == (1, 1)
            assert of.workers["w4:1"].n_connects == 11
        assert not any(worker.n_connected for worker in of.workers.values())

    run(main)


def test_ops_05_who_drains_is_looked_at_until_it_has_left() -> None:
    async def main() -> None:
        async with probing("w1:1", "w2:1") as of:
            drained = of.member("w2:1")
            pool, worker = of.fleet.pools["agg"], of.workers["w2:1"]
            held = pool.lease(drained.ranks.rows[0], WORK)
            of.put("w1:1")
            await anyio.sleep(10)
            assert (drained.state, len(worker.probes_s) >= 9) == (State.DRAINING, True)
            # Should it die meanwhile, its requests hear of it.
            worker.down = DOWN
            await anyio.sleep(4 * LOOK_S)
            assert (drained.state, drained.is_up) == (State.DRAINING, False)
            held.release()
            n_probes = len(worker.probes_s)
            await anyio.sleep(10)
            assert (drained.state, len(worker.probes_s)) == (State.LEFT, n_probes)
            assert (worker.n_connected, of.n_cut) == (0, 0)

    run(main)


class Cut:
    """A leg that ends when it is told to."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.told: list[str] = []

    def worker_lost(self, reason: str) -> None:
        raise AssertionError(reason)

    def drain_timed_out(self, reason: str) -> None:
        self.told.append(reason)
        self.lease.release()


def test_ops_01_time_is_up_within_a_look_once_for_each_worker() -> None:
    async def main() -> None:
        async with probing("w1:1", "w2:1", drain_s=5.0) as of:
            drained, pool = of.member("w2:1"), of.fleet.pools["agg"]
            # One of them has no leg yet, so nothing of it can be cut: its request finds out by itself.
            held, between = (pool.lease(drained.ranks.rows[0], WORK) for _ in range(2))
            leg = Cut(held)
            drained.legs.add(leg)
            of.put("w1:1")
            await anyio.sleep(4.9)
            assert leg.told == []
            await anyio.sleep(0.1 + LOOK_S)
            assert (len(leg.told), of.n_cut, drained.is_up) == (1, 1, False)
            await anyio.sleep(10)
            assert (len(leg.told), of.n_cut, drained.state) == (1, 1, State.DRAINING)
            between.release()
            await anyio.sleep(0.1)
            assert (drained.state, of.workers["w2:1"].n_connected) == (State.LEFT, 0)

    run(main)


def test_ops_01_with_no_time_to_drain_who_drains_is_cut_at_the_next_look_and_nobody_else() -> None:
    async def main() -> None:
        async with probing("w1:1", "w2:1", drain_s=0.0) as of:
            pool = of.fleet.pools["agg"]
            legs = [Cut(pool.lease(m.ranks.rows[0], WORK)) for m in of.fleet.members()]
            for member, leg in zip(of.fleet.members(), legs, strict=True):
                member.legs.add(leg)
            await anyio.sleep(5)
            assert (of.n_cut, [leg.told for leg in legs]) == (0, [[], []])
            assert all(member.is_up for member in of.fleet.members())
            of.put("w1:1")
            await anyio.sleep(LOOK_S)
            assert (of.n_cut, [len(leg.told) for leg in legs]) == (1, [0, 1])
            with pytest.raises(AssertionError):
                of.member("w1:1").force_drain()
            assert of.member("w1:1").is_up

    run(main)


def test_who_came_back_has_its_time_from_the_start() -> None:
    async def main() -> None:
        async with probing("w1:1", "w2:1", drain_s=5.0) as of:
            drained = of.member("w2:1")
            leg = Cut(of.fleet.pools["agg"].lease(drained.ranks.rows[0], WORK))
            drained.legs.add(leg)
            of.put("w1:1")
            await anyio.sleep(4)
            of.put("w1:1", "w2:1")
            await anyio.sleep(10)
            of.put("w1:1")
            await anyio.sleep(4)
            assert (leg.told, of.n_cut) == ([], 0)
            await anyio.sleep(1 + LOOK_S)
            assert (len(leg.told), of.n_cut) == (1, 1)

    run(main)


def test_who_comes_back_keeps_its_index_and_a_row_that_was_anothers_starts_empty() -> None:
    ids = tokens_of(1, 2, 3)
    prompt = Prompt(struct.pack(f"<{len(ids)}I", *ids))

    async def main() -> None:
        of = Probing("w1:1", "w2:1")
        for address in ("w1:1", "w2:1"):
            worker = of.workers[address] = Probed(
                kv_scripts=[(batch(0, CLEARED, stored(1, 2)), HANG)]
            )
            worker.info.capacity.kv_block_size = BLOCK_TOKENS
        async with watch_fleet(of.fleet, connect=of.connect, now_s=anyio.current_time, rng=rng()):
            await anyio.sleep(2 * LOOK_S)
            pool, member = of.fleet.pools["agg"], of.member("w2:1")
            row = member.ranks.rows[0]

            def cached() -> list[int]:
                return [int(each) for each in pool.snapshot(prompt).cached.cached_tokens]

            assert cached() == [2 * BLOCK_TOKENS] * 2
            held = pool.lease(row, WORK)
            of.put("w1:1")
            await anyio.sleep(5)
            of.put("w1:1", "w2:1")
            await anyio.sleep(5)
            assert (of.member("w2:1"), cached()) == (member, [2 * BLOCK_TOKENS] * 2)
            assert member.events is not None
            assert (member.events.mode, len(of.workers["w2:1"].kv_calls)) == (EventMode.LIVE, 1)
            held.release()
            # w3, which has no events, gets the row of w2, whose blocks are nobody's now.
            of.put("w1:1", "w3:1")
            assert of.member("w3:1").ranks.rows == [row]
            assert cached() == [2 * BLOCK_TOKENS, 0]
            await anyio.sleep(5)
            assert (of.member("w3:1").state, cached()) == (State.READY, [2 * BLOCK_TOKENS, 0])
            assert of.workers["w2:1"].kv_calls[0].cancelled
            # And w2 again, under a row of its own.
            of.put("w1:1", "w3:1", "w2:1")
            await anyio.sleep(5)
            assert cached() == [2 * BLOCK_TOKENS, 0, 2 * BLOCK_TOKENS]

    run(main)


SLOW = (token(11), Wait(20), token(12, 13), finished(), OK)


def put(at: Bench, found: FleetConfig) -> None:
    at.app.reloader.put(at.app.reloader.propose(lambda: found))


def test_ops_03_a_removal_goes_by_what_the_worker_does_then_not_when_the_file_was_read() -> None:
    async def main() -> None:
        async with bench("agg", n_workers=2, agg=[SLOW]) as at:
            drained = at.app.fleet.pools["agg"].members["a1:1"]
            at.workers["a1:1"].down = DOWN
            await anyio.sleep(5 * LOOK_S)
            assert (drained.state, drained.ranks.inflight) == (State.NOT_READY, 0)
            without = at.app.reloader.propose(lambda: listing("a2:1"))
            # It is up again and takes a stream before the removal runs.
            at.workers["a1:1"].down, at.workers["a2:1"].down = None, DOWN
            await anyio.sleep(5 * LOOK_S)
            assert (drained.state, drained.ranks.inflight) == (State.READY, 0)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(check_served, at)
                await anyio.sleep(1)
                assert drained.ranks.inflight == 1
                at.app.reloader.put(without)
                assert drained.state is State.DRAINING
                await anyio.sleep(15)
                assert drained.state is State.DRAINING
            assert drained.state is State.LEFT
            assert len(at.workers["a1:1"].calls) == 1
            await at.check_idle(Outcome.COMPLETED)

    run(main)


async def check_served(at: Bench) -> None:
    answer = await at.call(request())
    assert (answer.status.code, answer.tokens) == (grpc.StatusCode.OK, [11, 12, 13])


def test_ops_01_a_request_without_a_token_yet_goes_elsewhere_when_its_worker_is_cut() -> None:

    async def main() -> None:
        silent = (Wait(500), token(11), finished(), OK)
        async with bench("agg", n_workers=2, agg=[silent, SLOW]) as at:
            drained: list[Member] = []

            async def cut() -> None:
                await anyio.sleep(1)
                (first,) = (w for w, worker in at.workers.items() if worker.calls)
                drained.append(at.app.fleet.pools["agg"].members[first])
                put(at, listing(*(address for address in at.workers if address != first)))
                drained[0].force_drain()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cut)
                await check_served(at)
            assert drained[0].state is State.LEFT
            await at.check_idle(Outcome.COMPLETED)

    run(main)


@pytest.mark.parametrize("profile", [{}, {"profile": PROFILE, "tp": 1}], ids=["same", "another"])
def test_requests_that_were_predicted_by_another_profile_teach_this_one_nothing(
    profile: dict[str, Any],
) -> None:
    async def main() -> None:
        said = (token(11), Wait(2), token(12, 13), finished(cached=0), OK)
        async with bench("agg", agg=[said]) as at:

            async def change() -> None:
                await anyio.sleep(1)
                put(at, config("agg", {"agg": {"workers": ["a1:1"], "max_inflight": 9} | profile}))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(change)
                await check_served(at)
            # TTFT and ITL.
            assert at.app.fleet.pools["agg"].estimator.n_observed == (0 if profile else 2)

    run(main)


@pytest.mark.parametrize("after", [{"ttft_ms": 800}, {"ttft_ms": 800, "itl_ms": 20}, {}])
def test_what_a_request_was_decided_by_it_is_retried_by(after: dict[str, int]) -> None:
    """Whatever its class means by then, and the receipt decides it again so."""

    async def main() -> None:
        lost = (Wait(2), DOWN)
        async with bench("agg", n_workers=2, agg=[lost, SLOW]) as at:
            pools = {"agg": {"workers": list(at.workers)}}
            put(at, config("agg", pools, objectives={"*": {"ttft_ms": 300}}))
            first = at.app.reloader.version

            async def change() -> None:
                await anyio.sleep(1)
                put(at, config("agg", pools, objectives={"*": after}))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(change)
                await check_served(at)
            (entry,) = [entry async for entry, _ in at.app.gateway.receipts.watch()]
            receipt = await run_cooperatively(entry.receipt())
            (replaced,), (last,) = receipt.replaced, receipt.decision.stages
            versions = [replaced.config_version, last.config_version]
            assert versions == [first, at.app.reloader.version]
            assert len(set(versions)) == 2
            sla = receipt.decision.sla
            assert (sla.ttft_ms, sla.HasField("itl_ms")) == (300, False)
            assert list(sla.by_objective) == ["ttft_ms"]
            targets = [[(t.field, t.ms) for t in each.targets] for each in (replaced, last)]
            assert targets[0] == targets[1]
            known = {each.version: read_config(each) for each in entry.configs}
            assert list(decide_again(receipt, known)) == [None, None]

    run(main)


def test_what_the_admin_service_gives_of_requests_before_and_after_a_reload_recomputes() -> None:
    """Also of one that was refused before it was decided, under a version that nobody prints any more."""

    async def main() -> None:
        async with bench("agg", n_workers=2) as at:
            gateway = at.app.gateway
            await at.call(request(model="unheard of"))
            put(at, listing("a2:1"))
            await at.call()
            service = AdminService(
                gateway.dispatcher,
                Settings(),
                reloader=at.app.reloader,
                source=Nowhere(),
                receipts=gateway.receipts,
                now_s=anyio.current_time,
            )
            watched = service.WatchReceipts(gw.WatchReceiptsRequest(), Context())
            said = [each async for each in watched]
            receipts = [each.receipt for each in said if each.HasField("receipt")]
            assert (len(said), len(receipts)) == (3, 2)
            assert receipts[0].config_version != receipts[1].config_version
            recheck = Recomputer()
            assert list(recheck.read(json_line(each).encode() for each in said)) == []
            assert (recheck.n_receipts, recheck.n_choices, recheck.ok) == (2, 1, True)

    run(main)


def without_the_prefill_worker_in_use(at: Bench) -> Member:
    """Remove the prefill worker that was called; its record."""
    (holder,) = (w for w, worker in at.workers.items() if w[0] == "p" and worker.calls)
    drained = at.app.fleet.pools["prefill"].members[holder]
    put(
        at, config("disagg", {"prefill": {"workers": [w for w in ("p1:1", "p2:1") if w != holder]}})
    )
    return drained


def test_ops_02_a_prefill_worker_stays_until_its_handoff_is_collected() -> None:
    async def main() -> None:
        decode = (Wait(3), token(11), Wait(5), token(12, 13), finished(), OK)
        async with bench(
            "disagg", n_workers=2, prefill=[(prefill_ready(), OK)], decode=[decode]
        ) as at:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(check_served, at)
                await anyio.sleep(1)
                drained = without_the_prefill_worker_in_use(at)
                assert drained.ranks.inflight == 0
                await anyio.sleep(1.9)
                assert (drained.state, drained.has_left) == (State.DRAINING, False)
                await anyio.sleep(0.2)
                assert (drained.state, drained.has_left) == (State.LEFT, True)
            assert at.released == []
            await at.check_idle(Outcome.COMPLETED)

    run(main)


def test_ops_02_a_handoff_that_nobody_collects_is_freed_before_its_worker_is_let_go() -> None:
    async def main() -> None:
        async with bench("disagg", n_workers=2, decode=[(HANG,)]) as at:
            with anyio.move_on_after(10):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(at.call, request())
                    await anyio.sleep(1)
                    drained = without_the_prefill_worker_in_use(at)
                    await anyio.sleep(5)
                    assert drained.state is State.DRAINING
            await anyio.sleep(1)
            assert (len(at.released), drained.state) == (1, State.LEFT)

    run(main)


def test_ops_07_a_worker_that_never_starts_is_counted_and_hides_nobody() -> None:
    async def main() -> None:
        async with bench("agg", n_workers=3) as at:
            at.workers["new:1"] = FakeWorker(role=ROLES["agg"], down=DOWN)
            held = at.app.fleet.pools["agg"].lease(0, WORK)
            put(at, listing("a2:1", "a3:1", "new:1"))
            await anyio.sleep(600)
            registry = at.app.gateway.metrics.registry
            of_pool = {"stage": "agg", "pool": "agg"}

            def states() -> dict[str, int]:
                sample = registry.get_sample_value
                counts = {
                    state.value: sample("slagate_pool_workers", of_pool | {"state": state.value})
                    for state in State
                }
                return Counter({state: int(n) for state, n in counts.items() if n is not None})

            assert +Counter(states()) == {"ready": 2, "connecting": 1, "draining": 1}
            assert set(states()) == {state.value for state in State} - {"left"}
            for name in ("inflight", "queued_tokens", "context_tokens"):
                for worker in ("a2:1", "a3:1"):
                    labels = of_pool | {"worker": worker}
                    assert registry.get_sample_value(f"slagate_worker_{name}", labels) == 0
            held.release()
            assert +Counter(states()) == {"ready": 2, "connecting": 1}
            # A pool that is gone is counted for as long as a worker of it drains.
            held = at.app.fleet.pools["agg"].lease(1, WORK)
            at.workers["p1:1"] = FakeWorker(role=ROLES["prefill"])
            at.workers["d1:1"] = FakeWorker(role=ROLES["decode"])
            one = {stage: {"workers": [f"{stage[0]}1:1"]} for stage in ("prefill", "decode")}
            put(at, config("disagg", one))
            await anyio.sleep(1)
            assert +Counter(states()) == {"draining": 1}
            held.release()
            assert states() == {}

    run(main)
