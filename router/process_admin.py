"""`slagate.v1.Gateway` for a gateway of several processes: what operators ask, of all of them.

Leases, queues and counts are summed; of what each process sees for itself (health, index, error of its
predictions) the worst is shown. A process that has just ended, or does not answer in time, has no part.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import anyio
import grpc
import grpc.aio

from slagate.pools.shared_counts import PoolCell, SharedCounts
from slagate.pools.table import State
from slagate.proto import gateway_pb2 as gw
from slagate.router.admin import ReloadService
from slagate.router.process_receipts import watch_all
from slagate.router.reload import Reloader, Source
from slagate.router.supervisor import Child, Supervisor

ASK_LIMIT_S = 2.0

_STAGES = {gw.STAGE_PREFILL: "prefill", gw.STAGE_DECODE: "decode", gw.STAGE_AGG: "agg"}
_NOBODY = (grpc.StatusCode.UNAVAILABLE, "no process of the gateway answers")


class WholeGateway(ReloadService):
    """Asks every process that runs, and puts the answers together."""

    def __init__(
        self,
        supervisor: Supervisor,
        counts: SharedCounts,
        *,
        reloader: Reloader,
        source: Source,
        now_s: Callable[[], float],
    ) -> None:
        super().__init__(reloader, source)
        self._supervisor = supervisor
        self._counts = counts
        self._now_s = now_s

    async def Explain(self, request: Any, context: Any) -> gw.Decision:
        """The decision of one process: it counts what all have under way, and has an index of its own."""
        metadata = [
            (key, value)
            for key, value in context.invocation_metadata() or ()
            if not key.startswith("grpc-") and key != "user-agent"
        ]
        for child in self._children():
            try:
                return await child.gateway.Explain(  # type: ignore[no-any-return]
                    request, metadata=metadata, timeout=ASK_LIMIT_S
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or self._is_there(child):
                    await context.abort(error.code(), error.details() or "")
        await context.abort(*_NOBODY)
        raise AssertionError("context.abort raises")

    async def ListPools(self, request: Any, context: Any) -> gw.ListPoolsResponse:
        """Every pool with its live numbers."""
        answers = await self._ask("ListPools", request, context)
        pools: dict[str, gw.PoolStatus] = {}
        for answer in answers:
            for pool in answer.pools:
                if pool.name in pools:
                    _add_pool(pools[pool.name], pool)
                else:
                    pools[pool.name] = pool
        for pool in pools.values():
            name = f"pool {_STAGES[pool.stage]} {pool.name}"
            pool.requests_total = self._counts.total(name, PoolCell.REQUESTS)
            pool.retries_total = self._counts.total(name, PoolCell.RETRIES)
            pool.spills_total = self._counts.total(name, PoolCell.SPILLS)
        return gw.ListPoolsResponse(
            pools=pools.values(),
            warnings=self._reloader.warnings,
            max_attempts=answers[0].max_attempts,
            waiting_requests=sum(answer.waiting_requests for answer in answers),
            policy=answers[0].policy,
            config_version=self._reloader.version,
            config_age_s=self._now_s() - self._reloader.since_s,
        )

    async def ListWorkers(self, request: Any, context: Any) -> gw.ListWorkersResponse:
        """Every worker with its health, leases and last report."""
        found: dict[tuple[object, ...], gw.WorkerStatus] = {}
        for answer in await self._ask("ListWorkers", request, context):
            for worker in answer.workers:
                key = worker.stage, worker.pool, worker.worker
                if key in found:
                    _add_worker(found[key], worker)
                else:
                    found[key] = worker
        return gw.ListWorkersResponse(workers=found.values())

    async def ListCells(self, request: Any, context: Any) -> gw.ListCellsResponse:
        """What became of the requests of each grid cell, and the configuration that has the grid."""
        cells: dict[tuple[object, ...], gw.CellStatus] = {}
        answers = await self._ask("ListCells", request, context)
        version = self._reloader.version
        # All but the moment of a reload are of one version.
        of_one = [each for each in answers if each.config_version == version] or answers[:1]
        for answer in of_one:
            for cell in answer.cells:
                sums = cells.setdefault(
                    (cell.stage, *cell.cell), gw.CellStatus(stage=cell.stage, cell=cell.cell)
                )
                for name in ("requests", "judged", "met", "failed"):
                    setattr(sums, name, getattr(sums, name) + getattr(cell, name))
        return gw.ListCellsResponse(
            cells=cells.values(), config_version=of_one[0].config_version, fleet=of_one[0].fleet
        )

    async def WatchReceipts(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """The configuration, then full receipts of all processes."""
        # No generator: its tasks would outlive it where the caller leaves between two items.
        await watch_all(self._supervisor, request, context.write)

    def _children(self) -> list[Child]:
        return [child for _, child in sorted(self._supervisor.running.items())]

    def _is_there(self, child: Child) -> bool:
        return child.process.returncode is None

    async def _ask(self, method: str, request: Any, context: Any) -> Sequence[Any]:
        """What each process answers, in the order of their numbers; at least one does."""
        found: dict[int, Any] = {}

        async def ask(child: Child) -> None:
            try:
                call = getattr(child.gateway, method)
                found[child.number] = await call(request, timeout=ASK_LIMIT_S)
            except grpc.aio.AioRpcError:
                pass  # has just ended, or hangs

        async with anyio.create_task_group() as tasks:
            for child in self._children():
                tasks.start_soon(ask, child)
        if not found:
            await context.abort(*_NOBODY)
        return [found[number] for number in sorted(found)]


def _add_pool(into: gw.PoolStatus, pool: gw.PoolStatus) -> None:
    into.inflight += pool.inflight
    into.queued_tokens += pool.queued_tokens
    into.workers_ready = min(into.workers_ready, pool.workers_ready)
    into.workers_draining = max(into.workers_draining, pool.workers_draining)
    _worst(into, pool, ("prefill_error", "itl_error"))


def _add_worker(into: gw.WorkerStatus, worker: gw.WorkerStatus) -> None:
    into.inflight += worker.inflight
    into.queued_tokens += worker.queued_tokens
    if into.state == State.READY.value != worker.state:
        into.state, into.reason = worker.state, worker.reason
    for name in ("instance_id", "engine", "kv_transfer_backend"):
        if not getattr(into, name):
            setattr(into, name, getattr(worker, name))
    if not into.models:
        into.models.extend(worker.models)
    if worker.HasField("load") and (
        not into.HasField("load") or worker.load_age_ms < into.load_age_ms
    ):
        into.load.CopyFrom(worker.load)
        into.load_age_ms = worker.load_age_ms
    if worker.events_reason and not into.events_reason:
        into.events_mode, into.events_reason = worker.events_mode, worker.events_reason
    _worst(into, worker, ("event_lag_ms", "index_blocks"))
    if worker.HasField("prefix"):
        for field in gw.PrefixTruth.DESCRIPTOR.fields:
            total = getattr(into.prefix, field.name) + getattr(worker.prefix, field.name)
            setattr(into.prefix, field.name, total)


def _worst(into: Any, other: Any, names: Iterable[str]) -> None:
    for name in names:
        if other.HasField(name):
            setattr(into, name, max(getattr(into, name), getattr(other, name)))
