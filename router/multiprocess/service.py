"""What one of the processes of a gateway answers the parent and the others, and asks them."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import grpc
import grpc.aio
from anyio.to_thread import run_sync
from prometheus_client.exposition import generate_latest

from slagate.pools.grid.errors import ConfigError
from slagate.proto import gateway_pb2 as gw
from slagate.proto import process_pb2 as ps
from slagate.proto import process_pb2_grpc as ps_grpc
from slagate.router.metrics import Metrics
from slagate.router.multiprocess.child import ProcessSlot
from slagate.router.receipts.config import UnusableReceipt, prepared_of
from slagate.router.reload.reload import Proposal, Reloader
from slagate.router.request.errors import Aborted
from slagate.router.request.running import RunningRequests
from slagate.router.scheduling.peers import PeerProcesses
from slagate.router.services.control import ABORTED

ABORT_LIMIT_S = 1.0


class Siblings:
    """The other processes, for what clients ask of the gateway."""

    def __init__(self, place: ProcessSlot, neighbours: PeerProcesses) -> None:
        self._place = place
        self._neighbours = neighbours

    @property
    def n_running(self) -> int:
        """Requests that they serve."""
        return self._neighbours.running_elsewhere

    async def abort(self, peer: str, request_id: str) -> bool:
        """End requests of a peer in whichever of them has them; False: none has."""
        request = ps.AbortInProcessRequest(peer=peer, request_id=request_id)
        found: list[bool] = []

        async def ask(number: int) -> None:
            path = self._place.path("admin", number=number)
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                stub: Any = ps_grpc.ProcessStub(channel)
                # One that does not answer has no requests, or none for long.
                with suppress(grpc.aio.AioRpcError):
                    answer = await stub.Abort(request, timeout=ABORT_LIMIT_S)
                    found.append(answer.found)

        async with anyio.create_task_group() as tasks:
            for number in range(self._place.n_processes):
                if number != self._place.number:
                    tasks.start_soon(ask, number)
        return any(found)


class ProcessService(ps_grpc.ProcessServicer):
    """What the parent and the other processes ask."""

    def __init__(
        self,
        reloader: Reloader,
        live: RunningRequests,
        metrics: Metrics,
        *,
        not_ready: Callable[[], str],
    ) -> None:
        self._reloader = reloader
        self._live = live
        self._metrics = metrics
        self._not_ready = not_ready
        self._prepared: Proposal | None = None

    async def Prepare(self, request: Any, context: Any) -> ps.PrepareResponse:
        """Read another configuration."""
        try:
            self._prepared = await run_sync(self._read, request)
        except (ConfigError, UnusableReceipt) as error:
            return ps.PrepareResponse(problem=str(error))
        return ps.PrepareResponse()

    def _read(self, message: gw.GatewayConfig) -> Proposal:
        config = prepared_of(message).config
        return self._reloader.propose(lambda: config)

    async def PutInForce(self, request: Any, context: Any) -> ps.PutInForceResponse:
        """Put in force what was read last."""
        found = self._prepared
        if found is None or found.message.version != request.version:
            reason = f"version: {request.version[:80]!r} was not prepared"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
            raise AssertionError("context.abort raises")
        self._prepared = None
        self._reloader.put(found)
        return ps.PutInForceResponse()

    async def Look(self, request: Any, context: Any) -> ps.LookResponse:
        """Readiness and gauges."""
        found = ps.LookResponse(not_ready=self._not_ready())
        if request.metrics:
            # Thousands of series take milliseconds that the loop does not have.
            found.metrics = await run_sync(generate_latest, self._metrics.gauges)
        return found

    async def Abort(self, request: Any, context: Any) -> ps.AbortInProcessResponse:
        """End requests of a client."""
        found = self._live.abort(request.peer, request.request_id, Aborted(ABORTED))
        return ps.AbortInProcessResponse(found=found)
