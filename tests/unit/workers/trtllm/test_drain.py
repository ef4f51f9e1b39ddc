"""When a prefill worker may end: nobody tells it that its handoffs were fetched, so by their time limit."""

import asyncio

import pytest

from slagate.workers.runtime import virtual_loop
from slagate.workers.sim.request import DisaggregatedParams
from slagate.workers.trtllm.handoffs import Handoffs
from support.engine.sim_llm import until

LIMIT_S = 60.0


def park(handoffs: Handoffs, context_id: int) -> None:
    params = DisaggregatedParams(ctx_request_id=context_id, opaque_state=b"s", first_gen_tokens=[1])
    handoffs.park(params, rank=None)


@pytest.mark.parametrize(("parked_at_s", "ends_s"), [([], 1.0), ([0.0], 60.0), ([0.0, 0.5], 60.5)])
def test_a_prefill_worker_stays_until_the_limit_of_its_last_handoff(
    parked_at_s: list[float], ends_s: float
) -> None:
    """Whatever its statistics say: an engine does not count a parked handoff as active."""

    async def main() -> None:
        handoffs = Handoffs(backend="X", limit_s=LIMIT_S)
        for context_id, at_s in enumerate(parked_at_s):
            await until(at_s)
            park(handoffs, context_id)
        await until(1.0)
        await handoffs.none_left()
        assert asyncio.get_running_loop().time() == pytest.approx(ends_s)

    virtual_loop.run(main)
