"""Rules of a pairing: a prefill engine that hands KV caches over to a decode engine."""

from collections.abc import Iterator

from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.engine_args.rules.disagg import (
    BUFFER,
    SAY_LONGEST,
    SECTION,
    SMALL_BUFFER_TOKENS,
    check_transfer_buffer,
)
from slagate.workers.findings import Finding, error, warning

_NO_TALK = "which then do not understand each other"


def check_kv_layout(prefill: EngineCase, decode: EngineCase) -> Iterator[Finding]:
    """Yields E301, E303 or E306 for different layouts of the KV cache, E302 for two models."""
    one, other = prefill.args.kv_cache_config, decode.args.kv_cache_config
    for code, key, left, right in (
        ("E301", "dtype", prefill.args.dtype, decode.args.dtype),
        ("E301", "kv_cache_config.dtype", one.dtype, other.dtype),
        ("E303", "kv_cache_config.tokens_per_block", one.tokens_per_block, other.tokens_per_block),
        (
            "E306",
            "kv_cache_config.max_attention_window",
            one.max_attention_window,
            other.max_attention_window,
        ),
    ):
        if left != right:
            yield _differ(code, key, left, right)
    models = prefill.args.model, decode.args.model
    if None not in models and models[0] != models[1]:
        yield _differ("E302", "model", *models)


def check_transports(prefill: EngineCase, decode: EngineCase) -> Iterator[Finding]:
    """Yields E305 if the two transceivers have different back-ends or runtimes; null is the C++ one."""
    one, other = prefill.args.cache_transceiver_config, decode.args.cache_transceiver_config
    if one is None or other is None:
        return  # E201 says that
    # DEFAULT is NIXL, under another name.
    names = [
        section.backend.replace("DEFAULT", "NIXL") if section.backend else None
        for section in (one, other)
    ]
    if None not in names and names[0] != names[1]:
        yield _differ("E305", f"{SECTION}.backend", one.backend, other.backend, so=_NO_TALK)
    runtimes = [section.transceiver_runtime or "CPP" for section in (one, other)]
    yield from _chosen_differently("E305", f"{SECTION}.transceiver_runtime", *runtimes)


def check_cache_kinds(prefill: EngineCase, decode: EngineCase) -> Iterator[Finding]:
    """Yields E310 if the two engines have, or may have, different KV cache managers."""
    used = [
        str(case.args.kv_cache_config.use_kv_cache_manager_v2).lower() for case in (prefill, decode)
    ]
    yield from _chosen_differently("E310", "kv_cache_config.use_kv_cache_manager_v2", *used)


def check_longest_prompt(prefill: EngineCase, decode: EngineCase) -> Iterator[Finding]:
    """Yields E203 if prefill takes longer prompts than fit into decode's transfer buffer."""
    section = decode.args.cache_transceiver_config
    buffer = None if section is None else section.max_tokens_in_buffer
    longest = prefill.longest_prompt_tokens
    if buffer is None or longest is None or buffer >= longest:
        return
    if any(finding.code == "E203" for finding in check_transfer_buffer(decode)):
        return  # decode's own finding says it
    yield warning(
        "E203",
        BUFFER,
        f"is {buffer:,} on decode, and prefill takes prompts of {longest:,} tokens: decode waits for "
        "ever for one that does not fit, so slagate refuses it",
        f"set decode's to {decode.args.up_to_blocks(longest)}, or, if prompts are shorter, say so: "
        f"{SAY_LONGEST}",
    )


def check_buffers(prefill: EngineCase, decode: EngineCase) -> Iterator[Finding]:
    """Yields E304 or E309 for small or unequal buffers between unequal parallelism."""
    if prefill.args.parallelism == decode.args.parallelism:
        return
    sizes = [
        section.max_tokens_in_buffer
        for case in (prefill, decode)
        if (section := case.args.cache_transceiver_config) is not None
    ]
    known = [size for size in sizes if size is not None]
    shapes = f"{_shape(prefill)} on prefill and {_shape(decode)} on decode"
    if known and min(known) < SMALL_BUFFER_TOKENS:
        yield error(
            "E304",
            BUFFER,
            f"is {min(known):,} with {shapes}: a prompt that does not fit goes in pieces, which "
            "takes equal bytes on both sides for granted",
            f"set it to the longest prompt, {SMALL_BUFFER_TOKENS} at least, or use equal parallelism",
        )
    elif len(set(sizes)) > 1:
        yield warning(
            "E309",
            BUFFER,
            f"is {_or_unset(sizes[0])} on prefill and {_or_unset(sizes[1])} on decode, with {shapes}",
            "use one value on both",
        )


def check_drafting(prefill: EngineCase, decode: EngineCase) -> Iterator[Finding]:
    """Yields E307 for different drafting: the draft's layers are in the KV cache that moves."""
    one, other = prefill.args.speculative_config, decode.args.speculative_config
    kinds = [section.decoding_type if section else None for section in (one, other)]
    same = kinds[0] == kinds[1] or set(kinds) == {"Eagle", "Eagle3"}
    if not same:
        yield error(
            "E307",
            "speculative_config",
            f"is {kinds[0] or 'not there'} on prefill and {kinds[1] or 'not there'} on decode, and "
            "the draft's KV moves with the model's",
            "use the same on both",
        )
    elif one is not None and other is not None:
        models = one.draft_model, other.draft_model
        if None not in models and models[0] != models[1]:
            yield _differ("E307", "speculative_config.speculative_model", *models)


def check_contexts(prefill: EngineCase, decode: EngineCase) -> Iterator[Finding]:
    """Yields E308 if decode's context is shorter than prefill's: it holds the answer as well."""
    one, other = prefill.args.max_seq_len, decode.args.max_seq_len
    if one is not None and other is not None and other < one:
        yield error(
            "E308",
            "max_seq_len",
            f"is {one:,} on prefill and {other:,} on decode, which has to hold the answer too",
            f"set decode's to {one} and the longest answer",
        )


def _chosen_differently(code: str, key: str, left: object, right: object) -> Iterator[Finding]:
    """An error where two values differ; a warning where one of them is the model's choice."""
    if left != right and "auto" in (left, right):
        text = f"is {left} on prefill and {right} on decode, and what auto comes to the model says"
        yield warning(code, key, text, "state the same on both")
    elif left != right:
        yield _differ(code, key, left, right, so=_NO_TALK)


def _differ(
    code: str, key: str, left: object, right: object, *, so: str = "which then cannot read the KV"
) -> Finding:
    text = f"is {_or_unset(left)} on prefill and {_or_unset(right)} on decode, {so}"
    return error(code, key, text, "use the same on both")


def _or_unset(value: object) -> object:
    return "unset" if value is None else value


def _shape(case: EngineCase) -> str:
    tp, pp, cp, is_dp = case.args.parallelism
    further = "".join(f" {name}{size}" for name, size in (("PP", pp), ("CP", cp)) if size > 1)
    return f"TP{tp}{further}{' attention DP' if is_dp else ''}"
