"""A front over scripted workers, with clients in memory: on virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio

from slagate.proto.http2.interfaces import Http2Settings
from slagate.proto.rpc.connection_pool import ConnectionPool
from slagate.proto.rpc.status import Status
from slagate.router.front.server import Front
from slagate.router.request.settings import Settings
from slagate.workers.client.client import WorkerClient
from support.builders import request
from support.gateway.request_path import Bench, bench
from support.http2.memory_transport import MemoryTransport, Network, joined
from support.http2.peer import PeerServer
from support.http2.raw import RawClient
from support.worker.bytes_sink import BytesSink
from support.worker.fake import Script


class Served(NamedTuple):
    """A running front; `good` is a client that behaves."""

    bench: Bench
    front: Front
    good: WorkerClient
    network: Network
    local: PeerServer

    def raw(self) -> RawClient:
        """A client that sends whatever it likes."""
        client = RawClient()
        joined(client, self.front.protocol())
        return client

    def join(self, client: asyncio.Protocol) -> tuple[MemoryTransport, MemoryTransport]:
        return joined(client, self.front.protocol())

    async def ask(self) -> Status:
        """One call of the client that behaves."""
        sink = BytesSink()
        self.good.generate(request().SerializeToString(), (), sink, timeout_s=20)
        return await sink.done()

    def check_free(self) -> None:
        """Nothing is held of any call."""
        gateway = self.bench.app.gateway
        for member in self.bench.app.fleet.members():
            held = (
                member.ranks.inflight,
                member.ranks.queued_tokens,
                member.ranks.context_tokens,
                len(member.legs),
            )
            assert held == (0, 0, 0, 0), member
        assert len(gateway.live) == 0
        assert gateway.releaser.n_open == 0
        assert (len(self.front.intake), self.front.intake.n_bytes) == (0, 0)
        assert len(self.front.requests) == len(self.front.untaken) == 0
        for client in self.front.clients:
            assert client.connection.n_streams == 0
            assert client.connection.engine.queued_body_size() == 0
        assert all(connection.n_streams == 0 for connection in self.local.connections)


@asynccontextmanager
async def served(*scripts: Script, settings: Settings | None = None) -> AsyncIterator[Served]:
    """Calls that are not Generate are answered by `local`, which echoes."""
    local = PeerServer()
    async with (
        bench("agg", agg=list(scripts), settings=settings) as b,
        anyio.create_task_group() as tasks,
    ):
        links = ConnectionPool(
            "l", tasks, settings=Http2Settings(), dial=Network(local.protocol).dial
        )
        gateway = b.app.gateway
        front = Front(b.serve, links, gateway.settings, counts=gateway.metrics.connections)
        network = Network(front.protocol, 0.001)
        good = WorkerClient("gw", tasks, dial=network.dial)
        yield Served(b, front, good, network, local)
        good.close()
        front.close()
        links.close("over")
        tasks.cancel_scope.cancel()
