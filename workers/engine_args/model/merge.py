"""Layers of engine arguments merged into plain nested dicts, with where each value came from.

Only plain dicts are merged, and models are built from the result. A model of a section, merged as a value,
would replace the whole section, and with it every key that the override does not name.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

_LOG = logging.getLogger(__name__)

DEFAULT = "default"
COMMAND_LINE = "command line"
VARIABLES = "DYN_TRTLLM_"
"""What begins the source of values that environment variables set."""

FORCED = "forced"


class Layer(NamedTuple):
    """Some arguments, nested, and where they came from, in words for an operator."""

    source: str
    values: Mapping[str, Any]
    lines: Mapping[str, int] = MappingProxyType({})
    """Of a file: the line of each dotted key."""

    def source_of(self, dotted: str) -> str:
        """Where a value came from; for a file, with the line."""
        line = self.lines.get(dotted)
        return self.source if line is None else f"{self.source}:{line}"


class Replaced(NamedTuple):
    """A value that a later layer replaced."""

    key: str
    old: Any
    old_source: str
    new: Any
    new_source: str

    def __str__(self) -> str:
        return (
            f"{self.key}: {in_brief(self.old)} ({self.old_source}) is replaced by "
            f"{in_brief(self.new)} ({self.new_source})"
        )


@dataclass(slots=True)
class Merged:
    """Merged layers: the values, where each of them came from, and the replacements, in order."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """By dotted key; of a section where it was last written into."""
    replaced: list[Replaced] = field(default_factory=list)


def merge(layers: Iterable[Layer]) -> Merged:
    """Merge each layer over the earlier ones; log replaced values, defaults only at INFO."""
    merged = Merged()
    for layer in layers:
        _put(merged, merged.values, layer.values, layer, prefix="")
    for replaced in merged.replaced:
        level = logging.INFO if replaced.old_source == DEFAULT else logging.WARNING
        _LOG.log(level, "engine_args.replaced: %s", replaced)
    return merged


def _put(
    merged: Merged, into: dict[str, Any], values: Mapping[str, Any], layer: Layer, *, prefix: str
) -> None:
    for key, value in values.items():
        dotted, old = f"{prefix}{key}", into.get(key)
        if isinstance(value, Mapping) and isinstance(old, dict):
            merged.sources[dotted] = layer.source_of(dotted)
            _put(merged, old, value, layer, prefix=f"{dotted}.")
            continue
        if key in into:
            was = {name: merged.sources.pop(name, "") for name, _ in parts({dotted: old})}
            # Equal values in two places are no conflict; 1 and true, or 1 and 1.0, are not equal here.
            if in_full(old) != in_full(value):
                origin = ", ".join(dict.fromkeys(was[leaf] for leaf, _ in leaves({dotted: old})))
                new_source = layer.source_of(dotted)
                merged.replaced.append(Replaced(dotted, old, origin, value, new_source))
        # A copy: later merges into it must not reach the caller's values.
        into[key] = plain(value)
        for name, _ in parts({dotted: value}):
            merged.sources[name] = layer.source_of(name)


def parts(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of each section, and of each value in it."""
    for key, value in values.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from parts(value, f"{prefix}{key}.")


def leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and value of each leaf: of all but dicts that have keys."""
    return (part for part in parts(values) if not (part[1] and isinstance(part[1], Mapping)))


def plain(value: Any) -> Any:
    """A copy in which every mapping is a dict, and every tuple a list."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def in_full(value: Any) -> str:
    """The value as JSON; parts that JSON or UTF-8 has no form for as Python shows them."""
    text = json.dumps(value, default=repr, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()


def in_brief(value: Any) -> str:
    """The value as JSON, cut to 80 characters."""
    text = in_full(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
