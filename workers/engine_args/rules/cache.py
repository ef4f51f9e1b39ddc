"""Rules of the KV cache of one engine: events, reuse, memory, and types, with the model's own.

Types: `KvCacheConfig.validate_dtype`, llm_args id 55143598664, reads FP8 as fp8 and refuses what it does
not know; 1.2, id 1090804222, warns of both. Tiers and pools: the validators next to it.
"""

import math
import os.path
from collections.abc import Iterator

from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.engine_args.rules.row import RuleRow
from slagate.workers.findings import Finding, error, note, warning
from slagate.workers.runtime.usage import nearest

CACHE = "kv_cache_config"
QUANTISED = ("auto", "fp8", "nvfp4")
"""Types of the KV cache that the engine acts on."""

_IGNORED = ("bfloat16", "float16", "float32", "int64", "int32", "int8", "bool", "fp8_ds_mla")
"""Types that the engine warns about and ignores, `_utils._str_to_torch_dtype_dict`, id 52995752, and one
that some models have of their own."""

_REFUSES_KV_TYPES_SINCE = (1, 3)
_READS_CAPITALS_SINCE = (1, 4)
COMPUTED_IN = ("auto", "bfloat16", "float16", "float32")
MAX_FRACTION = 0.95


def _streams(case: EngineCase) -> bool:
    """Whether the engine's own stream of KV events is on."""
    events = case.cache.kv_events_config
    return events is not None and events.enable_kv_cache_events


def _shares(case: EngineCase) -> bool:
    """Whether the V2 manager's pools have shares, and these are no shares of one whole."""
    shares = case.cache.pool_ratio
    return shares is not None and (
        min(shares) <= 0 or not math.isclose(sum(shares), 1, rel_tol=0, abs_tol=1e-6)
    )


ROWS = (
    RuleRow(
        "note E603 backend",
        lambda case: (
            case.args.backend != "pytorch"
            and (case.wanted.prefix_routing or case.cache.event_buffer_max_size)
        ),
        "is {args.backend}, which makes no KV events for prefix routing",
        "use pytorch, or route by load",
    ),
    RuleRow(
        "note E601 kv_cache_config.event_buffer_max_size",
        lambda case: (
            case.wanted.prefix_routing
            and case.args.backend == "pytorch"
            and case.cache.enable_block_reuse
            and not case.cache.event_buffer_max_size
        ),
        "is 0: no KV events for prefix routing",
        "set it, or route by load",
    ),
    RuleRow(
        "note E602 kv_cache_config.enable_block_reuse",
        lambda case: (
            case.wanted.prefix_routing
            and case.args.backend == "pytorch"
            and not case.cache.enable_block_reuse
        ),
        "is false: prefix routing finds nothing",
        "set it, or route by load",
    ),
    RuleRow(
        "note E604 kv_cache_config.free_gpu_memory_fraction",
        lambda case: case.cache.free_gpu_memory_fraction > MAX_FRACTION,
        "is {value}: activations, CUDA graphs and transfer buffers come out of the rest",
        "start with 0.85 to 0.9, less with a transfer buffer",
    ),
    RuleRow(
        "warning E606 kv_cache_config.kv_events_config",
        lambda case: _streams(case) and case.cache.use_kv_cache_manager_v2 is False,
        "is on, and only the V2 cache manager streams events",
        "set kv_cache_config.use_kv_cache_manager_v2: true, or take it out",
    ),
    RuleRow(
        "note E606 kv_cache_config.kv_events_config",
        lambda case: _streams(case) and case.cache.use_kv_cache_manager_v2 == "auto",
        "is on, only the V2 cache manager streams events, and the model may prefer the other one",
        "set kv_cache_config.use_kv_cache_manager_v2: true",
    ),
    RuleRow(
        "note E606 kv_cache_config.kv_events_config",
        lambda case: (
            _streams(case)
            and case.cache.use_kv_cache_manager_v2 is True
            and case.environment("TLLM_KV_CACHE_MANAGER_V2_BACKEND") != "python"
        ),
        "is on, and Dynamo sets TLLM_KV_CACHE_MANAGER_V2_BACKEND to python for that",
        "set that variable for the worker, or in env_overrides",
    ),
    # KVBM's leader matches nothing then; Dynamo's guide asks for false.
    RuleRow(
        "warning E607 kv_cache_config.enable_partial_reuse",
        lambda case: (
            case.args.kv_connector_config is not None
            and case.args.kv_connector_config.name.startswith("kvbm")
            and case.cache.enable_partial_reuse
        ),
        "is true, with which the connector finds nothing of what it has: Dynamo sets it to false",
        "set it to false",
    ),
    RuleRow(
        "error E608 kv_cache_config.disk_cache_path",
        lambda case: case.cache.disk_cache_size and not case.cache.disk_cache_path,
        "is missing, and disk_cache_size asks for a disk tier",
        "name a folder on a local disk",
    ),
    RuleRow(
        "warning E608 kv_cache_config.disk_cache_path",
        lambda case: (
            case.cache.disk_cache_size
            and case.cache.disk_cache_path
            and not os.path.isdir(case.cache.disk_cache_path)
        ),
        "names {value}, which is no folder here; the engine does not start without it",
        "make it on the worker's machine",
    ),
    RuleRow(
        "warning E609 dtype",
        lambda case: not case.args.dtype.lower().startswith(COMPUTED_IN),
        "is {value}, and models compute in other types: weights are as the checkpoint has them",
        f"use one of {', '.join(COMPUTED_IN)}; the KV cache's own is kv_cache_config.dtype",
    ),
    # Pull request #11576 (1.3.0rc6): in 1.1 what dispatches events dies, in 1.2 a fetch gives nothing.
    RuleRow(
        "warning E610 kv_cache_config.host_cache_size",
        lambda case: case.cache.host_cache_size and case.cache.event_buffer_max_size,
        "is set, and a block that moves there or back breaks KV events, in 1.1 the engine as well",
        "take it out, or set kv_cache_config.event_buffer_max_size: 0",
        before=(1, 3),
    ),
    RuleRow(
        "error E613 kv_cache_config.pool_ratio",
        _shares,
        "is {value}, which are no shares of one whole",
        "write shares above 0 that add up to 1",
    ),
)


def check_cache_type(case: EngineCase) -> Iterator[Finding]:
    """Yields E605 for a type of the KV cache that the engine refuses, or takes no notice of."""
    dtype = case.cache.dtype
    lower = dtype.lower()
    if dtype in QUANTISED or (lower in QUANTISED and case.is_known_since(_READS_CAPITALS_SINCE)):
        return
    is_name = lower in QUANTISED + _IGNORED
    is_refused = not is_name and case.is_known_since(_REFUSES_KV_TYPES_SINCE)
    put, why = warning, "which the engine warns about and does not act on"
    if is_refused:
        put, why = error, "which is no type that the engine has: it does not start"
    elif lower in QUANTISED:
        put, why = note, "which TensorRT-LLM before 1.4 does not act on"
    elif not is_name and not case.is_known_before(_REFUSES_KV_TYPES_SINCE):
        why = "which is no type that the engine has: since TensorRT-LLM 1.3 it does not start"
    near = nearest(lower, QUANTISED, least=0.8)
    advice = f"did you mean {near}? Use " if near else "use "
    advice += f"one of {', '.join(QUANTISED)}; auto is the model's own type"
    yield put("E605", f"{CACHE}.dtype", f"is {dtype}, {why}", advice)
