"""Receipts of real requests are no work for the garbage collector."""

from collections import Counter

import anyio
import pytest

from slagate.router.receipts.ring import ReceiptRing
from slagate.workers.runtime import virtual_loop
from support.gateway.simulation import Plan, running, simulate
from support.tracked import tracked

N_REQUESTS = 100


@pytest.mark.parametrize("stages", [{"prefill": 2, "decode": 2}, {"agg": 2}], ids=["disagg", "agg"])
def test_a_ring_of_receipts_holds_less_than_an_object_each_for_the_collector_to_walk(
    stages: dict[str, int],
) -> None:
    """Retried, cancelled and lost requests among them; only who failed one is a set that is walked."""

    async def main() -> Counter[str]:
        async with running(stages, seed=1, refusals=0.1, losses=0.05) as fleet:
            plans = [
                Plan(
                    at * 0.1, list(range(at, at + 300)), 20, cancel_after_s=0.1 if at % 5 else None
                )
                for at in range(N_REQUESTS)
            ]
            gateway, ring = fleet.app.gateway, fleet.app.gateway.receipts
            gateway.receipts = ReceiptRing(ring.config, unix_s=anyio.current_time)
            seen = await simulate(fleet, plans)
            await anyio.sleep(10)
            assert len(gateway.receipts) == N_REQUESTS
            assert {"OK", "CANCELLED"} <= {one.code for one in seen}
            assert any(len(one.receipt.attempts) > len(stages) for one in seen)
            full = tracked()
            gateway.receipts = ring
            return full - tracked()

    held = virtual_loop.run(main)
    assert held.total() < N_REQUESTS / 2, held
