"""Brings every form of a fleet file to one spelling, the current long keys of Dynamo.

Odd values are read as Dynamo reads them: a file that it serves must load, and mean the same.
"""

from collections.abc import Mapping
from typing import Any

from slagate.pools.fleet_file.keys import (
    EPP_KEYS,
    EPP_LABEL,
    EPP_RULE_KEYS,
    EPP_ZEROS,
    OVERRIDES,
    PREFILL,
    Form,
    StageKeys,
)
from slagate.pools.fleet_file.report import ConfigReport, dicts_in
from slagate.pools.grid.json_text import is_finite_number, shown


def drop_second_spellings(kept: dict[str, Any], form: Form, report: ConfigReport) -> None:
    """Drop old keys from `kept` where the current ones are there too, with a warning."""
    for keys in form.stages:
        strategy = kept.get(keys.strategy)
        if not isinstance(strategy, dict):
            continue
        for old, new in keys.deprecated.items():
            if old in strategy and new in strategy:
                del strategy[old]
                report.warn((keys.strategy, old), f"ignored, {new} is there too")


def respelled(kept: Mapping[str, Any], form: Form, report: ConfigReport) -> dict[str, Any]:
    """A copy of a file's content under the current long keys; `report` notes where values were."""
    content = dict(kept)
    report.content = content
    for keys in form.stages:
        if form.epp and keys is PREFILL:
            _from_epp(content, report)
        else:
            _rename(content, keys, report)
        if keys.short_names not in kept:  # a key that Dynamo does not have
            _take_odd_names(content, keys, report)
        if content.get(keys.priorities, 0) is None:
            del content[keys.priorities]
        strategy = content.get(keys.strategy)
        if isinstance(strategy, dict):
            content[keys.strategy] = _without_nothing(dict(strategy), keys, report)
    return content


def _rename(content: dict[str, Any], keys: StageKeys, report: ConfigReport) -> None:
    if keys.short_names in content:
        names = content.pop(keys.short_names)
        if keys.names in content:
            report.refuse(
                (keys.short_names,), f"is a second spelling of {keys.names}, keep one", names
            )
        else:
            content[keys.names] = names
            report.move((keys.names,), (keys.short_names,))
    strategy = content.get(keys.strategy)
    if not isinstance(strategy, dict):
        return
    current = {keys.deprecated.get(key, key): value for key, value in strategy.items()}
    for old, new in keys.deprecated.items():
        if old in strategy:
            report.warn((keys.strategy, old), f"deprecated, write {new}")
            report.move((keys.strategy, new), (keys.strategy, old))
    content[keys.strategy] = current


def _from_epp(content: dict[str, Any], report: ConfigReport) -> None:
    """Respell the prefill stage of a file of the endpoint picker, where null means absent."""
    label = content.pop(EPP_LABEL, None)
    if label is not None and not isinstance(label, str):
        report.refuse((EPP_LABEL,), "must be a string", label)
    strategy: dict[str, Any] = {}
    content[PREFILL.strategy] = strategy
    for key, place in EPP_KEYS.items():
        report.move(place, (key,))
        value = content.pop(key, None)
        if value is None and key in EPP_ZEROS:
            value = 0
        if value is not None:
            (strategy if len(place) > 1 else content)[place[-1]] = value
    rules = strategy.get(OVERRIDES)
    if isinstance(rules, list | tuple):
        strategy[OVERRIDES] = rules = list(rules)
        for at, rule in dicts_in(rules):
            given = {long: rule.get(key) for key, long in EPP_RULE_KEYS.items()}
            strategy[OVERRIDES][at] = {key: 0 if v is None else v for key, v in given.items()}
            for key, long in EPP_RULE_KEYS.items():
                report.move((PREFILL.strategy, OVERRIDES, at, long), ("priorityOverrides", at, key))
    names = content.get(PREFILL.names)
    if names == []:
        report.refuse((PREFILL.names,), "must not be empty", names)
    report.derive((PREFILL.pool_count,), len(names) if isinstance(names, list | tuple) else None)


def _take_odd_names(content: dict[str, Any], keys: StageKeys, report: ConfigReport) -> None:
    """Take names as Dynamo does, which formats each as a string, and accepts any list with a length."""
    names = content.get(keys.names)
    if isinstance(names, str) and names:
        report.warn(
            (keys.names,), f"is no list, each character is taken for a name (got {shown(names)})"
        )
        names = list(names)
    if not isinstance(names, list | tuple):
        return
    content[keys.names] = names = list(names)
    for at, name in enumerate(names):
        if name is None or isinstance(name, bool) or is_finite_number(name):
            try:
                names[at] = str(name)
            except ValueError:  # an integer of more digits than Python will print
                continue
            report.warn((keys.names, at), f'is no string, taken for "{name}" (got {shown(name)})')


def _without_nothing(
    strategy: dict[str, Any], keys: StageKeys, report: ConfigReport
) -> dict[str, Any]:
    """`strategy` without values that Dynamo takes for absent."""
    for axis in keys.axes:
        if axis.optional and all(strategy.get(key) is None for key in axis.even):
            for key in axis.even:
                strategy.pop(key, None)
    rules = strategy.get(OVERRIDES)
    if rules in ("", {}):
        report.warn((keys.strategy, OVERRIDES), f"is no list, taken for none (got {shown(rules)})")
        del strategy[OVERRIDES]
    return strategy
