"""Requests that wait because every worker for them is at its limit."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import grpc
import numpy as np
import pytest
from msgspec.structs import replace

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet_file.load import parse_config
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.row_view import State
from slagate.pools.prefix.match import cached_of
from slagate.proto import openengine_pb2 as oe
from slagate.router.request.errors import RETRY_PUSHBACK, NoWorker, Overloaded
from slagate.router.request.sla import Sla
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.policy import choose_stage
from slagate.router.scheduling.wait_queue import Assignment
from slagate.workers.runtime.virtual_loop import run
from support.builders import MODEL, ask, fleet, model_info, rng
from support.fleet.files import disagg_file


class Waiting:
    """Requests submitted one after the other; `done` has the numbers in the order of assignment."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.done: list[int] = []
        self.held: dict[int, Assignment] = {}
        self.failed: dict[int, Exception] = {}
        self.scopes: dict[int, anyio.CancelScope] = {}

    async def submit(self, number: int, **asked: Any) -> None:
        self.scopes[number] = anyio.CancelScope()
        try:
            with self.scopes[number], self.dispatcher.submit(ask(**asked)) as ticket:
                self.held[number] = await ticket.assigned()
                self.done.append(number)
        except (NoWorker, Overloaded) as error:
            self.failed[number] = error


def two_kinds(**decode: Any) -> Fleet:
    """Two prefill pools, told apart by the TTFT target, in front of one decode worker."""
    content = disagg_file() | {"enable_priority_retry": False}
    workers = {"p-fast": "pf:1", "p-bulk": "pb:1", "d-fast": "df:1", "d-bulk": "db:1"}
    content["pools"] = {name: {"workers": [address]} for name, address in workers.items()}
    content["pools"]["d-bulk"] |= decode
    of = Fleet(prepare(parse_config(content, source="f", serving=True)))
    for member in of.members():
        member.set_models({MODEL: model_info()})
        member.probe_ok()
    return of


FAST, BULK = Sla(ttft_ms=150, itl_ms=40), Sla(ttft_ms=800, itl_ms=40)


def waiting(
    test: Callable[[Waiting, anyio.abc.TaskGroup], Awaitable[None]],
    *,
    mode: str = "agg",
    max_waiting: int = 100,
    of: Fleet | None = None,
    **pools: Any,
) -> None:
    of = of or fleet(mode, pools=pools or {"agg": {"max_inflight": 1}})

    async def main() -> None:
        each = Waiting(Dispatcher(of, rng=rng(), max_waiting=max_waiting, now_s=anyio.current_time))
        async with anyio.create_task_group() as tasks:
            await test(each, tasks)
        assert each.dispatcher.n_waiting == 0
        for assignment in each.held.values():
            assignment.release()
        check_idle(of)

    run(main)


def check_idle(of: Fleet) -> None:
    assert {member.ranks.inflight for member in of.members()} == {0}
    assert {member.ranks.queued_tokens for member in of.members()} == {0}


async def settle() -> None:
    await anyio.wait_all_tasks_blocked()


def test_a_request_waits_for_a_worker_below_its_limit_and_they_go_in_order_of_arrival() -> None:
    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        for number in range(6):
            tasks.start_soon(w.submit, number)
            await settle()
        assert (w.done, w.dispatcher.n_waiting) == ([0, 1], 4)
        for number in range(4):
            w.held.pop(number).release()
            await settle()
            assert w.done == list(range(number + 3))
        assert not w.failed

    waiting(test)


def test_score_04_all_workers_over_the_limit_and_nobody_may_wait_is_a_refusal_with_a_hint() -> None:
    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        for number in range(4):
            tasks.start_soon(w.submit, number)
            await settle()
        assert w.done == [0, 1]
        assert set(w.failed) == {3}
        error = w.failed[3]
        assert isinstance(error, Overloaded)
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "every worker of pool agg is at its limit" in str(error)
        assert "1 requests wait already" in str(error)
        assert int(dict(error.status().trailers)[RETRY_PUSHBACK]) > 0
        w.held.pop(0).release()

    waiting(test, max_waiting=1)


def test_a_refusal_says_when_it_would_have_its_turn_as_things_go() -> None:
    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        for number in range(8):
            tasks.start_soon(w.submit, number)
            await settle()
        for number in range(4):
            await anyio.sleep(2)
            w.held.pop(number).release()
            await settle()
        # One every two seconds, and two still wait.
        for number in range(8, 32):
            tasks.start_soon(w.submit, number)
            await settle()
        assert set(w.failed) == set(range(12, 32))
        hints = [
            int(dict(error.status().trailers)[RETRY_PUSHBACK])
            for error in w.failed.values()
            if isinstance(error, Overloaded)
        ]
        # About then, but not all at once.
        assert 0.75 * 2000 * 7 <= min(hints) < 2000 * 7 < max(hints) <= 1.25 * 2000 * 7
        assert len(set(hints)) == len(w.failed)
        for number in range(4, 10):
            w.held.pop(number).release()
            await settle()

    waiting(test, max_waiting=6)


@pytest.mark.parametrize("how", ["cancelled before", "cancelled in the step"])
def test_a_request_that_gives_up_leaves_its_place_and_takes_nothing_along(how: str) -> None:
    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        for number in range(4):
            tasks.start_soon(w.submit, number)
            await settle()
        if how == "cancelled before":
            w.scopes[2].cancel()
            await settle()
            assert w.dispatcher.n_waiting == 1
        else:
            # It has not heard of that yet when it is assigned: nobody comes for the assignment.
            w.scopes[2].cancel()
        w.held.pop(0).release()
        await settle()
        assert w.done == [0, 1, 3]

    waiting(test)


def test_a_request_does_not_wait_for_a_pool_that_has_nobody_left() -> None:
    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        for number in range(3):
            tasks.start_soon(w.submit, number)
            await settle()
        for member in w.dispatcher.fleet.members():
            member.refuse("gone")
        await settle()
        assert isinstance(w.failed[2], NoWorker)

    waiting(test)


def test_a_worker_that_becomes_ready_takes_who_waits() -> None:
    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        first, _ = w.dispatcher.fleet.members()
        first.refuse("not yet")
        for number in range(2):
            tasks.start_soon(w.submit, number)
            await settle()
        assert w.done == [0]
        first.probe_ok()
        first.probe_ok()
        await settle()
        assert (first.state, w.done) == (State.READY, [0, 1])

    waiting(test)


def test_both_stages_are_had_before_a_request_holds_any() -> None:
    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        for number in range(3):
            tasks.start_soon(w.submit, number)
            await settle()
        of = w.dispatcher.fleet
        assert w.done == [0, 1]
        assert sum(m.ranks.inflight for m in of.pools["prefill"].members.values()) == 2
        w.held.pop(0).release()

    waiting(test, mode="disagg", decode={"max_inflight": 1})


def test_score_05_long_prompts_never_wait_while_a_worker_has_nothing_in_flight() -> None:
    """400 prompts of 8,500 tokens over 8 workers whose queue limit is below four of them."""

    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        of = w.dispatcher.fleet
        for number in range(400):
            tasks.start_soon(lambda n=number: w.submit(n, isl_tokens=8500))
        turns = rng(5)
        n_released = 0
        while n_released < 400:
            await settle()
            idle = [m for m in of.members() if not m.ranks.inflight]
            assert not (w.dispatcher.n_waiting and idle)
            number = turns.choice(list(w.held))
            w.held.pop(number).release()
            n_released += 1
        assert len(w.done) == 400

    workers = [f"a{i}:1" for i in range(8)]
    spec = {"workers": workers, "max_queued_tokens": 32_768}
    waiting(test, max_waiting=1000, agg=spec)


def test_score_06_the_queue_limit_counts_where_the_prefix_is_too() -> None:
    def winner(limit: dict[str, int]) -> str:
        of = fleet("disagg", pools={"prefill": limit})
        pool = of.pools["prefill"]
        view = pool.snapshot()
        one, two = pool.members.values()
        one.ranks.add_lease(one.ranks.rows[0], Work(25_000, 0.5), number=1)
        two.ranks.add_lease(two.ranks.rows[0], Work(1_000, 1.0), number=2)
        view, depths = pool.snapshot(), np.array([8191, 0])
        choice = choose_stage(
            Stage.PREFILL,
            ask(isl_tokens=8192),
            of.grids[Stage.PREFILL],
            {"prefill": replace(view, cached=cached_of(depths, depths))},
            draw=rng().random(),
        )
        assert choice.winner is not None
        return choice.winner.view.address

    assert winner({"max_queued_tokens": 20_000}) == "p2:1"
    assert winner({}) == "p1:1"


def test_between_lanes_too_the_older_request_goes_first() -> None:
    """A kind of request that always has one waiting takes no turn from another that waits for the same."""

    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        kinds = [FAST, FAST, BULK, FAST, BULK, BULK, FAST, FAST]
        for number, sla in enumerate(kinds):
            tasks.start_soon(lambda n=number, s=sla: w.submit(n, sla=s))
            await anyio.sleep(0.001)
        assert (w.done, w.dispatcher.n_waiting) == ([0], 7)
        for number in range(7):
            w.held.pop(number).release()
            await settle()
            assert w.done == list(range(number + 2))

    waiting(test, of=two_kinds(max_inflight=1))


def test_a_newcomer_of_another_lane_does_not_pass_one_who_waits_for_more() -> None:
    """A long prompt waits for KV cache; short ones of another kind would fit, again and again."""

    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        (decode,) = w.dispatcher.fleet.pools["d-bulk"].members.values()
        capacity = oe.DeploymentCapacity(total_kv_blocks=107, kv_block_size=32)
        decode.set_server_info(oe.ServerInfo(capacity=capacity))
        sizes = [(FAST, 2000), (BULK, 3000), (FAST, 150), (FAST, 150)]
        for number, (sla, isl_tokens) in enumerate(sizes):
            tasks.start_soon(lambda n=number, s=sla, i=isl_tokens: w.submit(n, sla=s, isl_tokens=i))
            await anyio.sleep(0.001)
        assert w.done == [0]
        w.held.pop(0).release()
        await settle()
        assert w.done == [0, 1, 2]
        w.held.pop(2).release()
        await settle()
        assert w.done == [0, 1, 2, 3]

    waiting(test, of=two_kinds())


def test_who_waits_for_a_full_pool_keeps_nobody_from_another_one() -> None:
    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        for number, itl_ms in enumerate([40, 40, 5, 5]):
            sla = Sla(ttft_ms=150, itl_ms=itl_ms)
            tasks.start_soon(lambda n=number, s=sla: w.submit(n, sla=s))
            await anyio.sleep(0.001)
        assert w.done == [0, 2, 3]
        w.held.pop(0).release()

    waiting(test, of=two_kinds(max_inflight=1))


def test_who_lost_its_worker_waits_as_one_that_came_when_the_request_did() -> None:
    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        for number in range(3):
            tasks.start_soon(w.submit, number)
            await anyio.sleep(0.001)
        assert w.done == [0, 1]
        lost = w.held.pop(0)
        (member,) = lost.members
        again = ask(excluded=frozenset({member.address}))
        with w.dispatcher.submit(again, stages=(Stage.AGG,), since_s=0.0) as ticket:
            assert ticket.outcome is None
            # Nobody else is kept from the worker that it may not go to any more.
            lost.release()
            await settle()
            assert w.done == [0, 1, 2]
            w.held.pop(1).release()
            found = await ticket.assigned()
        assert found.members != [member]
        w.held[9] = found

    waiting(test)


def test_a_request_that_is_older_than_who_keeps_the_place_takes_it() -> None:
    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        (decode,) = w.dispatcher.fleet.pools["d-bulk"].members.values()
        capacity = oe.DeploymentCapacity(total_kv_blocks=107, kv_block_size=32)
        decode.set_server_info(oe.ServerInfo(capacity=capacity))
        for number, (sla, isl_tokens) in enumerate([(FAST, 2000), (BULK, 3000)]):
            await anyio.sleep(1)
            tasks.start_soon(lambda n=number, s=sla, i=isl_tokens: w.submit(n, sla=s, isl_tokens=i))
        await settle()
        assert w.done == [0]
        again = ask(sla=FAST, isl_tokens=100, excluded=frozenset({"gone:1"}))
        decode_only = (Stage.DECODE,)
        with w.dispatcher.submit(again, stages=decode_only, since_s=0.0) as ticket:
            w.held[9] = await ticket.assigned()
        w.held.pop(0).release()
        await settle()
        w.held.pop(9).release()
        await settle()
        assert w.done == [0, 1]

    waiting(test, of=two_kinds())


def test_nobody_stands_in_line_for_workers_that_are_down() -> None:
    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        for number in range(2):
            tasks.start_soon(lambda n=number: w.submit(n, sla=FAST))
            await settle()
        assert (w.done, w.dispatcher.n_waiting) == ([0], 1)
        for member in w.dispatcher.fleet.pools["p-bulk"].members.values():
            member.refuse("gone")
        tasks.start_soon(lambda: w.submit(2, sla=BULK))
        await settle()
        assert isinstance(w.failed[2], NoWorker)
        w.held.pop(0).release()

    waiting(test, of=two_kinds(max_inflight=1))


def test_one_who_waits_behind_an_older_request_is_not_refused_for_a_worker_that_is_down_now() -> (
    None
):
    """Which workers are there counts when the request's turn has come."""

    async def test(w: Waiting, tasks: anyio.abc.TaskGroup) -> None:
        of = w.dispatcher.fleet
        (decode,) = of.pools["d-bulk"].members.values()
        (prefill,) = of.pools["p-fast"].members.values()
        capacity = oe.DeploymentCapacity(total_kv_blocks=107, kv_block_size=32)
        decode.set_server_info(oe.ServerInfo(capacity=capacity))
        for number, (sla, isl_tokens) in enumerate([(FAST, 2000), (BULK, 3000), (FAST, 150)]):
            tasks.start_soon(lambda n=number, s=sla, i=isl_tokens: w.submit(n, sla=s, isl_tokens=i))
            await anyio.sleep(0.001)
        assert (w.done, w.dispatcher.n_waiting) == ([0], 2)
        prefill.refuse("gone")
        w.dispatcher.step()
        assert (w.failed, w.dispatcher.n_waiting) == ({}, 2)
        prefill.probe_ok()
        prefill.probe_ok()
        w.held.pop(0).release()
        await settle()
        assert w.done == [0, 1, 2]

    waiting(test, of=two_kinds())
