"""Bytes that no peer should send, to the front and to the channel, with the whole path between them."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
import grpc

from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.connection_pool import ConnectionPool
from slagate.proto.rpc.status import OK
from slagate.router.front.server import Front
from slagate.router.request.settings import ClientLimits, Settings
from slagate.workers.client.client import WorkerClient
from slagate.workers.runtime.virtual_loop import VirtualLoop, run
from support.builders import finished, request, token
from support.gateway.request_path import Bench, bench
from support.http2.fuzz import PREFACE, Replay, frames, spoilt_client, spoilt_server
from support.http2.memory_transport import Network, joined
from support.http2.peer import PeerServer
from support.http2.worker import Http2Server, Http2Worker, over_http2, tapped
from support.seeds import each_batch, n_seeds_of
from support.worker.bytes_sink import BytesSink
from support.worker.fake import HANG, FakeWorker, Script, Wait, refusal

N_INPUTS = 200
N_BATCH = 20
"""Inputs that one gateway gets, one after the other: each must find it as good as new."""

N_CALLS = 4
TIMEOUT_S = 4.0
LIMITS = Settings(
    default_timeout_s=4.0, clients=ClientLimits(arrival_s=4.0, handshake_s=4.0, max_connections=100)
)
QUIET_S = 7.0
"""Whatever any peer does, every request has come to its end by then."""

ANSWER: Script = (token(1), token(2, 3), Wait(0.001), token(4), finished(), OK)
SCRIPTS: tuple[Script, ...] = (
    ANSWER,
    refusal(grpc.StatusCode.NOT_FOUND),
    (token(1), HANG),
    (token(*range(300)), Wait(0.01), finished(), OK),
)


class Path(NamedTuple):
    """A gateway with a worker at the end of a network, and a client that behaves."""

    bench: Bench
    front: Front
    good: WorkerClient
    local: PeerServer
    worker: Http2Worker
    server: Http2Server
    serves: list[asyncio.Protocol]  # instead of the worker, for the next connections to it

    async def ask(self, *, timeout_s: float | None = TIMEOUT_S) -> BytesSink:
        sink = BytesSink()
        self.good.generate(request().SerializeToString(), (), sink, timeout_s=timeout_s)
        await sink.done()
        return sink

    async def check_good(self) -> None:
        """Who behaves is served."""
        sink = await self.ask()
        assert sink.status == OK, sink.status

    def check_free(self) -> None:
        """Nothing is held of anybody."""
        gateway = self.bench.app.gateway
        for member in self.bench.app.fleet.members():
            held = (
                member.ranks.inflight,
                member.ranks.queued_tokens,
                member.ranks.context_tokens,
                len(member.legs),
            )
            assert held == (0, 0, 0, 0), member
        assert len(gateway.live) == gateway.releaser.n_open == 0
        assert (len(self.front.intake), self.front.intake.n_bytes) == (0, 0)
        for client in self.front.clients:
            assert client.connection.n_streams == 0, client.connection
            assert client.connection.engine.queued_body_size() == 0
        for connection in (*self.local.connections, *self.server.connections):
            assert connection.n_streams == 0
        assert repr(self.worker.channel).startswith("WorkerClient(0 calls, 0 waiting")
        assert all(not c.n_streams for c in self.worker.channel.pool.connections)


@asynccontextmanager
async def path() -> AsyncIterator[Path]:
    local = PeerServer()
    serves: list[asyncio.Protocol] = []
    async with bench("agg", agg=[ANSWER], settings=LIMITS) as b, anyio.create_task_group() as tasks:
        scripted: FakeWorker = b.workers["a1:1"]
        server = Http2Server(scripted)
        network = Network(lambda: serves.pop() if serves else server.protocol())
        links = ConnectionPool(
            "l", tasks, settings=Http2Settings(), dial=Network(local.protocol).dial
        )
        async with over_http2(scripted, network) as worker:
            (member,) = b.app.fleet.members()
            member.worker = worker
            front = Front(b.serve, links, b.app.gateway.settings)
            good = WorkerClient("gw", tasks, dial=Network(front.protocol, 0.001).dial)
            yield Path(b, front, good, local, worker, server, serves)
            good.close()
            front.close()
            links.close("over")
        tasks.cancel_scope.cancel()


async def converse(p: Path, client: WorkerClient) -> None:
    """Something of everything that clients do."""
    data = request(tokens=list(range(200))).SerializeToString()
    p.bench.scripts["agg"].scripts[:] = SCRIPTS
    p.bench.calls("agg").clear()
    sinks = [BytesSink() for _ in range(N_CALLS)]
    metadata = (("x-slo-ttft-ms", "100"), ("x-any-bin", b"\x01\x02"))
    calls = [client.generate(data, metadata, sink, timeout_s=3.0) for sink in sinks]
    other = BytesSink()
    client.kv_events(b"passed on", (("x-a", "b"),), other)
    await other.done()
    for at, sink in enumerate(sinks):
        if at == 2:
            await sink.at_least(1)
            calls[at].cancel()
        await sink.done()
    p.bench.scripts["agg"].scripts[:] = [ANSWER]


def recorded() -> tuple[bytes, bytes]:
    """What a client says to the front, and what a worker says to the channel."""
    said: tuple[bytearray, bytearray] = (bytearray(), bytearray())

    async def main() -> None:
        async with path() as p, anyio.create_task_group() as tasks:
            network = Network(lambda: tapped(p.front.protocol(), said[0]))
            client = WorkerClient("gw", tasks, dial=network.dial)
            dial = p.worker.channel.pool._dial

            async def tapping(address: str, make: Callable[[], asyncio.Protocol]) -> None:
                await dial(address, lambda: tapped(make(), said[1]))

            p.worker.channel.pool._dial = tapping
            await converse(p, client)
            client.close()
            tasks.cancel_scope.cancel()

    run(main)
    return bytes(said[0]), bytes(said[1])


CLIENT_SAID, WORKER_SAID = recorded()


async def quiet(p: Path) -> None:
    await p.check_good()
    await anyio.sleep(1)
    p.check_free()
    p.bench.calls("agg").clear()
    for worker in p.bench.workers.values():
        worker.calls.clear()
    p.local.streams.clear()


def no_timers_are_left() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    assert loop.n_timers == 0


async def over() -> None:
    await anyio.sleep(100)
    no_timers_are_left()


def test_whatever_a_client_says_to_the_front_its_connection_alone_suffers(
    record_property: Callable[[str, object], None],
) -> None:
    record_property("fuzz inputs", n_seeds_of(N_INPUTS))

    async def one(p: Path, rng: random.Random) -> None:
        p.bench.scripts["agg"].scripts[:] = [rng.choice(SCRIPTS) for _ in range(8)]
        data = spoilt_client(CLIENT_SAID, rng)
        running = BytesSink()
        p.good.kv_events(b"x", (), running)
        near, _ = joined(Replay(data, rng), p.front.protocol())
        await anyio.sleep(0.1)
        p.bench.scripts["agg"].scripts[:] = [ANSWER]
        await p.check_good()
        assert (await running.done()).code is OK.code
        if rng.random() < 0.5:
            # What it began ends with it, at once.
            near.close()
            await anyio.sleep(0.1)
        else:
            await anyio.sleep(QUIET_S)
        assert len(p.bench.app.gateway.live) == len(p.front.intake) == 0
        # What is passed on may stay for as long as its client.
        near.close()
        await quiet(p)
        assert len(p.front.clients) == 1

    batches(one)


def test_whatever_a_worker_says_each_client_gets_one_status_and_the_next_is_served(
    record_property: Callable[[str, object], None],
) -> None:
    record_property("fuzz inputs", n_seeds_of(N_INPUTS))

    async def one(p: Path, rng: random.Random) -> None:
        p.serves.append(Replay(spoilt_server(WORKER_SAID, rng), rng))
        for connection in p.worker.channel.pool.connections:
            connection.close("another one")
        sinks = [BytesSink() for _ in range(N_CALLS)]
        for sink in sinks:
            p.good.generate(request().SerializeToString(), (), sink, timeout_s=TIMEOUT_S)
        for sink in sinks:
            await sink.done()
            assert sink.status is not None
            assert sink.status.code is OK.code or sink.status.message
        p.serves.clear()
        for connection in p.worker.channel.pool.connections:
            connection.close("was spoilt")
        await anyio.sleep(QUIET_S)
        await quiet(p)

    batches(one)


def batches(one: Callable[[Path, random.Random], object]) -> None:
    """Each batch has a gateway of its own; what fails names the seed of the input."""

    async def main(seeds: range, begin: Callable[[int], None]) -> None:
        async with path() as p:
            await p.check_good()
            for seed in seeds:
                begin(seed)
                await one(p, random.Random(seed))  # type: ignore[misc]
        await over()

    each_batch(N_INPUTS, N_BATCH, lambda seeds, begin: run(main, seeds, begin))


def test_the_recorded_conversations_are_some() -> None:
    """Else the inputs would be spoilt before they are made."""
    assert CLIENT_SAID.startswith(PREFACE)
    kinds = [frame[3] for frame in frames(CLIENT_SAID[len(PREFACE) :])]
    assert kinds.count(1) == N_CALLS + 1
    assert {0, 1, 3, 4} <= set(kinds)
    assert {0, 1, 4} <= {frame[3] for frame in frames(WORKER_SAID)}
    assert [frame[3] for frame in frames(WORKER_SAID)].count(1) >= N_CALLS
