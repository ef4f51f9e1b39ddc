"""What a file is that is no fleet file as it stands, and in one sentence what to do with it.

People hand over what they have at hand: a Kubernetes manifest, a plugin's configuration, a page's example.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import yaml

from slagate.pools.fleet_file.keys import CHAIN, EPP_KEYS, STAGES
from slagate.pools.fleet_file.report import Path
from slagate.pools.grid.errors import Problem
from slagate.pools.grid.json_text import parts_of, short_path

_KEYS = {
    *EPP_KEYS,
    *(key for mode in STAGES.values() for keys in mode.values() for key in keys.top),
}
_MAX_CHARACTERS = 1 << 18  # PyYAML takes seconds for as many
_MAX_PARTS = 8_000  # aliases in ten lines of YAML can make billions

_VARIABLE = r"\$\{[^{}\n]{0,80}\}|\$\([A-Za-z_]\w*\)|\$[A-Za-z_]\w*\b"
_MARKED = (
    r"<[A-Za-z_][\w .-]{0,80}>|<%[^%\n]{0,80}%>|(?<!\w)(@@?|%|__)[A-Z][A-Z0-9_]{0,80}?\1(?!\w)"
)
_UNFILLED = re.compile(rf"{_VARIABLE}|\{{\{{[^{{}}\n]{{0,80}}\}}\}}|{_MARKED}")
_COMMENT = r"(?://|\#)[^\n]*(?:\n|\Z)|/\*(?:(?!\*/).)*(?:\*/|\Z)"
_EXTRAS = (
    (_COMMENT, "", "comments (take them out)"),
    (r"'(?:[^'\\]|\\.|\\\Z)*(?:'|\Z)", '""', "single quotes (write double ones)"),
    (_VARIABLE, "0", "variables that nothing fills in here (write their values, as envsubst does)"),
    (r"<[^<>\n]*>", "0", "placeholders (write values in their place)"),
    (
        r"\b(?:True|False|None|nan|inf)\b",
        "0",
        "words of Python (write true, false, null, a number)",
    ),
    (r"\b[A-Za-z_]\w*(?=\s*:)", '""', "keys without quotes (put them in double ones)"),
    (r"```\w*", "", "lines of a Markdown fence (take them out)"),
    (r"\ufeff", "", "a byte order mark (save it as UTF-8 without one)"),
    (rf",(?=(?:\s|{_COMMENT})*[\]}}])", "", "a comma before a closing bracket (take it out)"),
)
"""What text may have that JSON has not, what JSON could have there, and what to do about it."""
# What is not closed goes on to the end, so that each character is looked at once.
_TOKEN = re.compile(
    "|".join([r'"(?:[^"\\]|\\.|\\\Z)*(?:"|\Z)', *(f"({row[0]})" for row in _EXTRAS)]), re.DOTALL
)


def what_text_is(text: str) -> str | None:
    """What a text that is no JSON is, and what to do with it; None: that is not known."""
    if len(text) > _MAX_CHARACTERS:
        return None
    if "{{" in text or "{%" in text:
        return "is a template: give what it becomes when rendered, such as by helm template"
    lines: dict[str, int] = {}

    def mended(match: re.Match[str]) -> str:
        if match.lastindex is None:
            return match[0]
        _, instead, says = _EXTRAS[match.lastindex - 1]
        if says not in lines:
            lines[says] = text.count("\n", 0, match.start()) + 1
        return instead

    plain = _TOKEN.sub(mended, text).strip()
    if not plain.startswith(("{", "[")):
        value = _yaml(text)
        yaml_says = "is YAML: write it as JSON, such as with yq -o json"
        if isinstance(value, dict | list):
            return what_is_around(value) or yaml_says
        if re.match(r"\s*<(!doctype|html|\?xml)\b", text, re.IGNORECASE):
            return "is HTML or XML, as of a page that a download got in place of the file"
        around = "has other text around its JSON: keep the object alone, from { to }"
        return around if '"' in plain and "{" in plain else None
    try:
        json.loads(plain)
    except (ValueError, RecursionError) as error:
        goes_on = str(error).startswith("Extra data")
        return "goes on after the end of its JSON: keep one object" if goes_on else None
    return f"is not JSON, as it has {' and '.join(lines)}, from line {min(lines.values())} on"


def _yaml(text: str) -> Any:
    """The content of a YAML text, or a list of its documents; None: it is not YAML."""
    try:
        documents = [each for each in yaml.safe_load_all(text) if each is not None]
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return None  # PyYAML's own errors, and those for a tag that does not fit its text
    return documents[0] if len(documents) == 1 else documents or None


def what_is_around(value: object) -> str | None:
    """What has a fleet file inside, where it is, and what to do; None for anything else."""
    if _is_grid(value):
        return None
    whole = [
        each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)
    ]
    kinds = [each["kind"] for each in whole if {"apiVersion", "kind"} <= each.keys()]
    kind = f"is a Kubernetes {kinds[0] if len(kinds) == 1 else 'manifest'}"
    paths = islice(_grids_in(value), 9)
    places = [short_path([at if isinstance(at, int) else str(at) for at in path]) for path in paths]
    if not places and any("binaryData" in each for each in whole):
        return f"{kind} with binaryData: decode it, such as with base64 -d, into a JSON file"
    if not places:
        return f"{kind} without a fleet file in it: give the file with the grid" if kinds else None
    what = f"{kind} with the fleet file" if kinds else "is not the fleet file itself, which is"
    part = "what is there" if len(places) == 1 else "the one that is meant"
    return f"{what} at {', '.join(places)}: put {part} into a JSON file of its own"


def _is_grid(value: object) -> bool:
    return isinstance(value, dict) and len(_KEYS & value.keys()) > 1


def _grids_in(value: object) -> Iterator[Path]:
    """Yield where a value has a fleet file, as an object or as text."""
    for path, part in islice(parts_of(value), _MAX_PARTS):
        if _is_grid(part):
            yield path
        elif isinstance(part, str) and sum(key in part for key in _KEYS) > 1:
            inner = _yaml(part)
            if inner is None:  # it may be JSON with comments
                yield path
            elif not isinstance(inner, str):
                yield from ((*path, *deeper) for deeper in _grids_in(inner))


def unfilled(content: object) -> Problem | None:
    """The first text of a file that has a variable or placeholder, and what to do; None: there is none."""
    places: dict[str, Path] = {}
    for path, part in parts_of(content):
        for found in _UNFILLED.finditer(part) if isinstance(part, str) else ():
            places.setdefault(found[0], path)
    if not places:
        return None
    names, first = ", ".join([*places][:3]), next(iter(places.values()))
    says = f"has {names}, which nothing fills in here: write the value, as envsubst does"
    return Problem(short_path(first), says)


def in_brief(problems: Sequence[Problem], gap: Problem | None) -> list[Problem]:
    """The problems, less bad values that `gap` explains and missing keys that a chain of pools replaces."""
    chains = tuple(each.path.removesuffix(CHAIN) for each in problems if each.path.endswith(CHAIN))
    return ([] if gap is None else [gap]) + [
        each
        for each in problems
        if not (each.message == "is required (got nothing)" and each.path.startswith(chains))
        and not (gap is not None and _UNFILLED.search(each.message))
    ]
