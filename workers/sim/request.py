"""Requests to the simulated engine, in the shape of three versions of TensorRT-LLM's LLM API.

Field names, defaults and errors follow `tensorrt_llm.SamplingParams`, `DisaggregatedParams` and
`SchedulingParams`, so that code written for those runs here. A class with a version in its name belongs to
that version, one without to the newest. Each version has all fields of the one before.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from typing_extensions import override

from slagate.workers.sim.kv_cache.events import KVCacheEventSerializer12

REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")

DEFAULT_REQUEST_PRIORITY = 0.5


class RequestError(RuntimeError):
    """One request failed; the engine stays usable."""


class EngineDeadError(RuntimeError):
    """The engine's process has died: every pending result and every later submission raises it.

    It is a sibling of `RequestError`, not one of its kind (TensorRT-LLM executor/utils.py id 55322852865).
    """

    def __init__(self, root_cause: BaseException | None = None) -> None:
        why = "" if root_cause is None else f": {type(root_cause).__name__}: {root_cause}"
        super().__init__(f"the engine has died{why}")
        self.root_cause = root_cause


class SimLogitsProcessor(ABC):
    """The double of TensorRT-LLM's `LogitsProcessor`; subclasses change one request's logits in place.

    It is called before each token, with an f32 array of numpy where the engine has a tensor of torch. The
    token is the one with the largest logit. An error that it raises ends the engine.
    """

    @abstractmethod
    def __call__(
        self,
        req_id: int,
        logits: Any,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        """`logits` are of shape (1, beams, vocabulary), `token_ids` prompt and output of each beam."""


@dataclass(slots=True, kw_only=True)
class SamplingParams12:
    """How to sample and when to stop. Raises `ValueError` on contradicting values.

    The engine calls `_setup` only where `end_id` is None: with an `end_id` stop texts have no tokens, and
    `_get_stop_words` raises. Sources: sampling_params.py id 416251432 (`_validate`, `_setup`,
    `_get_stop_words`); llm.py id 55216765702 (`_prepare_sampling_params`).
    """

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int | None = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: object | None = None
    logits_processor: object | None = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[Any] | None = None
    lookahead_config: object | None = None
    guided_decoding: object | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    _stop_word_ids: list[list[int]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        if self.best_of is None:
            self.best_of = self.n
        for name, most in (("top_p", 1), ("top_k", None), ("temperature", None)):
            value = getattr(self, name)
            if value is not None and (value < 0 or (most is not None and value > most)):
                raise ValueError(f"{name} is out of range: {value}")
        if self.n < 1:
            raise ValueError(f"n must be at least 1: {self.n}")
        if self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        none_given = self.temperature is None and self.top_p is None and self.top_k is None
        greedy = none_given or self.top_k == 1 or self.top_p == 0 or self.temperature == 0
        # TensorRT-LLM too reads this variable here.
        allowed = self.use_beam_search or os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING")
        if self.best_of > 1 and greedy and not allowed:
            raise ValueError("greedy decoding needs best_of 1")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError(f"truncate_prompt_tokens must be >= 1: {self.truncate_prompt_tokens}")

    def _setup(
        self,
        tokenizer: Any,
        hf_model_config: object,
        generation_config: Any,
        add_special_tokens: bool = False,  # noqa: FBT001, FBT002
    ) -> "SamplingParams12":
        del hf_model_config, generation_config
        if self.end_id is None:
            self.end_id = self.pad_id = tokenizer.eos_token_id
        if self.stop is not None:
            self._stop_word_ids = [
                tokenizer.encode(text, add_special_tokens=add_special_tokens)
                for text in self._stop_texts()
            ]
        return self

    def _stop_texts(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def _get_stop_words(self) -> list[list[int]]:
        if self.stop is not None and self._stop_word_ids is None:
            raise RuntimeError(f"stop ({self.stop}) is not processed by tokenizer")
        return [[token] for token in self.stop_token_ids or ()] + (self._stop_word_ids or [])

    def _get_stop_reasons_and_words(self) -> list[tuple[int | str, list[int]]]:
        reasons = [*(self.stop_token_ids or ()), *self._stop_texts()]
        return list(zip(reasons, self._get_stop_words(), strict=True))


@dataclass(slots=True, kw_only=True)
class SamplingParams13(SamplingParams12):
    """Those of the 1.3 candidates, which stop at every end token of the model's generation config, too.

    Such a token is a stop token like one of the caller's: the answer names it, and it is cut off. Sources:
    TensorRT-LLM's pull request #10389; sampling_params.py id 67047105733 (`_setup`).
    """

    @override
    def _setup(
        self,
        tokenizer: Any,
        hf_model_config: object,
        generation_config: Any,
        add_special_tokens: bool = False,
    ) -> "SamplingParams12":
        SamplingParams12._setup(
            self, tokenizer, hf_model_config, generation_config, add_special_tokens
        )
        ends = getattr(generation_config, "eos_token_id", None)
        known = [self.end_id, *(self.stop_token_ids or ())]
        added = [
            end for end in ([ends] if isinstance(ends, int) else ends or ()) if end not in known
        ]
        if added:
            self.stop_token_ids = [*(self.stop_token_ids or ()), *added]
        return self


@dataclass(slots=True, kw_only=True)
class SamplingParams(SamplingParams13):
    """How to sample and when to stop. Raises `ValueError` on contradicting values."""

    logprobs_mode: str | None = None
    logprobs_simple_format: bool = False
    prompt_logprobs_simple_format: bool = False
    thinking_token_budget: int | None = None


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams12:
    """Which phase to run and the handoff between phases. Raises `ValueError` on a bad request_type."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in REQUEST_TYPES:
                raise ValueError(
                    f"request_type must be one of {', '.join(REQUEST_TYPES)}: {self.request_type}"
                )


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams13(DisaggregatedParams12):
    """Those of the 1.3 candidates: with ids of both phases, and the prefill rank and endpoint."""

    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams(DisaggregatedParams13):
    """The newest version's, with usage, conversation and media that are passed along."""

    multimodal_item_runs: list[Any] | None = None
    ctx_usage: dict[str, Any] | None = None
    conversation_id: str | None = None


_Params = TypeVar("_Params", bound=DisaggregatedParams12)


def changed_params(params: _Params, **changes: Any) -> _Params:
    """A copy with these fields set; fields that its version does not have are left out."""
    known = {field.name for field in fields(params)}
    return replace(params, **{name: value for name, value in changes.items() if name in known})


@dataclass(slots=True, kw_only=True)
class SchedulingParams12:
    """Which attention-DP rank to run on; `attention_dp_relax=False` means that rank or wait."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = True
    agent_hierarchy: object | None = None


@dataclass(slots=True, kw_only=True)
class SchedulingParams(SchedulingParams12):
    """The newest version's, with an id that hints to keep a subagent on one rank."""

    subagent_affinity_id: str | None = None


@dataclass(frozen=True, slots=True)
class ConversationParams:
    """Which conversation a request is a turn of."""

    conversation_id: str


@dataclass(slots=True)
class PreprocessedInputs:
    """A prompt as `LLM.preprocess` gives it."""

    prompt_token_ids: Any
    query_token_ids: list[int] | None = None
    multimodal_params: object | None = None
    encoder_input_token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class ApiTraits:
    """The types and shapes of one version.

    With `polled_by_call` a poll is a call to the engine's process, else it reads a queue, in which KV
    events come in lists (`polls`). `newest_events` adds keys to events, `counts_kv_tokens` to iteration
    stats those of TensorRT-LLM's pull request #13199.
    Of attention-DP ranks only the first has rows, or with `copies_rows` each has one, which is the first's
    but for its batch, or, with `gathers_rows` and TLLM_METRICS_ALL_RANKS=1, its own. `counts_host_blocks`
    has the host's blocks among `kvCacheStats`, `stats_by_window` adds those of the GPU by attention window,
    `reports_first` a row before any request; `sim/stats.py` has the sources.
    `event_serializer` makes the dicts of KV events. `overlong_error` is raised for a prompt above
    `max_num_tokens` without chunked prefill.
    With `dies_of_overlap` a context_only request ends an engine whose overlap scheduler is on.
    Of the death of the engine's process an engine with `flags_death` has a flag and a health check, and one
    with `tells_death` raises `EngineDeadError`; `SimExecutor` says what the others do.

    With `ends_apart` each output has its reason when it ends. Before, only the output that ends last has
    one, and only that one's stop is cut off: executor/result.py @a678b91a, `_handle_sequence` under
    `if self._done`; @123741b1 `sequence_is_finished`. A stop text found in an output's text ends the whole
    result; only without `ends_apart` it also aborts the request (same files, `_handle_response`).
    `ignores_stops`: `ignore_eos` has the executor drop stop words as well, which leaves the search in the
    text: executor/base_worker.py of 1.3 candidates (fork ai-blaise @0ae93999), not @7b437aaa.
    With `min_counts_prompt` the prompt's tokens count towards `min_tokens`, until pull request #12166.
    """

    version: str
    sampling_params: type[SamplingParams12]
    disaggregated_params: type[DisaggregatedParams12]
    scheduling_params: type[SchedulingParams12]
    overlong_error: type[Exception]
    polled_by_call: bool
    newest_events: bool
    event_serializer: type[KVCacheEventSerializer12]
    counts_kv_tokens: bool
    copies_rows: bool
    gathers_rows: bool
    counts_host_blocks: bool
    stats_by_window: bool
    reports_first: bool
    dies_of_overlap: bool
    flags_death: bool
    tells_death: bool
    ends_apart: bool
    ignores_stops: bool
    min_counts_prompt: bool
