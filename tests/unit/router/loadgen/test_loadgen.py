"""The load client: what it notes of a stream, how it compares, and when it sends."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import anyio
import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Sink
from slagate.proto.rpc.status import OK, Metadata, Status
from slagate.router.loadgen.loadgen import (
    LoadRequest,
    Progress,
    ServedRequest,
    StreamProbe,
    mismatch,
    run_load,
)
from slagate.workers.runtime.virtual_loop import run

Events = Sequence[oe.GenerateResponse | bytes | Status]


def token(*ids: int, request_id: str = "r1") -> oe.GenerateResponse:
    tokens = [oe.TokenInfo(token_id=n) for n in ids]
    return oe.GenerateResponse(
        request_id=request_id, token=oe.TokenOutput(output_index=0, tokens=tokens)
    )


def finished(n_tokens: int, *, request_id: str = "r1") -> oe.GenerateResponse:
    return oe.GenerateResponse(
        request_id=request_id,
        finished=oe.GenerationFinished(output_index=0, reason=oe.FINISH_REASON_LENGTH),
        usage=oe.Usage(completion_tokens=n_tokens),
    )


def error(code: oe.ErrorCode.ValueType) -> oe.GenerateResponse:
    return oe.GenerateResponse(request_id="r1", error=oe.EngineError(code=code, message="gone"))


def serve(events: Events, *, now_s: Callable[[], float] = lambda: 0.0) -> ServedRequest:
    probe = StreamProbe("r1", now_s=now_s, progress=Progress())
    for event in events:
        if isinstance(event, Status):
            probe.finish(event)
        else:
            probe.message(event if isinstance(event, bytes) else event.SerializeToString())
    assert probe.ended.is_set()
    return probe.served(late_s=0.0)


# --- comparison ------------------------------------------------------------------------------------


def test_a_stream_equal_to_the_reference_is_no_mismatch() -> None:
    served = serve([token(1), token(2, 3), finished(3), OK])
    assert (served.tokens, served.failed, served.fault) == ((1, 2, 3), False, "")
    assert mismatch(served, [1, 2, 3]) == ""


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([token(1, 2, 4), finished(3), OK], "token 2 is 4, not 3"),
        ([token(1, 2), finished(2), OK], "2 tokens, not 3"),
        ([token(1, 2, 3, 4), finished(4), OK], "4 tokens, not 3"),
        ([finished(0), OK], "0 tokens, not 3"),
        ([token(1, 2, 3), OK], "no finished event"),
        ([OK], "no finished event"),
        ([token(1, 2, 3), finished(2), OK], "usage of 2 completion tokens"),
        ([token(1, 2), finished(2), token(3), OK], "token after finished"),
        ([token(1, 2, 3), finished(3), finished(3), OK], "finished after finished"),
        (
            [token(1, 2), token(3, request_id="r2"), finished(3), OK],
            "a response for request 'r2'",
        ),
        ([token(1, 2, 3), finished(3, request_id=""), OK], "a response for request ''"),
        ([token(1, 2, 3), b"\xff", finished(3), OK], "a response that cannot be read"),
        (
            [oe.GenerateResponse(request_id="r1", prefill_ready=oe.PrefillReady()), OK],
            "an event prefill_ready that no client asked for",
        ),
        ([token(1, 9), error(oe.ERROR_CODE_INTERNAL), OK], "token 1 is 9, not 2"),
        ([token(1, 2, 3, 4), error(oe.ERROR_CODE_INTERNAL), OK], "4 tokens, not 3"),
        ([token(9), Status(grpc.StatusCode.UNAVAILABLE)], "token 0 is 9, not 1"),
    ],
)
def test_a_mismatch_says_what_is_wrong(events: Events, said: str) -> None:
    assert mismatch(serve(events), [1, 2, 3]) == said


@pytest.mark.parametrize(
    "events",
    [
        [Status(grpc.StatusCode.UNAVAILABLE, "gone")],
        [token(1, 2), Status(grpc.StatusCode.UNAVAILABLE, "gone")],
        [token(1, 2), error(oe.ERROR_CODE_KV_TRANSFER_FAILED), OK],
    ],
)
def test_a_failed_stream_with_right_tokens_is_failed_and_no_mismatch(events: Events) -> None:
    served = serve(events)
    assert served.failed
    assert served.status[:2] == (grpc.StatusCode.UNAVAILABLE, "gone")
    assert mismatch(served, [1, 2, 3]) == ""


@settings(max_examples=100)
@given(tokens=st.lists(st.integers(0, 5), min_size=1, max_size=12), data=st.data())
def test_any_change_to_the_tokens_is_a_mismatch(tokens: list[int], data: st.DataObject) -> None:
    chunks = data.draw(st.lists(st.integers(0, len(tokens)), max_size=3).map(sorted))
    edges = [0, *chunks, len(tokens)]
    parts = [token(*tokens[a:b]) for a, b in pairwise(edges)]
    served = serve([*parts, finished(len(tokens)), OK])
    assert mismatch(served, tokens) == ""
    other = data.draw(st.lists(st.integers(0, 5), max_size=13))
    assert (mismatch(served, other) == "") == (other == tokens)


# --- figures ---------------------------------------------------------------------------------------


def test_ttft_is_to_the_first_token_and_itl_the_mean_between_tokens() -> None:
    clock = iter([10.0, 10.5, 10.75, 11.5, 12.0, 12.25])
    served = serve([token(1), token(2, 3), token(4), finished(4), OK], now_s=clock.__next__)
    assert served.ttft_s == 0.5
    assert served.itl_s == pytest.approx((11.5 - 10.5) / 3)
    assert served.e2e_s == 2.25


def test_without_tokens_there_are_no_figures() -> None:
    served = serve([token(), finished(0), OK])
    assert (served.ttft_s, served.itl_s) == (None, None)


def test_one_token_has_a_ttft_and_no_itl() -> None:
    served = serve([token(1), finished(1), OK])
    assert (served.ttft_s, served.itl_s) == (0.0, None)


@pytest.mark.parametrize("code", [grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE])
def test_the_receipt_comes_with_the_end_whatever_that_is(code: grpc.StatusCode) -> None:
    receipt = gw.Receipt(actual=gw.Actual(outcome="completed"))
    trailers = (("other", "x"), ("slagate-receipt-bin", receipt.SerializeToString()))
    assert serve([Status(code, "", trailers)]).receipt == receipt


@pytest.mark.parametrize("trailers", [(), (("slagate-receipt-bin", b"\xff"),)])
def test_no_receipt_is_none(trailers: tuple[tuple[str, str | bytes], ...]) -> None:
    assert serve([Status(grpc.StatusCode.OK, "", trailers)]).receipt is None


def test_an_error_event_keeps_the_receipt() -> None:
    receipt = gw.Receipt(actual=gw.Actual(outcome="worker_failed"))
    end = Status(grpc.StatusCode.OK, "", (("slagate-receipt-bin", receipt.SerializeToString()),))
    served = serve([error(oe.ERROR_CODE_INTERNAL), end])
    assert (served.status.code, served.receipt) == (grpc.StatusCode.INTERNAL, receipt)


# --- sending ---------------------------------------------------------------------------------------


class FakeTarget:
    """Answers one token after `answer_s`, and notes when each request came."""

    def __init__(self, *, answer_s: float) -> None:
        self.sent: list[tuple[str, float]] = []
        self.timeouts_s: set[float | None] = set()
        self._answer_s = answer_s

    def generate(
        self, request: bytes, metadata: Metadata, sink: Sink, *, timeout_s: float | None
    ) -> "FakeTarget":
        request_id = oe.GenerateRequest.FromString(request).request_id
        assert metadata == (("k", request_id),)
        self.sent.append((request_id, anyio.current_time()))
        self.timeouts_s.add(timeout_s)

        def answer() -> None:
            for event in (token(5, request_id=request_id), finished(1, request_id=request_id)):
                sink.message(event.SerializeToString())
            sink.finish(OK)

        asyncio.get_running_loop().call_later(self._answer_s, answer)
        return self

    def cancel(self) -> None:
        """Nothing runs on after the end."""

    pause = resume = cancel


def load_request(at_s: float, request_id: str) -> LoadRequest:
    data = oe.GenerateRequest(request_id=request_id).SerializeToString()
    return LoadRequest(at_s, request_id, data, (("k", request_id),))


def test_requests_leave_at_their_time_whatever_became_of_those_before() -> None:
    """Open loop: answers take 100 s, and nobody waits for them."""
    times_s = sorted(random.Random(3).uniform(0, 10) for _ in range(20))
    targets = [FakeTarget(answer_s=100.0), FakeTarget(answer_s=100.0)]
    changes: list[tuple[int, int, int, int]] = []

    async def main() -> list[ServedRequest]:
        await anyio.sleep(7.0)
        return await run_load(
            targets,
            [load_request(at_s, f"r{n}") for n, at_s in enumerate(times_s)],
            timeout_s=9.0,
            on_change=lambda p: changes.append((p.n_sent, p.n_done, p.n_failed, p.n_tokens)),
            now_s=anyio.current_time,
        )

    served = run(main)
    sent = sorted(targets[0].sent + targets[1].sent, key=lambda one: one[1])
    assert [at_s - 7.0 for _, at_s in sent] == pytest.approx(times_s)
    assert [len(target.sent) for target in targets] == [10, 10]
    assert targets[0].timeouts_s == {9.0}
    assert [one.request_id for one in served] == [f"r{n}" for n in range(20)]
    assert [one.ttft_s for one in served] == pytest.approx([100.0] * 20)
    assert [one.late_s for one in served] == pytest.approx([0.0] * 20)
    assert changes[19] == (20, 0, 0, 0)
    assert changes[-1] == (20, 20, 0, 20)


def test_requests_are_built_one_ahead() -> None:
    """A replay of millions of prompt tokens must not hold them all."""
    built: list[float] = []

    async def main() -> None:
        def requests() -> Iterator[LoadRequest]:
            for n in range(5):
                built.append(anyio.current_time())
                yield load_request(float(n), f"r{n}")

        await run_load(
            [FakeTarget(answer_s=0.5)], requests(), timeout_s=1.0, on_change=lambda _: None
        )

    run(main)
    assert built == pytest.approx([0.0, 0.0, 1.0, 2.0, 3.0])
