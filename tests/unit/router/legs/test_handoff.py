import anyio
import grpc
import pytest

from slagate.pools.grid.grid import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import OK, Status
from slagate.router.legs.handoff import (
    RELEASE_TIMEOUT_S,
    Handoff,
    PrefillSink,
    Releaser,
    check_handoff,
)
from slagate.router.metrics import Metrics
from slagate.router.request.errors import LegFailed
from slagate.workers.handoff.codec import MAX_OPAQUE_STATE_BYTES
from slagate.workers.runtime.virtual_loop import run
from support.builders import engine_error, finished, member, prefill_ready, session, token
from support.worker.fake import FakeWorker

Code = grpc.StatusCode


class Leg:
    """A prefill sink and what the test sends to it."""

    def __init__(self, *, only_token: bool = False) -> None:
        self.sessions: list[oe.KvSessionRef] = []
        self.sink = PrefillSink("leg-1", self.sessions.append, only_token=only_token)

    def play(self, *steps: oe.GenerateResponse | Status, leg_id: str = "leg-1") -> "Leg":
        for step in steps:
            if isinstance(step, Status):
                self.sink.finish(step)
            else:
                response = oe.GenerateResponse(request_id=leg_id)
                response.MergeFrom(step)
                self.sink.message(response.SerializeToString())
        return self


def test_a_handoff_is_known_in_the_step_in_which_it_arrives() -> None:
    async def main() -> None:
        leg = Leg().play(token(1), prefill_ready(session("5"), cached=3))
        assert leg.sessions == [session("5")]
        assert not leg.sink.has_ended
        leg.play(token(1), OK)
        assert leg.sink.failure() is None
        assert leg.sink.cached_tokens == 3
        assert leg.sink.has_ended

    run(main)


def test_what_is_said_of_the_prompt_outlives_the_handoff() -> None:
    async def main() -> None:
        prompt = oe.GenerateResponse(prompt=oe.PromptOutput(tokens=[oe.TokenInfo(token_id=5)]))
        leg = Leg().play(prompt, token(1), prefill_ready(session("5")), OK)
        assert oe.GenerateResponse.FromString(leg.sink.preface).prompt == prompt.prompt

    run(main)


def test_an_answer_without_a_handoff_is_kept_whole() -> None:
    async def main() -> None:
        stop, length = oe.FINISH_REASON_STOP, oe.FINISH_REASON_LENGTH
        for only_token, reason in ((False, stop), (True, stop), (True, length)):
            leg = Leg(only_token=only_token).play(token(1), finished(reason), OK)
            assert leg.sessions == []
            assert leg.sink.failure() is None
            events = [oe.GenerateResponse.FromString(data) for data in leg.sink.answer]
            assert [event.WhichOneof("event") for event in events] == ["token", "finished"]

    run(main)


@pytest.mark.parametrize(
    ("steps", "code", "message"),
    [
        ((OK,), Code.UNAVAILABLE, "prefill: ended without a terminal event"),
        ((token(1), OK), Code.UNAVAILABLE, "prefill: ended without a terminal event"),
        ((Status(Code.NOT_FOUND, "model"),), Code.NOT_FOUND, "prefill: model"),
        ((Status(Code.INTERNAL, "at 10.0.0.1:5"),), Code.INTERNAL, "prefill: at (address)"),
        (
            (engine_error(oe.ERROR_CODE_OVERLOADED, "full"), OK),
            Code.RESOURCE_EXHAUSTED,
            "prefill: full",
        ),
        ((token(1), finished(), OK), Code.UNAVAILABLE, "prefill: ended without a handoff"),
    ],
)
def test_disagg_04_a_prefill_that_failed_says_how(
    steps: tuple[oe.GenerateResponse | Status, ...], code: grpc.StatusCode, message: str
) -> None:
    async def main() -> None:
        failure = Leg().play(*steps).sink.failure()
        assert isinstance(failure, LegFailed)
        assert (failure.code, str(failure)) == (code, message)

    run(main)


@pytest.mark.parametrize(
    "late",
    [
        Status(Code.UNAVAILABLE, "gone"),
        engine_error(oe.ERROR_CODE_INTERNAL, "late"),
        prefill_ready(session("other")),
        finished(),
    ],
    ids=["status", "error", "another handoff", "finished"],
)
def test_what_comes_behind_the_handoff_changes_nothing(late: oe.GenerateResponse | Status) -> None:
    async def main() -> None:
        leg = Leg().play(prefill_ready(), late)
        assert leg.sink.is_complete
        assert leg.sink.failure() is None
        assert leg.sessions == [session()]

    run(main)


def test_another_requests_handoff_is_not_taken() -> None:
    async def main() -> None:
        leg = Leg().play(prefill_ready(), leg_id="leg-2").play(OK)
        failure = leg.sink.failure()
        assert isinstance(failure, LegFailed)
        assert failure.retryable
        assert leg.sessions == []

    run(main)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (session(""), "it has no id"),
        (session(state=""), "neither an endpoint nor transfer state"),
        (session(state="A" * (2 * MAX_OPAQUE_STATE_BYTES)), "bytes"),
        (session(backend="ucx"), "it is for ucx, the decode worker uses nixl"),
        (oe.KvSessionRef(), "it has no id"),
    ],
)
def test_the_guard_refuses_and_blames_prefill(bad: oe.KvSessionRef, reason: str) -> None:
    with pytest.raises(LegFailed, match=r"^prefill: gave an unusable handoff") as caught:
        check_handoff(bad, member(stage=Stage.DECODE))
    assert reason in str(caught.value)
    assert not caught.value.retryable


def test_the_guard_lets_every_known_layout_pass() -> None:
    by_endpoint = oe.KvSessionRef(session_id="7", endpoints=[oe.KvEndpoint()])
    by_attribute = session("")
    by_attribute.attributes_struct.update({"disagg_request_id": "9"})
    for good in (session(), session(backend=""), by_endpoint, by_attribute):
        check_handoff(good, member(stage=Stage.DECODE))
    check_handoff(session(backend="ucx"), member(stage=Stage.DECODE, backend=""))
    # Which back-end that is the engine decides.
    check_handoff(session(backend="DEFAULT"), member(stage=Stage.DECODE))
    check_handoff(session(backend="NIXL"), member(stage=Stage.DECODE, backend="DEFAULT"))


@pytest.mark.parametrize(
    ("fails", "result"),
    [
        (None, "released"),
        (Status(Code.NOT_FOUND, "no"), "gone"),
        (Status(Code.UNAVAILABLE, "no"), "failed"),
    ],
)
def test_i5_a_handoff_is_used_or_released_exactly_once(fails: Status | None, result: str) -> None:
    async def main() -> None:
        metrics, worker, holder = Metrics(), FakeWorker(abort_fails=fails), member()
        holder.worker = worker
        async with anyio.create_task_group() as tasks:
            releaser = Releaser(tasks, metrics)
            used, left = (Handoff(session(i), holder, releaser) for i in ("1", "2"))
            assert releaser.n_open == 2
            used.used()
            used.used()
            used.release()
            left.release()
            left.release()
            left.used()
        assert releaser.n_open == 0
        assert [abort.kv_session.session_id for abort in worker.aborts] == ["2"]
        name, labels = "slagate_handoffs_released_total", {"result": result}
        assert metrics.registry.get_sample_value(name, labels) == 1

    run(main)


def test_a_holder_that_does_not_answer_is_given_up_in_time() -> None:
    class Silent(FakeWorker):
        async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
            await anyio.sleep_forever()
            raise AssertionError

    async def main() -> None:
        metrics, holder = Metrics(), member()
        holder.worker = Silent()
        async with anyio.create_task_group() as tasks:
            Handoff(session(), holder, Releaser(tasks, metrics)).release()
        assert anyio.current_time() == RELEASE_TIMEOUT_S
        labels = {"result": "failed"}
        assert metrics.registry.get_sample_value("slagate_handoffs_released_total", labels) == 1

    run(main)


@pytest.mark.parametrize("result", ["released", "failed"])
def test_a_worker_that_breaks_in_an_abort_hurts_nobody_else(result: str) -> None:
    class Broken(FakeWorker):
        async def abort(self, request: oe.AbortRequest) -> oe.AbortResponse:
            raise ZeroDivisionError("not a WorkerError")

    async def main() -> None:
        metrics, broken, sound = Metrics(), member("b:1"), member("s:1")
        broken.worker, sound.worker = Broken(), FakeWorker()
        async with anyio.create_task_group() as tasks:
            releaser = Releaser(tasks, metrics)
            Handoff(session("1"), broken, releaser).release()
            releaser.abort("leg-1", broken)
            await anyio.wait_all_tasks_blocked()
            Handoff(session("2"), sound, releaser).release()
        assert releaser.n_open == 0
        name = "slagate_handoffs_released_total"
        assert metrics.registry.get_sample_value(name, {"result": result}) == 1

    run(main)


def test_an_abort_by_leg_id_goes_to_its_worker_and_counts_as_no_handoff() -> None:
    async def main() -> None:
        metrics, worker, holder = Metrics(), FakeWorker(), member()
        holder.worker = worker
        async with anyio.create_task_group() as tasks:
            Releaser(tasks, metrics).abort("leg-1", holder)
        assert worker.aborts == [oe.AbortRequest(request_id="leg-1")]
        name, labels = "slagate_handoffs_released_total", {"result": "released"}
        assert metrics.registry.get_sample_value(name, labels) is None

    run(main)
