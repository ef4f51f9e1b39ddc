"""One request through the real graph, over scripted workers on the virtual loop: the good path."""

import anyio

from slagate.pools.inflight.demand import FIRST_SHARE, FIRST_TOKENS
from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import OK
from slagate.router.legs.active_request import LEG_SLACK_S
from slagate.router.request.errors import Outcome
from slagate.router.request.metadata import RECEIPT_TRAILER
from slagate.workers.legs import CONTEXT_ONLY, REQUEST_TYPE
from slagate.workers.runtime.virtual_loop import run
from support.builders import finished, prefill_ready, request, session, token
from support.gateway.request_path import DECODE_OK, PREFILL_OK, bench
from support.worker.fake import Wait


def test_each_leg_is_the_clients_bytes_plus_what_the_gateway_sets() -> None:
    async def main() -> None:
        message = request("mine", tokens=[5, 6])
        message.sampling.temperature = 0.5
        # A field of a later protocol: an engine may know what this gateway does not.
        data = message.SerializeToString() + b"\xa2\x06\x03abc"
        async with bench(prefill=[(prefill_ready(session("77")), OK)]) as b:
            answer = await b.call(data)
            (prefill,), (decode,) = b.calls("prefill"), b.calls("decode")
            assert prefill.data.startswith(data)
            assert decode.data.startswith(data)

            leg = prefill.request
            assert leg.request_id not in ("", "mine", decode.request.request_id)
            assert list(leg.token_ids.ids) == [5, 6]
            assert leg.extra.fields[REQUEST_TYPE].string_value == CONTEXT_ONLY
            assert (leg.stopping.max_tokens, leg.stopping.min_tokens) == (1, 0)
            assert not leg.kv.HasField("session")

            leg = decode.request
            assert leg.request_id not in ("", "mine")
            assert leg.kv.session == session("77")
            assert REQUEST_TYPE not in leg.extra.fields
            assert leg.sampling.temperature == 0.5

            assert answer.status == OK
            assert answer.tokens == [11, 12, 13]
            assert {response.request_id for response in answer.responses} == {"mine"}
            assert not prefill.cancelled
            assert not decode.cancelled
            assert b.released == b.aborted_legs == []
            await b.check_idle(Outcome.COMPLETED)

    run(main)


def test_the_aggregated_leg_is_one_call_with_an_id_of_its_own() -> None:
    async def main() -> None:
        async with bench("agg") as b:
            answer = await b.call(request("mine"))
            (leg,) = b.calls("agg")
            assert leg.request.request_id not in ("", "mine")
            assert REQUEST_TYPE not in leg.request.extra.fields
            assert {response.request_id for response in answer.responses} == {"mine"}
            assert answer.tokens == [11, 12, 13]
            await b.check_idle(Outcome.COMPLETED)

    run(main)


def test_a_budget_is_added_only_where_the_client_gave_none() -> None:
    async def main() -> None:
        for mode, stage in (("disagg", "decode"), ("agg", "agg")):
            async with bench(mode) as b:
                await b.call(request())
                mine = request()
                mine.stopping.max_tokens = 5
                mine.stopping.min_tokens = 2
                await b.call(mine)
                added, kept = (call.request.stopping for call in b.calls(stage))
                assert added.max_tokens == 4096
                assert (kept.max_tokens, kept.min_tokens) == (5, 2)

    run(main)


def test_the_added_budget_is_what_the_context_window_leaves() -> None:
    async def main() -> None:
        async with bench() as b:
            for member in b.app.fleet.members():
                for info in member.models.values():
                    info.max_context_length = 100
            await b.call(request(tokens=range(1, 91)))
            answer = await b.call(request(tokens=range(1, 101)))
            (decode,) = b.calls("decode")
            assert decode.request.stopping.max_tokens == 10
            assert answer.status.code.name == "INVALID_ARGUMENT"
            assert answer.status.message.startswith("token_ids: ")
            await b.check_idle(Outcome.COMPLETED, Outcome.INVALID)

    run(main)


def test_two_clients_with_the_same_id_do_not_disturb_each_other() -> None:
    async def main() -> None:
        async with bench() as b:
            first, second = await b.call(request("same")), await b.call(request("same"))
            ids = [call.request.request_id for s in ("prefill", "decode") for call in b.calls(s)]
            assert len(set(ids)) == 4
            assert first.tokens == second.tokens == [11, 12, 13]
            await b.check_idle(Outcome.COMPLETED, Outcome.COMPLETED)

    run(main)


def test_stray_tokens_of_the_context_leg_are_dropped() -> None:
    async def main() -> None:
        for script in ((token(11), prefill_ready(), OK), (prefill_ready(), token(11), OK)):
            async with bench(prefill=[script]) as b:
                assert (await b.call()).tokens == [11, 12, 13]
                await b.check_idle(Outcome.COMPLETED)

    run(main)


def test_a_prefill_answer_without_a_handoff_is_the_whole_answer() -> None:
    async def main() -> None:
        stop = finished(oe.FINISH_REASON_STOP, cached=2)
        async with bench(prefill=[(token(9), stop, OK)]) as b:
            answer = await b.call(request("mine"), metadata=[("slagate-receipt", "1")])
            assert answer.tokens == [9]
            assert [r.request_id for r in answer.responses] == ["mine", "mine"]
            assert answer.responses[-1].finished.reason == oe.FINISH_REASON_STOP
            assert b.calls("decode") == []
            assert answer.receipt.actual.output_tokens == 1
            assert answer.receipt.actual.cached_tokens == 2
            await b.check_idle(Outcome.COMPLETED)

    run(main)


def test_disagg_02_one_token_asked_is_one_token_given_and_two_are_two() -> None:
    async def main() -> None:
        for n_tokens in (1, 2):
            decode = (token(*range(11, 11 + n_tokens)), finished(), OK)
            async with bench(prefill=[(token(11), prefill_ready(), OK)], decode=[decode]) as b:
                message = request()
                message.stopping.max_tokens = n_tokens
                answer = await b.call(message)
                assert answer.tokens == [11, 12][:n_tokens]
                assert answer.responses[-1].finished.reason == oe.FINISH_REASON_LENGTH
                (decode_call,) = b.calls("decode")
                assert decode_call.request.stopping.max_tokens == n_tokens

    run(main)


def test_disagg_11_both_legs_carry_the_same_token_ids() -> None:
    async def main() -> None:
        async with bench() as b:
            await b.call(request(tokens=[0, 2**32 - 1, 7, 7]))
            (prefill,), (decode,) = b.calls("prefill"), b.calls("decode")
            assert prefill.request.token_ids == decode.request.token_ids
            assert list(prefill.request.token_ids.ids) == [0, 2**32 - 1, 7, 7]

    run(main)


def test_secmm_01_only_trace_context_reaches_a_worker() -> None:
    async def main() -> None:
        trace: list[tuple[str, str | bytes]] = [
            ("traceparent", "00-ab-cd-01"),
            ("tracestate", "v=1"),
        ]
        hostile: list[tuple[str, str | bytes]] = [
            ("x-gateway-destination-endpoint", "169.254.169.254:80"),
            ("x-prefiller-host-port", "169.254.169.254:80"),
            ("authorization", "Bearer secret"),
            ("x-gateway-inference-fairness-id", "acme"),
            ("openengine-routing-key", "k"),
            ("openengine-priority", "5"),
            ("x-data-bin", b"\x00"),
        ]
        async with bench() as b:
            await b.call(metadata=[*trace, *hostile])
            for stage in ("prefill", "decode"):
                (call,) = b.calls(stage)
                assert list(call.metadata) == trace
            assert {m.address for m in b.app.fleet.members()} == {"p1:1", "d1:1"}
        async with bench("agg") as b:
            await b.call(metadata=[*trace, *hostile])
            assert list(b.calls("agg")[0].metadata) == trace
            # One that means this gateway, and is none of its keys, is not dropped but refused.
            answer = await b.call(metadata=[("x-slagate-dp-rank", "3")])
            assert answer.status.code.name == "INVALID_ARGUMENT"
            assert answer.status.message.startswith("x-slagate-dp-rank: ")
            assert len(b.calls("agg")) == 1

    run(main)


def test_a_priority_reaches_only_workers_that_support_it() -> None:
    async def main() -> None:
        async with bench() as b:
            for member in b.app.fleet.pools["decode"].members.values():
                for info in member.models.values():
                    info.generation.supports_priority = True
            await b.call(metadata=[("openengine-priority", "-7")])
            assert list(b.calls("prefill")[0].metadata) == []
            assert list(b.calls("decode")[0].metadata) == [("openengine-priority", "-7")]

    run(main)


def test_a_receipt_comes_only_when_asked_for() -> None:
    async def main() -> None:
        slow = (Wait(0.5), prefill_ready(cached=2), OK)
        decode = (Wait(0.25), token(1), Wait(0.1), token(2, 3), finished(), OK)
        async with bench(prefill=[slow], decode=[decode]) as b:
            answer = await b.call()
            assert RECEIPT_TRAILER not in dict(answer.status.trailers)
            metadata = [("slagate-receipt", "1"), ("x-slo-ttft-ms", "800"), ("x-slo-tpot-ms", "20")]
            receipt = (await b.call(request("mine"), metadata=metadata)).receipt
            assert receipt.decision.request_id == "mine"
            assert receipt.decision.max_tokens == 4096
            assert [(a.worker, a.status) for a in receipt.attempts] == [
                ("p1:1", "OK"),
                ("d1:1", "OK"),
            ]
            actual = receipt.actual
            assert actual.outcome == "completed"
            assert abs(actual.ttft_ms - 750) < 1e-6
            assert abs(actual.itl_ms - 50) < 1e-6
            assert (actual.ttft_met, actual.itl_met) == (True, False)
            assert (actual.output_tokens, actual.cached_tokens) == (3, 2)

    run(main)


def test_stream_01_a_leg_gets_what_is_left_of_the_deadline_or_of_the_default_limit() -> None:
    async def main() -> None:
        async with bench(prefill=[(Wait(2.0), *PREFILL_OK)], decode=[DECODE_OK]) as b:
            await b.call()
            await b.call(timeout_s=5.0)
            limits = [call.timeout_s for s in ("prefill", "decode") for call in b.calls(s)]
            left_s = [round((limit or 0.0) - LEG_SLACK_S, 6) for limit in limits]
            assert left_s == [600.0, 5.0, 598.0, 3.0]
            await b.check_idle(Outcome.COMPLETED, Outcome.COMPLETED)

    run(main)


def test_a_prefill_worker_is_free_for_others_as_soon_as_it_has_answered() -> None:
    async def main() -> None:
        async with bench(decode=[(Wait(1.0), *DECODE_OK)]) as b, anyio.create_task_group() as tasks:
            tasks.start_soon(b.call)
            await b.settle()
            prefill, decode = b.app.fleet.members()
            assert (prefill.ranks.inflight, prefill.ranks.queued_tokens) == (0, 0)
            context_tokens = 3 + int(FIRST_TOKENS * FIRST_SHARE)
            assert (decode.ranks.inflight, decode.ranks.context_tokens) == (1, context_tokens)
        await b.check_idle(Outcome.COMPLETED)

    run(main)


def test_an_aggregated_workers_queue_is_shorter_from_the_first_token_on() -> None:
    async def main() -> None:
        script = (Wait(1.0), token(1), Wait(1.0), finished(), OK)
        async with bench("agg", agg=[script]) as b, anyio.create_task_group() as tasks:
            tasks.start_soon(b.call)
            (member,) = b.app.fleet.members()
            await b.settle()
            assert (member.ranks.inflight, member.ranks.queued_tokens) == (1, 3)
            await anyio.sleep(1.0)
            assert (member.ranks.inflight, member.ranks.queued_tokens, member.ranks.queued_s) == (
                1,
                0,
                0.0,
            )
        await b.check_idle(Outcome.COMPLETED)

    run(main)


def test_a_decode_answer_without_tokens_has_used_its_handoff_all_the_same() -> None:
    async def main() -> None:
        async with bench(decode=[(finished(), OK)]) as b:
            answer = await b.call()
            assert answer.tokens == []
            await b.check_idle(Outcome.COMPLETED)
            assert b.released == b.aborted_legs == []

    run(main)
