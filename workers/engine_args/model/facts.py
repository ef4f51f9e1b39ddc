"""What is known of the engine's arguments, by version: names, types, choices, bounds and defaults.

The facts of a version are a JSON file with the engine's own JSON Schema, as pydantic writes it but without
descriptions, and where it was read. `versions/` has those of some; `slagate worker facts` makes one of an
installed package. What a schema cannot say, files by hand add: `x-aliases` (other names of a field),
`x-any-case` (choices in capitals or not), `x-keys` (of a mapping), `x-usual` (texts that the engine knows),
`x-soft` (bounds) and `x-power-of-two`; a value against the last three may still be taken.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from slagate.workers.runtime.usage import UsageError

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
_INFERRED_TAGS = ("mode",)
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


@dataclass(frozen=True, slots=True, eq=False)
class EngineFacts:
    """The facts of one version."""

    version: str
    source: str
    schema: Schema

    def fields(self) -> dict[str, Schema]:
        """The schema of each field, by dotted name; for a section of several kinds of all of them."""
        return dict(self._fields(self.schema, ""))

    def problems(self, values: Mapping[str, Any]) -> list[FactProblem]:
        """What is against these arguments, nested, in their order."""
        return list(self._judge(self.schema, values, ""))

    def unread_sections(self, values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        """Yields the dotted sections that are set, and of which the facts do not say what is in them."""
        known = self.fields()
        for name, value in values.items():
            schema = known.get(dotted := f"{prefix}{name}")
            if schema is None or not isinstance(value, Mapping) or dotted in _FREE:
                continue
            if self._kinds(schema):
                yield from self.unread_sections(value, f"{dotted}.")
            elif value and "string" not in str(schema.get("additionalProperties")):
                yield dotted

    def _resolved(self, schema: Schema) -> Schema:
        while (reference := schema.get("$ref")) is not None:
            schema = self.schema["$defs"][reference.rpartition("/")[2]]
        return schema

    def _kinds(self, schema: Schema) -> list[Schema]:
        """The sections that a schema may stand for."""
        schema = self._resolved(schema)
        kinds = [kind for option in _options(schema) for kind in self._kinds(option)]
        return [schema] if "properties" in schema else kinds

    def _fields(self, schema: Schema, prefix: str) -> Iterator[tuple[str, Schema]]:
        for kind in self._kinds(schema):
            for name, one in kind["properties"].items():
                yield from ((f"{prefix}{each}", one) for each in (name, *one.get("x-aliases", ())))
                yield from self._fields(one, f"{prefix}{name}.")
        for option in (schema, *_options(schema)):
            if tag := self._resolved(option).get("discriminator"):
                yield f"{prefix}{tag['propertyName']}", {"enum": [*tag["mapping"]]}

    def _judge(self, schema: Schema, value: Any, place: str) -> Iterator[FactProblem]:
        schema = self._resolved(schema)
        if "discriminator" in schema and isinstance(value, Mapping):
            yield from self._judge_kinds(schema["discriminator"], value, place)
        elif options := _options(schema):
            tried = [(self._resolved(one), [*self._judge(one, value, place)]) for one in options]
            if all(problems for _, problems in tried):
                yield from _closest(tried, value)
        elif "properties" in schema and isinstance(value, Mapping):
            yield from self._judge_section([schema], schema, value, place)
        elif (choices := _choices(schema)) is not None:
            is_any_case = schema.get("x-any-case") and isinstance(value, str)
            same = [str(one).lower() for one in choices] if is_any_case else choices
            if not any(
                type(one) is type(value) and one == (value.lower() if is_any_case else value)
                for one in same
            ):
                yield FactProblem("choice", place, value, choices=tuple(choices))
        else:
            yield from self._judge_plain(schema, value, place)

    def _judge_kinds(
        self, discriminator: Schema, value: Mapping[str, Any], place: str
    ) -> Iterator[FactProblem]:
        tag, mapping = discriminator["propertyName"], discriminator["mapping"]
        kinds = {name: self._resolved({"$ref": reference}) for name, reference in mapping.items()}
        name = value.get(tag)
        if tag not in value and tag not in _INFERRED_TAGS:
            yield FactProblem("missing", f"{place}.{tag}", None)
        elif tag in value and name not in list(kinds):
            yield FactProblem("choice", f"{place}.{tag}", name, choices=tuple(kinds))
        of_kind = kinds.get(name) if isinstance(name, str) else None
        rest = {key: one for key, one in value.items() if key != tag}
        yield from self._judge_section([*kinds.values()], of_kind, rest, place)
        for key in rest if of_kind is not None else ():
            owners = [each for each, kind in kinds.items() if _field_of(kind, str(key)) is not None]
            if owners and name not in owners:
                yield FactProblem("other kind", f"{place}.{key}", name, " and ".join(owners))

    def _judge_section(
        self, kinds: Sequence[Schema], of_kind: Schema | None, value: Mapping[str, Any], place: str
    ) -> Iterator[FactProblem]:
        """Judge a section by the fields of all its kinds, and those that its own one requires."""
        dot = f"{place}." if place else ""
        for key, one in value.items():
            fields = (_field_of(kind, str(key)) for kind in (of_kind, *kinds) if kind is not None)
            if (found := next((each for each in fields if each is not None), None)) is not None:
                yield from self._judge(found, one, f"{dot}{key}")
            elif all(kind.get("additionalProperties") is False for kind in kinds):
                names = dict.fromkeys(name for kind in kinds for name in kind["properties"])
                yield FactProblem("unknown", f"{dot}{key}", one, choices=tuple(names))
        for key in (of_kind or {}).get("required", ()):
            if key not in value and place:
                yield FactProblem("missing", f"{dot}{key}", None)

    def _judge_plain(self, schema: Schema, value: Any, place: str) -> Iterator[FactProblem]:
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
            for name, (words, holds) in BOUNDS.items():
                if name in bounds and not holds(value, bounds[name]):
                    wanted, is_soft = f"{words} {bounds[name]}", bounds is not schema
                    yield FactProblem("bound", place, value, wanted, is_soft=is_soft)
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


def _options(schema: Schema) -> Sequence[Schema]:
    return (*schema.get("anyOf", ()), *schema.get("oneOf", ()))


def _field_of(kind: Schema, key: str) -> Schema | None:
    """The schema of a field by its name or another one of it; None where there is none."""
    fields: Mapping[str, Schema] = kind["properties"]
    others = (one for one in fields.values() if key in one.get("x-aliases", ()))
    return fields[key] if key in fields else next(others, None)


def _choices(schema: Schema) -> Sequence[Any] | None:
    choices: Sequence[Any] | None = schema.get("enum")
    return [schema["const"]] if choices is None and "const" in schema else choices


def _closest(tried: Sequence[tuple[Schema, list[FactProblem]]], value: Any) -> list[FactProblem]:
    """The problems of the alternative that the value was probably meant for."""
    for schema, problems in tried:
        is_section = "properties" in schema or "discriminator" in schema
        if (
            is_section
            if isinstance(value, Mapping)
            else _choices(schema) and isinstance(value, str)
        ):
            return problems
    return tried[0][1]


@cache
def known_versions() -> tuple[EngineFacts, ...]:
    """The facts that come with slagate, oldest version first."""
    files = [one for one in _folder().iterdir() if one.name[:1].isdigit()]
    return tuple(_facts(one.read_text()) for one in sorted(files, key=lambda one: one.name))


@cache
def renamed() -> Mapping[str, str]:
    """What is to be said of names of older engines and other tools, by the dotted name."""
    names: dict[str, str] = json.loads((_folder() / "renamed.json").read_text())["names"]
    return names


def _folder() -> Any:
    return resources.files("slagate.workers.engine_args.model") / "versions"


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
