"""What the simulated engine checks of a request before it runs, and when it says so.

TensorRT-LLM raises some errors out of `generate_async` and reports others, found later by its executor
process, while the result is iterated; `checked_sequence` raises the first kind, `enqueue_problem`
names the second.
"""

from dataclasses import replace
from typing import Any

from slagate.workers.sim_kv_cache import block_states, seed_state, token_bytes
from slagate.workers.sim_request import (
    DisaggregatedParams,
    RequestOutput,
    SamplingParams,
    SchedulingParams,
)
from slagate.workers.sim_sequence import EngineLimits, SimSequence


def check_arguments(
    sampling: Any, *, lora_request: object | None, scheduling: Any, priority: float
) -> None:
    """Raises `TypeError`, `ValueError`, or `NotImplementedError` for what is not simulated."""
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams, not {type(sampling).__name__}")
    if scheduling is not None and not isinstance(scheduling, SchedulingParams):
        raise TypeError(
            f"scheduling_params must be SchedulingParams, not {type(scheduling).__name__}"
        )
    if not 0.0 <= priority <= 1.0:
        raise ValueError(f"priority must be in [0, 1], got {priority}")
    if sampling.stop is not None:
        raise ValueError("stop strings need a tokenizer; use stop_token_ids")
    unsupported = {
        "n": sampling.best_of != 1,
        "logprobs": sampling.logprobs is not None or sampling.prompt_logprobs is not None,
        "guided_decoding": sampling.guided_decoding is not None,
        "lora_request": lora_request is not None,
    }
    for name, asked in unsupported.items():
        if asked:
            raise NotImplementedError(f"{name} is not simulated")


def request_type(params: DisaggregatedParams | None) -> str:
    """The phase asked for. Raises `ValueError` naming what a disaggregated request lacks."""
    if params is None:
        return "context_and_generation"
    if params.request_type is None:
        raise ValueError("disaggregated_params.request_type is missing")
    if params.request_type == "generation_only":
        if params.ctx_request_id is None and params.disagg_request_id is None:
            raise ValueError("generation_only needs ctx_request_id or disagg_request_id")
        if not isinstance(params.opaque_state, bytes) or not params.opaque_state:
            raise ValueError("generation_only needs opaque_state as bytes")
    return params.request_type


def prompt_tokens(inputs: Any, *, vocab_size: int) -> tuple[list[int], bytes]:
    """The prompt as a list and packed as uint32. Raises `TypeError` or `ValueError`."""
    if isinstance(inputs, dict):
        inputs = inputs.get("prompt_token_ids", inputs.get("prompt"))
    if isinstance(inputs, str):
        raise ValueError("text prompts need a tokenizer; give prompt_token_ids")
    # An int32 array, as newer TensorRT-LLM takes. Bytes must not pass as a list of ints.
    if hasattr(inputs, "tolist"):
        inputs = inputs.tolist()
    if not isinstance(inputs, list):
        raise TypeError(f"inputs must be token ids or a dict, not {type(inputs).__name__}")
    if not inputs:
        raise ValueError("prompt_token_ids is empty")
    packed = token_bytes(inputs)
    if max(inputs) >= vocab_size:
        raise ValueError(f"prompt_token_ids: {max(inputs)} is outside the vocabulary")
    return inputs, packed


def checked_sequence(
    request_id: int,
    inputs: Any,
    *,
    sampling: SamplingParams,
    params: DisaggregatedParams | None,
    streaming: bool,
    cache_salt: str | None,
    model: str,
    max_seq_len: int,
    end_id: int | None,
    limits: EngineLimits,
) -> SimSequence:
    """The sequence of a request, `max_tokens` cut to the context window. Raises as above."""
    kind = request_type(params)
    prompt, packed = prompt_tokens(inputs, vocab_size=limits.vocab_size)
    end_id = end_id if sampling.end_id is None else sampling.end_id
    if end_id is None:
        raise ValueError("end_id is needed: the tokenizer is not initialised")
    if kind == "context_only":
        sampling = replace(sampling, max_tokens=1)
    room = max_seq_len - len(prompt)
    seed = seed_state(model, cache_salt or "")
    stops = frozenset[int]()
    if not sampling.ignore_eos:
        stops = frozenset((end_id, *(sampling.stop_token_ids or ())))
    return SimSequence(
        result=RequestOutput(request_id, prompt, sampling_params=sampling, streaming=streaming),
        packed=packed,
        n_prompt=len(prompt),
        seed=seed,
        states=block_states(packed, seed, limits.block_tokens),
        max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        min_tokens=sampling.min_tokens or 0,
        end_id=end_id,
        stop_ids=stops,
        keep_stop_token=sampling.include_stop_str_in_output,
        request_type=kind,
        params=params,
    )


def enqueue_problem(
    sequence: SimSequence, *, max_seq_len: int, capacity_tokens: int, has_transceiver: bool
) -> str | None:
    """Why the executor refuses a sequence, or None."""
    if sequence.request_type != "context_and_generation" and not has_transceiver:
        return "disaggregated requests need cache_transceiver_config"
    if sequence.n_prompt >= max_seq_len:
        return f"prompt of {sequence.n_prompt} tokens does not fit max_seq_len {max_seq_len}"
    if sequence.max_tokens <= 0:
        return f"max_tokens must be > 0, got {sequence.max_tokens}"
    n_tokens = sequence.n_prompt + sequence.max_tokens - 1
    if n_tokens > capacity_tokens:
        return f"{n_tokens} tokens never fit a KV cache of {capacity_tokens} tokens"
    return None
