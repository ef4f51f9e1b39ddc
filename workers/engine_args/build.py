"""Builds the arguments of an engine: defaults, options, files and forced values, merged and checked.

Each layer replaces values of the ones before it. Every replacement is logged, with both values and where
they came from: an engine that does not run with what its file says costs hours of search.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slagate.workers.engine_args.check import check_values
from slagate.workers.engine_args.model.facts import facts_of_version
from slagate.workers.engine_args.model.merge import (
    COMMAND_LINE,
    DEFAULT,
    FORCED,
    VARIABLES,
    Layer,
    Merged,
    in_brief,
    in_full,
    leaves,
    merge,
    parts,
)
from slagate.workers.engine_args.model.model import EngineModel
from slagate.workers.engine_args.rules.case import EngineCase, IntendedUse
from slagate.workers.engine_args.rules.table import PAIR_RULES, check_rules
from slagate.workers.engine_args.yaml_text import EXTRA, OVERRIDE, PEER, read_override, read_yaml
from slagate.workers.findings import Finding, note, warning
from slagate.workers.runtime.usage import UsageError

KV_EVENTS = 100_000

ROLES = ("agg", "prefill", "decode", "encode")

DEFAULTS: Mapping[str, Any] = {
    "backend": "pytorch",
    "enable_iter_perf_stats": True,
    "kv_cache_config": {"event_buffer_max_size": KV_EVENTS},
    "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
    "telemetry_config": {"disabled": True},  # to report to NVIDIA is the operator's choice
}
"""Defaults of slagate; all others are TensorRT-LLM's."""

FORCED_VALUES: Mapping[str, Any] = {"num_postprocess_workers": 0}
"""Values that a worker's engine has, whatever its operator says: no processes that detokenise."""

BUILD = "build_config"
AUTODEPLOY = "_autodeploy"
CACHE, EVENTS, STATS = "kv_cache_config", "event_buffer_max_size", "enable_iter_perf_stats"
NOT_FOR_AUTODEPLOY = (
    *("build_config", "scheduler_config", "tensor_parallel_size", "pipeline_parallel_size"),
    *("context_parallel_size", "moe_cluster_parallel_size", "moe_tensor_parallel_size"),
    *("moe_expert_parallel_size", "enable_attention_dp", "cp_config"),
)
"""AutoDeploy shards by itself; it refuses these."""

AUTODEPLOY_STATS_SINCE = (1, 3)
"""Earlier versions have other arguments than the PyTorch back-end, and do not start with unknown ones."""

ENCODER_ARGUMENTS = (
    *("model", "max_batch_size", "trust_remote_code", "tensor_parallel_size", "model_kwargs"),
)
"""What Dynamo's worker passes on to an encoder, which takes all of the engine's arguments (mm_encoder.py
@83ab45a5)."""


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """The merged arguments of one engine, and the findings about them."""

    role: str
    values: dict[str, Any]
    """Plain nested dicts, for `LLM(**values)`."""
    sources: Mapping[str, str]
    """Where each value and section came from, by dotted key; with those that were taken out."""
    findings: Sequence[Finding]
    case: EngineCase | None
    """The subject of the rules; None where single values are wrong."""

    @property
    def errors(self) -> list[Finding]:
        """The findings that keep the engine from starting."""
        return [finding for finding in self.findings if finding.is_error]

    def refuse_errors(self, *, but: Collection[str] = ()) -> None:
        """Raise `UsageError` that lists every error, if there is one, except of the codes in `but`."""
        errors = [finding for finding in self.errors if finding.code not in but]
        if errors:
            listed = "".join(f"\n  {finding}" for finding in errors)
            raise UsageError(f"engine arguments: {len(errors)} wrong{listed}")


def build_engine_args(
    *,
    role: str,
    cli: Mapping[str, Any],
    extra: Path | None,
    override: str | None,
    variables: Iterable[Layer] = (),
    dotted: Iterable[Layer] = (),
    forced: Mapping[str, Any] = FORCED_VALUES,
    wanted: IntendedUse | None = None,
    extra_option: str = EXTRA,
) -> EngineArgs:
    """Merge defaults < `variables` < `cli` < `extra` (YAML) < `override` (JSON) < `dotted` < `forced`.

    Dicts are merged deep, and lists replaced.

    `cli` and `forced` are nested like the result. `wanted` tells the rules what the engine is for.
    `extra_option` is the option that named `extra`. Raises `UsageError` naming the option for text that
    cannot be read; wrong values are findings: see `EngineArgs.refuse_errors`.
    """
    layers = [*variables, Layer(COMMAND_LINE, cli)]
    if extra is not None:
        read = read_yaml(extra, extra_option)
        layers.append(Layer(f"{extra_option} {extra}", read.values, read.lines))
    if override is not None:
        layers.append(Layer(OVERRIDE, read_override(override)))
    layers += dotted
    if role != "encode":
        layers.append(Layer(FORCED, forced))
    return assemble(role, layers, wanted=wanted)


def assemble(
    role: str, layers: Iterable[Layer], *, wanted: IntendedUse | None = None
) -> EngineArgs:
    """Merge `layers` over the defaults and check the result. Raises `UsageError` for an unknown role."""
    if role not in ROLES:
        raise UsageError(f"--role must be one of {', '.join(ROLES)} (got {role!r})")
    # What is ours is for an engine that generates.
    merged = merge(layers if role == "encode" else [Layer(DEFAULT, DEFAULTS), *layers])
    wanted = wanted or IntendedUse()
    replaced = sorted(_replaced(merged), key=lambda one: one.code)
    findings = [*replaced, *_prune(merged, role, wanted.engine_version)]
    stated = wanted.facts or facts_of_version(wanted.engine_version)
    wrong = check_values(merged.values, allow_unknown=wanted.allows_unknown, stated=stated)
    findings += [one for one in wrong if not _is_ours(merged, one.place)]
    case = None
    if not any(one.is_error for one in wrong):
        given = frozenset(key for key, _ in leaves(merged.values))
        case = EngineCase(role, EngineModel(merged.values), given, wanted)
        # An encoder has no KV cache and no steps, so the rules have nothing to check.
        if role != "encode":
            findings += check_rules(case)
    return EngineArgs(role, merged.values, merged.sources, _grouped(findings), case)


def _grouped(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, with those that say the same of several keys in one that lists them.

    What is to be done may differ where names are unknown.
    """
    alike: dict[Finding, list[Finding]] = {}
    for one in findings:
        advice = "" if one.code == "E101" else one.advice
        alike.setdefault(one._replace(place="", advice=advice), []).append(one)
    return [_one_of(same) for same in alike.values()]


def _one_of(same: Sequence[Finding]) -> Finding:
    """A finding in place of those that say the same of several keys."""
    first, *others = same
    if not others:
        return first
    message = f"{first.message}; the same of {', '.join(one.place for one in others)}"
    if len({one.advice for one in same}) == 1:
        return first._replace(message=message)
    advice = "; ".join(f"{one.place}: {one.advice.rstrip('?')}" for one in same)
    return first._replace(message=message, advice=advice)


def check_pair(one: EngineArgs, other: EngineArgs) -> list[Finding]:
    """The findings about a prefill and a decode engine as a pair, besides those about each.

    No findings where one has wrong values. Raises `UsageError` unless one is prefill and one decode.
    """
    cases = {one.role: one.case, other.role: other.case}
    if cases.keys() != {"prefill", "decode"}:
        raise UsageError(
            f"{PEER}: a pairing is one prefill and one decode (got {one.role} and {other.role})"
        )
    prefill, decode = cases["prefill"], cases["decode"]
    if prefill is None or decode is None:
        return []
    return [finding for rule in PAIR_RULES for finding in rule(prefill, decode)]


def _replaced(merged: Merged) -> Iterator[Finding]:
    """Yields a finding for each value of an option, or in the place of a forced one, that is replaced."""
    for key, old, old_source, new, new_source in merged.replaced:
        if new_source == FORCED and old_source != DEFAULT:
            text = f"is {in_brief(old)}, and always {in_brief(new)} here"
            yield note("E108", key, text, "take it out")
        elif new_source not in (FORCED, COMMAND_LINE) and old_source.startswith(
            (COMMAND_LINE, VARIABLES)
        ):
            place = "on the command line" if old_source == COMMAND_LINE else f"by {old_source}"
            text = f"is {in_brief(old)} {place}, and {in_brief(new)} by {new_source}, which counts"
            advice = (
                "say it in one place; trtllm-serve takes the file's before June 2026, and the "
                "option's since"
            )
            yield warning("E107", key, text, advice)


def _prune(merged: Merged, role: str, version: tuple[int, int] | None) -> Iterator[Finding]:
    """Take out of `merged`, in place, what must not reach the engine; yields a warning for each value set.

    `version` is TensorRT-LLM's, None where it is not known.
    """
    if merged.values.get("backend") == AUTODEPLOY:
        yield from _for_autodeploy(merged, version)
    yield from _lift_build_config(merged)
    if role == "encode":
        text = "is passed on to the encoder, which Dynamo's worker does not"
        for key in [each for each in merged.values if each not in ENCODER_ARGUMENTS]:
            yield warning("E805", key, text, "leave out what has no effect on an encoder")


def _for_autodeploy(merged: Merged, version: tuple[int, int] | None) -> Iterator[Finding]:
    if merged.sources.get(f"{CACHE}.{EVENTS}") == DEFAULT:
        merged.values[CACHE].pop(EVENTS)  # ours, for the back-end that makes events
    if version is not None and version < AUTODEPLOY_STATS_SINCE and merged.values.pop(STATS, None):
        yield warning(
            "E803",
            STATS,
            f"is true, and the back-end {AUTODEPLOY} does not take it before TensorRT-LLM 1.3: "
            "this worker reports no load",
            "it is left out; use a newer engine, or backend: pytorch",
        )
    for key in NOT_FOR_AUTODEPLOY:
        if merged.values.pop(key, None) is not None and not _is_ours(merged, key):
            text = f"is set, and the back-end {AUTODEPLOY} does not take it"
            yield warning("E803", key, text, "it is left out; take it out, or use backend: pytorch")


def _lift_build_config(merged: Merged) -> Iterator[Finding]:
    """Move keys of `build_config` to the top level, where engines since 1.3.0rc21 have them.

    A key that is at the top level already wins: a section that engines derive from defaults must not undo
    what is written there.
    """
    if not isinstance(merged.values.get(BUILD), dict):
        return
    for key, value in merged.values.pop(BUILD).items():
        if key not in merged.values:
            merged.values[key] = value
            for name, _ in parts({key: value}):
                merged.sources[name] = merged.sources[f"{BUILD}.{name}"]
            text = "is in a section that newer engines do not have"
            advice = "write it at the top level"
        elif in_full(merged.values[key]) != in_full(value):
            kept = in_brief(merged.values[key])
            text = f"is {in_brief(value)}, and {key} at the top level, {kept}, takes its place"
            advice = "say it once, at the top level"
        else:
            continue
        yield warning("E106", f"{BUILD}.{key}", text, advice)


def _is_ours(merged: Merged, key: str) -> bool:
    """Whether slagate alone set the key, and those below it."""
    by = {one for name, one in merged.sources.items() if f"{name}.".startswith(f"{key}.")}
    return bool(by) and by <= {DEFAULT, FORCED}
