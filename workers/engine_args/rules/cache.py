"""Rules of the KV cache of one engine that have to be computed: types, pools, and connectors to others.

Types: `KvCacheConfig.validate_dtype`, llm_args id 55143598664, reads FP8 as fp8 and refuses what it does
not know; 1.2, id 1090804222, warns of both. Pools: a validator next to it.
"""

import math
from collections.abc import Iterator

from slagate.workers.engine_args.model.merge import in_brief
from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.findings import Finding, error, note, warning
from slagate.workers.runtime.usage import nearest

CACHE, CONNECTOR = "kv_cache_config", "kv_connector_config"
QUANTISED = ("auto", "fp8", "nvfp4")
"""Types of the KV cache that the engine acts on."""

_IGNORED = ("bfloat16", "float16", "float32", "int64", "int32", "int8", "bool", "fp8_ds_mla")
"""Types that the engine warns about and ignores, `_utils._str_to_torch_dtype_dict`, id 52995752, and one
that some models have of their own."""

_REFUSES_KV_TYPES_SINCE = (1, 3)
_READS_CAPITALS_SINCE = (1, 4)
_COMPUTED_IN = ("auto", "bfloat16", "float16", "float32")
_CLASSES = ("connector_module", "connector_scheduler_class", "connector_worker_class")


def check_types(case: EngineCase) -> Iterator[Finding]:
    """Yields E605 for a type of the KV cache that the engine refuses, or takes no notice of.

    E609 is for a type of the model that models do not compute in.
    """
    if not case.args.dtype.lower().startswith(_COMPUTED_IN):
        text = f"is {in_brief(case.args.dtype)}, and models compute in other types: weights are as the "
        text += "checkpoint has them"
        advice = (
            f"use one of {', '.join(_COMPUTED_IN)}; the KV cache's own is kv_cache_config.dtype"
        )
        yield warning("E609", "dtype", text, advice)
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


def check_pools(case: EngineCase) -> Iterator[Finding]:
    """Yields E613 if the shares of the V2 cache manager's pools are no shares of one whole."""
    shares = case.cache.pool_ratio
    if shares and (min(shares) <= 0 or not math.isclose(sum(shares), 1, rel_tol=0, abs_tol=1e-6)):
        text = f"is {in_brief(shares)}, which are no shares of one whole"
        yield error("E613", f"{CACHE}.pool_ratio", text, "write shares above 0 that add up to 1")


def check_connector(case: EngineCase) -> Iterator[Finding]:
    """Yields E105 for a KV connector without preset or class.

    `KvCacheConnectorConfig._resolve_preset` and `connectors/registry.py` @26bd2ecc.
    """
    section = case.args.kv_connector_config
    if section is None or case.has(f"{CONNECTOR}.connector"):
        return
    if not all(hasattr(section, str(name)) for name in section.given):
        return  # a newer engine's section
    for name in _CLASSES:
        if getattr(section, name) is None:
            advice = f"set {CONNECTOR}.{name}, or a preset: connector: kvbm"
            yield error("E105", f"{CONNECTOR}.{name}", "is required in this section", advice)
