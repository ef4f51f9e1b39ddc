"""Checks of a request to the simulated engine: its prompt, its parameters, its size.

TensorRT-LLM raises some errors out of `generate_async`. Others its executor process finds later, and they
come while the result is iterated. Some of these its process does not survive. `checked_request` raises the
first kind, `enqueue_problem` names the second, `fatal_problem` makes the third.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from slagate.workers.sim.args import SimSettings, TorchLlmArgs
from slagate.workers.sim.handoff import is_well_formed
from slagate.workers.sim.kv_cache.blocks import (
    AnswerLength,
    CachePrompt,
    block_states,
    seed_state,
    token_bytes,
)
from slagate.workers.sim.outputs import RequestOutput, SimOutputForm
from slagate.workers.sim.request import (
    ApiTraits,
    DisaggregatedParams12,
    PreprocessedInputs,
    SamplingParams12,
    SimLogitsProcessor,
)
from slagate.workers.sim.sampling import LogprobMaker, StopRules, StopWord
from slagate.workers.sim.sequence import SimSequence
from slagate.workers.sim.tokenizer import SimTokenizer

log = logging.getLogger(__name__)

_MEDIA = ("multi_modal_data", "multi_modal_embeddings")


class PromptTokens(NamedTuple):
    """A prompt as a list and packed as uint32; `text` is None unless it was given."""

    tokens: list[int]
    packed: bytes
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """The arguments of one `generate_async`, not checked yet."""

    inputs: Any
    sampling_params: Any = None
    lora_request: object | None = None
    streaming: bool = False
    disaggregated_params: Any = None
    scheduling_params: Any = None
    cache_salt: str | None = None
    priority: float | None = None


@dataclass(frozen=True, slots=True)
class RequestChecker:
    """Checks requests against the engine's arguments and the version's types."""

    args: TorchLlmArgs
    settings: SimSettings
    traits: ApiTraits
    tokenizer: SimTokenizer | None
    max_seq_len: int
    capacity_tokens: int  # of one rank's KV cache
    generation_config: object = None

    def checked_request(self, request_id: int, call: Submission) -> list[SimSequence]:
        """A request's sequences, one per output, with `max_tokens` cut to the context window.

        Raises `TypeError` or `ValueError`, the version's error for a prompt that is too long, and
        `NotImplementedError` for what is not simulated.
        """
        sampling = self._sampling(call)
        params = call.disaggregated_params
        kind = self._request_type(params)
        prompt = self.prompt_of(call.inputs, pulls=kind == "generation_only")
        n_prompt, limit = len(prompt.tokens), self.args.max_num_tokens
        chunked = self.args.enable_chunked_prefill or kind == "generation_only"
        if n_prompt > limit and not chunked:
            raise self.traits.overlong_error(
                f"prompt of {n_prompt} tokens is above max_num_tokens {limit}; "
                "enable_chunked_prefill would allow it"
            )
        n_sequences = sampling.best_of or 1
        if n_sequences > self.args.max_batch_size:
            raise ValueError(
                f"n: {n_sequences} sequences are above max_batch_size {self.args.max_batch_size}"
            )
        if kind != "context_and_generation" and n_sequences > 1:
            raise ValueError("n must be 1 for a disaggregated request")
        if kind == "context_only":
            sampling.max_tokens = 1
        seed = seed_state(self.args.model, call.cache_salt or "")
        block_tokens = self.args.kv_cache_config.tokens_per_block
        states = block_states(prompt.packed, seed, block_tokens)
        result = RequestOutput(
            request_id,
            prompt.tokens,
            sampling_params=sampling,
            form=self._form(sampling, prompt, seed, streaming=call.streaming),
            prompt=prompt.text,
            disaggregated_params=params,
        )
        room = self.max_seq_len - n_prompt
        max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
        if max_tokens > room > 0:
            log.warning("request.max_tokens_cut", extra={"max_tokens": max_tokens, "room": room})
        scheduling = call.scheduling_params
        first = SimSequence(
            feed=result.feeds[0],
            prompt=CachePrompt(seed, states, prompt.packed, call.cache_salt or ""),
            n_prompt=n_prompt,
            max_tokens=min(max_tokens, room),
            stop=self._stop_rules(sampling, kind, n_prompt),
            request_type=kind,
            params=params,
            rank_wanted=None if scheduling is None else scheduling.attention_dp_rank,
            rank_strict=scheduling is not None and scheduling.attention_dp_relax is False,
            processors=_processors(sampling),
            answer=self._answer(prompt, sampling),
        )
        others = [
            replace(first, feed=feed, branch=feed.index, first=first, generated=[])
            for feed in result.feeds[1:]
        ]
        return [first, *others]

    def _answer(self, prompt: PromptTokens, sampling: SamplingParams12) -> AnswerLength | None:
        answer_tokens = self.settings.conditions.answer_tokens
        if answer_tokens is None or sampling.end_id is None:
            return None
        return AnswerLength(answer_tokens(prompt.packed), sampling.end_id)

    def prompt_of(self, inputs: Any, *, pulls: bool = False) -> PromptTokens:
        """Reads text, token ids (also as an int32 array), a dict of either, or preprocessed inputs.

        `pulls` is true for a request whose prompt comes from another worker. Raises `TypeError`,
        `ValueError`, or `NotImplementedError` for media, which this engine does not have.
        """
        if isinstance(inputs, PreprocessedInputs):
            inputs = inputs.prompt_token_ids
        text = None
        if isinstance(inputs, dict):
            _check_media(inputs, pulls=pulls)
            text = inputs.get("prompt")
            inputs = inputs.get("prompt_token_ids", text)
        if isinstance(inputs, str):
            if self.tokenizer is None:
                raise ValueError("text prompts need a tokenizer; give prompt_token_ids")
            text, inputs = inputs, self.tokenizer.encode(inputs)
        # An int32 array, as newer TensorRT-LLM takes. Bytes must not pass as a list of ints.
        if hasattr(inputs, "tolist"):
            inputs = inputs.tolist()
        if not isinstance(inputs, list):
            raise TypeError(
                f"inputs must be text, token ids or a dict, not {type(inputs).__name__}"
            )
        if not inputs:
            raise ValueError("prompt_token_ids is empty")
        packed = token_bytes(inputs)
        largest = int(np.frombuffer(packed, "<u4").max())
        if largest >= self.settings.vocab_size:
            raise ValueError(f"prompt_token_ids: {largest} is outside the vocabulary")
        return PromptTokens(inputs, packed, text)

    def _sampling(self, call: Submission) -> SamplingParams12:
        """The caller's sampling parameters, which are changed: with the tokenizer's end and stop words.

        TensorRT-LLM changes the caller's object, too: llm.py id 55216765702, `_prepare_sampling_params`.
        """
        types, sampling = self.traits, call.sampling_params
        if sampling is None:
            sampling = types.sampling_params()
        _check_type("sampling_params", sampling, types.sampling_params)
        if call.scheduling_params is not None:
            _check_type("scheduling_params", call.scheduling_params, types.scheduling_params)
        if call.priority is not None and not 0.0 <= call.priority <= 1.0:
            raise ValueError(f"priority must be in [0, 1], got {call.priority}")
        for name, asked in {
            "guided_decoding": sampling.guided_decoding,
            "lora_request": call.lora_request,
            "apply_batched_logits_processor": sampling.apply_batched_logits_processor or None,
        }.items():
            if asked is not None:
                raise NotImplementedError(f"{name} is not simulated")
        if sampling.end_id is None:
            if self.tokenizer is None:
                raise ValueError("end_id is needed: the tokenizer is not initialised")
            sampling._setup(self.tokenizer, None, self.generation_config)
        checked: SamplingParams12 = sampling
        return checked

    def _request_type(self, params: Any) -> str:
        """The phase asked for.

        Without `disaggregated_params` it is `context_and_generation`, which an engine of any role computes
        whole, also beside handed-over requests: a role is no more than what requests are sent (TensorRT-LLM
        executor/base_worker.py @000bd1a6 `_enqueue_request`). Dynamo has decode workers serve requests so
        (its TensorRT-LLM handler_base.py id 66983218988, `_setup_disaggregated_params_for_mode`).
        """
        if params is None:
            return "context_and_generation"
        _check_type("disaggregated_params", params, self.traits.disaggregated_params)
        if params.request_type is None:
            raise ValueError("disaggregated_params.request_type is missing")
        if params.request_type == "generation_only":
            _check_handoff(params)
        return str(params.request_type)

    def _form(
        self, sampling: SamplingParams12, prompt: PromptTokens, seed: bytes, *, streaming: bool
    ) -> SimOutputForm:
        prompt_logprobs: list[Any] = []
        if (maker := self._maker(sampling, "prompt_logprobs")) is not None:
            block_tokens = self.args.kv_cache_config.tokens_per_block
            prompt_logprobs = maker.of_prompt(prompt.tokens, seed=seed, block_tokens=block_tokens)
        return SimOutputForm(
            streaming=streaming,
            stream_interval=self.args.stream_interval,
            tokenizer=self.tokenizer if sampling.detokenize else None,
            logprobs=self._maker(sampling, "logprobs"),
            prompt_logprobs=tuple(prompt_logprobs),
            perf_metrics=sampling.return_perf_metrics or self.args.return_perf_metrics,
            ends_apart=self.traits.ends_apart,
        )

    def _maker(self, sampling: SamplingParams12, name: str) -> LogprobMaker | None:
        """The maker of the log probabilities that field `name` asks for; None where it asks for none."""
        n_top = getattr(sampling, name)
        if n_top is None:
            return None
        simple = getattr(sampling, f"{name}_simple_format", False)
        form = "flat" if simple else self.settings.logprob_form
        return LogprobMaker(n_top, form, self.settings.vocab_size)

    def _stop_rules(self, sampling: SamplingParams12, kind: str, n_prompt: int) -> StopRules:
        """What the executor checks; no stop words where these cannot be told: `enqueue_problem` says so."""
        end_id = None if sampling.ignore_eos else sampling.end_id
        words: list[StopWord] = []
        if self._reads_stops(sampling) and not _stop_word_problem(sampling):
            given = sampling._get_stop_reasons_and_words()
            words = [StopWord(cause, tuple(tokens)) for cause, tokens in given]
        if kind == "context_only" and self.settings.handoff_on_stop:
            end_id, words = None, []
        return StopRules(
            end_id=end_id,
            stop_words=words,
            min_tokens=(sampling.min_tokens or 0) - n_prompt * self.traits.min_counts_prompt,
            include_stop=sampling.include_stop_str_in_output,
        )

    def fatal_problem(self, sequence: SimSequence) -> Exception | None:
        """What ends the engine's process when it takes a request, given its first sequence; else None.

        TensorRT-LLM executor/base_worker.py @7b437aaa and @0ae93999, `_enqueue_request`: the assertion of a
        transceiver, the overlap scheduler's ValueError (1.1 and 1.2 only) and
        `get_context_phase_params()` stand before its `try`, and `worker_main` catches `RequestError` only.
        The binding raises TypeError for a missing id, RuntimeError for bytes that it cannot read
        (contextPhaseParams.cpp id 200485786, serializeUtils.h id 814487773); empty bytes pass. A rank that
        is not there is an IndexError in the executor's loop (adp_router id 56141410210).
        """
        kind, params = sequence.request_type, sequence.params
        n_ranks, rank = self.args.attention_dp_size, sequence.rank_wanted
        if self.args.enable_attention_dp and rank is not None and not 0 <= rank < n_ranks:
            return IndexError(f"attention_dp_rank {rank} is not one of {n_ranks} ranks")
        if kind == "context_and_generation":
            return None
        if not self.args.has_transceiver:
            return AssertionError("disaggregated requests need cache_transceiver_config")
        if kind == "context_only":
            overlaps = not self.args.disable_overlap_scheduler
            if overlaps and self.traits.dies_of_overlap:
                return ValueError("context_only requests need disable_overlap_scheduler")
            return None
        assert params is not None
        if params.ctx_request_id is None and getattr(params, "disagg_request_id", None) is None:
            return TypeError("incompatible arguments: the request id is None")
        if params.opaque_state and not is_well_formed(params.opaque_state):
            return RuntimeError("opaque_state cannot be read")
        return None

    def _reads_stops(self, sampling: SamplingParams12) -> bool:
        """Whether the executor asks for the stop words."""
        return not (sampling.ignore_eos and self.traits.ignores_stops)

    def enqueue_problem(self, sequence: SimSequence) -> str | None:
        """Why the executor refuses a request, of which this is the first sequence; None if it does not."""
        config = self.args.kv_cache_config
        sampling = sequence.feed.result.sampling_params
        if self._reads_stops(sampling) and (problem := _stop_word_problem(sampling)):
            return problem
        if sequence.n_prompt >= self.max_seq_len:
            return (
                f"prompt of {sequence.n_prompt} tokens does not fit max_seq_len {self.max_seq_len}"
            )
        if sequence.max_tokens <= 0:
            return f"max_tokens must be > 0, got {sequence.max_tokens}"
        if sampling.use_beam_search and (sampling.best_of or 1) > self.args.max_beam_width:
            return f"beam width {sampling.best_of} is above max_beam_width"
        n_tokens = sequence.n_prompt + sequence.max_tokens - 1
        if n_tokens > self.capacity_tokens:
            return (
                f"{n_tokens} tokens never fit a KV cache of {self.capacity_tokens} tokens "
                f"({config.tokens_per_block} a block)"
            )
        return None


def _stop_word_problem(sampling: SamplingParams12) -> str:
    """Why the stop words cannot be told; "" where they can.

    TensorRT-LLM asks for them inside the try block of its executor's submission, so the error is the
    request's: executor/base_worker.py @7b437aaa, `_enqueue_request`.
    """
    try:
        sampling._get_stop_words()
    except RuntimeError as error:
        return str(error)
    return ""


def _check_media(inputs: dict[str, Any], *, pulls: bool) -> None:
    if "mm_processor_kwargs" in inputs and not isinstance(inputs["mm_processor_kwargs"], dict):
        raise TypeError("mm_processor_kwargs must be a dict")
    for name in _MEDIA:
        if inputs.get(name):
            if pulls:
                raise ValueError(f"{name} must not come with a generation_only request")
            raise NotImplementedError(f"{name} is not simulated")


def _check_type(name: str, value: object, wanted: type) -> None:
    # Another version's type is a subclass or a base of the right one.
    if type(value) is not wanted:
        raise TypeError(f"{name} must be {wanted.__name__}, not {type(value).__name__}")


def _processors(sampling: SamplingParams12) -> tuple[SimLogitsProcessor, ...]:
    given: Any = sampling.logits_processor
    if given is None:
        return ()
    listed = given if isinstance(given, list) else [given]
    for one in listed:
        if not isinstance(one, SimLogitsProcessor):
            raise TypeError(f"logits_processor must be LogitsProcessor, not {type(one).__name__}")
    return tuple(listed)


def _check_handoff(params: DisaggregatedParams12) -> None:
    if params.multimodal_embedding_handles is not None:
        raise ValueError("generation_only must not have multimodal_embedding_handles")
