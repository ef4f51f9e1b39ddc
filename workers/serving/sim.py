"""A worker process with a simulated engine, until a signal or the engine's end."""

import ipaddress
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.address import Address
from slagate.workers.kv_transfer.nixl.nixl import NixlTransport, self_check
from slagate.workers.kv_transfer.shm import SharedMemoryTransport
from slagate.workers.kv_transfer.transport import KvTransferError, KvTransport, KvUnavailable
from slagate.workers.profiles.profile import load_profile
from slagate.workers.runtime.listen import on_sighup, stopped
from slagate.workers.runtime.usage import UsageError
from slagate.workers.server import serve_worker
from slagate.workers.serving.serve import FLUSH_S, metrics_served, tell_ready, until_stopped
from slagate.workers.serving.sim_worker import BLOCK_TOKENS, SimOptions, check_options, sim_worker
from slagate.workers.tls.files import TlsFiles
from slagate.workers.tls.reloading import ServerTls, following
from slagate.workers.trtllm.metrics import SILENT, WorkerMetrics
from slagate.workers.trtllm.server_info import ROLES

log = logging.getLogger(__name__)

TRANSPORTS = ("auto", "nixl", "shm")

N_SLOTS = 16_384
"""Enough for a hundred parked prompts of 5,000 tokens in blocks of 32; 64 MiB where a block has 4 KiB.
Slots that are never used cost no memory."""


class OpenedTransport(NamedTuple):
    """A transport, if the worker needs one, and why it is not NIXL, or ""."""

    transport: KvTransport | None
    why_not_nixl: str


async def run_sim_worker(
    options: SimOptions,
    listen: Address,
    *,
    drain_s: float,
    tls: TlsFiles | None,
    metrics_listen: Address | None = None,
) -> int:
    """Serve a simulated worker until SIGTERM, SIGINT or the engine's end; the exit status.

    A SIGHUP has the files of TLS read again; without `tls` it serves plaintext. After the signal, running
    requests and parked handoffs together get `drain_s`. Raises `ProfileError` or `UsageError` naming a
    wrong option, and `OSError` when the address cannot be bound.
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
        on_sighup(reread),
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


@asynccontextmanager
async def _transport(
    options: SimOptions, listen: Address, instance_id: str
) -> AsyncIterator[OpenedTransport]:
    """Open the transport that the role needs for the time of the block; an aggregated worker has none."""
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
            # As many as the cache has blocks, which parked prompts share in it and here, and their tickets.
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


def open_transport(
    wanted: str,
    *,
    worker_name: str,
    loopback: bool,
    block_bytes: int,
    pull_limit_s: float,
    n_slots: int = N_SLOTS,
) -> OpenedTransport:
    """Open one of `TRANSPORTS`; "auto" is NIXL where it works, else shared memory.

    `loopback` keeps NIXL off every other network device. `block_bytes` is the largest block to move.
    Raises `KvUnavailable`: for "nixl" when NIXL does not work, and when nothing does.
    """
    if wanted == "shm":
        return OpenedTransport(SharedMemoryTransport(), "shared memory was asked for")
    try:
        nixl = NixlTransport(
            worker_name,
            n_slots=n_slots,
            block_bytes=block_bytes,
            loopback=loopback,
            pull_limit_s=pull_limit_s,
        )
        try:
            self_check(nixl, loopback=loopback)
        except KvTransferError as error:
            nixl.close()
            raise KvUnavailable(str(error)) from error
    except KvUnavailable as error:
        if wanted == "nixl":
            raise
        log.warning("kv_transfer.not_nixl %s", error)
        return OpenedTransport(SharedMemoryTransport(), str(error))
    return OpenedTransport(nixl, "")
