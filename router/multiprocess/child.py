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
from slagate.pools.fleet_file.models import AdmissionMode
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
    """The place of one process among those of its gateway; a process that is started again keeps it."""

    number: int  # from 0 on
    n_processes: int
    folder: str  # of all its processes: sockets, counts, the configuration
    instance_id: str  # of the gateway
    port: int  # of the clients' listener
    admission: AdmissionMode | None = None  # in force when it starts; None: the configuration's

    def path(self, name: str, *, number: int | None = None) -> Path:
        """The path of a file or socket of one process, by default this one, in the gateway's folder."""
        return Path(self.folder) / f"{self.number if number is None else number}.{name}"

    @property
    def counts(self) -> Path:
        """The path of the file of `SharedCounts`."""
        return Path(self.folder) / "counts"

    @property
    def config(self) -> Path:
        """The path of the file with the configuration in force, a `GatewayConfig` message."""
        return Path(self.folder) / "config"

    def in_environment(self) -> dict[str, str]:
        """The environment variables by which a child gets this slot; see `own_place`."""
        return {PLACE: msgspec.json.encode(self).decode()}


def own_place() -> ProcessSlot | None:
    """Take this process's slot out of the environment; None: no parent of a gateway has started it."""
    text = os.environ.pop(PLACE, None)
    return None if text is None else msgspec.json.decode(text, type=ProcessSlot)


def config_in_force(place: ProcessSlot) -> FleetConfig:
    """The configuration that the parent has put in force. Raises `OSError` or `UnusableReceipt`."""
    return prepared_of(gw.GatewayConfig.FromString(place.config.read_bytes())).config


@asynccontextmanager
async def parent_watched(
    place: ProcessSlot, stop: anyio.Event, *, hangup: Callable[[], None]
) -> AsyncIterator[None]:
    """Within the `with`, set `stop` when the parent ends, and call `hangup` when it passes on a SIGHUP.

    Afterwards, remove the gateway's folder if the parent has ended, as it could not do so itself.
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
    """What the parent and the other processes of the gateway ask of this one."""

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
        """Check a configuration, and keep it for `PutInForce`; a response with a `problem` refuses it."""
        try:
            self._prepared = await run_sync(self._read, request)
        except (ConfigError, UnusableReceipt) as error:
            return ps.PrepareResponse(problem=str(error))
        return ps.PrepareResponse()

    def _read(self, message: gw.GatewayConfig) -> Proposal:
        config = prepared_of(message).config
        return self._reloader.propose(lambda: config)

    async def PutInForce(self, request: Any, context: Any) -> ps.PutInForceResponse:
        """Put in force what `Prepare` checked last, if it is of the version that is asked for."""
        found = self._prepared
        if found is None or found.message.version != request.version:
            reason = f"version: {request.version[:80]!r} was not prepared"
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, reason)
        self._prepared = None
        self._reloader.put(found)
        return ps.PutInForceResponse()

    async def Look(self, request: Any, context: Any) -> ps.LookResponse:
        """Why the process is not ready, if so, and on request its gauges as Prometheus text."""
        found = ps.LookResponse(not_ready=self._not_ready())
        if request.metrics:
            # Thousands of series take milliseconds that the loop does not have.
            found.metrics = await run_sync(generate_latest, self._metrics.gauges)
        return found

    async def Abort(self, request: Any, context: Any) -> ps.AbortInProcessResponse:
        """End a client's requests with this id that run in this process."""
        found = self._running.abort(request.peer, request.request_id, Aborted(ABORTED))
        return ps.AbortInProcessResponse(found=found)
