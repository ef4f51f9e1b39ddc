"""`slagate serve`: the gateway, as one process or as several and their parent."""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from prometheus_client import disable_created_metrics

from slagate.proto.rpc.address import Address
from slagate.proto.rpc.client_call import MAX_MESSAGE_BYTES
from slagate.router import app as gateway_app
from slagate.router.cli.command import (
    LogLevel,
    Policy,
    check_apart,
    check_choice,
    host_port,
    run_to_exit,
    seconds,
    start_log,
)
from slagate.router.cli.fleet_options import Lenient, PoolsFile, PoolWorkers, checked, pool_workers
from slagate.router.cli.tls import Insecure, TlsCert, TlsClientCa, TlsKey, dial_tls, listener_tls
from slagate.router.multiprocess.child import config_in_force, own_place
from slagate.router.multiprocess.parent import MAX_PROCESSES, serve_as_parent
from slagate.router.reload.reload import FleetSource
from slagate.router.request.settings import POLICIES, Settings
from slagate.router.services.admin import Listeners
from slagate.workers.runtime.listen import ignore_hangups
from slagate.workers.tls.files import TlsFiles

Admin = Annotated[Address, host_port("For operators, over gRPC: explain, pools, receipts, reload.")]
Http = Annotated[Address, host_port("For probes: /healthz, /readyz and /metrics over HTTP.")]
MaxRequestBytes = Annotated[
    int, typer.Option(min=1, max=MAX_MESSAGE_BYTES // 2, help="Limit of one request.")
]
DefaultTimeout = Annotated[float, seconds("Seconds for a request without a deadline.")]
Drain = Annotated[float, seconds("Seconds for running requests after SIGTERM.")]
MaxAttempts = Annotated[
    int, typer.Option(min=1, help="Workers that one stage of a request may try.")
]
MaxWaiting = Annotated[
    int,
    typer.Option(min=0, help="Requests that may wait for a worker, and as many relegated ones."),
]
ClientReceipts = Annotated[
    bool,
    typer.Option(
        "--receipts/--no-receipts", help="Whether clients may see pools and workers in receipts."
    ),
]
Watch = Annotated[
    bool, typer.Option("--watch", help="Reload when a file of the configuration changes.")
]
Processes = Annotated[
    int, typer.Option(min=1, max=MAX_PROCESSES, help="Processes that share the clients' port.")
]
WorkerDrain = Annotated[float, seconds("Seconds for requests on workers that a reload removed.")]
WorkerTlsCa = Annotated[
    Path | None, typer.Option(metavar="FILE", help="CAs (PEM) that workers' certificates are of.")
]
WorkerTlsCert = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Certificate (PEM) to show to workers.")
]
WorkerTlsName = Annotated[
    str, typer.Option(help="Name in workers' certificates, if not their addresses' hosts.")
]
WorkerInsecure = Annotated[
    bool, typer.Option("--worker-insecure", help="Plaintext to workers instead of TLS.")
]


def serve(
    *,
    config: Annotated[Path, typer.Option(help="Fleet file: pool grid and workers, JSON.")],
    listen: Annotated[Address, host_port("For clients: OpenEngine over gRPC.")],
    admin: Admin,
    http: Http,
    max_request_bytes: MaxRequestBytes = Settings.max_request_bytes,
    default_timeout: DefaultTimeout = Settings.default_timeout_s,
    drain: Drain = Settings.drain_s,
    max_attempts: MaxAttempts = Settings.max_attempts,
    policy: Policy = Settings.policy,
    max_waiting: MaxWaiting = Settings.max_waiting,
    client_receipts: ClientReceipts = Settings.client_receipts,
    lenient: Lenient = False,
    pools: PoolsFile = None,
    pool: PoolWorkers = None,
    watch: Watch = Settings.watch_config,
    processes: Processes = 1,
    worker_drain: WorkerDrain = Settings.worker_drain_s,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    insecure: Insecure = False,
    worker_tls_ca: WorkerTlsCa = None,
    worker_tls_cert: WorkerTlsCert = None,
    worker_tls_key: TlsKey = None,
    worker_tls_name: WorkerTlsName = "",
    worker_insecure: WorkerInsecure = False,
    log_level: LogLevel = "info",
) -> None:
    """Run the gateway until SIGTERM."""
    ignore_hangups()  # until there is something that can reload
    check_choice("--policy", policy, POLICIES)
    listeners = Listeners(listen, admin, http)
    check_apart(listeners._asdict())
    tls = listener_tls(tls_cert, tls_key, tls_client_ca, insecure=insecure)
    of_workers = (worker_tls_ca, worker_tls_cert, worker_tls_key, worker_tls_name)
    worker_tls = dial_tls(*of_workers, insecure=worker_insecure, prefix="worker-")
    source = FleetSource(config, lenient, pools, pool_workers(pool or ()))
    settings = Settings(
        max_request_bytes=max_request_bytes,
        default_timeout_s=default_timeout,
        drain_s=drain,
        worker_drain_s=worker_drain,
        watch_config=watch,
        max_attempts=max_attempts,
        policy=policy,
        max_waiting=max_waiting,
        client_receipts=client_receipts,
    )
    _run(
        source, settings, processes, log_level, tls=tls, worker_tls=worker_tls, listeners=listeners
    )


def _run(
    source: FleetSource,
    settings: Settings,
    n_processes: int,
    log_level: str,
    *,
    tls: TlsFiles | None,
    worker_tls: TlsFiles | None,
    listeners: Listeners,
) -> NoReturn:
    """Serve as the parent of several processes, as one of them, or as the only one."""
    stamp = source.stamp()
    place = own_place()
    if place is None:
        fleet = checked(source.read)
        start_log(log_level)
    else:
        fleet = config_in_force(place)
        start_log(log_level, process_number=place.number)
    # Else a second series beside each counter and histogram says when they were created.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    is_parent = n_processes > 1 and place is None

    async def main_coroutine() -> int:
        if is_parent:
            return await serve_as_parent(
                source, fleet, settings, stamp=stamp, n_processes=n_processes,
                arguments=sys.argv[1:], tls=tls, listeners=listeners,
            )  # fmt: skip
        await gateway_app.serve(
            source, fleet, settings, stamp=stamp, place=place,
            tls=tls, worker_tls=worker_tls, listeners=listeners,
        )  # fmt: skip
        return 0

    run_to_exit(main_coroutine, starts_processes=is_parent)
