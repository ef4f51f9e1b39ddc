"""What `LLM(**values)` is given: defaults, options, files and what the worker forces, merged and checked.

Each layer replaces values of the ones before it, and every replacement is logged with both values and
where they came from: an engine that runs with something else than its file says is hours of search.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slagate.workers.engine_args.check import check_values
from slagate.workers.engine_args.model.merge import (
    COMMAND_LINE,
    DEFAULT,
    FORCED,
    Layer,
    Merged,
    in_brief,
    merge,
)
from slagate.workers.engine_args.prune import prune
from slagate.workers.engine_args.rules.case import EngineCase, IntendedUse, case_of
from slagate.workers.engine_args.rules.table import findings_of, findings_of_pair
from slagate.workers.engine_args.yaml_text import EXTRA, OVERRIDE, PEER, read_override, read_yaml
from slagate.workers.findings import Finding, warning
from slagate.workers.runtime.usage import UsageError

KV_EVENTS = 100_000

ROLES = ("agg", "prefill", "decode", "encode")

DEFAULTS: Mapping[str, Any] = {
    "backend": "pytorch",
    "enable_iter_perf_stats": True,
    "kv_cache_config": {"event_buffer_max_size": KV_EVENTS},
    "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
}
"""What slagate says where nobody else does; the rest is TensorRT-LLM's own."""

FORCED_VALUES: Mapping[str, Any] = {
    # Processes that detokenise, which a gateway's requests do without.
    "num_postprocess_workers": 0,
}
"""What a worker's engine has whatever anybody says."""


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """The merged arguments of one engine, and what is to be said of them."""

    role: str
    values: dict[str, Any]
    """Plain nested dicts: what `LLM(**values)` gets."""
    sources: Mapping[str, str]
    """Dotted key of each value to where it came from."""
    places: Mapping[str, str]
    """The same, with sections, and with what was taken out."""
    findings: Sequence[Finding]
    case: EngineCase | None
    """What the rules looked at; None where values are wrong one by one."""

    @property
    def errors(self) -> list[Finding]:
        """The findings with which an engine must not be started."""
        return [finding for finding in self.findings if finding.is_error]

    def refuse_errors(self) -> None:
        """Raise `UsageError` that lists every error, if there is one."""
        if self.errors:
            listed = "".join(f"\n  {finding}" for finding in self.errors)
            raise UsageError(f"engine arguments: {len(self.errors)} wrong{listed}")


def build_engine_args(
    *,
    role: str,
    cli: Mapping[str, Any],
    extra: Path | None,
    override: str | None,
    forced: Mapping[str, Any] = FORCED_VALUES,
    allow_unknown: bool = False,
    wanted: IntendedUse | None = None,
    extra_option: str = EXTRA,
) -> EngineArgs:
    """Merge defaults < `cli` < `extra` (YAML) < `override` (JSON) < `forced`; dicts deep, lists replaced.

    `cli` and `forced` are nested like the result; None in `cli` is an option that was not given. With
    `wanted`, rules also look at what the engine is for. `extra_option` is what names `extra` on the
    command line. Raises `UsageError` naming the option for what cannot be read; what can be read and is
    wrong is a finding: see `EngineArgs.refuse_errors`.
    """
    layers = [Layer(COMMAND_LINE, _given(cli))]
    if extra is not None:
        read = read_yaml(extra, extra_option)
        layers.append(Layer(f"{extra_option} {extra}", read.values, read.lines))
    if override is not None:
        layers.append(Layer(OVERRIDE, read_override(override)))
    layers.append(Layer(FORCED, forced))
    return assemble(role, layers, allow_unknown=allow_unknown, wanted=wanted)


def assemble(
    role: str,
    layers: Iterable[Layer],
    *,
    allow_unknown: bool = False,
    wanted: IntendedUse | None = None,
) -> EngineArgs:
    """`layers` over the defaults, merged and checked. Raises `UsageError` for a role there is not."""
    if role not in ROLES:
        raise UsageError(f"--role must be one of {', '.join(ROLES)} (got {role!r})")
    merged = merge([Layer(DEFAULT, DEFAULTS), *layers])
    wanted = wanted or IntendedUse()
    before = {**merged.sections, **merged.sources}
    findings = _replaced(merged) + prune(merged, role, wanted.engine_version)
    model, wrong = check_values(merged.values, allow_unknown=allow_unknown)
    findings += wrong
    case = None
    if model is not None:
        case = case_of(role, model, merged.values, wanted)
        findings += findings_of(case)
    places = {**before, **merged.sources}
    return EngineArgs(role, merged.values, merged.sources, places, findings, case)


def check_pair(one: EngineArgs, other: EngineArgs) -> list[Finding]:
    """What the two roles of a pairing have against each other, besides what each has by itself.

    Empty where one of them has wrong values. Raises `UsageError` unless one is prefill and one decode.
    """
    by_role = {one.role: one, other.role: other}
    if by_role.keys() != {"prefill", "decode"}:
        raise UsageError(
            f"{PEER}: a pairing is one prefill and one decode (got {one.role} and {other.role})"
        )
    prefill, decode = by_role["prefill"].case, by_role["decode"].case
    if prefill is None or decode is None:
        return []
    return findings_of_pair(prefill, decode)


def _given(cli: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given; one that was not is None, at any depth."""
    kept: dict[str, Any] = {}
    for key, value in cli.items():
        if isinstance(value, Mapping):
            if inner := _given(value):
                kept[key] = inner
        elif value is not None:
            kept[key] = value
    return kept


def _replaced(merged: Merged) -> list[Finding]:
    """Warnings of what an operator set and a later layer replaced: first options, then forced values."""
    options, forced = [], []
    for key, old, old_source, new, new_source in merged.replaced:
        if new_source == FORCED and old_source != DEFAULT:
            text = f"is {in_brief(old)} by {old_source}, and is always {in_brief(new)} here"
            forced.append(warning("E108", key, text, "take it out"))
        elif new_source != FORCED and old_source == COMMAND_LINE:
            text = (
                f"is {in_brief(old)} on the command line, and {in_brief(new)} by {new_source}, "
                "which counts"
            )
            advice = (
                "say it in one place; trtllm-serve takes the file's before June 2026, and the "
                "option's since"
            )
            options.append(warning("E107", key, text, advice))
    return options + forced
