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
    """Merged layers: the values, a source for each leaf, and the replacements, in order."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    replaced: list[Replaced] = field(default_factory=list)
    sections: dict[str, str] = field(default_factory=dict)
    """Where each section was last written into."""

    def leaves_of(self, key: str) -> list[str]:
        """The dotted keys of values at `key` or below it."""
        return [leaf for leaf in self.sources if leaf == key or leaf.startswith(f"{key}.")]


def merge(layers: Iterable[Layer]) -> Merged:
    """Merge each layer over the earlier ones; log replaced values, defaults only at INFO."""
    merged = Merged()
    for layer in layers:
        _put(merged, merged.values, layer.values, layer, prefix="")
    for replaced in merged.replaced:
        level = logging.INFO if replaced.old_source == DEFAULT else logging.WARNING
        _LOG.log(level, "engine_args.replaced: %s", replaced)
    return merged


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and value of each leaf: of all but dicts that have keys."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _sections(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield f"{prefix}{key}"
            yield from _sections(value, f"{prefix}{key}.")


def in_full(value: Any) -> str:
    """The value as JSON; parts that JSON or UTF-8 has no form for as Python shows them."""
    text = json.dumps(value, default=repr, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()


def in_brief(value: Any) -> str:
    """The value as JSON, cut to 80 characters."""
    text = in_full(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _put(
    merged: Merged, into: dict[str, Any], values: Mapping[str, Any], layer: Layer, *, prefix: str
) -> None:
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        old = into.get(key)
        for section in _sections({key: value}, prefix):
            merged.sections[section] = layer.source_of(section)
        if isinstance(value, Mapping) and isinstance(old, dict):
            if value and not old:
                merged.sources.pop(dotted, None)  # an empty section is no value any more
            _put(merged, old, value, layer, prefix=f"{dotted}.")
            continue
        if key in into:
            _replace(merged, dotted, old, value, layer)
        # A copy: later merges into it must not reach the caller's values.
        into[key] = plain(value)
        for leaf, _ in leaves({key: into[key]}, prefix):
            merged.sources[leaf] = layer.source_of(leaf)


def plain(value: Any) -> Any:
    """A copy in which every mapping is a dict, and every tuple a list."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _replace(merged: Merged, dotted: str, old: Any, new: Any, layer: Layer) -> None:
    old_sources = [merged.sources.pop(leaf) for leaf in merged.leaves_of(dotted)]
    # Equal values in two places are no conflict; 1 and true, or 1 and 1.0, are not equal here.
    if in_full(old) != in_full(new):
        origin = ", ".join(dict.fromkeys(old_sources))
        merged.replaced.append(Replaced(dotted, old, origin, new, layer.source_of(dotted)))
