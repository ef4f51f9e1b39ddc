"""Which failures of a leg another worker may make good."""

from collections.abc import Callable

import grpc
import pytest

from slagate.pools.grid.grid import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import BufferedSink
from slagate.proto.rpc.status import OK, Status
from slagate.router.legs.handoff import PrefillSink
from slagate.router.legs.leg import LegSink
from slagate.router.legs.relay import Relay
from slagate.router.receipts.record import StreamStats
from slagate.router.request.errors import LegFailed
from slagate.workers.runtime.virtual_loop import run
from support.builders import engine_error, finished, prefill_ready, token

Code = grpc.StatusCode


def relay(stage: Stage) -> Relay:
    return Relay(
        stage,
        BufferedSink(),
        leg_id="leg",
        client_id="client",
        stats=StreamStats(),
        max_buffer_bytes=1 << 20,
        stuck_s=5.0,
        now_s=lambda: 0.0,
        on_token=lambda: None,
        on_answered=lambda: None,
    )


SINKS: dict[Stage, Callable[[], LegSink]] = {
    Stage.PREFILL: lambda: PrefillSink("leg", lambda _session: None, only_token=False),
    Stage.DECODE: lambda: relay(Stage.DECODE),
    Stage.AGG: lambda: relay(Stage.AGG),
}


def failure(stage: Stage, *steps: oe.GenerateResponse | Status) -> LegFailed:
    async def main() -> LegFailed:
        failed = playing(stage, *steps).failure()
        assert isinstance(failed, LegFailed)
        return failed

    return run(main)


def playing(stage: Stage, *steps: oe.GenerateResponse | Status) -> LegSink:
    """A sink after these steps; to be called on a loop."""
    sink = SINKS[stage]()
    for step in steps:
        play(sink, step)
    return sink


def play(sink: LegSink, step: oe.GenerateResponse | Status) -> None:
    if isinstance(step, Status):
        sink.finish(step)
    else:
        response = oe.GenerateResponse(request_id="leg")
        response.MergeFrom(step)
        sink.message(response.SerializeToString())


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("code", [c for c in Code if c is not Code.OK], ids=lambda code: code.name)
def test_health_02_a_refusal_is_tried_elsewhere_only_where_that_can_help(
    code: grpc.StatusCode, stage: Stage
) -> None:
    failed = failure(stage, Status(code, "no"))
    assert failed.retryable == (code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED))
    assert failed.code is code


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("flag", [False, True])
def test_an_engines_error_is_tried_elsewhere_where_the_engine_says_so(
    stage: Stage, *, flag: bool
) -> None:
    """But never a decode leg: the handoff may be used up."""
    event = engine_error(oe.ERROR_CODE_OVERLOADED, "full")
    event.error.retryable = flag
    failed = failure(stage, event, OK)
    assert failed.code is Code.RESOURCE_EXHAUSTED
    assert failed.retryable == (flag and stage is not Stage.DECODE)


def test_health_01_after_a_token_nothing_is_tried_again() -> None:
    for stage in (Stage.DECODE, Stage.AGG):
        assert not failure(stage, token(1), Status(Code.UNAVAILABLE, "gone")).retryable
        assert not failure(stage, token(1), OK).retryable


@pytest.mark.parametrize("stage", list(Stage))
def test_a_worker_that_breaks_the_protocol_counts_as_unavailable(stage: Stage) -> None:
    for steps in ((OK,), (oe.GenerateResponse(request_id="other"), OK)):
        failed = failure(stage, *steps)
        assert failed.code is Code.UNAVAILABLE
        assert failed.retryable or stage is Stage.DECODE


# An event that is passed on by no kind of leg: it only shows that the worker is there.
NOTHING = oe.GenerateResponse()
GONE = Status(Code.UNAVAILABLE, "gone")
TERMINAL = {
    Stage.PREFILL: prefill_ready(),
    Stage.DECODE: finished(),
    Stage.AGG: finished(),
}


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED])
@pytest.mark.parametrize(
    ("stage", "heard", "retryable"),
    [
        (Stage.PREFILL, NOTHING, True),
        (Stage.PREFILL, token(1), True),
        (Stage.DECODE, NOTHING, False),
        (Stage.DECODE, token(1), False),
        (Stage.AGG, NOTHING, True),
        (Stage.AGG, token(1), False),
    ],
)
def test_a_leg_is_repeated_until_something_could_happen_twice(
    stage: Stage, heard: oe.GenerateResponse, code: grpc.StatusCode, *, retryable: bool
) -> None:
    assert failure(stage, heard, Status(code, "no")).retryable == retryable


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize(
    "last", [GONE, OK, engine_error(oe.ERROR_CODE_INTERNAL, "no"), None], ids=str
)
def test_a_leg_is_complete_at_its_terminal_event_and_ended_with_the_call(
    stage: Stage, last: oe.GenerateResponse | Status | None
) -> None:
    async def main() -> None:
        sink = playing(stage, token(1))
        assert not sink.is_complete
        step = TERMINAL[stage] if last is None else last
        play(sink, step)
        assert sink.is_complete
        assert sink.has_ended == isinstance(step, Status)
        sink.finish(GONE)
        assert sink.has_ended
        assert (sink.failure() is None) == (last is None)

    run(main)


@pytest.mark.parametrize("stage", list(Stage))
def test_a_worker_that_is_out_of_service_fails_only_a_leg_that_can_be_repeated(
    stage: Stage,
) -> None:
    async def main() -> None:
        silent = playing(stage)
        silent.worker_lost("reports nothing, at 10.0.0.1:5")
        failed = silent.failure()
        assert isinstance(failed, LegFailed)
        assert (failed.code, failed.retryable) == (Code.UNAVAILABLE, True)
        assert str(failed) == f"{stage.value}: is out of service: reports nothing, at (address)"
        assert silent.is_complete
        for heard in (token(1), NOTHING):
            sink = playing(stage, heard)
            sink.worker_lost("slow")
            # A token on the context leg means nothing; one that the client has is not taken back.
            relayed = stage is Stage.AGG and heard is not NOTHING
            kept = stage is Stage.DECODE or relayed
            assert (sink.failure() is None) == kept
            assert sink.is_complete != kept
        refused = playing(stage, Status(Code.INVALID_ARGUMENT, "bad"))
        refused.worker_lost("slow")
        assert str(refused.failure()) == f"{stage.value}: bad"

    run(main)


@pytest.mark.parametrize("stage", list(Stage))
def test_a_leg_is_untaken_when_it_failed_unavailable_before_a_word(stage: Stage) -> None:
    async def main() -> None:
        assert playing(stage, GONE).untaken
        assert playing(stage, OK).untaken
        assert not playing(stage).untaken
        assert not playing(stage, Status(Code.RESOURCE_EXHAUSTED, "full")).untaken
        assert not playing(stage, NOTHING, GONE).untaken
        assert not playing(stage, TERMINAL[stage], GONE).untaken

    run(main)


def test_only_a_prefill_leg_may_have_parked() -> None:
    async def main() -> None:
        for stage in (Stage.DECODE, Stage.AGG):
            assert not playing(stage).may_have_parked
            assert not playing(stage, GONE).may_have_parked

    run(main)
