"""Workers that go away in the middle: what is started over, who is told, and who is left out."""

import logging

import anyio
import grpc
import pytest

from slagate.pools.fleet.health import FAILURES_TO_LEAVE
from slagate.pools.fleet.watch import INTERVAL_S, JITTER_RATIO
from slagate.pools.inflight.row_view import State
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import OK, Status
from slagate.router.legs.active_request import TRAILER_LIMIT_S
from slagate.router.request.errors import Outcome
from slagate.workers.runtime.virtual_loop import run
from support.builders import engine_error, finished, prefill_ready, session, token
from support.gateway.request_path import DECODE_OK, PREFILL_OK, Bench, bench
from support.worker.fake import HANG, Script, Wait, refusal

Code = grpc.StatusCode
LOST: Script = (engine_error(oe.ERROR_CODE_KV_TRANSFER_FAILED, "no such session"), OK)
TWO_HANDOFFS: list[Script] = [(prefill_ready(session(i)), OK) for i in ("1", "2")]
GONE = Status(Code.UNAVAILABLE, "gone")


def n_retries(b: Bench, stage: str) -> float:
    registry = b.app.gateway.metrics.registry
    labels = {"stage": stage, "code": "UNAVAILABLE"}
    return registry.get_sample_value("slagate_retries_total", labels) or 0.0


def sessions(b: Bench) -> list[str]:
    """Of the decode legs, in order."""
    return [call.request.kv.session.session_id for call in b.calls("decode")]


@pytest.mark.parametrize(
    "lost",
    [LOST, (prefill_ready(), GONE), (oe.GenerateResponse(), OK)],
    ids=["an error event", "a status behind something that is not for clients", "no terminal"],
)
def test_a_handoff_that_is_lost_before_a_token_costs_one_start_from_the_beginning(
    lost: Script, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with bench(prefill=TWO_HANDOFFS, decode=[lost, DECODE_OK]) as b:
            answer = await b.call(metadata=[("slagate-receipt", "1")])
            assert answer.tokens == [11, 12, 13]
            assert sessions(b) == ["1", "2"]
            assert [(a.worker, a.status) for a in answer.receipt.attempts] == [
                ("p1:1", "OK"),
                ("d1:1", "UNAVAILABLE"),
                ("p1:1", "OK"),
                ("d1:1", "OK"),
            ]
            assert (n_retries(b, "prefill"), n_retries(b, "decode")) == (1, 0)
            await b.check_idle(Outcome.COMPLETED)
            assert b.released == [session("1")]
        (line,) = [r for r in caplog.records if r.getMessage() == "request.retried"]
        assert vars(line)["stage"] == "prefill"

    caplog.set_level(logging.WARNING, logger="slagate.router.generate")
    run(main)


def test_a_handoff_that_is_lost_twice_is_the_end() -> None:
    async def main() -> None:
        async with bench(n_workers=2, prefill=TWO_HANDOFFS, decode=[LOST]) as b:
            answer = await b.call()
            assert (answer.status.code, answer.responses) == (Code.UNAVAILABLE, [])
            assert answer.status.message == "decode: no such session"
            assert sessions(b) == ["1", "2"]
            await b.check_idle(Outcome.WORKER_FAILED)
            assert sorted(each.session_id for each in b.released) == ["1", "2"]

    run(main)


@pytest.mark.parametrize(
    "decode",
    [
        (token(1), GONE),
        (token(1), *LOST),
        (prefill_ready(), Status(Code.INTERNAL, "broken")),
        (prefill_ready(), Status(Code.RESOURCE_EXHAUSTED, "full")),
    ],
    ids=["tokens, then gone", "tokens, then lost", "broken", "full"],
)
def test_nothing_is_started_over_behind_a_token_or_for_another_reason(decode: Script) -> None:
    async def main() -> None:
        async with bench(n_workers=2, decode=[decode, DECODE_OK]) as b:
            await b.call()
            assert (len(b.calls("prefill")), len(b.calls("decode"))) == (1, 1)
            assert n_retries(b, "prefill") == 0

    run(main)


def test_a_start_over_that_finds_no_worker_fails_with_what_was_lost() -> None:
    async def main() -> None:
        async with bench(decode=[refusal(Code.UNAVAILABLE, "shutting down")]) as b:
            answer = await b.call()
            assert answer.status.message == "decode: shutting down"
            assert len(b.calls("prefill")) == 1
            assert n_retries(b, "prefill") == 0
            await b.check_idle(Outcome.WORKER_FAILED)
            assert b.released == [session()]

    run(main)


def test_a_worker_that_takes_nothing_three_times_in_a_row_is_out_before_the_next_look() -> None:
    async def main() -> None:
        async with bench("agg", agg=[refusal(Code.UNAVAILABLE)]) as b:
            (member,) = b.app.fleet.members()
            for n_refusals in range(1, FAILURES_TO_LEAVE + 1):
                assert member.state is State.READY
                await b.call()
                assert len(b.calls("agg")) == n_refusals
            assert member.state is State.NOT_READY
            assert "refused a request" in member.reason
            await b.call()
            assert len(b.calls("agg")) == FAILURES_TO_LEAVE
            await b.check_idle(*[Outcome.WORKER_FAILED] * 3, Outcome.UNAVAILABLE)

    run(main)


@pytest.mark.parametrize(
    "script",
    [
        refusal(Code.RESOURCE_EXHAUSTED),
        refusal(Code.INVALID_ARGUMENT),
        (token(1), GONE),
        (engine_error(oe.ERROR_CODE_KV_TRANSFER_FAILED, "no"), OK),
    ],
    ids=["full", "bad request", "tokens, then gone", "an answer"],
)
def test_a_worker_that_answers_is_not_put_out_by_what_it_says(script: Script) -> None:
    async def main() -> None:
        async with bench("agg", agg=[script]) as b:
            (member,) = b.app.fleet.members()
            for _ in range(2 * FAILURES_TO_LEAVE):
                await b.call()
            assert member.state is State.READY
            assert len(b.calls("agg")) == 2 * FAILURES_TO_LEAVE

    run(main)


@pytest.mark.parametrize(
    ("mode", "stage", "script"),
    [
        ("agg", "agg", (token(11), token(12, 13), finished(), HANG)),
        ("disagg", "decode", (token(11), token(12, 13), finished(), HANG)),
        ("disagg", "prefill", (prefill_ready(), HANG)),
    ],
)
def test_a_worker_that_does_not_close_behind_its_terminal_event_is_not_waited_for(
    mode: str, stage: str, script: Script
) -> None:
    async def main() -> None:
        async with bench(mode, scripts={stage: [script]}) as b:
            started_s = b.app.gateway.now_s()
            answer = await b.call(timeout_s=60.0)
            assert b.app.gateway.now_s() - started_s == pytest.approx(TRAILER_LIMIT_S)
            assert answer.status == OK
            assert answer.tokens == [11, 12, 13]
            assert [call.cancelled for call in b.calls(stage)] == [True]
            await b.check_idle(Outcome.COMPLETED)
            assert b.released == b.aborted_legs == []

    run(main)


UNCERTAIN = {
    Code.UNAVAILABLE,
    Code.UNKNOWN,
    Code.INTERNAL,
    Code.CANCELLED,
    Code.DEADLINE_EXCEEDED,
}


@pytest.mark.parametrize("code", [c for c in Code if c is not Code.OK], ids=lambda code: code.name)
def test_a_prefill_that_may_have_parked_before_it_was_lost_is_aborted_by_its_id(
    code: grpc.StatusCode,
) -> None:
    async def main() -> None:
        async with bench(prefill=[refusal(code)]) as b:
            await b.call()
            await b.settle()
            legs = [call.request.request_id for call in b.calls("prefill")]
            assert b.aborted_legs == (legs if code in UNCERTAIN else [])
            assert b.workers["d1:1"].aborts == []

    run(main)


@pytest.mark.parametrize(
    ("script", "aborted"),
    [
        (PREFILL_OK, False),
        ((prefill_ready(), GONE), False),
        ((token(1), finished(oe.FINISH_REASON_STOP), OK), False),
        ((token(1), finished(), OK), True),
        ((token(1), OK), True),
        ((b"\xff", OK), True),
    ],
    ids=["handoff", "handoff, gone", "whole answer", "no handoff", "no terminal", "garbage"],
)
def test_only_a_prefill_without_a_terminal_event_is_aborted(
    script: Script, *, aborted: bool
) -> None:
    async def main() -> None:
        async with bench(prefill=[script]) as b:
            await b.call()
            await b.settle()
            legs = [call.request.request_id for call in b.calls("prefill")]
            assert b.aborted_legs == (legs if aborted else [])

    run(main)


@pytest.mark.parametrize(
    ("mode", "stage"), [("disagg", "prefill"), ("disagg", "decode"), ("agg", "agg")]
)
def test_a_leg_that_has_heard_nothing_fails_when_its_worker_is_out_of_service(
    mode: str, stage: str
) -> None:
    async def main() -> None:
        good = PREFILL_OK if stage == "prefill" else DECODE_OK
        async with bench(mode, n_workers=2, scripts={stage: [(HANG,), good]}) as b:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(b.call)
                await b.settle()
                (address,) = [a for a, w in b.workers.items() if w.calls and a[0] == stage[0]]
                b.workers[address].down = GONE
                await anyio.sleep(4 * INTERVAL_S * (1 + JITTER_RATIO))
                first, second = b.calls(stage)
                assert first.cancelled
                assert not second.cancelled
            await b.check_idle(Outcome.COMPLETED)

    run(main)


def test_a_leg_that_hears_of_its_worker_goes_on_whatever_the_looks_say() -> None:
    async def main() -> None:
        script = (token(1), Wait(20.0), token(2), finished(), OK)
        async with bench("agg", agg=[script]) as b, anyio.create_task_group() as tasks:
            tasks.start_soon(b.call)
            await b.settle()
            b.workers["a1:1"].down = GONE
            await anyio.sleep(10.0)
            (member,) = b.app.fleet.members()
            assert member.state is State.NOT_READY
        await b.check_idle(Outcome.COMPLETED)
        assert member.legs == set()

    run(main)
