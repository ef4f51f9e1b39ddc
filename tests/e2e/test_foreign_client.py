"""A client made only from the published tables calls a gateway and a worker, and gets what they promise."""

from typing import Any

import grpc
import pytest

from support.engine.tokens import expected, prompt
from support.gateway.foreign_client import Client, endless, prefill_leg, read, read_tokens, request
from support.gateway.processes import MODEL, Cluster, eventually
from support.openengine_tables import tables

SCHEMA_RELEASE = "768a93c7b44e40f28c692ad0b471a8f2"


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code(), raised.value.details() or ""


def name_of(message: Any, field: str) -> str:
    """The name of an enum field's value."""
    enum = message.DESCRIPTOR.fields_by_name[field].enum_type
    return str(enum.values_by_number[getattr(message, field)].name)


def test_the_gateway_presents_itself_as_one_aggregated_engine(client: Client) -> None:
    info = client.control("GetServerInfo")
    assert info.engine_name == "slagate"
    assert name_of(info, "engine_role") == "ENGINE_ROLE_AGGREGATED"
    assert list(info.supported_models) == [MODEL]
    assert (info.schema_revision, info.minimum_client_revision) == (1, 1)
    assert info.schema_release == SCHEMA_RELEASE
    assert not info.HasField("kv_connector")


def test_the_gateway_describes_its_model(disagg_client: Client) -> None:
    info = disagg_client.control("GetModelInfo", model=MODEL)
    assert info.model_id == MODEL
    assert info.max_context_length == 32_768
    assert info.supports_token_ids_input
    assert not info.supports_text_input
    assert info.generation.max_num_sequences == 1


def test_the_gateway_does_not_describe_a_model_it_does_not_serve(client: Client) -> None:
    code, details = refusal(lambda: client.control("GetModelInfo", model="nobody"))
    assert code is grpc.StatusCode.NOT_FOUND
    assert details.startswith("model:")


def test_the_gateway_says_that_it_is_ready(client: Client) -> None:
    assert name_of(client.control("Health"), "state") == "HEALTH_STATE_READY"


def test_the_gateway_counts_the_requests_it_is_serving(client: Client) -> None:
    eventually(lambda: client.load().running_requests == 0, "what other tests left is over")
    call = client.start(endless(prompt(50)))
    read_tokens(call, 1)
    assert client.load().running_requests == 1
    call.cancel()
    eventually(lambda: client.load().running_requests == 0, "the cancelled request is gone")


@pytest.mark.parametrize("method", ["LoadLora", "UnloadLora", "ListLoras", "GetKvEventSources"])
def test_what_would_show_other_tenants_is_not_offered(client: Client, method: str) -> None:
    code, _ = refusal(lambda: client.control(method))
    assert code is grpc.StatusCode.UNIMPLEMENTED


def test_kv_events_are_not_offered_to_clients(client: Client) -> None:
    events = client.subscribe()
    assert refusal(lambda: next(events))[0] is grpc.StatusCode.UNIMPLEMENTED


def test_a_client_may_not_abort_everything(client: Client) -> None:
    call = client.start(request(prompt(50), 30))
    code, details = refusal(lambda: client.control("Abort", all_requests=tables()["AllRequests"]()))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "all_requests" in details
    assert read(call).tokens == expected(prompt(50), 30)


def test_a_client_may_not_abort_a_session(client: Client) -> None:
    session = tables()["KvSessionRef"](session_id="1")
    assert refusal(lambda: client.control("Abort", kv_session=session))[0] is (
        grpc.StatusCode.PERMISSION_DENIED
    )


def test_an_abort_needs_a_target(client: Client) -> None:
    code, details = refusal(lambda: client.control("Abort"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "target" in details


def test_a_client_aborts_its_own_request_and_nobody_elses(either: Cluster) -> None:
    with Client(either.gateway.address) as owner, Client(either.gateway.address) as other:
        call = owner.start(request(prompt(50), request_id="mine"))
        read_tokens(call, 3)
        code, details = refusal(lambda: other.control("Abort", request_id="mine"))
        assert code is grpc.StatusCode.NOT_FOUND
        assert "request_id" in details
        answer = owner.control("Abort", request_id="mine")
        assert name_of(answer, "status") == "ABORT_STATUS_ABORTED"
        ended = read(call)
        assert ended.code is grpc.StatusCode.CANCELLED
        assert "finished" not in ended.events
        assert refusal(lambda: owner.control("Abort", request_id="mine"))[0] is (
            grpc.StatusCode.NOT_FOUND
        )
    eventually(either.gateway.is_idle, "nothing is leased")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv": {"session": {"session_id": "1"}}}, "kv.session"),
        ({"kv": {"session": {}}}, "kv.session"),
        ({"extra": {"request_type": "context_only"}}, "extra.request_type"),
        ({"extra": {"request_type": "context_and_generation"}}, "extra.request_type"),
        ({"extra": {"request_type": None}}, "extra.request_type"),
    ],
    ids=repr,
)
def test_what_the_gateway_sets_a_client_may_not(
    client: Client, change: dict[str, Any], field: str
) -> None:
    answer = client.generate(request(prompt(50), 5, **change))
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.details.startswith(f"{field}:")
    assert answer.events == []


def test_an_aggregated_worker_serves_the_client_directly(agg: Cluster) -> None:
    with Client(agg.addresses("a")[0]) as worker:
        assert name_of(worker.control("GetServerInfo"), "engine_role") == "ENGINE_ROLE_AGGREGATED"
        assert name_of(worker.control("Health"), "state") == "HEALTH_STATE_READY"
        assert worker.control("GetModelInfo", model=MODEL).max_context_length == 131_072
        answer = worker.generate(request(prompt(70), 12, request_id="direct"))
    assert answer.tokens == expected(prompt(70), 12)
    assert answer.request_ids == {"direct"}


def test_a_worker_says_its_role_and_its_transfer_backend(disagg: Cluster) -> None:
    for pool, role in (("p", "PREFILL"), ("d", "DECODE")):
        with Client(disagg.addresses(pool)[0]) as worker:
            info = worker.control("GetServerInfo")
        assert name_of(info, "engine_role") == f"ENGINE_ROLE_{role}"
        assert info.kv_connector.transfer_backend == disagg.workers[pool][0].ready["kv_transport"]
        assert info.instance_id == disagg.workers[pool][0].ready["instance_id"]


def test_a_parked_session_is_seen_in_the_load_and_can_be_released(disagg: Cluster) -> None:
    with Client(disagg.addresses("p")[0]) as worker:
        # The worker hears of a handoff that was pulled when it next asks, so the test before may show.
        eventually(lambda: worker.load().active_kv_sessions == 0, "no session is parked")
        session = worker.generate(prefill_leg(request(prompt(40), 5))).session
        assert worker.load().active_kv_sessions == 1
        released = worker.control("Abort", kv_session=session)
        assert name_of(released, "status") == "ABORT_STATUS_ABORTED"
        assert worker.load().active_kv_sessions == 0
