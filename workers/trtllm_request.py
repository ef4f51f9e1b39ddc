"""From an OpenEngine `GenerateRequest` to what TensorRT-LLM's `LLM.generate_async` takes.

Everything that can be refused is refused here, before the engine has seen the request, with the name of
the field. Codes follow TensorRT-LLM's own OpenEngine server where the contract leaves a choice.
"""

from typing import Any, NamedTuple, Protocol

import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.workers.codec import params_of_session
from slagate.workers.errors import Refused
from slagate.workers.legs import CONTEXT_ONLY, REQUEST_TYPE
from slagate.workers.worker import Metadata

MAX_STOP_CONDITIONS = 64


class EngineApi(Protocol):
    """The names a worker needs from the engine's package: `tensorrt_llm`'s, or the double's."""

    SamplingParams: Any
    DisaggregatedParams: Any
    RequestError: Any


class EngineRequest(NamedTuple):
    """One validated leg."""

    request_id: str
    kind: str  # "context_only", "generation_only" or "context_and_generation"
    tokens: list[int]
    sampling: Any
    disaggregated: Any | None  # None on a worker without handoff
    cache_salt: str | None


ROLE_KINDS = {
    oe.ENGINE_ROLE_PREFILL: CONTEXT_ONLY,
    oe.ENGINE_ROLE_DECODE: "generation_only",
    oe.ENGINE_ROLE_AGGREGATED: "context_and_generation",
}


def parse_leg(
    request: oe.GenerateRequest,
    metadata: Metadata,
    *,
    api: EngineApi,
    role: oe.EngineRole.ValueType,
    model: str,
    window_tokens: int,
    end_id: int,
) -> EngineRequest:
    """Validate one leg and build the engine's arguments. Raises `Refused` naming the field."""
    _check_metadata(metadata)
    if not request.request_id:
        raise _invalid("request_id", "must not be empty")
    if not request.model:
        raise _invalid("model", "must not be empty")
    if request.model != model:
        raise Refused(grpc.StatusCode.NOT_FOUND, f"model: {request.model!r} is not served here")
    _check_unsupported(request)
    kind = _kind(request)
    if kind != ROLE_KINDS[role]:
        name = oe.EngineRole.Name(role).removeprefix("ENGINE_ROLE_").lower()
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"role mismatch: this is a {name} worker, the request is {kind}",
        )
    tokens = list(request.token_ids.ids)
    if not tokens:
        raise _invalid("token_ids", "must not be empty")
    if len(tokens) >= window_tokens:
        raise _invalid(
            "token_ids", f"{len(tokens)} tokens do not fit the context window of {window_tokens}"
        )
    return EngineRequest(
        request_id=request.request_id,
        kind=kind,
        tokens=tokens,
        sampling=_sampling(request, api, end_id, window_tokens - len(tokens)),
        disaggregated=_disaggregated(request, api, kind),
        cache_salt=request.kv.cache_salt if request.kv.HasField("cache_salt") else None,
    )


def _invalid(field: str, reason: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {reason}")


def _unsupported(field: str, reason: str) -> Refused:
    return Refused(grpc.StatusCode.UNIMPLEMENTED, f"{field}: {reason}")


def _check_metadata(metadata: Metadata) -> None:
    seen: set[str] = set()
    for key, _ in metadata:
        if not key.startswith("openengine-"):
            continue
        if key in seen:
            raise _invalid(key, "is given more than once")
        seen.add(key)
    for key in ("openengine-priority", "openengine-target-dp-rank"):
        if key in seen:
            raise _unsupported(key, "this worker does not support it")


def _check_unsupported(request: oe.GenerateRequest) -> None:
    if request.WhichOneof("input") == "prompt":
        raise _invalid("prompt", "this worker takes token_ids only")
    if request.media:
        raise _unsupported("media", "this worker serves text models")
    if request.lora_name:
        raise _unsupported("lora_name", "this worker has no adapters")
    if request.HasField("guided"):
        raise _unsupported("guided", "this worker has no guided decoding back-end")
    if request.kv.bypass_prefix_cache:
        raise _unsupported("kv.bypass_prefix_cache", "is not supported")
    if request.sampling.HasField("num_sequences") and request.sampling.num_sequences != 1:
        if request.sampling.num_sequences == 0:
            raise _invalid("sampling.num_sequences", "must be at least 1")
        raise _unsupported("sampling.num_sequences", "this worker gives one sequence a request")
    for field in ("return_prompt_logprobs", "return_output_logprobs"):
        if getattr(request.response, field):
            raise _unsupported(f"response.{field}", "this worker gives no logprobs")


def _kind(request: oe.GenerateRequest) -> str:
    request_type = ""
    if REQUEST_TYPE in request.extra.fields:
        value = request.extra.fields[REQUEST_TYPE]
        if value.WhichOneof("kind") != "string_value":
            raise _invalid("extra.request_type", "must be a string")
        request_type = value.string_value
    if request.kv.HasField("session"):
        if request_type:
            raise _invalid("extra.request_type", "must not come with kv.session")
        return "generation_only"
    if request_type in ("", "context_and_generation"):
        return "context_and_generation"
    if request_type == CONTEXT_ONLY:
        return CONTEXT_ONLY
    raise _invalid("extra.request_type", f"{request_type!r} is not a request type")


def _sampling(request: oe.GenerateRequest, api: EngineApi, end_id: int, room: int) -> Any:
    stopping, sampling = request.stopping, request.sampling
    # A budget above the room is cut, as the engine itself would: the answer then ends by length.
    max_tokens = min(stopping.max_tokens, room) if stopping.HasField("max_tokens") else room
    if max_tokens == 0:
        raise _invalid("stopping.max_tokens", "must be at least 1")
    if len(stopping.conditions) > MAX_STOP_CONDITIONS:
        raise _invalid("stopping.conditions", f"more than {MAX_STOP_CONDITIONS} are given")
    stop_token_ids: list[int] = []
    for condition in stopping.conditions:
        if condition.WhichOneof("condition") != "stop_token_id":
            raise _unsupported("stopping.conditions", "stop_text needs a tokenizer on the worker")
        stop_token_ids.append(condition.stop_token_id)
    kwargs: dict[str, Any] = {
        "end_id": end_id,
        "max_tokens": max_tokens,
        "min_tokens": stopping.min_tokens if stopping.HasField("min_tokens") else None,
        "stop_token_ids": stop_token_ids or None,
        "include_stop_str_in_output": stopping.include_stop_in_output,
        "ignore_eos": stopping.ignore_eos,
        "detokenize": False,
    }
    for field in (
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "seed",
    ):  # fmt: skip
        if sampling.HasField(field):
            kwargs[field] = getattr(sampling, field)
    try:
        return api.SamplingParams(**kwargs)
    except ValueError as error:
        raise _invalid("sampling", str(error)) from error


def _disaggregated(request: oe.GenerateRequest, api: EngineApi, kind: str) -> Any | None:
    if kind == "generation_only":
        return api.DisaggregatedParams(**params_of_session(request.kv.session))
    if kind == CONTEXT_ONLY:
        return api.DisaggregatedParams(request_type=CONTEXT_ONLY)
    return None
