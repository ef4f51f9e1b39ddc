"""When a prefill worker may end: by its engine's statistics, or by the time limit of its handoffs."""

import asyncio

import anyio
import pytest

from slagate.workers.sim.request import DisaggregatedParams
from slagate.workers.trtllm.handoffs import Handoffs, until_fetched
from slagate.workers.trtllm.poll import NewestRows
from support import virtual_loop
from support.engine.sim_llm import until

LIMIT_S = 60.0


def row(active: int, queued: int = 0, rank: int = 0) -> dict[str, int]:
    return {"attentionDpRank": rank, "numActiveRequests": active, "numQueuedRequests": queued}


def drained_after(rows_at: list[tuple[float, dict[str, int]]], *, n_ranks: int = 1) -> float:
    """When a drain ends that begins at 1 s with one handoff parked, and what the engine says by then."""

    async def main() -> float:
        handoffs = Handoffs(backend="X", limit_s=LIMIT_S)
        params = DisaggregatedParams(ctx_request_id=7, opaque_state=b"s", first_gen_tokens=[1])
        handoffs.park(params, rank=None)
        rows = NewestRows(n_ranks)
        rows.take_rows([row(0, rank=rank) for rank in range(n_ranks)])  # of before: says nothing

        async def tell() -> None:
            for at_s, one in rows_at:
                await until(at_s)
                rows.take_rows([one])

        async with anyio.create_task_group() as tasks:
            await until(1.0)
            tasks.start_soon(tell)
            await until_fetched(rows, handoffs)
            ended_s = asyncio.get_running_loop().time()
            tasks.cancel_scope.cancel()
        return ended_s

    return virtual_loop.run(main)


@pytest.mark.parametrize(
    ("rows_at", "n_ranks", "ends_s"),
    [
        ([(2.0, row(1)), (3.25, row(0))], 1, 3.25),
        ([(2.0, row(0, queued=1)), (4.0, row(0))], 1, 4.0),
        # Every rank has to say so.
        ([(2.0, row(0)), (3.0, row(1, rank=1)), (5.0, row(0, rank=1))], 2, 5.0),
        # Nobody says anything, or never zero.
        ([], 1, LIMIT_S),
        ([(2.0, row(1))], 1, LIMIT_S),
    ],
)
def test_a_prefill_worker_stays_until_nothing_is_active(
    rows_at: list[tuple[float, dict[str, int]]], n_ranks: int, ends_s: float
) -> None:
    assert drained_after(rows_at, n_ranks=n_ranks) == pytest.approx(ends_s, abs=0.5)


def test_with_nothing_parked_there_is_nothing_to_wait_for() -> None:
    async def main() -> None:
        await until_fetched(NewestRows(1), Handoffs(backend="X", limit_s=LIMIT_S))
        assert asyncio.get_running_loop().time() == 0

    virtual_loop.run(main)
