"""`Engine`: the installed `LLM`, what its version can do, and what its errors mean.

TensorRT-LLM's signatures and parameter classes grow from one version to the next, so they are inspected
once, and only arguments that exist are passed. Errors of a submission mean what they mean to TensorRT-LLM:
`ValueError`, `NotImplementedError`, `RequestError`, and a `TypeError` of a call that fits the signature,
are the request's; any other one says that the engine is dead, `EngineDeadError` of the newest versions
among them. Versions before 1.4 raise what their process died of out of the next submission, whatever it is:
so no error is a request's once the engine is dead.
"""

import dataclasses
import inspect
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import RequestRefused, invalid, unsupported
from slagate.workers.trtllm.load import kv_cache
from slagate.workers.trtllm.watch import death_of

log = logging.getLogger(__name__)

HANDOFF_LIMIT_S = 60.0
"""How long an engine keeps a handoff that is not fetched, where its configuration names no other limit."""

BLOCK_TOKENS = 32
"""Tokens of a KV block where nothing is said, as in TensorRT-LLM's `KvCacheConfig`."""

_OF_TRANSFER = re.compile(r"\bkv (?:cache )?transfer|transceiver", re.IGNORECASE)
_NEVER_FITS = re.compile(r"\b(?:never|not) fit\b|\bnot exceed\b|\bmax_seq_len\b", re.IGNORECASE)


class EngineApi(Protocol):
    """What a worker needs from the engine's package, which is `tensorrt_llm` or its double."""

    SamplingParams: Any
    DisaggregatedParams: Any
    SchedulingParams: Any
    RequestError: Any


class EngineGoneError(RequestRefused):
    """The engine is dead, and with it the worker."""


class KvCapacity(NamedTuple):
    """The KV cache of one attention-DP rank on the GPU, as it was built."""

    blocks: int
    tokens: int


def ask_kv_capacity(llm: Any) -> KvCapacity | None:
    """The size of an engine's KV cache; None where it cannot say, or does not.

    It asks another process, and waits for the answer: not to be called on an event loop, but once on a
    thread, before there are requests.
    """
    ask = getattr(llm, "get_kv_cache_capacity", None)
    if ask is None:
        return None
    try:
        answer = ask()
        blocks, tokens = int(answer.get("maxNumBlocks", 0)), int(answer.get("maxNumTokens", 0))
    except Exception:
        # It only helps: statistics tell it, too.
        log.warning("engine.kv_capacity_unknown", exc_info=True)
        return None
    # An engine without a KV cache answers with an empty dict.
    return KvCapacity(blocks, tokens) if min(blocks, tokens) > 0 else None


def model_setting(llm: Any, name: str) -> Any:
    """A setting of the model's own configuration, or of its text part; None where it is not known.

    TensorRT-LLM keeps what `transformers` has read (None where that failed), and the model's local folder.
    """
    config = getattr(llm, "_hf_model_config", None)
    if config is None:
        folder = getattr(llm, "_hf_model_dir", None) or setting(llm.args, "model")
        try:
            config = json.loads((Path(folder) / "config.json").read_bytes())
        except (OSError, ValueError, TypeError):
            return None  # a name of the hub, which has no folder here
    found = setting(config, name)
    return setting(setting(config, "text_config"), name) if found is None else found


def model_window(llm: Any) -> int | None:
    """The longest sequence that the model is made for, as TensorRT-LLM infers it; None: not known."""
    positions = model_setting(llm, "max_position_embeddings")
    if not isinstance(positions, int) or positions < 1:
        return None
    scaling = model_setting(llm, "rope_scaling")
    kind = setting(scaling, "type") or setting(scaling, "rope_type")
    factor = setting(scaling, "factor")
    # The positions of these kinds are counted after scaling.
    if kind in ("su", "longrope", "llama3", "yarn") or not _is_factor(factor):
        return positions
    return math.ceil(positions * factor)


def _is_factor(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


class Engine:
    """One `LLM` and the package it comes from."""

    def __init__(
        self,
        llm: Any,
        api: EngineApi,
        capacity: KvCapacity | None = None,
        *,
        new_handoff_id: Callable[[], int] | None = None,
        measures: bool = False,
    ) -> None:
        """`llm` is untyped, as tensorrt_llm ships no types and is not installed everywhere.

        Its arguments may be None, or absent in some version or back-end; what the engine works out for
        itself does not come back into them. `capacity` is what `ask_kv_capacity` said.

        `new_handoff_id` makes ids for handoffs, for an engine that leaves that to its callers. With
        `measures` the engine measures each request.
        """
        self.llm = llm
        self.api = api
        self._new_handoff_id = new_handoff_id
        self._measures = measures
        self._signature = inspect.signature(llm.generate_async)
        self._params_fields = {field.name for field in dataclasses.fields(api.DisaggregatedParams)}
        args = llm.args
        adp = setting(args, "enable_attention_dp")
        self.n_ranks: int = (setting(args, "tensor_parallel_size") or 1) if adp else 1
        tokens_per_block = setting(setting(args, "kv_cache_config"), "tokens_per_block")
        if capacity is not None:
            tokens_per_block = capacity.tokens // capacity.blocks
        self.block_tokens: int = tokens_per_block or BLOCK_TOKENS
        self.max_batch_size: int | None = setting(args, "max_batch_size")
        self.max_num_tokens: int | None = setting(args, "max_num_tokens")
        self.max_prompt_tokens = self._max_prompt_tokens()
        self._capacity = capacity
        self._sequence_limit: int | None = setting(args, "max_seq_len") or model_window(llm)
        transceiver = setting(args, "cache_transceiver_config")
        # A buffer of 0 is made for each prompt; the transceiver in Python moves blocks, without one.
        is_bound = setting(transceiver, "transceiver_runtime") != "PYTHON"
        tokens = setting(transceiver, "max_tokens_in_buffer") if is_bound else None
        self.max_transfer_tokens: int | None = tokens or None
        timeout_ms = setting(transceiver, "kv_transfer_timeout_ms")
        self.handoff_limit_s = HANDOFF_LIMIT_S if timeout_ms is None else timeout_ms / 1000
        self._learned_blocks: int | None = None
        # Until the statistics have told the size of the KV cache, which the version could not be asked for.
        self.learns_blocks = capacity is None
        # Not the engine's wrapper, which has fewer methods. None where the tokenizer was not initialised.
        self.tokenizer: Any | None = getattr(llm.tokenizer, "tokenizer", None)

    def learn_blocks(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Learn the size of a rank's KV cache from statistics, for an engine that cannot be asked for it.

        All ranks have the same size; should they differ, the smallest counts. Where it cannot be told from
        the host's, it is at least the most that was free at once: before the first requests, nearly all.
        """
        caches = [
            kv_cache(row, has_host_blocks=self.has_host_blocks) or {} for row in rows.values()
        ]

        def known(name: str) -> list[int]:
            return [
                size for cache in caches if isinstance(size := cache.get(name), int) and size > 0
            ]

        if sizes := known("maxNumBlocks"):
            self._learned_blocks = min(sizes)
            self.learns_blocks = False
        elif free := known("freeNumBlocks"):
            self._learned_blocks = (
                max(free) if self._learned_blocks is None else max(self._learned_blocks, *free)
            )

    def takes(self, keyword: str) -> bool:
        """Whether this version's `generate_async` has the keyword."""
        parameters = self._signature.parameters
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return any_keyword or keyword in parameters

    def _max_prompt_tokens(self) -> int | None:
        """The longest prompt that is computed here in one step; None: chunked, or judged by the engine."""
        args, most = self.llm.args, self.max_num_tokens
        # AutoDeploy has no such check.
        if setting(args, "enable_chunked_prefill") or setting(args, "backend") == "_autodeploy":
            return None
        return most and most * (setting(args, "context_parallel_size") or 1)

    @property
    def blocks_per_rank(self) -> int | None:
        """KV blocks of one rank's pool; None where the version cannot say."""
        return None if self._capacity is None else self._capacity.blocks

    @property
    def window_tokens(self) -> int | None:
        """Prompt and output together: the sequence length, or the KV cache where that is smaller.

        None while neither is known: then the engine judges.
        """
        limit, cached = self._sequence_limit, None
        if self._capacity is not None:
            cached = self._capacity.tokens
        elif self._learned_blocks is not None:
            cached = self._learned_blocks * self.block_tokens
        if limit is None or (cached is not None and cached < limit):
            return cached
        return limit

    @property
    def probe_token(self) -> int:
        """A token for prompts without meaning: the one that texts begin with, where it is known."""
        token = getattr(self.tokenizer, "bos_token_id", None)
        return token if isinstance(token, int) else 1

    def stop_tokens(self, text: str) -> tuple[int, ...]:
        """The tokens that the engine stops at for a stop string; it must have a tokenizer."""
        assert self.tokenizer is not None
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def text_of(self, tokens: list[int]) -> str:
        """The text that the engine makes of these tokens; it must have a tokenizer."""
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def events_off(self) -> str:
        """The setting for which this engine has no KV events; "" where it has them."""
        cache = setting(self.llm.args, "kv_cache_config")
        if setting(cache, "enable_block_reuse") is False:
            return "kv_cache_config.enable_block_reuse is off"
        if self.event_stream is not None:
            if setting(self.event_stream, "publisher") == "null":
                return "kv_cache_config.kv_events_config.publisher is null"
        elif not setting(cache, "event_buffer_max_size"):
            return "kv_cache_config.event_buffer_max_size is 0"
        return ""

    @property
    def event_stream(self) -> Any | None:
        """`kv_events_config` of an engine that streams its events, and so has none to poll; else None."""
        config = setting(setting(self.llm.args, "kv_cache_config"), "kv_events_config")
        return config if setting(config, "enable_kv_cache_events") else None

    @property
    def has_host_blocks(self) -> bool:
        """Whether the operator gave the KV cache a part of the host's memory."""
        return bool(setting(setting(self.llm.args, "kv_cache_config"), "host_cache_size"))

    def loses_events(self) -> bool:
        """Whether each block that moves to the host or back breaks the KV events of this version.

        Its serializer has no form for what an event does not change. TensorRT-LLM mended that in pull
        request #11576, of which nothing else tells.
        """
        serializer = getattr(self.api, "KVCacheEventSerializer", None)
        form = getattr(serializer, "_event_diff_to_json", None)
        if form is None or not self.has_host_blocks or self.events_off():
            return False
        try:
            form(None)
        except AttributeError:
            return True
        return False

    @property
    def known_blocks(self) -> int | None:
        """KV blocks of one rank's pool, as the engine said or as its statistics let know."""
        return self._learned_blocks if self._capacity is None else self._capacity.blocks

    @property
    def cache_levels(self) -> tuple[int, ...]:
        """Which of GPU, host and disk (0, 1, 2) the levels in its KV events are.

        The V2 cache manager numbers the ones it has. Where nothing is said of a host, it has one.
        """
        cache = setting(self.llm.args, "kv_cache_config")
        skips_host = setting(cache, "host_cache_size") == 0 and setting(cache, "disk_cache_size")
        return (0, 2) if skips_host else (0, 1, 2)

    def ranks_elsewhere(self) -> str:
        """Why the sockets of some ranks cannot be reached; "" where all ranks are on this machine."""
        n_here = setting(self.llm.args, "gpus_per_node")
        if isinstance(n_here, int) and self.n_ranks > n_here:
            return f"{self.n_ranks} ranks are on more than this machine ({n_here} GPUs a node)"
        return ""

    def salts_off(self) -> str:
        """Why requests may not have a cache salt; "" where they may.

        Events must name the salt, or the blocks of one tenant would be published as everybody's. They do
        since TensorRT-LLM's pull request #13051; versions since #15452, a month later, are recognised by
        their signature. Events of the V2 cache manager never do, and whether "auto" is that one only the
        engine's own process knows.
        """
        if not self.takes("cache_salt"):
            return "this engine cannot keep prefixes apart"
        if self.events_off():
            return ""
        if self.event_stream is not None:
            return (
                "the KV events that this engine streams do not say it: poll them instead, with "
                "kv_cache_config.use_kv_cache_manager_v2: false, or switch them off"
            )
        if "conversation_params" not in self._signature.parameters:
            return (
                "the KV events of this engine do not say it, so it is taken only where they are off"
            )
        cache = setting(self.llm.args, "kv_cache_config")
        if setting(cache, "use_kv_cache_manager_v2") in (None, False):
            return ""
        return (
            "the KV events of the V2 cache manager do not say it: set "
            "kv_cache_config.use_kv_cache_manager_v2: false, or event_buffer_max_size: 0"
        )

    def sampling(self, **values: Any) -> Any:
        """`SamplingParams` of these values. Raises `RequestRefused` with what the engine says is wrong."""
        if self._measures:
            values["return_perf_metrics"] = True
        try:
            params = self.api.SamplingParams(**values)
        except ValueError as error:
            raise invalid("sampling", str(error)) from error
        if values.get("stop") and values.get("end_id") is not None:
            self._encode_stops(params)
        return params

    def _encode_stops(self, params: Any) -> None:
        """Have the stop texts made tokens of, which the engine itself does only without an `end_id`.

        Its own method does it, without the model's configurations: they would add ends of text.
        """
        encode = getattr(params, "_setup", None)
        if encode is None:
            raise unsupported(
                "stopping.conditions", "a stop_text needs an engine that knows the end"
            )
        names = inspect.signature(encode).parameters
        absent = {name: None for name in ("hf_model_config", "generation_config") if name in names}
        encode(self.llm.tokenizer, **absent)

    @property
    def hands_off_logprobs(self) -> bool:
        """Whether a handoff has the log probabilities of its first token (TensorRT-LLM's #11727)."""
        return "first_gen_log_probs" in self._params_fields

    def disaggregated(self, **values: Any) -> Any:
        """`DisaggregatedParams` of those values that this version's class has."""
        known = {name: value for name, value in values.items() if name in self._params_fields}
        return self.api.DisaggregatedParams(**known)

    def handoff_id(self) -> int | None:
        """A new id for both legs of a handoff; None where the engine makes it or has none."""
        return None if self._new_handoff_id is None else self._new_handoff_id()

    def submit(self, tokens: Sequence[int], **keywords: Any) -> Any:
        """`generate_async` without the keywords that are None or that this version does not have.

        Raises `RequestRefused`, or `EngineGoneError`.
        """
        given = {k: v for k, v in keywords.items() if v is not None and self.takes(k)}
        try:
            return self.llm.generate_async(tokens, **given)
        except Exception as error:
            if self.is_dead_by(error):
                raise EngineGoneError(grpc.StatusCode.UNAVAILABLE, f"engine: {error}") from error
            if not isinstance(error, TypeError) or self._fits(tokens, given):
                raise invalid("engine", str(error)) from error
            log.exception("engine.signature")
            reason = "engine: its call was not understood"
            raise RequestRefused(grpc.StatusCode.INTERNAL, reason) from error

    def tells_death(self, error: Exception) -> bool:
        """Whether an error says that the engine is dead, or the engine says so by now; for any call."""
        kind = getattr(self.api, "EngineDeadError", None)
        return (kind is not None and isinstance(error, kind)) or bool(death_of(self.llm))

    def is_dead_by(self, error: Exception) -> bool:
        """Whether an error of a submission, or of a request made here, means that the engine is dead."""
        of_request = (ValueError, NotImplementedError, TypeError, AssertionError, RequestRefused)
        is_requests = isinstance(error, (*of_request, self.api.RequestError))
        return isinstance(error, EngineGoneError) or not is_requests or self.tells_death(error)

    def _fits(self, tokens: Sequence[int], keywords: dict[str, Any]) -> bool:
        try:
            self._signature.bind(tokens, **keywords)
        except TypeError:
            return False
        return True


def abort(result: Any) -> None:
    """Abort a request of the engine's, if it still knows it: one that has been shut down does not."""
    try:
        result.abort()
    except Exception:
        log.warning("engine.abort_failed", exc_info=True)


def code_of_failure(error: Exception, *, in_transfer: bool) -> oe.ErrorCode.ValueType:
    """The code for the error of a running request; `in_transfer`: a decode leg without a result.

    All errors of an engine are of one type, so known words of its message decide. With other words, the
    error of a leg in transfer counts as one of the transfer: there is little else that could fail.
    """
    text = str(error)
    if _OF_TRANSFER.search(text):
        return oe.ERROR_CODE_KV_TRANSFER_FAILED
    if _NEVER_FITS.search(text):
        return oe.ERROR_CODE_INVALID_ARGUMENT
    return oe.ERROR_CODE_KV_TRANSFER_FAILED if in_transfer else oe.ERROR_CODE_INTERNAL


def setting(config: Any, name: str) -> Any:
    """A field of a nested configuration, which may be an object, a dict read from YAML, or None."""
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)
