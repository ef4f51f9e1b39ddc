"""`slagate.v1.Gateway`, the service for operators, and the listeners for operators and probes."""

import os
from collections import Counter as Counts
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from slagate.pools.fleet.fleet import Fleet
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.pairing import PairStatus, pair_statuses
from slagate.pools.fleet.pool import Pool
from slagate.pools.fleet_file.models import ADMISSION_MODES, AdmissionMode
from slagate.pools.grid.errors import ConfigError
from slagate.pools.grid.grid import StageGrid
from slagate.pools.inflight.row_view import State
from slagate.pools.inflight.shared_counts import PoolCell
from slagate.pools.kv_events.view import EventMode
from slagate.proto import gateway_pb2 as gw
from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.proto.rpc.address import Address
from slagate.proto.rpc.status import abort
from slagate.router.receipts.feedback import accuracies
from slagate.router.receipts.messages import WIRE_STAGE, decision_steps
from slagate.router.receipts.ring import ReceiptRing
from slagate.router.reload.reload import FleetSource, NothingBefore, Reloader
from slagate.router.request.errors import GatewayError
from slagate.router.request.request import output_budget, parse_request
from slagate.router.request.settings import Settings
from slagate.router.request.sla import parse_sla
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.score import RoutingRequest
from slagate.workers.runtime.cooperative import run_cooperatively
from slagate.workers.runtime.listen import bind, given_by, ready_line
from slagate.workers.runtime.probes import serve_probes
from slagate.workers.tls.reloading import ServerTls


class Listeners(NamedTuple):
    """The addresses that a gateway listens on, each named as its command-line option."""

    listen: Address  # for clients
    admin: Address  # for operators
    http: Address  # for probes

    def on_port(self, port: int) -> "Listeners":
        """The same with this port for clients."""
        return self._replace(listen=self.listen._replace(port=port))

    def print_ready_line(self, **fields: list[int]) -> None:
        """Print the ready line with these addresses and `fields`; call it once all of them are bound."""
        addresses = {name: str(address) for name, address in self._asdict().items()}
        ready_line(**addresses, pid=os.getpid(), **fields)


@contextmanager
def operators_listening(
    server: grpc.aio.Server,
    listeners: Listeners,
    tls: ServerTls | None,
    *,
    registry: CollectorRegistry,
    not_ready: Callable[[], str],
) -> Iterator[Listeners]:
    """Bind `server` to the admin address, and serve probes within the `with`; yields the bound addresses.

    Raises `OSError` for an address that cannot be bound.
    """
    credentials = None if tls is None else tls.grpc_credentials()
    with given_by("--admin"):
        admin = bind(server, listeners.admin, credentials)
    with ExitStack() as stack:
        with given_by("--http"):
            probes = serve_probes(*listeners.http, registry=registry, not_ready=not_ready)
            port = stack.enter_context(probes)
        yield listeners._replace(admin=admin, http=listeners.http._replace(port=port))


ROLLBACK_ALONE = (
    grpc.StatusCode.INVALID_ARGUMENT,
    "rollback: goes back to what was in force before, so fleet cannot be given with it",
)


class ReloadService(gw_grpc.GatewayServicer):
    """What changes a gateway that runs, the same for one of one process and of several."""

    def __init__(self, reloader: Reloader, source: FleetSource) -> None:
        self._reloader = reloader
        self._source = source

    async def Reload(self, request: Any, context: Any) -> gw.ReloadResponse:
        """Put another configuration, or the one before, in force; a response with problems says why not."""
        reloader, dry_run = self._reloader, request.dry_run
        read = self._source.read
        if request.HasField("fleet"):
            read = partial(self._source.parse, request.fleet)
            if request.rollback:
                await abort(context, *ROLLBACK_ALONE)
        try:
            if request.rollback:
                result = await reloader.roll_back(dry_run=dry_run)
            else:
                result = await reloader.reload(read, dry_run=dry_run)
        except NothingBefore as error:
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, f"rollback: {error}")
        except ConfigError as error:
            version = reloader.version
            problems = [gw.Problem(path=each.path, reason=each.message) for each in error.problems]
            return gw.ReloadResponse(version=version, previous_version=version, problems=problems)
        return gw.ReloadResponse(**result._asdict(), applied=result.applied)

    async def SetAdmission(self, request: Any, context: Any) -> gw.SetAdmissionResponse:
        """Put another admission mode in force, until the next reload sets that of the fleet file again."""
        mode: AdmissionMode = request.mode
        if mode not in ADMISSION_MODES:
            allowed = ", ".join(ADMISSION_MODES)
            reason = f"mode: must be one of {allowed} (got {mode[:40]!r})"
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, reason)
        previous = await self._set_admission(mode)
        return gw.SetAdmissionResponse(mode=mode, previous_mode=previous)

    async def _set_admission(self, mode: AdmissionMode) -> AdmissionMode:
        """Put the mode in force; returns the one that was before."""
        raise NotImplementedError


class AdminService(ReloadService):
    """`slagate.v1.Gateway`, for a gateway of one process."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: Settings,
        *,
        reloader: Reloader,
        source: FleetSource,
        receipts: ReceiptRing,
        now_s: Callable[[], float],
    ) -> None:
        super().__init__(reloader, source)
        self._dispatcher = dispatcher
        self._settings = settings
        self._receipts = receipts
        self._now_s = now_s

    @property
    def _fleet(self) -> Fleet:
        return self._dispatcher.fleet

    async def _set_admission(self, mode: AdmissionMode) -> AdmissionMode:
        previous = self._dispatcher.admission
        self._dispatcher.set_admission(mode)
        return previous

    async def Explain(self, request: Any, context: Any) -> gw.Decision:
        """The decision for a request, checked as Generate checks it; nothing is sent or leased."""
        try:
            parsed = parse_request(
                request.request.SerializeToString(), max_bytes=self._settings.max_request_bytes
            )
            sla = parse_sla(tuple(context.invocation_metadata() or ()))
            decision = self._dispatcher.explain(
                RoutingRequest(parsed.model, parsed.isl_tokens, sla), parsed.prompt
            )
            winners = [
                self._fleet.pools[choice.pool].members[choice.worker]
                for choice in decision.stages
                if choice.worker is not None
            ]
            budget = output_budget(parsed, [member.models.get(parsed.model) for member in winners])
        except GatewayError as error:
            await abort(context, *error.status())
        return await run_cooperatively(
            decision_steps(decision, request_id=parsed.id, max_tokens=budget)
        )

    async def ListPools(self, request: Any, context: Any) -> gw.ListPoolsResponse:
        """The load and counts of every pool, how it is scheduled, and the configuration's version."""
        scheduling, statuses = self._fleet.scheduling, pair_statuses(self._fleet.members())
        n_unpaired = Counts(member.pool for member, status in statuses.items() if status.problem)
        return gw.ListPoolsResponse(
            pools=[
                _pool_status(pool, self._fleet.grids[pool.stage], n_unpaired[pool.name])
                for pool in self._fleet.pools.values()
            ],
            warnings=self._fleet.warnings,
            max_attempts=self._settings.max_attempts,
            waiting_requests=self._dispatcher.n_waiting,
            policy=self._settings.policy,
            config_version=self._reloader.version,
            config_age_s=self._now_s() - self._reloader.since_s,
            admission=self._dispatcher.admission,
            file_admission=scheduling.admission,
            spill=scheduling.spill,
            bypass=scheduling.bypass,
        )

    async def ListWorkers(self, request: Any, context: Any) -> gw.ListWorkersResponse:
        """The health, leases and last reported load of every worker, those that drain included."""
        now_s, statuses = self._now_s(), pair_statuses(self._fleet.members())
        return gw.ListWorkersResponse(
            workers=[
                _worker_status(member, now_s, statuses.get(member))
                for member in self._fleet.all_members()
            ]
        )

    async def ListCells(self, request: Any, context: Any) -> gw.ListCellsResponse:
        """Counts of ended requests for each grid cell that had any, and the configuration in force.

        `requests` were decided under that configuration; `judged` of them had a target, which `met` of
        these met; `failed` ended in the cell's stage by a fault of the fleet or of the gateway.
        """
        attainment = self._receipts.attainment
        return gw.ListCellsResponse(
            cells=[
                gw.CellStatus(
                    stage=WIRE_STAGE[stage],
                    cell=index,
                    requests=traffic.n_requests,
                    judged=traffic.n_judged,
                    met=traffic.n_met,
                    failed=traffic.n_failed,
                )
                for (stage, index), traffic in attainment.cells.items()
            ],
            config_version=attainment.version,
            fleet=self._receipts.config.fleet,
        )

    async def WatchReceipts(
        self, request: Any, context: Any
    ) -> AsyncIterator[gw.WatchReceiptsResponse]:
        """The configuration in force, then full receipts, each after the configurations it needs."""
        in_force = self._receipts.config
        yield gw.WatchReceiptsResponse(config=in_force)
        sent = {in_force.version}
        limit = request.limit if request.HasField("limit") else None
        async for entry, missed in self._receipts.watch(limit=limit, follow=request.follow):
            for config in entry.configs:
                if config.version not in sent:
                    sent.add(config.version)
                    yield gw.WatchReceiptsResponse(config=config)
            receipt = await run_cooperatively(entry.receipt())
            yield gw.WatchReceiptsResponse(receipt=receipt, missed=missed)


def _pool_status(pool: Pool, grid: StageGrid, n_unpaired: int) -> gw.PoolStatus:
    members = list(pool.members.values())
    return gw.PoolStatus(
        name=pool.name,
        stage=WIRE_STAGE[pool.stage],
        index=pool.index,
        workers=len(members),
        workers_draining=sum(1 for _ in pool.all_members) - len(members),
        workers_ready=sum(member.state is State.READY for member in members),
        workers_unpaired=n_unpaired,
        inflight=sum(member.ranks.inflight for member in members),
        queued_tokens=sum(member.ranks.queued_tokens for member in members),
        estimator=pool.estimator.frozen.source,
        requests_total=pool.table.totals[PoolCell.REQUESTS],
        retries_total=pool.table.totals[PoolCell.RETRIES],
        spills_total=pool.table.totals[PoolCell.SPILLS],
        pool_order=[grid.pool_names[index] for index in grid.retry_order(pool.index)],
        ttft=_predictions(pool, "ttft"),
        itl=_predictions(pool, "itl"),
    )


def _predictions(pool: Pool, latency: str) -> gw.Predictions | None:
    """How right the pool's predictions of a latency were; None: it is not the pool's."""
    for name, accuracy, share in accuracies(pool):
        if name == latency:
            told = gw.Predictions(basis=accuracy.basis)
            if (figures := accuracy.figures(share)) is not None:
                told.pairs, told.bias, told.median_error, told.coverage = figures
            if accuracy.calibration is not None:
                told.spread = accuracy.calibration.spread
            return told
    return None


def _worker_status(member: Member, now_s: float, pairing: PairStatus | None) -> gw.WorkerStatus:
    status = gw.WorkerStatus(
        worker=member.address,
        pool=member.pool,
        stage=WIRE_STAGE[member.stage],
        state=member.state.value,
        reason=member.reason,
        models=sorted(member.models),
        inflight=member.ranks.inflight,
        queued_tokens=member.ranks.queued_tokens,
    )
    if (server := member.server_info) is not None:
        status.instance_id = server.instance_id
        status.engine = f"{server.engine_name} {server.engine_version}".strip()
        status.kv_transfer_backend = server.kv_connector.transfer_backend
    if pairing is not None:
        status.pairs_with, status.pair_problem = pairing
    if member.load is not None:
        status.load.CopyFrom(member.load)
        status.load_age_ms = (now_s - member.load_at_s) * 1000
    events = member.events
    if events is not None:
        status.events_mode, status.events_reason = events.mode.value, events.reason
        if events.mode not in (EventMode.OFF, EventMode.NONE):
            status.event_lag_ms = events.lag_s * 1000
            status.index_blocks = events.n_blocks
    error = member.prefix_error
    if error.n_requests:
        status.prefix.predicted_tokens = error.predicted_tokens
        status.prefix.engine_cached_tokens = error.engine_cached_tokens
        status.prefix.abs_error_tokens = error.abs_error_tokens
        status.prefix.requests = error.n_requests
    return status
