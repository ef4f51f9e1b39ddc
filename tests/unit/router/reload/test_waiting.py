"""Another configuration while requests wait for workers, or are about to be given some."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import grpc
import pytest

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet.member import Member
from slagate.pools.fleet_file.load import FleetConfig, parse_config
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.row_view import State
from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.router.request.errors import GatewayError, NoWorker, UnknownModel
from slagate.router.request.sla import Sla
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.score import RoutingRequest
from slagate.router.scheduling.wait_queue import Assignment
from slagate.workers.runtime.virtual_loop import run
from support.builders import MODEL, STAGE_NAMES, ask, config, fleet, model_info, rng


def version(name: str) -> gw.GatewayConfig:
    return gw.GatewayConfig(version=name)


def make_ready(of: Fleet) -> None:
    for each in of.members():
        if each.state is State.JOINING:
            each.set_models({MODEL: model_info()})
            each.probe_ok()


class Requests:
    """Requests submitted one after the other; what became of each."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.order: list[int] = []
        self.held: dict[int, Assignment] = {}
        self.failed: dict[int, GatewayError] = {}

    async def submit(
        self, number: int, *, asked: RoutingRequest | None = None, **more: Any
    ) -> None:
        try:
            with self.dispatcher.submit(asked or ask(), **more) as ticket:
                self.held[number] = await ticket.assigned()
                self.order.append(number)
        except GatewayError as error:
            self.failed[number] = error

    def versions(self, number: int) -> set[str]:
        return {choice.config.version for choice in self.held[number].decision.stages}

    def workers(self, number: int) -> list[str]:
        return [member.address for member in self.held[number].members]

    def release_all(self) -> None:
        for each in self.held.values():
            each.release()


@asynccontextmanager
async def waiting(of: Fleet, n: int, **more: Any) -> AsyncIterator[Requests]:
    """`n` requests, a virtual second apart, over a fleet under version v1."""
    dispatcher = Dispatcher(of, rng=rng(), config=version("v1"), now_s=anyio.current_time)
    requests = Requests(dispatcher)
    async with anyio.create_task_group() as tasks:
        for number in range(n):
            tasks.start_soon(partial(requests.submit, number, **more))
            await anyio.sleep(1)
        yield requests
        await anyio.sleep(1)
        requests.release_all()
        await anyio.sleep(1)


def limited(most: int | None, mode: str = "agg") -> FleetConfig:
    limit = {} if most is None else {"max_inflight": most}
    return config(mode, dict.fromkeys(STAGE_NAMES[mode], limit))


def test_limits_take_effect_at_once_for_those_who_wait_the_oldest_first() -> None:
    async def main() -> None:
        of = fleet("agg", pools={"agg": {"max_inflight": 1}})
        async with waiting(of, 8) as requests:
            assert (sorted(requests.held), requests.dispatcher.n_waiting) == ([0, 1], 6)
            requests.dispatcher.put_in_force(prepare(limited(3)), version("v2"))
            await anyio.sleep(1)
            assert (requests.order, requests.failed) == ([0, 1, 2, 3, 4, 5], {})
            assert [requests.versions(n) for n in (1, 2, 5)] == [{"v1"}, {"v2"}, {"v2"}]
            # Stricter ones take nothing away from who has workers already.
            requests.dispatcher.put_in_force(prepare(limited(1)), version("v3"))
            assert [m.ranks.inflight for m in of.members()] == [3, 3]
            requests.held[0].release()
            requests.held[1].release()
            await anyio.sleep(1)
            assert requests.dispatcher.n_waiting == 2
            requests.dispatcher.put_in_force(prepare(limited(None)), version("v4"))
            await anyio.sleep(1)
            assert (requests.order, requests.versions(7)) == ([*range(8)], {"v4"})

    run(main)


def test_nobody_is_decided_by_half_a_configuration() -> None:
    """Every change of a member wakes who waits; while pools change hands nobody may look at them."""

    async def main() -> None:
        of = fleet("disagg", pools={"prefill": {"max_inflight": 1}})
        async with waiting(of, 4) as requests:
            assert requests.dispatcher.n_waiting == 2
            # More room on a pool that stays, which comes before a pool that does not.
            requests.dispatcher.put_in_force(prepare(limited(2, "disagg")), version("v2"))
            await anyio.sleep(1)
            assert requests.failed == {}
            assert [requests.versions(n) for n in range(4)] == [{"v1"}, {"v1"}, {"v2"}, {"v2"}]

    run(main)


def test_ops_04_who_waits_goes_where_the_new_configuration_has_workers() -> None:
    async def main() -> None:
        of = fleet("agg", pools={"agg": {"max_inflight": 1}})
        async with waiting(of, 4) as requests:
            moved = config("agg", {"agg": {"workers": ["a2:1", "a3:1"], "max_inflight": 1}})
            requests.dispatcher.put_in_force(prepare(moved), version("v2"))
            await anyio.sleep(1)
            # Nobody knows yet what a3 can do, so it is worth waiting for.
            assert (requests.dispatcher.n_waiting, requests.failed) == (2, {})
            make_ready(of)
            await anyio.sleep(1)
            assert requests.workers(2) == ["a3:1"]
            on_a1 = next(n for n in (0, 1) if requests.workers(n) == ["a1:1"])
            requests.held[on_a1].release()
            await anyio.sleep(1)
            assert 3 not in requests.held, "a1 takes nothing any more"
            requests.held[1 - on_a1].release()
            await anyio.sleep(1)
            assert requests.workers(3) == ["a2:1"]
            assert {m.address for m in of.all_members()} == {"a2:1", "a3:1"}

    run(main)


@pytest.mark.parametrize("was", ["disagg", "agg"])
def test_another_mode_takes_over_who_waits_and_leaves_alone_who_runs(was: str) -> None:
    other = {"disagg": "agg", "agg": "disagg"}[was]

    async def main() -> None:
        of = fleet(was, pools={stage: {"max_inflight": 1} for stage in STAGE_NAMES[was]})
        async with waiting(of, 4) as requests:
            dispatcher = requests.dispatcher
            dispatcher.put_in_force(prepare(limited(1, other)), version("v2"))
            make_ready(of)
            await anyio.sleep(1)
            for n, mode in enumerate([was, was, other, other]):
                stages = tuple(stage.value for stage in requests.held[n].leases)
                assert stages == STAGE_NAMES[mode], n
            # Who runs and loses a worker has no stage to go back to.
            gone = (Stage(STAGE_NAMES[was][0]),)
            await requests.submit(9, stages=gone, since_s=0.0)
            assert isinstance(requests.failed.pop(9), NoWorker)
            dispatcher.put_in_force(prepare(limited(2, was)), version("v3"))
            await requests.submit(10)
            await requests.submit(11)
            assert (requests.failed, requests.versions(10)) == ({}, {"v3"})
            assert [m.ranks.inflight for m in of.members()] == [2] * len(list(of.members()))
            requests.release_all()
            assert set(of.all_members()) == set(of.members())

    run(main)


def test_who_waits_for_a_stage_that_goes_is_refused_and_the_others_are_not() -> None:
    async def main() -> None:
        of = fleet("disagg", pools={"decode": {"max_inflight": 1}})
        async with waiting(of, 2) as requests, anyio.create_task_group() as tasks:
            decode = partial(requests.submit, 7, stages=(Stage.DECODE,), since_s=0.0)
            tasks.start_soon(decode)
            tasks.start_soon(requests.submit, 8)
            await anyio.sleep(1)
            assert requests.dispatcher.n_waiting == 2
            requests.dispatcher.put_in_force(prepare(config("agg")), version("v2"))
            make_ready(of)
            await anyio.sleep(1)
            assert "no decode pools any more" in str(requests.failed[7])
            assert tuple(requests.held[8].leases) == (Stage.AGG,)

    run(main)


def two_pools(workers: dict[str, list[str]], most: int) -> FleetConfig:
    """TTFT targets of 500 ms and more go to bulk, the others to fast."""
    pools = {name: {"workers": some, "max_inflight": most} for name, some in workers.items()}
    strategy = {
        "ttft_min_ms": 100,
        "ttft_max_ms": 900,
        "ttft_resolution": 2,
        "itl_min_ms": 5,
        "itl_max_ms": 45,
        "itl_resolution": 1,
        "agg_pool_mapping": [["fast"], ["bulk"]],
    }
    content = {
        "mode": "agg",
        "num_agg_pools": 2,
        "agg_pools": ["fast", "bulk"],
        "agg_pool_selection_strategy": strategy,
        "pools": pools,
    }
    return parse_config(content, source="two", serving=True)


def test_the_oldest_is_first_where_lanes_become_one() -> None:
    """Requests that waited for two pools wait for one, and age alone says who is first."""

    async def main() -> None:
        of = Fleet(prepare(two_pools({"fast": ["f:1"], "bulk": ["b:1"]}, 1)))
        make_ready(of)
        dispatcher = Dispatcher(of, rng=rng(), config=version("v1"), now_s=anyio.current_time)
        requests = Requests(dispatcher)
        async with anyio.create_task_group() as tasks:
            for n, ttft_ms in enumerate([100, 900, 900, 100, 900, 100]):
                asked = ask(sla=Sla(ttft_ms=ttft_ms))
                tasks.start_soon(partial(requests.submit, n, asked=asked))
                await anyio.sleep(1)
            assert (requests.order, dispatcher.n_waiting) == ([0, 1], 4)
            dispatcher.put_in_force(
                prepare(config("agg", {"agg": {"max_inflight": 1}})), version("v2")
            )
            make_ready(of)
            await anyio.sleep(1)
            assert requests.order == [0, 1, 2, 3]
            for done, then in ((2, 4), (3, 5)):
                requests.held[done].release()
                await anyio.sleep(1)
                assert requests.order[-1] == then
            requests.release_all()
            assert {m.address for m in of.all_members()} == {"a1:1", "a2:1"}

    run(main)


OTHER = "other"


def two_models() -> Fleet:
    """One worker of each model; the one of `OTHER` has just been replaced by one that nobody knows yet."""
    of = fleet("agg")
    of.pools["agg"].members["a2:1"].set_models({OTHER: model_info(OTHER)})
    of.models()
    of.apply(prepare(config("agg", {"agg": {"workers": ["a1:1", "a3:1"], "max_inflight": 1}})))
    return of


def test_who_waits_only_for_a_worker_that_joins_keeps_its_pool_from_nobody() -> None:
    async def main() -> None:
        of = two_models()
        async with waiting(of, 1, asked=ask(model=OTHER)) as requests:
            assert (requests.held, requests.failed, requests.dispatcher.n_waiting) == ({}, {}, 1)
            await requests.submit(1)
            assert requests.workers(1) == ["a1:1"]
            # And so for those of the other lane that waited before it is clear that the worker is down.
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(requests.submit, 2)
                await anyio.sleep(1)
                assert requests.dispatcher.n_waiting == 2
                requests.held.pop(1).release()
                await anyio.sleep(1)
                assert requests.workers(2) == ["a1:1"]
            new = of.pools["agg"].members["a3:1"]
            new.set_models({OTHER: model_info(OTHER)})
            new.probe_ok()
            await anyio.sleep(1)
            assert requests.workers(0) == ["a3:1"]

    run(main)


def test_who_waits_for_a_worker_that_joins_and_for_a_full_one_keeps_its_place() -> None:
    """A younger request of another lane does not take what both wait for."""

    async def main() -> None:
        of = fleet("disagg")
        for member in of.members():
            member.set_models({name: model_info(name) for name in (MODEL, OTHER)})
        capacity = oe.DeploymentCapacity(total_kv_blocks=100, kv_block_size=32)
        of.pools["decode"].members["d1:1"].set_server_info(oe.ServerInfo(capacity=capacity))
        of.apply(prepare(config("disagg", {"decode": {"workers": ["d1:1", "d3:1"]}})))
        first = ask(isl_tokens=2000)
        async with waiting(of, 1, asked=first) as requests, anyio.create_task_group() as tasks:
            # The first of them needs more KV cache than is left, the second would fit.
            for number, model, isl_tokens in ((1, OTHER, 3000), (2, MODEL, 150)):
                asked = ask(model=model, isl_tokens=isl_tokens)
                tasks.start_soon(partial(requests.submit, number, asked=asked))
                await anyio.sleep(1)
            assert (requests.order, requests.dispatcher.n_waiting) == ([0], 2)
            for number in (0, 1):
                requests.held.pop(number).release()
                await anyio.sleep(1)
            assert requests.order == [0, 1, 2]

    run(main)


def test_a_model_that_nobody_knows_may_be_that_of_a_worker_that_joins() -> None:
    async def main() -> None:
        of = fleet("agg")
        of.apply(prepare(config("agg", {"agg": {"workers": ["a1:1", "new:1"]}})))
        async with waiting(of, 1, asked=ask(model="tiny")) as requests:
            refused = requests.failed[0]
            assert isinstance(refused, NoWorker)
            assert refused.code is grpc.StatusCode.UNAVAILABLE
            of.pools["agg"].members["new:1"].probe_failed("connection refused")
            await requests.submit(1, asked=ask(model="tiny"))
            assert isinstance(requests.failed[1], UnknownModel)
            make_ready(of)
            of.pools["agg"].members["new:1"].set_models({"tiny": model_info("tiny")})
            of.pools["agg"].members["new:1"].probe_ok()
            await requests.submit(2, asked=ask(model="tiny"))
            assert requests.workers(2) == ["new:1"]

    run(main)


WORKERS = [f"a{n}:1" for n in range(1, 5)]


def test_ops_04_a_thousand_reloads_between_arrival_and_assignment_cost_no_request() -> None:
    """Workers come and go while requests are read, wait and run."""

    async def main() -> None:
        luck = random.Random(4)
        of = fleet("agg", pools={"agg": {"workers": WORKERS, "max_inflight": 2}})
        dispatcher = Dispatcher(of, rng=rng(), config=version("v0"), now_s=anyio.current_time)
        requests = Requests(dispatcher)
        members: set[Member] = set()
        n_waiting: list[int] = []

        async def one(number: int) -> None:
            await anyio.sleep(luck.uniform(0, 100))
            await anyio.sleep(0.05)  # its prompt is being tokenised
            await requests.submit(number)
            await anyio.sleep(luck.choice([0.0, 0.1, 1.0]))
            requests.held[number].release()

        async with anyio.create_task_group() as tasks:
            for number in range(1000):
                tasks.start_soon(one, number)
            for number in range(1000):
                await anyio.sleep(0.1)
                workers = luck.sample(WORKERS, luck.randint(1, 4))
                found = config("agg", {"agg": {"workers": workers, "max_inflight": 2}})
                dispatcher.put_in_force(prepare(found), version(f"v{number}"))
                make_ready(of)
                n_waiting.append(dispatcher.n_waiting)
                for member in of.all_members():
                    members.add(member)
                    assert member.state in (State.READY, State.DRAINING), member
                    assert member.ranks.inflight or member.state is State.READY, member
        assert (requests.failed, len(requests.held)) == ({}, 1000)
        assert dispatcher.n_waiting == 0
        assert max(n_waiting) > 0
        assert not any(member.ranks.inflight for member in members)
        assert [m.address for m in of.all_members()] == [m.address for m in of.members()]
        # No more rows than workers at once: those that left gave theirs back.
        assert len(of.pools["agg"].snapshot().rows) <= 2 * len(WORKERS)

    run(main)
