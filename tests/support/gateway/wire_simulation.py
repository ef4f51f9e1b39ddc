"""The simulated gateway with real HTTP/2 on both sides: clients, front, channels and workers' servers.

Bytes travel over transports in memory, on virtual time. Lines and workers go bad as they do, at random.
"""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio

from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.connection_pool import ConnectionPool
from slagate.proto.rpc.sinks import Call
from slagate.router.front.server import Front
from slagate.router.generate import generate
from slagate.router.request.metadata import RECEIPT_TRAILER
from slagate.router.request.settings import Settings
from slagate.workers.client.client import WorkerClient
from slagate.workers.trtllm.worker import TrtllmWorker
from slagate.workers.worker import Worker
from support.engine.workers import request
from support.gateway.simulation import Fleet, Plan, Seen, running, sample
from support.http2.memory_transport import Network
from support.http2.peer import PeerServer
from support.http2.worker import Http2Server, Http2Worker, over_http2
from support.worker.bytes_sink import BytesSink

LATENCY_S = 0.002
N_CLIENTS = 6
"""Connections that the requests share."""


@dataclass
class WireFleet:
    """A running gateway, its front, and both of its networks."""

    fleet: Fleet
    front: Front
    clients: Network
    servers: dict[str, Http2Server]
    networks: dict[str, Network]
    far: list[Http2Worker]
    n_faults: dict[str, int] = field(default_factory=dict)


@asynccontextmanager
async def wired(
    stages: dict[str, int], *, seed: int, settings: Settings | None = None
) -> AsyncIterator[WireFleet]:
    """As `running`, with HTTP/2 in between."""
    servers: dict[str, Http2Server] = {}
    networks: dict[str, Network] = {}
    far: list[Http2Worker] = []

    def connect_to(address: str, worker: TrtllmWorker) -> AbstractAsyncContextManager[Worker]:
        server = servers[address] = Http2Server(worker)
        network = networks[address] = Network(server.protocol, LATENCY_S)

        @asynccontextmanager
        async def connected() -> AsyncIterator[Worker]:
            async with over_http2(worker, network, latency_s=LATENCY_S) as reached:
                far.append(reached)
                yield reached

        return connected()

    async with (
        running(stages, seed=seed, settings=settings, connect_to=connect_to) as fleet,
        anyio.create_task_group() as tasks,
    ):
        local = Network(PeerServer().protocol)
        links = ConnectionPool("local", tasks, settings=Http2Settings(), dial=local.dial)
        front = Front(
            partial(generate, gateway=fleet.app.gateway), links, fleet.app.gateway.settings
        )
        clients = Network(front.protocol, LATENCY_S)
        yield WireFleet(fleet, front, clients, servers, networks, far)
        front.close()
        links.close("over")
        tasks.cancel_scope.cancel()


async def play(
    wire: WireFleet, plans: Sequence[Plan], *, rng: random.Random, n_faults: int = 0
) -> list[Seen]:
    """Every plan to its end, with so many things going wrong on the way."""
    seen = [Seen(plan) for plan in plans]
    async with anyio.create_task_group() as around:
        around.start_soon(sample, wire.fleet)
        channels = [
            WorkerClient(f"gw-{n}", around, dial=wire.clients.dial) for n in range(N_CLIENTS)
        ]
        async with anyio.create_task_group() as tasks:
            for number, one in enumerate(seen):
                tasks.start_soon(_client, channels[number % N_CLIENTS], one, rng)
            for _ in range(n_faults):
                tasks.start_soon(_fault, wire, channels, rng)
        for channel in channels:
            channel.close()
        around.cancel_scope.cancel()
    return seen


async def _client(channel: WorkerClient, seen: Seen, rng: random.Random) -> None:
    plan = seen.plan
    await anyio.sleep(plan.at_s)
    sink = BytesSink()
    data = request("same", plan.prompt, plan.n_tokens).SerializeToString()
    call = channel.generate(data, plan.metadata, sink, timeout_s=plan.timeout_s)
    async with anyio.create_task_group() as tasks:
        if rng.random() < 0.2:
            tasks.start_soon(_stall, call, rng)
        if plan.cancel_after_s is not None:
            tasks.start_soon(_cancel, call, plan.cancel_after_s)
        status = await sink.done()
        tasks.cancel_scope.cancel()
    seen.code = status.code.name
    for message in sink.messages:
        assert not seen.finished, "something after the terminal event"
        response = oe.GenerateResponse.FromString(message)
        seen.ids.add(response.request_id)
        seen.tokens += [token.token_id for token in response.token.tokens]
        seen.finished = response.HasField("finished")
    receipt = dict(status.trailers).get(RECEIPT_TRAILER)
    if isinstance(receipt, bytes):
        seen.receipt = gw.Receipt.FromString(receipt)


async def _cancel(call: Call, after_s: float) -> None:
    await anyio.sleep(after_s)
    call.cancel()


async def _stall(call: Call, rng: random.Random) -> None:
    """Read nothing for a while."""
    await anyio.sleep(rng.uniform(0, 0.5))
    call.pause()
    await anyio.sleep(rng.choice((0.01, 1.0, 60.0)))
    call.resume()


async def _fault(wire: WireFleet, channels: list[WorkerClient], rng: random.Random) -> None:
    """One thing that goes wrong, and is mended if it can be."""
    await anyio.sleep(rng.uniform(0, 3))
    address = rng.choice(list(wire.servers))
    lines = [*wire.networks[address].links, *wire.clients.links]
    kind = rng.choice(("dies", "refuses", "client leaves", "line is cut", "line stalls"))
    wire.n_faults[kind] = wire.n_faults.get(kind, 0) + 1
    if kind == "dies":
        wire.servers[address].die()
    elif kind == "refuses":
        wire.servers[address].die()
        wire.networks[address].refuses = "nobody listens"
        await anyio.sleep(rng.uniform(0, 2))
        wire.networks[address].refuses = ""
    elif kind == "client leaves":
        for connection in rng.choice(channels).pool.connections:
            connection.abandon("the client left")
    elif lines:
        ends = rng.choice(lines)
        if kind == "line is cut":
            for end in ends:
                end.is_cut = True
        else:
            end = rng.choice(ends)
            end.is_stalled = True
            await anyio.sleep(rng.uniform(0, 5))
            end.flow()


async def check_wire(wire: WireFleet, seen: Sequence[Seen]) -> None:
    """I1, I2, I5, I9: one outcome each, and nothing is held at either end of anything."""
    fleet, gateway = wire.fleet, wire.fleet.app.gateway
    # Lines that were cut are noticed by the answers to pings that do not come.
    await anyio.sleep(100)
    for member in fleet.app.fleet.members():
        idle = (
            member.ranks.inflight,
            member.ranks.queued_tokens,
            member.ranks.queued_s,
            member.ranks.context_tokens,
        )
        assert idle == (0, 0, 0.0, 0), member
        assert len(member.legs) == 0
    assert gateway.releaser.n_open == 0
    assert len(gateway.live) == 0
    assert (len(wire.front.intake), wire.front.intake.n_bytes) == (0, 0)
    for address, worker in fleet.workers.items():
        load = await worker.load(oe.GetLoadRequest())
        assert load.running_requests == 0, address
        assert load.active_kv_sessions == 0, address
    for client in wire.front.clients:
        assert client.connection.n_streams == 0
        assert client.connection.engine.queued_body_size() == 0
    # What is left are the subscriptions to KV events, one a rank.
    for far in wire.far:
        assert far.channel.n_calls <= 1, far.channel
        assert sum(c.n_streams for c in far.channel.pool.connections) <= 1
    assert sum(server.n_streams for server in wire.servers.values()) <= len(wire.servers)
    outcomes = {
        sample.labels["outcome"]: int(sample.value)
        for metric in gateway.metrics.requests.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.value
    }
    codes = [one.code for one in seen]
    assert all(codes)
    assert sum(outcomes.values()) <= len(seen)
    assert outcomes.get("completed", 0) >= codes.count("OK")
    begun = sum(1 for one in seen if one.tokens or one.receipt.ByteSize())
    assert sum(outcomes.values()) >= begun
