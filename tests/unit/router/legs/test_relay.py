import grpc
import pytest

from slagate.pools.grid.grid import Stage
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import BufferedSink
from slagate.proto.rpc.status import OK, Status
from slagate.router.legs.relay import Relay
from slagate.router.receipts.record import StreamStats
from slagate.router.request.errors import ErrorRelayed, LegFailed, SlowClient
from slagate.workers.runtime.virtual_loop import run
from support.builders import engine_error, finished, prefill_ready, token

Code = grpc.StatusCode


class Leg:
    """A relay between a leg that the test plays and a client's buffer."""

    def __init__(
        self,
        *,
        max_buffer_bytes: int = 1 << 20,
        stats: StreamStats | None = None,
        preface: bytes = b"",
    ) -> None:
        self.client = BufferedSink()
        self.stats = stats or StreamStats()
        self.now_s = 100.0
        self.n_on_token = 0
        self.relay = Relay(
            Stage.DECODE,
            self.client,
            leg_id="leg-1",
            client_id="mine",
            stats=self.stats,
            max_buffer_bytes=max_buffer_bytes,
            stuck_s=5.0,
            now_s=lambda: self.now_s,
            on_token=self._on_token,
            on_answered=lambda: None,
            preface=preface,
        )

    def _on_token(self) -> None:
        self.n_on_token += 1

    def play(self, *steps: oe.GenerateResponse | Status, leg_id: str = "leg-1") -> "Leg":
        for step in steps:
            if isinstance(step, Status):
                self.relay.finish(step)
            else:
                response = oe.GenerateResponse(request_id=leg_id)
                response.MergeFrom(step)
                self.relay.message(response.SerializeToString())
        return self

    async def taken(self) -> list[oe.GenerateResponse]:
        self.client.finish()
        responses = []
        while (data := await self.client.next()) is not None:
            responses.append(oe.GenerateResponse.FromString(data))
        return responses


def test_what_prefill_said_of_the_prompt_goes_in_front_once() -> None:
    async def main() -> None:
        prompt = oe.PromptOutput(tokens=[oe.TokenInfo(token_id=5)])
        said = oe.GenerateResponse(request_id="prefill-leg", prompt=prompt)
        leg = Leg(preface=said.SerializeToString()).play(token(1), token(2), finished(), OK)
        taken = await leg.taken()
        events = [response.WhichOneof("event") for response in taken]
        assert events == ["prompt", "token", "token", "finished"]
        assert taken[0].prompt == prompt
        assert {response.request_id for response in taken} == {"mine"}
        failed = Leg(preface=said.SerializeToString()).play(engine_error(2, "no"), OK)
        assert await failed.taken() == []

    run(main)


def test_what_passes_is_unchanged_but_for_the_id() -> None:
    async def main() -> None:
        sent = [token(1, 2), token(3), finished(cached=4)]
        leg = Leg().play(*sent, OK)
        assert leg.relay.failure() is None
        assert leg.relay.has_ended
        for message in sent:
            message.request_id = "mine"
        assert await leg.taken() == sent

    run(main)


def test_prompt_output_passes_and_is_no_token() -> None:
    async def main() -> None:
        prompt = oe.GenerateResponse(prompt=oe.PromptOutput(tokens=[oe.TokenInfo(token_id=1)]))
        leg = Leg().play(prompt, token(2), finished(), OK)
        assert [r.WhichOneof("event") for r in await leg.taken()] == ["prompt", "token", "finished"]
        assert leg.stats.n_tokens == 1

    run(main)


def test_the_stats_counts_tokens_times_and_what_was_cached() -> None:
    async def main() -> None:
        leg = Leg().play(token(1))
        leg.now_s = 102.0
        leg.play(token(2, 3), finished(cached=7), OK)
        stats = leg.stats
        assert (stats.n_tokens, stats.first_token_s, stats.last_token_s) == (3, 100.0, 102.0)
        assert stats.cached_tokens == 7
        assert leg.n_on_token == 1  # the first one says that the prompt is done

    run(main)


def test_an_internal_event_of_a_leg_is_not_shown_to_a_client() -> None:
    async def main() -> None:
        leg = Leg().play(prefill_ready(), token(1), finished(), OK)
        assert [r.WhichOneof("event") for r in await leg.taken()] == ["token", "finished"]

    run(main)


@pytest.mark.parametrize("after", [(), (token(1),)], ids=["before tokens", "after tokens"])
@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.INVALID_ARGUMENT, Code.CANCELLED])
def test_a_failing_status_is_the_failure(
    after: tuple[oe.GenerateResponse, ...], code: grpc.StatusCode
) -> None:
    async def main() -> None:
        failure = Leg().play(*after, Status(code, "at 10.0.0.1:5")).relay.failure()
        assert isinstance(failure, LegFailed)
        assert failure.code is code
        assert str(failure) == "decode: at (address)"
        assert failure.retryable == (code is Code.UNAVAILABLE and not after)

    run(main)


def test_an_error_event_is_held_back_before_the_first_message_and_relayed_after_it() -> None:
    async def main() -> None:
        error = engine_error(oe.ERROR_CODE_OVERLOADED, "full")
        early = Leg().play(error, OK)
        failure = early.relay.failure()
        assert isinstance(failure, LegFailed)
        assert (failure.code, failure.retryable) == (Code.RESOURCE_EXHAUSTED, False)
        assert await early.taken() == []
        late = Leg().play(token(1), error, OK)
        assert isinstance(late.relay.failure(), ErrorRelayed)
        assert [r.WhichOneof("event") for r in await late.taken()] == ["token", "error"]

    run(main)


def test_an_error_event_that_does_not_fit_is_a_slow_client_and_not_a_good_end() -> None:
    async def main() -> None:
        error = engine_error(oe.ERROR_CODE_INTERNAL, "x" * 100)
        leg = Leg(max_buffer_bytes=60).play(token(1), error, OK)
        assert isinstance(leg.relay.failure(), SlowClient)

    run(main)


def test_nothing_passes_behind_a_failure() -> None:
    async def main() -> None:
        leg = Leg()
        leg.relay.message(b"\xff")
        assert leg.relay.is_complete
        assert not leg.relay.has_ended
        leg.play(token(1), finished(), OK)
        assert isinstance(leg.relay.failure(), LegFailed)
        assert leg.stats.n_tokens == 0
        assert await leg.taken() == []

    run(main)


def test_i7_a_response_of_another_leg_never_reaches_the_client() -> None:
    async def main() -> None:
        leg = Leg().play(token(1)).play(token(666), leg_id="leg-2")
        failure = leg.relay.failure()
        assert isinstance(failure, LegFailed)
        assert failure.code is Code.UNAVAILABLE
        assert [r.token.tokens[0].token_id for r in await leg.taken()] == [1]

    run(main)


def test_the_buffer_is_bounded_and_a_client_that_reads_may_have_far_more() -> None:
    async def main() -> None:
        leg = Leg(max_buffer_bytes=200)
        while leg.relay.failure() is None:
            leg.play(token(*range(10)))
            assert leg.client.n_bytes <= 200 + len("mine") + 2
        assert isinstance(leg.relay.failure(), SlowClient)
        assert leg.relay.is_complete
        assert leg.client.n_bytes == 0

        reading = Leg(max_buffer_bytes=200)
        for _ in range(1000):
            reading.play(token(*range(10)))
            await reading.client.next()
        assert reading.play(finished(), OK).relay.failure() is None
        assert reading.stats.n_tokens == 10_000

    run(main)


def test_tokens_that_did_not_fit_are_not_counted_as_sent() -> None:
    async def main() -> None:
        leg = Leg(max_buffer_bytes=60).play(token(1), token(*range(100)))
        assert isinstance(leg.relay.failure(), SlowClient)
        assert leg.stats.n_tokens == 1

    run(main)


def test_stream_07_one_message_over_the_limit_passes_to_a_client_that_has_taken_all() -> None:
    async def main() -> None:
        leg = Leg(max_buffer_bytes=60).play(token(*range(100)))
        assert leg.relay.failure() is None
        assert leg.client.n_bytes > 60
        assert leg.stats.n_tokens == 100
        await leg.client.next()
        assert leg.play(token(*range(100))).relay.failure() is None
        leg.play(token(1))
        assert isinstance(leg.relay.failure(), SlowClient)
        assert leg.stats.n_tokens == 200

    run(main)


@pytest.mark.parametrize("late", [token(9), finished(), engine_error(oe.ERROR_CODE_INTERNAL, "x")])
def test_i7_nothing_passes_behind_the_terminal_event(late: oe.GenerateResponse) -> None:
    async def main() -> None:
        leg = Leg().play(token(1), finished())
        assert leg.relay.is_complete
        leg.play(late, OK)
        assert leg.relay.failure() is None
        assert [r.WhichOneof("event") for r in await leg.taken()] == ["token", "finished"]
        assert (leg.stats.n_tokens, leg.stats.n_messages) == (1, 2)

    run(main)


def test_nothing_passes_behind_a_relayed_error() -> None:
    async def main() -> None:
        leg = Leg().play(token(1), engine_error(oe.ERROR_CODE_INTERNAL, "x"), token(2), OK)
        assert isinstance(leg.relay.failure(), ErrorRelayed)
        assert [r.WhichOneof("event") for r in await leg.taken()] == ["token", "error"]

    run(main)
