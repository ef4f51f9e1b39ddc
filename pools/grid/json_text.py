"""Reads JSON without its traps, lays it out, and names places and values in messages about it.

Python's reader silently keeps the last of two equal keys, and accepts NaN, Infinity and 1e400.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeGuard

from slagate.pools.grid.errors import Problem

ROOT = "$"
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SHOWN_CHARACTERS = 60
_ROW = re.compile(r"\[[^\[\]{}]*\]")


class ReadJson(NamedTuple):
    """A JSON value, or why there is none."""

    value: object
    problem: Problem | None
    repeated: tuple[tuple[str | int, ...], ...]  # paths of keys that were given more than once


class _Repeating(dict[str, object]):
    """An object with keys that were given more than once."""

    repeated: tuple[str, ...] = ()


def json_path(parts: Sequence[str | int]) -> str:
    """The place `parts` as text: `a.b[0]`, with odd keys quoted; `$` is the whole document."""
    text = ""
    for part in parts:
        if isinstance(part, str) and _PLAIN_KEY.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part)}]"
    return text or ROOT


def short_path(parts: Sequence[str | int]) -> str:
    """`json_path` with each key cut to a length that fits into a message."""
    return json_path([_cut(part) if isinstance(part, str) else part for part in parts])


def shown(value: object) -> str:
    """`value` as it stands in JSON, cut to a length that fits into a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        # Not JSON, or an integer of more digits than Python will print.
        text = f"a value of type {type(value).__name__}"
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def named(name: str) -> str:
    """A name as it is, or as JSON where it would not show on one line."""
    return name if name.isprintable() else shown(name)


def is_finite_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is an int of any size or a finite float, and not a bool."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def read_json(text: str) -> ReadJson:
    """Read a JSON document; a problem is returned. The last of equal keys counts, 1e400 is inf."""
    if not text.strip():
        return ReadJson(None, Problem(ROOT, "is empty"), ())
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_int)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        return ReadJson(None, Problem(ROOT, f"is not JSON: {reason}"), ())
    repeated = [
        (*path, key)
        for path, part in parts_of(value)
        if isinstance(part, _Repeating)
        for key in part.repeated
    ]
    return ReadJson(value, None, tuple(repeated))


def _int(text: str) -> int | float:
    # Python limits the digits it will convert. A longer number becomes infinity, like 1e400.
    try:
        return int(text)
    except ValueError:
        return float(text)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    repeating = _Repeating(value)
    times = Counter(key for key, _ in pairs)
    repeating.repeated = tuple(key for key, n in times.items() if n > 1)
    return repeating


def parts_of(root: object) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """Yield `root` and all that is in it, with paths."""
    todo: list[tuple[tuple[str | int, ...], object]] = [((), root)]
    for path, value in todo:  # grows while it is read: breadth first, at any depth
        yield path, value
        if isinstance(value, dict):
            todo += [((*path, key), item) for key, item in value.items()]
        elif isinstance(value, list):
            todo += [((*path, at), item) for at, item in enumerate(value)]


def laid_out(content: object) -> str:
    """JSON for people: indented, with each list that holds neither lists nor objects on one line."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    return _ROW.sub(lambda row: _joined(row[0]), text) + "\n"


def _joined(row: str) -> str:
    # A line end is never part of a JSON string, as other blanks may be.
    return re.sub(r"\n\s*", " ", re.sub(r"(?<=\[)\n\s*|\n\s*(?=\])", "", row))
