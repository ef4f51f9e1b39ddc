import logging
from typing import Any

import pytest

from slagate.pools.fleet.health import FAILURES_TO_LEAVE
from slagate.pools.fleet.member import Member, pair_of
from slagate.pools.fleet.pool import Lease, Pool
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.pair_key import ANY_PAIR, PairKey
from slagate.pools.inflight.row_view import State
from slagate.pools.inflight.shared_counts import PoolCell
from slagate.pools.inflight.table import UNLIMITED, LoadTable
from slagate.proto import openengine_pb2 as oe
from support.builders import member, pool


def probed(results: str, of: Member | None = None) -> list[State]:
    """States after each probe: o is ok, x failed, r refused."""
    of = of or Member("w:1", pool="p", stage=Stage.AGG, table=LoadTable())
    states = []
    for result in results:
        before = of.state
        if result == "o":
            changed = of.probe_ok()
        elif result == "x":
            changed = of.probe_failed("slow")
        else:
            changed = of.refuse("wrong role")
        assert changed == (of.state is not before)
        states.append(of.state)
    return states


C, R, N, F = State.CONNECTING, State.READY, State.NOT_READY, State.REFUSED


def test_health_08_out_after_the_third_failure_in_a_row_and_in_after_the_second_success() -> None:
    assert probed("oxoxxxoo") == [R, R, R, R, R, N, N, R]


@pytest.mark.parametrize(
    ("results", "states"),
    [
        ("o", [R]),
        ("xxxx", [C, C, C, C]),
        ("xo", [C, R]),
        ("oxxoxxo", [R] * 7),
        ("oxxxoxoo", [R, R, R, N, N, N, N, R]),
        ("oxxxxxx", [R, R, R, N, N, N, N]),
        ("r", [F]),
        ("or", [R, F]),
        ("oxxxr", [R, R, R, N, F]),
        ("rr", [F, F]),
        ("rxx", [F, F, F]),
        ("roo", [F, N, R]),
        ("roxoo", [F, N, N, N, R]),
        ("ror", [F, N, F]),
    ],
)
def test_the_table_of_the_module_holds(results: str, states: list[State]) -> None:
    assert probed(results) == states


def test_a_worker_that_came_back_has_all_its_failures_ahead_of_it_again() -> None:
    of = member()
    probed("xxxoo", of)
    assert probed("x" * FAILURES_TO_LEAVE, of)[-2:] == [R, N]


def test_the_reason_says_why_it_is_not_ready() -> None:
    of = Member("w:1", pool="p", stage=Stage.AGG, table=LoadTable())
    assert of.reason == "not looked at yet"
    of.probe_failed("UNAVAILABLE: refused")
    assert of.reason == "UNAVAILABLE: refused"
    of.probe_ok()
    assert of.reason == ""
    probed("xxx", of)
    assert of.reason == "slow"
    of.refuse("is a decode worker")
    of.refuse("is a prefill worker")
    assert of.reason == "is a prefill worker"


def test_a_view_is_a_copy_of_that_moment() -> None:
    of = pool("w:1", max_inflight=2)
    of.table.now_s = lambda: 0.0
    before = of.snapshot()
    of.lease(0, Work(10, 0.5, 20))
    view = before.view(0)
    assert (view.inflight, view.queued_tokens, view.queued_s, view.context_tokens) == (0, 0, 0.0, 0)
    view = of.snapshot().view(0)
    assert (view.inflight, view.queued_tokens, view.queued_s, view.context_tokens) == (
        1,
        10,
        0.5,
        20,
    )
    assert (view.state, view.max_inflight, view.models) == (R, 2, frozenset({"llama"}))


def test_a_prefill_that_is_done_shortens_the_queue_and_keeps_the_slot() -> None:
    of = member()
    lease = Lease(of, of.ranks.rows[0], Work(10, 0.5, 20), number=1)
    lease.prefill_done()
    assert (
        of.ranks.inflight,
        of.ranks.queued_tokens,
        of.ranks.queued_s,
        of.ranks.context_tokens,
    ) == (1, 0, 0.0, 20)
    lease.release()
    assert (
        of.ranks.inflight,
        of.ranks.queued_tokens,
        of.ranks.queued_s,
        of.ranks.context_tokens,
    ) == (0, 0, 0.0, 0)


def test_floats_that_do_not_add_up_leave_an_idle_queue_of_exactly_zero() -> None:
    of = member()
    (row,) = of.ranks.rows
    leases = [Lease(of, row, Work(1, seconds, 0), number=1) for seconds in (0.1, 0.2, 0.3)]
    for lease in leases:
        lease.release()
    assert of.ranks.queued_s == 0.0


def test_i3_a_pool_gives_no_lease_on_a_worker_that_may_not_take_work() -> None:
    of = pool("w:1", max_inflight=1)
    of.lease(0, Work())
    with pytest.raises(AssertionError):
        of.lease(0, Work())
    for results in ("xxx", "r"):
        of = pool("w:1")
        probed(results, of.members["w:1"])
        with pytest.raises(AssertionError):
            of.lease(0, Work())
        assert of.table.totals[PoolCell.REQUESTS] == 0


def test_reprs_say_the_state_in_one_line() -> None:
    of = pool("w:1")
    of.lease(0, Work(3, 0.1, 4))
    assert repr(of) == "Pool(pool, [Member(w:1, ready, inflight 1, queued 3, context 4)])"


class Leg:
    def __init__(self, of: Member, *, tell_once: bool = False) -> None:
        self.told: list[str] = []
        self._of, self._tell_once = of, tell_once
        of.legs.add(self)

    def worker_lost(self, reason: str) -> None:
        self.told.append(reason)
        if self._tell_once:
            self._of.legs.discard(self)

    def drain_timed_out(self, reason: str) -> None:
        self.told.append(f"cut: {reason}")


def test_who_holds_a_leg_is_told_once_when_the_worker_leaves_service() -> None:
    of = member()
    leg = Leg(of)
    probed("xxo", of)
    assert leg.told == []
    probed("xxx", of)
    assert leg.told == ["slow"]
    probed("xxxroo", of)
    assert leg.told == ["slow"]
    of.refuse("wrong role")
    of.legs.discard(leg)
    probed("ooxxx", of)
    assert leg.told == ["slow", "wrong role"]


def test_one_that_is_told_may_stop_listening_at_once() -> None:
    of = member()
    leg = Leg(of, tell_once=True)
    of.refuse("wrong role")
    assert (leg.told, of.legs) == (["wrong role"], set())


def test_every_change_of_state_is_logged_by_the_member_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="slagate.pools.fleet.member")
    probed("xooxxxxoo")
    lines = [vars(record) for record in caplog.records]
    assert {line["message"] for line in lines} == {"member.state"}
    assert [(line["worker"], line["pool"], line["state"], line["reason"]) for line in lines] == [
        ("w:1", "p", "connecting", "slow"),
        ("w:1", "p", "ready", ""),
        ("w:1", "p", "not_ready", "slow"),
        ("w:1", "p", "ready", ""),
    ]


def test_a_view_follows_the_models_that_are_set() -> None:
    in_pool = pool("w:1")
    of = in_pool.members["w:1"]
    assert in_pool.snapshot().view(0).models == {"llama"}
    of.set_models({name: oe.ModelInfo() for name in ("a", "b")})
    assert in_pool.snapshot().view(0).models == {"a", "b"}
    assert set(of.models) == {"a", "b"}


def told(n_ranks: int, *, takes_rank: bool, capacity: oe.DeploymentCapacity | None = None) -> Any:
    info = oe.ServerInfo(capacity=capacity)
    info.parallelism.data_parallel_size = n_ranks
    info.extra["trtllm_supports_dp_rank_targeting"] = takes_rank
    info.extra["slagate_supports_decode_dp_rank"] = takes_rank
    return info


def ranks(of: Pool) -> list[tuple[str, int | None, bool]]:
    rows = of.snapshot().rows
    shown = [rows.view(at) for at in range(len(rows))]
    return [(each.address, each.rank, each.state is State.READY) for each in shown]


def test_each_rank_that_can_be_asked_for_is_a_row_and_its_lease_asks_for_it() -> None:
    of = pool("w:1", "x:1", stage=Stage.PREFILL)
    member, _ = of.members.values()
    assert ranks(of) == [("w:1", None, True), ("x:1", None, True)]
    member.set_server_info(told(2, takes_rank=False))
    assert ranks(of) == [("w:1", None, True), ("x:1", None, True)]
    member.set_server_info(told(2, takes_rank=True))
    assert ranks(of) == [("w:1", 0, True), ("x:1", None, True), ("w:1", 1, True)]
    lease = of.lease(2, Work(5, 0.1, 0))
    assert (lease.member, lease.rank) == (member, 1)
    first, _, second = (of.snapshot().view(row) for row in range(3))
    assert (first.inflight, second.inflight) == (0, 1)
    assert first.worker_inflight == second.worker_inflight == member.ranks.inflight == 1
    # Back with fewer ranks: what is leased on the one that is gone is still given back.
    member.set_server_info(told(1, takes_rank=True))
    assert ranks(of) == [("w:1", None, True), ("x:1", None, True), ("w:1", 1, False)]
    lease.release()
    assert (member.ranks.inflight, member.ranks.queued_tokens) == (0, 0)


def test_limits_are_those_of_the_file_then_what_the_engine_runs_at_once() -> None:
    capacity = oe.DeploymentCapacity(
        max_running_requests=64, total_kv_blocks=1000, kv_block_size=32
    )
    for stage, configured, wanted in (
        (Stage.PREFILL, None, UNLIMITED),
        (Stage.DECODE, None, 64),
        (Stage.AGG, None, 64),
        (Stage.AGG, 7, 7),
        (Stage.PREFILL, 7, 7),
    ):
        of = pool("w:1", stage=stage, max_inflight=configured)
        of.members["w:1"].set_server_info(told(1, takes_rank=True, capacity=capacity))
        row = of.snapshot().view(0)
        assert row.max_inflight == of.members["w:1"].max_inflight == wanted
        assert row.capacity_tokens == 32_000
    of.members["w:1"].set_server_info(told(2, takes_rank=True, capacity=capacity))
    assert of.snapshot().view(1).capacity_tokens == 16_000


def told_of_pair(**keys: Any) -> oe.ServerInfo:
    info = oe.ServerInfo(
        kv_connector=oe.KvConnectorInfo(transfer_backend="DEFAULT"),
        capacity=oe.DeploymentCapacity(kv_block_size=64),
    )
    info.extra.update(keys)
    return info


def test_a_worker_says_of_its_handoffs_what_its_server_info_has() -> None:
    info = told_of_pair(
        slagate_kv_transport="NIXL",
        slagate_kv_transport_library="UCX",
        slagate_transceiver_runtime="cpp",
        slagate_kv_dtype="FP8",
        slagate_kv_cache_manager="v1",
        slagate_handoff_key="0123456789abcdef",
    )
    assert pair_of(info) == ("nixl", "ucx", "cpp", "fp8", "v1", 64, "0123456789abcdef")
    assert pair_of(told_of_pair()) == PairKey(transport="auto", block_tokens=64)
    assert pair_of(oe.ServerInfo()) == ANY_PAIR
    odd = told_of_pair(
        slagate_kv_dtype=8, slagate_kv_cache_manager=None, slagate_handoff_key="x" * 99
    )
    assert pair_of(odd) == PairKey(transport="auto", block_tokens=64, handoff_key="x" * 40)


def test_a_worker_that_restarts_with_other_settings_pairs_by_them_and_one_that_left_by_none() -> (
    None
):
    of = pool("w:1", "v:1", stage=Stage.DECODE)
    one, other = of.members.values()
    one.set_server_info(told_of_pair(slagate_kv_dtype="fp8"))
    assert of.snapshot().rows.pairs.keys == (one.pair, ANY_PAIR)
    one.set_server_info(told_of_pair(slagate_kv_dtype="bf16"))
    other.set_server_info(told_of_pair(slagate_kv_dtype="bf16"))
    pairs = of.snapshot().rows.pairs
    assert (pairs.keys, pairs.ids.tolist()) == ((other.pair,), [0, 0])
    of.drain("w:1")
    assert of.snapshot().rows.pairs.keys == (ANY_PAIR, other.pair)
