"""The gateway's whole request path in front of the C backends, which know nothing but Generate.

python -m bench.relay.full [--own] N_TOKENS WORKER...    prints its port

An aggregated fleet of 64 workers, which are the given ones in turn. The graph is the gateway's: watched
fleet, prefix policy, receipts, metrics, log lines. What a worker says of itself is made up here, and
nothing of that goes over the network. Half of each prompt is cached by a quarter of the workers, as if
their events had said so; no events come while it runs.

The 64 share a channel to each of the given ones, so that what differs from the fixed choice is routing
alone; with --own each has its own connection.
"""

import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count, islice

import anyio
import anyio.lowlevel
import uvloop
from prometheus_client import disable_created_metrics

from bench.relay.fixed import channels_to, fronted
from bench.relay.workloads import cached_halves
from slagate.pools.fleet.fleet import Fleet
from slagate.pools.fleet.watch import Connect
from slagate.proto.rpc.sinks import Call, Sink
from slagate.proto.rpc.status import Metadata
from slagate.router.app import build
from slagate.router.generate import generate
from slagate.router.request.settings import Settings
from slagate.workers.client.client import WorkerClient
from slagate.workers.runtime.clock import monotonic_s
from slagate.workers.runtime.logs import log_to_stderr
from support.builders import PROFILE, config
from support.worker.fake import ROLES, FakeWorker

N_MEMBERS = 64
BLOCK_TOKENS = 32
ADDRESSES = [f"agg{number}:1" for number in range(N_MEMBERS)]


class BackendWorker(FakeWorker):
    """A worker whose streams are a backend's, and whose word on itself is a fake's."""

    def __init__(self, channel: WorkerClient, number: int) -> None:
        super().__init__(role=ROLES["agg"])
        self.info.instance_id = f"i{number}"
        self._channel = channel

    def generate(  # type: ignore[override]
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> Call:
        """As `Worker.generate`."""
        return self._channel.generate(request, metadata, sink, timeout_s=timeout_s)


def connector(channels: list[WorkerClient]) -> Connect:
    """Members have the channels in turn."""
    workers = {
        address: BackendWorker(channels[number % len(channels)], number)
        for number, address in enumerate(ADDRESSES)
    }

    @asynccontextmanager
    async def connect(address: str) -> AsyncIterator[BackendWorker]:
        yield workers[address]

    return connect


def cache(fleet: Fleet, n_tokens: int) -> None:
    """The first half of each prompt on a quarter of the workers."""
    pool = fleet.pools["agg"]
    overlaps = pool.overlaps
    assert overlaps is not None
    index, names = overlaps.index_of(BLOCK_TOKENS), count(1)
    holders = [index.join() for _ in pool.members]
    for row, holder in enumerate(holders):
        overlaps.set_holder(row, holder, block_tokens=BLOCK_TOKENS)
    for number, prompt in enumerate(cached_halves(n_tokens)):
        hashes = list(islice(names, prompt.n_tokens // BLOCK_TOKENS))
        for holder in holders[number % 4 :: 4]:
            index.stored(holder, hashes, None, prompt.tokens)


async def all_up(fleet: Fleet) -> None:
    """Wait until every worker was looked at, which takes no time, as they answer from memory."""
    for _ in range(1000):
        if all(member.is_up and member.models for member in fleet.members()):
            return
        await anyio.lowlevel.checkpoint()
    raise RuntimeError("the workers do not come up")


async def main(n_tokens: int, workers: list[str]) -> None:
    """Serve until the process is ended."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    log_to_stderr("info")
    pools = {"agg": {"workers": ADDRESSES, "profile": PROFILE, "tp": 1}}
    async with (
        channels_to(workers) as channels,
        build(
            config("agg", pools),
            Settings(),
            connect=connector(channels),
            now_s=monotonic_s,
            rng=random.Random(1),
        ) as app,
    ):
        await all_up(app.fleet)
        cache(app.fleet, n_tokens)
        async with fronted(partial(generate, gateway=app.gateway)):
            await anyio.sleep_forever()


if __name__ == "__main__":
    options = [each for each in sys.argv[1:] if each.startswith("--")]
    first, *rest = [each for each in sys.argv[1:] if not each.startswith("--")]
    uvloop.run(main(int(first), rest * (N_MEMBERS // len(rest)) if options else rest))
