"""Rules of the transfer buffer, which a role of a disaggregated deployment has.

The C++ transceiver sets a buffer aside and asks for whole blocks: cacheTransBuffer.cpp, ids 798615167 and
57029962989. Python's moves blocks: create_kv_cache_transceiver, ids 616290201 (1.1), 59975471404 (1.4).
"""

from collections.abc import Iterator

from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.findings import Finding, error, note, warning

SECTION = "cache_transceiver_config"
BUFFER = f"{SECTION}.max_tokens_in_buffer"
BLOCK = "kv_cache_config.tokens_per_block"
GIB = 1 << 30
SEEN_BYTES_PER_TOKEN = (128 * 1024, 209_280_466_944 // 65_536)
"""KV cache of one token on one rank: of an 8B model with grouped attention at 16 bits, and of a published
recipe (nemotron-3-super) that asked for 194.9 GiB for 65,536 tokens, which no GPU has."""

SMALL_BUFFER_TOKENS = 1024
"""With a smaller buffer most prompts go by the engine's fallback, which copies in pieces."""

SIZED_BY_CONTEXT = (1, 3)
"""A buffer that is not given has `max_seq_len` tokens since pull request #11082 (January 2026)."""

LONG_CONTEXT_TOKENS = 32_768
"""A buffer for a longer sequence may take more than a GPU has."""

ZERO_COPY = "TRTLLM_TRY_ZCOPY_FOR_KVCACHE_TRANSFER"
SAY_LONGEST = "slagate worker check --longest-prompt"


def _is_surely_cpp(case: EngineCase) -> bool:
    """Whether the transceiver is the one in C++: since 1.3 the default, "auto", is the model's own choice.

    Only over NIXL, and AutoDeploy asks no model: `_resolve_transceiver_runtime_auto`, llm_utils.py id
    54619642641, pull request #15823.
    """
    may_choose = case.runtime == "auto" and case.transport == "NIXL"
    is_asked = case.args.backend == "pytorch" and not case.is_known_before((1, 3))
    return case.runtime != "PYTHON" and not (may_choose and is_asked)


def check_transfer_buffer(case: EngineCase) -> Iterator[Finding]:
    """Yields E203 to E205 for a buffer of the C++ transceiver; one of 0 tokens is made for each prompt."""
    section, context = case.transceiver, case.args.max_seq_len
    if case.role == "agg" or section is None or case.runtime == "PYTHON":
        return
    buffer, block = section.max_tokens_in_buffer, case.cache.tokens_per_block
    said, longest = case.wanted.longest_prompt_tokens, case.longest_prompt_tokens
    is_cpp = _is_surely_cpp(case)
    if buffer is None and (context or 0) % block:
        put = error if is_cpp and case.is_known_since(SIZED_BY_CONTEXT) else warning
        text = f"is {context}, no multiple of {BLOCK} ({block}), and since TensorRT-LLM 1.3 the size of "
        text += (
            "the C++ transceiver's buffer, which needs that, where max_tokens_in_buffer is missing"
        )
        yield put("E205", "max_seq_len", text, f"set it to whole blocks, or set {BUFFER}")
    elif buffer is None and not case.is_known_before(SIZED_BY_CONTEXT):
        size = f"{case.args.up_to_blocks(said)}, " if said else ""
        put = warning if (context or 0) > LONG_CONTEXT_TOKENS else note
        text = f"is missing: it holds the longest sequence, {_memory(case)}"
        yield put("E204", BUFFER, text, f"set it to {size}the longest prompt in whole KV blocks")
    elif buffer and buffer % block:
        put = error if is_cpp else warning
        text = f"is {buffer:,}, not a multiple of {BLOCK} ({block}), which the C++ transceiver asks for"
        yield put("E205", BUFFER, text, f"set it to {case.args.up_to_blocks(buffer)}")
    if buffer and (buffer < longest if longest else buffer < SMALL_BUFFER_TOKENS):
        yield small_buffer(case, buffer, longest)


def small_buffer(case: EngineCase, buffer: int, longest: int | None) -> Finding:
    """E203 about the buffer of one role; `longest` in tokens, None where only the model knows."""
    # cacheTransBuffer.cpp `getOrAllocateBuffers`; what NIXL makes of it: issue #13506
    risk = "fail over NIXL" if case.transport == "NIXL" else "run out"
    prompts = f"may have {longest:,} tokens" if longest else "may be longer"
    text = (
        f"is {buffer:,}, and prompts {prompts}: those take memory besides it, which may {risk}, so "
    )
    advice = f"set it to {case.args.up_to_blocks(longest) if longest else 'the longest prompt'}"
    if case.transport == "UCX" and case.env.get(ZERO_COPY) == "1":
        text = f"is {buffer:,}, and prompts {prompts}: {ZERO_COPY} sends those between equals, but "
        advice += ", or to 0, which bounds none"
    if not case.wanted.longest_prompt_tokens:
        advice += f", or, if prompts are shorter, say so: {SAY_LONGEST}"
    return warning("E203", BUFFER, f"{text}slagate's worker refuses them", advice)


def _memory(case: EngineCase) -> str:
    longest, exact = case.args.max_seq_len, case.wanted.kv_bytes_per_token
    if longest is None:
        return "the model's whole context"
    sizes = ""
    if exact:
        sizes = f": {longest * exact / GIB:,.1f} GiB"
    elif longest > LONG_CONTEXT_TOKENS:
        low, high = (longest * size / GIB for size in SEEN_BYTES_PER_TOKEN)
        sizes = f": {low:,.0f} GiB (8B model) to {high:,.0f} GiB (seen)"
    return f"{longest:,} tokens{sizes and f'{sizes} on each rank, and as much again to receive'}"
