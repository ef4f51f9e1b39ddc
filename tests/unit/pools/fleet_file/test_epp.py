"""The file of Dynamo's endpoint picker: the prefill grid in a flat object with camelCase keys."""

import json
import random
from typing import Any

import pytest

from slagate.pools.fleet_file.load import parse_config
from slagate.pools.grid.errors import ConfigError
from support.fleet.files import disagg_file
from support.fleet.problems import DECODE, lines
from support.fleet.random_fleets import inputs, random_ends


def epp_file(**more: Any) -> dict[str, Any]:
    return {
        "poolLabel": "nvidia.com/dynamo-pool",
        "poolLabels": ["tp1", "tp2"],
        "sizeMin": 0,
        "sizeMax": 8000,
        "sizeResolution": 2,
        "latencyMinMs": 100,
        "latencyMaxMs": 900,
        "latencyResolution": 2,
        "mapping": [[0, 1], [1, 1]],
        "priorityOverrides": [{"minPriority": 0, "maxPriority": 10, "targetPool": 1}],
        **more,
    }


def test_alone_it_is_the_prefill_half_of_a_fleet() -> None:
    config = parse_config(epp_file(), source="f")
    assert (config.mode, list(config.stages), config.warnings) == ("prefill", ["prefill"], ())
    grid = config.stages["prefill"]
    assert grid.pool_names == ("tp1", "tp2")
    assert grid.select({"isl": 100, "ttft_ms": 800}).index == (0, 1)
    with pytest.raises(ConfigError) as caught:
        parse_config(epp_file(), source="f", serving=True)
    assert str(caught.value.problems[0]) == (
        "$: is the prefill half of a fleet; add the decode keys to serve requests (got nothing)"
    )


def test_with_the_decode_half_beside_it_it_is_a_fleet() -> None:
    whole = disagg_file() | {"enable_priority_retry": False}
    decode = {key: value for key, value in whole.items() if "decode" in key}
    pools = {name: {"workers": [f"{name}:1"]} for name in ("tp1", "tp2", "d-fast", "d-bulk")}
    config = parse_config({**epp_file(), **decode, "pools": pools}, source="f", serving=True)
    assert (config.mode, list(config.stages)) == ("disagg", ["prefill", "decode"])
    assert config.stages["decode"] == parse_config(whole, source="f").stages["decode"]
    again = parse_config(json.loads(config.text), source="f")
    assert again.stages == config.stages


def test_below_0_is_not_given_in_this_form_only() -> None:
    decode = {key: value for key, value in disagg_file().items() if "decode" in key}
    decode[DECODE] = {
        **decode[DECODE],
        "priority_overrides": [{"min_priority": -5, "max_priority": -1, "target_pool": 1}],
    }
    rule = {"minPriority": -5, "maxPriority": 10, "targetPool": 1}
    config = parse_config({**epp_file(priorityOverrides=[rule]), **decode}, source="f")
    prefill, other = config.stages["prefill"], config.stages["decode"]
    assert prefill.select({"isl": 1, "ttft_ms": -1}) == prefill.select({"isl": 1})
    assert prefill.select({"isl": 1, "ttft_ms": 0}).index == (0, 0)
    assert [prefill.select({"isl": 1, "ttft_ms": 0}, p).pool for p in (-1, -0.5, 0, 10.9, 11)] == [
        *(0, 1, 1, 1, 0)
    ]
    assert other.select({"context_length": 1, "itl_ms": -1}).index == (0, 0)
    assert other.select({"context_length": 1, "itl_ms": 0}, -1).pool == 1


def test_absent_and_null_are_0_or_nothing_as_in_go() -> None:
    content = epp_file(priorityOverrides=None, poolLabel=None, sizeMin=None)
    del content["latencyMinMs"]
    grid = parse_config(content, source="f").stages["prefill"]
    assert ([axis.low for axis in grid.axes], grid.rules) == ([0, 0], ())
    content["priorityOverrides"] = [{"maxPriority": 3, "minPriority": None}]
    (rule,) = parse_config(content, source="f").stages["prefill"].rules
    assert tuple(rule) == (0, 3, 0)


def go_band(value: float, low: float, high: float, resolution: int) -> int:
    """The picker's arithmetic: all of it in doubles."""
    low, high = float(low), float(high)
    at = int((float(value) - low) / ((high - low) / float(resolution)))
    return max(0, min(at, resolution - 1))


def test_bands_are_those_of_doubles_for_ints_of_any_size() -> None:
    compared = 0
    for seed in range(400):
        rng = random.Random(seed)
        (low, high), resolution = random_ends(rng), rng.randint(1, 9)
        if float(low) >= float(high):
            continue
        content = epp_file(sizeMin=low, sizeMax=high, sizeResolution=resolution)
        content["mapping"] = [[0, 1]] * resolution
        axis = parse_config(content, source="f").stages["prefill"].axes[0]
        for _, value in zip(range(20), inputs(low, high, resolution, rng), strict=False):
            try:
                wanted = go_band(value, low, high, resolution)
            except OverflowError:
                continue
            assert axis.index(value) == wanted, f"seed {seed}: {value}"
            compared += 1
    assert compared > 5000


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"sizeMin": 8000}, ["sizeMin: must be below sizeMax, which is 8000 (got 8000)"]),
        (
            {"sizeMin": 2**60, "sizeMax": 2**60 + 1},
            [
                "sizeMin: must be below sizeMax, which is 1152921504606846977"
                " (got 1152921504606846976)"
            ],
        ),
        ({"poolLabels": []}, ["poolLabels: must not be empty (got [])"]),
        ({"poolLabels": None}, ["poolLabels: is required (got nothing)"]),
        (
            {"poolLabels": ["a", "a"]},
            ['poolLabels[1]: is in this list twice, first at poolLabels[0] (got "a")'],
        ),
        ({"poolLabel": 5}, ["poolLabel: must be a string (got 5)"]),
        ({"mapping": [[0, 1], [2, 1]]}, ["mapping[1][0]: row 1, column 0: must be a pool number"]),
        (
            {"mapping": [[0, 1]]},
            ["mapping: must have 2 entries, as sizeResolution says, and has 1"],
        ),
        ({"latencyResolution": True}, ["latencyResolution: must be an integer (got true)"]),
        ({"sizeMinn": 1}, ['sizeMinn: unknown key, did you mean "sizeMin"? (got 1)']),
        ({"isl_min": 1}, ['isl_min: unknown key, did you mean "sizeMin"? (got 1)']),
        (
            {"priorityOverrides": [{"minPriority": 5, "maxPriority": 1, "targetPool": 9}]},
            [
                "priorityOverrides[0].minPriority: must not be above maxPriority, which is 1",
                "priorityOverrides[0].targetPool: must be a pool number from 0 to 1 (got 9)",
            ],
        ),
        (
            {"priorityOverrides": [{"min_priority": 5}]},
            ['priorityOverrides[0].min_priority: unknown key, did you mean "minPriority"? (got 5)'],
        ),
        ({"num_decode_pools": 1}, ["decode_pool_dynamo_namespaces: is required", DECODE]),
        (
            {"mode": "disag", "x": 1},
            ["x: unknown key (got 1)", "mode: must be", "num_dec", "dec", DECODE],
        ),
    ],
)
def test_problems_are_in_the_words_of_this_form(more: dict[str, Any], found: list[str]) -> None:
    problems = lines(epp_file(**more))
    assert len(problems) == len(found), problems
    for problem, start in zip(problems, found, strict=True):
        assert problem.startswith(start)


def test_a_file_of_the_global_router_stays_one_whatever_else_is_in_it() -> None:
    content = disagg_file() | {"mapping": [[0]], "poolLabel": "x", "sizeMax": 1}
    assert [line.split(":")[0] for line in lines(content)] == ["mapping", "poolLabel", "sizeMax"]
    config = parse_config(content, source="f", lenient=True)
    assert config.stages == parse_config(disagg_file(), source="f").stages
    assert len(config.ignored) == 3


def test_one_key_of_this_form_is_a_slip_in_another() -> None:
    (line,) = lines(disagg_file() | {"mapping": [[0]]})
    assert line.startswith("mapping: unknown key")
    assert "prefill_pool_selection_strategy: is required (got nothing)" in lines({"mapping": [[0]]})
