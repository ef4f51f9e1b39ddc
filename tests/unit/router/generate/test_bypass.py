"""Requests that a decode worker serves alone, through the real graph: the leg, retries, what is counted."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import grpc
import pytest

from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.shared_counts import PoolCell
from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import OK, Status
from slagate.router.request.errors import Outcome
from slagate.workers.legs import REQUEST_TYPE, TARGET_RANK
from slagate.workers.runtime.virtual_loop import run
from support.builders import PROFILE, finished, request, token
from support.gateway.request_path import DECODE_OK, Bench, bench
from support.worker.fake import Script, Wait, refusal

ASK = [("x-slo-ttft-ms", "400"), ("x-slo-tpot-ms", "30"), ("slagate-receipt", "1")]
LOST = Status(grpc.StatusCode.UNAVAILABLE, "gone")
ONE_TAKES = ("d1:1",)


@asynccontextmanager
async def bypassing(
    decode: Sequence[Script] = (DECODE_OK,),
    takes: Sequence[str] = ("d1:1", "d2:1"),
    ranks: int = 1,
    **more: Any,
) -> AsyncIterator[Bench]:
    """A gateway of which only these decode workers take requests without a handoff, if only they do."""
    pools = {"profile": PROFILE, "tp": 1}
    modes = {"bypass": "auto"}
    async with bench(n_workers=2, decode=decode, of_pools=pools, scheduling=modes, **more) as b:
        for address in takes:
            info = b.workers[address].info
            info.extra["slagate_takes_whole_requests"] = True
            if ranks > 1:
                info.extra["slagate_supports_decode_dp_rank"] = True
                info.parallelism.data_parallel_size = ranks
            b.app.fleet.pools["decode"].members[address].set_server_info(info)
        yield b


def parsed(b: Bench, number: int) -> oe.GenerateRequest:
    return oe.GenerateRequest.FromString(b.calls("decode")[number].data)


def bypassed(b: Bench) -> float:
    value = b.app.gateway.metrics.registry.get_sample_value(
        "slagate_bypassed_requests_total", {"pool": "decode"}
    )
    return value or 0.0


def legs(receipt: gw.Receipt) -> list[tuple[int, str]]:
    return [(attempt.stage, attempt.status) for attempt in receipt.attempts]


def test_the_one_leg_says_that_the_prompt_is_to_be_computed_too() -> None:
    async def main() -> None:
        async with bypassing() as b:
            answer = await b.call(metadata=ASK)
            assert answer.tokens == [11, 12, 13]
            assert b.calls("prefill") == []
            leg = parsed(b, 0)
            assert leg.extra.fields[REQUEST_TYPE].string_value == "context_and_generation"
            assert not leg.kv.HasField("session")
            assert leg.token_ids == request().token_ids
            receipt = answer.receipt
            assert legs(receipt) == [(gw.STAGE_AGG, "OK")]
            (choice,) = receipt.decision.stages
            assert (choice.stage, choice.pool, choice.is_met) == (gw.STAGE_AGG, "decode", True)
            assert receipt.actual.HasField("predicted_ttft_ms")
            assert receipt.actual.HasField("predicted_itl_ms")
            assert bypassed(b) == 1
            await b.check_idle(Outcome.COMPLETED)
            assert b.released == []

    run(main)


def test_it_learns_first_tokens_apart_from_those_behind_a_transfer() -> None:
    async def main() -> None:
        async with bypassing() as b:
            for _ in range(3):
                await b.call(metadata=ASK)
            pool = b.app.fleet.pools["decode"]
            assert pool.whole is not None
            assert (pool.whole.ttft.n_pairs, pool.whole.itl.n_pairs) == (3, 0)
            assert (pool.estimator.ttft.n_pairs, pool.estimator.itl.n_pairs) == (0, 3)
            cells = b.app.gateway.receipts.attainment.cells
            assert {stage.value: traffic.n_requests for (stage, _), traffic in cells.items()} == {
                "decode": 3
            }

    run(main)


def test_a_rank_is_asked_for_as_of_an_aggregated_worker() -> None:
    async def main() -> None:
        async with bypassing(takes=ONE_TAKES, ranks=2) as b:
            await b.call(metadata=ASK)
            (call,) = b.calls("decode")
            assert TARGET_RANK in dict(call.metadata)

    run(main)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_one_that_fails_before_its_first_token_is_tried_on_another_decode_worker(
    code: grpc.StatusCode,
) -> None:
    async def main() -> None:
        async with bypassing([refusal(code), DECODE_OK]) as b:
            answer = await b.call(metadata=ASK)
            assert answer.tokens == [11, 12, 13]
            assert legs(answer.receipt) == [(gw.STAGE_AGG, code.name), (gw.STAGE_AGG, "OK")]
            first, second = answer.receipt.attempts
            assert first.worker != second.worker
            assert b.app.fleet.pools["decode"].table.totals[PoolCell.RETRIES] == 1
            labels = {"stage": "agg", "code": code.name}
            registry = b.app.gateway.metrics.registry
            assert registry.get_sample_value("slagate_retries_total", labels) == 1
            await b.check_idle(Outcome.COMPLETED)

    run(main)


def test_one_that_no_other_decode_worker_takes_is_handed_over_as_ever() -> None:
    async def main() -> None:
        async with bypassing([(LOST,), DECODE_OK], takes=ONE_TAKES) as b:
            answer = await b.call(metadata=ASK)
            assert answer.tokens == [11, 12, 13]
            ended = ["UNAVAILABLE", "OK", "OK"]
            wanted = [gw.STAGE_AGG, gw.STAGE_PREFILL, gw.STAGE_DECODE]
            assert legs(answer.receipt) == list(zip(wanted, ended, strict=True))
            assert [choice.worker for choice in answer.receipt.decision.stages][1] == "d2:1"
            assert parsed(b, 1).kv.HasField("session")
            assert answer.receipt.decision.admission == "", "as it came"
            assert bypassed(b) == 0
            await b.check_idle(Outcome.COMPLETED)

    run(main)


def test_one_that_fails_after_a_token_is_not_tried_again() -> None:
    async def main() -> None:
        async with bypassing([(token(11), LOST), DECODE_OK]) as b:
            answer = await b.call(metadata=ASK)
            assert answer.tokens == [11]
            assert answer.status.code is grpc.StatusCode.UNAVAILABLE
            assert len(b.calls("decode")) == 1
            await b.check_idle(Outcome.WORKER_FAILED)

    run(main)


def test_it_is_tried_no_more_often_than_other_legs() -> None:
    async def main() -> None:
        async with bypassing([refusal(grpc.StatusCode.UNAVAILABLE, "no")]) as b:
            answer = await b.call(metadata=ASK)
            assert answer.status.code is grpc.StatusCode.UNAVAILABLE
            assert answer.responses == []
            await b.check_idle(Outcome.WORKER_FAILED)

    run(main)


def test_the_stalls_of_a_handed_over_answer_are_no_slow_steps() -> None:
    """Where a worker computes prompts of others between its tokens."""
    slow = (token(11), Wait(1.0), token(12), Wait(1.0), token(13), finished(), OK)

    async def main() -> None:
        async with bypassing([slow], takes=()) as b:
            pool = b.app.fleet.pools["decode"]
            before = [pool.lease(row, Work(1000, 0.3, 1000)) for row in range(2)]
            for lease in before:
                lease.prefill_done()

            async def others() -> None:
                await anyio.sleep(0.5)
                leases = [pool.lease(row, Work(1000, 0.4, 1000)) for row in range(2)]
                for lease in leases:
                    lease.prefill_done()
                await anyio.sleep(3.0)
                for lease in [*before, *leases]:
                    lease.release()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(others)
                answer = await b.call(metadata=ASK)
            actual = answer.receipt.actual
            assert legs(answer.receipt) == [(gw.STAGE_PREFILL, "OK"), (gw.STAGE_DECODE, "OK")]
            assert (actual.itl_ms, actual.stalled_ms) == pytest.approx((1000.0, 200.0))
            assert pool.estimator.itl.n_pairs == 1
            assert bypassed(b) == 0
            await b.check_idle(Outcome.COMPLETED)

    run(main)
