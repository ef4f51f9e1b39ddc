"""What a request teaches once it has ended."""

import anyio
import pytest

from slagate.pools.inflight.engine_queue import Work
from slagate.proto.rpc.status import OK
from slagate.router.request.errors import Outcome
from slagate.workers.runtime.virtual_loop import run
from support.builders import finished, token
from support.gateway.request_path import DECODE_OK, bench
from support.worker.fake import Wait


@pytest.mark.parametrize("drains", [False, True], ids=["stays", "drains"])
def test_the_prefix_error_counts_for_a_worker_that_drains_too(*, drains: bool) -> None:
    """It is shown while the worker drains, and afterwards where the configuration has it again."""

    async def main() -> None:
        script = (token(1), Wait(2.0), token(2), finished(cached=2), OK)
        async with bench("agg", agg=[script]) as b:
            pool = b.app.fleet.pools["agg"]
            (member,) = pool.members.values()
            other = pool.lease(0, Work())  # without which it would have left
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(b.call)
                await anyio.sleep(1)
                if drains:
                    pool.drain(member.address)
            error = member.prefix_error
            assert (error.n_requests, error.engine_cached_tokens) == (1, 2)
            if drains:
                assert pool.join(member.address) is None, "it goes on as it was"
            other.release()
            await b.check_idle(Outcome.COMPLETED)

    run(main)


def test_what_a_handoff_takes_is_learnt_by_its_decode_pool() -> None:
    """From the call of the decode worker to its first token; no other pool learns from it."""

    async def main() -> None:
        slow = (Wait(0.25), *DECODE_OK)
        async with bench(decode=[slow]) as b:
            prefill = b.app.fleet.pools["prefill"].estimator
            predicted_s = []
            for _ in range(120):
                receipt = (await b.call(metadata=[("slagate-receipt", "1")])).receipt
                first, second = receipt.decision.stages
                predicted_s.append(first.later_s)
                assert second.later_s == 0.0
            assert predicted_s[0] < 0.1
            assert predicted_s[-1] == pytest.approx(0.25, rel=0.2)
            assert prefill.frozen.coefficients.prefill_scale <= 1.0

    run(main)
