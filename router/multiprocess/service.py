"""What one of the processes of a gateway answers the parent and the other processes."""

from collections.abc import Callable
from typing import Any

import grpc
from anyio.to_thread import run_sync
from prometheus_client.exposition import generate_latest

from slagate.pools.grid.errors import ConfigError
from slagate.proto import gateway_pb2 as gw
from slagate.proto import process_pb2 as ps
from slagate.proto import process_pb2_grpc as ps_grpc
from slagate.proto.rpc.status import abort
from slagate.router.metrics import Metrics
from slagate.router.receipts.config import UnusableReceipt, prepared_of
from slagate.router.reload.reload import Proposal, Reloader
from slagate.router.request.errors import Aborted
from slagate.router.request.running import RunningRequests
from slagate.router.services.control import ABORTED


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
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, reason)
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
