"""A worker process: one engine, the adapter, the server, until a signal or the engine's end."""

import ipaddress
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import UsageError
from slagate.workers.kv_choice import N_SLOTS, OpenedTransport, open_transport
from slagate.workers.kv_transfer import KvUnavailable
from slagate.workers.listen import Address, hung_up, ready_line, stopped
from slagate.workers.probes import serve_probes
from slagate.workers.profile import load_profile
from slagate.workers.server import serve_worker
from slagate.workers.sim_worker import BLOCK_TOKENS, SimOptions, check_options, sim_worker
from slagate.workers.tls import ServerTls, following
from slagate.workers.tls_files import TlsFiles
from slagate.workers.trtllm import TrtllmWorker
from slagate.workers.trtllm_info import ROLES
from slagate.workers.trtllm_metrics import WorkerMetrics
from slagate.workers.trtllm_observer import SILENT

FLUSH_S = 2.0
"""For what a stream has produced to be written out, once everything has ended."""


async def run_sim_worker(
    options: SimOptions,
    listen: Address,
    *,
    drain_s: float,
    tls: TlsFiles | None,
    metrics_listen: Address | None = None,
) -> int:
    """Serve a simulated worker until SIGTERM, SIGINT or the engine's end; the exit status.

    With SIGHUP it reads the files of TLS again.
    After the signal, running requests and parked handoffs together get `drain_s`. Without `tls` it serves
    plaintext. Raises `ProfileError` or `UsageError` naming a wrong option, and `OSError` when the address
    cannot be bound.
    """
    started_s = anyio.current_time()
    instance_id = uuid.uuid4().hex
    side = None if tls is None else ServerTls("clients", tls)
    check_options(options)
    model = options.model or load_profile(options.profile).tp(options.tp).model
    metrics = WorkerMetrics(model=model, role=options.role, engine="sim")
    async with (
        _transport(options, listen, instance_id) as opened,
        sim_worker(
            options,
            instance_id=instance_id,
            transport=opened.transport,
            observer=SILENT if metrics_listen is None else metrics,
        ) as worker,
        serve_worker(worker, listen, grace_s=FLUSH_S, tls=side) as address,
        following(side) as reread,
        hung_up(reread),
        stopped() as signals,
    ):
        metrics.loaded(
            anyio.current_time() - started_s,
            event_capacity=options.kv_events,
            counters=worker.counters,
        )
        with metrics_served(metrics, metrics_listen, not_ready=lambda: "") as metrics_at:
            await tell_ready(
                worker,
                role=options.role,
                address=address,
                metrics_at=metrics_at,
                why_not_nixl=opened.why_not_nixl,
            )
            await until_stopped(worker, signals, drain_s=drain_s)
    return 1 if worker.fatal.is_set() else 0


async def tell_ready(
    worker: TrtllmWorker, *, role: str, address: Address, metrics_at: str, **more: str
) -> None:
    """The ready line of a worker."""
    info = await worker.server_info()
    if metrics_at:
        more["metrics"] = metrics_at
    ready_line(
        listen=str(address),
        role=role,
        model=info.supported_models[0],
        kv_transport=info.kv_connector.transfer_backend or "none",
        instance_id=info.instance_id,
        pid=os.getpid(),
        **more,
    )


async def until_stopped(worker: TrtllmWorker, signals: anyio.Event, *, drain_s: float) -> None:
    """Return after a signal, when all that runs has ended or `drain_s` is over, or at the engine's end."""
    async with anyio.create_task_group() as tasks:

        async def watch_engine() -> None:
            await worker.fatal.wait()
            signals.set()

        tasks.start_soon(watch_engine)
        await signals.wait()
        await worker.drain(0.0 if worker.fatal.is_set() else drain_s)
        tasks.cancel_scope.cancel()


@contextmanager
def metrics_served(
    metrics: WorkerMetrics, listen: Address | None, *, not_ready: Callable[[], str]
) -> Iterator[str]:
    """Serve metrics and probes over HTTP and yield where; "" without an address to listen on."""
    if listen is None:
        yield ""
        return
    with serve_probes(*listen, registry=metrics.registry, not_ready=not_ready) as port:
        yield str(Address(listen.host, port))


@asynccontextmanager
async def _transport(
    options: SimOptions, listen: Address, instance_id: str
) -> AsyncIterator[OpenedTransport]:
    """The transport that the role needs, for the time of the block; an aggregated worker has none."""
    if ROLES[options.role] == oe.ENGINE_ROLE_AGGREGATED:
        yield OpenedTransport(None, "")
        return
    profile = load_profile(options.profile).tp(options.tp)
    n_blocks = options.kv_blocks or profile.kv_capacity_tokens // BLOCK_TOKENS
    n_ranks = options.tp if options.attention_dp else 1
    try:
        opened = open_transport(
            options.transport,
            worker_name=f"{options.role}-{instance_id[:8]}",
            loopback=_is_loopback(listen.host),
            block_bytes=options.kv_block_bytes,
            # What the cache holds, which parked prompts share there and here, and a ticket for each.
            n_slots=max(N_SLOTS, 2 * n_blocks * n_ranks),
            pull_limit_s=options.kv_transfer_timeout_s,
        )
    except KvUnavailable as error:
        raise UsageError(f"--transport {options.transport}: {error}") from error
    assert opened.transport is not None
    try:
        yield opened
    finally:
        opened.transport.close()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
