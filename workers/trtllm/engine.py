"""`Engine`: an `LLM` as installed, with what its version can do and which of its errors mean what.

TensorRT-LLM's signatures and parameter classes grow from one version to the next, so they are looked at
once and only what is there is passed. The error policy at submit is TensorRT-LLM's own: `ValueError`,
`NotImplementedError`, `RequestError`, and a `TypeError` of a call that fits the signature, are the
request's; any other `RuntimeError` says that the engine is gone.
"""

import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import grpc

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import RequestRefused
from slagate.workers.trtllm.load import kv_cache

log = logging.getLogger(__name__)

HANDOFF_LIMIT_S = 60.0
"""How long an engine keeps a handoff nobody collects, where its configuration names no other limit."""


_OF_TRANSFER = re.compile(r"\bkv (?:cache )?transfer|transceiver", re.IGNORECASE)
_NEVER_FITS = re.compile(r"\b(?:never|not) fit\b|\bnot exceed\b|\bmax_seq_len\b", re.IGNORECASE)


class EngineApi(Protocol):
    """The names a worker needs from the engine's package: `tensorrt_llm`'s, or the double's."""

    SamplingParams: Any
    DisaggregatedParams: Any
    SchedulingParams: Any
    RequestError: Any


class EngineGoneError(RequestRefused):
    """The engine takes no requests any more; the worker ends."""


class Engine:
    """One `LLM` and the package it comes from."""

    def __init__(
        self,
        llm: Any,
        api: EngineApi,
        *,
        new_handoff_id: Callable[[], int] | None = None,
        measures: bool = False,
    ) -> None:
        """`llm` is untyped: tensorrt_llm ships no types, and is not installed everywhere.

        `new_handoff_id` makes ids for handoffs, where the engine leaves that to its callers. `measures`
        asks it for the figures of each request.
        """
        self.llm = llm
        self.api = api
        self._new_handoff_id = new_handoff_id
        self._measures = measures
        self._signature = inspect.signature(llm.generate_async)
        self._params_fields = {field.name for field in dataclasses.fields(api.DisaggregatedParams)}
        adp = getattr(llm.args, "enable_attention_dp", False)
        self.n_ranks: int = llm.args.tensor_parallel_size if adp else 1
        self.block_tokens: int = llm.args.kv_cache_config.tokens_per_block
        transceiver = getattr(llm.args, "cache_transceiver_config", None)
        self.max_transfer_tokens: int | None = setting(transceiver, "max_tokens_in_buffer")
        timeout_ms = setting(transceiver, "kv_transfer_timeout_ms")
        self.handoff_limit_s = HANDOFF_LIMIT_S if timeout_ms is None else timeout_ms / 1000
        self._learned_blocks: int | None = None
        # The wrapper's own methods are fewer; None where the tokenizer was not initialised.
        self.tokenizer: Any | None = getattr(llm.tokenizer, "tokenizer", None)

    def learn_blocks(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Take the size of a rank's KV cache from its newest statistics, for an engine that has no call.

        Ranks are of one size; the smallest that was named counts.
        """
        caches = [kv_cache(row) for row in rows.values()]
        sizes = [cache.get("maxNumBlocks") for cache in caches if cache is not None]
        known = [size for size in sizes if isinstance(size, int) and size > 0]
        self._learned_blocks = min(known, default=self._learned_blocks)

    def takes(self, keyword: str) -> bool:
        """Whether this version's `generate_async` has the keyword."""
        parameters = self._signature.parameters
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return any_keyword or keyword in parameters

    @cached_property
    def _capacity(self) -> Mapping[str, int] | None:
        """As the engine was built; None where the version cannot say. It asks the engine's processes."""
        capacity = getattr(self.llm, "get_kv_cache_capacity", None)
        return None if capacity is None else capacity()

    @property
    def blocks_per_rank(self) -> int | None:
        """KV blocks of one rank's pool; None where the version cannot say."""
        return None if self._capacity is None else self._capacity["maxNumBlocks"]

    @property
    def window_tokens(self) -> int:
        """Prompt and output together: the sequence length, or the KV cache where that is smaller."""
        limit = int(self.llm.args.max_seq_len)
        if self._capacity is not None:
            return min(limit, int(self._capacity["maxNumTokens"]))
        if self._learned_blocks is not None:
            return min(limit, self._learned_blocks * self.block_tokens)
        return limit

    @property
    def probe_token(self) -> int:
        """What a prompt of no meaning is made of: the token that texts begin with, where it is known."""
        token = getattr(self.tokenizer, "bos_token_id", None)
        return token if isinstance(token, int) else 1

    @property
    def alive(self) -> bool:
        """What the engine says of itself; an old one cannot, and counts as alive while nothing fails."""
        check = getattr(self.llm, "_check_health", None)
        return check is None or bool(check())

    def stop_tokens(self, text: str) -> tuple[int, ...]:
        """The tokens that the engine stops at for a stop string; only with a tokenizer."""
        assert self.tokenizer is not None
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def events_off(self) -> str:
        """Why this engine has no KV events, naming the setting; "" where it has."""
        cache = self.llm.args.kv_cache_config
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
        """`kv_events_config`, where this engine streams its events and so has none to poll."""
        config = setting(self.llm.args.kv_cache_config, "kv_events_config")
        return config if setting(config, "enable_kv_cache_events") else None

    def ranks_elsewhere(self) -> str:
        """Why a socket of some rank cannot be reached from here; "" where all are on this machine."""
        n_here = setting(self.llm.args, "gpus_per_node")
        if isinstance(n_here, int) and self.n_ranks > n_here:
            return f"{self.n_ranks} ranks are on more than this machine ({n_here} GPUs a node)"
        return ""

    def salts_off(self) -> str:
        """Why requests may not have a cache salt here; "" where they may.

        Versions since TensorRT-LLM's pull request #13051 say it in their events, and those since #15452, a
        month later, can be told by their signature. Without it the blocks of one tenant would be published
        as everybody's. Of the V2 cache manager nothing is known, so it counts as one that does not say it.
        """
        if not self.takes("cache_salt"):
            return "this engine cannot keep prefixes apart"
        if self.events_off():
            return ""
        is_v2 = setting(self.llm.args.kv_cache_config, "use_kv_cache_manager_v2")
        if self.event_stream is not None:
            is_v2 = True  # nothing else streams
        if "conversation_params" in self._signature.parameters and is_v2 in (None, False):
            return ""
        return "the KV events of this engine do not say it, so it is taken only where they are off"

    def sampling(self, **values: Any) -> Any:
        """`SamplingParams`. Raises `Refused` (INVALID_ARGUMENT) with what the engine says is wrong."""
        if self._measures:
            values["return_perf_metrics"] = True
        try:
            return self.api.SamplingParams(**values)
        except ValueError as error:
            raise RequestRefused(grpc.StatusCode.INVALID_ARGUMENT, f"sampling: {error}") from error

    def disaggregated(self, **values: Any) -> Any:
        """`DisaggregatedParams` of what this version's class has; the rest is dropped."""
        known = {name: value for name, value in values.items() if name in self._params_fields}
        return self.api.DisaggregatedParams(**known)

    def handoff_id(self) -> int | None:
        """A new id for both legs of a handoff; None where the engine makes one, or its version has none."""
        return None if self._new_handoff_id is None else self._new_handoff_id()

    def submit(self, tokens: Sequence[int], **keywords: Any) -> Any:
        """`generate_async` without the keywords that are None or that this version does not have.

        Raises `Refused` for this request, or `EngineGoneError`.
        """
        given = {k: v for k, v in keywords.items() if v is not None and self.takes(k)}
        try:
            return self.llm.generate_async(tokens, **given)
        except (ValueError, NotImplementedError, self.api.RequestError) as error:
            raise RequestRefused(grpc.StatusCode.INVALID_ARGUMENT, f"engine: {error}") from error
        except TypeError as error:
            if self._fits(tokens, given):
                raise RequestRefused(
                    grpc.StatusCode.INVALID_ARGUMENT, f"engine: {error}"
                ) from error
            log.exception("engine.signature")
            raise RequestRefused(
                grpc.StatusCode.INTERNAL, "engine: its call was not understood"
            ) from error
        except Exception as error:
            raise EngineGoneError(grpc.StatusCode.UNAVAILABLE, f"engine: {error}") from error

    def _fits(self, tokens: Sequence[int], keywords: dict[str, Any]) -> bool:
        try:
            self._signature.bind(tokens, **keywords)
        except TypeError:
            return False
        return True


def code_of_failure(error: Exception, *, in_transfer: bool) -> oe.ErrorCode.ValueType:
    """What an error of one running request means; `in_transfer`: of a decode leg without a result.

    An engine gives all of them one type, so its words decide where they are known. Other words of a leg in
    transfer are about that: there is little else that could fail.
    """
    text = str(error)
    if _OF_TRANSFER.search(text):
        return oe.ERROR_CODE_KV_TRANSFER_FAILED
    if _NEVER_FITS.search(text):
        return oe.ERROR_CODE_INVALID_ARGUMENT
    return oe.ERROR_CODE_KV_TRANSFER_FAILED if in_transfer else oe.ERROR_CODE_INTERNAL


def setting(config: Any, name: str) -> Any:
    """A field of a nested configuration, which may be an object, a dict of its YAML, or absent."""
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)
