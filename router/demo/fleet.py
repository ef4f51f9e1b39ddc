"""The demo's processes: eight simulated workers in four pools, and their gateway."""

import json
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio

from slagate.pools.fleet_file.load import parse_config
from slagate.pools.grid.grid import Stage
from slagate.proto import gateway_pb2 as gw
from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.proto import openengine_pb2 as oe
from slagate.router.children import ChildError, Cluster
from slagate.workers.client.client import WorkerClient, connect_worker, unary
from slagate.workers.client.control import channel_to
from slagate.workers.errors import WorkerError

GRID_ALONE = {"spill": "none", "admission": "off"}
"""`scheduling` without which load decides nothing between pools, and nobody is refused."""

PLAINTEXT = ("--insecure", "--worker-insecure")
"""Without TLS, as all traffic stays on this machine."""

READY_LIMIT_S = 60.0
POLL_S = 0.1
VERIFY_FAILURES = "kv_verify_failures"

_T = TypeVar("_T")


class PoolName(NamedTuple):
    """A pool and the stage it serves."""

    name: str
    stage: Stage


class DemoFleet(NamedTuple):
    """A running fleet with its gateway. Addresses are host:port."""

    gateway: str
    admin: str
    http: str
    workers: tuple[str, ...]
    pools: tuple[PoolName, ...]
    transport: str
    policy: str
    scheduling: Mapping[str, str]
    model: str
    block_tokens: int


async def start_fleet(
    cluster: Cluster, fleet_path: Path, *, transport: str, policy: str, grid_alone: bool
) -> DemoFleet:
    """Start everything and wait until every worker takes work.

    The fleet file is the packaged `demo.json`, with the addresses of as many workers as its `replicas` say;
    with `grid_alone` its `scheduling` is `GRID_ALONE`. `transport` is the workers' own option, `policy` the
    gateway's. Leaves the fleet file at `fleet_path`, and beside it the key with which the workers sign
    handoffs for each other. Raises `ChildError`.
    """
    packaged = resources.files("slagate.configs") / "grids" / "demo.json"
    fleet = json.loads(packaged.read_text())
    if grid_alone:
        fleet["scheduling"] = GRID_ALONE
    config = parse_config(fleet, source="demo.json")
    pools = tuple(
        PoolName(name, Stage(stage))
        for stage, grid in config.stages.items()
        for name in grid.pool_names
    )
    key_path = fleet_path.with_name("demo-handoff.key")
    _write_key(key_path)
    common = ["--transport", transport, "--handoff-key-file", str(key_path)]
    addresses, transports = await _start_workers(cluster, pools, fleet["pools"], common)
    for name, listen in addresses.items():
        fleet["pools"][name]["workers"] = listen
    await anyio.Path(fleet_path).write_text(json.dumps(fleet, indent=2) + "\n")
    listeners = [
        part for name in ("listen", "admin", "http") for part in (f"--{name}", "127.0.0.1:0")
    ]
    gateway = await cluster.start(
        "gateway",
        ["serve", "--config", str(fleet_path), "--policy", policy, *listeners, *PLAINTEXT],
    )
    ready = await gateway.wait_ready(limit_s=READY_LIMIT_S)
    try:
        with anyio.fail_after(READY_LIMIT_S):
            await _every_worker_ready(ready["admin"])
    except TimeoutError:
        raise gateway.error(f"did not see all workers ready after {READY_LIMIT_S:.0f} s") from None
    except WorkerError as error:
        raise gateway.error(f"did not list its pools: {error}") from error
    workers = tuple(address for name in addresses for address in addresses[name])
    info = await _ask(workers[0], WorkerClient.server_info)
    return DemoFleet(
        gateway=ready["listen"],
        admin=ready["admin"],
        http=ready["http"],
        workers=workers,
        pools=pools,
        transport=", ".join(sorted(transports)),
        policy=policy,
        scheduling=fleet["scheduling"],
        model=info.supported_models[0],
        block_tokens=info.capacity.kv_block_size,
    )


async def kv_verify_failures(workers: tuple[str, ...]) -> int:
    """How many fetched KV blocks had wrong content, by the workers' own counts, summed over `workers`.

    Raises `ChildError` for a worker that does not answer or does not count them.
    """
    total = 0
    for address in workers:
        load = await _ask(address, lambda worker: worker.load(oe.GetLoadRequest()))
        if VERIFY_FAILURES not in load.attributes.fields:
            raise ChildError(f"worker {address} reports no {VERIFY_FAILURES}")
        total += int(load.attributes.fields[VERIFY_FAILURES].number_value)
    return total


async def _start_workers(
    cluster: Cluster,
    pools: tuple[PoolName, ...],
    specs: Mapping[str, Mapping[str, object]],
    common: Sequence[str],
) -> tuple[dict[str, list[str]], set[str]]:
    # All are started before the first is waited for, so that their imports run side by side.
    children = [
        (
            pool.name,
            await cluster.start(
                f"{pool.name}-{number}",
                [
                    *("worker", "sim", "--role", pool.stage.value),
                    *("--profile", str(specs[pool.name]["profile"])),
                    *("--tp", str(specs[pool.name]["tp"]), "--listen", "127.0.0.1:0", "--insecure"),
                    *common,
                ],
            ),
        )
        for pool in pools
        for number in range(int(str(specs[pool.name]["replicas"])))
    ]
    addresses: dict[str, list[str]] = {pool.name: [] for pool in pools}
    transports = set()
    for name, child in children:
        ready = await child.wait_ready(limit_s=READY_LIMIT_S)
        addresses[name].append(ready["listen"])
        transports.add(ready["kv_transport"].lower())
    return addresses, transports


def _write_key(path: Path) -> None:
    """Write a new secret that only this user can read."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(32) + "\n")


async def _every_worker_ready(admin: str) -> None:
    async with channel_to(admin, None) as channel:
        stub = gw_grpc.GatewayStub(channel)
        while True:
            listed: gw.ListPoolsResponse = await unary(stub.ListPools, gw.ListPoolsRequest())
            if all(pool.workers_ready == pool.workers for pool in listed.pools):
                return
            # Polled: the state of another process sets no event here.
            await anyio.sleep(POLL_S)


async def _ask(address: str, call: Callable[[WorkerClient], Awaitable[_T]]) -> _T:
    """A worker's answer. Raises `ChildError` where there is none."""
    async with connect_worker(address) as worker:
        try:
            return await call(worker)
        except WorkerError as error:
            # Raised below: the task group of the worker's client would wrap it.
            failure = error
    raise ChildError(f"worker {address}: {failure}")
