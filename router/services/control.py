"""OpenEngine's `Control` service for clients: to them the gateway looks like one aggregated engine.

Calls that would show other tenants' tokens, or touch their requests, are not offered.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc

from slagate.pools.fleet.fleet import Fleet
from slagate.pools.grid.grid import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.proto import openengine_pb2_grpc as oe_grpc
from slagate.proto.rpc.status import abort
from slagate.router.request.errors import Aborted
from slagate.router.request.metadata import PEER
from slagate.router.request.running import RunningRequests
from slagate.router.scheduling.peers import PeerGateways
from slagate.workers.worker import SCHEMA_RELEASE

ABORTED = "aborted by the client"


class ControlService(oe_grpc.ControlServicer):
    """`openengine.v1.Control` for clients, about the fleet as if it were one engine."""

    def __init__(
        self,
        fleet: Fleet,
        running: RunningRequests,
        *,
        instance_id: str,
        version: str,
        not_ready: Callable[[], str],
        peers: PeerGateways,
    ) -> None:
        self._peers = peers
        self._fleet = fleet
        self._running = running
        self._instance_id = instance_id
        self._version = version
        self._not_ready = not_ready

    async def GetServerInfo(self, request: Any, context: Any) -> oe.ServerInfo:
        """The gateway as one aggregated engine, with all models of the fleet."""
        return oe.ServerInfo(
            engine_name="slagate",
            engine_version=self._version,
            engine_role=oe.ENGINE_ROLE_AGGREGATED,
            instance_id=self._instance_id,
            supported_models=sorted(self._fleet.models()),
            schema_revision=1,
            minimum_client_revision=1,
            schema_release=SCHEMA_RELEASE,
        )

    async def GetModelInfo(self, request: Any, context: Any) -> oe.ModelInfo:
        """What every worker of the model can do: the shortest context, the features that all have."""
        members = [one for one in self._fleet.serving_members() if request.model in one.models]
        infos = [member.models[request.model] for member in members]
        # Decode workers see no prompt.
        prompted = [m.models[request.model] for m in members if m.stage is not Stage.DECODE]
        if not infos:
            reason = f"model: {request.model[:100]!r} is not served here"
            await abort(context, grpc.StatusCode.NOT_FOUND, reason)
        offers = [each.generation for each in infos]
        info = oe.ModelInfo(
            model_id=infos[0].model_id,
            served_model_name=request.model,
            supports_text_input=False,
            supports_token_ids_input=True,
            supports_lora=all(i.supports_lora for i in infos),
            supports_multimodal=False,
            generation=oe.GenerationCapabilities(
                prompt_logprobs=_logprobs([i.generation.prompt_logprobs for i in prompted]),
                output_logprobs=_logprobs([each.output_logprobs for each in offers]),
                max_num_sequences=1,
                supports_priority=True,
                supports_stop_in_output=all(each.supports_stop_in_output for each in offers),
                supports_cache_salt=all(each.supports_cache_salt for each in offers),
                supports_prefix_cache_bypass=all(e.supports_prefix_cache_bypass for e in offers),
            ),
        )
        windows = [i.max_context_length for i in infos if i.HasField("max_context_length")]
        if windows:
            info.max_context_length = min(windows)
        return info

    async def GetLoad(self, request: Any, context: Any) -> oe.LoadInfo:
        """How many requests the gateway is serving, its peers included."""
        n_running = len(self._running) + self._peers.n_running
        return oe.LoadInfo(instance_id=self._instance_id, running_requests=n_running)

    async def Health(self, request: Any, context: Any) -> oe.HealthResponse:
        """READY while every stage has a ready worker and the gateway is not draining."""
        down = self._fleet.unready_stages()
        checks = [
            oe.HealthCheck(
                name=stage.value,
                state=oe.HEALTH_STATE_NOT_READY if stage in down else oe.HEALTH_STATE_READY,
            )
            for stage in self._fleet.stages
        ]
        reason = self._not_ready()
        state = oe.HEALTH_STATE_NOT_READY if reason else oe.HEALTH_STATE_READY
        checks.insert(0, oe.HealthCheck(name="grpc", state=state, message=reason))
        return oe.HealthResponse(state=state, checks=checks)

    async def Abort(self, request: Any, context: Any) -> oe.AbortResponse:
        """End the running requests with an id that came on the caller's own connection."""
        target = request.WhichOneof("target")
        if target is None:
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, "target: none is given")
        if target != "request_id":
            await abort(
                context,
                grpc.StatusCode.PERMISSION_DENIED,
                f"{target}: a client may abort its own requests only, by request_id",
            )
        peer = _peer(context)
        found = self._running.abort(peer, request.request_id, Aborted(ABORTED))
        if not found and not await self._peers.abort(peer, request.request_id):
            await abort(
                context,
                grpc.StatusCode.NOT_FOUND,
                "request_id: no running request of this connection has it",
            )
        return oe.AbortResponse(status=oe.ABORT_STATUS_ABORTED)

    async def _refuse(self, request: Any, context: Any) -> NoReturn:
        await abort(context, grpc.StatusCode.UNIMPLEMENTED, "is not offered to clients")

    LoadLora = UnloadLora = ListLoras = _refuse
    GetKvEventSources = _refuse
    SubscribeKvEvents = _refuse  # type: ignore[assignment]  # refuses before any event


def _logprobs(offers: Sequence[oe.LogprobCapabilities]) -> oe.LogprobCapabilities:
    """What every worker offers, with the smallest of their limits."""
    of_all = oe.LogprobCapabilities(
        supported=bool(offers) and all(offer.supported for offer in offers)
    )
    if of_all.supported:
        modes = [set(offer.candidate_selection_modes) for offer in offers]
        of_all.candidate_selection_modes.extend(sorted(modes[0].intersection(*modes[1:])))
        limits = [offer.max_top_n for offer in offers if offer.HasField("max_top_n")]
        if limits:
            of_all.max_top_n = min(limits)
    return of_all


def _peer(context: Any) -> str:
    """The client that called: the front says so, and nobody else can reach this server."""
    return str(dict(context.invocation_metadata() or ()).get(PEER, ""))
