"""Engine arguments as YAML, each value with a comment that says where it came from."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from slagate.workers.engine_args_merge import in_full

_COMMENT_COLUMN = 56
"""Comments begin here, or right after a longer value."""


def yaml_lines(values: Mapping[str, Any], sources: Mapping[str, str] | None = None) -> list[str]:
    """YAML of the values, one line a value, with their `sources` as comments in a column."""
    comments = sources or {}
    lines = []
    for dotted, text in _lines(values, "", ""):
        comment = comments.get(dotted)
        lines.append(text if comment is None else f"{text:<{_COMMENT_COLUMN}}  # {comment}")
    return lines or ["{}"]


def _lines(values: Mapping[str, Any], dotted: str, indent: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = f"{dotted}.{key}" if dotted else str(key)
        shown = f"{indent}{_inline(key)}:"
        if isinstance(value, Mapping) and value:
            yield "", shown
            yield from _lines(value, name, f"{indent}  ")
        else:
            yield name, f"{shown} {_inline(value)}"


def _inline(value: Any) -> str:
    """The value on one line."""
    try:
        text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9)
    except yaml.YAMLError:
        text = yaml.safe_dump(repr(value), width=10**9)  # an object of the engine's
    text = text.removesuffix("...\n").rstrip("\n")
    return in_full(value) if "\n" in text else text
