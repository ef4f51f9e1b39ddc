"""Rules of one role of a disaggregated deployment: transceiver, buffer, scheduler, transport."""

from collections.abc import Iterator

from slagate.workers.engine_args.model.model import CacheTransceiverSection
from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.findings import Finding, error, warning
from slagate.workers.kv_transfer.nixl.ucx import reaches_gpu

SECTION = "cache_transceiver_config"
BUFFER = f"{SECTION}.max_tokens_in_buffer"
GIB = 1 << 30
SEEN_BYTES_PER_TOKEN = (128 * 1024, 209_280_466_944 // 65_536)
"""KV cache of one token on one rank: of an 8B model with grouped attention at 16 bits, and of a published
recipe (nemotron-3-super) that asked for 194.9 GiB for 65,536 tokens, which no GPU has."""

SMALL_BUFFER_TOKENS = 1024
"""With a smaller buffer most prompts go by the engine's fallback, which copies in pieces."""

SAY_LONGEST = "slagate worker check --longest-prompt"

OVERLAP_ON_PREFILL_SINCE = (1, 3)
"""Earlier engines refuse context-only requests unless overlap scheduling is off."""


def check_transceiver(case: EngineCase) -> Iterator[Finding]:
    """Yields E201 or E202 if prefill or decode lacks a transceiver, E208 if agg has one."""
    section = case.args.cache_transceiver_config
    if not case.is_disaggregated:
        if section is not None and section.backend is not None and case.role == "agg":
            yield warning(
                "E208",
                SECTION,
                "is there: an aggregated worker hands nothing over, and still sets memory aside for it",
                f"take {SECTION} out",
            )
    elif section is None:
        yield error(
            "E201",
            SECTION,
            f"is missing: a {case.role} worker without it refuses every disaggregated request",
            f"add {SECTION} with backend: DEFAULT and max_tokens_in_buffer, on both roles",
        )
    elif section.backend is None:
        yield error(
            "E202",
            f"{SECTION}.backend",
            f"is null, which switches off the transceiver that a {case.role} worker needs",
            "set it to DEFAULT, UCX or NIXL",
        )


def check_transfer_buffer(case: EngineCase) -> Iterator[Finding]:
    """Yields E203 if prompts may not fit the transfer buffer, E204 if its size is not given."""
    section = _used(case)
    if section is None:
        return
    longest, buffer = case.longest_prompt_tokens, section.max_tokens_in_buffer
    certain = case.wanted.longest_prompt_tokens is not None
    if buffer is None:
        yield warning(
            "E204",
            BUFFER,
            f"is missing, so the buffer is sized by the longest sequence: {_memory(case)}",
            f"set {BUFFER} to the longest prompt that will come, in whole KV blocks"
            + (f", here {case.args.up_to_blocks(longest)}" if certain and longest else ""),
        )
    elif longest is not None and buffer < longest:
        # A part of the context is the answer's: it is an error only where the longest prompt was stated.
        yield (error if certain else warning)(
            "E203",
            BUFFER,
            f"is {buffer:,}, and prompts may have {longest:,} tokens: decode waits for ever for one "
            "that does not fit, so slagate refuses it",
            f"set it to {case.args.up_to_blocks(longest)}"
            + ("" if certain else f", or, if prompts are shorter, say so: {SAY_LONGEST}"),
        )
    elif longest is None and buffer < max(SMALL_BUFFER_TOKENS, case.args.max_num_tokens):
        # A larger one may have been sized by prompts; the model's context cannot be read here.
        yield warning(
            "E203",
            BUFFER,
            f"is {buffer:,}, and only the model says how long prompts may be: decode waits for ever "
            "for one that does not fit, so slagate refuses it",
            f"set it to the longest prompt, and say that: {SAY_LONGEST}",
        )


def check_block_alignment(case: EngineCase) -> Iterator[Finding]:
    """Yields E205 for each limit of a disaggregated role that is no multiple of the KV block."""
    section = _used(case)
    if section is None:
        return
    block = case.args.kv_cache_config.tokens_per_block
    limits = {BUFFER: section.max_tokens_in_buffer}
    if case.has("max_num_tokens"):
        limits["max_num_tokens"] = case.args.max_num_tokens
    for key, limit in limits.items():
        if limit is not None and limit % block:
            yield error(
                "E205",
                key,
                f"is {limit:,}, not a multiple of kv_cache_config.tokens_per_block ({block})",
                f"set it to {case.args.up_to_blocks(limit)}",
            )


def check_overlap_scheduler(case: EngineCase) -> Iterator[Finding]:
    """Yields E206 for overlap scheduling on prefill before 1.3, E207 for none on other roles."""
    key = "disable_overlap_scheduler"
    disabled = case.args.disable_overlap_scheduler
    version = case.wanted.engine_version
    if case.role == "prefill" and not disabled:
        if version is None or version < OVERLAP_ON_PREFILL_SINCE:
            known = (
                "which one is not known"
                if version is None
                else f"this is {version[0]}.{version[1]}"
            )
            yield error(
                "E206",
                key,
                f"is false, and TensorRT-LLM before 1.3 then refuses context-only requests ({known})",
                f"set {key}: true on prefill"
                + (", or say --engine-version 1.3, if it is that" if version is None else ""),
            )
    elif case.role in ("agg", "decode") and disabled and case.args.speculative_config is None:
        yield warning(
            "E207",
            key,
            f"is true on {'an' if case.role == 'agg' else 'a'} {case.role} worker, whose steps "
            "then wait for the host",
            f"take {key} out; only prefill needs it",
        )


def check_moved_cache(case: EngineCase) -> Iterator[Finding]:
    """Yields E211 if the transceiver cannot move caches of the V2 manager: only Python's over NIXL can."""
    section = case.args.cache_transceiver_config
    if section is None or section.backend is None:
        return
    if case.args.kv_cache_config.use_kv_cache_manager_v2 is not True:
        return
    key, over_nixl = f"{SECTION}.transceiver_runtime", section.backend in ("DEFAULT", "NIXL")
    if over_nixl and section.transceiver_runtime == "auto":
        yield warning(
            "E211",
            key,
            "is left to the model, and kv_cache_config.use_kv_cache_manager_v2 needs the Python runtime",
            "set it to PYTHON",
        )
    elif not over_nixl or section.transceiver_runtime != "PYTHON":
        yield error(
            "E211",
            key if over_nixl else f"{SECTION}.backend",
            f"is {section.transceiver_runtime or 'null' if over_nixl else section.backend}, and caches of "
            "the V2 manager go by NIXL and the Python runtime only: the engine does not start",
            "set backend: NIXL and transceiver_runtime: PYTHON, or use_kv_cache_manager_v2: false",
        )


def check_transport(case: EngineCase) -> Iterator[Finding]:
    """Yields E209 or E210 for environment variables that do not fit the transceiver's back-end."""
    section = _used(case)
    if section is None:
        return
    if section.backend == "DEFAULT" and case.environment("TRTLLM_USE_UCX_KVCACHE") == "1":
        yield warning(
            "E209",
            f"{SECTION}.backend",
            "is DEFAULT, which means NIXL, and TRTLLM_USE_UCX_KVCACHE=1 does not change that",
            "name UCX here, or take the variable out",
        )
    allowed = case.environment("UCX_TLS")
    if section.backend in ("DEFAULT", "UCX", "NIXL") and not reaches_gpu(allowed or "all"):
        yield warning(
            "E210",
            f"{SECTION}.backend",
            f"goes over UCX, and UCX_TLS={allowed} leaves it no transport for GPU memory",
            "add cuda to UCX_TLS, or unset it",
        )


def _used(case: EngineCase) -> CacheTransceiverSection | None:
    """The section where it has an effect, else None."""
    section = case.args.cache_transceiver_config
    usable = case.is_disaggregated and section is not None and section.backend is not None
    return section if usable else None


def _memory(case: EngineCase) -> str:
    longest = case.args.max_seq_len
    if longest is None:
        return "the model's whole context"
    exact = case.wanted.kv_bytes_per_token
    low, high = (exact, exact) if exact else SEEN_BYTES_PER_TOKEN
    sizes = f"{longest * low / GIB:,.1f} GiB"
    if high != low:
        sizes = (
            f"{longest * low / GIB:,.0f} GiB (8B model) to {longest * high / GIB:,.0f} GiB (seen)"
        )
    return f"{longest:,} tokens, {sizes} on each rank, and as much again to receive"
