"""`slagate.v1.Gateway` for a gateway of several processes: what operators ask is asked of all of them.

Leases, queues and counts are summed; of what each process sees for itself (health, index, error of its
predictions) the worst is shown. A process that has just ended, or does not answer in time, is left out.
`watch_all` makes one stream of the receipts of all.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import anyio
import grpc
import grpc.aio

from slagate.pools.estimator.accuracy import BASES
from slagate.pools.fleet_file.models import AdmissionMode
from slagate.pools.inflight.row_view import State
from slagate.pools.inflight.shared_counts import PoolCell, SharedCounts
from slagate.proto import gateway_pb2 as gw
from slagate.proto.rpc.status import abort
from slagate.router.multiprocess.supervisor import GatewayChild, Supervisor
from slagate.router.receipts.messages import STAGE_OF_WIRE
from slagate.router.reload.reload import FleetSource, Reloader
from slagate.router.services.admin import ReloadService

ASK_LIMIT_S = 2.0
POLL_S = 0.5
"""How often a follower looks for the process that takes the place of one that has ended."""

_NOBODY = (grpc.StatusCode.UNAVAILABLE, "no process of the gateway answers")

_WORST: Mapping[str, Callable[[list[float]], float]] = {
    "bias": partial(max, key=abs),
    "median_error": max,
    "coverage": min,
    "spread": max,
}
"""Which of the figures of `Predictions` of several processes is shown."""

_T = TypeVar("_T")
Write = Callable[[gw.WatchReceiptsResponse], Awaitable[None]]


async def watch_all(supervisor: Supervisor, request: gw.WatchReceiptsRequest, write: Write) -> None:
    """Write the `WatchReceipts` responses of all processes, merged, to one reader.

    Kept receipts come in the order in which their requests ended. Where a process ends, the one that takes
    its place is followed on; receipts that the first had not sent are lost.
    """
    children = list(supervisor.running.values())
    out = _Writer(write)
    followers = [_Follower(supervisor, out, child) for child in children if request.follow]
    try:
        # Before the kept receipts are asked for, so that none falls between the two.
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


class _Writer:
    """Writes one response at a time, and each configuration once.

    While a reader is too slow the processes cannot send, and count what it missed.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._written: set[str] = set()  # versions of configurations
        self._one_at_a_time = anyio.Lock()

    async def write(self, each: gw.WatchReceiptsResponse) -> None:
        if each.HasField("config"):
            if each.config.version in self._written:
                return
            self._written.add(each.config.version)
        async with self._one_at_a_time:
            await self._write(each)


class _Follower:
    """Passes on the receipts of one process, and of those that take its place."""

    def __init__(self, supervisor: Supervisor, out: _Writer, child: GatewayChild) -> None:
        self.number = child.number
        self._supervisor = supervisor
        self._out = out
        self._child = child
        self._call = child.gateway.WatchReceipts(gw.WatchReceiptsRequest(follow=True, limit=0))

    async def wait_subscribed(self) -> None:
        """Wait until the process has the subscription: from now on no receipt is missed."""
        head = await _read(self._call)
        if head is not None:
            await self._out.write(head)

    async def run(self, newest: int) -> None:
        """Go on until all processes stop; receipts up to number `newest` were written already."""
        while True:
            while (each := await _read(self._call)) is not None:
                if each.HasField("config") or each.receipt.number > newest:
                    await self._out.write(each)
            while (child := self._supervisor.running.get(self.number)) in (None, self._child):
                if self._supervisor.stopping.is_set():
                    return
                with anyio.move_on_after(POLL_S):
                    await self._supervisor.stopping.wait()
            assert child is not None
            self._child = child
            self._call = child.gateway.WatchReceipts(gw.WatchReceiptsRequest(follow=True))

    def cancel(self) -> None:
        """End the subscription."""
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
    """The next response; None: there is none, or the process has ended."""
    with suppress(grpc.aio.AioRpcError):
        each = await call.read()
        return None if each is grpc.aio.EOF else each
    return None


class MultiprocessAdminService(ReloadService):
    """`slagate.v1.Gateway` for several processes: asks those that run, and merges the answers."""

    def __init__(
        self,
        supervisor: Supervisor,
        counts: SharedCounts,
        *,
        reloader: Reloader,
        source: FleetSource,
        now_s: Callable[[], float],
    ) -> None:
        super().__init__(reloader, source)
        self._supervisor = supervisor
        self._counts = counts
        self._now_s = now_s

    async def _set_admission(self, mode: AdmissionMode) -> AdmissionMode:
        previous = await self._supervisor.set_admission(mode)
        return previous or self._reloader.scheduling.admission

    async def Explain(self, request: Any, context: Any) -> gw.Decision:
        """The decision of one process, which knows the leases of all, and has its own prefix index."""
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
                is_running = child.process.returncode is None
                if error.code() is not grpc.StatusCode.UNAVAILABLE or is_running:
                    await abort(context, error.code(), error.details() or "")
        await abort(context, *_NOBODY)

    async def ListPools(self, request: Any, context: Any) -> gw.ListPoolsResponse:
        """The load and counts of every pool, summed over the processes; of errors the largest."""
        answers = await self._ask("ListPools", request, context)
        pools = _merged(
            [pool for answer in answers for pool in answer.pools], lambda pool: pool.name, _add_pool
        )
        for pool in pools:
            name = f"pool {STAGE_OF_WIRE[pool.stage].value} {pool.name}"
            pool.requests_total = self._counts.total(name, PoolCell.REQUESTS)
            pool.retries_total = self._counts.total(name, PoolCell.RETRIES)
            pool.spills_total = self._counts.total(name, PoolCell.SPILLS)
        return gw.ListPoolsResponse(
            pools=pools,
            warnings=self._reloader.warnings,
            max_attempts=answers[0].max_attempts,
            waiting_requests=sum(answer.waiting_requests for answer in answers),
            policy=answers[0].policy,
            admission=answers[0].admission,
            file_admission=answers[0].file_admission,
            spill=answers[0].spill,
            bypass=answers[0].bypass,
            config_version=self._reloader.version,
            config_age_s=self._now_s() - self._reloader.since_s,
        )

    async def ListWorkers(self, request: Any, context: Any) -> gw.ListWorkersResponse:
        """Every worker with the sum of its leases, its worst health and its newest load report."""
        answers = await self._ask("ListWorkers", request, context)
        workers = [worker for answer in answers for worker in answer.workers]
        return gw.ListWorkersResponse(
            workers=_merged(workers, lambda w: (w.stage, w.pool, w.worker), _add_worker)
        )

    async def ListCells(self, request: Any, context: Any) -> gw.ListCellsResponse:
        """The counts of `AdminService.ListCells`, summed over the processes."""
        answers = await self._ask("ListCells", request, context)
        version = self._reloader.version
        # All but the moment of a reload are of one version.
        of_one = [each for each in answers if each.config_version == version] or answers[:1]
        cells = _merged(
            [cell for answer in of_one for cell in answer.cells],
            lambda cell: (cell.stage, *cell.cell),
            lambda into, cell: _sum(into, cell, ("requests", "judged", "met", "failed")),
        )
        return gw.ListCellsResponse(
            cells=cells, config_version=of_one[0].config_version, fleet=of_one[0].fleet
        )

    async def WatchReceipts(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """The configuration, then full receipts of all processes."""
        # No generator: its tasks would outlive it where the caller leaves between two items.
        await watch_all(self._supervisor, request, context.write)

    def _children(self) -> list[GatewayChild]:
        return [child for _, child in sorted(self._supervisor.running.items())]

    async def _ask(self, method: str, request: Any, context: Any) -> Sequence[Any]:
        """The answers of the processes, in the order of their numbers; there is at least one."""
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


def _merged(
    items: Iterable[_T], key: Callable[[_T], object], add: Callable[[_T, _T], None]
) -> list[_T]:
    """Items of all processes, one for each key: `add` adds the others to the first."""
    found: dict[object, _T] = {}
    for item in items:
        first = found.setdefault(key(item), item)
        if first is not item:
            add(first, item)
    return list(found.values())


def _add_pool(into: gw.PoolStatus, pool: gw.PoolStatus) -> None:
    _sum(into, pool, ("inflight", "queued_tokens"))
    into.workers_ready = min(into.workers_ready, pool.workers_ready)
    into.workers_draining = max(into.workers_draining, pool.workers_draining)
    into.workers_unpaired = max(into.workers_unpaired, pool.workers_unpaired)
    for of, other in ((into.ttft, pool.ttft), (into.itl, pool.itl)):
        if other.basis:
            _add_predictions(of, other)


def _add_predictions(into: Any, other: Any) -> None:
    into.basis = [basis for basis in BASES if basis in (into.basis, other.basis)][-1]
    into.pairs += other.pairs
    for name, worst in _WORST.items():
        if found := [getattr(each, name) for each in (into, other) if each.HasField(name)]:
            setattr(into, name, worst(found))


def _add_worker(into: gw.WorkerStatus, worker: gw.WorkerStatus) -> None:
    _sum(into, worker, ("inflight", "queued_tokens"))
    if into.state == State.READY.value != worker.state:
        into.state, into.reason = worker.state, worker.reason
    if worker.HasField("pairs_with") and worker.pairs_with < into.pairs_with:
        into.pairs_with = worker.pairs_with
    for name in ("instance_id", "engine", "kv_transfer_backend", "pair_problem"):
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
        _sum(into.prefix, worker.prefix, gw.PrefixTruth.DESCRIPTOR.fields_by_name)


def _sum(into: Any, other: Any, names: Iterable[str]) -> None:
    for name in names:
        setattr(into, name, getattr(into, name) + getattr(other, name))


def _worst(into: Any, other: Any, names: Iterable[str]) -> None:
    for name in names:
        if other.HasField(name):
            setattr(into, name, max(getattr(into, name), getattr(other, name)))
