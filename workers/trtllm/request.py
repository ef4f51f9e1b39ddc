"""From an OpenEngine `GenerateRequest` to what TensorRT-LLM's `LLM.generate_async` takes.

Everything that can be refused is refused here, before the engine has seen the request, with the name of
the field. Codes follow TensorRT-LLM's own OpenEngine server where the contract leaves a choice.
"""

from typing import Any, NamedTuple

import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import Metadata
from slagate.workers.errors import RequestRefused, invalid, not_found, unsupported
from slagate.workers.legs import CONTEXT_ONLY, DECODE_RANK, LOCAL, REQUEST_TYPE, TARGET_RANK
from slagate.workers.logits.processors import LogitsProcessors
from slagate.workers.logits.request import RequestLogits
from slagate.workers.trtllm.engine import Engine
from slagate.workers.trtllm.handoffs import Handoffs
from slagate.workers.trtllm.output import OutputForm
from slagate.workers.trtllm.sampling import (
    UINT32_MAX,
    check_vocabulary,
    guided_params,
    output_form,
    parse_stops,
    sampling_values,
)
from slagate.workers.trtllm.server_info import WorkerIdentity

GENERATION_ONLY = "generation_only"

RESERVED_PREFIXES = ("openengine-", "x-slagate-")


class EngineRequest(NamedTuple):
    """One validated leg, with the arguments of the engine's call."""

    request_id: str
    kind: str  # CONTEXT_ONLY, GENERATION_ONLY or LOCAL
    tokens: list[int]
    sampling: Any
    form: OutputForm
    end_id: int
    disaggregated: Any | None = None  # None on a worker without handoff
    cache_salt: str | None = None
    rank: int | None = None  # the attention-DP rank it must run on; None: any


ROLE_KINDS = {
    oe.ENGINE_ROLE_PREFILL: CONTEXT_ONLY,
    oe.ENGINE_ROLE_DECODE: GENERATION_ONLY,
    oe.ENGINE_ROLE_AGGREGATED: LOCAL,
}


class LegParser:
    """Validates the legs of one worker and builds the engine's arguments. It has no state of its own."""

    def __init__(
        self,
        engine: Engine,
        identity: WorkerIdentity,
        handoffs: Handoffs,
        processors: LogitsProcessors,
    ) -> None:
        """`processors` are the logits processors that requests have or may ask for."""
        self._engine = engine
        self._identity = identity
        self._handoffs = handoffs
        self._logits = RequestLogits(
            processors,
            base=getattr(engine.api, "LogitsProcessor", None),
            end_id=identity.end_id,
            vocab_size=identity.vocab_size,
        )

    def parse_leg(self, request: oe.GenerateRequest, metadata: Metadata) -> EngineRequest:
        """Raises `RequestRefused` naming the field."""
        reserved = _reserved(metadata)
        if "openengine-priority" in reserved:
            raise unsupported("openengine-priority", "this worker does not support it")
        self._check_supported(request)
        kind, engine, identity = _kind(request), self._engine, self._identity
        is_own = kind == ROLE_KINDS[identity.role]
        if kind == LOCAL and identity.role == oe.ENGINE_ROLE_DECODE:
            # One that does not say so has most likely lost its handoff, or came to the wrong worker.
            is_own = REQUEST_TYPE in request.extra.fields
        if not is_own and not identity.takes_any_leg:
            raise RequestRefused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"role mismatch: this is a {identity.role_name} worker, the request is {kind}",
            )
        tokens = request.token_ids.ids[:]
        window = engine.window_tokens
        self._check_prompt(tokens, kind, window)
        stops = parse_stops(request, engine, vocab_size=identity.vocab_size)
        form = output_form(request, engine, stops, kind=kind, end_id=identity.end_id)
        values = sampling_values(
            request,
            form,
            stops,
            end_id=None if identity.engine_knows_end else identity.end_id,
            pad_id=identity.end_id,
            room=None if window is None else window - len(tokens),
        )
        guided = guided_params(request, engine)
        if guided is not None:
            values["guided_decoding"] = guided
        values["logits_processor"] = self._logits.processors_of(request, n_outputs=form.n_outputs)
        return EngineRequest(
            request_id=request.request_id,
            kind=kind,
            tokens=tokens,
            disaggregated=self._disaggregated(request, kind),
            sampling=engine.sampling(**values),
            form=form,
            end_id=identity.end_id,
            cache_salt=request.kv.cache_salt if request.kv.HasField("cache_salt") else None,
            rank=self._rank(reserved, kind, n_outputs=form.n_outputs),
        )

    def _check_supported(self, request: oe.GenerateRequest) -> None:
        if not request.request_id:
            raise invalid("request_id", "must not be empty")
        if not request.model:
            raise invalid("model", "must not be empty")
        if request.model != self._identity.model:
            raise not_found("model", f"{request.model!r} is not served here")
        if request.WhichOneof("input") == "prompt":
            raise invalid("prompt", "this worker takes token_ids only")
        if request.media:
            raise unsupported("media", "this worker serves text models")
        if request.lora_name:
            raise unsupported("lora_name", "this worker has no adapters")
        if request.kv.bypass_prefix_cache:
            raise unsupported("kv.bypass_prefix_cache", "is not supported")
        why_not = self._engine.salts_off() if request.kv.HasField("cache_salt") else ""
        if why_not:
            version = self._identity.engine_version
            raise unsupported("kv.cache_salt", f"{why_not} (engine version {version})")

    def _check_prompt(self, tokens: list[int], kind: str, window: int | None) -> None:
        if not tokens:
            raise invalid("token_ids", "must not be empty")
        check_vocabulary("token_ids", tokens, vocab_size=self._identity.vocab_size)
        n_tokens, most = len(tokens), self._engine.max_prompt_tokens
        if kind != GENERATION_ONLY and most is not None and n_tokens > most:
            reason = f"{n_tokens} tokens are over max_num_tokens ({most}), and not chunked here"
            raise invalid("token_ids", reason)
        if window is not None and n_tokens >= window:
            raise invalid(
                "token_ids", f"{n_tokens} tokens do not fit the context window of {window}"
            )
        most = self._engine.max_transfer_tokens
        if kind != LOCAL and most is not None and n_tokens > most:
            # The engine would take memory besides its buffer: more with each, until a transfer fails.
            name = "cache_transceiver_config.max_tokens_in_buffer"
            raise invalid("token_ids", f"{n_tokens} tokens are over {name} ({most})")

    def _disaggregated(self, request: oe.GenerateRequest, kind: str) -> Any | None:
        engine = self._engine
        if kind == GENERATION_ONLY:
            logprob = getattr(engine.api, "Logprob", None)
            params = self._handoffs.params(request.kv.session, logprob)
            for name in ("first_gen_tokens", "draft_tokens"):
                field = f"kv.session.attributes_struct.{name}"
                check_vocabulary(field, params[name] or [], vocab_size=self._identity.vocab_size)
            return engine.disaggregated(**params)
        if kind == CONTEXT_ONLY:
            handoff_id = engine.handoff_id()
            return engine.disaggregated(request_type=CONTEXT_ONLY, disagg_request_id=handoff_id)
        return None

    def _rank(self, reserved: dict[str, str | bytes], kind: str, *, n_outputs: int) -> int | None:
        key, other = TARGET_RANK, DECODE_RANK
        if kind == GENERATION_ONLY:
            key, other = other, key
        if other in reserved:
            raise invalid(other, f"does not go with a {kind} request")
        if key not in reserved:
            return None
        text, engine = reserved[key], self._engine
        # str.isdigit() takes other scripts' digits, and int() takes signs and underscores.
        if not (isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= 10):
            raise invalid(key, "must be a decimal number")
        rank = int(text)
        if rank > UINT32_MAX or rank >= engine.n_ranks:
            raise invalid(key, f"must be below {engine.n_ranks}, the ranks of this worker")
        if engine.n_ranks > 1 and not engine.takes("scheduling_params"):
            raise unsupported(key, "this engine takes no rank")
        if engine.n_ranks > 1 and n_outputs > 1:
            raise invalid(key, "does not go with sampling.num_sequences over 1")
        return rank


def _reserved(metadata: Metadata) -> dict[str, str | bytes]:
    """The metadata of the protocol and of slagate. Raises `RequestRefused` for a key given twice."""
    found: dict[str, str | bytes] = {}
    for key, value in metadata:
        if key.startswith(RESERVED_PREFIXES):
            if key in found:
                raise invalid(key, "is given more than once")
            found[key] = value
    return found


def _kind(request: oe.GenerateRequest) -> str:
    request_type = ""
    if REQUEST_TYPE in request.extra.fields:
        value = request.extra.fields[REQUEST_TYPE]
        if value.WhichOneof("kind") != "string_value":
            raise invalid("extra.request_type", "must be a string")
        request_type = value.string_value
    if request.kv.HasField("session"):
        if request_type:
            raise invalid("extra.request_type", "must not come with kv.session")
        return GENERATION_ONLY
    if request_type in ("", LOCAL):
        return LOCAL
    if request_type == CONTEXT_ONLY:
        return CONTEXT_ONLY
    raise invalid("extra.request_type", f"{request_type!r} is not a request type")
