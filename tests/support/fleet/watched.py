"""A fleet whose workers are looked at, on the virtual loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from slagate.pools.fleet.fleet import Fleet
from slagate.pools.fleet.member import Member
from slagate.pools.fleet.watch import INTERVAL_S, JITTER_RATIO, watch_fleet
from support.builders import fleet, rng
from support.worker.fake import ROLES, FakeWorker, connector

LOOK_S = INTERVAL_S * (1 + JITTER_RATIO)
"""Within this time every worker is looked at once more."""


@asynccontextmanager
async def watched(workers: dict[str, FakeWorker] | None = None) -> AsyncIterator[Fleet]:
    """A fleet of p1, p2, d1, d2 that was looked at once."""
    of = fleet(ready=False)
    fakes = healthy() | (workers or {})
    async with watch_fleet(of, connect=connector(fakes), now_s=anyio.current_time, rng=rng()):
        await anyio.sleep(0.01)
        yield of


def healthy() -> dict[str, FakeWorker]:
    stages = {"p1:1": "prefill", "p2:1": "prefill", "d1:1": "decode", "d2:1": "decode"}
    return {address: FakeWorker(role=ROLES[stage]) for address, stage in stages.items()}


def first(of: Fleet) -> Member:
    return of.pools["prefill"].members["p1:1"]
