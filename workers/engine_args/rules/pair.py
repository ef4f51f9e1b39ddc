"""Rules of a pairing: a prefill engine that hands KV caches over to a decode engine.

What the C++ transceiver refuses: `inquireSupport` in cacheFormatter.cpp and mlaCacheFormatter.cpp, ids
514643735 and 56727280810, and UcxConnectionManager, id 66492168387. The rest is good sense, and warnings.
"""

from collections.abc import Callable, Iterator

from slagate.workers.engine_args.model.merge import in_brief
from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.engine_args.rules.disagg import (
    BUFFER,
    SECTION,
    SMALL_BUFFER_TOKENS,
    small_buffer,
)
from slagate.workers.engine_args.rules.rule import value_at
from slagate.workers.findings import Finding, error, note, warning

Put = Callable[[str, str, str, str], Finding]
CACHE, BACKEND, RUNTIME = "kv_cache_config", f"{SECTION}.backend", f"{SECTION}.transceiver_runtime"
DRAFTING = "speculative_config"
_UNREADABLE = "which then cannot read the KV"
_NO_TALK = "which then do not understand each other"

_EQUAL = (
    ("E301", "dtype", error, _UNREADABLE),
    ("E301", f"{CACHE}.dtype", error, _UNREADABLE),
    ("E302", "model", warning, _UNREADABLE),
    ("E303", f"{CACHE}.tokens_per_block", error, _UNREADABLE),
    ("E305", BACKEND, error, _NO_TALK),
    ("E305", RUNTIME, error, _NO_TALK),
    ("E306", f"{CACHE}.max_attention_window", warning, "and windows decide which KV a layer has"),
    ("E310", f"{CACHE}.use_kv_cache_manager_v2", error, _NO_TALK),
)


def check_equal(prefill: EngineCase, decode: EngineCase) -> Iterator[Finding]:
    """Yields E301 to E303, E305, E306 or E310 for each value that should be equal on both and is not.

    It is a warning where one says auto, which is for the model to say, but for the type of the KV cache.
    """
    for code, key, put, so in _EQUAL:
        left, right = _value(prefill, key), _value(decode, key)
        is_given = None not in (left, right) or code == "E306"
        if left == right or not is_given:
            continue
        if code == "E303" and "PYTHON" in (prefill.runtime, decode.runtime):
            put = warning
        if "auto" in (left, right) and key != f"{CACHE}.dtype":
            put, so = warning, "and what auto comes to the model says"
        yield _differ(code, key, put, left, right, so)


def check_limits(prefill: EngineCase, decode: EngineCase) -> Iterator[Finding]:
    """Yields E203, E304 or E309 for buffers, E308 for a context that decode has less of."""
    sizes = _buffer(prefill), _buffer(decode)
    longest, least = prefill.longest_prompt_tokens, min(filter(None, sizes), default=None)
    # Prefill takes no longer prompts than its own buffer has; a smaller one is told of decode alone.
    if longest and sizes[1] and not decode.wanted.longest_prompt_tokens:
        longest = min(longest, sizes[0] or longest)
        if SMALL_BUFFER_TOKENS <= sizes[1] < longest:
            yield small_buffer(decode, sizes[1], longest)
    shapes = f"{_shape(prefill)} on prefill and {_shape(decode)} on decode"
    is_unequal = prefill.args.parallelism != decode.args.parallelism
    if is_unequal and least and least < SMALL_BUFFER_TOKENS:
        text = f"is {least:,} with {shapes}: a prompt that does not fit goes in pieces, which takes equal "
        text += "bytes on both sides for granted (pull request #9782)"
        advice = f"set it to the longest prompt, {SMALL_BUFFER_TOKENS} at least"
        yield warning("E304", BUFFER, text, f"{advice}, or use equal parallelism")
    elif is_unequal and sizes[0] != sizes[1]:
        yield _differ("E309", BUFFER, note, sizes[0], sizes[1], f"with {shapes}")
    one, other = prefill.args.max_seq_len, decode.args.max_seq_len
    if one is not None and other is not None and other < one:
        text = f"is {one:,} on prefill and {other:,} on decode, which has to hold the answer too"
        yield warning("E308", "max_seq_len", text, f"set decode's to {one} and the longest answer")


def check_drafting(prefill: EngineCase, decode: EngineCase) -> Iterator[Finding]:
    """Yields E307 for different drafting, whose layers' KV the C++ transceiver moves with the model's."""
    if "PYTHON" in (prefill.runtime, decode.runtime):
        return
    kinds = [case.draft_kind.replace("Eagle3", "Eagle") or None for case in (prefill, decode)]
    models = [case.drafting and case.drafting.speculative_model for case in (prefill, decode)]
    if kinds[0] != kinds[1]:
        so = "and the C++ transceiver moves the draft's KV with the model's"
        yield _differ("E307", DRAFTING, warning, kinds[0], kinds[1], so)
    elif None not in models and models[0] != models[1]:
        name = f"{DRAFTING}.speculative_model"
        yield _differ("E307", name, warning, models[0], models[1], _UNREADABLE)


def _buffer(case: EngineCase) -> int | None:
    """The size of the C++ transceiver's buffer; None where it is not given, or there is none."""
    section = case.transceiver
    return section.max_tokens_in_buffer if section and case.runtime != "PYTHON" else None


def _value(case: EngineCase, key: str) -> object:
    if key in (BACKEND, RUNTIME):
        return case.transport if key == BACKEND else case.runtime
    return value_at(case, key)


def _differ(code: str, key: str, put: Put, left: object, right: object, so: str) -> Finding:
    shown = ["unset" if value is None else in_brief(value).strip('"') for value in (left, right)]
    text = f"is {shown[0]} on prefill and {shown[1]} on decode, {so}"
    return put(code, key, text, "use the same on both")


def _shape(case: EngineCase) -> str:
    tp, pp, cp, is_dp = case.args.parallelism
    further = "".join(f" {name}{size}" for name, size in (("PP", pp), ("CP", cp)) if size > 1)
    return f"TP{tp}{further}{' attention DP' if is_dp else ''}"
