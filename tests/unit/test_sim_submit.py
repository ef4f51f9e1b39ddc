"""The TensorRT-LLM double: arguments refused at submit, by the executor, or by parameters themselves."""

from typing import Any

import pytest

from slagate.workers.sim_request import (
    DisaggregatedParams,
    RequestError,
    SamplingParams,
    SchedulingParams,
)
from support.sim_llm import VOCAB, llm, prompt_of
from support.virtual_loop import run


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inputs": "text"}, ValueError, "tokenizer"),
        ({"inputs": {"prompt": "text"}}, ValueError, "tokenizer"),
        ({"inputs": b"\1\2\3\4"}, TypeError, "not bytes"),
        ({"inputs": None}, TypeError, "not NoneType"),
        ({"inputs": []}, ValueError, "empty"),
        ({"inputs": [1, VOCAB]}, ValueError, "outside the vocabulary"),
        ({"inputs": [-1]}, ValueError, "token ids"),
        ({"sampling_params": {"max_tokens": 5}}, TypeError, "SamplingParams"),
        ({"scheduling_params": 3}, TypeError, "SchedulingParams"),
        ({"priority": 1.5}, ValueError, "priority"),
        ({"sampling_params": SamplingParams(stop="x")}, ValueError, "stop strings"),
        ({"sampling_params": SamplingParams(n=2, top_k=5)}, NotImplementedError, "n is not"),
        ({"sampling_params": SamplingParams(logprobs=1)}, NotImplementedError, "logprobs"),
        ({"lora_request": object()}, NotImplementedError, "lora"),
        ({"disaggregated_params": DisaggregatedParams()}, ValueError, "request_type"),
        (
            {"disaggregated_params": DisaggregatedParams(request_type="generation_only")},
            ValueError,
            "ctx_request_id",
        ),
        (
            {
                "disaggregated_params": DisaggregatedParams(
                    request_type="GENERATION_ONLY", disagg_request_id=1
                )
            },
            ValueError,
            "opaque_state",
        ),
    ],
)
def test_bad_arguments_are_refused_at_submit(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    async def scenario() -> None:
        with pytest.raises(error, match=message):
            llm().generate_async(**{"inputs": [1], **arguments})

    run(scenario)


def test_an_end_id_must_come_from_somewhere() -> None:
    async def scenario() -> None:
        engine = llm(end_id=None)
        with pytest.raises(ValueError, match="end_id"):
            engine.generate_async([1])
        await engine.generate_async(
            [1], SamplingParams(end_id=3), scheduling_params=SchedulingParams()
        )

    run(scenario)


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "message"),
    [(100, 1, "does not fit max_seq_len"), (10, 0, "max_tokens"), (10, -1, "max_tokens")],
)
def test_what_the_executor_refuses_is_raised_while_iterating(
    n_prompt: int, max_tokens: int, message: str
) -> None:
    async def scenario() -> None:
        engine = llm(max_seq_len=100)
        result = engine.generate_async(prompt_of(n_prompt), SamplingParams(max_tokens=max_tokens))
        with pytest.raises(RequestError, match=message):
            await result
        result.abort()
        assert engine._check_health()

    run(scenario)


@pytest.mark.parametrize(
    "argument", [{"max_batch_size": 0}, {"kv_block_bytes": 17}, {"time_scale": -1.0}]
)
def test_a_bad_engine_argument_is_named(argument: dict[str, Any]) -> None:
    (name,) = argument
    with pytest.raises(ValueError, match=name):
        llm(**argument)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (SamplingParams, {"n": 2, "best_of": 1}, "best_of"),
        (SamplingParams, {"n": 2}, "greedy"),
        (SamplingParams, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (DisaggregatedParams, {"request_type": "both"}, "request_type"),
    ],
)
def test_parameters_check_themselves(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**arguments)
