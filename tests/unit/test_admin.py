"""The admin service, without a network."""

import grpc
import pytest

from slagate.pools.fleet import Fleet
from slagate.pools.grid_config import parse_config
from slagate.pools.member import Work
from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.router.admin import AdminService
from slagate.router.dispatch import Dispatcher
from slagate.router.settings import Settings
from support.builders import MODEL, fleet, request, rng
from support.context import Aborted, Context
from support.fleet_files import disagg_file
from support.virtual_loop import run

Code = grpc.StatusCode


def admin(of: Fleet) -> AdminService:
    return AdminService(Dispatcher(of, rng=rng()), Settings(max_attempts=4), now_s=lambda: 100.0)


def explain(of: Fleet, message: oe.GenerateRequest, *metadata: tuple[str, str]) -> gw.Decision:
    return run(admin(of).Explain, gw.ExplainRequest(request=message), Context(*metadata))


def test_explain_takes_nothing_and_says_the_same_twice() -> None:
    of = fleet()
    first = explain(of, request(), ("x-slo-ttft-ms", "500"))
    assert explain(of, request(), ("x-slo-ttft-ms", "500")) == first
    assert [choice.worker for choice in first.stages] != ["", ""]
    assert first.sla.ttft_ms == 500
    assert all(member.inflight == 0 for member in of.members())
    assert all(pool.requests_total == 0 for pool in of.pools.values())


def test_explain_names_the_budget_that_generate_would_give() -> None:
    of = fleet()
    for member in of.members():
        member.models = {MODEL: oe.ModelInfo(max_context_length=1000)}
    assert explain(of, request(tokens=range(300))).max_tokens == 700


def test_explain_of_a_fleet_that_is_down_says_why_instead_of_failing() -> None:
    of = fleet()
    for member in of.members():
        member.refuse("wrong role")
    decision = explain(of, request())
    assert [choice.worker for choice in decision.stages] == ["", ""]
    assert {c.excluded for choice in decision.stages for c in choice.candidates} == {"refused"}
    assert "refused" in decision.text


@pytest.mark.parametrize(
    ("change", "metadata", "code", "field"),
    [
        ({"model": "other"}, (), Code.NOT_FOUND, "model"),
        ({}, (("x-slo-ttft-ms", "fast"),), Code.INVALID_ARGUMENT, "x-slo-ttft-ms"),
        ({"request_id": ""}, (), Code.INVALID_ARGUMENT, "request_id"),
    ],
)
def test_explain_refuses_what_generate_refuses(
    change: dict[str, str],
    metadata: tuple[tuple[str, str], ...],
    code: grpc.StatusCode,
    field: str,
) -> None:
    message = request()
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(Aborted) as caught:
        explain(fleet(), message, *metadata)
    assert caught.value.code is code
    assert field in caught.value.details


def test_cfg_11_list_pools_says_how_often_and_where_a_request_may_be_tried() -> None:
    content = disagg_file() | {"enable_priority_retry": True}
    names = [*content["prefill_pools"], *content["decode_pools"]]
    content["pools"] = {name: {"workers": [f"{name}:1"]} for name in names}
    of = Fleet(parse_config(content, source="f"))
    answer = run(admin(of).ListPools, gw.ListPoolsRequest(), Context())
    assert answer.max_attempts == 4
    orders = {pool.name: list(pool.pool_order) for pool in answer.pools}
    fast, bulk = content["prefill_pools"]
    assert orders[bulk] == [bulk, fast]
    assert orders[fast] == [fast]


def test_list_workers_shows_leases_and_the_age_of_the_last_report() -> None:
    of = fleet("agg")
    member = next(of.members())
    member.load = oe.LoadInfo(running_requests=3)
    member.load_at_s = 98.5
    of.pools["agg"].lease(member.address, Work(70, 0.1, 70))
    answer = run(admin(of).ListWorkers, gw.ListWorkersRequest(), Context())
    first, second = answer.workers
    assert (first.worker, first.inflight, first.queued_tokens) == (member.address, 1, 70)
    assert (first.load.running_requests, first.load_age_ms) == (3, 1500.0)
    assert (second.inflight, second.HasField("load"), second.HasField("load_age_ms")) == (
        0,
        False,
        False,
    )


def test_list_pools_says_how_often_a_pool_stood_in_for_another() -> None:
    of = fleet("agg")
    of.pools["agg"].spills_total = 2
    (pool,) = run(admin(of).ListPools, gw.ListPoolsRequest(), Context()).pools
    assert pool.spills_total == 2
