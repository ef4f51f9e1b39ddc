"""Which failures of a leg another worker may make good."""

from collections.abc import Callable

import grpc
import pytest

from slagate.pools.member import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.router.errors import LegFailed
from slagate.router.handoff import PrefillSink
from slagate.router.leg import LegSink
from slagate.router.splice import Splice, Tally
from slagate.workers.stream import BufferedSink
from slagate.workers.worker import OK, Status
from support.builders import engine_error, token
from support.virtual_loop import run

Code = grpc.StatusCode


def splice(stage: Stage) -> Splice:
    return Splice(
        stage,
        BufferedSink(),
        leg_id="leg",
        client_id="client",
        tally=Tally(),
        max_buffer_bytes=1 << 20,
        now_s=lambda: 0.0,
        on_token=lambda: None,
    )


SINKS: dict[Stage, Callable[[], LegSink]] = {
    Stage.PREFILL: lambda: PrefillSink("leg", lambda _session: None),
    Stage.DECODE: lambda: splice(Stage.DECODE),
    Stage.AGG: lambda: splice(Stage.AGG),
}


def failure(stage: Stage, *steps: oe.GenerateResponse | Status) -> LegFailed:
    async def main() -> LegFailed:
        sink = SINKS[stage]()
        for step in steps:
            if isinstance(step, Status):
                sink.end(step)
            else:
                sink.message(oe.GenerateResponse(request_id="leg").SerializeToString() + wire(step))
        failed = sink.failure()
        assert isinstance(failed, LegFailed)
        return failed

    return run(main)


def wire(response: oe.GenerateResponse) -> bytes:
    return response.SerializeToString()


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
