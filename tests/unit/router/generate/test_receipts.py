"""Receipts through the real graph: also of what was refused, and of every worker that was tried."""

import anyio
import grpc
import pytest

from slagate.pools.fleet.member import Member
from slagate.pools.inflight.engine_queue import Work
from slagate.pools.inflight.row_view import State
from slagate.pools.inflight.worker_rows import Limits
from slagate.proto import gateway_pb2 as gw
from slagate.router.cli.receipts import Recomputer, json_line
from slagate.router.request.errors import Outcome
from slagate.router.request.metadata import RECEIPT_TRAILER
from slagate.router.request.settings import Settings
from slagate.workers.runtime.cooperative import run_cooperatively
from slagate.workers.runtime.virtual_loop import run
from support.builders import PROFILE, put_in, request
from support.gateway.request_path import DECODE_OK, Answer, Bench, bench
from support.worker.fake import Wait, refusal

Code = grpc.StatusCode
ASK = [("slagate-receipt", "1")]


def limit(member: Member, max_inflight: int) -> None:
    """Give a worker another limit, as when it comes back with one."""
    member.set_limits(Limits(max_inflight=max_inflight))
    member.set_server_info(member.server_info)


def test_a_refusal_for_want_of_a_worker_shows_what_was_decided() -> None:
    async def main() -> None:
        async with bench(n_workers=2) as b:
            for member in b.app.fleet.pools["decode"].members.values():
                put_in(member, State.NOT_READY)
            receipt = (await b.call(metadata=ASK)).receipt
            prefill, decode = receipt.decision.stages
            assert (prefill.worker != "", decode.worker) == (True, "")
            assert {c.excluded for c in decode.candidates} == {"not_ready"}
            assert (receipt.attempts, receipt.actual.outcome) == ([], "unavailable")
            await b.check_idle(Outcome.UNAVAILABLE)

    run(main)


def test_a_predicted_miss_says_so_and_why_it_was_refused() -> None:
    async def main() -> None:
        rules = {"objectives": {"*": {"ttft_ms": 0.001}}, "scheduling": {"admission": "on"}}
        async with bench(of_pools={"profile": PROFILE, "tp": 1}, **rules) as b:
            metadata = [*ASK, ("x-gateway-inference-objective", "typo")]
            answer = await b.call(metadata=metadata)
            missed = (
                "t is predicted to miss its TTFT target of 0.001 ms in every pool that it may use"
            )
            assert answer.status.code is Code.RESOURCE_EXHAUSTED
            why = "no worker there would meet it with nothing else to do, so a retry is of no use"
            assert answer.status.message == f"prefill: i{missed} (prefill); {why}"
            decision = answer.receipt.decision
            assert (decision.admission, decision.stages[0].is_met) == ("refused", False)
            assert f"I{missed} (prefill)." in decision.text
            assert "Admission is on, so it is refused." in decision.text
            assert 'Class "typo" is not in objectives, it counts as "*".' in decision.text
            b.app.gateway.dispatcher.set_admission("shadow")
            served = (await b.call(metadata=metadata)).receipt
            assert "Admission would refuse it if it were on." in served.decision.text
            assert (served.decision.admission, served.actual.outcome) == ("shadow", "completed")

    run(main)


def test_a_target_of_0_is_judged_in_the_end_as_it_was_at_first() -> None:
    speed = {"profile": PROFILE, "tp": 1}

    async def main() -> None:
        async with bench(decode=[[Wait(0.1), *DECODE_OK]], of_pools=speed) as b:
            receipt = (await b.call(metadata=[*ASK, ("x-slo-ttft-ms", "0")])).receipt
            assert receipt.actual.ttft_ms > 0
            assert (receipt.decision.sla.ttft_ms, receipt.decision.sla.as_fast) == (
                900,
                ["ttft_ms"],
            )
            assert receipt.decision.stages[0].targets[0].ms == 900
            assert receipt.actual.ttft_met is True

    run(main)


def test_a_refusal_at_the_limit_shows_what_was_decided() -> None:
    async def main() -> None:
        async with bench("agg", settings=Settings(max_waiting=0)) as b:
            (member,) = b.app.fleet.members()
            limit(member, 0)
            receipt = (await b.call(metadata=ASK)).receipt
            (choice,) = receipt.decision.stages
            assert [c.excluded for c in choice.candidates] == ["at its limit"]
            assert receipt.actual.outcome == "overloaded"
            await b.check_idle(Outcome.OVERLOADED)

    run(main)


def test_the_time_that_a_request_waited_for_a_worker_is_in_its_receipt() -> None:
    async def main() -> None:
        async with bench("agg") as b:
            (member,) = b.app.fleet.members()
            limit(member, 0)
            answer = Answer()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: b.call(metadata=ASK, answer=answer))
                await anyio.sleep(2)
                limit(member, 1)
                member.on_change()
            actual = answer.receipt.actual
            assert actual.waited_ms == pytest.approx(2000)
            assert actual.ttft_ms == pytest.approx(2000)
            assert answer.receipt.decision.stages[0].candidates[0].excluded == ""
            assert (await b.call(metadata=ASK)).receipt.actual.waited_ms == 0
            await b.check_idle(Outcome.COMPLETED, Outcome.COMPLETED)

    run(main)


@pytest.mark.parametrize("body", [b"\xff", request(tokens=[]).SerializeToString()])
def test_a_receipt_that_was_asked_for_comes_with_an_error_of_the_body_too(body: bytes) -> None:
    async def main() -> None:
        async with bench() as b:
            metadata = [*ASK, ("x-slo-ttft-ms", "150")]
            answer = await b.call(body, metadata=metadata)
            assert answer.status.code is Code.INVALID_ARGUMENT
            assert answer.receipt.actual.outcome == "invalid"
            assert answer.receipt.decision.sla.ttft_ms == 150
            assert RECEIPT_TRAILER not in dict((await b.call(body)).status.trailers)

    run(main)


def test_each_attempt_shows_its_worker_as_it_was_seen_when_it_was_chosen() -> None:
    async def main() -> None:
        scripts = [refusal(Code.RESOURCE_EXHAUSTED), DECODE_OK]
        async with bench("agg", n_workers=2, agg=scripts) as b:
            pool = b.app.fleet.pools["agg"]
            others = [pool.lease(row, Work(context_tokens=40)) for row in (0, 1)]
            receipt = (await b.call(metadata=ASK)).receipt
            first, second = receipt.attempts
            assert (first.status, second.status) == ("RESOURCE_EXHAUSTED", "OK")
            assert first.worker != second.worker
            for attempt in (first, second):
                assert attempt.chosen.worker == attempt.worker
                assert attempt.chosen.pool == attempt.pool == "agg"
                assert (attempt.chosen.inflight, attempt.chosen.context_tokens) == (1, 40)
                assert attempt.chosen.excluded == ""
            (choice,) = receipt.decision.stages
            assert choice.candidates[0] == second.chosen
            assert {c.worker: c.excluded for c in choice.candidates}[first.worker] != ""
            for lease in others:
                lease.release()
            await b.check_idle(Outcome.COMPLETED)

    run(main)


def test_where_clients_get_no_receipts_one_that_asks_is_told_so() -> None:
    async def main() -> None:
        async with bench(settings=Settings(client_receipts=False)) as b:
            answer = await b.call(metadata=ASK)
            assert answer.status.code is Code.INVALID_ARGUMENT
            assert answer.status.message.startswith("slagate-receipt: ")
            assert RECEIPT_TRAILER not in dict(answer.status.trailers)
            assert (await b.call()).tokens == [11, 12, 13]
            await b.check_idle(Outcome.INVALID, Outcome.COMPLETED)

    run(main)


async def kept(b: Bench) -> list[gw.Receipt]:
    """The receipts that the gateway has kept."""
    return [
        await run_cooperatively(entry.receipt())
        async for entry, _ in b.app.gateway.receipts.watch()
    ]


def test_every_request_leaves_a_receipt_in_the_ring_whether_it_asked_for_one_or_not() -> None:
    async def main() -> None:
        async with bench(settings=Settings(client_receipts=False)) as b:
            await b.call()
            await b.call(b"\xff")
            await b.call(metadata=ASK)
            receipts = await kept(b)
            assert [r.number for r in receipts] == [1, 2, 3]
            assert [r.actual.outcome for r in receipts] == ["completed", "invalid", "invalid"]
            assert [len(r.decision.stages) for r in receipts] == [2, 0, 0]
            assert {r.config_version for r in receipts} == {b.app.gateway.receipts.config.version}
            assert receipts[0].unix_s > 1.6e9

    run(main)


def test_the_trailer_and_the_ring_tell_the_same() -> None:
    async def main() -> None:
        async with bench() as b:
            told = (await b.call(metadata=ASK)).receipt
            (full,) = await kept(b)
            assert (told.number, told.config_version) == (1, full.config_version)
            assert (told.actual, told.attempts) == (full.actual, full.attempts)
            for choice in full.decision.stages:
                del choice.pools[:]
            assert told.decision == full.decision

    run(main)


def test_receipts_of_retries_hold_the_choices_that_failed_and_all_of_them_come_out_the_same() -> (
    None
):
    async def main() -> None:
        scripts = [refusal(Code.RESOURCE_EXHAUSTED), DECODE_OK, DECODE_OK]
        async with bench("agg", n_workers=3, agg=scripts) as b:
            await b.call()
            await b.call()
            first, second = await kept(b)
            assert [c.worker for c in first.replaced] == [first.attempts[0].worker]
            assert [c.worker for c in first.decision.stages] == [first.attempts[1].worker]
            (choice,) = first.decision.stages
            assert list(choice.excluded_workers) == [first.attempts[0].worker]
            assert not second.replaced
            config = gw.WatchReceiptsResponse(config=b.app.gateway.receipts.config)
            others = [gw.WatchReceiptsResponse(receipt=each) for each in (first, second)]
            recheck = Recomputer()
            lines = [json_line(each).encode() for each in (config, *others)]
            assert list(recheck.read(lines)) == []
            assert (recheck.n_choices, recheck.ok) == (3, True)

    run(main)
