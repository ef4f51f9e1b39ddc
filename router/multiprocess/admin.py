"""`slagate.v1.Gateway` for a gateway of several processes: what operators ask is asked of all of them.

Leases, queues and counts are summed; of what each process sees for itself (health, index, error of its
predictions) the worst is shown. A process that has just ended, or does not answer in time, has no part.
`watch_all` makes one stream of the receipts of all.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import grpc
import grpc.aio

from slagate.pools.inflight.rows import State
from slagate.pools.inflight.shared_counts import PoolCell, SharedCounts
from slagate.proto import gateway_pb2 as gw
from slagate.proto.rpc.status import abort
from slagate.router.multiprocess.supervisor import GatewayChild, Supervisor
from slagate.router.reload.reload import Reloader, Source
from slagate.router.services.admin import ReloadService

LOOK_AGAIN_S = 0.5
"""For the process that takes the place of one that has ended."""

Write = Callable[[gw.WatchReceiptsResponse], Awaitable[None]]


async def watch_all(supervisor: Supervisor, request: gw.WatchReceiptsRequest, write: Write) -> None:
    """Write what `WatchReceipts` of each process gives.

    Kept receipts come in the order in which their requests ended. A follower goes on with the process that
    takes the place of one that has ended, and the receipts which that one had not sent are lost.
    """
    children = list(supervisor.running.values())
    out = _Out(write)
    followers = [_Follower(supervisor, out, child) for child in children if request.follow]
    try:
        # Before the kept ones are asked for, so that none falls between the two.
        for follower in followers:
            await follower.wait_subscribed()
        kept: list[tuple[int, gw.WatchReceiptsResponse]] = []
        for child in children:
            kept += [(child.number, each) for each in await _kept(child, request)]
        receipts = [(number, each) for number, each in kept if each.HasField("receipt")]
        receipts.sort(key=lambda each: each[1].receipt.unix_s)
        if request.HasField("limit"):
            receipts = receipts[len(receipts) - min(len(receipts), request.limit) :]
        for _, each in kept:
            if each.HasField("config"):
                await out.write(each)
        for _, each in receipts:
            await out.write(each)
        newest = {number: each.receipt.number for number, each in kept if each.HasField("receipt")}
        async with anyio.create_task_group() as tasks:
            for follower in followers:
                tasks.start_soon(follower.run, newest.get(follower.number, 0))
    finally:
        for follower in followers:
            follower.cancel()


class _Out:
    """One writer at a time, and each configuration once.

    A reader that is too slow keeps the processes from sending: they count what it missed.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._told: set[str] = set()
        self._one_at_a_time = anyio.Lock()

    async def write(self, each: gw.WatchReceiptsResponse) -> None:
        if each.HasField("config"):
            if each.config.version in self._told:
                return
            self._told.add(each.config.version)
        async with self._one_at_a_time:
            await self._write(each)


class _Follower:
    """Passes on what one process sends, and those in its place after it."""

    def __init__(self, supervisor: Supervisor, out: _Out, child: GatewayChild) -> None:
        self.number = child.number
        self._supervisor = supervisor
        self._out = out
        self._child = child
        self._call = child.gateway.WatchReceipts(gw.WatchReceiptsRequest(follow=True, limit=0))

    async def wait_subscribed(self) -> None:
        """Wait until the process has it."""
        head = await _read(self._call)
        if head is not None:
            await self._out.write(head)

    async def run(self, newest: int) -> None:
        """Go on until all processes stop; `newest` is the number of a receipt that was sent already."""
        while True:
            while (each := await _read(self._call)) is not None:
                if each.HasField("config") or each.receipt.number > newest:
                    await self._out.write(each)
            while (child := self._supervisor.running.get(self.number)) in (None, self._child):
                if self._supervisor.stopping.is_set():
                    return
                with anyio.move_on_after(LOOK_AGAIN_S):
                    await self._supervisor.stopping.wait()
            assert child is not None
            self._child = child
            self._call = child.gateway.WatchReceipts(gw.WatchReceiptsRequest(follow=True))

    def cancel(self) -> None:
        """Nobody reads any more."""
        self._call.cancel()


async def _kept(
    child: GatewayChild, request: gw.WatchReceiptsRequest
) -> list[gw.WatchReceiptsResponse]:
    asked = gw.WatchReceiptsRequest()
    if request.HasField("limit"):
        asked.limit = request.limit
    call = child.gateway.WatchReceipts(asked)
    found = []
    try:
        while (each := await _read(call)) is not None:
            found.append(each)
    finally:
        call.cancel()
    return found


async def _read(call: Any) -> gw.WatchReceiptsResponse | None:
    """The next one; None: there is none, or the process has ended."""
    with suppress(grpc.aio.AioRpcError):
        each = await call.read()
        return None if each is grpc.aio.EOF else each
    return None


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
                    await abort(context, error.code(), error.details() or "")
        await abort(context, *_NOBODY)

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

    def _children(self) -> list[GatewayChild]:
        return [child for _, child in sorted(self._supervisor.running.items())]

    def _is_there(self, child: GatewayChild) -> bool:
        return child.process.returncode is None

    async def _ask(self, method: str, request: Any, context: Any) -> Sequence[Any]:
        """What each process answers, in the order of their numbers; at least one does."""
        found: dict[int, Any] = {}

        async def ask(child: GatewayChild) -> None:
            try:
                call = getattr(child.gateway, method)
                found[child.number] = await call(request, timeout=ASK_LIMIT_S)
            except grpc.aio.AioRpcError:
                pass  # has just ended, or hangs

        async with anyio.create_task_group() as tasks:
            for child in self._children():
                tasks.start_soon(ask, child)
        if not found:
            await abort(context, *_NOBODY)
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
