"""Sampling, stopping and response options of a request, checked and as `SamplingParams` takes them.

An engine may die of a value that it does not check, so whatever is out of range is refused here and the
engine never sees it. Defaults are those of TensorRT-LLM's own OpenEngine server, not `SamplingParams`'.
"""

import math
from typing import Any

import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import Refused
from slagate.workers.trtllm_engine import Engine
from slagate.workers.trtllm_output import HiddenStop, OutputForm

MAX_STOP_CONDITIONS = 64
MAX_TOP_N = 20
"""Candidates a token: what public APIs allow, and a bound on what one token may cost on the wire."""

UINT32_MAX = 0xFFFFFFFF


def invalid(field: str, reason: str) -> Refused:
    """The request is wrong."""
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {reason}")


def unsupported(field: str, reason: str) -> Refused:
    """The request may be right, and is not for this worker."""
    return Refused(grpc.StatusCode.UNIMPLEMENTED, f"{field}: {reason}")


def max_sequences(engine: Engine, *, hands_off: bool) -> int:
    """Outputs that one request may have; a handoff is of one sequence."""
    return 1 if hands_off else int(engine.llm.args.max_batch_size)


def output_form(request: oe.GenerateRequest, engine: Engine, *, kind: str) -> OutputForm:
    """What the answer is to contain. Raises `Refused` naming the field."""
    hands_off = kind != "context_and_generation"
    n_outputs = _n_outputs(request, max_sequences(engine, hands_off=hands_off), hands_off=hands_off)
    response = request.response
    if response.prompt_logprob_start:
        raise unsupported("response.prompt_logprob_start", "only 0 is supported")
    logprobs = _top_n(request, "output") if response.return_output_logprobs else None
    prompt_logprobs = _top_n(request, "prompt") if response.return_prompt_logprobs else None
    if kind == "generation_only":
        # The prompt was another engine's, and its log probabilities came with that answer.
        prompt_logprobs = None
    stopping = request.stopping
    return OutputForm(
        n_outputs=n_outputs,
        top_n=logprobs,
        prompt_top_n=prompt_logprobs,
        has_text=_wants_text(request, engine),
        hidden_stops=() if stopping.include_stop_in_output else _hidden_stops(request, engine),
        text_of=engine.text_of,
    )


def sampling_values(
    request: oe.GenerateRequest, form: OutputForm, *, end_id: int, room: int, vocab_size: int | None
) -> dict[str, Any]:
    """Arguments of `SamplingParams`; `room` is what the context window leaves in tokens.

    Raises `Refused` naming the field.
    """
    stopping, sampling = request.stopping, request.sampling
    # A budget above the room is cut, as the engine itself would: the answer then ends by length.
    max_tokens = min(stopping.max_tokens, room) if stopping.HasField("max_tokens") else room
    if max_tokens == 0:
        raise invalid("stopping.max_tokens", "must be at least 1")
    stop_token_ids = [
        condition.stop_token_id
        for condition in stopping.conditions
        if condition.WhichOneof("condition") == "stop_token_id"
    ]
    check_vocabulary("stopping.conditions", stop_token_ids, vocab_size=vocab_size)
    stop_texts = [c.stop_text for c in stopping.conditions if c.stop_text]
    values: dict[str, Any] = {
        "end_id": end_id,
        "max_tokens": max_tokens,
        "min_tokens": stopping.min_tokens if stopping.HasField("min_tokens") else None,
        "stop": stop_texts or None,
        "stop_token_ids": stop_token_ids or None,
        "include_stop_str_in_output": stopping.include_stop_in_output,
        "ignore_eos": stopping.ignore_eos,
        "detokenize": form.has_text,
        "n": form.n_outputs,
        "best_of": form.n_outputs,
        # None asked of the engine may lose the chosen token's own, so one always is.
        "logprobs": None if form.top_n is None else max(1, form.top_n),
        "prompt_logprobs": None if form.prompt_top_n is None else max(1, form.prompt_top_n),
        **_checked_sampling(sampling),
    }
    if form.n_outputs > 1 and (values["temperature"] == 0 or values["top_k"] == 1):
        raise invalid("sampling.num_sequences", "greedy sampling gives one sequence")
    return values


def _checked_sampling(sampling: oe.SamplingParams) -> dict[str, Any]:
    """Knobs that are set, after a check, and the defaults of those that always are."""
    values: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    for field in (
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "seed",
    ):  # fmt: skip
        if sampling.HasField(field):
            values[field] = getattr(sampling, field)
    for field, value in values.items():
        if not math.isfinite(value):
            raise invalid(f"sampling.{field}", "must be a finite number")
    if values["temperature"] < 0:
        raise invalid("sampling.temperature", "must not be negative")
    if not 0 < values["top_p"] <= 1:
        raise invalid("sampling.top_p", "must be over 0 and at most 1")
    if values["top_k"] < -1:
        raise invalid("sampling.top_k", "must be at least -1")
    # -1 is how others say "off"; TensorRT-LLM says 0.
    values["top_k"] = max(values["top_k"], 0)
    if not 0 <= values.get("min_p", 0) <= 1:
        raise invalid("sampling.min_p", "must be from 0 to 1")
    if values.get("repetition_penalty", 1) <= 0:
        raise invalid("sampling.repetition_penalty", "must be over 0")
    return values


def check_vocabulary(field: str, ids: list[int], *, vocab_size: int | None) -> None:
    """Refuse ids outside the vocabulary, where its size is known."""
    if vocab_size is not None and ids and max(ids) >= vocab_size:
        raise invalid(field, f"{max(ids)} is outside the vocabulary of {vocab_size}")


def _n_outputs(request: oe.GenerateRequest, most: int, *, hands_off: bool) -> int:
    if not request.sampling.HasField("num_sequences"):
        return 1
    n_outputs = request.sampling.num_sequences
    if n_outputs == 0:
        raise invalid("sampling.num_sequences", "must be at least 1")
    if hands_off and n_outputs > 1:
        raise unsupported("sampling.num_sequences", "a handoff is of one sequence")
    if n_outputs > most:
        raise invalid("sampling.num_sequences", f"is over the limit of {most}")
    return n_outputs


def _top_n(request: oe.GenerateRequest, which: str) -> int:
    """Candidates asked for at each position of `which` ("prompt" or "output")."""
    field = f"{which}_candidates"
    selection: oe.CandidateTokenSelection = getattr(request.response, field)
    if selection.WhichOneof("selection") not in (None, "top_n"):
        raise unsupported(f"response.{field}", "only top_n is supported")
    if selection.top_n > MAX_TOP_N:
        raise invalid(f"response.{field}.top_n", f"is over the limit of {MAX_TOP_N}")
    return selection.top_n


def _wants_text(request: oe.GenerateRequest, engine: Engine) -> bool:
    if "detokenize" not in request.extra.fields:
        return engine.tokenizer is not None
    value = request.extra.fields["detokenize"]
    if value.WhichOneof("kind") != "bool_value":
        raise invalid("extra.detokenize", "must be true or false")
    if value.bool_value and engine.tokenizer is None:
        raise unsupported("extra.detokenize", "this worker has no tokenizer")
    return value.bool_value


def _hidden_stops(request: oe.GenerateRequest, engine: Engine) -> tuple[HiddenStop, ...]:
    texts = [c.stop_text for c in request.stopping.conditions if c.stop_text]
    return tuple(HiddenStop(text, engine.stop_tokens(text)) for text in texts)


def check_stops(request: oe.GenerateRequest, engine: Engine) -> None:
    """Refuse stop conditions that are too many, empty, or of text where there is no tokenizer."""
    conditions = request.stopping.conditions
    if len(conditions) > MAX_STOP_CONDITIONS:
        raise invalid("stopping.conditions", f"more than {MAX_STOP_CONDITIONS} are given")
    for condition in conditions:
        kind = condition.WhichOneof("condition")
        if kind is None or (kind == "stop_text" and not condition.stop_text):
            raise invalid("stopping.conditions", "one is empty")
        if kind == "stop_text" and engine.tokenizer is None:
            raise unsupported("stopping.conditions", "stop_text needs a tokenizer on the worker")
