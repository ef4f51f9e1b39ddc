"""What a fleet keeps, drops and begins anew when another configuration is put in force."""

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from slagate.pools.estimator.estimator import Estimator
from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pool import Lease, Pool
from slagate.pools.fleet_file.load import FleetConfig, parse_config
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.row_view import State
from slagate.pools.inflight.table import LoadTable
from slagate.pools.inflight.worker_rows import Limits
from slagate.pools.prefix.overlap import Prompt
from slagate.proto import openengine_pb2 as oe
from slagate.router.scheduling.policy import choose
from support.builders import MODEL, PROFILE, ask, config, model_info, rng

PROMPT = Prompt(struct.pack("<400I", *range(400)))


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def running(mode: str = "agg", pools: dict[str, dict[str, Any]] | None = None) -> Fleet:
    of = Fleet(prepare(config(mode, pools)), now_s=Clock())
    make_ready(of)
    return of


def clock(of: Fleet) -> Clock:
    """The clock of a fleet that `running` made."""
    found = of._now_s
    assert isinstance(found, Clock)
    return found


def make_ready(of: Fleet, *, n_ranks: int = 1) -> None:
    """Every worker has said who it is, and passed a probe."""
    for pool in of.pools.values():
        for member in pool.members.values():
            if member.server_info is None:
                info = oe.ServerInfo(instance_id=member.address)
                info.capacity.kv_block_size = 32
                info.parallelism.data_parallel_size = n_ranks
                info.extra.update({"trtllm_supports_dp_rank_targeting": True})
                member.set_server_info(info)
                pool.worker_replaced(member)
                member.set_models({MODEL: model_info()})
                member.probe_ok()


def put(of: Fleet, mode: str = "agg", **pools: Any) -> None:
    of.apply(prepare(config(mode, pools)))


def workers(*addresses: str, **more: Any) -> dict[str, Any]:
    return {"workers": list(addresses), **more}


def lease(pool: Pool, member: Member, *, at: int = 0) -> Lease:
    return pool.lease(member.ranks.rows[at], Work(400, 0.5, 400), PROMPT)


def cached(pool: Pool, member: Member) -> int:
    return int(pool.snapshot(PROMPT).cached.cached_tokens[member.ranks.rows[0]])


def test_who_stays_is_the_same_object_with_all_that_is_known() -> None:
    of = running()
    pool, member = of.pools["agg"], of.pools["agg"].members["a2:1"]
    held = lease(pool, member)
    pool.estimator.observe_first_response(pool.estimator.frozen.work_s(100, 0), 0.5)
    estimator, rows = pool.estimator, list(member.ranks.rows)
    put(of, agg=workers("a3:1", "a2:1"))
    assert of.pools["agg"] is pool
    assert pool.members["a2:1"] is member
    assert (pool.estimator, member.ranks.rows) == (estimator, rows)
    assert (member.state, member.ranks.inflight) == (State.READY, 1)
    assert set(pool.members) == {"a2:1", "a3:1"}
    held.release()
    assert (member.ranks.inflight, cached(pool, member)) == (0, 0)


def test_who_goes_takes_nothing_new_and_leaves_with_its_last_lease() -> None:
    of = running()
    pool, member = of.pools["agg"], of.pools["agg"].members["a1:1"]
    held = [lease(pool, member), lease(pool, member)]
    put(of, agg=workers("a2:1"))
    assert (member.state, member.ranks.inflight) == (State.DRAINING, 2)
    assert list(of.members()) == [pool.members["a2:1"]]
    assert set(of.all_members()) == {member, pool.members["a2:1"]}
    for _ in range(50):
        (choice,) = choose(ask(), of.grids, of.views(), rng=rng()).stages
        assert choice.winner is not None
        assert choice.winner.view.address == "a2:1"
    held[0].release()
    held[0].release()
    assert member.state is State.DRAINING
    held[1].prefill_done()
    held[1].release()
    assert (member.state, member.ranks.inflight) == (State.LEFT, 0)
    assert list(of.all_members()) == [pool.members["a2:1"]]


def test_who_is_idle_leaves_at_once_and_who_has_kv_parked_there_does_not() -> None:
    of = running("disagg")
    idle, parked = of.pools["prefill"].members.values()
    parked.add_hold()
    put(of, "disagg", prefill=workers("p9:1"))
    assert (idle.state, parked.state) == (State.LEFT, State.DRAINING)
    parked.remove_hold()
    assert parked.state is State.LEFT


def test_who_comes_back_while_it_drains_goes_on_as_it_was() -> None:
    of = running()
    pool, member = of.pools["agg"], of.pools["agg"].members["a1:1"]
    first, second = lease(pool, member), lease(pool, member)
    second.prefill_done()
    second.release()
    row, known = list(member.ranks.rows), cached(pool, member)
    woken: list[str] = []
    member.on_change = lambda: woken.append("a1")
    told: list[Member] = []
    of.on_join(lambda _pool, each: told.append(each))
    told.clear()
    put(of, agg=workers("a2:1"))
    assert (member.state, member.ranks.inflight) == (State.DRAINING, 1)
    put(of, agg=workers("a1:1", "a2:1"))
    assert pool.members["a1:1"] is member
    assert (told, woken[-1:]) == ([], ["a1"])
    assert (member.state, member.ranks.inflight, member.ranks.rows) == (State.READY, 1, row)
    assert cached(pool, member) == known > 0
    first.release()
    # It does not leave with the lease that it drained for.
    assert (member.state, member.ranks.inflight) == (State.READY, 0)
    put(of, agg=workers("a2:1"))
    assert member.state is State.LEFT


def test_who_comes_back_after_it_was_cut_may_work_again() -> None:
    of = running()
    pool, member = of.pools["agg"], of.pools["agg"].members["a1:1"]
    held = lease(pool, member)
    put(of, agg=workers("a2:1"))
    assert [member.has_drained_for(30.0, now_s) for now_s in (79.0, 80.0)] == [False, True]
    assert member.force_drain()
    assert not member.is_up
    put(of, agg=workers("a1:1", "a2:1"))
    assert (member.is_up, member.reason, member.has_drained_for(0.0, 80.0)) == (True, "", False)
    held.release()
    put(of, agg=workers("a2:1"))
    assert member.state is State.LEFT


def test_a_pool_that_comes_back_while_its_workers_drain_is_the_one_it_was() -> None:
    of = running()
    pool = of.pools["agg"]
    member = pool.members["a1:1"]
    held = lease(pool, member)
    pool.estimator.observe_first_response(pool.estimator.frozen.work_s(100, 0), 0.5)
    estimator = pool.estimator
    put(of, "disagg")
    assert of.pool("agg", Stage.AGG) is None
    assert [m.address for m in of.all_members() if m.stage is Stage.AGG] == ["a1:1"]
    put(of, "disagg", prefill=workers("p3:1"))
    put(of, "agg", agg=workers("a1:1", "a3:1", max_inflight=3))
    assert of.pools["agg"] is pool
    assert pool.estimator is estimator
    assert (member.state, member.limits) == (State.READY, Limits(3))
    assert set(pool.members) == {"a1:1", "a3:1"}
    assert set(of.all_members()) == set(of.members())
    held.release()


def test_a_pool_of_another_stage_or_name_is_another_pool() -> None:
    """Where its workers have work, they end it in the pool that gave it to them."""
    of = running("disagg", {"prefill": workers("x:1", "y:1")})
    old = of.pools["prefill"]
    member = old.members["x:1"]
    held = lease(old, member)
    content = config("agg", {"agg": workers("x:1", "y:1")})
    of.apply(prepare(content))
    new = of.pools["agg"]
    assert {m.pool for m in of.all_members() if m.address == "x:1"} == {"prefill", "agg"}
    assert (new.members["x:1"].ranks.inflight, new.members["x:1"].state) == (0, State.JOINING)
    make_ready(of)
    assert (len(new.snapshot().rows), old.members) == (2, {})
    of.pools["agg"].lease(new.members["x:1"].ranks.rows[0], Work()).release()
    held.release()
    assert [m.pool for m in of.all_members()] == ["agg", "agg"]


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_rows_of_who_left_are_the_next_ones_without_anything_in_them(n_ranks: int) -> None:
    of = Fleet(prepare(config("agg")), now_s=Clock())
    make_ready(of, n_ranks=n_ranks)
    pool = of.pools["agg"]
    old = pool.members["a1:1"]
    assert len(old.ranks.rows) == n_ranks
    done = lease(pool, old, at=n_ranks - 1)
    done.prefill_done()
    unfinished = lease(pool, old)
    pool.set_foreign_load(old, (7, 30_000))
    old.probe_failed("slow")  # suspect
    rows = list(old.ranks.rows)
    busy = pool.snapshot(PROMPT)
    assert busy.view(rows[-1]).cached_tokens > 0
    assert busy.view(rows[0]).suspect
    put(of, agg=workers("a2:1"))
    unfinished.release()
    done.release()
    assert old.state is State.LEFT
    gone = pool.snapshot(PROMPT)
    assert {gone.view(row).state for row in rows} == {State.LEFT}
    put(of, agg=workers("a2:1", "a3:1"))
    new = pool.members["a3:1"]
    assert set(new.ranks.rows) <= set(rows)
    assert pool.snapshot().view(new.ranks.rows[0]).state is State.JOINING
    make_ready(of, n_ranks=n_ranks)
    assert sorted(new.ranks.rows) == sorted(rows)
    view = pool.snapshot(PROMPT)
    for row in rows:
        fresh = view.view(row)
        assert (fresh.address, fresh.state, fresh.suspect) == ("a3:1", State.READY, False)
        load = (fresh.inflight, fresh.worker_inflight, fresh.queued_tokens, fresh.queued_s)
        assert load == (0, 0, 0, 0.0)
        assert (fresh.context_tokens, fresh.foreign_requests, fresh.foreign_s) == (0, 0, 0.0)
        assert (fresh.cached_tokens, fresh.last_chosen) == (0, 0)
    # Nor does what the old one is told late reach the new one.
    before = pool.snapshot(PROMPT).view(new.ranks.rows[0])
    old.set_server_info(oe.ServerInfo(instance_id="late"))
    old.set_models({"other": model_info("other")})
    old.probe_ok()
    old.probe_failed("gone")
    pool.set_foreign_load(old, (9, 9))
    pool.worker_replaced(old)
    done.prefill_done()
    unfinished.release()
    assert pool.snapshot(PROMPT).view(new.ranks.rows[0]) == before
    assert old.state is State.LEFT


def test_limits_cost_and_places_change_in_place_and_learn_nothing_anew() -> None:
    of = running("agg", {"agg": workers("a1:1", "a2:1", profile=PROFILE, tp=1)})
    pool = of.pools["agg"]
    pool.estimator.observe_itl(1, 100, 0.5)
    estimator, frozen = pool.estimator, pool.estimator.frozen
    held = lease(pool, pool.members["a2:1"])
    changed = {"profile": PROFILE, "tp": 1, "max_inflight": 5, "max_queued_tokens": 700, "cost": 3}
    put(of, agg=workers("a1:1", **changed))
    assert (pool.estimator, pool.estimator.frozen) == (estimator, frozen)
    rows = pool.snapshot().rows
    assert list(rows.ints("max_inflight")) == [5, 5], "who drains has them too, should it come back"
    assert list(rows.ints("max_queued_tokens")) == [700, 700]
    put(of, agg=workers("a1:1", "a2:1", "a3:1", profile=PROFILE, tp=1))
    assert {m.limits for m in of.members()} == {Limits()}
    held.release()


@pytest.mark.parametrize("tp", [None, 2])
def test_another_profile_begins_to_learn_anew(tp: int | None) -> None:
    of = running("agg", {"agg": workers("a1:1", profile=PROFILE, tp=1)})
    pool = of.pools["agg"]
    held = lease(pool, pool.members["a1:1"])
    estimator = pool.estimator
    found = {} if tp is None else {"profile": "qwen3-32b-fp8-h200", "tp": tp}
    prepared = prepare(config("agg", {"agg": workers("a1:1", **found)}))
    of.apply(prepared)
    assert pool.estimator is not estimator
    assert pool.estimator.frozen == prepared.estimators["agg"].frozen
    # What is queued was counted by the old one's seconds, and goes by them.
    held.release()
    assert pool.snapshot().view(0).queued_s == 0.0


@pytest.mark.parametrize("tp", [1, 2])
def test_how_fast_a_worker_is_beside_its_profile_is_learnt_anew_with_another_one(tp: int) -> None:
    of = running("agg", {"agg": workers("a1:1", "a2:1", profile=PROFILE, tp=1)})
    pool = of.pools["agg"]

    def compute(given: Lease) -> list[float]:
        clock(of).now_s += 3.0
        given.prefill_done()
        given.release()
        found: list[float] = pool.snapshot().rows.pace.tolist()
        return found

    for _ in range(50):
        learnt = compute(pool.lease(0, Work(1000, 1.0)))
    assert learnt == pytest.approx([3.0, 1.0], abs=0.2)
    old = pool.lease(0, Work(1000, 1.0))
    put(of, agg=workers("a1:1", "a2:1", profile=PROFILE, tp=tp))
    assert pool.snapshot().rows.pace.tolist() == (learnt if tp == 1 else [1.0, 1.0])
    # Its seconds are those of the old one.
    assert compute(old) == (pytest.approx(learnt, abs=0.1) if tp == 1 else [1.0, 1.0])
    assert compute(pool.lease(0, Work(1000, 1.0)))[0] > 1.0


def test_lengths_of_answers_are_learnt_by_the_classes_of_the_configuration_in_force() -> None:
    of = running()
    lists = [{"a": {}, "*": {}}, {"b": {}}, {"a": {}}]
    for objectives in lists:
        of.apply(prepare(config("agg", objectives=objectives)))
        for _ in range(300):
            of.answers.observe("*", 10)
            of.answers.observe("a", 500)
        if "a" in objectives:
            assert of.answers.short_tokens("a") == pytest.approx(500, rel=0.1)
    assert len(of.answers._by_class) == 2


def test_the_models_of_workers_that_went_are_still_known() -> None:
    of = running()
    put(of, agg=workers("new:1"))
    assert (of.serves(MODEL), of.models()) == (True, {MODEL})
    assert of.context_window(MODEL) is None


def test_windows_are_those_of_workers_that_are_there_now() -> None:
    of = Fleet(prepare(under_another_name("one", "a:1")))
    (member,) = of.members()
    for _ in range(9):
        member.set_models({MODEL: model_info(window=100)})
    assert of.context_window(MODEL) == 100
    n_changes = of.pools["one"].table.n_model_changes
    of.apply(prepare(under_another_name("two", "a:1")))
    (member,) = of.members()
    while of.pools["two"].table.n_model_changes < n_changes:
        member.set_models({MODEL: model_info(window=50)})
    assert of.context_window(MODEL) == 50


def under_another_name(name: str, *addresses: str) -> FleetConfig:
    """One pool for both phases, of this name."""
    content = json.loads(config("agg").text)
    for key in ("agg_pools", "agg_pool_dynamo_namespaces"):
        if key in content:
            content[key] = [name]
    content["pools"] = {name: {"workers": list(addresses)}}
    return parse_config(content, source="f", serving=True)


def test_pools_that_are_empty_are_let_go_of() -> None:
    of = running()
    for number in range(20):
        of.apply(prepare(under_another_name(f"pool-{number}", "a:1")))
    assert len(of._leaving) == 1
    assert list(of.all_pools) == [of.pools["pool-19"]]


def test_pools_of_each_others_name_are_other_pools() -> None:
    of = running("disagg")
    before = dict(of.pools)
    held = lease(before["prefill"], before["prefill"].members["p1:1"])
    text = config("disagg").text
    for old, new in (('["prefill"]', "[0]"), ('["decode"]', '["prefill"]'), ("[0]", '["decode"]')):
        text = text.replace(old, new)
    content = json.loads(text)
    for stage in ("prefill", "decode"):
        content[f"{stage}_pool_selection_strategy"][f"{stage}_pool_mapping"] = [[0]]
    of.apply(prepare(parse_config(content, source="f", serving=True)))
    assert {name: pool.stage.value for name, pool in of.pools.items()} == {
        "decode": "prefill",
        "prefill": "decode",
    }
    assert not set(before.values()) & set(of.pools.values())
    assert of.pool("prefill", Stage.PREFILL) is None
    assert len(list(of.all_members())) == 5
    held.release()
    assert set(of.all_members()) == set(of.members())


def test_who_reads_while_another_configuration_is_put_in_force_reads_on() -> None:
    """Scrapes and readiness look from a thread of their own, so at any moment."""
    of = running("disagg")
    files: list[tuple[str, dict[str, dict[str, Any]]]] = [
        ("disagg", {"prefill": workers("p2:1", "p3:1", "p4:1"), "decode": workers("d2:1", "d3:1")}),
        ("agg", {"agg": workers("a1:1", "a2:1")}),
        ("disagg", {}),
    ]
    for mode, pools in files:
        make_ready(of)
        for pool in of.pools.values():
            for member in pool.members.values():
                lease(pool, member)
        readers: list[Iterator[object]] = [of.members(), of.all_members(), of.serving_members()]
        readers += [of.all_pools, *(pool.all_members for pool in of.pools.values())]
        for reader in readers:
            next(reader)
        put(of, mode, **pools)
        assert [len(list(reader)) > 0 for reader in readers] == [True] * len(readers)


class Peeked(dict[str, Estimator]):
    """What is prepared for each pool; looks at the fleet whenever it is asked for some."""

    def __init__(self, of: Fleet, estimators: Mapping[str, Estimator]) -> None:
        super().__init__(estimators)
        self._of = of
        self.seen: list[tuple[set[str], list[str]]] = []

    def __getitem__(self, name: str) -> Estimator:
        self.seen.append((set(self._of.pools), [m.address for m in self._of.members()]))
        return super().__getitem__(name)


def test_nobody_reads_half_of_the_pools() -> None:
    of = running("disagg")
    whole = [m.address for m in of.members()]
    prepared = prepare(config("disagg", {"prefill": workers("p9:1")}))
    peeked = Peeked(of, prepared.estimators)
    of.apply(prepared._replace(estimators=peeked))
    assert len(peeked.seen) == 2
    assert all(seen == ({"prefill", "decode"}, whole) for seen in peeked.seen)


def test_ops_03_a_fleet_whose_workers_are_all_replaced_is_ready_until_the_new_ones_are_down() -> (
    None
):
    of = running("disagg")
    for pool in of.pools.values():
        for member in pool.members.values():
            lease(pool, member)
    old = list(of.members())
    put(of, "disagg", prefill=workers("p8:1", "p9:1"), decode=workers("d8:1", "d9:1"))
    new = list(of.members())
    assert {m.state for m in new} == {State.JOINING}
    assert (of.unready_stages(), of.not_ready()) == ([], "")
    assert set(of.serving_members()) == {*new, *old}
    # Of those that are joining one stage turns out to be down; the other one waits on.
    for member in new[:2]:
        assert of.unready_stages() == []
        member.probe_failed("connection refused")
    assert of.unready_stages() == [Stage.PREFILL]
    assert of.not_ready() == "no prefill worker is ready"
    assert not any(m.stage is Stage.PREFILL for m in of.serving_members() if m.is_draining)
    make_ready(of)
    assert (of.unready_stages(), set(of.serving_members())) == ([], set(new))


def test_workers_that_drain_and_are_down_stand_for_nobody() -> None:
    of = running()
    members = list(of.members())
    for member in members:
        lease(of.pools["agg"], member)
    put(of, agg=workers("a9:1"))
    members[0].refuse("another model")
    assert of.not_ready() == ""
    members[1].force_drain()
    assert of.not_ready() == "no agg worker is ready"


def test_a_table_gives_rows_that_were_given_up_to_the_next_the_last_first() -> None:
    table = LoadTable()
    rows = [table.add_row(f"w{n}:1", None) for n in range(3)]
    for row in rows:
        table.set_models(row, frozenset({"m"}))
        table.set_state(row, State.READY, suspect=False)
        table.set_foreign_load(row, (4, 1.0))
    table.set(1, inflight=3, last_chosen=9)
    table.set_s(1, queued_s=1.5)
    before = table.rows()
    table.free_row(0)
    table.free_row(1)
    assert before.view(1).address == "w1:1"
    gone = table.rows()
    assert (len(gone), gone.names[1]) == (3, ("", None))
    assert [gone.view(row).state for row in rows] == [State.LEFT, State.LEFT, State.READY]
    serving = gone.serving("m")
    assert serving is not None
    assert list(serving) == [False, False, True]
    # What was said of those that left is not taken for those of whom nobody can tell.
    table.add_row("told:1", None)
    table.set_foreign_load(1, (8, 1.0))
    table.set_foreign_load(2, None)
    assert table.rows().view(2).foreign_requests == 8
    table.free_row(1)
    table.set_s(1, queued_s=1.5)
    assert [table.add_row(f"n{n}:1", n) for n in range(3)] == [1, 0, 3]
    fresh = table.rows().view(1)
    assert (fresh.address, fresh.rank, fresh.state) == ("n0:1", 0, State.JOINING)
    assert (fresh.inflight, fresh.last_chosen, fresh.models) == (0, 0, frozenset())
    assert (fresh.foreign_requests, fresh.foreign_s, fresh.queued_s) == (0, 0.0, 0.0)
