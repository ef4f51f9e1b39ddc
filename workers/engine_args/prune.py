"""Merged arguments without what must not reach the engine, with a finding for each value left out."""

from collections.abc import Iterable, Iterator
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
"""Earlier versions have other arguments than the PyTorch back-end, and do not start with unknown ones."""

ENCODER_ARGUMENTS = (
    "model",
    "max_batch_size",
    "trust_remote_code",
    "tensor_parallel_size",
    "model_kwargs",
)
"""The engine's arguments that an encoder takes, as in Dynamo's worker."""


def prune(merged: Merged, role: str, version: tuple[int, int] | None) -> list[Finding]:
    """Take out of `merged`, in place, what must not reach the engine; a warning for each value set.

    `version` is TensorRT-LLM's, None where it is not known.
    """
    findings: list[Finding] = []
    if merged.values.get("backend") == AUTODEPLOY:
        findings += _for_autodeploy(merged, version)
    findings += _lift_build_config(merged)
    if role == "encode":
        # A name that no engine has is left to the model.
        keys = [key for key in EngineModel.model_fields if key not in ENCODER_ARGUMENTS]
        advice = f"it is left out; take it out: an encoder has {', '.join(ENCODER_ARGUMENTS)}"
        findings += _left_out(merged, keys, "E805", "an encoder does not take it", advice)
    return findings


def _left_out(
    merged: Merged, keys: Iterable[str], code: str, reason: str, advice: str
) -> Iterator[Finding]:
    """Take the keys out, with a warning for each that an operator set to a value."""
    for key in keys:
        is_set = _is_set(merged, key)
        value = _take_out(merged, key)
        if is_set and value is not None:
            yield warning(code, key, f"is {in_brief(value)}, and {reason}", advice)


def _for_autodeploy(merged: Merged, version: tuple[int, int] | None) -> Iterator[Finding]:
    if merged.sources.get(f"{CACHE}.{EVENTS}") == DEFAULT:
        _take_out(merged, f"{CACHE}.{EVENTS}")  # ours, for the back-end that makes events
        merged.values[CACHE].pop(EVENTS)
    if version is not None and version < AUTODEPLOY_STATS_SINCE and _take_out(merged, STATS):
        yield warning(
            "E803",
            STATS,
            f"is true, and the back-end {AUTODEPLOY} does not take it before TensorRT-LLM 1.3: "
            "this worker reports no load",
            "it is left out; use a newer engine, or backend: pytorch",
        )
    yield from _left_out(
        merged,
        NOT_FOR_AUTODEPLOY,
        "E803",
        f"the back-end {AUTODEPLOY} does not take it",
        "it is left out; take it out, or use backend: pytorch",
    )


def _lift_build_config(merged: Merged) -> list[Finding]:
    """Move keys of `build_config` to the top level, where engines since 1.3.0rc21 have them.

    A key that is at the top level already wins: a section that engines derive from defaults must not undo
    what is written there.
    """
    section = merged.values.get(BUILD)
    if not isinstance(section, dict):
        return []
    sources = {
        leaf: source for leaf, source in merged.sources.items() if leaf.startswith(f"{BUILD}.")
    }
    _take_out(merged, BUILD)
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
    return any(merged.sources[leaf] not in (DEFAULT, FORCED) for leaf in merged.leaves_of(key))


def _take_out(merged: Merged, key: str) -> Any:
    for leaf in merged.leaves_of(key):
        del merged.sources[leaf]
    return merged.values.pop(key, None)
