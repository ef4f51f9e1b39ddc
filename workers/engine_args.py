"""What `LLM(**values)` is given: defaults, options, files and what the worker forces, merged in order.

Each layer replaces values of the ones before it, and every replacement is logged with both values and
where they came from: an engine that runs with something else than its file says is hours of search.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slagate.workers.engine_args_merge import Layer, merge
from slagate.workers.engine_args_read import read_override, read_yaml
from slagate.workers.engine_findings import Finding
from slagate.workers.errors import UsageError

ROLES = ("agg", "prefill", "decode", "encode")

DEFAULTS: Mapping[str, Any] = {"backend": "pytorch"}


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """The merged arguments of one engine, and what is to be said of them."""

    role: str
    values: dict[str, Any]
    """Plain nested dicts: what `LLM(**values)` gets."""
    sources: Mapping[str, str]
    """Dotted key of each value to where it came from."""
    findings: Sequence[Finding]

    @property
    def errors(self) -> list[Finding]:
        """The findings with which an engine must not be started."""
        return [finding for finding in self.findings if finding.is_error]

    def refuse_errors(self) -> None:
        """Raise `UsageError` that lists every error, if there is one."""
        if self.errors:
            raise UsageError("\n".join(str(finding) for finding in self.errors))


def build_engine_args(
    *,
    role: str,
    cli: Mapping[str, Any],
    extra: Path | None,
    override: str | None,
    forced: Mapping[str, Any],
    allow_unknown: bool = False,
) -> EngineArgs:
    """Merge defaults < `cli` < `extra` (YAML) < `override` (JSON) < `forced`; dicts deep, lists replaced.

    `cli` and `forced` are nested like the result; None in `cli` is an option that was not given. Raises
    `UsageError` naming the option for what cannot be read; what can be read and is wrong is a finding.
    """
    if role not in ROLES:
        raise UsageError(f"--role must be one of {', '.join(ROLES)} (got {role!r})")
    layers = [Layer("default", DEFAULTS), Layer("command line", given(cli))]
    if extra is not None:
        layers.append(Layer(f"--extra-engine-args {extra}", read_yaml(extra)))
    if override is not None:
        layers.append(Layer("--override-engine-args", read_override(override)))
    layers.append(Layer("forced", forced))
    merged = merge(layers)
    del allow_unknown
    return EngineArgs(role, merged.values, merged.sources, ())


def given(cli: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given; one that was not is None, at any depth."""
    kept: dict[str, Any] = {}
    for key, value in cli.items():
        if isinstance(value, Mapping):
            if inner := given(value):
                kept[key] = inner
        elif value is not None:
            kept[key] = value
    return kept
