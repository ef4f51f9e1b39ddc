"""The contract of the `Worker` port, for every implementation that can be had without a GPU.

`direct` is `TrtllmWorker` over the simulated engine in virtual time; `served` is the same behind the real
server and a real channel; `process` is `slagate worker trtllm`, where a package of that version is
installed that shows no more of an engine than TensorRT-LLM's does. A scenario that passes on one and not on
the other is a defect of the wire, one that passes over one engine version and not over another a defect of
the adapter.
"""

import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.sinks import Call
from slagate.workers.errors import WorkerError
from slagate.workers.legs import agg_leg, decode_leg, prefill_leg
from slagate.workers.worker import Worker
from support.engine.workers import MODEL, expected, request
from support.worker.contract import Play, Setup, ask, start
from support.worker.sinks import KeepingSink

PROMPT = list(range(1, 101))
ENDLESS = 100_000
"""Tokens of an answer that does not end by itself while a test looks at it: minutes."""


async def running(worker: Worker) -> int:
    """Requests the worker still counts, once a further one has gone through: a barrier, not a wait."""
    barrier = request("barrier", PROMPT, 64).SerializeToString()
    role = (await worker.server_info()).engine_role
    if role == oe.ENGINE_ROLE_PREFILL:
        sink = await ask(worker, prefill_leg(barrier, "barrier"))
        session = sink.messages[-1].prefill_ready.kv_session
        await worker.abort(oe.AbortRequest(kv_session=session))
    else:
        await ask(worker, agg_leg(barrier, "barrier", max_tokens=None))
    return (await worker.load(oe.GetLoadRequest())).running_requests


def test_tokens_come_in_order_and_the_end_comes_once(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            sink = await ask(worker, request("r", PROMPT, 40).SerializeToString())
            assert sink.tokens == expected(PROMPT, 40)
            assert sink.code is grpc.StatusCode.OK
            assert sink.events == ["token"] * (len(sink.events) - 1) + ["finished"]
            last = sink.messages[-1]
            assert last.finished.reason == oe.FINISH_REASON_LENGTH
            assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (100, 40)
            assert not any(m.HasField("usage") for m in sink.messages[:-1])
            assert all(m.token.HasField("output_index") for m in sink.messages[:-1])
            assert {m.request_id for m in sink.messages} == {"r"}

    play(scenario)


def test_a_refusal_has_no_message(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            for field, code, change in (
                ("request_id", grpc.StatusCode.INVALID_ARGUMENT, {"request_id": ""}),
                ("model", grpc.StatusCode.NOT_FOUND, {"model": "other"}),
                ("token_ids", grpc.StatusCode.INVALID_ARGUMENT, {"token_ids": oe.TokenIds()}),
                ("media", grpc.StatusCode.UNIMPLEMENTED, {"media": [oe.MediaItem(url="x")]}),
                ("lora_name", grpc.StatusCode.UNIMPLEMENTED, {"lora_name": "a"}),
            ):
                message = request("r", PROMPT)
                for name in change:
                    message.ClearField(name)  # type: ignore[arg-type]
                message.MergeFrom(oe.GenerateRequest(**change))  # type: ignore[arg-type]
                sink = await ask(worker, message.SerializeToString())
                assert sink.messages == []
                assert sink.code is code
                assert field in sink.status.message
            assert (await ask(worker, b"\xff\xff")).code is grpc.StatusCode.INVALID_ARGUMENT

    play(scenario)


def test_a_request_id_is_taken_while_it_runs(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            data = request("same", PROMPT, ENDLESS).SerializeToString()
            first = KeepingSink()
            call = start(worker, data, first)
            await first.at_least(1)
            assert (await ask(worker, data)).code is grpc.StatusCode.ALREADY_EXISTS
            await first.at_least(len(first.messages) + 5)
            assert first.status is None
            assert first.tokens == expected(PROMPT, len(first.tokens))
            call.cancel()
            await first.done()
            assert await running(worker) == 0
            again = await ask(worker, request("same", PROMPT, 50))
            assert again.tokens == expected(PROMPT, 50)

    play(scenario)


def test_prefill_and_decode_give_the_tokens_of_an_aggregated_worker(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("prefill") as prefill, setup.worker("decode") as decode:
            for n_prompt, n_tokens in ((1, 1), (31, 2), (32, 3), (33, 40), (100, 2)):
                prompt = list(range(7, 7 + n_prompt))
                data = request("r", prompt, n_tokens).SerializeToString()
                ready = await ask(prefill, prefill_leg(data, "p"))
                assert ready.events == ["prefill_ready"]
                assert ready.messages[0].usage.prompt_tokens == n_prompt
                session = ready.messages[0].prefill_ready.kv_session
                sink = await ask(decode, decode_leg(data, "d", session=session, max_tokens=None))
                assert sink.tokens == expected(prompt, n_tokens)
                assert sink.code is grpc.StatusCode.OK

    play(scenario)


@pytest.mark.parametrize("stage", ["at once", "first message", "third message"])
def test_cancel_ends_the_call_and_frees_the_engine(play: Play, stage: str) -> None:
    n_messages = {"at once": 0, "first message": 1, "third message": 3}[stage]

    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            sink = KeepingSink()
            call = start(worker, request("r", PROMPT, ENDLESS).SerializeToString(), sink)
            await sink.at_least(n_messages)
            call.cancel()
            call.cancel()
            await sink.done()
            n_at_end = len(sink.messages)
            assert sink.code is grpc.StatusCode.CANCELLED
            assert await running(worker) == 0
            assert len(sink.messages) == n_at_end
            call.cancel()
            call.pause()
            call.resume()

    play(scenario)


def test_cancel_of_a_prefill_leg_parks_nothing(inside: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("prefill") as worker:
            sink = KeepingSink()
            data = prefill_leg(request("r", PROMPT).SerializeToString(), "p")
            call = start(worker, data, sink)
            call.cancel()
            await sink.done()
            assert sink.code is grpc.StatusCode.CANCELLED
            assert sink.messages == []
            assert await running(worker) == 0
            assert (await worker.load(oe.GetLoadRequest())).active_kv_sessions == 0

    inside(scenario)


class PausingSink(KeepingSink):
    """Pauses its call with the second message, whatever has come behind that already."""

    call: Call

    def message(self, data: bytes, /) -> None:
        super().message(data)
        if len(self.messages) == 2:
            self.call.pause()


def test_a_paused_call_is_silent_and_loses_nothing(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            sink = PausingSink()
            call = sink.call = start(worker, request("r", PROMPT, 60).SerializeToString(), sink)
            await sink.at_least(2)
            n_paused = len(sink.messages)
            # A whole other request passes by meanwhile.
            other = await ask(worker, request("other", PROMPT, 60).SerializeToString())
            assert other.tokens == expected(PROMPT, 60)
            assert len(sink.messages) == n_paused
            assert sink.status is None
            call.resume()
            assert (await sink.done()).tokens == expected(PROMPT, 60)

    play(scenario)


def test_a_pause_in_the_turn_of_a_resume_counts(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            sink = PausingSink()
            call = sink.call = start(worker, request("r", PROMPT, 60).SerializeToString(), sink)
            await sink.at_least(2)
            # Meanwhile the producer comes to where it waits.
            await ask(worker, request("first", PROMPT, 60).SerializeToString())
            n_paused = len(sink.messages)
            call.resume()
            call.pause()
            await ask(worker, request("second", PROMPT, 60).SerializeToString())
            assert len(sink.messages) == n_paused
            call.resume()
            assert (await sink.done()).tokens == expected(PROMPT, 60)

    play(scenario)


def test_the_time_limit_ends_the_call_and_frees_the_engine(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            sink = KeepingSink()
            data = request("r", PROMPT, ENDLESS).SerializeToString()
            start(worker, data, sink, timeout_s=0.2)
            await sink.done()
            assert sink.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await running(worker) == 0

    play(scenario)


def test_abort_by_request_id(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("agg") as worker:
            sink = KeepingSink()
            start(worker, request("r", PROMPT, ENDLESS).SerializeToString(), sink)
            await sink.at_least(1)
            answer = await worker.abort(oe.AbortRequest(request_id="r"))
            assert answer.status == oe.ABORT_STATUS_ABORTED
            assert (await sink.done()).code is grpc.StatusCode.CANCELLED
            assert await running(worker) == 0
            answer = await worker.abort(oe.AbortRequest(request_id="r"))
            assert answer.status == oe.ABORT_STATUS_ALREADY_FINISHED
            for wrong, code in (
                (oe.AbortRequest(request_id="never"), grpc.StatusCode.NOT_FOUND),
                (oe.AbortRequest(), grpc.StatusCode.INVALID_ARGUMENT),
            ):
                with pytest.raises(WorkerError) as raised:
                    await worker.abort(wrong)
                assert raised.value.status.code is code

    play(scenario)


@pytest.mark.parametrize("target", ["kv_session", "request_id"])
def test_abort_frees_a_parked_handoff(inside: Play, target: str) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("prefill") as prefill, setup.worker("decode") as decode:
            data = request("r", PROMPT).SerializeToString()
            ready = await ask(prefill, prefill_leg(data, "p"))
            session = ready.messages[0].prefill_ready.kv_session
            assert (await prefill.load(oe.GetLoadRequest())).active_kv_sessions == 1
            abort = (
                oe.AbortRequest(kv_session=session)
                if target == "kv_session"
                else oe.AbortRequest(request_id="p")
            )
            assert (await prefill.abort(abort)).status == oe.ABORT_STATUS_ABORTED
            assert (await prefill.load(oe.GetLoadRequest())).active_kv_sessions == 0
            with pytest.raises(WorkerError) as raised:
                await prefill.abort(oe.AbortRequest(kv_session=session))
            assert raised.value.status.code is grpc.StatusCode.NOT_FOUND
            late = await ask(decode, decode_leg(data, "d", session=session, max_tokens=None))
            assert late.events == ["error"]
            assert late.messages[0].error.code == oe.ERROR_CODE_KV_TRANSFER_FAILED

    inside(scenario)


def test_a_decode_worker_computes_a_prompt_too_where_it_is_told_to(play: Play) -> None:
    """Dynamo's TensorRT-LLM workers do so by the annotation `x-bypass-remote-prefill`."""

    async def scenario(setup: Setup) -> None:
        async with setup.worker("decode") as worker:
            data = request("r", PROMPT, 20).SerializeToString()
            answer = await ask(worker, agg_leg(data, "x", max_tokens=None, to_decode=True))
            assert answer.tokens == expected(PROMPT, 20)
            assert answer.events[-1] == "finished"
            assert await running(worker) == 0

    play(scenario)


def test_roles_are_enforced(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        data = request("r", PROMPT).SerializeToString()
        session = oe.KvSessionRef(session_id="1")
        session.attributes_struct["opaque_state"] = "AA=="
        legs = {
            "prefill": prefill_leg(data, "x"),
            "decode": decode_leg(data, "x", session=session, max_tokens=None),
            "agg": agg_leg(data, "x", max_tokens=None),
        }
        for role in legs:
            async with setup.worker(role) as worker:
                for other in legs.keys() - {role}:
                    sink = await ask(worker, legs[other])
                    assert sink.code is grpc.StatusCode.FAILED_PRECONDITION, (role, other)
                    assert role[:3] in sink.status.message

    play(scenario)


def test_a_worker_says_what_it_is(play: Play) -> None:
    async def scenario(setup: Setup) -> None:
        async with setup.worker("prefill") as worker:
            info = await worker.server_info()
            assert info.engine_role == oe.ENGINE_ROLE_PREFILL
            assert list(info.supported_models) == [MODEL]
            assert info.kv_connector.transfer_backend == setup.transfer_backend
            assert info.capacity.kv_block_size == 32
            can_be_asked = setup.version not in ("1.1", "1.2")
            assert info.capacity.HasField("total_kv_blocks") is can_be_asked
            assert info.schema_release == "768a93c7b44e40f28c692ad0b471a8f2"
            model = await worker.model_info(MODEL)
            assert model.max_context_length == 131_072
            assert not model.generation.supports_priority
            with pytest.raises(WorkerError) as raised:
                await worker.model_info("other")
            assert raised.value.status.code is grpc.StatusCode.NOT_FOUND
            health = await worker.health(oe.HealthRequest(include_inference_probe=True))
            assert health.state == oe.HEALTH_STATE_READY
            assert [check.name for check in health.checks] == [
                "grpc",
                "model",
                "kv_connector",
                "inference_probe",
            ]
            wrong = await worker.health(oe.HealthRequest(role=oe.ENGINE_ROLE_DECODE))
            assert wrong.state == oe.HEALTH_STATE_NOT_READY

    play(scenario)
