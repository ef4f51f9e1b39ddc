"""`slagate serve --processes N`: the parent of N processes that are one gateway to clients and operators.

The parent has the admin and the HTTP listener, the configuration and its history. It carries no request:
the children listen on one port, and share what they have in flight (`pools/inflight/shared_counts.py`).
"""

import os
import random
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import grpc.aio
from prometheus_client import CollectorRegistry

from slagate.pools.fleet_file.load import FleetConfig
from slagate.pools.inflight.shared_counts import SharedCounts, create
from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.proto.rpc.address import Address
from slagate.router.metrics import Metrics
from slagate.router.multiprocess.admin import MultiprocessAdminService
from slagate.router.multiprocess.child import ProcessSlot
from slagate.router.multiprocess.metrics import MergedMetrics, not_ready
from slagate.router.multiprocess.supervisor import Supervisor, write_config
from slagate.router.reload.reload import FleetSource, Proposal, Reloader, reloading
from slagate.router.request.settings import CUT_S, RECEIPTS_S, Settings
from slagate.router.services.admin import Listeners, operators_listening
from slagate.workers.runtime.clock import monotonic_s
from slagate.workers.runtime.listen import given_by, listen_on, stopped
from slagate.workers.server import SERVER_OPTIONS
from slagate.workers.tls.files import TlsFiles
from slagate.workers.tls.reloading import ServerTls, following

MAX_PROCESSES = 64

STOP_SLACK_S = 5.0
"""How much longer than its drain a process may take to end."""


async def serve_as_parent(
    source: FleetSource,
    config: FleetConfig,
    settings: Settings,
    *,
    stamp: object,
    listeners: Listeners,
    n_processes: int,
    arguments: Sequence[str],
    tls: TlsFiles | None,
) -> int:
    """Run a gateway of several processes until SIGTERM or SIGINT, and return the exit status.

    Parameters are those of `app.serve`, but `tls` is for operators only. Each child is `slagate` with
    `arguments`. Raises `OSError` or `TlsError`.
    """
    in_force = Proposal.of(config, policy=settings.policy)
    operators_tls = None if tls is None else ServerTls("operators", tls)
    with _gateway_folder(listeners.listen, n_processes) as (place, counts):
        write_config(place, in_force.message)
        stop_limit_s = settings.drain_s + CUT_S + RECEIPTS_S + STOP_SLACK_S
        supervisor = Supervisor(
            place, counts, arguments=arguments, stop_limit_s=stop_limit_s, now_s=monotonic_s
        )
        metrics = Metrics()
        reloader = _reloader(in_force, supervisor, metrics)
        operators = grpc.aio.server(options=SERVER_OPTIONS)
        service = MultiprocessAdminService(
            supervisor, counts, reloader=reloader, source=source, now_s=monotonic_s
        )
        gw_grpc.add_GatewayServicer_to_server(service, operators)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(MergedMetrics(supervisor, counts, Path(place.folder), own=metrics))
        with operators_listening(
            operators,
            listeners.on_port(place.port),
            operators_tls,
            registry=registry,
            not_ready=lambda: not_ready(supervisor),
        ) as bound:
            await operators.start()
            async with (
                following(operators_tls) as reread,
                reloading(
                    reloader,
                    source,
                    watch=settings.watch_config,
                    stamp=stamp,
                    also=[reread, supervisor.reread_tls],
                ),
            ):
                status = await _run_until_stopped(supervisor, bound)
            await operators.stop(RECEIPTS_S)
    return status


def _reloader(in_force: Proposal, supervisor: Supervisor, metrics: Metrics) -> Reloader:
    """The owner of the configuration in force in all processes."""

    async def agree(found: Proposal) -> None:
        await supervisor.put_in_force(found.message)

    return Reloader(
        in_force,
        put_in_force=lambda _: None,
        agree=agree,
        admission=lambda: supervisor.admission,
        metrics=metrics,
        now_s=monotonic_s,
    )


@contextmanager
def _gateway_folder(
    listen: Address, n_processes: int
) -> Iterator[tuple[ProcessSlot, SharedCounts]]:
    """The slot of process 0, and the counts, of a new gateway, whose port is taken within the `with`."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="slagate-", dir=_memory()))
        # Nobody else may listen there. The children share the port with each other and with a socket that
        # only keeps it, so that it is theirs also while none of them runs.
        with given_by("--listen"):
            listen_on(listen, backlog=0).close()
            kept = stack.enter_context(closing(listen_on(listen, shared=True, backlog=0)))
        place = ProcessSlot(
            number=0,
            n_processes=n_processes,
            folder=folder,
            instance_id=f"{random.Random(uuid.uuid4().int).getrandbits(64):016x}",
            port=kept.getsockname()[1],
        )
        create(place.counts, n_processes)
        counts = SharedCounts(place.counts, None, n_processes=n_processes)
        yield place, stack.enter_context(closing(counts))


async def _run_until_stopped(supervisor: Supervisor, listeners: Listeners) -> int:
    """Run the processes until a signal stops them; the exit status."""
    async with (
        stopped(again=supervisor.kill) as signals,
        anyio.create_task_group() as tasks,
    ):

        async def stop_on_signal() -> None:
            await signals.wait()
            supervisor.stop()

        tasks.start_soon(stop_on_signal)
        status = await supervisor.run(
            lambda: listeners.print_ready_line(process_pids=supervisor.pids)
        )
        tasks.cancel_scope.cancel()
    return status


def _memory() -> str | None:
    """A folder whose files are in memory, so that no write waits for a disk; None: none is known."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None
