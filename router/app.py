"""The gateway process: builds the graph, serves it, takes it down in order."""

import itertools
import random
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import NamedTuple

import anyio
import grpc.aio

from slagate.pools.fleet import Fleet
from slagate.pools.grid_config import FleetConfig
from slagate.pools.watch import Connect, watch_fleet
from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.proto import openengine_pb2_grpc as oe_grpc
from slagate.router.admin import AdminService
from slagate.router.dispatch import Dispatcher
from slagate.router.front import Front
from slagate.router.generate import Gateway
from slagate.router.handoff import Releaser
from slagate.router.live import LiveRequests
from slagate.router.metrics import Metrics
from slagate.router.probes import serve_probes
from slagate.router.service import ControlService
from slagate.router.settings import Settings
from slagate.workers.client import connect_worker
from slagate.workers.listen import Address, bind, ready_line, stopped
from slagate.workers.server import SERVER_OPTIONS


class App(NamedTuple):
    """A running gateway without its listeners."""

    fleet: Fleet
    gateway: Gateway
    instance_id: str


@asynccontextmanager
async def build(
    config: FleetConfig,
    settings: Settings,
    *,
    connect: Connect,
    now_s: Callable[[], float],
    rng: random.Random,
) -> AsyncIterator[App]:
    """The graph of a gateway, watching its workers, for the time of the block.

    Raises `ConfigError` for a fleet file that cannot be served. At the end of the block, handoffs that
    are being released get their chance first, then the watch loops stop.
    """
    fleet = Fleet(config)
    instance_id = f"{rng.getrandbits(64):016x}"
    numbers = itertools.count()
    metrics = Metrics()
    metrics.watch(fleet)
    async with (
        watch_fleet(fleet, connect=connect, now_s=now_s, rng=rng),
        anyio.create_task_group() as releases,
    ):
        gateway = Gateway(
            dispatcher=Dispatcher(fleet, rng=rng),
            settings=settings,
            metrics=metrics,
            releaser=Releaser(releases, metrics),
            live=LiveRequests(),
            leg_id=lambda: f"{instance_id}-{next(numbers)}",
            now_s=now_s,
        )
        yield App(fleet, gateway, instance_id)


async def serve(
    config: FleetConfig, settings: Settings, *, listen: Address, admin: Address, http: Address
) -> None:
    """Run a gateway until SIGTERM or SIGINT; prints the ready line once every listener is bound.

    Raises `ConfigError`, or `OSError` for an address that cannot be bound.
    """
    rng = random.Random(uuid.uuid4().int)
    async with build(
        config, settings, connect=connect_worker, now_s=anyio.current_time, rng=rng
    ) as app:
        live = app.gateway.live
        draining = False

        def not_ready() -> str:
            if draining:
                return "draining"
            return ", ".join(f"no {s.value} worker is ready" for s in app.fleet.unready_stages())

        front = grpc.aio.server(options=SERVER_OPTIONS)
        front.add_generic_rpc_handlers((Front(app.gateway),))
        control = ControlService(
            app.fleet, live, instance_id=app.instance_id, version=version("slagate")
        )
        oe_grpc.add_ControlServicer_to_server(control, front)
        operators = grpc.aio.server(options=SERVER_OPTIONS)
        service = AdminService(app.gateway.dispatcher, settings, now_s=anyio.current_time)
        gw_grpc.add_GatewayServicer_to_server(service, operators)
        listen_at, admin_at = bind(front, listen), bind(operators, admin)
        registry = app.gateway.metrics.registry
        with serve_probes(*http, registry=registry, not_ready=not_ready) as http_port:
            await front.start()
            await operators.start()
            async with stopped() as signals:
                http_at = http._replace(port=http_port)
                ready_line(listen=str(listen_at), admin=str(admin_at), http=str(http_at))
                await signals.wait()
                draining = True
                await front.stop(settings.drain_s)
                await operators.stop(None)
