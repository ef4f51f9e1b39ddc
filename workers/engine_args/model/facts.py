"""What is known of the engine's arguments, by version: names, types, choices, bounds and defaults.

The facts of a version are a JSON file with the engine's own JSON Schema, as pydantic writes it but without
descriptions, and where it was read. `versions/` has those of some; `slagate worker facts` makes one of an
installed package. What a schema cannot say, files by hand add: `x-aliases` (other names of a field),
`x-any-case` (choices in capitals or not), `x-keys` (of a mapping), `x-usual` (texts that the engine knows),
`x-soft` (bounds) and `x-power-of-two`; a value against the last three may still be taken. The newest file's
defaults are also what rules read; `x-null-is-default` says where null stands for one.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from slagate.workers.engine_args.model.merge import parts
from slagate.workers.runtime.usage import UsageError

_VERSIONS = resources.files("slagate.workers.engine_args.model") / "versions"

Schema = Mapping[str, Any]

TYPES = {
    "integer": (int, "a whole number"),
    "number": (float, "a number"),
    "boolean": (bool, "true or false"),
    "string": (str, "text"),
    "null": (type(None), "null"),
    "array": (list[Any], "a list"),
    "object": (dict[Any, Any], "a mapping"),
}
_ADAPTERS = {name: TypeAdapter[Any](kind) for name, (kind, _) in TYPES.items()}
"""As lax as the engine's own models, which take "16", 16.0 and true for a whole number."""

BOUNDS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "exclusiveMinimum": ("be above", lambda value, limit: value > limit),
    "minimum": ("be at least", lambda value, limit: value >= limit),
    "exclusiveMaximum": ("be below", lambda value, limit: value < limit),
    "maximum": ("be at most", lambda value, limit: value <= limit),
    "minItems": ("have entries, at least", lambda value, limit: len(value) >= limit),
    "minLength": ("have characters, at least", lambda value, limit: len(value) >= limit),
}
_MAX_INTEGER = (1 << 63) - 1
_INFERRED_TAGS = ("", "mode")
"""Keys by which the engine tells the kinds of a section apart, and which it infers if they are missing."""

_FREE = (
    *("model_kwargs", "env_overrides", "speculative_config.draft_len_schedule"),
    *("moe_config.load_balancer.initial_global_assignments", "sleep_config.restore_modes"),
)
"""Mappings whose keys are the operator's."""


class FactProblem(NamedTuple):
    """What the facts of one version have against a value.

    `wanted` says for a type or a bound what the value must be, for a field of another kind whose it is;
    `choices` are for a choice those there are, for an unknown name its neighbours. If `is_soft`, the engine
    may take the value all the same.
    """

    kind: Literal["unknown", "type", "choice", "bound", "missing", "other kind"]
    place: str
    got: Any
    wanted: str = ""
    choices: tuple[Any, ...] = ()
    is_soft: bool = False


class Sections(NamedTuple):
    """The sections that a value may be: one, several that a key tells apart, or none at all."""

    kinds: Mapping[str, Schema]
    """By the value of that key; under the empty name where there is one."""
    tag: str = ""
    """That key; empty where nothing tells them apart."""

    def kind_of(self, value: Mapping[str, Any]) -> str:
        """What `value` says that it is, which need not be among the kinds."""
        return str(value.get(self.tag)) if self.tag else ""

    def having(self, key: str, kind: str) -> dict[str, Schema]:
        """The field of this name, or with it among its others, of each kind that has one; `kind` first."""
        fields: dict[str, Schema] = {}
        for name in (kind, *self.kinds):
            properties = self.kinds[name]["properties"] if name in self.kinds else {}
            others = (one for one in properties.values() if key in one.get("x-aliases", ()))
            field = properties[key] if key in properties else next(others, None)
            if field is not None:
                fields[name] = field
        return fields


@dataclass(frozen=True, slots=True, eq=False)
class EngineFacts:
    """The facts of one version."""

    version: str
    source: str
    schema: Schema

    def fields(self, schema: Schema | None = None, prefix: str = "") -> dict[str, Schema]:
        """The schema of each field, by dotted name; for a section of several kinds of all of them."""
        kinds, tag = self.sections(self.schema if schema is None else schema)
        found: dict[str, Schema] = {}
        for kind in kinds.values():
            for name, one in kind["properties"].items():
                found |= {f"{prefix}{each}": one for each in (name, *one.get("x-aliases", ()))}
                found |= self.fields(one, f"{prefix}{name}.")
        return {**found, f"{prefix}{tag}": {"enum": [*kinds]}} if tag else found

    def problems(self, values: Mapping[str, Any]) -> list[FactProblem]:
        """What is against these arguments, nested, in their order."""
        return list(self._judge(self.schema, values, ""))

    def unread_sections(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yields the dotted sections that are set, and of which the facts do not say what is in them."""
        known = self.fields()
        for name, value in parts(values):
            is_known = name in known and (name in _FREE or self.sections(known[name]).kinds)
            if value and isinstance(value, Mapping) and name in known and not is_known:
                yield name

    def taken(self, schema: Schema, value: Any) -> Any:
        """The value as the engine takes it. Raises `ValueError` for another type, or out of soft bounds."""
        if value is None and "x-null-is-default" in schema:
            raise ValueError("stands for the default")
        for one in self._alternatives(schema):
            kind = "object" if "properties" in one else one.get("type")
            with suppress(ValueError):
                read = _ADAPTERS[kind].validate_python(value) if kind in TYPES else value
                if "x-any-case" in one:
                    read = next(
                        (each for each in one["enum"] if each.lower() == read.lower()), read
                    )
                if not _broken(one.get("x-soft", {}), read):
                    items = one.get("items")
                    return [self.taken(items, each) for each in read] if items else read
        raise ValueError(f"{value!r:.60} is of none of the types")

    def sections(self, schema: Schema) -> Sections:
        """The sections that a value of this schema may be."""
        schema = self._resolved(schema)
        for one in (schema, *map(self._resolved, _options(schema))):
            if tag := one.get("discriminator"):
                kinds = {name: self._resolved({"$ref": to}) for name, to in tag["mapping"].items()}
                return Sections(kinds, tag["propertyName"])
        several = [one for one in self._alternatives(schema) if "properties" in one]
        return Sections({str(n) if several[1:] else "": one for n, one in enumerate(several)})

    def _alternatives(self, schema: Schema) -> list[Schema]:
        """The schemas of which a value may be, and which leave no choice of schemas themselves."""
        schema = self._resolved(schema)
        options = _options(schema)
        inner = [each for one in options for each in self._alternatives(one)]
        return inner if options else [schema]

    def _resolved(self, schema: Schema) -> Schema:
        while (reference := schema.get("$ref")) is not None:
            schema = self.schema["$defs"][reference.rpartition("/")[2]]
        return schema

    def _judge(self, schema: Schema, value: Any, place: str) -> Iterable[FactProblem]:
        if isinstance(value, Mapping) and (sections := self.sections(schema)).kinds:
            return self._judge_section(sections, value, place)
        tried = [[*self._judge_plain(one, value, place)] for one in self._alternatives(schema)]
        if not all(tried):
            return ()
        of_text = [one for one in tried if one[0].kind == "choice" and isinstance(value, str)]
        return (of_text or tried)[0]

    def _judge_section(
        self, sections: Sections, value: Mapping[str, Any], place: str
    ) -> Iterator[FactProblem]:
        """Judge a section by the fields of all its kinds, and what its own one has and requires."""
        kinds, tag = sections
        dot, kind = f"{place}." if place else "", sections.kind_of(value)
        required = kinds.get(kind, {}).get("required", ()) if place else ()
        for key in dict.fromkeys((*([tag] if tag not in _INFERRED_TAGS else ()), *required)):
            if key not in value:
                yield FactProblem("missing", f"{dot}{key}", None)
        for key, one in value.items():
            fields = sections.having(str(key), kind)
            if tag and key == tag:
                if kind not in kinds:
                    yield FactProblem("choice", f"{dot}{tag}", one, choices=tuple(kinds))
            elif fields:
                yield from self._judge(next(iter(fields.values())), one, f"{dot}{key}")
                if kind in kinds and kind not in fields:
                    yield FactProblem("other kind", f"{dot}{key}", kind, " and ".join(fields))
            elif all(each.get("additionalProperties") is False for each in kinds.values()):
                names = {name: None for each in kinds.values() for name in each["properties"]}
                yield FactProblem("unknown", f"{dot}{key}", one, choices=tuple(names))

    def _judge_plain(self, schema: Schema, value: Any, place: str) -> Iterator[FactProblem]:
        if choices := schema.get("enum", [schema["const"]] if "const" in schema else ()):
            is_any_case = "x-any-case" in schema and isinstance(value, str)
            spelt = [one.lower() for one in (value, *choices)] if is_any_case else [value, *choices]
            if not any(type(one) is type(value) and one == spelt[0] for one in spelt[1:]):
                yield FactProblem("choice", place, value, choices=tuple(choices))
            return
        kind = "object" if "properties" in schema else schema.get("type")
        if kind not in TYPES:
            return  # anything
        try:
            value = _ADAPTERS[kind].validate_python(value)
        except ValidationError:
            yield FactProblem("type", place, value, TYPES[kind][1])
            return
        if kind == "integer" and abs(value) > _MAX_INTEGER:
            yield FactProblem("bound", place, value, f"be at most {_MAX_INTEGER}")
        for bounds in (schema, schema.get("x-soft", {})):
            if wanted := _broken(bounds, value):
                yield FactProblem("bound", place, value, wanted, is_soft=bounds is not schema)
                return
        if schema.get("x-power-of-two") and value & (value - 1):
            yield FactProblem("bound", place, value, "be a power of two", is_soft=True)
        if (usual := schema.get("x-usual")) and value not in usual:
            yield FactProblem("choice", place, value, choices=tuple(usual), is_soft=True)
        of_values = schema.get("additionalProperties")
        if kind == "array":
            for n, item in enumerate(value):
                yield from self._judge(schema.get("items", {}), item, f"{place}[{n}]")
        elif kind == "object":
            for key, item in value.items():
                if key not in (names := schema.get("x-keys", [key])):
                    yield FactProblem("unknown", f"{place}.{key}", item, choices=tuple(names))
                elif isinstance(of_values, Mapping) and of_values != {"type": "string"}:
                    yield from self._judge(of_values, item, f"{place}.{key}")


def _broken(bounds: Schema, value: Any) -> str:
    """The bound that a value is out of, in words, or none."""
    for name, (words, holds) in BOUNDS.items():
        if name in bounds and not holds(value, bounds[name]):
            return f"{words} {bounds[name]}"
    return ""


def _options(schema: Schema) -> Sequence[Schema]:
    return (*schema.get("anyOf", ()), *schema.get("oneOf", ()))


@cache
def known_versions() -> tuple[EngineFacts, ...]:
    """The facts that come with slagate, oldest version first."""
    files = [one for one in _VERSIONS.iterdir() if one.name[:1].isdigit()]
    return tuple(_facts(one.read_text()) for one in sorted(files, key=lambda one: one.name))


@cache
def renamed() -> Mapping[str, str]:
    """What is to be said of names of older engines and other tools, by the dotted name."""
    names: dict[str, str] = json.loads((_VERSIONS / "renamed.json").read_text())["names"]
    return names


def facts_of_version(version: tuple[int, int] | None) -> EngineFacts | None:
    """The facts of a version, or else of the nearest older one, or of the oldest; None for None."""
    if version is None:
        return None
    known = [(tuple(map(int, one.version.split(".")[:2])), one) for one in known_versions()]
    return [known[0][1], *(one for number, one in known if number <= version)][-1]


def read_facts(place: str, option: str) -> EngineFacts:
    """The facts in a file, or of a version. Raises `UsageError` naming the option."""
    known = {one.version: one for one in known_versions()}
    try:
        return known[place] if place in known else _facts(Path(place).read_text())
    except OSError as error:
        why = f"{error.strerror or error}; versions that are known: {', '.join(known)}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"is no file of slagate worker facts: {error!r}"
    raise UsageError(f"{option}: {place}: {why}")


def _facts(text: str) -> EngineFacts:
    read = json.loads(text)
    facts = EngineFacts(str(read["version"]), str(read["source"]), read["schema"])
    facts.fields()  # every reference leads somewhere
    return facts
