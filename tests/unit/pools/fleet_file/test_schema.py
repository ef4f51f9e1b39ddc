"""The JSON schema of fleet files: it takes what loads, and refuses what is broken in shape."""

import json
import math
import random
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from slagate.pools.fleet_file.load import parse_config
from slagate.pools.fleet_file.schema import fleet_schema
from slagate.pools.grid.errors import ConfigError
from support.fleet.files import agg_file, disagg_file
from support.fleet.problems import AGG, MAPPING, PREFILL
from support.fleet.random_fleets import random_file

SCHEMA = Draft202012Validator(fleet_schema())
GOLDEN = Path(__file__).parents[3] / "golden" / "broken-grids"
EPP = {
    "poolLabel": "nvidia.com/dynamo-pool",
    "poolLabels": ["tp1", "tp2"],
    "sizeMax": 8000,
    "sizeResolution": 1,
    "latencyMinMs": None,
    "latencyMaxMs": 900,
    "latencyResolution": 2,
    "mapping": [[0, 1]],
    "priorityOverrides": [{"maxPriority": 10, "targetPool": 1}],
}
UNEVEN = {
    "isl_edges": [0, 1000, 32000],
    "ttft_edges_ms": [50, 200, 1000],
    MAPPING: [["p-fast", ["p-bulk", 0]], [0, [1]]],
}


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "disagg", disagg_file()
    yield "agg", agg_file()
    yield "no mode", {key: value for key, value in disagg_file().items() if key != "mode"}
    yield "epp", EPP
    decode = {key: value for key, value in disagg_file().items() if "decode" in key}
    yield "epp with decode", {**EPP, **decode, "objectives": {"*": {"ttft_ms": 5}}}
    yield "uneven, names and lists", disagg_file() | {PREFILL: UNEVEN}
    flat = agg_file()
    flat[AGG] |= {"isl_min": None, "isl_max": None, "isl_resolution": None}
    flat[AGG]["agg_pool_mapping"] = flat[AGG]["agg_pool_mapping"][0]
    yield "agg with null isl", flat | {"agg_pool_priorities": None}
    old = disagg_file() | {"$schema": "fleet.schema.json"}
    old[PREFILL] |= {"ttft_min": old[PREFILL].pop("ttft_min_ms"), "ttft_max": "ignored"}
    yield "old keys", old
    spec = {"workers": ["h:1", "[::1]:2"], "profile": "x", "tp": 2, "cost": 2.5, "max_inflight": 8}
    planned = {"replicas": 4, "batch": 64}
    yield "pools", disagg_file() | {"pools": {"p-fast": spec, "p-bulk": {}, "d-fast": planned}}
    modes = {"spill": "none", "admission": "shadow", "bypass": "auto"}
    classes = {"a": {"policy": "protect", "weight": 0.5}, "*": {"policy": "relegate"}}
    yield "scheduling", agg_file() | {"scheduling": modes, "objectives": classes}
    yield "epp with scheduling", {**EPP, "scheduling": {"spill": "any", "admission": "on"}}
    for path in (files("slagate.configs") / "grids").iterdir():
        yield path.name, json.loads(path.read_text())


def errors(content: object) -> list[str]:
    return [error.message for error in SCHEMA.iter_errors(content)]


@pytest.mark.parametrize(("name", "content"), list(variants()), ids=lambda value: str(value)[:30])
def test_what_loads_is_valid(name: str, content: dict[str, Any]) -> None:
    parse_config(content, source=name)
    assert errors(content) == []


def test_random_files_of_dynamo_are_valid() -> None:
    for seed in range(60):
        content = json.loads(json.dumps(random_file(random.Random(seed))))
        parse_config(content, source="f")
        assert errors(content) == [], f"seed {seed}"


def test_the_schema_itself_is_valid_and_describes_every_key() -> None:
    Draft202012Validator.check_schema(fleet_schema())
    for name, part in fleet_schema()["$defs"].items():
        assert "description" in part, name
        undescribed = {
            key
            for key, said in part["properties"].items()
            if "description" not in said and "$ref" not in said
        }
        assert undescribed <= {
            "mode",
            "$schema",
            "min_priority",
            "max_priority",
            "minPriority",
            "maxPriority",
        }


def test_an_axis_is_even_or_has_edges_and_never_both() -> None:
    for key in ("isl_edges", "ttft_edges_ms"):
        content = disagg_file()
        content[PREFILL][key] = [0, 50, 100]
        assert errors(content)
    content = agg_file()
    content[AGG]["isl_edges"] = [0, 50, 100]
    assert errors(content)


def test_a_cell_lists_a_pool_once_and_old_keys_are_marked() -> None:
    content = disagg_file()
    content[PREFILL][MAPPING][0][0] = [0, 1]
    assert errors(content) == []
    content[PREFILL][MAPPING][0][0] = [0, 0]
    assert errors(content)
    strategies = fleet_schema()["$defs"]
    marked = {
        key
        for strategy in ("PrefillStrategy", "DecodeStrategy", "AggStrategy")
        for key, said in strategies[strategy]["properties"].items()
        if said.get("deprecated")
    }
    assert marked == {"ttft_min", "ttft_max", "itl_min", "itl_max"}


# What only the rules can tell: sizes against tables, numbers against each other, names against names.
OF_THE_RULES = {
    "cfg-05-every-axis",
    "cfg-05-inverted-isl",
    "cfg-05-step-of-zero",
    "cfg-05-zero-width-ttft",
    "cfg-06-index-too-large",
    "cfg-06-ragged",
    "cfg-06-row-missing",
    "cfg-06-three-axes",
    "name-with-half-a-surrogate",
    "old-keys-in-the-message",
    "roles-that-do-not-fit",
}
# JSON schema knows no difference between 2.0 and 2, nor between NaN, 10**400 and other numbers.
OF_THE_NUMBERS = {"bound-beyond-a-double", "bounds-not-finite", "cfg-06-float-index"}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_broken_in_shape_is_invalid(path: Path) -> None:
    try:
        content = json.loads(path.read_text())
    except ValueError:
        return
    if path.stem in OF_THE_RULES | OF_THE_NUMBERS or path.stem.startswith("serve-"):
        assert errors(content) == []
    else:
        assert errors(content)


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield content, key
        if isinstance(value, dict | list):
            yield from places(value)


WRONG = [None, True, "x", "", -1, 0.5, [], {}, [[]], {"x": 1}]


@pytest.mark.parametrize(
    ("name", "content"),
    [each for each in variants() if not each[0].endswith(".json")],
    ids=lambda value: str(value)[:30],
)
def test_no_single_slip_is_taken_by_one_and_refused_by_the_other(
    name: str, content: dict[str, Any]
) -> None:
    """Every value replaced, every key dropped: what the schema refuses does not load, rules aside."""
    for at in range(len(list(places(content)))):
        for wrong in (*WRONG, "dropped"):
            changed = json.loads(json.dumps(content))
            container, key = list(places(changed))[at]
            if wrong == "dropped":
                del container[key]
            else:
                container[key] = json.loads(json.dumps(wrong))
            try:
                config = parse_config(changed, source="f")
            except ConfigError as error:
                said = [problem.message for problem in error.problems]
                if not all(map(is_of_rules, said)):
                    assert not SCHEMA.is_valid(changed), (key, wrong, said)
            else:
                if not any("taken for" in warning for warning in config.warnings):
                    assert not errors(changed), (key, wrong, errors(changed))


def is_of_rules(message: str) -> bool:
    """Whether a message is about two values at once."""
    words = ["entries, as", "must be below", "twice", "already", "not be above", "one of the pools"]
    words += ["edge before", "is required with profile", "makes no grid", " pool, and"]
    out_of_range = re.search(r"pool number from 0 to \d+ \(got \d+\)", message)
    return out_of_range is not None or any(word in message for word in words)


def test_ids_of_this_file_are_used() -> None:
    stems = {path.stem for path in GOLDEN.glob("*.json")}
    assert stems >= OF_THE_RULES | OF_THE_NUMBERS
    assert math.isnan(
        json.loads((GOLDEN / "bounds-not-finite.json").read_text())[PREFILL]["isl_min"]
    )
