"""The processes of a gateway, started by their parent, and started again when they end.

start ──▶ (ready line on its stdout) ──▶ runs ──▶ ends: its counts are cleared, the others are woken, and
                └─ ends, or is late               another one is started in its place, after a pause

All of them have to start the first time, else the gateway does not. A process that ends later is started
again for as long as the gateway runs, after 0.1 s, then 0.2 s and so on, at most 10 s.
"""

import logging
import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import Any

import anyio
import grpc
import grpc.aio
from msgspec.structs import replace

from slagate.pools.fleet_file.models import AdmissionMode
from slagate.pools.grid.errors import ConfigError, Problem
from slagate.pools.inflight.shared_counts import GATEWAY, GatewayCell, SharedCounts
from slagate.proto import gateway_pb2 as gw
from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.proto import process_pb2 as ps
from slagate.proto import process_pb2_grpc as ps_grpc
from slagate.proto.rpc.backoff import Backoff
from slagate.router.children import ChildError, ChildProcess
from slagate.router.multiprocess.child import ProcessSlot
from slagate.router.multiprocess.peers import send_wake
from slagate.workers.server import SERVER_OPTIONS

log = logging.getLogger(__name__)

START_LIMIT_S = 60.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0
STEADY_S = 30.0
"""A process that ran for so long did not end for a fault of its start: the pauses begin anew."""

PREPARE_LIMIT_S = 60.0
PUT_LIMIT_S = 5.0
"""The step waits for nothing, so a process that has not taken it by then is killed."""

FAILED = 1
"""The exit status if a process did not end as it should."""

UNKNOWN = 255
"""asyncio's exit status of a process that was signalled when it had just ended by itself."""


class GatewayChild:
    """A process of the gateway that is ready, with gRPC stubs to call it."""

    def __init__(self, place: ProcessSlot, process: ChildProcess) -> None:
        self.number = place.number
        self.process = process
        target = f"unix:{place.path('admin')}"
        self._channel = grpc.aio.insecure_channel(target, options=SERVER_OPTIONS)
        self.gateway: Any = gw_grpc.GatewayStub(self._channel)
        self.control: Any = ps_grpc.ProcessStub(self._channel)
        # Scrapes come on threads of their own, where no grpc.aio can be used.
        self._for_threads = grpc.insecure_channel(target, options=SERVER_OPTIONS)
        self.in_threads: Any = ps_grpc.ProcessStub(self._for_threads)

    async def aclose(self) -> None:
        """Close the channels of a process that has ended."""
        await self._channel.close()
        self._for_threads.close()


class Supervisor:
    """Starts the processes, and again those that end. `running` has those that are ready, by number."""

    def __init__(
        self,
        place: ProcessSlot,
        counts: SharedCounts,
        *,
        arguments: Sequence[str],
        stop_limit_s: float,
        now_s: Callable[[], float],
    ) -> None:
        """`place` is that of process 0; each process is `slagate` with `arguments`."""
        self.running: dict[int, GatewayChild] = {}
        self.n_restarts = 0
        self.n_lost = 0  # requests that were running in processes when these ended
        self.admission: AdmissionMode | None = None  # that was set; None: the configuration's
        self.stopping = anyio.Event()
        self._places = [replace(place, number=number) for number in range(place.n_processes)]
        self._counts = counts
        self._arguments = arguments
        self._stop_limit_s = stop_limit_s
        self._now_s = now_s
        self._processes: dict[int, ChildProcess] = {}  # that have not ended
        self._statuses: dict[int, int] = {}  # of those that ended last
        # No process starts while another configuration is put in force: it would read the one before.
        self._one_at_a_time = anyio.Lock()

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Run the processes until `stop`; returns the exit status. `on_ready` is called once all serve."""
        try:
            async with self._one_at_a_time, anyio.create_task_group() as starts:
                for place in self._places:
                    starts.start_soon(self._start, place)
            failed = [n for n in range(len(self._places)) if n not in self.running]
            if failed and not self.stopping.is_set():
                self.stop()
            elif not failed:
                on_ready()
            async with anyio.create_task_group() as tasks:
                for place in self._places:
                    if place.number in self.running:
                        tasks.start_soon(self._keep, place)
            if failed:
                # One ended by a signal, or well but without a ready line, has no status to pass on.
                found = (self._statuses.get(number, FAILED) for number in failed)
                return max(next((status for status in found if status != UNKNOWN), FAILED), FAILED)
            return FAILED if any(self._statuses.values()) else 0
        finally:
            with anyio.CancelScope(shield=True):
                self.kill()
                for process in list(self._processes.values()):
                    await process.aclose()

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes that are ready, in the order of their numbers."""
        return [child.process.pid for _, child in sorted(self.running.items())]

    def stop(self) -> None:
        """Have all processes drain and end, and start no other."""
        self.stopping.set()
        self._signal_all(signal.SIGTERM)

    def kill(self) -> None:
        """End all processes at once; call `stop` before, or they are started again."""
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in list(self._processes.values()):
            process.send_signal(number)

    def reread_tls(self) -> None:
        """Have all ready processes read their TLS files again."""
        for child in self.running.values():
            child.process.send_signal(signal.SIGHUP)

    async def put_in_force(self, message: gw.GatewayConfig) -> None:
        """Put a configuration in force in all processes. Raises `ConfigError`: then it is in none."""
        async with self._one_at_a_time:
            problems: list[Problem] = []

            async def prepare(child: GatewayChild) -> None:
                try:
                    answer = await child.control.Prepare(message, timeout=PREPARE_LIMIT_S)
                    problem = answer.problem
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.UNAVAILABLE:
                        # It has ended, or is about to; the next one in its place reads the file.
                        child.process.send_signal(signal.SIGKILL)
                        return
                    problem = f"{error.code().name}: {error.details()}"
                if problem:
                    problems.append(Problem("$", f"process {child.number}: {problem}"))

            async def put(child: GatewayChild) -> None:
                request = ps.PutInForceRequest(version=message.version)
                await _told(child, child.control.PutInForce(request, timeout=PUT_LIMIT_S))

            children = list(self.running.values())
            await _each(prepare, children)
            if problems:
                raise ConfigError("config", problems)
            # From here on it is in force: a process that starts reads it.
            write_config(self._places[0], message)
            self.admission = None
            await _each(put, children)

    async def set_admission(self, mode: AdmissionMode) -> AdmissionMode | None:
        """Put an admission mode in force in all processes, those that start later included.

        Returns the one that was set before; None: it was the configuration's.
        """
        async with self._one_at_a_time:
            before, self.admission = self.admission, mode
            request = gw.SetAdmissionRequest(mode=mode)

            async def put(child: GatewayChild) -> None:
                await _told(child, child.gateway.SetAdmission(request, timeout=PUT_LIMIT_S))

            await _each(put, list(self.running.values()))
        return before

    async def _start(self, place: ProcessSlot) -> None:
        """Start a process; afterwards it is ready, or has ended."""
        process = await ChildProcess.start(
            f"process {place.number}",
            self._arguments,
            stdin=subprocess.PIPE,
            environment=os.environ | replace(place, admission=self.admission).in_environment(),
        )
        self._processes[place.number] = process
        is_ready = False
        with anyio.move_on_after(START_LIMIT_S):
            try:
                await process.wait_ready(limit_s=START_LIMIT_S)
                is_ready = True
            except ChildError:
                await process.wait()  # not killed: its own status says why
        if not is_ready:
            process.send_signal(signal.SIGKILL)
            await self._ended(place, process)
            return
        if self.stopping.is_set():
            # It was not there yet when the others were told.
            process.send_signal(signal.SIGTERM)
        self.running[place.number] = GatewayChild(place, process)
        about = {"process_number": place.number, "pid": process.pid}
        log.info("process.ready", extra=about)

    async def _keep(self, place: ProcessSlot) -> None:
        """Start a process again each time it ends."""
        pauses = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while True:
            child = self.running.get(place.number)
            if child is not None:
                since_s = self._now_s()
                await self._wait(child.process)
                del self.running[place.number]
                await child.aclose()
                await self._ended(place, child.process)
                if self._now_s() - since_s >= STEADY_S:
                    pauses.reset()
            if self.stopping.is_set():
                return
            self.n_restarts += 1
            with anyio.move_on_after(pauses.next_s()):
                await self.stopping.wait()
                return
            async with self._one_at_a_time:
                if not self.stopping.is_set():
                    await self._start(place)

    async def _wait(self, process: ChildProcess) -> None:
        """Wait until a process ends; kill it if it takes too long once all are to stop."""
        async with anyio.create_task_group() as tasks:

            async def kill_late() -> None:
                await self.stopping.wait()
                await anyio.sleep(self._stop_limit_s)
                process.send_signal(signal.SIGKILL)

            tasks.start_soon(kill_late)
            await process.wait()
            tasks.cancel_scope.cancel()

    async def _ended(self, place: ProcessSlot, process: ChildProcess) -> None:
        """Clear what a process that ends had in flight, so that nobody counts it or waits for it."""
        status = await process.wait()
        await process.aclose()
        del self._processes[place.number]
        self._statuses[place.number] = status
        running = self._counts.each(GATEWAY, GatewayCell.RUNNING)
        n_lost = running[place.number] if running else 0
        self.n_lost += n_lost
        self._counts.clear(place.number)
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as sender:
            sender.settimeout(0)
            for other in self._places:
                send_wake(sender, other.path("wake"))
        if not self.stopping.is_set():
            about = {"process_number": place.number, "pid": process.pid, "exit_status": status}
            log.error("process.ended", extra=about | {"lost_requests": n_lost})


def write_config(place: ProcessSlot, message: gw.GatewayConfig) -> None:
    """Write the file of the configuration in force, which processes read when they start."""
    beside = place.config.with_suffix(".new")
    beside.write_bytes(message.SerializeToString())
    beside.rename(place.config)


async def _told(child: GatewayChild, call: Awaitable[object]) -> None:
    """Await a call that changes what is in force; a process that does not answer it well is killed."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        about = {"process_number": child.number, "code": error.code().name}
        log.error("process.does_not_reload", extra=about)
        child.process.send_signal(signal.SIGKILL)


async def _each(do: Callable[[GatewayChild], Any], children: Sequence[GatewayChild]) -> None:
    async with anyio.create_task_group() as tasks:
        for child in children:
            tasks.start_soon(do, child)
