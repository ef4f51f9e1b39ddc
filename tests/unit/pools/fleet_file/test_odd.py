"""Odd values that Dynamo serves: they load with a warning, and mean what they mean there."""

import json
from pathlib import Path
from typing import Any

import pytest

from slagate.pools.fleet_file.load import load_config, parse_config
from support.fleet.dynamo_router import Router, write
from support.fleet.files import agg_file, disagg_file
from support.fleet.problems import AGG, PREFILL, lines


def long_file() -> dict[str, Any]:
    """With the long names, as Dynamo asks for them."""
    content = disagg_file()
    for stage in ("prefill", "decode"):
        content[f"{stage}_pool_dynamo_namespaces"] = content.pop(f"{stage}_pools")
    return content


NAMES = "prefill_pool_dynamo_namespaces"


@pytest.mark.parametrize(
    ("names", "taken", "warnings"),
    [
        (["p", 7], ("p", "7"), [f'{NAMES}[1]: is no string, taken for "7" (got 7)']),
        (
            [None, True],
            ("None", "True"),
            [
                f'{NAMES}[0]: is no string, taken for "None" (got null)',
                f'{NAMES}[1]: is no string, taken for "True" (got true)',
            ],
        ),
        ([1.5, "p"], ("1.5", "p"), [f'{NAMES}[0]: is no string, taken for "1.5" (got 1.5)']),
        (
            "ab",
            ("a", "b"),
            [f'{NAMES}: is no list, each character is taken for a name (got "ab")'],
        ),
        (["a\nb", " "], ("a\nb", " "), []),
        (["\u202e", "\x00"], ("\u202e", "\x00"), []),
    ],
)
def test_names_are_whatever_has_a_text(
    tmp_path: Path, names: object, taken: tuple[str, ...], warnings: list[str]
) -> None:
    path = write(tmp_path / "file.json", long_file() | {NAMES: names})
    Router(path)
    config = load_config(path)
    assert config.stages["prefill"].pool_names == taken
    assert list(config.warnings) == warnings
    assert parse_config(json.loads(config.text), source="f").stages == config.stages


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ("ab", 'prefill_pools: must be a list (got "ab")'),
        ([None, "p"], "prefill_pools[0]: must be a string (got null)"),
        ([7, "p"], "prefill_pools[0]: must be a string (got 7)"),
    ],
)
def test_names_under_the_short_key_that_dynamo_does_not_have_are_strings(
    names: object, line: str
) -> None:
    assert lines(disagg_file() | {"prefill_pools": names}) == [line]


@pytest.mark.parametrize("rules", ["", {}])
def test_nothing_for_overrides_is_none(tmp_path: Path, rules: object) -> None:
    content = long_file()
    content[PREFILL]["priority_overrides"] = rules
    path = write(tmp_path / "file.json", content)
    Router(path)
    config = load_config(path)
    assert config.stages["prefill"].rules == ()
    (warning,) = config.warnings
    assert warning.startswith(f"{PREFILL}.priority_overrides: is no list, taken for none (got ")


def test_null_priorities_and_null_isl_keys_are_absent(tmp_path: Path) -> None:
    content = long_file() | {"prefill_pool_priorities": None}
    path = write(tmp_path / "file.json", content)
    Router(path)
    config = load_config(path)
    assert (config.stages["prefill"].priorities, config.warnings) == ((0, 1), ())
    content = agg_file()
    content[AGG] |= {"isl_min": None, "isl_max": None, "isl_resolution": None}
    content[AGG]["agg_pool_mapping"] = [[0, 1], [1, 1], [1, 2]]
    assert len(parse_config(content, source="f").stages["agg"].axes) == 2
    content[AGG]["isl_min"] = 0
    null = "must not be null, leave the key out instead (got null)"
    assert lines(content)[:2] == [f"{AGG}.isl_max: {null}", f"{AGG}.isl_resolution: {null}"]


def test_override_ends_and_pool_priorities_may_be_ints_of_any_size() -> None:
    content = disagg_file() | {"prefill_pool_priorities": [10**40, -(10**400)]}
    rule = {"min_priority": -(10**400), "max_priority": 10**400, "target_pool": 0}
    content[PREFILL]["priority_overrides"] = [rule]
    grid = parse_config(content, source="f").stages["prefill"]
    assert grid.select({"isl": 1}, 10**399).pool == 0
    assert grid.retry_order(0) == (0, 1)


def test_a_missing_isl_of_an_agg_grid_is_the_middle_rounded_down() -> None:
    content = agg_file()
    content[AGG] |= {"isl_min": 0, "isl_max": 3}
    agg = parse_config(content, source="f").stages["agg"]
    assert agg.select({"ttft_ms": 0, "itl_ms": 0}).index == (0, 0, 0)
    assert agg.select({"isl": 1.5, "ttft_ms": 0, "itl_ms": 0}).index == (1, 0, 0)
