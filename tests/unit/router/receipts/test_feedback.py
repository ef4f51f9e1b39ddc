"""What a request teaches once it has ended."""

import anyio
import pytest

from slagate.pools.inflight.engine_queue import Work
from slagate.proto.rpc.status import OK
from slagate.router.request.errors import Outcome
from slagate.workers.runtime.virtual_loop import run
from support.builders import finished, token
from support.gateway.request_path import bench
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
