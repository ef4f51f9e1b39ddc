"""One process of a gateway of several: its place among them, and what it answers its parent and the others.

The parent starts it with the options of `slagate serve`, and with its place in the environment. It prints
its ready line, and ends when its standard input ends, as then the parent has ended.
"""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc
import msgspec
from anyio.to_thread import run_sync
from prometheus_client.exposition import generate_latest

from slagate.pools.fleet_file.load import FleetConfig
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
from slagate.workers.runtime.listen import on_sighup

PLACE = "SLAGATE_PROCESS"
"""The environment variable that has the place of a process, as JSON."""

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class ProcessSlot(msgspec.Struct, frozen=True):
    """The place of one process among those of its gateway."""

    number: int
    n_processes: int
    folder: str
    instance_id: str  # of the gateway
    port: int  # of the clients' listener

    def path(self, name: str, *, number: int | None = None) -> Path:
        """A file or socket of one process in the gateway's folder, by default of this one."""
        return Path(self.folder) / f"{self.number if number is None else number}.{name}"

    @property
    def counts(self) -> Path:
        """The file of `SharedCounts`."""
        return Path(self.folder) / "counts"

    @property
    def config(self) -> Path:
        """The file with the configuration in force, a `GatewayConfig`."""
        return Path(self.folder) / "config"

    def in_environment(self) -> dict[str, str]:
        """The variables for a child."""
        return {PLACE: msgspec.json.encode(self).decode()}


def own_place() -> ProcessSlot | None:
    """This process's place; None: it was not started by another one of its gateway."""
    text = os.environ.pop(PLACE, None)
    return None if text is None else msgspec.json.decode(text, type=ProcessSlot)


def config_in_force(place: ProcessSlot) -> FleetConfig:
    """The configuration that the parent has put in force. Raises `OSError` or `UnusableReceipt`."""
    return prepared_of(gw.GatewayConfig.FromString(place.config.read_bytes())).config


@asynccontextmanager
async def parent_watched(
    place: ProcessSlot, stop: anyio.Event, *, hangup: Callable[[], None]
) -> AsyncIterator[None]:
    """Within the block, set `stop` when the parent ends, and call `hangup` when it passes a SIGHUP on.

    After the block, remove the gateway's folder if the parent has ended: it could not do so itself.
    """
    loop = asyncio.get_running_loop()
    has_ended = False

    def ended() -> None:
        nonlocal has_ended
        if not os.read(sys.stdin.fileno(), 1):
            has_ended = True
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

    loop.add_reader(sys.stdin.fileno(), ended)
    try:
        async with on_sighup(hangup):
            yield
    finally:
        if has_ended:
            shutil.rmtree(place.folder, ignore_errors=True)
        else:
            loop.remove_reader(sys.stdin.fileno())


class ChildService(ps_grpc.ProcessServicer):
    """Answers the parent and the other processes."""

    def __init__(
        self,
        reloader: Reloader,
        running: RunningRequests,
        metrics: Metrics,
        *,
        not_ready: Callable[[], str],
    ) -> None:
        self._reloader = reloader
        self._running = running
        self._metrics = metrics
        self._not_ready = not_ready
        self._prepared: Proposal | None = None

    async def Prepare(self, request: Any, context: Any) -> ps.PrepareResponse:
        """Check another configuration, and keep it for `PutInForce`."""
        try:
            self._prepared = await run_sync(self._read, request)
        except (ConfigError, UnusableReceipt) as error:
            return ps.PrepareResponse(problem=str(error))
        return ps.PrepareResponse()

    def _read(self, message: gw.GatewayConfig) -> Proposal:
        config = prepared_of(message).config
        return self._reloader.propose(lambda: config)

    async def PutInForce(self, request: Any, context: Any) -> ps.PutInForceResponse:
        """Put in force what `Prepare` checked last."""
        found = self._prepared
        if found is None or found.message.version != request.version:
            reason = f"version: {request.version[:80]!r} was not prepared"
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, reason)
        self._prepared = None
        self._reloader.put(found)
        return ps.PutInForceResponse()

    async def Look(self, request: Any, context: Any) -> ps.LookResponse:
        """Whether the process is ready, and its gauges."""
        found = ps.LookResponse(not_ready=self._not_ready())
        if request.metrics:
            # Thousands of series take milliseconds that the loop does not have.
            found.metrics = await run_sync(generate_latest, self._metrics.gauges)
        return found

    async def Abort(self, request: Any, context: Any) -> ps.AbortInProcessResponse:
        """End a client's requests with this id."""
        found = self._running.abort(request.peer, request.request_id, Aborted(ABORTED))
        return ps.AbortInProcessResponse(found=found)
