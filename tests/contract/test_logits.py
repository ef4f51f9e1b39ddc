"""Logits processors over the `Worker` port: in an answer, after a handoff, and what is refused."""

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.workers.logits.processors import LogitsProcessors, RequestedProcessor
from slagate.workers.runtime import virtual_loop
from slagate.workers.sim.args import END_ID
from support.engine.workers import expected, request
from support.worker.contract import DIRECT, Play, Setup, ask, hand_off, resume

PROMPT = list(range(1, 41))


class Raising:
    """Changes half of the logits, then raises."""

    def __call__(self, input_ids: Sequence[int], logits: Any, /) -> None:
        logits[: len(logits) // 2] = 99.0
        raise RuntimeError("a bug")


def offered(*every: RequestedProcessor, allowed: Sequence[str] = ()) -> dict[str, Any]:
    """Options of a worker with these processors."""
    return {"worker_options": {"logits": LogitsProcessors(every, allowed)}}


def asking(*asked: dict[str, Any], max_tokens: int = 8) -> oe.GenerateRequest:
    made = request("r", PROMPT, max_tokens)
    made.extra.update({"logits_processors": list(asked)})
    return made


def forced(*token_ids: int) -> dict[str, Any]:
    return {"name": "forced_response", "params": {"token_ids": list(token_ids)}}


def test_a_request_may_ask_for_what_is_enabled(play: Play) -> None:
    """A forced response is what the client gets; a temperature changes no greedy answer."""

    async def scenario(setup: Setup) -> None:
        options = offered(allowed=["forced_response", "temperature"])
        async with setup.worker("agg", **options) as worker:
            leg = asking(forced(5, 6, 7))
            leg.stopping.ignore_eos = False
            sink = await ask(worker, leg)
            assert sink.tokens == [5, 6, 7, END_ID]
            (end,) = [m.finished for m in sink.messages if m.HasField("finished")]
            assert (end.reason, end.stop_match.eos_token_id) == (oe.FINISH_REASON_STOP, END_ID)
            warm = {"name": "temperature", "params": {"temperature": 0.5}}
            assert (await ask(worker, asking(warm))).tokens == expected(PROMPT, 8)
            assert (await ask(worker, request("r", PROMPT))).tokens == expected(PROMPT, 8)
            both = await ask(worker, asking(warm, forced(5), warm, max_tokens=3))
            assert both.tokens == [5, END_ID, END_ID]

    play(scenario)


def test_a_decode_worker_goes_on_where_prefill_has_ended(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        options = offered(RequestedProcessor("forced_response", {"token_ids": [5, 6, 7]}))
        async with (
            setup.worker("prefill", **options) as prefill,
            setup.worker("decode", **options) as decode,
        ):
            leg = request("r", PROMPT, 5)
            sink = await resume(decode, leg, await hand_off(prefill, leg))
            assert sink.tokens == [5, 6, 7, END_ID, END_ID]

    play(scenario)


def test_one_that_raises_halfway_changes_no_answer(inside: Play) -> None:
    async def scenario(setup: Setup) -> None:
        logits = LogitsProcessors(
            [RequestedProcessor("raising", {})], load={"raising": Raising}.__getitem__
        )
        options = {"worker_options": {"logits": logits}}
        async with (
            setup.engine("agg", **options) as agg,
            setup.engine("prefill", **options) as prefill,
            setup.engine("decode", **options) as decode,
        ):
            leg = request("r", PROMPT)
            assert (await ask(agg.worker, leg)).tokens == expected(PROMPT, 8)
            sink = await resume(decode.worker, leg, await hand_off(prefill.worker, leg))
            assert sink.tokens == expected(PROMPT, 8)
            assert not any(one.inner.fatal.is_set() for one in (agg, prefill, decode))

    inside(scenario)


FIELD = "extra.logits_processors"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("temperature", f"{FIELD}: must be a list"),
        (["temperature"], f"{FIELD}[0]: must be an object with name and params"),
        ([{}], f"{FIELD}[0].name: must be a name"),
        ([{"name": "temperature", "param": {}}], f"{FIELD}[0].param: is not known"),
        ([{"name": "temperature", "params": 1}], f"{FIELD}[0].params: must be an object"),
        (
            [forced(1), {"name": "raising"}],
            f"{FIELD}[1].name: 'raising' is not enabled on this worker",
        ),
        ([forced(1), {"name": "temperature"}], f"{FIELD}[1].params.temperature: is missing"),
        (
            [{"name": "forced_response", "params": {"token_ids": "a"}}],
            f"{FIELD}[0].params: token_ids",
        ),
        (
            [forced(5, 999_999_999)],
            f"{FIELD}[0].params: token_ids: 999999999 is outside the vocabulary",
        ),
        (
            [{"name": "temperature", "params": {"temperature": 1e-320}}],
            f"{FIELD}[0].params: temperature must be a finite number, 0.01 or more",
        ),
        (
            [{"name": "forced_response", "params": {"end_id": 2}}],
            f"{FIELD}[0].params.end_id: is giv",
        ),
        ([forced(1)] * 9, f"{FIELD}: more than 8 are given"),
    ],
)
def test_what_is_wrong_is_refused_by_field(asked: Any, message: str) -> None:
    async def scenario() -> None:
        async with DIRECT[-1].worker(
            "agg", **offered(allowed=["forced_response", "temperature"])
        ) as worker:
            leg = request("r", PROMPT)
            leg.extra.update({"logits_processors": asked})
            sink = await ask(worker, leg)
            assert (sink.code, sink.messages) == (grpc.StatusCode.INVALID_ARGUMENT, [])
            assert sink.status is not None
            assert sink.status.message.startswith(message), sink.status.message

    virtual_loop.run(scenario)


def test_a_worker_that_offers_none_says_so(play: Play) -> None:
    """A request that asked in vain would get an answer that it did not ask for."""

    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            sink = await ask(worker, asking(forced(1)))
            assert sink.code is grpc.StatusCode.INVALID_ARGUMENT
            assert (await ask(worker, asking())).tokens == expected(PROMPT, 8)

    play(scenario)


def test_several_outputs_would_share_a_processor(inside: Play) -> None:
    async def scenario(setup: Setup) -> None:
        options = offered(allowed=["forced_response"])
        async with setup.worker("agg", **options) as worker:
            leg = asking(forced(1))
            leg.sampling.num_sequences = 2
            sink = await ask(worker, leg)
            assert sink.code is grpc.StatusCode.UNIMPLEMENTED
            assert sink.status is not None
            assert sink.status.message.startswith("sampling.num_sequences: logits processors")

    inside(scenario)
