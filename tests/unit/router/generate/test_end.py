"""Ends that are nobody's good answer, through the real graph: nothing stays behind after any of them."""

import anyio
import grpc
import pytest

from slagate.pools.fleet.watch import INTERVAL_S, JITTER_RATIO
from slagate.pools.inflight.row_view import State
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import OK, Metadata, Status
from slagate.router.request.errors import RETRY_PUSHBACK, Aborted, Outcome
from slagate.router.request.settings import Settings
from slagate.workers.handoff.codec import MAX_OPAQUE_STATE_BYTES
from slagate.workers.runtime.virtual_loop import run
from support.builders import MODEL, finished, prefill_ready, put_in, request, session, token
from support.gateway.request_path import PEER, Answer, Bench, bench
from support.worker.fake import HANG, Script, Wait, refusal

Code = grpc.StatusCode
ABORTED = Aborted("aborted by the client")
HUNG: Script = (HANG,)
PARKED: Script = (prefill_ready(), HANG)
MID_STREAM: Script = (token(11), HANG)

POINTS = {
    "prefill unanswered": ("disagg", {"prefill": [HUNG]}),
    "handoff parked, prefill still open": ("disagg", {"prefill": [PARKED]}),
    "decode unanswered": ("disagg", {"decode": [HUNG]}),
    "decode mid-stream": ("disagg", {"decode": [MID_STREAM]}),
    "agg unanswered": ("agg", {"agg": [HUNG]}),
    "agg mid-stream": ("agg", {"agg": [MID_STREAM]}),
}
PARKED_POINTS = {"handoff parked, prefill still open", "decode unanswered"}


def check_legs(b: Bench, point: str) -> None:
    """The last leg was cancelled, no other one; a parked handoff was freed once, on its holder."""
    legs = [call for scripts in b.scripts.values() for call in scripts.calls]
    assert [leg.cancelled for leg in legs].count(True) == 1
    assert legs[-1].cancelled
    assert b.released == ([session()] if point in PARKED_POINTS else [])
    # A prefill that may be answering at this moment is told twice: its stream ends, and by its id.
    by_id = [legs[0].request.request_id] if point == "prefill unanswered" else []
    assert b.aborted_legs == by_id
    assert all(a == "p1:1" for a, worker in b.workers.items() if worker.aborts)


@pytest.mark.parametrize("point", POINTS)
def test_stream_02_disagg_10_a_client_that_goes_away_frees_everything(point: str) -> None:
    async def main() -> None:
        mode, scripts = POINTS[point]
        async with bench(mode, scripts=scripts) as b:
            answer = Answer()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: b.call(answer=answer))
                await b.settle()
                tasks.cancel_scope.cancel()
            assert answer.status.code is Code.CANCELLED
            await b.check_idle(Outcome.CANCELLED)
            check_legs(b, point)

    run(main)


@pytest.mark.parametrize("point", POINTS)
def test_a_deadline_frees_everything_in_time(point: str) -> None:
    async def main() -> None:
        mode, scripts = POINTS[point]
        async with bench(mode, scripts=scripts) as b:
            started_s = b.app.gateway.now_s()
            answer = await b.call(timeout_s=0.5)
            assert b.app.gateway.now_s() - started_s == pytest.approx(0.5)
            assert answer.status.code is Code.DEADLINE_EXCEEDED
            await b.check_idle(Outcome.DEADLINE)
            check_legs(b, point)

    run(main)


@pytest.mark.parametrize("point", POINTS)
def test_a_clients_own_abort_ends_its_request(point: str) -> None:
    async def main() -> None:
        mode, scripts = POINTS[point]
        async with bench(mode, scripts=scripts) as b:
            answer = Answer()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: b.call(request("mine"), answer=answer))
                await b.settle()
                assert not b.app.gateway.live.abort("ipv4:10.6.6.6:1", "mine", ABORTED)
                assert b.app.gateway.live.abort(PEER, "mine", ABORTED)
            assert answer.status.code is Code.CANCELLED
            assert answer.status.message == "aborted by the client"
            await b.check_idle(Outcome.CANCELLED)
            check_legs(b, point)
            assert not b.app.gateway.live.abort(PEER, "mine", ABORTED)

    run(main)


def test_a_request_without_a_deadline_ends_at_the_default_limit() -> None:
    async def main() -> None:
        async with bench(prefill=[HUNG], settings=Settings(default_timeout_s=2.0)) as b:
            assert (await b.call()).status.code is Code.DEADLINE_EXCEEDED
            await b.check_idle(Outcome.DEADLINE)

    run(main)


def test_disagg_09_a_handoff_that_no_decode_worker_takes_is_released_once() -> None:
    async def main() -> None:
        for code, outcome in (
            (Code.UNAVAILABLE, Outcome.WORKER_FAILED),
            (Code.NOT_FOUND, Outcome.INVALID),
        ):
            async with bench(n_workers=2, decode=[refusal(code)]) as b:
                for _ in range(5):
                    await b.call()
                    # Two good looks in between, so that the refusals do not add up.
                    await anyio.sleep(2 * INTERVAL_S * (1 + JITTER_RATIO))
                await b.check_idle(*[outcome] * 5)
                assert b.released == [session()] * 5
                assert b.aborted_legs == []
                assert all(a.startswith("p") for a, worker in b.workers.items() if worker.aborts)
                registry = b.app.gateway.metrics.registry
                name, labels = "slagate_handoffs_released_total", {"result": "released"}
                assert registry.get_sample_value(name, labels) == 5

    run(main)


def test_a_handoff_that_cannot_be_released_is_counted_and_hurts_nobody() -> None:
    async def main() -> None:
        for code, result in ((Code.NOT_FOUND, "gone"), (Code.UNAVAILABLE, "failed")):
            async with bench(decode=[refusal(Code.UNAVAILABLE)]) as b:
                b.workers["p1:1"].abort_fails = Status(code, "no")
                await b.call()
                await b.check_idle(Outcome.WORKER_FAILED)
                registry = b.app.gateway.metrics.registry
                labels = {"result": result}
                assert registry.get_sample_value("slagate_handoffs_released_total", labels) == 1

    run(main)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (session(""), "no id"),
        (session(state=""), "neither an endpoint nor transfer state"),
        (session(state="A" * (2 * MAX_OPAQUE_STATE_BYTES)), "bytes"),
        (session(backend="ucx"), "ucx"),
    ],
    ids=["no id", "no state", "too big", "other backend"],
)
def test_a_bad_handoff_never_reaches_a_decode_worker(bad: oe.KvSessionRef, reason: str) -> None:
    async def main() -> None:
        async with bench(n_workers=2, prefill=[(prefill_ready(bad), OK)]) as b:
            answer = await b.call()
            assert answer.status.code is Code.UNAVAILABLE
            assert answer.status.message.startswith("prefill: gave an unusable handoff: ")
            assert reason in answer.status.message
            assert b.calls("decode") == []
            assert len(b.calls("prefill")) == 1  # the next one would be no better
            await b.check_idle(Outcome.WORKER_FAILED)
            assert b.released == [bad]

    run(main)


@pytest.mark.parametrize(("mode", "stage"), [("disagg", "decode"), ("agg", "agg")])
def test_stream_05_a_client_that_does_not_read_is_ended_and_its_leg_cancelled(
    mode: str, stage: str
) -> None:
    async def main() -> None:
        flood = (*(token(*range(100)), Wait(0.001)) * 100, finished(), OK)
        settings = Settings(max_buffer_bytes=4096)
        async with bench(mode, settings=settings, scripts={stage: [flood]}) as b:
            answer = await b.call(reads=False)
            assert answer.status.code is Code.RESOURCE_EXHAUSTED
            assert answer.out.n_bytes == 0
            assert [call.cancelled for call in b.calls(stage)] == [True]
            await b.check_idle(Outcome.SLOW_CLIENT)

    run(main)


def test_an_answer_of_the_context_leg_that_does_not_fit_the_buffer_is_no_success() -> None:
    async def main() -> None:
        script = (token(*range(100)), finished(oe.FINISH_REASON_STOP), OK)
        async with bench(prefill=[script], settings=Settings(max_buffer_bytes=64)) as b:
            answer = await b.call()
            assert answer.status.code is Code.RESOURCE_EXHAUSTED
            await b.check_idle(Outcome.SLOW_CLIENT)

    run(main)


BAD_CALLS: dict[str, tuple[oe.GenerateRequest, Metadata, str, str]] = {
    "no tokens": (request(tokens=[]), (), "INVALID_ARGUMENT", "token_ids"),
    "no budget": (
        oe.GenerateRequest(
            request_id="r",
            model=MODEL,
            token_ids=oe.TokenIds(ids=[1]),
            stopping=oe.StoppingOptions(max_tokens=0),
        ),
        (),
        "INVALID_ARGUMENT",
        "stopping.max_tokens",
    ),
    "unknown model": (request(model="gpt-9"), (), "NOT_FOUND", "model"),
    "too large": (request(tokens=[1] * 2000), (), "RESOURCE_EXHAUSTED", "token_ids"),
    "bad target": (request(), [("x-slo-ttft-ms", "NaN")], "INVALID_ARGUMENT", "x-slo-ttft-ms"),
    "repeated": (
        request(),
        [("openengine-priority", "1")] * 2,
        "INVALID_ARGUMENT",
        "openengine-priority",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_cfg_04_bad_input_is_refused_by_name_before_any_worker_is_called(name: str) -> None:
    async def main() -> None:
        message, metadata, code, field = BAD_CALLS[name]
        async with bench(settings=Settings(max_request_bytes=1000)) as b:
            answer = await b.call(message, metadata=metadata)
            assert (answer.status.code.name, answer.status.message.split(":")[0]) == (code, field)
            assert b.calls("prefill") == b.calls("decode") == []
            assert b.outcomes().get("internal") is None
            await b.check_idle(Outcome.TOO_LARGE if name == "too large" else Outcome.INVALID)

    run(main)


def test_health_03_unknown_model_and_no_ready_worker_are_two_answers() -> None:
    async def main() -> None:
        async with bench() as b:
            assert (await b.call(request(model="other"))).status.code is Code.NOT_FOUND
            for member in b.app.fleet.pools["decode"].members.values():
                put_in(member, State.NOT_READY)
            resting = await b.call()
            assert resting.status.code is Code.UNAVAILABLE
            assert int(dict(resting.status.trailers)[RETRY_PUSHBACK]) > 0
            assert b.calls("prefill") == []
            await b.check_idle(Outcome.INVALID, Outcome.UNAVAILABLE)

    run(main)


def test_disagg_03_no_decode_worker_means_no_prefill_either() -> None:
    async def main() -> None:
        async with bench() as b:
            for member in b.app.fleet.pools["prefill"].members.values():
                put_in(member, State.NOT_READY)
            answers = [await b.call() for _ in range(10)]
            assert {answer.status.code for answer in answers} == {Code.UNAVAILABLE}
            assert b.calls("prefill") == b.calls("decode") == []
            await b.check_idle(*[Outcome.UNAVAILABLE] * 10)

    run(main)


def test_stream_03_a_request_cancelled_in_prefill_does_not_hold_up_the_next() -> None:
    async def main() -> None:
        good = (Wait(0.01), prefill_ready(), OK)
        async with bench(prefill=[HUNG, good]) as b:
            await b.call(timeout_s=0.1)
            for _ in range(20):
                started_s = b.app.gateway.now_s()
                assert (await b.call()).tokens == [11, 12, 13]
                assert b.app.gateway.now_s() - started_s < 0.02
            await b.check_idle(Outcome.DEADLINE, *[Outcome.COMPLETED] * 20)

    run(main)
