"""The rules of rules.yaml, which says what is in one, and whether a case looks like what it tells of."""

import os.path
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml

from slagate.workers.engine_args.model.merge import in_brief
from slagate.workers.engine_args.model.model import Section
from slagate.workers.engine_args.rules.case import EngineCase, Version
from slagate.workers.findings import Finding, error, note, warning

_PUT = {"error": error, "warning": warning, "note": note}
_NUMBERS: Mapping[str, Callable[[Any, Any], object]] = {
    "above": lambda value, other: value > other,
    "below": lambda value, other: value < other,
    "other than": lambda value, other: value != other,
    "no multiple of": lambda value, other: other and value % other,
}
_PATHS = {"file": os.path.isfile, "folder": os.path.isdir}


class Rule(NamedTuple):
    """What is said of arguments that look like `when`, and not like `unless`."""

    finding: str
    when: Mapping[str, Any]
    text: str = "is {value}, and {others}: the engine does not start"
    advice: str = "keep one of the two"
    unless: Mapping[str, Any] | None = None
    since: str = ""
    before: str = ""

    def check(self, case: EngineCase) -> Iterator[Finding]:
        """Yields a finding for each key that it is to be said of; no error unless this version refuses it.

        There is none if the version is known to be one that no longer refuses it.
        """
        severity, code, *keys = self.finding.split()
        refused = case.is_within(_version(self.since), _version(self.before))
        if refused is False and (self.before or severity != "error"):
            return
        put = _PUT["warning" if severity == "error" and not refused else severity]
        for key in keys:
            if _is_like(case, key, self.when) and not (
                self.unless and _is_like(case, key, self.unless)
            ):
                words = _Words(case, key, self.when)
                text, advice = self.text.format_map(words), self.advice.format_map(words)
                if not refused and self.before:
                    text += f" (TensorRT-LLM before {self.before})"
                    advice += ", or say --engine-version"
                elif not refused and severity == "error":
                    text += (
                        f": TensorRT-LLM {self.since} refuses that, and earlier ones start with it"
                    )
                yield put(code, key, text, advice)


class _Words(dict[str, object]):
    """The names that a text may have: `value`, `others`, which is what else `when` has, and all others."""

    def __init__(self, case: EngineCase, key: str, when: Mapping[str, Any]) -> None:
        value = value_at(case, key)
        shown = in_brief(value.given if isinstance(value, Section) else value)
        is_set = {name: isinstance(wanted, dict) or wanted is True for name, wanted in when.items()}
        others = (
            f"{name} is {'set' if is_set[name] else in_brief(value_at(case, name))}"
            for name in when
            if name != "value"
        )
        super().__init__(value=shown, others=" and ".join(others).replace('"', ""))
        self._case = case

    def __missing__(self, name: str) -> object:
        return value_at(self._case, name)


@cache
def rules() -> tuple[Rule, ...]:
    """The rules, in the order of their file."""
    file = resources.files("slagate.workers.engine_args.rules").joinpath("rules.yaml")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # eight times as fast, where it is there
    read = loader(file.read_text(encoding="utf-8")).get_single_data()
    return tuple(Rule(**each) for each in read)


def value_at(case: EngineCase, name: str) -> Any:
    """A property of the case by its name, or else an argument, or its default, by its dotted key.

    It is None where it is not given, and has no default here, or where its section is missing.
    """
    first, *rest = name.split(".")
    value = getattr(case if hasattr(case, first) else case.args, first, None)
    for each in rest:
        value = value.get(each) if isinstance(value, dict) else getattr(value, each, None)
    return value


def _is_like(case: EngineCase, key: str, names: Mapping[str, Any]) -> bool:
    """Whether each of the names is what it must be; `value` is that of the key."""
    return all(
        _is(case, key if name == "value" else name, wanted) for name, wanted in names.items()
    )


def _is(case: EngineCase, name: str, wanted: Any) -> bool:
    """Whether a name is what the rules' file says that it must be."""
    value = value_at(case, name)
    if isinstance(wanted, list):
        return any(_is(case, name, each) for each in wanted)
    if isinstance(wanted, dict):
        return all(_holds(case, name, *condition) for condition in wanted.items())
    if isinstance(wanted, str):
        return isinstance(value, str) and fnmatchcase(value, wanted)
    return bool(value == wanted)


def _holds(case: EngineCase, name: str, condition: str, wanted: Any) -> bool:
    """Whether one condition of the rules' file holds for a name."""
    value = value_at(case, name)
    if condition == "not":
        return not _is(case, name, wanted)
    if condition == "set":
        return bool(value) is wanted
    if condition == "given":
        return case.has(name) is wanted
    if condition == "names no":
        return isinstance(value, str) and not _PATHS[wanted](value)
    other = value_at(case, wanted) if isinstance(wanted, str) else wanted
    are_numbers = isinstance(value, int | float) and other is not None
    return are_numbers and bool(_NUMBERS[condition](value, other))


def _version(text: str) -> Version | None:
    """The version of a text like "1.3"; None for an empty one."""
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if text else None
