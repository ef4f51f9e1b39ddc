"""What a gateway's processes share: one writer for each cell, sums for all, nothing left of the dead."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet.pool import Lease
from slagate.pools.fleet.watch import _foreign
from slagate.pools.fleet_file.load import FleetConfig
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight import shared_counts
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.row_view import RowView, State
from slagate.pools.inflight.shared_counts import (
    N_SLOTS,
    NO_SLOT,
    GatewayCell,
    PoolCell,
    RankCell,
    SharedCounts,
    create,
)
from slagate.pools.inflight.shared_table import SharedTable
from slagate.proto import openengine_pb2 as oe
from support.builders import MODEL, config, fleet, model_info
from support.gateway.shared import Opened, all_ready, shared_fleet
from support.seeds import each_seed

AGG = config("agg")

Several = Callable[[int], Opened]


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Several]:
    """Makes files of counts for so many processes."""
    with ExitStack() as stack:

        def make(n_processes: int) -> Opened:
            opened = Opened(Path(mkdtemp(dir=tmp_path)), n_processes)
            stack.callback(opened.close)
            return opened

        yield make


def rows_of_pool(of: Fleet, pool: str = "agg") -> dict[str, RowView]:
    """By address, those of workers that have not left."""
    rows = of.pools[pool].snapshot().rows
    views = [rows.view(at) for at in range(len(rows))]
    return {each.address: each for each in views if each.state is not State.LEFT}


def test_the_file_has_a_line_of_one_cache_line_for_each_process_and_slot(tmp_path: Path) -> None:
    create(tmp_path / "counts", 3)
    size = (tmp_path / "counts").stat().st_size
    assert size == -(-(64 + N_SLOTS * (16 + 3 * (1 + 64))) // 4096) * 4096
    counts = SharedCounts(tmp_path / "counts", 2, n_processes=3)
    slot = counts.claim_slot("one")
    for cell in range(8):
        counts.set(slot, cell, 10 + cell)
    data = (tmp_path / "counts").read_bytes()
    at = 64 + N_SLOTS * (16 + 3) + (2 * N_SLOTS + slot) * 64
    assert np.frombuffer(data, np.int64, 8, at).tolist() == list(range(10, 18))
    with pytest.raises(FileExistsError):
        create(tmp_path / "counts", 3)
    assert repr(counts) == "SharedCounts(row 2, 1 slots)"
    counts.close()


def test_a_name_has_the_same_slot_in_every_process(several: Several) -> None:
    opened = several(3)
    a, b, parent = opened(0), opened(1), opened(None)
    first = a.claim_slot("x")
    assert [b.claim_slot("y"), b.claim_slot("x"), a.claim_slot("y"), a.claim_slot("x")] == [
        1,
        first,
        1,
        first,
    ]
    a.set(first, PoolCell.REQUESTS, 3)
    b.set(first, PoolCell.REQUESTS, 4)
    a.set_s(first, PoolCell.OLDEST_S, 0.5)
    assert (parent.total("x", PoolCell.REQUESTS), parent.total("z", PoolCell.REQUESTS)) == (7, 0)
    assert (parent.each("x", PoolCell.REQUESTS), parent.each("z", PoolCell.REQUESTS)) == (
        [3, 4, 0],
        [],
    )
    assert a.each_other(first, PoolCell.REQUESTS) == [(1, 4), (2, 0)]
    assert b.each_other_s(first, PoolCell.OLDEST_S) == [(0, 0.5), (2, 0.0)]


def test_a_slot_is_somebody_elses_once_the_last_process_gave_it_up(several: Several) -> None:
    opened = several(2)
    a, b = opened(0), opened(1)
    slot = a.claim_slot("old")
    assert b.claim_slot("old") == slot
    a.set(slot, RankCell.LAST_CHOSEN, 5)
    b.set(slot, RankCell.LAST_CHOSEN, 6)
    a.release_slot(slot)
    assert a.each_other(slot, RankCell.LAST_CHOSEN) == [(1, 6)]
    assert a.claim_slot("new") != slot
    b.release_slot(slot)
    assert b.claim_slot("newer") == slot
    assert [a.get(slot, RankCell.LAST_CHOSEN), b.get(slot, RankCell.LAST_CHOSEN)] == [0, 0]


def test_what_a_dead_process_held_is_taken_when_nothing_else_is_left(
    several: Several, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_counts, "N_SLOTS", 4)
    monkeypatch.setattr(shared_counts, "NO_SLOT", 3)
    opened = several(2)
    a, b = opened(0), opened(1)
    assert [a.claim_slot("a"), a.claim_slot("b"), b.claim_slot("c"), b.claim_slot("d")] == [
        0,
        1,
        2,
        3,
    ]
    assert [record.message for record in caplog.records] == ["counts.full"]
    a.set(1, RankCell.LAST_CHOSEN, 5)
    a.clear(0)
    assert [b.claim_slot("d"), b.claim_slot("e"), b.claim_slot("f")] == [0, 1, 3]
    assert b.each_other(1, RankCell.LAST_CHOSEN) == [(0, 0)]


def test_who_found_no_slot_writes_nowhere_and_adds_nothing(several: Several) -> None:
    opened = several(2)
    a, b = opened(0), opened(1)
    a.set(NO_SLOT, RankCell.INFLIGHT, 9)
    a.set_s(NO_SLOT, RankCell.QUEUED_S, 9.0)
    a.release_slot(NO_SLOT)
    others = b.sum_of_others(b.lines_of_others(np.array([NO_SLOT])))
    assert (others.counts[RankCell.INFLIGHT, 0], others.queued_s[0]) == (0, 0.0)


def test_a_crash_takes_along_what_was_in_flight_and_nothing_that_was_counted(
    several: Several,
) -> None:
    opened = several(2)
    a, b, parent = opened(0), opened(1), opened(None)
    worker, gateway = a.claim_slot("w"), a.claim_slot("gateway")
    b.claim_slot("w")
    for of in (a, b):
        for cell in range(8):
            of.set(worker, cell, 7)
    a.set(gateway, GatewayCell.RUNNING, 2)
    a.set(gateway, GatewayCell.RECEIPTS, 11)
    parent.clear(0)
    assert [a.get(worker, cell) for cell in range(8)] == [0, 0, 0, 0, 0, 7, 7, 7]
    assert [b.get(worker, cell) for cell in range(8)] == [7] * 8
    after = opened(0)
    assert after.get(after.claim_slot("gateway"), GatewayCell.RUNNING) == 0
    assert after.get(after.claim_slot("gateway"), GatewayCell.RECEIPTS) == 11


def test_decisions_see_what_the_other_processes_have_on_a_worker(several: Several) -> None:
    opened = several(3)
    fleets = [shared_fleet(opened(number), AGG) for number in range(3)]
    a, b, c = (of.pools["agg"] for of in fleets)
    held = [b.lease(0, Work(100, 0.5, 1000)), c.lease(0, Work(20, 0.25, 300))]
    a.lease(0, Work(3, 0.125, 40))
    seen = rows_of_pool(fleets[0])["a1:1"]
    assert (seen.inflight, seen.worker_inflight, seen.queued_tokens) == (3, 3, 123)
    assert (seen.queued_s, seen.context_tokens, seen.last_chosen) == (0.875, 1340, 3)
    assert a.snapshot().n_leases == 3
    assert rows_of_pool(fleets[0])["a2:1"].inflight == 0
    held[0].prefill_done()
    held[1].release()
    seen = rows_of_pool(fleets[0])["a1:1"]
    assert (seen.inflight, seen.queued_tokens, seen.queued_s) == (2, 3, 0.125)
    assert (seen.context_tokens, a.members["a1:1"].ranks.inflight) == (1040, 1)
    assert a.members["a1:1"].ranks.gateway_load == (2, 3)


def test_each_rank_has_a_line(several: Several) -> None:
    opened = several(2)
    a, b = (SharedTable("agg p", opened(number)) for number in range(2))
    for of in (a, b):
        assert [of.add_row("w:1", None), of.add_row("w:1", 1), of.add_row("v:1", None)] == [0, 1, 2]
    a.set(1, inflight=2, worker_inflight=2)
    a.set(0, worker_inflight=2)
    rows = b.rows()
    assert rows.ints("inflight").tolist() == [0, 2, 0]
    assert rows.ints("worker_inflight").tolist() == [2, 2, 0]


def test_turns_go_on_over_all_processes_and_over_a_crash(several: Several) -> None:
    opened = several(2)
    a, b = (shared_fleet(opened(number), AGG).pools["agg"] for number in range(2))
    for of, row in ((a, 0), (b, 1), (b, 0), (a, 1)):
        of.lease(row, Work()).release()
    assert a.snapshot().rows.ints("last_chosen").tolist() == [3, 4]
    opened(None).clear(0)
    again = shared_fleet(opened(0), AGG).pools["agg"]
    assert again.snapshot().rows.ints("last_chosen").tolist() == [3, 4]
    again.lease(0, Work()).release()
    assert b.snapshot().rows.ints("last_chosen").tolist() == [5, 4]
    assert (again.table.totals[PoolCell.REQUESTS], b.table.totals[PoolCell.REQUESTS]) == (3, 2)


def test_counts_of_a_pool_survive_a_crash_and_not_the_pool(several: Several) -> None:
    opened = several(2)
    two = config("disagg")
    a = shared_fleet(opened(0), two)
    for _ in range(2):
        a.pools["prefill"].count_spill()
    for _ in range(3):
        a.pools["decode"].count_retry()
    opened(None).clear(0)
    again = shared_fleet(opened(0), two)
    assert (
        again.pools["prefill"].table.totals[PoolCell.SPILLS],
        again.pools["decode"].table.totals[PoolCell.RETRIES],
    ) == (2, 3)
    again.apply(prepare(AGG))
    again.apply(prepare(AGG))
    again.apply(prepare(two))
    assert (
        again.pools["prefill"].table.totals[PoolCell.SPILLS],
        again.pools["decode"].table.totals[PoolCell.RETRIES],
    ) == (0, 0)


def test_requests_of_sibling_processes_are_nobody_elses(several: Several) -> None:
    """A worker that reports 5 requests has 2 of strangers where this process has 1 and its sibling 2."""
    opened = several(2)
    a, b = (shared_fleet(opened(number), AGG).pools["agg"] for number in range(2))
    a.lease(0, Work(10))
    held = [b.lease(0, Work(10)), b.lease(0, Work(10))]
    load = oe.LoadInfo(running_requests=5, waiting_tokens=36)
    member = a.members["a1:1"]
    assert _foreign(member, load, most_ours=1) == (2, 6)
    held[0].release()
    assert _foreign(member, load, most_ours=3) == (2, 16)


def test_whatever_is_reloaded_wherever_the_sums_are_those_of_the_leases(several: Several) -> None:
    """Processes reload one after the other, crash and come back, and at the end nothing is left."""
    each_seed(6, lambda seed: history(random.Random(seed), several(3)))


def history(rng: random.Random, opened: Opened) -> None:
    addresses = [f"w{n}:1" for n in range(6)]

    def some_config() -> FleetConfig:
        return config("agg", {"agg": {"workers": rng.sample(addresses, rng.randrange(1, 6))}})

    fleets = [shared_fleet(opened(number), some_config()) for number in range(3)]
    leases: list[list[Lease]] = [[], [], []]
    for _ in range(200):
        number = rng.randrange(3)
        of, held = fleets[number], leases[number]
        does = rng.choice(["lease", "lease", "lease", "release", "prefilled", "reload", "crash"])
        if does == "lease":
            rows = of.pools["agg"].snapshot().rows
            ready = [at for at in range(len(rows)) if rows.view(at).state is State.READY]
            work = Work(rng.randrange(1, 100), rng.random(), rng.randrange(1000))
            held.append(of.pools["agg"].lease(rng.choice(ready), work))
        elif does == "release" and held:
            held.pop(rng.randrange(len(held))).release()
        elif does == "prefilled" and held:
            rng.choice(held).prefill_done()
        elif does == "reload":
            of.apply(prepare(some_config()))
            all_ready(of)
        elif does == "crash" and rng.random() < 0.3:
            opened(None).clear(number)
            fleets[number], leases[number] = shared_fleet(opened(number), some_config()), []
        for each in fleets:
            for address, view in rows_of_pool(each).items():
                on_it = [x for x in chain(*leases) if x.member.address == address]
                assert view.inflight == view.worker_inflight == len(on_it)
                assert view.context_tokens == sum(x.work.context_tokens for x in on_it)
                waiting = [x.work for x in on_it if x._prefill_open]
                assert view.queued_tokens == sum(work.prefill_tokens for work in waiting)
                assert view.queued_s == pytest.approx(sum(work.work_s for work in waiting))
    for each in chain(*leases):
        each.release()
    for of in fleets:
        assert {(v.inflight, v.queued_tokens) for v in rows_of_pool(of).values()} == {(0, 0)}


def test_alone_nothing_is_shared() -> None:
    of = fleet("agg")
    of.pools["agg"].lease(0, Work(1))
    member = of.pools["agg"].members["a1:1"]
    assert (member.ranks.gateway_load, member.stage) == ((1, 1), Stage.AGG)
    assert not of.pools["agg"].table.is_shared
    assert member.models == {MODEL: model_info()}
