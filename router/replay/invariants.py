"""The invariants of ARCHITECTURE.md, checked in a gateway over simulated workers. Each check asserts.

`check_always` may be called at any moment, the others when all requests have ended.
"""

from collections.abc import Mapping

import anyio

from slagate.pools.grid.grid import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.router.app import App
from slagate.workers.trtllm.worker import TrtllmWorker

SETTLED_S = 10.0
"""For workers to end what was cancelled, in their own time: longer than any transfer and iteration."""


def check_always(app: App) -> None:
    """I2 at any moment; I3 is asserted where leases are taken."""
    for member in app.fleet.members():
        assert 0 <= member.ranks.inflight <= member.max_inflight, member
        assert member.ranks.queued_tokens >= 0, member
        assert member.ranks.context_tokens >= 0, member
        assert member.ranks.queued_s >= 0, member


async def check_idle(app: App, workers: Mapping[str, TrtllmWorker], *, n_requests: int) -> None:
    """I1, I2, I5, I9: nothing is left, and each of all requests was counted once."""
    gateway = app.gateway
    await anyio.sleep(SETTLED_S)
    for member in app.fleet.members():
        idle = (
            member.ranks.inflight,
            member.ranks.queued_tokens,
            member.ranks.queued_s,
            member.ranks.context_tokens,
        )
        assert idle == (0, 0, 0.0, 0), member
    assert gateway.releaser.n_open == 0
    assert len(gateway.live) == 0
    for address, worker in workers.items():
        load = await worker.load(oe.GetLoadRequest())
        assert load.running_requests == 0, address
        assert load.active_kv_sessions == 0, address
    total = sum(
        sample.value
        for metric in gateway.metrics.requests.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    )
    assert total == n_requests


def check_index(app: App, workers: Mapping[str, TrtllmWorker]) -> None:
    """I6: as many blocks are known of each worker as its engine holds, and none is pending.

    That they are the same blocks is shown by `tests/property/test_follow.py`.
    """
    for member in app.fleet.members():
        if member.stage is Stage.DECODE:
            continue
        assert member.events is not None
        n_held = sum(len(rank) for rank in workers[member.address].llm.resident())
        assert (member.events.n_blocks, member.events.n_pending) == (n_held, 0), member
