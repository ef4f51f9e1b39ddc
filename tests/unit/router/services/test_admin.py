"""The admin service, without a network."""

from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet_file.load import parse_config
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.shared_counts import PoolCell
from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.router.metrics import Metrics
from slagate.router.receipts.record import Record
from slagate.router.receipts.ring import ReceiptRing
from slagate.router.reload.reload import Proposal, Reloader, put_in_force_here
from slagate.router.request.errors import Outcome
from slagate.router.request.request import parse_request
from slagate.router.request.settings import Settings
from slagate.router.request.sla import Sla
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.score import RoutingRequest
from slagate.router.services.admin import AdminService
from slagate.workers.runtime.virtual_loop import run
from support.builders import MODEL, config, fleet, request, rng
from support.fleet.files import disagg_file
from support.gateway.context import Aborted, Context
from support.gateway.reloads import Nowhere

Code = grpc.StatusCode
CONFIG = gw.GatewayConfig(version="v1", policy="slagate")


def service(
    dispatcher: Dispatcher, ring: ReceiptRing, settings: Settings | None = None
) -> AdminService:
    reloader = Reloader(
        Proposal(prepare(config()), CONFIG),
        put_in_force=put_in_force_here(dispatcher, ring),
        metrics=Metrics(),
        now_s=lambda: 90.0,
    )
    return AdminService(
        dispatcher,
        settings or Settings(),
        reloader=reloader,
        source=Nowhere(),
        receipts=ring,
        now_s=lambda: 100.0,
    )


def admin(of: Fleet) -> AdminService:
    ring = ReceiptRing(CONFIG, unix_s=lambda: 1.5)
    return service(Dispatcher(of, rng=rng()), ring, Settings(max_attempts=4))


def explain(of: Fleet, message: oe.GenerateRequest, *metadata: tuple[str, str]) -> gw.Decision:
    return run(admin(of).Explain, gw.ExplainRequest(request=message), Context(*metadata))


def test_explain_takes_nothing_and_says_the_same_twice() -> None:
    of = fleet()
    first = explain(of, request(), ("x-slo-ttft-ms", "500"))
    assert explain(of, request(), ("x-slo-ttft-ms", "500")) == first
    assert [choice.worker for choice in first.stages] != ["", ""]
    assert first.sla.ttft_ms == 500
    assert all(member.ranks.inflight == 0 for member in of.members())
    assert all(pool.table.totals[PoolCell.REQUESTS] == 0 for pool in of.pools.values())


def test_explain_names_the_budget_that_generate_would_give() -> None:
    of = fleet()
    for member in of.members():
        member.set_models({MODEL: oe.ModelInfo(max_context_length=1000)})
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
    of = Fleet(prepare(parse_config(content, source="f", serving=True)))
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
    (row,) = member.ranks.rows
    of.pools["agg"].lease(row, Work(70, 0.1, 70))
    answer = run(admin(of).ListWorkers, gw.ListWorkersRequest(), Context())
    first, second = answer.workers
    assert (first.worker, first.inflight, first.queued_tokens) == (member.address, 1, 70)
    assert (first.load.running_requests, first.load_age_ms) == (3, 1500.0)
    assert (second.inflight, second.HasField("load"), second.HasField("load_age_ms")) == (
        0,
        False,
        False,
    )


def test_workers_that_fit_none_of_the_other_stage_are_counted_and_told_why() -> None:
    of = fleet()
    for member in of.members():
        transport = "UCX" if member.address == "p2:1" else "NIXL"
        connector = oe.KvConnectorInfo(transfer_backend=transport)
        member.set_server_info(oe.ServerInfo(kv_connector=connector))
    pools = run(admin(of).ListPools, gw.ListPoolsRequest(), Context()).pools
    assert {pool.name: pool.workers_unpaired for pool in pools} == {"prefill": 1, "decode": 0}
    workers = run(admin(of).ListWorkers, gw.ListWorkersRequest(), Context()).workers
    found = {each.worker: (each.pairs_with, each.pair_problem) for each in workers}
    why = "fits no decode worker that is ready: KV transport is ucx on prefill and nixl on decode"
    assert found == {"p1:1": (2, ""), "p2:1": (0, why), "d1:1": (1, ""), "d2:1": (1, "")}
    (agg, _) = run(admin(fleet("agg")).ListWorkers, gw.ListWorkersRequest(), Context()).workers
    assert not agg.HasField("pairs_with")


def test_list_pools_says_how_often_a_pool_stood_in_for_another() -> None:
    of = fleet("agg")
    for _ in range(2):
        of.pools["agg"].count_spill()
    (pool,) = run(admin(of).ListPools, gw.ListPoolsRequest(), Context()).pools
    assert pool.spills_total == 2


def test_explain_keeps_every_candidate_with_what_it_was_scored_by() -> None:
    decision = explain(fleet(), request(tokens=range(300)))
    assert decision.model == MODEL
    for choice in decision.stages:
        assert len(choice.candidates) == choice.candidates_total == 2
        assert [look.name for look in choice.pools] == [choice.pool]
    prefill, decode = decision.stages
    assert prefill.candidates[0].state == "ready"
    assert decode.candidates[0].serves_model


def test_explain_counts_what_is_cached_of_its_prompt() -> None:
    of = fleet()
    message = request(tokens=range(300))
    prompt = parse_request(message.SerializeToString(), max_bytes=1 << 20).prompt
    of.pools["prefill"].lease(0, Work(), prompt)
    prefill, _ = explain(of, message).stages
    assert {c.worker: c.device_tokens for c in prefill.candidates} == {"p1:1": 288, "p2:1": 0}


def test_list_pools_says_how_workers_are_chosen_how_many_wait_and_how_wrong_predictions_were() -> (
    None
):
    of = fleet("agg", pools={"agg": {"max_inflight": 1}})
    estimator = of.pools["agg"].estimator
    for actual_s in (0.01, 0.016, 0.04):
        estimator.pair_itl(estimator.frozen, predicted_s=0.02, actual_s=actual_s)

    async def main() -> gw.ListPoolsResponse:
        dispatcher = Dispatcher(of, rng=rng())
        ring = ReceiptRing(CONFIG, unix_s=lambda: 1.5)
        asked = service(dispatcher, ring)
        with ExitStack() as tickets:
            for _ in range(3):
                tickets.enter_context(dispatcher.submit(RoutingRequest(MODEL, 10, Sla())))
            return await asked.ListPools(gw.ListPoolsRequest(), Context())

    answer = run(main)
    assert (answer.policy, answer.waiting_requests) == ("slagate", 1)
    (pool,) = answer.pools
    assert pool.ttft == gw.Predictions(basis="learnt")
    assert (pool.itl.basis, pool.itl.pairs, pool.itl.median_error) == ("learnt", 3, 0.5)
    assert pool.itl.bias == pytest.approx((2 * 1.25 * 0.5) ** (1 / 3) - 1)
    assert pool.itl.coverage == pytest.approx(2 / 3)


def test_list_workers_compares_predicted_with_cached_tokens() -> None:
    of = fleet("agg")
    first, _ = of.members()
    first.prefix_error.add_prompt(100, 64)
    first.prefix_error.add_prompt(0, 32)
    answer = run(admin(of).ListWorkers, gw.ListWorkersRequest(), Context())
    assert answer.workers[0].prefix == gw.PrefixTruth(
        predicted_tokens=100, engine_cached_tokens=96, abs_error_tokens=68, requests=2
    )
    assert not answer.workers[1].HasField("prefix")


def test_watch_receipts_begins_with_the_configuration() -> None:
    ring = ReceiptRing(CONFIG, unix_s=lambda: 1.5, max_receipts=3)
    asked = service(Dispatcher(fleet(), rng=rng()), ring)
    for _ in range(5):
        ring.add_receipt(Record(0.0), Outcome.INVALID, 1.0)

    async def watch(**request: Any) -> list[gw.WatchReceiptsResponse]:
        wanted = gw.WatchReceiptsRequest(**request)
        return [each async for each in asked.WatchReceipts(wanted, Context())]

    first, *others = run(watch)
    assert first == gw.WatchReceiptsResponse(config=CONFIG)
    assert [each.receipt.number for each in others] == [3, 4, 5]
    assert others[0].receipt.config_version == "v1"
    assert others[0].receipt.actual.outcome == "invalid"
    assert [each.receipt.number for each in run(watch, limit=1)] == [0, 5]
    assert len(run(watch, limit=0)) == 1
    ring.end_watches()
    assert len(run(watch, follow=True)) == 4


def test_watch_receipts_says_how_many_a_slow_reader_missed() -> None:
    ring = ReceiptRing(CONFIG, unix_s=lambda: 1.5, max_receipts=2)
    asked = service(Dispatcher(fleet(), rng=rng()), ring)

    async def main() -> list[tuple[int, int]]:
        got = []
        ring.add_receipt(Record(0.0), Outcome.INVALID, 1.0)
        async for each in asked.WatchReceipts(gw.WatchReceiptsRequest(follow=True), Context()):
            got.append((each.receipt.number, each.missed))
            if each.receipt.number == 1:
                for _ in range(6):
                    ring.add_receipt(Record(0.0), Outcome.INVALID, 1.0)
                ring.end_watches()
        return got

    assert run(main) == [(0, 0), (1, 0), (6, 4), (7, 0)]
