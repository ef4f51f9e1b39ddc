"""The JSON schema of fleet files (draft 2020-12), for editors.

It covers keys, types, and which keys go together. Whether a table has the size that its axes need, and
other arithmetic, is for `check`. Keys, types and descriptions come from `models`; spellings and
alternatives that models do not show are added here.
"""

from collections.abc import Iterable
from typing import Any

from pydantic.json_schema import models_json_schema

from slagate.pools.fleet_file.keys import (
    AGG,
    DECODE,
    EPP_KEYS,
    EPP_LABEL,
    EPP_RULE_KEYS,
    EPP_ZEROS,
    OVERRIDES,
    PREFILL,
    AxisKeys,
    StageKeys,
)
from slagate.pools.fleet_file.models import AggFile, DisaggFile

Schema = dict[str, Any]

_POOL: Schema = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "minLength": 1}]}
_CELL: Schema = {
    "description": "A pool by position or name, or a list of such: first choice, then where to spill.",
    "anyOf": [
        *_POOL["anyOf"],
        {"type": "array", "items": _POOL, "minItems": 1, "uniqueItems": True},
    ],
}
_STRATEGIES = {"PrefillStrategy": PREFILL, "DecodeStrategy": DECODE, "AggStrategy": AGG}
_FILES = {"DisaggFile": (PREFILL, DECODE), "AggFile": (AGG,)}


def fleet_schema() -> Schema:
    """The JSON schema of all forms of a fleet file."""
    _, made = models_json_schema([(DisaggFile, "validation"), (AggFile, "validation")])
    defs: Schema = _tidy(made["$defs"])
    for name, keys in _STRATEGIES.items():
        _finish_strategy(defs[name], keys)
    for name, stages in _FILES.items():
        for keys in stages:
            _finish_stage(defs[name], keys)
        defs[name]["properties"]["$schema"] = {}
    defs["EndpointPickerRule"] = _epp_rule(defs["OverrideRule"])
    defs["EndpointPickerFile"] = _epp_file(defs["DisaggFile"], defs["PrefillStrategy"])
    is_agg = {"required": ["mode"], "properties": {"mode": {"const": "agg"}}}
    is_epp = {"required": ["mapping"], "not": {"required": [PREFILL.strategy]}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "slagate fleet file",
        "description": "Pools of workers, and the grids that say which pool serves which request.",
        "type": "object",
        "if": is_agg,
        "then": {"$ref": "#/$defs/AggFile"},
        "else": {
            "if": is_epp,
            "then": {"$ref": "#/$defs/EndpointPickerFile"},
            "else": {"$ref": "#/$defs/DisaggFile"},
        },
        "$defs": defs,
    }


def _tidy(schema: Any) -> Any:
    """The schema without titles, which repeat keys, and without null, which means absent in models only."""
    if isinstance(schema, list):
        return [_tidy(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    left = {
        key: _tidy(part)
        for key, part in schema.items()
        if not (key == "title" and isinstance(part, str)) and (key, part) != ("default", None)
    }
    choices = [part for part in left.get("anyOf", ()) if part != {"type": "null"}]
    if len(choices) == 1:
        del left["anyOf"]
        left |= choices[0]
    return left


def _finish_strategy(schema: Schema, keys: StageKeys) -> None:
    properties = schema["properties"]
    for old, new in keys.deprecated.items():
        properties[old] = {"description": f"The old name of {new}.", "deprecated": True}
    rows: Schema = {"type": "array", "items": {"type": "array", "items": _CELL}}
    schema["allOf"] = [_axis(axis, keys) for axis in keys.axes]
    properties[keys.mapping]["description"] = schema["description"].partition(";")[0]
    for axis in keys.axes:
        if axis.optional:
            for key in axis.even:
                properties[key] = _or_null(properties[key])
            layers = {"type": "array", "items": rows}
            schema["allOf"].append(
                {
                    "if": _nothing_of(axis),
                    "then": {"properties": {keys.mapping: rows}},
                    "else": {"properties": {keys.mapping: layers}},
                }
            )
            return
    properties[keys.mapping] |= rows


def _axis(axis: AxisKeys, keys: StageKeys) -> Schema:
    """Either all three keys of an even axis, or the edges, or nothing where the axis is optional."""
    old = {new: old for old, new in keys.deprecated.items()}
    spellings = [[key, *([old[key]] if key in old else [])] for key in axis.even]
    even: Schema = {
        "allOf": [_any_of(keys) for keys in spellings],
        "not": {"required": [axis.edges]},
        "properties": {axis.resolution: {"type": "integer"}},
    }
    for new, *older in spellings:
        number: Schema = {"type": "number"}
        even["properties"][new] = number
        for key in older:  # it must be valid only where the current key is absent
            even["allOf"].append(
                {"if": {"not": {"required": [new]}}, "then": {"properties": {key: number}}}
            )
    edges: Schema = {
        "required": [axis.edges],
        "not": {"anyOf": [{"required": [key]} for keys in spellings for key in keys]},
        "properties": {axis.edges: {"minItems": 2}},
    }
    return {"anyOf": [even, edges, *([_nothing_of(axis)] if axis.optional else [])]}


def _nothing_of(axis: AxisKeys) -> Schema:
    return {
        "not": {"required": [axis.edges]},
        "properties": {key: {"type": "null"} for key in axis.even},
    }


def _finish_stage(schema: Schema, keys: StageKeys) -> None:
    properties = schema["properties"]
    properties[keys.short_names] = properties[keys.names]
    properties[keys.priorities] = _or_null(properties[keys.priorities])
    schema["required"].remove(keys.names)
    one = {"oneOf": [{"required": [keys.names]}, {"required": [keys.short_names]}]}
    schema.setdefault("allOf", []).append(one)


def _epp_rule(rule: Schema) -> Schema:
    return {
        **rule,
        "properties": {
            key: _or_null(rule["properties"][long]) for key, long in EPP_RULE_KEYS.items()
        },
        "required": [],
    }


def _epp_file(disagg: Schema, strategy: Schema) -> Schema:
    decode = [DECODE.pool_count, DECODE.strategy]
    decode_keys = [*decode, DECODE.names, DECODE.short_names, DECODE.priorities]
    properties = {"mode": disagg["properties"]["mode"]}
    properties[EPP_LABEL] = {
        "description": "The label of endpoints that names their pool; not used here.",
        "type": ["string", "null"],
    }
    for key, place in EPP_KEYS.items():
        properties[key] = (strategy if len(place) > 1 else disagg)["properties"][place[-1]]
    rules = {"type": "array", "items": {"$ref": "#/$defs/EndpointPickerRule"}}
    properties["priorityOverrides"] = _or_null({**strategy["properties"][OVERRIDES], **rules})
    properties["poolLabels"] = {**properties["poolLabels"], "minItems": 1}
    for key in EPP_ZEROS:
        properties[key] = _or_null(properties[key])
    shared = (
        "$schema",
        *decode_keys,
        PREFILL.priorities,
        "enable_priority_retry",
        "scheduling",
        "pools",
        "objectives",
    )
    properties |= {key: disagg["properties"][key] for key in shared}
    names = {"oneOf": [{"required": [DECODE.names]}, {"required": [DECODE.short_names]}]}
    return {
        "description": "The grid of Dynamo's endpoint picker, alone or with the decode half beside it.",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": [
            *("poolLabels", "sizeMax", "sizeResolution", "latencyMaxMs"),
            *("latencyResolution", "mapping"),
        ],
        "if": _any_of(["mode", *decode_keys]),
        "then": {"required": decode, **names},
    }


def _any_of(keys: Iterable[str]) -> Schema:
    return {"anyOf": [{"required": [key]} for key in keys]}


def _or_null(schema: Schema) -> Schema:
    described = {key: schema[key] for key in ("description",) if key in schema}
    rest = {key: part for key, part in schema.items() if key not in described}
    return {**described, "anyOf": [rest, {"type": "null"}]}
