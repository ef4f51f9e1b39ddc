"""What pydantic finds wrong with a file, in the words of this room's messages, each with its place."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from slagate.pools.grid.errors import Problem
from slagate.pools.grid.json_text import json_path, shown
from slagate.workers.runtime.usage import nearest, unknown_key

# By pydantic's kinds of error; our own kinds bring their text. Named tuples have kinds of their own in
# earlier versions of pydantic.
_REASONS = {
    "missing": "is required",
    "missing_argument": "is required",
    "int_type": "must be an integer",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "string_unicode": "must have keys of valid Unicode",
    "string_too_long": "must have at most {max_length} characters",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "named_tuple_type": "must be an object",
    "arguments_type": "must be an object",
    "invalid_key": "must have string keys",
    "too_short": "must not be empty",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
}
MISSING = frozenset({"missing", "missing_argument"})
"""Kinds of error whose `input` is not what is there, as nothing is."""

_UNKNOWN = frozenset({"extra_forbidden", "unexpected_keyword_argument"})


def reason(item: Mapping[str, Any]) -> str:
    """What is wrong, by an entry of `ValidationError.errors`."""
    known = _REASONS.get(item["type"])
    if known is None:
        return str(item["msg"])
    limits = {
        name: int(limit) if isinstance(limit, float) and limit.is_integer() else limit
        for name, limit in item.get("ctx", {}).items()
    }
    return known.format(**limits) + _meant(item)


def _meant(item: Mapping[str, Any]) -> str:
    """What was probably meant by a word that is none of those that a key may have."""
    if item["type"] != "literal_error" or not isinstance(item["input"], str):
        return ""
    near = nearest(item["input"].lower(), re.findall(r"'(.*?)'", item["ctx"]["expected"]))
    return "" if near is None else f", did you mean '{near}'?"


def problems(error: ValidationError, keys: Mapping[str, Iterable[str]]) -> Iterator[Problem]:
    """Every problem with its place and what is there, and what was probably meant by an unknown key.

    `keys` are those that an object may have, by the name that it or the list it is in has; the whole file
    is "".
    """
    for item in error.errors(include_url=False):
        path = item["loc"]
        got = "nothing" if item["type"] in MISSING else shown(item["input"])
        if item["type"] in _UNKNOWN:
            parents = [part for part in reversed(path[:-1]) if part in keys]
            message = unknown_key(str(path[-1]), keys[str(parents[0]) if parents else ""])
        else:
            message = reason(item)
        yield Problem(json_path(path), f"{message} (got {got})")
