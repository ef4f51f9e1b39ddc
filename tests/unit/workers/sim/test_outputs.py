"""The TensorRT-LLM double: how results arrive, and results of several sequences."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.api import VERSIONS, sim_api
from slagate.workers.sim.kv_cache.blocks import continuation
from support.engine.sim_llm import END, MODEL, PROFILE, VOCAB, Pair, expected, llm, prompt_of

every_version = pytest.mark.parametrize("api", VERSIONS)

PROMPT = prompt_of(40)


def branch(index: int, n_tokens: int) -> list[int]:
    """What sequence `index` of a request has after the prompt."""
    return continuation(
        PROMPT, n_tokens, model=MODEL, block_tokens=32, vocab_size=VOCAB, branch=index
    )


def until_end(tokens: list[int]) -> list[int]:
    """The tokens up to end-of-text, if it is there."""
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


def test_a1_a_request_needs_a_running_loop() -> None:
    with pytest.raises(RuntimeError, match="loop"):
        llm().generate_async([1])


@every_version
def test_a1_a_stream_yields_one_object_that_grows(api: str) -> None:
    async def scenario() -> None:
        sampling = sim_api(api).SamplingParams(max_tokens=5)
        result = llm(api=api).generate_async(PROMPT, sampling, streaming=True)
        assert result.request_id == 2
        assert result.prompt_token_ids == PROMPT
        tokens: list[int] = []
        text = ""
        n_yields = 0
        async for one in result:
            assert one is result
            (output,) = one.outputs
            n_yields += 1
            assert output.token_ids == expected(PROMPT, n_yields)
            tokens += output.token_ids_diff
            text += output.text_diff
            assert (output.finish_reason is None) is (n_yields < 5)
            assert one.finished is (n_yields == 5)
        assert tokens == output.token_ids == expected(PROMPT, 5)
        assert text == output.text == "".join(f"<{token}>" for token in tokens)
        assert output.length == result.decoding_iter == 5
        with pytest.raises(StopAsyncIteration):
            await anext(result)

    run(scenario)


@every_version
def test_a1_a_stream_interval_brings_the_first_token_then_every_kth_and_the_last(
    api: str,
) -> None:
    async def scenario() -> None:
        engine = llm(api=api, stream_interval=4)
        sampling = sim_api(api).SamplingParams(max_tokens=10)
        lengths = [
            one.outputs[0].length
            async for one in engine.generate_async(PROMPT, sampling, streaming=True)
        ]
        assert lengths == [1, 4, 8, 10]

    run(scenario)


def test_a1_tokens_that_an_interval_holds_back_do_not_survive_an_error() -> None:
    async def scenario() -> None:
        engine = llm(stream_interval=100)
        result = engine.generate_async(
            PROMPT, sim_api().SamplingParams(max_tokens=50), streaming=True
        )
        await anext(result)
        start_s = asyncio.get_running_loop().time()
        reached = asyncio.Event()
        asyncio.get_running_loop().call_at(start_s + 20 * PROFILE.itl_s(1, 41), reached.set)
        await reached.wait()
        engine.inject_fatal(OSError("gone"))
        with pytest.raises(OSError, match="gone"):
            await anext(result)
        assert result.outputs[0].length == 1

    run(scenario)


@every_version
def test_a2_without_streaming_there_is_one_yield(api: str) -> None:
    """Also for a late reader, and when one of several sequences ends before the others."""

    async def scenario() -> None:
        engine = llm(api=api)
        sampling = sim_api(api).SamplingParams
        early = sampling(max_tokens=9, n=3, top_k=5, stop_token_ids=[branch(1, 3)[2]])
        # Only of an output with a reason the stop is cut off, and that may be the last one only.
        apart = api not in ("1.1", "1.2")
        for asked, lengths in ((sampling(max_tokens=5), [5]), (early, [9, 2 if apart else 3, 9])):
            yields = [
                [output.length for output in one.outputs]
                async for one in engine.generate_async(PROMPT, asked)
            ]
            assert yields == [lengths]
        late = engine.generate_async(PROMPT, sampling(max_tokens=50, ignore_eos=True))
        await engine.generate_async(prompt_of(8, 2), sampling(max_tokens=3))
        assert [one.outputs[0].length async for one in late] == [50]

    run(scenario)


@every_version
@pytest.mark.parametrize("n", [1, 3])
def test_a3_abort_ends_every_sequence_with_cancelled_once(api: str, n: int) -> None:
    async def scenario() -> None:
        engine = llm(api=api)
        sampling = sim_api(api).SamplingParams(max_tokens=500, n=n, top_k=5, ignore_eos=True)
        result = engine.generate_async(PROMPT, sampling, streaming=True)
        await anext(result)
        result.abort()
        result.abort()
        assert result.aborted()
        reasons = [[output.finish_reason for output in one.outputs] async for one in result]
        assert reasons == [["cancelled"] * n]
        result.abort()
        assert result.finished
        assert engine.n_running == engine.used_blocks == 0

    run(scenario)


@every_version
def test_a3_the_executor_aborts_by_id_and_ignores_ids_it_does_not_know(
    api: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        engine = llm(api=api)
        assert engine._executor is not None
        result = engine.generate_async(PROMPT, sim_api(api).SamplingParams(max_tokens=500))
        engine._executor.abort_request(999)
        engine._executor.abort_request(result.request_id)
        assert (await result).outputs[0].finish_reason == "cancelled"
        engine._executor.abort_request(result.request_id)
        assert caplog.text.count("request.abort_unknown") == 2

    run(scenario)


@every_version
def test_each_of_n_sequences_is_a_continuation_of_its_own(api: str) -> None:
    async def scenario() -> None:
        engine = llm(api=api)
        sampling = sim_api(api).SamplingParams(max_tokens=6, n=3, top_k=5)
        result = await engine.generate_async(PROMPT, sampling)
        assert [output.index for output in result.outputs] == [0, 1, 2]
        for index, output in enumerate(result.outputs):
            assert output.token_ids == until_end(branch(index, 6))
        assert len({tuple(output.token_ids) for output in result.outputs}) == 3
        assert engine.used_blocks == 0

    run(scenario)


@every_version
def test_w07_only_the_output_that_ends_last_has_a_reason_before_1_3(api: str) -> None:
    async def scenario() -> None:
        engine = llm(api=api)
        # Ends sequence 1 early and no other.
        sampling = sim_api(api).SamplingParams(
            max_tokens=9, n=3, top_k=5, stop_token_ids=[branch(1, 3)[2]]
        )
        seen: list[list[int]] = [[], [], []]
        finished_early = False
        async for result in engine.generate_async(PROMPT, sampling, streaming=True):
            for output in result.outputs:
                seen[output.index] += output.token_ids_diff
            reasons = [output.finish_reason for output in result.outputs]
            if reasons == [None, "stop", None]:
                finished_early = True
                assert not result.finished
        if api in ("1.1", "1.2"):
            assert reasons == [None, None, "length"]
            assert seen == [branch(0, 9), branch(1, 3), branch(2, 9)]
            return
        assert finished_early
        assert reasons == ["length", "stop", "length"]
        assert seen == [branch(0, 9), branch(1, 2), branch(2, 9)]

    run(scenario)


@every_version
def test_w07_a_stop_text_in_one_output_ends_the_result_of_all(api: str) -> None:
    """Before 1.3 the engine is told; since then its request goes on, unless the reader aborts it."""

    async def scenario() -> None:
        engine = llm(api=api)
        # Spelt so that its tokens are others than those generated.
        stop = f"{branch(1, 3)[2]}>"
        sampling = sim_api(api).SamplingParams(max_tokens=50, n=3, top_k=5, stop=stop)
        result = engine.generate_async(PROMPT, sampling, streaming=True)
        async for _ in result:
            pass
        first, second, third = result.outputs
        assert (second.finish_reason, second.stop_reason) == ("stop", stop)
        assert second.token_ids == branch(1, 3)
        assert (first.finish_reason, third.finish_reason) == (None, None)
        assert result.aborted() == (api in ("1.1", "1.2"))
        assert engine.n_running == (0 if result.aborted() else 3)
        result.abort()
        assert engine.n_running == engine.used_blocks == 0

    run(scenario)


@every_version
def test_w10_abort_after_the_engine_was_shut_down_is_an_attribute_error(api: str) -> None:
    async def scenario() -> None:
        engine = llm(api=api)
        result = engine.generate_async(PROMPT, streaming=True)
        engine.shutdown()
        with pytest.raises(AttributeError):
            result.abort()
        assert not result.aborted()

    run(scenario)


@every_version
def test_drafts_bring_several_tokens_a_response_and_none_after_a_stop(api: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError, match="speculative_config"):
            llm(api=api, tokens_per_step=3)
        drafts = {"speculative_config": {"max_draft_len": 2}, "tokens_per_step": 3}
        for changed, lengths in (({}, [1, 4, 7, 8]), ({"stream_interval": 2}, [1, 4, 8])):
            engine = llm(api=api, **drafts, **changed)
            sampling = sim_api(api).SamplingParams(max_tokens=8, logprobs=1)
            result = engine.generate_async(PROMPT, sampling, streaming=True)
            seen = [one.outputs[0].length async for one in result]
            assert seen == lengths
            assert result.outputs[0].token_ids == branch(0, 8)
            assert len(result.outputs[0].logprobs) == 8
            assert result.decoding_iter == 4
        stop = sim_api(api).SamplingParams(max_tokens=8, stop_token_ids=[branch(0, 3)[2]])
        ended = await engine.generate_async(PROMPT, stop)
        assert ended.outputs[0].token_ids == branch(0, 2)
        assert engine.used_blocks == 0

    run(scenario)


@every_version
def test_of_best_of_sequences_the_n_likeliest_are_kept_in_order(api: str) -> None:
    async def scenario() -> None:
        many = sim_api(api).SamplingParams(max_tokens=6, n=4, top_k=5, logprobs=0)
        all_four = (await llm(api=api).generate_async(PROMPT, many)).outputs
        ranked = sorted(all_four, key=lambda output: -(output.cumulative_logprob or 0))
        assert ranked != all_four, "the order must not be right by chance"
        best = sim_api(api).SamplingParams(max_tokens=6, n=2, best_of=4, top_k=5)
        kept = (await llm(api=api).generate_async(PROMPT, best)).outputs
        assert [one.token_ids for one in kept] == [one.token_ids for one in ranked[:2]]
        assert [one.index for one in kept] == [0, 1]
        assert [one.logprobs for one in kept] == [[], []]

    run(scenario)


@every_version
def test_cached_tokens_are_those_found_in_the_cache(api: str) -> None:
    async def scenario() -> None:
        engine = llm(api=api, kv_cache_config={"enable_partial_reuse": False})
        sampling = sim_api(api).SamplingParams(max_tokens=1)
        first = await engine.generate_async(prompt_of(100), sampling)
        again = await engine.generate_async(prompt_of(100), sampling)
        assert (first.cached_tokens, again.cached_tokens) == (0, 96)

    run(scenario)


@every_version
def test_perf_metrics_come_when_asked_for_by_request_or_engine(api: str) -> None:
    async def scenario() -> None:
        sampling = sim_api(api).SamplingParams
        for engine, asked in (
            (llm(api=api), sampling(return_perf_metrics=True, max_tokens=5)),
            (llm(api=api, return_perf_metrics=True), sampling(max_tokens=5)),
        ):
            start_s = asyncio.get_running_loop().time()
            result = engine.generate_async(PROMPT, asked, streaming=True)
            await anext(result)
            ttft_s = asyncio.get_running_loop().time() - start_s
            assert result.metrics_dict == {}
            await result
            total_s = asyncio.get_running_loop().time() - start_s
            perf = result.outputs[0].request_perf_metrics
            assert perf is not None
            timing = perf.timing_metrics
            assert timing.arrival_time == timedelta(seconds=start_s)
            assert timing.arrival_time <= timing.first_scheduled_time < timing.first_token_time
            assert timing.kv_cache_transfer_end == timedelta(0)
            assert perf.kv_cache_metrics.num_total_allocated_blocks == 2
            assert perf.kv_cache_metrics.num_reused_blocks == 0
            assert result.metrics_dict["ttft"] == pytest.approx(ttft_s, abs=1e-6)
            assert result.metrics_dict["e2e"] == pytest.approx(total_s, abs=1e-6)
            tpot_s = (total_s - ttft_s) / 4
            assert result.metrics_dict["tpot"] == pytest.approx(tpot_s, abs=1e-6)
            assert result.metrics_dict["finished_reason"] == "length"
        plain = await llm(api=api).generate_async(PROMPT, sampling(max_tokens=1))
        assert plain.outputs[0].request_perf_metrics is None
        assert plain.metrics_dict == {}

    run(scenario)


@every_version
def test_perf_metrics_of_a_decode_leg_have_the_transfer(api: str, tmp_path: Any) -> None:
    pair = Pair(tmp_path, api=api, return_perf_metrics=True)

    async def scenario() -> None:
        params = await pair.hand_off(PROMPT)
        result = await pair.resume(PROMPT, params, max_tokens=3)
        perf = result.outputs[0].request_perf_metrics
        assert perf is not None
        timing = perf.timing_metrics
        assert timing.arrival_time <= timing.kv_cache_transfer_start
        assert timing.kv_cache_transfer_start < timing.kv_cache_transfer_end
        assert timing.kv_cache_transfer_end <= timing.first_token_time
        assert timing.kv_cache_size > 0
        await pair.blocks_come_back()

    run(scenario)
    for transport in pair.transports:
        transport.close()
