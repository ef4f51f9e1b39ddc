"""Engine arguments as text: read from a YAML file and from a JSON override, written as YAML.

YAML is read as TensorRT-LLM reads it: by PyYAML's safe loader, for which `off` is false and `1e-3` is text.
Here a key given twice, of which that loader takes the last, and a key that is no name are refused.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import yaml

from slagate.workers.runtime.usage import UsageError

EXTRA = "--extra-engine-args"
PEER = "--peer-engine-args"
OVERRIDE = "--override-engine-args"
MAX_BYTES = 1 << 18
"""The most bytes of a file: a hundred times the largest known, and still read in seconds."""

MAX_DEPTH = 50
MAX_NODES = 100_000
"""The most values in a file, with repetitions by aliases: ten lines of those can make billions."""

_WRAPPERS = (
    *("context_servers", "generation_servers", "server_configs", "worker_config", "trtllm_config"),
    "extra_llm_api_options",
)
"""Keys of trtllm-serve's disaggregated file, and of benchmarks, with engine arguments below."""

_ROLES = {"prefill", "decode", "aggregated", "agg", "ctx", "gen"}
_TOO_MUCH = f"has more than {MAX_NODES:,} values, or is nested more than {MAX_DEPTH} deep"


class ReadArgs(NamedTuple):
    """Arguments of a file, and the line, from 1, of each dotted key."""

    values: dict[str, Any]
    lines: dict[str, int]


def engine_configs() -> list[str]:
    """Names of the packaged configurations, such as `qwen3/prefill`."""
    return sorted(
        f"{folder.name}/{file.name.removesuffix('.yaml')}"
        for folder in resources.files("slagate.configs").joinpath("engines").iterdir()
        for file in folder.iterdir()
    )


def read_yaml(path: Path, option: str = EXTRA) -> ReadArgs:
    """The mapping in a YAML file. A path without suffix that is no file names a packaged configuration.

    Raises `UsageError` naming option, file and line.
    """
    try:
        text = _source(path, option)
    except UnicodeDecodeError as error:
        raise UsageError(f"{option}: {path}: is not UTF-8: {error}") from error
    except OSError as error:
        raise UsageError(f"{option}: {path}: {error.strerror or error}") from error
    return parse_yaml(text, f"{option}: {path}")


def parse_yaml(text: str, place: str) -> ReadArgs:
    """The mapping in `text`; `place` begins its errors. Raises `UsageError`."""
    try:
        # libyaml's loader is faster, but takes tabs, tags and byte order marks that this one refuses.
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return ReadArgs({}, {})  # nothing but comments
        lines = _key_lines(node, place)
        value = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}:" if mark else ""
        why = "is not YAML: " + (error.problem or str(error))
        if error.problem == "but found another document":
            why = "has several documents: write one role's into a file of its own"
        raise UsageError(f"{place}:{line} {_unfilled(text) or why}") from error
    except UsageError as error:
        if template := _unfilled(text):
            raise UsageError(f"{place}: {template}") from error
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{place}: is not YAML: {error}") from error
    except (LookupError, AttributeError, TypeError) as error:
        # PyYAML assumes that it derived each tag from the text, which `!!bool maybe` is not.
        raise UsageError(f"{place}: is not YAML: a value is not what its tag says") from error
    except RecursionError:
        raise UsageError(f"{place}: {_TOO_MUCH}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{place}: must be a mapping of argument names (got {value!r:.60})")
    for name in value:
        if not isinstance(name, str):
            raise UsageError(f"{place}: {name!r} is no name of an argument")
    if inside := _places_inside(value):
        own = "write those of one role into a file of their own"
        raise UsageError(f"{place}: has engine arguments below {', '.join(inside)}: {own}")
    return ReadArgs(value, lines)


def _unfilled(text: str) -> str | None:
    """What is to be said of a template that nobody filled in; None where there is none."""
    found = re.search(r"\{\{.{0,60}?\}\}|\{%.{0,60}?%\}", text)
    return found and f"{found[0]} is not filled in: give the file that is made of this template"


def _places_inside(value: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Where a file of something else, as a Kubernetes object or a benchmark's, has arguments of engines."""
    if {"apiVersion", "kind"} <= value.keys():
        data = value.get("data")
        return [f"data.{key}" for key in data] if isinstance(data, Mapping) and data else ["spec"]
    places: list[str] = []
    for key, inner in value.items():
        if key in _WRAPPERS:
            roles = inner if isinstance(inner, Mapping) and _ROLES & inner.keys() else {"": None}
            places += [f"{prefix}{key}.{role}".removesuffix(".") for role in roles]
        elif isinstance(inner, Mapping) and key in ("backend", "config"):
            places += _places_inside(inner, f"{prefix}{key}.")
    return places


def _key_lines(root: yaml.Node, place: str) -> dict[str, int]:
    """The line of each dotted key. Raises `UsageError` for what the loader would accept silently."""
    lines: dict[str, int] = {}
    todo = [(root, "", 0)]
    for node, dotted, depth in todo:  # grows while it is read: breadth first
        if depth > MAX_DEPTH or len(todo) > MAX_NODES:
            # An alias inside its own anchor ends here too.
            raise UsageError(f"{place}: {_TOO_MUCH}")
        if isinstance(node, yaml.SequenceNode):
            todo += [(item, dotted, depth + 1) for item in node.value]
        seen: dict[str, int] = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise UsageError(f"{place}: line {line}: a key must be a name")
            if key.value in seen:
                already = f"{key.value!r} is there already, at line {seen[key.value]}"
                raise UsageError(f"{place}: line {line}: {already}")
            seen[key.value] = line
            inner = f"{dotted}.{key.value}" if dotted else key.value
            lines[inner] = line
            todo.append((value, inner, depth + 1))
    return lines


def read_override(text: str) -> dict[str, Any]:
    """The object in `--override-engine-args`, strict JSON. Raises `UsageError`."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError:
        raise UsageError(f"{OVERRIDE}: {_TOO_MUCH}") from None
    except ValueError as error:
        raise UsageError(f"{OVERRIDE}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{OVERRIDE}: must be a JSON object (got {text:.60})")
    return value


def _source(path: Path, option: str) -> str:
    name = path.as_posix()
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        if name not in engine_configs():
            known = ", ".join(engine_configs())
            raise UsageError(f"{option}: {path} is no file, and no packaged one of {known}")
        packaged = resources.files("slagate.configs").joinpath("engines").joinpath(f"{name}.yaml")
        return packaged.read_text(encoding="utf-8")
    if path.exists() and not (path.is_file() or path.is_dir()):
        # A pipe or a device may never end.
        raise UsageError(f"{option}: {path}: is no regular file")
    with path.open("rb") as file:  # which raises for a folder
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise UsageError(f"{option}: {path}: has more than {MAX_BYTES:,} bytes")
    return content.decode()


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"{key!r} is there twice")
        value[key] = item
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_COMMENT_COLUMN = 56
"""Comments begin here, or right after a longer value."""


def yaml_lines(
    values: Mapping[str, Any], sources: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """YAML of the values, one line a value, with their `sources` as comments in a column."""
    lines = [
        f"{text:<{_COMMENT_COLUMN}}  # {sources[dotted]}" if dotted in sources else text
        for dotted, text in _lines(values, "", "")
    ]
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
    """The value on one line, in a form that YAML 1.1 reads back as the same value."""
    try:
        return _dump(value)
    except yaml.YAMLError:
        return _dump(repr(value))  # an object of the engine's


class _OneLine(yaml.SafeDumper):
    """A dumper that escapes text of several lines, so that every value stays on one line."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = '"' if len(value.splitlines()) > 1 or "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_OneLine.add_representer(str, _text)


def _dump(value: Any) -> str:
    text: str = yaml.dump(
        value, Dumper=_OneLine, default_flow_style=True, sort_keys=False, width=10**9
    )
    return text.removesuffix("...\n").rstrip("\n")
