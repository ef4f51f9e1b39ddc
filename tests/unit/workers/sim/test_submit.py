"""The TensorRT-LLM double: arguments refused at submit, by the executor, or by parameters themselves."""

import logging
from typing import Any

import numpy as np
import pytest

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.api import NEWEST, VERSIONS, sim_api
from slagate.workers.sim.request import (
    DisaggregatedParams,
    DisaggregatedParams12,
    RequestError,
    SamplingParams,
    SamplingParams12,
)
from support.engine.sim_llm import VOCAB, Pair, expected, llm, prompt_of

every_version = pytest.mark.parametrize("api", VERSIONS)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inputs": b"\1\2\3\4"}, TypeError, "not bytes"),
        ({"inputs": None}, TypeError, "not NoneType"),
        ({"inputs": []}, ValueError, "empty"),
        ({"inputs": [1, VOCAB]}, ValueError, "outside the vocabulary"),
        ({"inputs": [-1]}, ValueError, "token ids"),
        ({"inputs": {"prompt": "a", "mm_processor_kwargs": None}}, TypeError, "mm_processor"),
        (
            {"inputs": {"prompt": "a", "multi_modal_data": {"image": [1]}}},
            NotImplementedError,
            "multi_modal_data",
        ),
        ({"sampling_params": {"max_tokens": 5}}, TypeError, "SamplingParams"),
        ({"sampling_params": SamplingParams12()}, TypeError, "SamplingParams"),
        ({"scheduling_params": 3}, TypeError, "SchedulingParams"),
        ({"priority": 1.5}, ValueError, "priority"),
        ({"priority": -0.1}, ValueError, "priority"),
        ({"conversation_params": "c"}, TypeError, "conversation_params"),
        ({"sampling_params": SamplingParams(guided_decoding=1)}, NotImplementedError, "guided"),
        ({"sampling_params": SamplingParams(n=257, top_k=5)}, ValueError, "max_batch_size 256"),
        ({"lora_request": object()}, NotImplementedError, "lora"),
        ({"disaggregated_params": DisaggregatedParams()}, ValueError, "request_type"),
        ({"disaggregated_params": DisaggregatedParams12()}, TypeError, "DisaggregatedParams"),
        (
            {
                "disaggregated_params": DisaggregatedParams(request_type="context_only"),
                "sampling_params": SamplingParams(n=2, top_k=5),
            },
            ValueError,
            "n must be 1",
        ),
    ],
)
def test_a4_bad_arguments_are_refused_at_submit(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    async def scenario() -> None:
        with pytest.raises(error, match=message):
            llm().generate_async(**{"inputs": [1], **arguments})

    run(scenario)


@every_version
def test_a7_a_decode_request_with_media_or_their_handles_is_refused_at_submit(api: str) -> None:
    kinds = sim_api(api)
    handoff = {"request_type": "generation_only", "ctx_request_id": 3, "opaque_state": b"s"}

    async def scenario() -> None:
        engine = llm(api=api)
        with pytest.raises(ValueError, match="multi_modal_data"):
            engine.generate_async(
                {"prompt": "a", "multi_modal_data": {"image": [1]}},
                disaggregated_params=kinds.DisaggregatedParams(**handoff),
            )
        with pytest.raises(ValueError, match="multimodal_embedding_handles"):
            engine.generate_async(
                [1],
                disaggregated_params=kinds.DisaggregatedParams(
                    **handoff, multimodal_embedding_handles=[{}]
                ),
            )

    run(scenario)


@every_version
def test_a4_without_a_tokenizer_text_and_stop_strings_and_no_end_id_are_refused(api: str) -> None:
    kinds = sim_api(api)

    async def scenario() -> None:
        engine = llm(api=api, skip_tokenizer_init=True)
        assert engine.tokenizer is None
        with pytest.raises(ValueError, match="tokenizer"):
            engine.generate_async("text", kinds.SamplingParams(end_id=3))
        with pytest.raises(ValueError, match="tokenizer"):
            engine.generate_async({"prompt": "text"}, kinds.SamplingParams(end_id=3))
        with pytest.raises(RequestError, match="not processed by tokenizer"):
            await engine.generate_async([1], kinds.SamplingParams(end_id=3, stop="<4>"))
        with pytest.raises(ValueError, match="end_id"):
            engine.generate_async([1])
        result = await engine.generate_async(
            [1], kinds.SamplingParams(end_id=3), scheduling_params=kinds.SchedulingParams()
        )
        assert result.outputs[0].text == ""

    run(scenario)


@every_version
def test_a4_a_prompt_above_max_num_tokens_without_chunked_prefill(api: str) -> None:
    """1.2 calls it a bad value, later versions a request's error; both say it at submit."""
    error = ValueError if api in ("1.1", "1.2") else RequestError

    async def scenario() -> None:
        engine = llm(api=api, enable_chunked_prefill=False, max_num_tokens=64)
        with pytest.raises(error, match="max_num_tokens 64"):
            engine.generate_async(prompt_of(65))
        await engine.generate_async(prompt_of(64), sim_api(api).SamplingParams(max_tokens=1))
        chunked = llm(api=api, enable_chunked_prefill=True, max_num_tokens=64)
        await chunked.generate_async(prompt_of(65), sim_api(api).SamplingParams(max_tokens=1))

    run(scenario)


@every_version
@pytest.mark.parametrize(
    ("n_prompt", "sampling", "message"),
    [
        (100, {"max_tokens": 1}, "does not fit max_seq_len"),
        (101, {"max_tokens": None}, "does not fit max_seq_len"),
        (10, {"max_tokens": 0}, "max_tokens"),
        (10, {"max_tokens": -1}, "max_tokens"),
        (10, {"n": 2, "use_beam_search": True}, "max_beam_width"),
    ],
)
def test_a5_what_the_executor_refuses_is_raised_while_iterating(
    api: str, n_prompt: int, sampling: dict[str, Any], message: str
) -> None:
    async def scenario() -> None:
        engine = llm(api=api, max_seq_len=100)
        result = engine.generate_async(prompt_of(n_prompt), sim_api(api).SamplingParams(**sampling))
        with pytest.raises(RequestError, match=message):
            await result
        result.abort()
        assert engine.n_running == engine.n_queued == 0
        assert engine._executor is not None
        assert engine._executor.check_health()

    run(scenario)


@every_version
@pytest.mark.parametrize("max_tokens", [None, 91, 10_000])
def test_a5_too_many_tokens_are_cut_to_the_context_window(
    api: str, max_tokens: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        sampling = sim_api(api).SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        result = await llm(api=api, max_seq_len=100).generate_async(prompt_of(10), sampling)
        assert result.outputs[0].token_ids == expected(prompt_of(10), 90)
        assert result.outputs[0].finish_reason == "length"

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert ("request.max_tokens_cut" in caplog.text) is (max_tokens is not None)


@every_version
def test_a6_a_context_only_request_gives_one_token_and_a_handoff(api: str, tmp_path: Any) -> None:
    """Whatever `max_tokens` says, which the caller's object keeps."""
    pair = Pair(tmp_path, api=api)
    sampling = pair.api.SamplingParams(max_tokens=20)

    async def scenario() -> None:
        asked = pair.api.DisaggregatedParams(request_type="context_only")
        result = await pair.prefill.generate_async(
            prompt_of(40), sampling, disaggregated_params=asked
        )
        (output,) = result.outputs
        assert output.token_ids == expected(prompt_of(40), 1)
        assert output.finish_reason == "length"
        params = output.disaggregated_params
        assert type(params) is pair.api.DisaggregatedParams
        assert params.request_type == "context_only"
        assert params.first_gen_tokens == output.token_ids
        assert params.ctx_request_id == result.request_id
        assert isinstance(params.opaque_state, bytes)
        assert hasattr(params, "disagg_request_id") is (api not in ("1.1", "1.2"))
        assert asked.ctx_request_id is None
        assert (result.sampling_params.max_tokens, sampling.max_tokens) == (1, 1)
        pair.prefill.shutdown()

    run(scenario)
    for transport in pair.transports:
        transport.close()


@every_version
@pytest.mark.parametrize("n_handoffs", [0, 1])
def test_a6_end_of_text_as_first_token_gives_no_handoff(
    api: str, n_handoffs: int, tmp_path: Any
) -> None:
    """The params are then the copy of the request's, which prove nothing."""
    pair = Pair(tmp_path, api=api, handoff_on_stop=n_handoffs > 0)
    (first,) = expected(prompt_of(40), 1)

    async def scenario() -> None:
        result = await pair.prefill.generate_async(
            prompt_of(40),
            pair.api.SamplingParams(end_id=first),
            disaggregated_params=pair.api.DisaggregatedParams(request_type="context_only"),
        )
        (output,) = result.outputs
        assert output.token_ids == [first]
        assert output.disaggregated_params is not None
        assert output.disaggregated_params.request_type == "context_only"
        if n_handoffs:
            assert output.disaggregated_params.ctx_request_id == result.request_id
        else:
            assert output.finish_reason == "stop"
            assert output.disaggregated_params.ctx_request_id is None
            assert output.disaggregated_params.opaque_state is None
        assert pair.prefill.n_parked == n_handoffs
        pair.prefill.shutdown()

    run(scenario)
    for transport in pair.transports:
        transport.close()


@every_version
def test_a4_after_a_fatal_error_and_after_shutdown_requests_are_refused_at_once(api: str) -> None:
    async def scenario() -> None:
        dead, closed = llm(api=api), llm(api=api)
        pending = dead.generate_async([1])
        dead.inject_fatal(OSError("event loop terminated"))
        with pytest.raises(OSError, match="terminated"):
            await pending
        with pytest.raises(RuntimeError, match="shutting down"):
            dead.generate_async([1])
        assert dead._executor is not None
        has_flag = api not in ("1.1", "1.2")
        assert isinstance(getattr(dead._executor, "_fatal_error", None), OSError) is has_flag
        assert dead._executor.is_shutdown()
        assert not dead._executor.check_health()
        with closed:
            pass
        closed.shutdown()
        with pytest.raises(RuntimeError, match="shutting down"):
            closed.generate_async([1])
        for engine in (dead, closed):
            if api not in ("1.1", "1.2"):
                assert not engine._check_health()

    run(scenario)


@every_version
def test_every_form_of_a_prompt_is_the_same_prompt(api: str) -> None:
    text = "".join(f"<{token}>" for token in prompt_of(40))
    forms: list[Any] = [
        prompt_of(40),
        np.array(prompt_of(40), dtype=np.int32),
        text,
        {"prompt": text},
        {"prompt_token_ids": prompt_of(40), "prompt": "other"},
    ]

    async def scenario() -> None:
        engine = llm(api=api)
        if api == NEWEST:
            forms.append(engine.preprocess(text))
        for inputs in forms:
            sampling = sim_api(api).SamplingParams(max_tokens=3)
            result = await engine.generate_async(inputs, sampling)
            assert result.outputs[0].token_ids == expected(prompt_of(40), 3)
            assert result.prompt_token_ids == prompt_of(40)

    run(scenario)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("SamplingParams", {"n": 2, "best_of": 1}, "best_of"),
        ("SamplingParams", {"n": 0}, "n must be"),
        ("SamplingParams", {"n": 2}, "greedy"),
        ("SamplingParams", {"best_of": 2, "top_k": 1, "top_p": 0.0}, "greedy"),
        ("SamplingParams", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("DisaggregatedParams", {"request_type": "both"}, "request_type"),
    ],
)
@every_version
def test_parameters_check_themselves(
    api: str, kind: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(sim_api(api), kind)(**arguments)


@every_version
def test_several_greedy_sequences_are_allowed_by_the_environment(
    api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_ALLOW_N_GREEDY_DECODING", "1")
    assert sim_api(api).SamplingParams(n=2).best_of == 2
