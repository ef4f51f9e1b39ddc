"""Failures of workers through the real graph: what is tried again, and what the client is told."""

import grpc
import pytest

from slagate.pools.inflight.shared_counts import PoolCell
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import OK, Status
from slagate.router.request.errors import OUTCOME_OF_WORKER_CODE, RETRY_PUSHBACK, Outcome
from slagate.router.request.settings import Settings
from slagate.workers.errors import STATUS_OF_ENGINE_ERROR
from slagate.workers.runtime.virtual_loop import run
from support.builders import engine_error, finished, prefill_ready, session, token
from support.gateway.request_path import DECODE_OK, PREFILL_OK, bench
from support.worker.fake import Script, Wait, refusal

Code = grpc.StatusCode
RETRIED = {Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED}
FAILURES = [code for code in Code if code is not Code.OK]
STAGES = [("disagg", "prefill"), ("disagg", "decode"), ("agg", "agg")]
LEAKY = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.1.2.3:50051: Failed to connect"
    " at /usr/lib/python3/dist-packages/grpc/_channel.py in <class 'grpc._channel._Rendezvous'>"
)
LEAKS = ("10.1.2.3", "/usr", "class", "_Rendezvous", ".py", "Traceback", "_channel")


def outcome_of(code: grpc.StatusCode) -> Outcome:
    return OUTCOME_OF_WORKER_CODE.get(code, Outcome.WORKER_FAILED)


def clean(message: str) -> bool:
    return not any(leak in message for leak in LEAKS)


@pytest.mark.parametrize("code", FAILURES, ids=lambda code: code.name)
@pytest.mark.parametrize(("mode", "stage"), STAGES)
def test_health_02_only_what_another_worker_may_do_better_is_tried_there(
    mode: str, stage: str, code: grpc.StatusCode
) -> None:
    async def main() -> None:
        async with bench(mode, n_workers=2, scripts={stage: [refusal(code, "no room")]}) as b:
            answer = await b.call()
            called = [address for address, worker in b.workers.items() if worker.calls]
            n_of_stage = sum(address.startswith(stage[0]) for address in called)
            assert n_of_stage == (2 if code in RETRIED else 1)
            assert len(b.calls(stage)) == n_of_stage
            assert answer.status.code is code
            assert answer.status.message == f"{stage}: no room"
            assert answer.responses == []
            assert (RETRY_PUSHBACK in dict(answer.status.trailers)) == (code in RETRIED)
            await b.check_idle(outcome_of(code))

    run(main)


@pytest.mark.parametrize("code", sorted(RETRIED, key=str), ids=lambda code: code.name)
@pytest.mark.parametrize(("mode", "stage"), STAGES)
def test_a_second_worker_saves_the_request(mode: str, stage: str, code: grpc.StatusCode) -> None:
    async def main() -> None:
        good = PREFILL_OK if stage == "prefill" else DECODE_OK
        async with bench(mode, n_workers=2, scripts={stage: [refusal(code), good]}) as b:
            answer = await b.call(metadata=[("slagate-receipt", "1")])
            assert answer.tokens == [11, 12, 13]
            attempts = [a for a in answer.receipt.attempts if a.worker.startswith(stage[0])]
            assert [a.status for a in attempts] == [code.name, "OK"]
            assert attempts[0].worker != attempts[1].worker
            choice = next(
                c for c in answer.receipt.decision.stages if c.worker.startswith(stage[0])
            )
            assert choice.worker == attempts[1].worker
            labels = {"stage": stage, "code": code.name}
            registry = b.app.gateway.metrics.registry
            assert registry.get_sample_value("slagate_retries_total", labels) == 1
            assert b.app.fleet.pools[stage].table.totals[PoolCell.RETRIES] == 1
            await b.check_idle(Outcome.COMPLETED)
            assert b.released == []

    run(main)


def test_a_retried_prefill_is_chosen_by_what_is_left_before_its_decode_worker() -> None:
    async def main() -> None:
        scripts = [(Wait(0.5), *refusal(Code.UNAVAILABLE)), PREFILL_OK]
        async with bench(n_workers=2, prefill=scripts) as b:
            answer = await b.call(metadata=[("slagate-receipt", "1")])
            again, decode = answer.receipt.decision.stages
            assert again.later_s > 0.0
            assert again.elapsed_s >= 0.5
            assert decode.later_s == 0.0

    run(main)


def test_cfg_11_three_workers_are_tried_under_defaults_and_no_more_than_configured() -> None:
    async def main() -> None:
        for settings, wanted in ((Settings(), 3), (Settings(max_attempts=1), 1)):
            scripts = [refusal(Code.UNAVAILABLE)]
            async with bench(n_workers=4, prefill=scripts, settings=settings) as b:
                await b.call()
                assert len(b.calls("prefill")) == wanted
                assert sum(bool(worker.calls) for worker in b.workers.values()) == wanted
                await b.check_idle(Outcome.WORKER_FAILED)

    run(main)


def test_a_failed_worker_is_not_asked_again_by_the_same_request() -> None:
    async def main() -> None:
        async with bench(n_workers=1, prefill=[refusal(Code.UNAVAILABLE), PREFILL_OK]) as b:
            assert (await b.call()).status.code is Code.UNAVAILABLE
            assert (await b.call()).tokens == [11, 12, 13]
            await b.check_idle(Outcome.WORKER_FAILED, Outcome.COMPLETED)

    run(main)


@pytest.mark.parametrize(("mode", "stage"), STAGES[1:])
def test_health_01_stream_06_a_failure_after_tokens_is_passed_on_with_its_code(
    mode: str, stage: str
) -> None:
    async def main() -> None:
        for code in FAILURES:
            script = (token(1), token(2), Status(code, LEAKY))
            async with bench(mode, n_workers=2, scripts={stage: [script]}) as b:
                answer = await b.call()
                assert answer.tokens == [1, 2]
                assert answer.status.code is code
                assert clean(answer.status.message), answer.status
                assert answer.status.message.startswith(f"{stage}: ")
                assert len(b.calls(stage)) == 1

    run(main)


@pytest.mark.parametrize(("mode", "stage"), STAGES)
def test_stream_06_a_refusal_before_the_first_message_keeps_code_and_loses_internals(
    mode: str, stage: str
) -> None:
    async def main() -> None:
        for code in FAILURES:
            async with bench(mode, scripts={stage: [refusal(code, LEAKY)]}) as b:
                answer = await b.call()
                assert answer.status.code is code
                assert clean(answer.status.message), answer.status
                assert "failed to connect" in answer.status.message

    run(main)


def test_disagg_04_a_failed_prefill_is_named_at_once_and_decode_never_hears_of_it() -> None:
    async def main() -> None:
        script = (Wait(0.05), Status(Code.INTERNAL, "broken"))
        async with bench(prefill=[script]) as b:
            started_s = b.app.gateway.now_s()
            answer = await b.call(timeout_s=60.0)
            assert b.app.gateway.now_s() - started_s < 1.0
            assert (answer.status.code, answer.status.message) == (Code.INTERNAL, "prefill: broken")
            assert b.calls("decode") == []
            await b.check_idle(Outcome.WORKER_FAILED)

    run(main)


def test_disagg_01_decode_gets_the_handoff_of_the_second_attempt() -> None:
    async def main() -> None:
        second = (prefill_ready(session("2")), OK)
        async with bench(n_workers=2, prefill=[refusal(Code.UNAVAILABLE), second]) as b:
            assert (await b.call()).tokens == [11, 12, 13]
            assert [call.request.kv.session.session_id for call in b.calls("decode")] == ["2"]
            await b.check_idle(Outcome.COMPLETED)

    run(main)


def test_every_decode_attempt_carries_the_same_handoff_and_a_new_id() -> None:
    async def main() -> None:
        scripts = [refusal(Code.UNAVAILABLE), DECODE_OK]
        async with bench(n_workers=2, decode=scripts) as b:
            await b.call()
            first, second = (call.request for call in b.calls("decode"))
            assert first.kv.session == second.kv.session == session()
            assert first.request_id != second.request_id
            assert b.released == b.aborted_legs == []
            await b.check_idle(Outcome.COMPLETED)

    run(main)


LOST_HANDOFF = (oe.ERROR_CODE_KV_TRANSFER_FAILED, oe.ERROR_CODE_KV_SESSION_NOT_FOUND)


@pytest.mark.parametrize("code", list(STATUS_OF_ENGINE_ERROR))
@pytest.mark.parametrize(("mode", "stage"), STAGES)
def test_an_engine_error_before_any_token_becomes_the_status_and_is_not_tried_again(
    mode: str, stage: str, code: oe.ErrorCode.ValueType
) -> None:
    async def main() -> None:
        script: Script = (engine_error(code, LEAKY), OK)
        async with bench(mode, n_workers=2, scripts={stage: [script]}) as b:
            answer = await b.call()
            # A decode worker that lost the handoff costs one start from the beginning, and the client
            # does not hear of a session that it never had.
            lost = stage == "decode" and code in LOST_HANDOFF
            wanted = Code.UNAVAILABLE if lost else STATUS_OF_ENGINE_ERROR[code]
            assert answer.status.code is wanted
            assert clean(answer.status.message), answer.status
            assert answer.responses == []
            assert len(b.calls(stage)) == (2 if lost else 1)
            await b.check_idle(outcome_of(wanted))

    run(main)


@pytest.mark.parametrize(("mode", "stage"), STAGES[1:])
def test_an_engine_error_behind_tokens_is_relayed_and_the_call_ends_ok(
    mode: str, stage: str
) -> None:
    async def main() -> None:
        script = (token(1), engine_error(oe.ERROR_CODE_INTERNAL, "lost the KV"), OK)
        async with bench(mode, n_workers=2, scripts={stage: [script]}) as b:
            answer = await b.call()
            assert answer.status == OK
            assert answer.tokens == [1]
            assert answer.responses[-1].error.message == "lost the KV"
            assert answer.responses[-1].request_id == "client-1"
            await b.check_idle(Outcome.WORKER_FAILED)

    run(main)


def test_stream_06_a_relayed_error_event_shows_no_internals() -> None:
    async def main() -> None:
        script = (token(1), engine_error(oe.ERROR_CODE_INTERNAL, LEAKY), OK)
        async with bench(decode=[script]) as b:
            answer = await b.call()
            assert answer.responses[-1].error.code == oe.ERROR_CODE_INTERNAL
            assert clean(answer.responses[-1].error.message)

    run(main)


@pytest.mark.parametrize(("mode", "stage"), STAGES[1:])
def test_a_worker_that_ends_without_a_terminal_event_has_failed(mode: str, stage: str) -> None:
    async def main() -> None:
        async with bench(mode, scripts={stage: [(token(1), OK)]}) as b:
            answer = await b.call()
            assert answer.tokens == [1]
            assert answer.status.code is Code.UNAVAILABLE
            assert "without a terminal event" in answer.status.message
            await b.check_idle(Outcome.WORKER_FAILED)

    run(main)


@pytest.mark.parametrize(("mode", "stage"), STAGES[1:])
def test_a_status_behind_the_terminal_event_changes_nothing(mode: str, stage: str) -> None:
    async def main() -> None:
        script = (token(1), finished(), Status(Code.UNAVAILABLE, "gone"))
        async with bench(mode, n_workers=2, scripts={stage: [script]}) as b:
            answer = await b.call()
            assert answer.status == OK
            assert answer.tokens == [1]
            assert len(b.calls(stage)) == 1
            await b.check_idle(Outcome.COMPLETED)

    run(main)


@pytest.mark.parametrize(("mode", "stage"), STAGES)
def test_a_response_that_is_garbage_or_of_another_request_fails_the_leg(
    mode: str, stage: str
) -> None:
    async def main() -> None:
        foreign = oe.GenerateResponse(request_id="not-this-leg")
        foreign.token.tokens.add(token_id=666)
        for bad in (b"\xff\xff", foreign.SerializeToString()):
            async with bench(mode, n_workers=2, scripts={stage: [(bad, finished(), OK)]}) as b:
                answer = await b.call()
                assert answer.status.code is Code.UNAVAILABLE
                assert answer.responses == []
                await b.check_idle(Outcome.WORKER_FAILED)

    run(main)
