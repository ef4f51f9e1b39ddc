"""A request's options of sampling, stopping, response and guided decoding, as the engine takes them.

An engine may die of a value that it does not check, so values out of range are refused here. Two are
reduced instead: a token budget over the room in the context window, and a minimum over the budget, as the
answer ends there anyway. Defaults are those of TensorRT-LLM's own OpenEngine server, not of
`SamplingParams`.
"""

import json
import re
from typing import Any, NamedTuple

from slagate.proto import openengine_pb2 as oe
from slagate.workers.errors import invalid, unsupported
from slagate.workers.sampling_limits import SamplingFault, sampling_fault, stopping_fault
from slagate.workers.trtllm.engine import Engine, setting
from slagate.workers.trtllm.output import MAX_PROMPT_ENTRIES, HiddenStop, OutputForm, StopRule

MAX_STOP_TEXT_BYTES = 1024
"""Of one stop text, in UTF-8: the engine searches for each of them in all that it generates."""

MAX_TOP_N = 20
"""Candidates for each token: as many as public APIs allow. They bound a token's size on the wire."""

MAX_SEQUENCES = 2048
"""Of one request, for an engine that does not say its batch size: TensorRT-LLM's default of that."""

NO_END = -1
"""An `end_id` that no token is."""

UINT32_MAX = 0xFFFFFFFF
INT32_MAX = 0x7FFFFFFF


MAX_GUIDE_BYTES = 256 << 10
"""While the back-end compiles a guide, the engine's next step waits, with all its requests."""

_GUIDES = {
    "json_schema": oe.GUIDED_DECODING_MODE_JSON_SCHEMA,
    "regex": oe.GUIDED_DECODING_MODE_REGEX,
    "ebnf_grammar": oe.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
    "structural_tag": oe.GUIDED_DECODING_MODE_STRUCTURAL_TAG,
    "choice": oe.GUIDED_DECODING_MODE_CHOICE,
    "json_object": oe.GUIDED_DECODING_MODE_JSON_OBJECT,
}

_NOT_OF = {"llguidance": {"structural_tag"}, "xgrammar": set[str]()}
"""Guides that a back-end lacks. TensorRT-LLM has no choice guide: it is made a regular expression."""


class Stops(NamedTuple):
    """What ends an answer besides its budget and the end of text."""

    texts: tuple[str, ...]
    token_ids: tuple[int, ...]
    rules: tuple[StopRule, ...] = ()  # of all of them
    hidden: tuple[HiddenStop, ...] = ()  # those that the answer must not show: all, or none


def _refuse(fault: SamplingFault | None) -> None:
    if fault is not None:
        raise invalid(fault.field, fault.reason)


def max_sequences(engine: Engine, *, hands_off: bool) -> int:
    """The most outputs of one request; a handoff has only one sequence."""
    return 1 if hands_off else engine.max_batch_size or MAX_SEQUENCES


def output_form(
    request: oe.GenerateRequest, engine: Engine, stops: Stops, *, kind: str, end_id: int
) -> OutputForm:
    """What the answer has to contain. Raises `RequestRefused` naming the field.

    `end_id` is the end of text.

    The prompt may have `MAX_PROMPT_ENTRIES` log probabilities: of each token its own and its candidates'.
    """
    hands_off = kind != "context_and_generation"
    n_outputs = _n_outputs(request, max_sequences(engine, hands_off=hands_off), hands_off=hands_off)
    response = request.response
    if response.prompt_logprob_start:
        raise unsupported("response.prompt_logprob_start", "only 0 is supported")
    logprobs = _top_n(request, "output") if response.return_output_logprobs else None
    prompt_logprobs = _top_n(request, "prompt") if response.return_prompt_logprobs else None
    if logprobs is not None and hands_off and not engine.hands_off_logprobs:
        # A decode leg would end in an assertion of the engine's.
        reason = "this engine hands over no log probabilities of the first token"
        raise unsupported("response.return_output_logprobs", reason)
    if kind == "generation_only":
        # The prefill worker's answer had the log probabilities of the prompt.
        prompt_logprobs = None
    if prompt_logprobs is not None:
        n_entries = len(request.token_ids.ids) * (prompt_logprobs + 1)
        if n_entries > MAX_PROMPT_ENTRIES:
            raise invalid(
                "response.prompt_candidates",
                f"{n_entries} log probabilities of the prompt are over {MAX_PROMPT_ENTRIES}",
            )
    has_text = _wants_text(request, engine)
    return OutputForm(
        n_outputs=n_outputs,
        top_n=logprobs,
        prompt_top_n=prompt_logprobs,
        has_text=has_text,
        decode=engine.text_of if has_text else None,
        hidden_stops=stops.hidden,
        stops=stops.rules,
        end_id=None if request.stopping.ignore_eos else end_id,
        min_tokens=request.stopping.min_tokens,
    )


def sampling_values(
    request: oe.GenerateRequest,
    form: OutputForm,
    stops: Stops,
    *,
    end_id: int | None,
    pad_id: int,
    room: int | None,
) -> dict[str, Any]:
    """Arguments of `SamplingParams`. Raises `RequestRefused` naming the field.

    `room` is the number of tokens that the prompt leaves in the context window; None: the engine knows it.
    Without `end_id` the engine ends a text at the tokens that its tokenizer and its model name. Engines
    since 1.3 drop stops with `ignore_eos`, so with stops they are given an end that no token is instead,
    which is what they make of `ignore_eos` themselves.
    """
    stopping, sampling = request.stopping, request.sampling
    # A budget above the room is reduced, as the engine does, too: the answer then ends by length.
    most = INT32_MAX if room is None else room
    max_tokens = min(stopping.max_tokens, most) if stopping.HasField("max_tokens") else room
    if max_tokens == 0:
        raise invalid("stopping.max_tokens", "must be at least 1")
    has_stops = bool(stops.texts or stops.token_ids)
    if has_stops and stopping.ignore_eos:
        end_id = NO_END
    values: dict[str, Any] = {
        "end_id": end_id,
        "pad_id": pad_id if end_id == NO_END else None,
        "max_tokens": max_tokens,
        # The budget is below 2**31, which the engine's native code needs of the minimum, too.
        "min_tokens": min(stopping.min_tokens, most if max_tokens is None else max_tokens)
        if stopping.HasField("min_tokens")
        else None,
        "stop": list(stops.texts) or None,
        "stop_token_ids": list(stops.token_ids) or None,
        "include_stop_str_in_output": stopping.include_stop_in_output,
        "ignore_eos": stopping.ignore_eos and not has_stops,
        "detokenize": form.has_text,
        "n": form.n_outputs,
        "best_of": form.n_outputs,
        # With 0 an engine may leave out the chosen token's own, so it is asked for 1.
        "logprobs": None if form.top_n is None else max(1, form.top_n),
        "prompt_logprobs": None if form.prompt_top_n is None else max(1, form.prompt_top_n),
        **_checked_sampling(sampling),
    }
    if form.n_outputs > 1 and (values["temperature"] == 0 or values["top_k"] == 1):
        raise invalid("sampling.num_sequences", "greedy sampling gives one sequence")
    return values


def _checked_sampling(sampling: oe.SamplingParams) -> dict[str, Any]:
    """The sampling options that are set, checked, and defaults for those that the engine always gets."""
    _refuse(sampling_fault(sampling))
    values: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    for field in (
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "seed",
    ):  # fmt: skip
        if sampling.HasField(field):
            values[field] = getattr(sampling, field)
    values["top_k"] = max(values["top_k"], 0)  # -1 is "off", which TensorRT-LLM calls 0
    return values


def check_vocabulary(field: str, ids: list[int], *, vocab_size: int | None) -> None:
    """Raises `RequestRefused` for ids outside the vocabulary, where its size is known."""
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
    """The number of candidates for each token of `which`, "prompt" or "output"."""
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


def parse_stops(request: oe.GenerateRequest, engine: Engine, *, vocab_size: int | None) -> Stops:
    """The stop conditions. Raises `RequestRefused` naming the field.

    Refused are too many of them, a text that is empty or too long, and any text without a tokenizer.
    """
    field, stopping = "stopping.conditions", request.stopping
    _refuse(stopping_fault(stopping))
    texts, token_ids = [], []
    for condition in stopping.conditions:
        if condition.WhichOneof("condition") == "stop_token_id":
            token_ids.append(condition.stop_token_id)
        elif not condition.stop_text:
            raise invalid(field, "one is empty")
        elif engine.tokenizer is None:
            raise unsupported(field, "stop_text needs a tokenizer on the worker")
        elif len(condition.stop_text.encode()) > MAX_STOP_TEXT_BYTES:
            raise invalid(field, f"a stop_text has over {MAX_STOP_TEXT_BYTES} bytes")
        else:
            texts.append(condition.stop_text)
    check_vocabulary(field, token_ids, vocab_size=vocab_size)
    rules = [StopRule(text, engine.stop_tokens(text)) for text in texts]
    rules += [StopRule(token, (token,)) for token in token_ids]
    hidden: list[HiddenStop] = []
    if not stopping.include_stop_in_output:
        hidden = [HiddenStop(c if isinstance(c, str) else "", tokens) for c, tokens in rules]
    return Stops(tuple(texts), tuple(token_ids), tuple(rules), tuple(hidden))


def guides_of(engine: Engine) -> dict[str, oe.GuidedDecodingMode.ValueType]:
    """The guides that requests may have; none for an engine without a back-end."""
    backend = setting(engine.llm.args, "guided_decoding_backend")
    if backend not in _NOT_OF or getattr(engine.api, "GuidedDecodingParams", None) is None:
        return {}
    return {name: mode for name, mode in _GUIDES.items() if name not in _NOT_OF[backend]}


def capabilities(engine: Engine) -> oe.GuidedDecodingCapabilities:
    """What `GetModelInfo` says of guided decoding."""
    guides = guides_of(engine)
    return oe.GuidedDecodingCapabilities(supported=bool(guides), modes=list(guides.values()))


def guided_params(request: oe.GenerateRequest, engine: Engine) -> Any | None:
    """`GuidedDecodingParams` of a request, if it has a guide. Raises `RequestRefused` naming the field."""
    if not request.HasField("guided"):
        return None
    guides, guided = guides_of(engine), request.guided
    if not guides:
        raise unsupported("guided", "this worker has no guided decoding back-end")
    if guided.backend:
        raise unsupported("guided.backend", "the engine has one for all requests")
    guide = guided.WhichOneof("guide")
    if guide is None:
        raise invalid("guided", "has no guide")
    if guide not in guides:
        raise unsupported(f"guided.{guide}", "is not one that this worker's back-end has")
    if guided.ByteSize() > MAX_GUIDE_BYTES:
        raise invalid(f"guided.{guide}", f"is over the limit of {MAX_GUIDE_BYTES} bytes")
    try:
        return engine.api.GuidedDecodingParams(**_values(guide, guided))  # type: ignore[attr-defined]
    except ValueError as error:
        raise invalid(f"guided.{guide}", str(error)) from error


def _values(guide: str, guided: oe.GuidedDecoding) -> dict[str, Any]:
    if guide == "json_object":
        return {"json_object": True}
    if guide == "choice":
        choices = list(guided.choice.choices)
        if not choices or "" in choices:
            raise invalid("guided.choice", "must have choices, none of them empty")
        return {"regex": f"({'|'.join(map(re.escape, choices))})"}
    text = getattr(guided, guide)
    if not text:
        raise invalid(f"guided.{guide}", "must not be empty")
    if guide in ("json_schema", "structural_tag"):
        _check_json(guide, text)
    names = {"json_schema": "json", "ebnf_grammar": "grammar"}
    return {names.get(guide, guide): text}


def _check_json(guide: str, text: str) -> None:
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise invalid(f"guided.{guide}", "is not a JSON object")
