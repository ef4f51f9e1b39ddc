"""Merged arguments without what must not reach the engine, each with a finding that names it."""

from typing import Any

from slagate.workers.engine_args.model.merge import (
    DEFAULT,
    FORCED,
    Merged,
    in_brief,
    in_full,
    leaves,
)
from slagate.workers.engine_args.model.model import EngineModel
from slagate.workers.findings import Finding, warning

BUILD = "build_config"
AUTODEPLOY = "_autodeploy"
CACHE, EVENTS, STATS = "kv_cache_config", "event_buffer_max_size", "enable_iter_perf_stats"
NOT_FOR_AUTODEPLOY = (
    "build_config",
    "scheduler_config",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "moe_cluster_parallel_size",
    "moe_tensor_parallel_size",
    "moe_expert_parallel_size",
    "enable_attention_dp",
    "cp_config",
)
"""AutoDeploy shards by itself; it refuses these."""

AUTODEPLOY_STATS_SINCE = (1, 3)
"""Before, its arguments are not those of the PyTorch back-end, and unknown ones end the start."""


ENCODER_ARGUMENTS = (
    "model",
    "max_batch_size",
    "trust_remote_code",
    "tensor_parallel_size",
    "model_kwargs",
)
"""Those of the engine's that an encoder takes, as Dynamo's worker has it."""


def prune(merged: Merged, role: str, version: tuple[int, int] | None) -> list[Finding]:
    """Take out of `merged`, in place, what does not go to the engine; what was set is told.

    `version` is TensorRT-LLM's, None where it is not known.
    """
    findings = (
        _for_autodeploy(merged, version) if merged.values.get("backend") == AUTODEPLOY else []
    )
    findings += _lift_build_config(merged)
    return findings + _for_encoder(merged) if role == "encode" else findings


def _for_encoder(merged: Merged) -> list[Finding]:
    """What only engines with a KV cache take; a name that none of them has is left to the model."""
    findings = []
    for key in EngineModel.model_fields:
        if key in ENCODER_ARGUMENTS or key not in merged.values:
            continue
        is_set = _is_set(merged, key)
        value = _take(merged, key)
        if is_set and value is not None:
            findings.append(
                warning(
                    "E805",
                    key,
                    f"is {in_brief(value)}, and an encoder does not take it",
                    f"it is left out; take it out: an encoder has {', '.join(ENCODER_ARGUMENTS)}",
                )
            )
    return findings


def _for_autodeploy(merged: Merged, version: tuple[int, int] | None) -> list[Finding]:
    if merged.sources.get(f"{CACHE}.{EVENTS}") == DEFAULT:
        _take(merged, f"{CACHE}.{EVENTS}")  # ours, for the back-end that makes events
        merged.values[CACHE].pop(EVENTS)
    findings = []
    if version is not None and version < AUTODEPLOY_STATS_SINCE and _take(merged, STATS):
        findings.append(
            warning(
                "E803",
                STATS,
                f"is true, and the back-end {AUTODEPLOY} does not take it before TensorRT-LLM 1.3: "
                "this worker reports no load",
                "it is left out; use a newer engine, or backend: pytorch",
            )
        )
    for key in NOT_FOR_AUTODEPLOY:
        is_set = _is_set(merged, key)
        value = _take(merged, key)
        if is_set and value is not None:
            findings.append(
                warning(
                    "E803",
                    key,
                    f"is {in_brief(value)}, and the back-end {AUTODEPLOY} does not take it",
                    "it is left out; take it out, or use backend: pytorch",
                )
            )
    return findings


def _lift_build_config(merged: Merged) -> list[Finding]:
    """Keys of `build_config` to the top level, where engines since 1.3.0rc21 have them.

    What is at the top level already wins, as nothing that is written there may be undone by a section
    that engines derive from defaults.
    """
    section = merged.values.get(BUILD)
    if not isinstance(section, dict):
        return []
    sources = {
        leaf: source for leaf, source in merged.sources.items() if leaf.startswith(f"{BUILD}.")
    }
    _take(merged, BUILD)
    findings = []
    for key, value in section.items():
        if key not in merged.values:
            merged.values[key] = value
            for leaf, _ in leaves({key: value}):
                merged.sources[leaf] = sources[f"{BUILD}.{leaf}"]
            text = "is in a section that newer engines do not have"
            advice = f"write {key} at the top level"
        elif in_full(merged.values[key]) != in_full(value):
            kept = in_brief(merged.values[key])
            text = f"is {in_brief(value)}, and {key} at the top level, {kept}, takes its place"
            advice = "say it once, at the top level"
        else:
            continue
        findings.append(warning("E106", f"{BUILD}.{key}", text, advice))
    return findings


def _is_set(merged: Merged, key: str) -> bool:
    """Whether an operator set the key, or one below it."""
    return any(
        source not in (DEFAULT, FORCED)
        for leaf, source in merged.sources.items()
        if leaf == key or leaf.startswith(f"{key}.")
    )


def _take(merged: Merged, key: str) -> Any:
    for leaf in [name for name in merged.sources if name == key or name.startswith(f"{key}.")]:
        del merged.sources[leaf]
    return merged.values.pop(key, None)
