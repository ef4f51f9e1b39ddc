"""What comes too late: a worker that left meanwhile, a limit or an abort behind the whole answer."""

import asyncio

import anyio
import grpc
import pytest

from slagate.proto.rpc.status import OK
from slagate.router.legs.active_request import TRAILER_LIMIT_S
from slagate.router.request.errors import Aborted, Outcome
from slagate.router.request.running import CancelHandle
from slagate.workers.runtime.virtual_loop import VirtualLoop, run
from support.builders import finished, prefill_ready, token
from support.gateway.request_path import DECODE_OK, PEER, Answer, bench
from support.worker.fake import HANG, Script, Wait

Code = grpc.StatusCode
NOT_CLOSED: Script = (token(11), finished(), HANG)


def test_a_worker_that_left_while_the_prompt_was_prefilled_gets_no_leg() -> None:
    """It was ready when it was leased, and nothing would tell a leg that starts now."""

    async def main() -> None:
        slow: Script = (Wait(20.0), prefill_ready(), OK)
        async with bench(n_workers=2, prefill=[slow], decode=[DECODE_OK]) as b:
            answer = Answer()

            async def leave() -> None:
                await anyio.sleep(19.8)  # too short before the leg for two good looks
                pool = b.app.fleet.pools["decode"]
                (leased,) = [m for m in pool.members.values() if m.ranks.inflight]
                leased.refuse("hangs")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leave)
                await b.call(metadata=[("slagate-receipt", "1")], answer=answer)
            assert answer.tokens == [11, 12, 13]
            assert [a.status for a in answer.receipt.attempts] == ["OK", "UNAVAILABLE", "OK"]
            assert len(b.calls("decode")) == 1
            await b.check_idle(Outcome.COMPLETED)

    run(main)


@pytest.mark.parametrize("ends", ["limit", "abort"])
def test_a_client_that_has_its_whole_answer_is_told_so(ends: str) -> None:
    """The worker has not closed its call yet when the limit passes, or the client's Abort comes."""

    async def main() -> None:
        async with bench("agg", agg=[NOT_CLOSED]) as b:
            answer = Answer()

            async def abort() -> None:
                await anyio.sleep(0.5)
                if ends == "abort":
                    assert b.app.gateway.live.abort(PEER, "client-1", Aborted("aborted"))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(abort)
                await b.call(timeout_s=0.5 if ends == "limit" else None, answer=answer)
            assert answer.tokens == [11]
            assert answer.status.code is Code.OK
            await b.check_idle(Outcome.COMPLETED)

    run(main)


@pytest.mark.parametrize("ends", ["limit", "abort", "client"])
def test_an_end_that_comes_as_the_wait_for_a_status_is_over_is_not_lost(ends: str) -> None:
    """Both in one turn of the loop. Before Python 3.11 a task cannot tell one cancellation from another."""

    async def main() -> None:
        async with bench(prefill=[(prefill_ready(), HANG)], decode=[(token(1), HANG)]) as b:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            answer, running = Answer(), CancelHandle()
            error = Aborted("aborted") if ends == "abort" else None
            began_s = loop.time()
            # Behind the stall both are due, and run in one turn, in order.
            loop.call_at(began_s + TRAILER_LIMIT_S - 0.001, loop.stall, 0.01)
            if ends != "limit":
                loop.call_at(began_s + TRAILER_LIMIT_S + 0.002, running.cancel, error)
            limit_s = TRAILER_LIMIT_S + 0.002 if ends == "limit" else None
            task = loop.create_task(b.call(timeout_s=limit_s, answer=answer, running=running))
            (ended, _) = await asyncio.wait({task}, timeout=TRAILER_LIMIT_S + 0.5)
            assert ended, "it goes on"
            assert task.cancelled() == (ends == "client")
            await b.check_idle(Outcome.DEADLINE if ends == "limit" else Outcome.CANCELLED)
            assert b.calls("decode") == []

    run(main)
