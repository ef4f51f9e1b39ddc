"""The control face to clients, without a network."""

import anyio
import grpc
import pytest

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.grid.grid import Stage
from slagate.pools.inflight.engine_queue import Work
from slagate.proto import openengine_pb2 as oe
from slagate.router.request import errors
from slagate.router.request.metadata import PEER
from slagate.router.request.running import RunningRequests
from slagate.router.scheduling.peers import PeerGateways
from slagate.router.services.control import ControlService
from slagate.workers.runtime.virtual_loop import run
from support.builders import MODEL, config, fleet, model_info
from support.gateway.context import Aborted, Context
from support.gateway.running import listed

Code = grpc.StatusCode


def control(
    of: Fleet, *, reason: str | None = None, live: RunningRequests | None = None
) -> ControlService:
    """Ready as the fleet is, unless `reason` says why not."""

    def not_ready() -> str:
        if reason is not None:
            return reason
        return ", ".join(f"no {stage.value} worker is ready" for stage in of.unready_stages())

    return ControlService(
        of,
        live or RunningRequests(),
        instance_id="i",
        version="1",
        not_ready=not_ready,
        peers=PeerGateways(),
    )


def test_to_clients_the_fleet_is_one_aggregated_engine() -> None:
    of = fleet()
    info = run(control(of).GetServerInfo, oe.GetServerInfoRequest(), Context())
    assert info.engine_role == oe.ENGINE_ROLE_AGGREGATED
    assert list(info.supported_models) == [MODEL]
    assert not info.HasField("kv_connector")


def test_a_model_can_do_what_its_least_worker_can() -> None:
    of = fleet()
    windows = iter([9000, 4000, 8000, 7000])
    for member in of.members():
        member.set_models({MODEL: model_info()})
        member.models[MODEL].max_context_length = next(windows)
    model = run(control(of).GetModelInfo, oe.GetModelInfoRequest(model=MODEL), Context())
    assert model.max_context_length == 4000
    assert model.generation.supports_priority
    with pytest.raises(Aborted) as caught:
        run(control(of).GetModelInfo, oe.GetModelInfoRequest(model="x"), Context())
    assert caught.value.code is Code.NOT_FOUND


def test_a_fleet_whose_workers_are_all_replaced_says_what_the_old_ones_can_do() -> None:
    of = fleet("agg")
    for member in of.members():
        member.set_models({MODEL: model_info(window=4000)})
    held = of.pools["agg"].lease(0, Work())
    of.apply(prepare(config("agg", {"agg": {"workers": ["a8:1", "a9:1"]}})))
    asked = oe.GetModelInfoRequest(model=MODEL)
    assert run(control(of).GetModelInfo, asked, Context()).max_context_length == 4000
    assert run(control(of).Health, oe.HealthRequest(), Context()).state == oe.HEALTH_STATE_READY
    for member in of.members():
        member.set_models({MODEL: model_info(window=6000)})
        member.probe_ok()
    assert run(control(of).GetModelInfo, asked, Context()).max_context_length == 6000
    held.release()


def test_health_names_the_stage_that_is_down() -> None:
    of = fleet()
    ready = run(control(of).Health, oe.HealthRequest(), Context())
    assert ready.state == oe.HEALTH_STATE_READY
    for member in of.pools["decode"].members.values():
        member.refuse("gone")
    down = run(control(of).Health, oe.HealthRequest(), Context())
    assert down.state == oe.HEALTH_STATE_NOT_READY
    states = {check.name: check.state for check in down.checks}
    assert states[Stage.DECODE.value] == oe.HEALTH_STATE_NOT_READY
    assert states[Stage.PREFILL.value] == oe.HEALTH_STATE_READY


@pytest.mark.parametrize(
    ("target", "code"),
    [
        (oe.AbortRequest(), Code.INVALID_ARGUMENT),
        (oe.AbortRequest(all_requests=oe.AllRequests()), Code.PERMISSION_DENIED),
        (oe.AbortRequest(kv_session=oe.KvSessionRef(session_id="1")), Code.PERMISSION_DENIED),
        (oe.AbortRequest(request_id="somebody's"), Code.NOT_FOUND),
    ],
)
def test_a_client_can_abort_only_its_own(target: oe.AbortRequest, code: grpc.StatusCode) -> None:
    with pytest.raises(Aborted) as caught:
        run(control(fleet()).Abort, target, Context())
    assert caught.value.code is code


@pytest.mark.parametrize(
    "method", ["LoadLora", "UnloadLora", "ListLoras", "GetKvEventSources", "SubscribeKvEvents"]
)
def test_what_would_show_other_tenants_is_not_offered(method: str) -> None:
    with pytest.raises(Aborted) as caught:
        run(getattr(control(fleet()), method), None, Context())
    assert caught.value.code is Code.UNIMPLEMENTED


def test_health_begins_with_the_gateway_itself() -> None:
    of = fleet()
    (grpc_check, *stages) = run(control(of).Health, oe.HealthRequest(), Context()).checks
    assert (grpc_check.name, grpc_check.message) == ("grpc", "")
    assert [check.name for check in stages] == ["prefill", "decode"]
    assert {check.state for check in (grpc_check, *stages)} == {oe.HEALTH_STATE_READY}


def test_a_gateway_that_drains_is_not_ready_although_every_worker_is() -> None:
    answer = run(control(fleet(), reason="draining").Health, oe.HealthRequest(), Context())
    assert answer.state == oe.HEALTH_STATE_NOT_READY
    assert [(check.name, check.state) for check in answer.checks] == [
        ("grpc", oe.HEALTH_STATE_NOT_READY),
        ("prefill", oe.HEALTH_STATE_READY),
        ("decode", oe.HEALTH_STATE_READY),
    ]
    assert answer.checks[0].message == "draining"


def test_a_feature_is_offered_only_where_every_worker_of_the_model_has_it() -> None:
    def model_of(*flags: bool) -> oe.ModelInfo:
        of = fleet("agg")
        for member, flag in zip(of.members(), flags, strict=True):
            info = model_info()
            info.supports_lora = flag
            info.generation.supports_stop_in_output = flag
            info.generation.supports_cache_salt = flag
            info.generation.supports_prefix_cache_bypass = flag
            member.set_models({MODEL: info})
        answer: oe.ModelInfo = run(
            control(of).GetModelInfo, oe.GetModelInfoRequest(model=MODEL), Context()
        )
        return answer

    for flags, wanted in (((True, True), True), ((True, False), False), ((False, True), False)):
        model = model_of(*flags)
        assert model.supports_lora == wanted
        assert model.generation.supports_stop_in_output == wanted
        assert model.generation.supports_cache_salt == wanted
        assert model.generation.supports_prefix_cache_bypass == wanted
        assert model.generation.max_num_sequences == 1


def test_logprobs_are_offered_as_far_as_every_worker_that_gives_them_goes() -> None:
    of = fleet()
    for number, member in enumerate(of.members()):
        info = model_info()
        offer = oe.LogprobCapabilities(
            supported=True,
            candidate_selection_modes=[oe.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N],
            max_top_n=20 - number,
        )
        info.generation.output_logprobs.CopyFrom(offer)
        info.generation.prompt_logprobs.CopyFrom(offer)
        # Decode sees no prompt, so what it says of prompts does not count.
        info.generation.prompt_logprobs.supported = member.stage is not Stage.DECODE
        member.set_models({MODEL: info})
    ask = oe.GetModelInfoRequest(model=MODEL)
    offered = run(control(of).GetModelInfo, ask, Context()).generation
    n_members = len(list(of.members()))
    assert offered.prompt_logprobs.supported
    assert offered.output_logprobs.supported
    assert offered.output_logprobs.max_top_n == 21 - n_members
    assert list(offered.output_logprobs.candidate_selection_modes) == [
        oe.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N
    ]
    next(iter(of.members())).models[MODEL].generation.output_logprobs.supported = False
    offered = run(control(of).GetModelInfo, ask, Context()).generation
    assert not offered.output_logprobs.supported
    assert not offered.output_logprobs.candidate_selection_modes


def test_a_clients_abort_ends_its_request_by_an_error_that_says_so() -> None:
    async def main() -> None:
        live = RunningRequests()
        ended: list[str] = []

        async def serve() -> None:
            with pytest.raises(errors.Aborted) as caught, listed(live, "me", "r"):
                await anyio.sleep_forever()
            ended.append(str(caught.value))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            await anyio.wait_all_tasks_blocked()
            service = control(fleet(), live=live)
            answer = await service.Abort(oe.AbortRequest(request_id="r"), Context((PEER, "me")))
            assert answer.status == oe.ABORT_STATUS_ABORTED
        assert ended == ["aborted by the client"]

    run(main)
