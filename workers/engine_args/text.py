"""Engine arguments as YAML, each value with a comment that says where it came from."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

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
        shown = f"{indent}{inline(key)}:"
        if isinstance(value, Mapping) and value:
            yield "", shown
            yield from _lines(value, name, f"{indent}  ")
        else:
            yield name, f"{shown} {inline(value)}"


def inline(value: Any) -> str:
    """The value on one line, in a form that YAML 1.1 reads as what it is."""
    try:
        return _dump(value)
    except yaml.YAMLError:
        return _dump(repr(value))  # an object of the engine's


class _OneLine(yaml.SafeDumper):
    """Text of several lines is escaped: plain and single-quoted text would break the line."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = '"' if len(value.splitlines()) > 1 or "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_OneLine.add_representer(str, _text)


def _dump(value: Any) -> str:
    text: str = yaml.dump(
        value, Dumper=_OneLine, default_flow_style=True, sort_keys=False, width=10**9
    )
    return text.removesuffix("...\n").rstrip("\n")
