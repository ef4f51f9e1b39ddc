"""Watch loops start and stop the followers, and tell them who answers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet.watch import watch_fleet
from slagate.pools.kv_events.view import EventMode, EventView
from slagate.pools.prefix.index import PrefixIndex
from slagate.proto import openengine_pb2 as oe
from slagate.workers.runtime.virtual_loop import run
from support.builders import config, rng
from support.fleet.watched import LOOK_S, healthy
from support.kv.followed import BLOCK_TOKENS, CLEARED, batch, stored, unix_s
from support.worker.fake import HANG, ROLES, FakeWorker, connector


def with_events() -> FakeWorker:
    worker = FakeWorker(kv_scripts=[(batch(0, CLEARED, stored(1)), HANG)])
    worker.info.capacity.kv_block_size = BLOCK_TOKENS
    return worker


class Watched:
    """p1 and p2 have events, d1 and d2 would have them."""

    def __init__(self, *, prefix: bool = True) -> None:
        self.fleet = Fleet(prepare(config("disagg")), prefix=prefix)
        self.workers = healthy() | {"p1:1": with_events(), "p2:1": with_events()}

    @property
    def index(self) -> PrefixIndex:
        overlaps = self.fleet.pools["prefill"].overlaps
        assert overlaps is not None
        return overlaps.index_of(BLOCK_TOKENS)

    def view(self, address: str) -> EventView:
        view = self.fleet.pools["prefill"].members[address].events
        assert view is not None
        return view

    def asked(self) -> dict[str, int]:
        return {address: len(worker.kv_calls) for address, worker in self.workers.items()}


@asynccontextmanager
async def watched(*, prefix: bool = True) -> AsyncIterator[Watched]:
    of = Watched(prefix=prefix)
    async with watch_fleet(
        of.fleet,
        connect=connector(of.workers),
        now_s=anyio.current_time,
        unix_s=unix_s,
        rng=rng(),
    ):
        await anyio.sleep(2 * LOOK_S)
        yield of


def test_kv_15_only_workers_whose_events_are_wanted_are_subscribed_to() -> None:
    async def main() -> None:
        async with watched() as of:
            assert {of.view(address).mode for address in ("p1:1", "p2:1")} == {EventMode.LIVE}
            assert of.index.n_pairs == 2
            assert of.asked() == {"p1:1": 1, "p2:1": 1, "d1:1": 0, "d2:1": 0}
        await anyio.sleep(1)
        assert of.index.n_pairs == 0
        assert of.workers["p1:1"].kv_calls[0].cancelled

    run(main)


def test_kv_15_where_only_load_counts_nobody_is_subscribed_to() -> None:
    async def main() -> None:
        async with watched(prefix=False) as of:
            await anyio.sleep(10 * LOOK_S)
            assert set(of.asked().values()) == {0}
            assert of.view("p1:1").mode is EventMode.OFF

    run(main)


def restarted(worker: FakeWorker) -> oe.ServerInfo:
    """Another incarnation answers from now on."""
    info = oe.ServerInfo()
    info.CopyFrom(worker.info)
    info.instance_id += "'"
    worker.info = info
    return info


def test_a_restart_shows_in_the_load_report_and_starts_over() -> None:
    async def main() -> None:
        async with watched() as of:
            restarted(of.workers["p1:1"])
            await anyio.sleep(LOOK_S)
            assert of.asked()["p1:1"] == 2
            assert of.index.n_pairs == 2
            assert of.view("p1:1").mode is EventMode.LIVE

    run(main)


def test_a_worker_of_another_role_is_left_at_once_and_taken_up_when_it_fits_again() -> None:
    async def main() -> None:
        async with watched() as of:
            restarted(of.workers["p1:1"]).engine_role = ROLES["decode"]
            await anyio.sleep(LOOK_S)
            assert of.view("p1:1").mode is EventMode.NONE
            assert of.index.n_pairs == 1
            restarted(of.workers["p1:1"]).engine_role = ROLES["prefill"]
            await anyio.sleep(2 * LOOK_S)
            assert of.view("p1:1").mode is EventMode.LIVE
            assert of.index.n_pairs == 2

    run(main)
