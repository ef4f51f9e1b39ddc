"""The gateway process: builds the graph, serves it, takes it down in order."""

import gc
import itertools
import os
import random
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import NamedTuple

import anyio
import grpc.aio

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet.watch import Connect, watch_fleet
from slagate.pools.fleet_file.load import FleetConfig
from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.proto import openengine_pb2_grpc as oe_grpc
from slagate.proto import process_pb2_grpc as ps_grpc
from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.address import Address
from slagate.proto.rpc.connection_pool import ConnectionPool, dial_unix
from slagate.router.front.server import Front, serve_front
from slagate.router.generate import generate
from slagate.router.legs.attempts import Gateway
from slagate.router.legs.handoff import Releaser
from slagate.router.metrics import Metrics, RefusedConnection
from slagate.router.multiprocess.child import ProcessService, ProcessSlot, parent_watched
from slagate.router.multiprocess.peers import joined_peers
from slagate.router.receipts.config import config_message
from slagate.router.receipts.ring import ReceiptRing
from slagate.router.reload.reload import Proposal, Reloader, Source, put_in_process, reloading
from slagate.router.request.errors import Draining
from slagate.router.request.running import RunningRequests
from slagate.router.request.settings import CUT_S, RECEIPTS_S, Settings
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.peers import PeerGateways
from slagate.router.services.admin import AdminService
from slagate.router.services.control import ControlService
from slagate.workers.client.client import connect_worker
from slagate.workers.runtime.clock import monotonic_s, unix_s
from slagate.workers.runtime.listen import bind, given_by, listen_on, ready_line, stopped
from slagate.workers.runtime.probes import serve_probes
from slagate.workers.server import SERVER_OPTIONS
from slagate.workers.tls.files import TlsFiles
from slagate.workers.tls.reloading import ClientTls, ServerTls, following

LOCAL = Http2Settings(ping_after_s=1e6)
"""Of the connections to the local server, which is this process."""

YOUNG_OBJECTS = 5000
"""How many may have come before the youngest are collected, which takes under a millisecond. Of Python's
own 700 nearly all are of requests that run, and are walked for nothing."""


class App(NamedTuple):
    """A running gateway without its listeners."""

    fleet: Fleet
    gateway: Gateway
    reloader: Reloader
    instance_id: str


@asynccontextmanager
async def build(
    config: FleetConfig,
    settings: Settings,
    *,
    connect: Connect,
    now_s: Callable[[], float],
    unix_s: Callable[[], float] = unix_s,
    rng: random.Random,
    peers: PeerGateways | None = None,
) -> AsyncIterator[App]:
    """The graph of a gateway, watching its workers, for the time of the block.

    `config` was checked for serving. `now_s` measures, `unix_s` dates receipts and tells how late KV events
    are. `peers` are the other gateways that send to the same workers, if there are any.

    At the end of the block, handoffs that are being released get their chance first, then the watch loops
    stop.
    """
    peers = peers or PeerGateways()
    prepared = prepare(config)
    in_force = Proposal(prepared, config_message(prepared, policy=settings.policy))
    fleet = Fleet(
        prepared,
        prefix=settings.policy == "prefix",
        load_table=peers.load_table,
        now_s=now_s,
    )
    instance_id = f"{rng.getrandbits(64):016x}"
    numbers = itertools.count()
    dispatcher = Dispatcher(
        fleet,
        rng=rng,
        config=in_force.message,
        max_waiting=settings.max_waiting,
        peers=peers,
        now_s=now_s,
    )
    metrics = Metrics()
    metrics.watch(dispatcher)
    async with (
        watch_fleet(
            fleet,
            connect=connect,
            now_s=now_s,
            unix_s=unix_s,
            rng=rng,
            drain_s=settings.worker_drain_s,
            on_cut=metrics.drains_cut.inc,
        ),
        anyio.create_task_group() as releases,
    ):
        gateway = Gateway(
            dispatcher=dispatcher,
            settings=settings,
            metrics=metrics,
            receipts=ReceiptRing(
                in_force.message,
                unix_s=unix_s,
                number=peers.receipt_number,
            ),
            releaser=Releaser(releases, metrics),
            live=RunningRequests(peers.show_running if peers.n_peers else None),
            leg_id=lambda: f"{instance_id}-{next(numbers)}",
            now_s=now_s,
        )
        reloader = Reloader(
            in_force,
            put_in_force=put_in_process(dispatcher, gateway.receipts),
            metrics=metrics,
            now_s=now_s,
        )
        yield App(fleet, gateway, reloader, instance_id)


async def serve(
    source: Source,
    config: FleetConfig,
    settings: Settings,
    *,
    stamp: object,
    listen: Address,
    admin: Address,
    http: Address,
    tls: TlsFiles | None,
    worker_tls: TlsFiles | None,
    place: ProcessSlot | None = None,
) -> None:
    """Run a gateway until SIGTERM or SIGINT; prints the ready line once every listener is bound.

    `config` is what was read from `source` and checked for serving, and `stamp` the source's from before
    that. `tls` is for clients and operators, `worker_tls` for what is dialled; each is plaintext where it
    is None. With `place` it is one of several processes: only the clients' listener is its own, and what
    else comes to the gateway comes from its parent. Raises `OSError` for an address that cannot be bound,
    `TlsError` for files that cannot be used.
    """
    rng = random.Random(uuid.uuid4().int)
    clients_tls = None if tls is None else ServerTls("clients", tls)
    workers_tls = None if worker_tls is None else ClientTls("workers", worker_tls)
    connect = partial(connect_worker, tls=workers_tls)
    async with AsyncExitStack() as stack:
        peers = PeerGateways()
        if place is not None:
            peers = stack.enter_context(joined_peers(place, now_s=monotonic_s))
            listen = listen._replace(port=place.port)
        app = await stack.enter_async_context(
            build(config, settings, connect=connect, now_s=monotonic_s, rng=rng, peers=peers)
        )
        gateway = app.gateway
        for side in (clients_tls, workers_tls):
            if side is not None:
                gateway.metrics.watch_certificate(side)
        if clients_tls is not None:
            refused = gateway.metrics.connections.refused
            clients_tls.on_refused = partial(refused, RefusedConnection.TLS)
        draining = False

        def not_ready() -> str:
            if draining:
                return "draining"
            return app.fleet.not_ready()

        local = grpc.aio.server(options=SERVER_OPTIONS)
        control = ControlService(
            app.fleet,
            gateway.live,
            instance_id=app.instance_id if place is None else place.instance_id,
            version=version("slagate"),
            not_ready=not_ready,
            peers=peers,
        )
        oe_grpc.add_ControlServicer_to_server(control, local)
        operators = grpc.aio.server(options=SERVER_OPTIONS)
        service = AdminService(
            gateway.dispatcher,
            settings,
            reloader=app.reloader,
            source=source,
            receipts=gateway.receipts,
            now_s=monotonic_s,
        )
        gw_grpc.add_GatewayServicer_to_server(service, operators)
        if place is None:
            credentials = None if clients_tls is None else clients_tls.grpc_credentials()
            with given_by("--admin"):
                admin = bind(operators, admin, credentials)
            registry = gateway.metrics.registry
            with given_by("--http"):
                http_port = stack.enter_context(
                    serve_probes(*http, registry=registry, not_ready=not_ready)
                )
            http = http._replace(port=http_port)
        else:
            asked = ProcessService(app.reloader, gateway.live, gateway.metrics, not_ready=not_ready)
            ps_grpc.add_ProcessServicer_to_server(asked, operators)
            operators.add_insecure_port(f"unix:{place.path('admin')}")
        with given_by("--listen"):
            bound = listen_on(listen, shared=place is not None)
        with (
            closing(bound) as listening,
            TemporaryDirectory(prefix="slagate-") as folder,
        ):
            listen_at = listen._replace(port=listening.getsockname()[1])
            socket = f"{folder}/local"
            local.add_insecure_port(f"unix:{socket}")
            await local.start()
            await operators.start()
            async with (
                anyio.create_task_group() as connecting,
                serve_front(
                    partial(generate, gateway=gateway),
                    listening,
                    ConnectionPool(socket, connecting, settings=LOCAL, dial=dial_unix),
                    settings,
                    tls=None if clients_tls is None else clients_tls.context,
                    counts=gateway.metrics.connections,
                ) as front,
                following(clients_tls, workers_tls) as reread,
                # A parent kills whom it does not want to wait for.
                stopped(again=None if place is None else lambda: None) as signals,
                reloading(
                    app.reloader,
                    source,
                    watch=settings.watch_config,
                    stamp=stamp,
                    also=[reread],
                )
                if place is None
                else parent_watched(place, signals, hangup=reread),
            ):
                # What is there by now stays, modules above all: full collections need not walk it, which
                # took 10 ms each. What comes later and lives long is no work for them either
                # (docs/decisions/0011-no-work-for-the-collector.md).
                gc.collect()
                gc.freeze()
                gc.set_threshold(YOUNG_OBJECTS)
                ready_line(listen=str(listen_at), admin=str(admin), http=str(http), pid=os.getpid())
                await signals.wait()
                draining = True
                await _drain(front, gateway, settings.drain_s)
                gateway.receipts.close()
                await operators.stop(RECEIPTS_S)
                await local.stop(None)


async def _drain(front: Front, gateway: Gateway, drain_s: float) -> None:
    """Take no new request, let running ones finish for `drain_s`, end the rest with a status of ours."""
    front.retire()
    with anyio.move_on_after(drain_s):
        await front.settled()
        await gateway.live.none_left()
    gateway.live.end_all(Draining("the gateway is shutting down"))
    with anyio.move_on_after(CUT_S):
        await front.emptied()
