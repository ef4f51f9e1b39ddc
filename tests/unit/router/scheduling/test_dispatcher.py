import logging
from typing import Any

import grpc
import numpy as np
import pytest

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet_file.load import parse_config
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.row_view import State
from slagate.pools.inflight.shared_counts import PoolCell
from slagate.pools.prefix.overlap import PoolCaches, Prompt
from slagate.proto import openengine_pb2 as oe
from slagate.router.request.errors import RETRY_PUSHBACK, NoWorker, Overloaded, UnknownModel
from slagate.router.request.sla import Sla
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.pairs import CANNOT_TAKE_OVER, NO_TAKER, TAKERS_AT_LIMIT
from slagate.router.scheduling.policy import Decision
from slagate.router.scheduling.score import ScoredRow
from slagate.router.scheduling.wait_queue import Assignment
from slagate.router.scheduling.words import explained
from support.builders import MODEL, ask, fleet, model_info, put_in, rng, take_now
from support.fleet.files import disagg_file

DOWN = (State.CONNECTING, State.NOT_READY, State.REFUSED)


def dispatcher(of: Fleet | None = None) -> Dispatcher:
    return Dispatcher(of or fleet(), rng=rng())


def assign(d: Dispatcher, *, model: str = MODEL) -> Assignment:
    return take_now(d, ask(model=model))


def candidates(decision: Decision) -> list[list[ScoredRow]]:
    return [choice.top() for choice in decision.stages]


def inflight(of: Fleet) -> dict[str, int]:
    return {
        member.address: member.ranks.inflight for member in of.members() if member.ranks.inflight
    }


def test_load_counts_from_the_choice_and_is_gone_after_release() -> None:
    d = dispatcher()
    assignment = assign(d)
    assert tuple(assignment.leases) == (Stage.PREFILL, Stage.DECODE)
    assert sorted(inflight(d.fleet).values()) == [1, 1]
    assert [m.stage for m in assignment.members] == [Stage.PREFILL, Stage.DECODE]
    assignment.release()
    assignment.release()
    assert inflight(d.fleet) == {}


def test_the_second_of_two_requests_goes_to_the_other_worker() -> None:
    d = dispatcher()
    held = [assign(d), assign(d)]
    assert inflight(d.fleet) == {"p1:1": 1, "p2:1": 1, "d1:1": 1, "d2:1": 1}
    assert len(held) == 2


def test_explain_is_what_decide_does_next_and_takes_nothing() -> None:
    d = dispatcher()
    for _ in range(20):
        explained = d.explain(ask())
        assert inflight(d.fleet) == {}
        assert candidates(d.explain(ask())) == candidates(explained)
        assignment = assign(d)
        assert candidates(assignment.decision) == candidates(explained)
        assignment.release()


def test_health_03_an_unknown_model_is_not_found_and_no_worker_is_unavailable() -> None:
    d = dispatcher()
    with pytest.raises(UnknownModel) as unknown:
        assign(d, model="gpt-9")
    assert unknown.value.code is grpc.StatusCode.NOT_FOUND
    for state in DOWN:
        for member in d.fleet.members():
            put_in(member, state)
        with pytest.raises(NoWorker) as down:
            assign(d)
        assert down.value.code is grpc.StatusCode.UNAVAILABLE
        assert dict(down.value.status().trailers)[RETRY_PUSHBACK] == "1000"
        with pytest.raises(UnknownModel):
            assign(d, model="gpt-9")


def test_health_03_a_model_whose_workers_are_gone_is_still_known() -> None:
    d = dispatcher()
    assign(d).release()
    for member in d.fleet.members():
        member.set_models({})
        put_in(member, State.NOT_READY)
    with pytest.raises(NoWorker):
        assign(d)


def test_an_unknown_model_is_told_what_is_served() -> None:
    with pytest.raises(UnknownModel, match=f"'gpt-9' is not served here, but {MODEL}$"):
        assign(dispatcher(), model="gpt-9")


def test_a_worker_that_is_ready_for_another_model_is_not_called_not_ready() -> None:
    d = dispatcher()
    p1, p2 = d.fleet.pools["prefill"].members.values()
    p1.set_models({"other": model_info("other")})
    put_in(p2, State.NOT_READY)
    told = "prefill: no worker of pool prefill can take it: does not serve the model, not_ready"
    with pytest.raises(NoWorker, match=f"^{told}$"):
        assign(d)


def test_a_class_that_is_not_listed_is_told_once_and_in_the_words_of_a_decision(
    caplog: pytest.LogCaptureFixture,
) -> None:
    d = dispatcher(fleet(objectives={"batch": {"ttft_ms": 800}, "*": {"ttft_ms": 150}}))
    for name, note in (("", ""), ("batch", ""), ("Bacth", 'Class "Bacth" is not in objectives')):
        for _ in range(2):
            words = explained(d.explain(ask(sla=Sla(objective=name))))
            assert ("not in objectives" in words) == bool(note)
            assert note in words
            assert f"TTFT target of its class {800 if name == 'batch' else 150} ms" in words
    (line,) = caplog.records
    assert line.getMessage() == "request.unknown_class"
    assert (vars(line)["class"], vars(line)["counts_as"]) == ("Bacth", "*")
    for at in range(1000):
        d.explain(ask(sla=Sla(objective=f"made up {at}")))
    assert len(caplog.records) == 100


@pytest.mark.parametrize("objectives", [{}, {"batch": {}}])
def test_a_class_that_is_not_listed_is_told_where_none_is_and_no_default_either(
    objectives: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    d = dispatcher(fleet(objectives=objectives))
    assert "objectives" not in explained(d.explain(ask()))
    decision = d.explain(ask(sla=Sla(objective="any")))
    assert 'Class "any" is not in objectives' in explained(decision)
    assert decision.ask.sla == Sla(objective="any", is_unlisted=True)
    (line,) = caplog.records
    assert (line.getMessage(), vars(line)["class"]) == ("request.unknown_class", "any")


def test_health_06_a_fleet_that_was_never_reached_is_unavailable_not_ignorant() -> None:
    with pytest.raises(NoWorker, match="no worker has been reached yet") as caught:
        take_now(dispatcher(fleet(ready=False)), ask())
    assert caught.value.status().code is grpc.StatusCode.UNAVAILABLE


def test_a_message_with_the_clients_model_name_stays_short() -> None:
    for act in (take_now, Dispatcher.explain):
        with pytest.raises(UnknownModel) as caught:
            act(dispatcher(), ask(model="x" * 1_000_000))
        n_characters = len(str(caught.value))
        assert n_characters < 1000


def test_score_04_full_workers_are_passed_over_and_a_full_pool_is_overloaded() -> None:
    of = fleet("agg", pools={"agg": {"max_inflight": 2}})
    d = Dispatcher(of, rng=rng(), max_waiting=0)
    held = [assign(d) for _ in range(4)]
    assert inflight(d.fleet) == {"a1:1": 2, "a2:1": 2}
    with pytest.raises(Overloaded, match="every worker of pool agg is at its limit") as caught:
        assign(d)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 750 <= int(dict(caught.value.status().trailers)[RETRY_PUSHBACK]) <= 1250
    freed = held.pop()
    freed.release()
    assert assign(d).members == freed.members


def test_disagg_03_a_missing_decode_worker_leaves_no_prefill_lease() -> None:
    d = dispatcher()
    for member in d.fleet.pools["decode"].members.values():
        member.probe_failed("gone")
        member.refuse("gone")
    with pytest.raises(NoWorker, match="decode"):
        assign(d)
    assert inflight(d.fleet) == {}


def test_a_prediction_that_fails_leaves_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(PoolCaches, "predict", fail)
    d = dispatcher()
    with pytest.raises(MemoryError):
        d.submit(ask(), Prompt(np.arange(100, dtype="<u4").tobytes()))
    assert inflight(d.fleet) == {}


def test_another_worker_for_one_stage_moves_one_lease() -> None:
    d = dispatcher()
    assignment = assign(d)
    prefill, decode = assignment.members
    asked = ask(excluded=frozenset({decode.address}))
    found = take_now(d, asked, stages=(Stage.DECODE,))
    assert tuple(found.leases) == (Stage.DECODE,)
    assignment.adopt(found)
    other = assignment.leases[Stage.DECODE].member
    assert other is not decode
    assert inflight(d.fleet) == {prefill.address: 1, other.address: 1}
    winner = assignment.decision.stage(Stage.DECODE).winner
    assert winner is not None
    assert winner.view.address == other.address
    both = ask(excluded=frozenset({decode.address, other.address}))
    with pytest.raises(NoWorker):
        take_now(d, both, stages=(Stage.DECODE,))
    assert inflight(d.fleet) == {prefill.address: 1, other.address: 1}
    assignment.release()
    assert inflight(d.fleet) == {}


def test_cfg_11_enable_priority_retry_alone_sends_a_failed_request_to_the_faster_pool() -> None:
    for retry, wanted in ((True, "pf:1"), (False, None)):
        content = disagg_file() | {"enable_priority_retry": retry}
        workers = {"p-fast": "pf:1", "p-bulk": "pb:1", "d-fast": "df:1", "d-bulk": "db:1"}
        content["pools"] = {name: {"workers": [address]} for name, address in workers.items()}
        of = Fleet(prepare(parse_config(content, source="f", serving=True)))
        for member in of.members():
            member.set_models({MODEL: model_info()})
            member.probe_ok()
        d = dispatcher(of)
        assignment = assign(d)
        failed = assignment.leases[Stage.PREFILL].member
        assert failed.address == "pb:1"
        asked = ask(excluded=frozenset({"pb:1"}))
        if wanted is None:
            with pytest.raises(NoWorker):
                take_now(d, asked, stages=(Stage.PREFILL,))
        else:
            (found,) = take_now(d, asked, stages=(Stage.PREFILL,)).members
            assert found.address == wanted


def spilling() -> Dispatcher:
    """Two prefill pools; a request of p-bulk may go to p-fast too."""
    content = disagg_file() | {"enable_priority_retry": True}
    workers = {"p-fast": "pf:1", "p-bulk": "pb:1", "d-fast": "df:1", "d-bulk": "db:1"}
    content["pools"] = {name: {"workers": [address]} for name, address in workers.items()}
    of = Fleet(prepare(parse_config(content, source="f", serving=True)))
    for member in of.members():
        member.set_models({MODEL: model_info()})
        member.probe_ok()
    return dispatcher(of)


def test_i8_a_leg_that_goes_to_another_pool_is_counted_there_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="slagate.router.scheduling.dispatcher")
    d = spilling()
    assign(d).release()
    assert {pool.table.totals[PoolCell.SPILLS] for pool in d.fleet.pools.values()} == {0}
    assert caplog.records == []
    put_in(d.fleet.pools["p-bulk"].members["pb:1"], State.NOT_READY)
    d.explain(ask())
    assert {pool.table.totals[PoolCell.SPILLS] for pool in d.fleet.pools.values()} == {0}
    assign(d)
    spills = {name: pool.table.totals[PoolCell.SPILLS] for name, pool in d.fleet.pools.items()}
    assert {name: n for name, n in spills.items() if n} == {"p-fast": 1}
    (line,) = caplog.records
    assert line.getMessage() == "request.spilled"
    about = vars(line)
    assert (about["stage"], about["from"], about["to"]) == ("prefill", "p-bulk", "p-fast")


def test_i8_a_second_attempt_in_another_pool_is_a_spill_too() -> None:
    d = spilling()
    assign(d)
    take_now(d, ask(excluded=frozenset({"pb:1"})), stages=(Stage.PREFILL,))
    assert d.fleet.pools["p-fast"].table.totals[PoolCell.SPILLS] == 1


def test_a_decision_without_a_winner_is_shown_by_explain_and_refused_when_it_is_taken() -> None:
    d = dispatcher()
    for member in d.fleet.pools["decode"].members.values():
        member.refuse("gone")
    decision = d.explain(ask())
    assert [choice.winner is None for choice in decision.stages] == [False, True]
    with pytest.raises(NoWorker, match="decode: no worker of pool decode is ready"):
        assign(d)
    assert inflight(d.fleet) == {}


def test_explain_raises_as_an_assignment_does() -> None:
    for act in (take_now, Dispatcher.explain):
        with pytest.raises(UnknownModel):
            act(dispatcher(), ask(model="gpt-9"))
        with pytest.raises(NoWorker):
            act(dispatcher(fleet(ready=False)), ask())


def test_only_ready_workers_hold_leases() -> None:
    d = dispatcher()
    member = next(d.fleet.members())
    member.refuse("wrong role")
    for _ in range(20):
        assign(d)
    assert member.ranks.inflight == 0


def said(transport: str, **limits: Any) -> oe.ServerInfo:
    """What a worker that uses this transport says of itself."""
    return oe.ServerInfo(kv_connector=oe.KvConnectorInfo(transfer_backend=transport), **limits)


def of_transports(**transports: str) -> Fleet:
    """The fleet of `fleet`, of which these workers use these transports: `p1="NIXL"`."""
    of = fleet()
    for member in of.members():
        member.set_server_info(said(transports.get(member.address.partition(":")[0], "NIXL")))
    return of


def test_a_pair_of_workers_is_chosen_that_can_hand_over() -> None:
    d = dispatcher(of_transports(p2="UCX", d1="UCX"))
    pairs = {tuple(m.address for m in assign(d).members) for _ in range(20)}
    assert pairs == {("p1:1", "d2:1"), ("p2:1", "d1:1")}


def test_prefill_waits_while_the_decode_workers_that_it_can_hand_over_to_are_at_their_limits() -> (
    None
):
    of = fleet(pools={"decode": {"max_inflight": 1}})
    for member in of.members():
        member.set_server_info(said("UCX" if member.address == "d1:1" else "NIXL"))
    d = dispatcher(of)
    held = assign(d)
    assert [m.address for m in held.members][1] == "d2:1"
    with d.submit(ask()) as ticket:
        assert ticket.outcome is None
        assert ticket.decision.stages[0].reasons == {TAKERS_AT_LIMIT}
        held.release()
        assert isinstance(ticket.outcome, Assignment)
        ticket.outcome.release()
    assert inflight(of) == {}


def test_a_fleet_without_any_pair_is_refused_with_the_reason() -> None:
    d = dispatcher(of_transports(d1="UCX", d2="UCX"))
    with pytest.raises(
        NoWorker, match=r"prefill: no worker .* no decode worker that it can hand over"
    ):
        assign(d)


def test_a_retry_stays_with_workers_that_fit_the_one_that_it_keeps() -> None:
    d = dispatcher(of_transports(p2="UCX", d1="UCX"))
    prefill, decode = ((d.fleet.pools[name].members) for name in ("prefill", "decode"))
    for kept, stage in ((decode["d1:1"], Stage.PREFILL), (prefill["p1:1"], Stage.DECODE)):
        asked = ask(partner=kept.pair)
        for _ in range(5):
            (found,) = take_now(d, asked, stages=(stage,)).members
            assert found.pair == kept.pair
        asked = ask(partner=kept.pair, excluded=frozenset({found.address}))
        why = NO_TAKER if stage is Stage.PREFILL else CANNOT_TAKE_OVER
        with pytest.raises(NoWorker, match=why):
            take_now(d, asked, stages=(stage,))
