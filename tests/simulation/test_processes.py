"""Two gateways over the same simulated engines, in virtual time, as two processes of one gateway are."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import anyio
import pytest

from slagate.pools.fleet_file.load import parse_config
from slagate.router.app import build
from slagate.router.replay.invariants import check_idle
from slagate.router.replay.network import FarWorker
from slagate.router.request.settings import Settings
from slagate.workers.runtime import virtual_loop
from slagate.workers.trtllm.worker import TrtllmWorker
from slagate.workers.worker import Worker
from support.engine.workers import sim
from support.gateway.shared import Opened, peers_of
from support.gateway.simulation import (
    Fleet,
    Plan,
    Seen,
    check_tokens,
    fleet_file,
    simulate,
)
from support.seeds import n_seeds_of

MAX_INFLIGHT = 3


class Gateway:
    """Processes of one gateway, in one loop."""

    def __init__(self, fleets: list[Fleet], opened: Opened) -> None:
        self.fleets = fleets
        self.opened = opened

    def inflight(self) -> dict[str, int]:
        """Leases on each worker, of all processes."""
        found: dict[str, int] = {}
        for fleet in self.fleets:
            for member in fleet.app.fleet.members():
                found[member.address] = found.get(member.address, 0) + member.ranks.inflight
        return found

    def inflight_seen(self, number: int) -> dict[str, int]:
        """The same as a decision of one process sees it."""
        rows = self.fleets[number].app.fleet.pools["agg-pool"].snapshot().rows
        return {rows.names[at][0]: rows.view(at).inflight for at in range(len(rows))}


@asynccontextmanager
async def gateway(
    folder: Path,
    *,
    n_processes: int = 2,
    n_workers: int = 2,
    max_inflight: int | None = MAX_INFLIGHT,
    seed: int = 0,
    wakes: bool = True,
    settings: Settings | None = None,
) -> AsyncIterator[Gateway]:
    """Processes over aggregated workers; without `wakes` nobody tells another one anything."""
    opened = Opened(folder, n_processes)
    async with AsyncExitStack() as stack:
        stack.callback(opened.close)
        workers: dict[str, TrtllmWorker] = {}
        for number in range(n_workers):
            worker = await stack.enter_async_context(sim("agg", served=False))
            assert isinstance(worker, TrtllmWorker)
            workers[f"agg:{number + 1}"] = worker

        @asynccontextmanager
        async def connect(address: str) -> AsyncIterator[Worker]:
            yield FarWorker(workers[address], latency_s=0.004)

        file = fleet_file({"agg": {"agg-pool": list(workers)}})
        if max_inflight is not None:
            file["pools"]["agg-pool"]["max_inflight"] = max_inflight  # type: ignore[index]
        looks: list[Callable[[], None]] = []

        def wake(number: int) -> None:
            if wakes:
                asyncio.get_running_loop().call_later(0.0001, looks[number])

        fleets = []
        for number in range(n_processes):
            peers = peers_of(opened(number), wake=wake, now_s=anyio.current_time)
            looks.append(lambda peers=peers: peers.on_change())  # type: ignore[misc]
            stack.callback(peers.stop_beat)
            app = await stack.enter_async_context(
                build(
                    parse_config(file, source="simulation", serving=True),
                    settings or Settings(),
                    connect=connect,
                    now_s=anyio.current_time,
                    unix_s=anyio.current_time,
                    rng=random.Random(seed + number),
                    peers=peers,
                )
            )
            fleets.append(Fleet(app, workers))
        await anyio.sleep(1)
        yield Gateway(fleets, opened)


def plans(rng: random.Random, count: int, *, within_s: float = 2.0) -> list[Plan]:
    made = []
    for _ in range(count):
        first = rng.randrange(50_000)
        made.append(
            Plan(
                at_s=rng.uniform(0, within_s),
                prompt=list(range(first, first + rng.choice([1, 200, 3000]))),
                n_tokens=rng.choice([1, 2, 30, 60]),
                cancel_after_s=rng.choice([None, None, None, rng.uniform(0, 2)]),
            )
        )
    return made


async def play(of: Gateway, each: Sequence[Sequence[Plan]]) -> list[list[Seen]]:
    """Each process's plans, with the limits looked at all the time."""
    seen: list[list[Seen]] = [[] for _ in each]
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, *of.inflight().values())
            await anyio.sleep(0.001)

    async def one(number: int) -> None:
        seen[number] = await simulate(of.fleets[number], each[number])

    async with anyio.create_task_group() as watching:
        watching.start_soon(watch)
        async with anyio.create_task_group() as tasks:
            for number in range(len(each)):
                tasks.start_soon(one, number)
        watching.cancel_scope.cancel()
    assert most == MAX_INFLIGHT, "never full, or beyond the limit"
    return seen


@pytest.mark.parametrize("seed", range(n_seeds_of(1)))
def test_no_worker_gets_more_than_its_limit_from_all_of_them(seed: int, tmp_path: Path) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with gateway(tmp_path, seed=seed) as of:
            seen = await play(of, [plans(rng, 60), plans(rng, 60)])
            for number, fleet in enumerate(of.fleets):
                check_tokens(seen[number])
                assert {one.code for one in seen[number]} <= {"OK", "CANCELLED"}
                await check_idle(fleet.app, fleet.workers, n_requests=60)
                assert set(of.inflight_seen(number).values()) == {0}

    virtual_loop.run(main)


def test_who_waits_is_served_when_a_wake_up_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        rng = random.Random(1)
        async with gateway(tmp_path, wakes=False) as of:
            seen = await play(of, [plans(rng, 40), plans(rng, 40)])
            assert {one.code for one in chain(seen)} <= {"OK", "CANCELLED"}

    virtual_loop.run(main)


def chain(seen: Sequence[Sequence[Seen]]) -> list[Seen]:
    return [one for each in seen for one in each]


def test_requests_are_served_in_order_of_arrival_whichever_process_has_them(tmp_path: Path) -> None:
    """One process has many that wait, the other a few in between: those wait no longer than their turn."""

    async def main() -> None:
        order: list[float] = []
        async with gateway(tmp_path, n_workers=1, max_inflight=1) as of:

            async def client(number: int, at_s: float) -> None:
                plan = Plan(at_s, list(range(int(at_s * 1000) * 40, int(at_s * 1000) * 40 + 33)), 8)
                (seen,) = await simulate(of.fleets[number], [plan])
                assert seen.code == "OK"
                order.append(at_s)

            async with anyio.create_task_group() as tasks:
                for at in range(30):
                    tasks.start_soon(client, int(at % 5 == 4), at * 0.002)
        assert order == sorted(order)

    virtual_loop.run(main)


def test_what_one_process_gives_back_another_takes_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway(tmp_path, n_workers=1, max_inflight=1) as of:
            ended_s: list[float] = []

            async def client(number: int, at_s: float, n_tokens: int) -> None:
                plan = Plan(at_s, list(range(number * 1000, number * 1000 + 33)), n_tokens)
                (seen,) = await simulate(of.fleets[number], [plan])
                assert seen.code == "OK"
                ended_s.append(anyio.current_time())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client, 0, 0.0, 100)
                tasks.start_soon(client, 1, 0.1, 1)
        assert ended_s[1] - ended_s[0] < 0.1, "a beat is 0.25 s"

    virtual_loop.run(main)


def test_max_waiting_is_for_all_processes_together(tmp_path: Path) -> None:
    async def main() -> None:
        settings = Settings(max_waiting=2)
        async with gateway(tmp_path, n_workers=1, max_inflight=1, settings=settings) as of:
            codes: list[str] = []

            async def client(number: int, at_s: float) -> None:
                plan = Plan(
                    at_s, list(range(int(at_s * 1000) * 40, int(at_s * 1000) * 40 + 33)), 80
                )
                (seen,) = await simulate(of.fleets[number], [plan])
                codes.append(seen.code)

            async with anyio.create_task_group() as tasks:
                # One runs, one waits in each process, and the last one is one too many.
                for at in range(4):
                    tasks.start_soon(client, at % 2, at * 0.002)
        assert sorted(codes) == ["OK", "OK", "OK", "RESOURCE_EXHAUSTED"]

    virtual_loop.run(main)


def test_processes_see_how_many_wait_elsewhere_and_how_many_behind_all_others(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        with closing(Opened(tmp_path, 3)) as opened:
            first, second, third = (peers_of(opened(number)) for number in range(3))
            first.show_waiting(5, 3, {})
            second.show_waiting(1, 0, {})
            seen = [(each.n_waiting, each.n_relegated) for each in (first, second, third)]
            assert seen == [(1, 0), (5, 3), (6, 3)]
            first.show_waiting(0, 0, {})
            assert (third.n_waiting, third.n_relegated) == (1, 0)
            for each in (first, second, third):
                each.stop_beat()

    virtual_loop.run(main)


def test_who_waits_goes_on_when_the_process_that_holds_the_workers_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway(tmp_path, n_workers=1, max_inflight=1) as of:
            long = Plan(0.0, list(range(100)), 3000)
            short = Plan(0.5, list(range(200, 300)), 3)
            done = anyio.Event()

            async def waits() -> None:
                (seen,) = await simulate(of.fleets[1], [short])
                assert seen.code == "OK"
                done.set()

            async with anyio.create_task_group() as tasks:
                dead = anyio.CancelScope()

                async def holds() -> None:
                    with dead:
                        await simulate(of.fleets[0], [long])

                tasks.start_soon(holds)
                tasks.start_soon(waits)
                await anyio.sleep(1.0)
                assert of.inflight_seen(1) == {"agg:1": 1}
                assert of.fleets[1].app.gateway.dispatcher.n_waiting == 1
                # As the parent does, for a process that has no time to give anything back.
                of.opened(None).clear(0)
                with anyio.fail_after(1.0):
                    await done.wait()
                dead.cancel()

    virtual_loop.run(main)


def test_idle_processes_do_not_choose_the_same_worker(tmp_path: Path) -> None:
    """PD-sized bursts from idle, half to each process: no worker gets more than 60 of 100."""

    async def main() -> None:
        for seed in range(n_seeds_of(1)):
            folder = tmp_path / str(seed)
            folder.mkdir()
            async with gateway(folder, max_inflight=None, seed=seed) as of:
                rng = random.Random(seed)
                most: dict[str, int] = {}

                async def play_one(number: int, of: Gateway = of, rng: random.Random = rng) -> None:
                    todo = [
                        Plan(0.0, [rng.randrange(50_000) for _ in range(200)], 60)
                        for _ in range(100)
                    ]
                    await simulate(of.fleets[number], todo)

                async with anyio.create_task_group() as tasks:
                    for number in range(2):
                        tasks.start_soon(play_one, number)
                    await anyio.sleep(0.02)
                    most = of.inflight()
                assert sum(most.values()) == 200
                assert max(most.values()) <= 120

    virtual_loop.run(main)
