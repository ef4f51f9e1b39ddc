"""The gateway process: builds its objects, serves, and shuts down in order."""

import gc
import itertools
import random
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from tempfile import TemporaryDirectory

import anyio
import grpc.aio

from slagate.pools.fleet.fleet import Fleet
from slagate.pools.fleet.watch import Connect, watch_fleet
from slagate.pools.fleet_file.load import FleetConfig
from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.proto import openengine_pb2_grpc as oe_grpc
from slagate.proto import process_pb2_grpc as ps_grpc
from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.connection_pool import ConnectionPool, dial_unix
from slagate.router.front.server import Front, serve_front
from slagate.router.generate import generate
from slagate.router.legs.active_request import RequestServices
from slagate.router.legs.handoff import Releaser
from slagate.router.metrics import Metrics, RefusedConnection
from slagate.router.multiprocess.child import ChildService, ProcessSlot, parent_watched
from slagate.router.multiprocess.peers import joined_peers
from slagate.router.receipts.ring import ReceiptRing
from slagate.router.reload.reload import (
    FleetSource,
    Proposal,
    Reloader,
    reloader_here,
    reloading,
)
from slagate.router.request.errors import Draining
from slagate.router.request.running import RunningRequests
from slagate.router.request.settings import CUT_S, RECEIPTS_S, Settings
from slagate.router.scheduling.dispatcher import Dispatcher
from slagate.router.scheduling.peers import PeerGateways
from slagate.router.scheduling.policy import Choose, choose_by_load
from slagate.router.scheduling.policy import choose as choose_by_targets
from slagate.router.services.admin import AdminService, Listeners, operators_listening
from slagate.router.services.control import ControlService
from slagate.workers.client.client import connect_worker
from slagate.workers.runtime.clock import monotonic_s, unix_s
from slagate.workers.runtime.listen import given_by, listen_on, stopped
from slagate.workers.server import SERVER_OPTIONS
from slagate.workers.tls.files import TlsFiles
from slagate.workers.tls.reloading import ClientTls, ServerTls, following

LOCAL = Http2Settings(ping_after_s=1e6)
"""For connections to the local server: it is this process, so there is no need to ping it."""

YOUNG_OBJECTS = 5000
"""The garbage collector's threshold for young objects: to collect so many takes under a millisecond. Of
Python's default of 700 nearly all are of requests that run, and would be walked for nothing."""


@dataclass(slots=True)
class App:
    """The objects of a running gateway, without its listeners."""

    fleet: Fleet
    gateway: RequestServices
    reloader: Reloader
    peers: PeerGateways
    instance_id: str
    is_draining: bool = False

    def not_ready(self) -> str:
        """Why no request can be served; empty when one can."""
        return "draining" if self.is_draining else self.fleet.not_ready()


@asynccontextmanager
async def build(
    config: FleetConfig,
    settings: Settings,
    *,
    connect: Connect,
    rng: random.Random,
    now_s: Callable[[], float] = monotonic_s,
    unix_s: Callable[[], float] = unix_s,
    peers: PeerGateways | None = None,
    choose: Choose | None = None,
) -> AsyncIterator[App]:
    """Build a gateway, and watch its workers, within the `with`.

    `config` was checked for serving. `connect` makes the client of a worker. `now_s` measures, `unix_s`
    dates receipts and tells how late KV events are. `peers` are the other gateways that send to the same
    workers. `choose` is another policy than that of the settings; a gateway that serves has none. At the
    end, releases of handoffs that have begun are waited for, then the watch loops stop.
    """
    peers = peers or PeerGateways()
    in_force = Proposal.of(config, policy=settings.policy)
    by_targets = settings.policy == "slagate"
    prefix = by_targets  # the other policy knows nothing of caches either
    fleet = Fleet(in_force.prepared, prefix=prefix, load_table=peers.load_table, now_s=now_s)
    instance_id = f"{rng.getrandbits(64):016x}"
    dispatcher = Dispatcher(
        fleet,
        rng=rng,
        choose=choose or (choose_by_targets if by_targets else choose_by_load),
        config=in_force.message,
        max_waiting=settings.max_waiting,
        peers=peers,
        now_s=now_s,
    )
    metrics = Metrics()
    metrics.watch(dispatcher)
    receipts = ReceiptRing(in_force.message, unix_s=unix_s, number=peers.receipt_number)
    reloader = reloader_here(in_force, dispatcher, receipts, metrics=metrics, now_s=now_s)
    watching = watch_fleet(
        fleet,
        connect=connect,
        now_s=now_s,
        unix_s=unix_s,
        rng=rng,
        drain_s=settings.worker_drain_s,
        on_cut=metrics.drains_cut.inc,
    )
    async with watching, anyio.create_task_group() as releases:
        gateway = RequestServices(
            dispatcher=dispatcher,
            settings=settings,
            metrics=metrics,
            receipts=receipts,
            releaser=Releaser(releases, metrics),
            live=RunningRequests(peers.show_running if peers.n_peers else None),
            instance_id=instance_id,
            leg_numbers=itertools.count(),
            now_s=now_s,
        )
        yield App(fleet, gateway, reloader, peers, instance_id)


async def serve(
    source: FleetSource,
    config: FleetConfig,
    settings: Settings,
    *,
    stamp: object,
    listeners: Listeners,
    tls: TlsFiles | None,
    worker_tls: TlsFiles | None,
    place: ProcessSlot | None = None,
) -> None:
    """Run a gateway until SIGTERM or SIGINT; print the ready line once every listener is bound.

    `config` was read from `source` and checked for serving, `stamp` is the source's from before that.
    `tls` is for clients and operators, `worker_tls` for workers; None: plaintext. With `place` it is one of
    several processes: it listens for clients only, and operators ask its parent. Raises `OSError` for an
    address that cannot be bound, `TlsError` for files that cannot be used.
    """
    clients_tls = None if tls is None else ServerTls("clients", tls)
    workers_tls = None if worker_tls is None else ClientTls("workers", worker_tls)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        peers = stack.enter_context(joined_peers(place, now_s=monotonic_s))
        connect = partial(connect_worker, tls=workers_tls)
        rng = random.Random(uuid.uuid4().int)
        app = await enter(build(config, settings, connect=connect, rng=rng, peers=peers))
        _watch_tls(app.gateway.metrics, clients_tls, workers_tls)
        operators = _operators_server(app, settings, source)
        if place is None:
            registry = app.gateway.metrics.registry
            listeners = stack.enter_context(
                operators_listening(
                    operators, listeners, clients_tls, registry=registry, not_ready=app.not_ready
                )
            )
        else:
            listeners = listeners.on_port(place.port)
            _take_place(operators, app, place)
        with given_by("--listen"):
            bound = listen_on(listeners.listen, shared=place is not None)
        listeners = listeners.on_port(stack.enter_context(closing(bound)).getsockname()[1])
        await operators.start()
        front = await enter(_clients_served(app, settings, bound, clients_tls))
        reread = await enter(following(clients_tls, workers_tls))
        # With a parent, the same signal again does nothing: the parent kills whom it will not wait for.
        signals = await enter(stopped(again=None if place is None else lambda: None))
        await enter(
            reloading(app.reloader, source, watch=settings.watch_config, stamp=stamp, also=[reread])
            if place is None
            else parent_watched(place, signals, hangup=reread)
        )
        _spare_collector()
        listeners.print_ready_line()
        await signals.wait()
        app.is_draining = True
        await _drain(front, app.gateway, settings.drain_s)
        app.gateway.receipts.end_watches()
        await operators.stop(RECEIPTS_S)


def _watch_tls(metrics: Metrics, clients: ServerTls | None, workers: ClientTls | None) -> None:
    """Show when the gateway's own certificates expire, and count handshakes that fail."""
    for side in (clients, workers):
        if side is not None:
            metrics.watch_certificate(side)
    if clients is not None:
        clients.on_refused = partial(metrics.connections.refused, RefusedConnection.TLS)


def _operators_server(app: App, settings: Settings, source: FleetSource) -> grpc.aio.Server:
    """A server of `slagate.v1.Gateway`, not bound to an address yet."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    service = AdminService(
        app.gateway.dispatcher,
        settings,
        reloader=app.reloader,
        source=source,
        receipts=app.gateway.receipts,
        now_s=monotonic_s,
    )
    gw_grpc.add_GatewayServicer_to_server(service, server)
    return server


def _take_place(server: grpc.aio.Server, app: App, place: ProcessSlot) -> None:
    """Have what all processes share, and answer operators, the parent and the others on a socket."""
    gateway = app.gateway
    app.instance_id = place.instance_id
    if place.admission is not None:
        gateway.dispatcher.set_admission(place.admission)
    service = ChildService(app.reloader, gateway.live, gateway.metrics, not_ready=app.not_ready)
    ps_grpc.add_ProcessServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{place.path('admin')}")


@asynccontextmanager
async def _clients_served(
    app: App, settings: Settings, listening: socket.socket, tls: ServerTls | None
) -> AsyncIterator[Front]:
    """Serve clients on this socket: the front serves Generate, and a server behind it `Control`."""
    gateway = app.gateway
    local = grpc.aio.server(options=SERVER_OPTIONS)
    control = ControlService(
        app.fleet,
        gateway.live,
        instance_id=app.instance_id,
        version=version("slagate"),
        not_ready=app.not_ready,
        peers=app.peers,
    )
    oe_grpc.add_ControlServicer_to_server(control, local)
    with TemporaryDirectory(prefix="slagate-") as folder:
        path = f"{folder}/local"
        local.add_insecure_port(f"unix:{path}")
        await local.start()
        async with (
            anyio.create_task_group() as connecting,
            serve_front(
                partial(generate, gateway=gateway),
                listening,
                ConnectionPool(path, connecting, settings=LOCAL, dial=dial_unix),
                settings,
                tls=None if tls is None else tls.context,
                counts=gateway.metrics.connections,
            ) as front,
        ):
            yield front
            await local.stop(None)


def _spare_collector() -> None:
    """Exempt the objects that exist now from garbage collection, and collect new ones less often.

    They stay anyway, modules above all. Objects that come later and live long are no work for the collector
    either (docs/decisions/0011-no-work-for-the-collector.md).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


async def _drain(front: Front, gateway: RequestServices, drain_s: float) -> None:
    """Take no new request, give running ones `drain_s` to finish, and end the rest with our own status."""
    front.retire()
    with anyio.move_on_after(drain_s):
        await front.settled()
        await gateway.live.none_left()
    gateway.live.end_all(Draining("the gateway is shutting down"))
    with anyio.move_on_after(CUT_S):
        await front.emptied()
