"""Ranks, and what a request leaves behind for the next ones: through the real graph."""

import pytest

from slagate.pools.inflight.engine_queue import Work
from slagate.pools.prefix.overlap import Prompt
from slagate.proto import openengine_pb2 as oe
from slagate.router.request.errors import Outcome
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.workers.runtime.virtual_loop import run
from support.builders import ask, fleet, rng, take_now
from support.gateway.request_path import bench

KEYS = {"prefill": "openengine-target-dp-rank", "decode": "x-slagate-dp-rank"}


def of_two_ranks(info: oe.ServerInfo) -> oe.ServerInfo:
    """The same worker with two ranks that can be asked for."""
    told = oe.ServerInfo()
    told.CopyFrom(info)
    told.parallelism.data_parallel_size = 2
    told.extra["trtllm_supports_dp_rank_targeting"] = True
    told.extra["slagate_supports_decode_dp_rank"] = True
    return told


def test_each_leg_asks_for_its_rank_by_the_key_of_its_stage() -> None:
    async def main() -> None:
        async with bench() as b:
            for member in b.app.fleet.members():
                assert member.server_info is not None
                member.set_server_info(of_two_ranks(member.server_info))
            for _ in range(2):
                await b.call()
            for stage, key in KEYS.items():
                asked = [dict(call.metadata) for call in b.calls(stage)]
                assert sorted(each[key] for each in asked) == ["0", "1"]  # type: ignore[type-var]
                others = {other for name, other in KEYS.items() if name != stage}
                assert not any(others & each.keys() for each in asked)
            await b.check_idle(*[Outcome.COMPLETED] * 2)

    run(main)


def test_a_worker_that_stops_stating_its_block_size_costs_nothing_but_its_events() -> None:
    """Its next incarnation says nothing of KV blocks; requests are served on."""

    async def main() -> None:
        async with bench() as b:
            (member,) = b.app.fleet.pools["prefill"].members.values()
            assert member.server_info is not None
            pool = b.app.fleet.pools["prefill"]
            assert pool.overlaps is not None
            index = pool.overlaps.index_of(32)
            pool.overlaps.set_holder(member.ranks.rows[0], index.join(), block_tokens=32)
            pool.overlaps.set_holder(member.ranks.rows[0], None, block_tokens=0)
            pool.worker_replaced(member)
            await b.call()
            await b.check_idle(Outcome.COMPLETED)

    run(main)


def test_a_bug_in_one_stage_leaves_no_lease_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    of = fleet("disagg", pools={"decode": {"max_inflight": 1}})
    dispatcher = Dispatcher(of, rng=rng())
    real = of.pools["decode"].lease

    def broken(row: int, work: Work, prompt: Prompt | None = None, **_: object) -> object:
        raise RuntimeError("a bug")

    monkeypatch.setattr(of.pools["decode"], "lease", broken)
    with pytest.raises(RuntimeError):
        take_now(dispatcher, ask())
    assert {member.ranks.inflight for member in of.members()} == {0}
    # And one that waits takes the blame itself, not whoever gave the place back.
    monkeypatch.setattr(of.pools["decode"], "lease", real)
    held = [take_now(dispatcher, ask()) for _ in range(2)]
    with dispatcher.submit(ask()) as ticket:
        assert ticket.outcome is None
        monkeypatch.setattr(of.pools["decode"], "lease", broken)
        held[0].release()
        assert isinstance(ticket.outcome, Exception)
    held[1].release()
    assert dispatcher.n_waiting == 0
    assert {member.ranks.inflight for member in of.members()} == {0}
