"""The keys that a fleet file may have at each place, and what was probably meant by an unknown one."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from slagate.pools.fleet_file.keys import (
    CHAIN,
    EPP_KEYS,
    EPP_LABEL,
    EPP_RULE_KEYS,
    OVERRIDES,
    PREFILL,
    STAGES,
    Form,
)
from slagate.pools.fleet_file.models import (
    STRATEGIES,
    Objective,
    OverrideRule,
    PoolSpec,
    Scheduling,
)
from slagate.pools.fleet_file.report import Path, dicts_in
from slagate.workers.runtime.usage import unknown_key


class _Entries(NamedTuple):
    """A list or an object of which each entry has these keys."""

    keys: Mapping[str, object]


_Keys = Mapping[str, object]
"""Maps a key to what its value may have: further keys, `_Entries`, or None."""


def unknown_keys(content: Mapping[str, object], form: Form) -> list[Path]:
    """The places of all keys of `content`, as it is written, that a file of this form does not have."""
    return list(_unknown(content, _known(form), ()))


def hint(path: Path, form: Form) -> str:
    """Why the key at the end of `path` is refused, with the likely correction."""
    parents, key = path[:-1], str(path[-1])
    if key == CHAIN:
        return (
            "unknown key: here each cell of the mapping lists its pools in the order to try them, first"
            " choice first, and pool priorities with enable_priority_retry order the others"
        )
    levels = dict(_levels(_known(form), ()))
    here = _level_of(parents)
    for level, keys in levels.items():
        if level != here and key in keys:
            return f"unknown key at this level, it belongs {level}"
    for mode in ("disagg", "agg"):
        if any(key in keys.top for keys in STAGES[mode].values()) and not form.epp:
            return f'unknown key in mode "{form.mode}", it belongs to mode "{mode}"'
    meant = _camel_case(key) if form.epp else None
    if meant in levels[here]:
        return f'unknown key, did you mean "{meant}"?'
    old = {old for keys in form.stages for old in keys.deprecated}
    candidates = [known for known in levels[here] if known not in old]
    return unknown_key(key, candidates, least=0.7)


def _known(form: Form) -> _Keys:
    rule = _Entries(dict.fromkeys(OverrideRule.model_fields))
    known: dict[str, object] = {"mode": None, "enable_priority_retry": None}
    for keys in form.stages:
        known |= dict.fromkeys(keys.top)
        fields = STRATEGIES[keys.strategy].model_fields
        known[keys.strategy] = {**dict.fromkeys((*fields, *keys.deprecated)), OVERRIDES: rule}
    if form.epp:
        for key in PREFILL.top:
            known.pop(key, None)
        known |= dict.fromkeys((PREFILL.priorities, EPP_LABEL, *EPP_KEYS))
        known["priorityOverrides"] = _Entries(dict.fromkeys(EPP_RULE_KEYS))
    known["scheduling"] = dict.fromkeys(Scheduling.model_fields)
    known["pools"] = _Entries(dict.fromkeys(PoolSpec.model_fields))
    known["objectives"] = _Entries(dict.fromkeys(Objective.model_fields))
    return known


def _unknown(content: Mapping[str, object], known: _Keys, path: Path) -> Iterator[Path]:
    for key, value in content.items():
        inner = known.get(key)
        if key not in known:
            yield (*path, key)
        elif isinstance(inner, _Entries):
            for at, entry in dicts_in(value):
                yield from _unknown(entry, inner.keys, (*path, key, at))
        elif isinstance(inner, Mapping) and isinstance(value, dict):
            yield from _unknown(value, inner, (*path, key))


def _levels(known: _Keys, path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield _level_of(path), tuple(known)
    for key, inner in known.items():
        if isinstance(inner, _Entries):
            yield from _levels(inner.keys, (*path, key, 0))
        elif isinstance(inner, Mapping):
            yield from _levels(inner, (*path, key))


def _level_of(parents: Path) -> str:
    if not parents:
        return "at the top level"
    return f"in {parents[0]}" if len(parents) == 1 else f"in an entry of {parents[-2]}"


def _camel_case(key: str) -> str | None:
    """What the endpoint picker's file has instead of a key of the global router's."""
    for epp_key, place in EPP_KEYS.items():
        if key in (place[-1], place[-1].removesuffix("_ms")):
            return epp_key
    return next((epp_key for epp_key, long in EPP_RULE_KEYS.items() if key == long), None)
