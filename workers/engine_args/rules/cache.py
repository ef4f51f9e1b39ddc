"""Rules of the KV cache of one engine: events, reuse, memory, and types, with the model's own."""

import math
from collections.abc import Iterator
from pathlib import Path

from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.findings import Finding, error, warning
from slagate.workers.runtime.usage import nearest

CACHE = "kv_cache_config"
QUANTISED = ("auto", "fp8", "nvfp4")
"""Types of the KV cache that the engine acts on."""

_IGNORED = ("bfloat16", "float16", "float32", "int64", "int32", "int8", "bool")
"""Types that the engine warns about and ignores: `_utils._str_to_torch_dtype_dict`, id 52995752."""

_REFUSES_KV_TYPES_SINCE = (1, 3)
_READS_CAPITALS_SINCE = (1, 4)
"""`KvCacheConfig.validate_dtype`, llm_args id 55143598664, reads FP8 as fp8 and refuses what it does not
know; 1.2, id 1090804222, warns of both."""

COMPUTED_IN = ("auto", "bfloat16", "float16", "float32")
STORED_IN = ("fp8", "nvfp4", "int8", "float8", "fp4", "int4", "mxfp4", "mxfp8")
"""Types of weights and of the KV cache; activations have none of them."""

MAX_FRACTION = 0.95
KVBM = "kvbm"

MOVES_SINCE = (1, 3)
"""Events of moves of blocks are whole since (pull request #11576, in 1.3.0rc6)."""


def check_prefix_routing(case: EngineCase) -> Iterator[Finding]:
    """Yields E601, E602 or E603 where KV events, block reuse or PyTorch is wanted and missing."""
    cache, backend = case.args.kv_cache_config, case.args.backend
    routes = case.wanted.prefix_routing
    if backend != "pytorch":
        if cache.event_buffer_max_size:
            yield error(
                "E603",
                f"{CACHE}.event_buffer_max_size",
                f"asks for KV events, which the back-end {backend} does not make",
                "set it to 0, or use backend: pytorch",
            )
        elif routes:
            yield warning(
                "E603",
                "backend",
                f"is {backend}, which makes no KV events: prefix routing cannot know what is cached",
                "use backend: pytorch, or route without prefixes",
            )
    elif routes and cache.event_buffer_max_size == 0:
        yield warning(
            "E601",
            f"{CACHE}.event_buffer_max_size",
            "is 0, so the engine makes no KV events and prefix routing cannot know what is cached",
            "set it to 100000, or route without prefixes",
        )
    if routes and not cache.enable_block_reuse:
        yield warning(
            "E602",
            f"{CACHE}.enable_block_reuse",
            "is false, so nothing is cached for prefix routing to find",
            "set it to true, or route without prefixes",
        )


def check_cache_memory(case: EngineCase) -> Iterator[Finding]:
    """Yields E604 if the KV cache leaves hardly any GPU memory, E605 for a type that it does not have."""
    cache = case.args.kv_cache_config
    if cache.free_gpu_memory_fraction > MAX_FRACTION:
        yield warning(
            "E604",
            f"{CACHE}.free_gpu_memory_fraction",
            f"is {cache.free_gpu_memory_fraction:g}: activations, CUDA graphs and transfer buffers "
            "come out of the rest",
            "start with 0.85 to 0.9, less with a transfer buffer",
        )
    if cache.dtype in QUANTISED:
        return
    lower = cache.dtype.lower()
    is_taken = lower in QUANTISED + _IGNORED or case.is_known_before(_REFUSES_KV_TYPES_SINCE)
    if lower in QUANTISED and case.is_known_since(_READS_CAPITALS_SINCE):
        return
    near = nearest(lower, QUANTISED, least=0.8)
    yield (warning if is_taken else error)(
        "E605",
        f"{CACHE}.dtype",
        f"is {cache.dtype}, which the engine warns about and does not act on"
        if is_taken
        else f"is {cache.dtype}, which is no type that the engine has: it does not start",
        (f"did you mean {near}? Use " if near else "use ")
        + f"one of {', '.join(QUANTISED)}; auto is the model's own type",
    )


def check_model_type(case: EngineCase) -> Iterator[Finding]:
    """Yields E609 if `dtype` is no type to compute in, such as one for the KV cache."""
    dtype = case.args.dtype
    if dtype.lower().startswith(STORED_IN):
        of_cache = dtype if dtype in QUANTISED else "fp8"
        yield error(
            "E609",
            "dtype",
            f"is {dtype}, and no model computes in that: weights are as the checkpoint has them",
            f"take it out; for the KV cache write {CACHE}.dtype: {of_cache}",
        )
    elif dtype not in COMPUTED_IN:
        yield warning(
            "E609",
            "dtype",
            f"is {dtype}, which is no name that the engine has for a type",
            f"use one of {', '.join(COMPUTED_IN)}",
        )


def check_streaming_events(case: EngineCase) -> Iterator[Finding]:
    """Yields E606 if the engine's own stream of KV events lacks the V2 cache manager in Python."""
    cache = case.args.kv_cache_config
    events = cache.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return
    if cache.use_kv_cache_manager_v2 is False:
        yield error(
            "E606",
            f"{CACHE}.kv_events_config",
            "is on, and only the V2 cache manager streams events",
            f"set {CACHE}.use_kv_cache_manager_v2: true, or take it out",
        )
    elif cache.use_kv_cache_manager_v2 == "auto":
        yield warning(
            "E606",
            f"{CACHE}.kv_events_config",
            "is on, only the V2 cache manager streams events, and the model may prefer the other one",
            f"set {CACHE}.use_kv_cache_manager_v2: true",
        )
    elif case.environment("TLLM_KV_CACHE_MANAGER_V2_BACKEND") != "python":
        yield warning(
            "E606",
            f"{CACHE}.kv_events_config",
            "is on, and TLLM_KV_CACHE_MANAGER_V2_BACKEND is not python",
            "set that variable for the worker, or in env_overrides",
        )


def check_tiers(case: EngineCase) -> Iterator[Finding]:
    """Yields E607 for partial reuse with KVBM's connector, E608 for a disk tier without a folder.

    E608 is by `KvCacheConfig.validate_disk_cache_config`, llm_args id 55143598664.
    """
    cache, connector = case.args.kv_cache_config, case.args.kv_connector_config
    if connector is not None and connector.name.startswith(KVBM) and cache.enable_partial_reuse:
        yield error(
            "E607",
            f"{CACHE}.enable_partial_reuse",
            f"is true, and the connector {connector.name} has whole blocks only",
            "set it to false",
        )
    version = case.wanted.engine_version
    if cache.host_cache_size and cache.event_buffer_max_size and (version or (0,)) < MOVES_SINCE:
        # In 1.1 what dispatches events dies; later a fetch gives nothing.
        ends = version is not None and version < (1, 2)
        yield (error if ends else warning)(
            "E610",
            f"{CACHE}.host_cache_size",
            "is set, and a block that moves there or back breaks the KV events of TensorRT-LLM before 1.3: "
            + ("in 1.1 the engine ends" if ends else "prefix routing loses what is cached"),
            f"take it out, or set {CACHE}.event_buffer_max_size: 0"
            + ("" if version else ", or say --engine-version 1.3, if it is that"),
        )
    if cache.disk_cache_size and not cache.disk_cache_path:
        yield error(
            "E608",
            f"{CACHE}.disk_cache_path",
            "is missing, and disk_cache_size asks for a disk tier",
            "name a folder on a local disk",
        )
    elif cache.disk_cache_size and not Path(str(cache.disk_cache_path)).is_dir():
        yield warning(
            "E608",
            f"{CACHE}.disk_cache_path",
            f"names {cache.disk_cache_path}, which is no folder here; the engine does not start without it",
            "make it on the worker's machine",
        )


def check_pools(case: EngineCase) -> Iterator[Finding]:
    """Yields E613 for shares of the V2 manager's pools that are not shares of one whole.

    `KvCacheConfig.validate_pool_ratio`, llm_args id 55143598664.
    """
    shares = case.args.kv_cache_config.pool_ratio
    if shares is None or (
        min(shares) > 0 and math.isclose(sum(shares), 1, rel_tol=0, abs_tol=1e-6)
    ):
        return
    yield error(
        "E613",
        f"{CACHE}.pool_ratio",
        f"has {min(shares):g}" if min(shares) <= 0 else f"adds up to {sum(shares):g}",
        "write shares above 0 that add up to 1",
    )
