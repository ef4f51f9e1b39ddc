"""What a client of a replay sends, and what it notes of an answer."""

import grpc

from slagate.proto import gateway_pb2 as gw
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import OK, Status
from slagate.router.replay.classes import RequestClass
from slagate.router.replay.client import Answer, Ask
from slagate.router.replay.trace import TraceRow
from slagate.router.request.metadata import RECEIPT_TRAILER
from slagate.workers.legs import client_id_suffix
from slagate.workers.sim.args import VOCAB_SIZE

CLASS = RequestClass("a", 1.0, ttft_ms=100, itl_ms=10)


def ask(isl_tokens: int = 1000) -> Ask:
    row = TraceRow(7, 0.0, isl_tokens, 3, ())
    tokens = row.prompt(VOCAB_SIZE)
    return Ask(row, CLASS, 0.0, tokens, answer_tokens=3, max_tokens=2048, ignore_eos=False)


def test_a_request_is_the_message_that_it_says() -> None:
    for isl_tokens in (1, 20, 200, 1000):
        asked = ask(isl_tokens)
        assert oe.GenerateRequest.FromString(asked.request("m")) == oe.GenerateRequest(
            request_id="row-7",
            model="m",
            token_ids=oe.TokenIds(ids=asked.tokens.tolist()),
            stopping=oe.StoppingOptions(max_tokens=2048, ignore_eos=False),
        )


class Clock:
    now_s = 1.0

    def __call__(self) -> float:
        return self.now_s


def token_event(*ids: int) -> bytes:
    """As the gateway relays it: its own id of the leg, with the client's behind it."""
    tokens = [oe.TokenInfo(token_id=token) for token in ids]
    event = oe.TokenOutput(output_index=0, tokens=tokens)
    data = oe.GenerateResponse(request_id="g-1", token=event).SerializeToString()
    return data + client_id_suffix("row-7")


def test_tokens_are_noted_in_order_with_the_times_of_the_first_and_the_last() -> None:
    clock = Clock()
    answer = Answer(ask(), clock)
    for now_s, messages in ((3.0, [(5, 0)]), (4.0, [(300_000,), (6,)]), (7.0, [(6,)])):
        clock.now_s = now_s
        answer.batch([token_event(*ids) for ids in messages])
    clock.now_s = 8.0
    finished = oe.GenerationFinished(output_index=0, reason=oe.FINISH_REASON_LENGTH)
    end = oe.GenerateResponse(request_id="g-1", finished=finished, usage=oe.Usage(prompt_tokens=9))
    answer.message(end.SerializeToString())
    receipt = gw.Receipt(number=3)
    trailers = ((RECEIPT_TRAILER, receipt.SerializeToString()),)
    answer.finish(OK._replace(trailers=trailers))
    assert answer.tokens == [5, 0, 300_000, 6, 6]
    assert (answer.ttft_s, answer.itl_s, answer.ended_s) == (2.0, 1.0, 8.0)
    assert answer.receipt == receipt
    assert answer.is_answered


def test_an_answer_without_tokens_has_no_times() -> None:
    answer = Answer(ask(), Clock())
    answer.finish(Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"))
    assert (answer.tokens, answer.ttft_s, answer.itl_s) == ([], None, None)
    assert answer.is_refused
