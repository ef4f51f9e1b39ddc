"""Receipts through the real graph: also of what was refused, and of every worker that was tried."""

import grpc
import pytest

from slagate.pools.member import State
from slagate.router.errors import Outcome
from slagate.router.generate import RECEIPT_TRAILER
from slagate.router.settings import Settings
from support.builders import request
from support.fake_worker import refusal
from support.request_path import DECODE_OK, bench
from support.virtual_loop import run

Code = grpc.StatusCode
ASK = [("slagate-receipt", "1")]


def test_a_refusal_for_want_of_a_worker_shows_what_was_decided() -> None:
    async def main() -> None:
        async with bench(n_workers=2) as b:
            for member in b.app.fleet.pools["decode"].members.values():
                member.state = State.NOT_READY
            receipt = (await b.call(metadata=ASK)).receipt
            prefill, decode = receipt.decision.stages
            assert (prefill.worker != "", decode.worker) == (True, "")
            assert {c.excluded for c in decode.candidates} == {"not_ready"}
            assert (receipt.attempts, receipt.actual.outcome) == ([], "unavailable")
            await b.check_idle(Outcome.UNAVAILABLE)

    run(main)


def test_a_refusal_at_the_limit_shows_what_was_decided() -> None:
    async def main() -> None:
        async with bench("agg") as b:
            (member,) = b.app.fleet.members()
            member.max_inflight = 0
            receipt = (await b.call(metadata=ASK)).receipt
            (choice,) = receipt.decision.stages
            assert [c.excluded for c in choice.candidates] == ["at its limit"]
            assert receipt.actual.outcome == "overloaded"
            await b.check_idle(Outcome.OVERLOADED)

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
            for member in b.app.fleet.members():
                member.context_tokens = 40
            receipt = (await b.call(metadata=ASK)).receipt
            first, second = receipt.attempts
            assert (first.status, second.status) == ("RESOURCE_EXHAUSTED", "OK")
            assert first.worker != second.worker
            for attempt in (first, second):
                assert attempt.chosen.worker == attempt.worker
                assert attempt.chosen.pool == attempt.pool == "agg"
                assert (attempt.chosen.inflight, attempt.chosen.context_tokens) == (0, 40)
                assert attempt.chosen.excluded == ""
            (choice,) = receipt.decision.stages
            assert choice.candidates[0] == second.chosen
            assert {c.worker: c.excluded for c in choice.candidates}[first.worker] != ""
            for member in b.app.fleet.members():
                member.context_tokens = 0
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
