"""`slagate.v1.Gateway`: what operators ask, on a listener of its own."""

from collections.abc import Callable, Iterator
from typing import Any

from slagate.pools.fleet import Fleet
from slagate.pools.grid import StageGrid
from slagate.pools.member import Member, State
from slagate.pools.pool import Pool
from slagate.proto import gateway_pb2 as gw
from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.router.dispatch import Dispatcher
from slagate.router.errors import RequestError
from slagate.router.policy import Ask, Decision
from slagate.router.receipts import WIRE_STAGE, decision_message
from slagate.router.request import output_budget, parse_request
from slagate.router.settings import Settings
from slagate.router.sla import parse_sla


class AdminService(gw_grpc.GatewayServicer):
    """Reads the fleet; changes nothing."""

    def __init__(
        self, dispatcher: Dispatcher, settings: Settings, *, now_s: Callable[[], float]
    ) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self._now_s = now_s

    @property
    def _fleet(self) -> Fleet:
        return self._dispatcher.fleet

    async def Explain(self, request: Any, context: Any) -> gw.Decision:
        """The decision for a request, checked as Generate checks it, with nothing sent or taken."""
        try:
            parsed = parse_request(
                request.request.SerializeToString(), max_bytes=self._settings.max_request_bytes
            )
            sla = parse_sla(tuple(context.invocation_metadata() or ()))
            decision = self._dispatcher.explain(Ask(parsed.model, parsed.isl_tokens, sla))
            infos = [member.models.get(parsed.model) for member in self._winners(decision)]
            budget = output_budget(parsed, infos)
        except RequestError as error:
            await context.abort(*error.status())
            raise AssertionError("context.abort raises") from error
        return decision_message(decision, request_id=parsed.id, max_tokens=budget, top=None)

    def _winners(self, decision: Decision) -> Iterator[Member]:
        for choice in decision.stages:
            if choice.winner is not None:
                yield self._fleet.pools[choice.pool].members[choice.winner.view.address]

    async def ListPools(self, request: Any, context: Any) -> gw.ListPoolsResponse:
        """Every pool with its live numbers."""
        return gw.ListPoolsResponse(
            pools=[
                _pool_status(pool, self._fleet.grids[pool.stage])
                for pool in self._fleet.pools.values()
            ],
            warnings=self._fleet.warnings,
            max_attempts=self._settings.max_attempts,
        )

    async def ListWorkers(self, request: Any, context: Any) -> gw.ListWorkersResponse:
        """Every worker with its health, leases and last report."""
        now_s = self._now_s()
        return gw.ListWorkersResponse(
            workers=[_worker_status(member, now_s) for member in self._fleet.members()]
        )


def _pool_status(pool: Pool, grid: StageGrid) -> gw.PoolStatus:
    members = list(pool.members.values())
    return gw.PoolStatus(
        name=pool.name,
        stage=WIRE_STAGE[pool.stage],
        index=pool.index,
        workers=len(members),
        workers_ready=sum(member.state is State.READY for member in members),
        inflight=sum(member.inflight for member in members),
        queued_tokens=sum(member.queued_tokens for member in members),
        estimator=pool.estimator.source,
        requests_total=pool.requests_total,
        retries_total=pool.retries_total,
        spills_total=pool.spills_total,
        pool_order=[grid.pool_names[index] for index in grid.retry_order(pool.index)],
    )


def _worker_status(member: Member, now_s: float) -> gw.WorkerStatus:
    status = gw.WorkerStatus(
        worker=member.address,
        pool=member.pool,
        stage=WIRE_STAGE[member.stage],
        state=member.state.value,
        reason=member.reason,
        models=sorted(member.models),
        inflight=member.inflight,
        queued_tokens=member.queued_tokens,
    )
    if member.info is not None:
        status.instance_id = member.info.instance_id
        status.engine = f"{member.info.engine_name} {member.info.engine_version}".strip()
        status.kv_transfer_backend = member.info.kv_connector.transfer_backend
    if member.load is not None:
        status.load.CopyFrom(member.load)
        status.load_age_ms = (now_s - member.load_at_s) * 1000
    return status
