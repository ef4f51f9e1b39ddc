"""The lines that say what another configuration changes."""

from collections.abc import Callable
from typing import Any

import pytest

from slagate.pools.fleet.config_diff import MAX_CELLS, changes
from slagate.pools.fleet.fleet import Prepared, prepare
from slagate.pools.fleet_file.load import parse_config
from support.builders import PROFILE
from support.fleet.files import agg_file, disagg_file

PREFILL, DECODE = "prefill_pool_selection_strategy", "decode_pool_selection_strategy"
NAMES = ["p-fast", "p-bulk", "d-fast", "d-bulk"]


def file() -> dict[str, Any]:
    return disagg_file() | {"pools": {name: {"workers": [f"{name}:1"]} for name in NAMES}}


def lines(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    old, new = (prepare(parse_config(each, source="f", serving=True)) for each in (before, after))
    return list(changes(old, new))


def edges(file: dict[str, Any], *isl: int) -> None:
    for key in ("isl_min", "isl_max", "isl_resolution"):
        file[PREFILL].pop(key, None)
    file[PREFILL]["isl_edges"] = list(isl)


def renamed(file: dict[str, Any]) -> None:
    file["prefill_pools"] = ["p-fast", "p-slow"]
    file["pools"]["p-slow"] = file["pools"].pop("p-bulk")


def swapped(file: dict[str, Any]) -> None:
    """The same pools by other numbers."""
    file["prefill_pools"].reverse()
    file["prefill_pool_priorities"].reverse()
    file[PREFILL]["prefill_pool_mapping"] = [[1, 0], [1, 0]]


def aggregated(file: dict[str, Any]) -> None:
    file.clear()
    names = ("a-fast", "a-mid", "a-bulk")
    file |= agg_file() | {"pools": {name: {"workers": [f"{name}:1"]} for name in names}}


def rule(low: int, high: int, pool: int) -> dict[str, int]:
    return {"min_priority": low, "max_priority": high, "target_pool": pool}


ALONE: dict[str, tuple[Callable[[dict[str, Any]], object], list[str]]] = {
    "nothing": (lambda f: None, []),
    "only the order": (swapped, []),
    "only the spelling": (
        lambda f: f[PREFILL].update(ttft_min=f[PREFILL].pop("ttft_min_ms")),
        [],
    ),
    "a bound": (
        lambda f: f[PREFILL].update(isl_max=8001),
        ["prefill axis isl 0 to 8000 in 2 bands -> 0 to 8001 in 2 bands"],
    ),
    "a bound beyond six digits": (
        lambda f: f[PREFILL].update(ttft_max_ms=900.0000001),
        ["prefill axis ttft_ms 100 to 900 in 2 bands -> 100 to 900.0000001 in 2 bands"],
    ),
    "uneven bands": (
        lambda f: edges(f, 0, 500, 8000),
        ["prefill axis isl 0 to 8000 in 2 bands -> edges 0, 500, 8000"],
    ),
    "cells": (
        lambda f: f[DECODE].update(decode_pool_mapping=[[0, 1], [[1, 0], "d-fast"]]),
        [
            "decode cell [1][0]: d-fast -> d-bulk, d-fast",
            "decode cell [1][1]: d-bulk -> d-fast",
        ],
    ),
    "more bands": (
        lambda f: f[PREFILL].update(isl_resolution=3, prefill_pool_mapping=[[0, 1]] * 3),
        [
            "prefill axis isl 0 to 8000 in 2 bands -> 0 to 8000 in 3 bands",
            "prefill cells 2 x 2 -> 3 x 2",
        ],
    ),
    "overrides": (
        lambda f: f[PREFILL].update(
            priority_overrides=[rule(2**31 - 2, 2**31 - 1, 0), rule(-5, -1, 1)]
        ),
        ["prefill priority_overrides none -> 2147483646 to 2147483647: p-fast; -5 to -1: p-bulk"],
    ),
    "retry": (
        lambda f: f.update(enable_priority_retry=False),
        [f"{stage} enable_priority_retry true -> false" for stage in ("prefill", "decode")],
    ),
    "speeds": (
        lambda f: f.update(prefill_pool_priorities=[0, 7]),
        ["prefill pool p-bulk: priority 1 -> 7"],
    ),
    "a pool of another name": (
        renamed,
        [
            "prefill pool p-bulk: removed",
            "prefill pool p-slow: added, priority 1",
            "prefill cell [0][1]: p-bulk -> p-slow",
            "prefill cell [1][1]: p-bulk -> p-slow",
            "pool p-bulk: removed, 1 worker",
            "pool p-slow: added, 1 worker",
        ],
    ),
    "workers": (
        lambda f: f["pools"]["d-fast"].update(workers=["n2:1", "n1:1"]),
        ["pool d-fast: + n2:1", "pool d-fast: + n1:1", "pool d-fast: - d-fast:1"],
    ),
    "a pool's figures": (
        lambda f: f["pools"]["p-fast"].update(
            profile=PROFILE, tp=1, max_inflight=4, max_queued_tokens=9, cost=2, replicas=3, batch=64
        ),
        [
            f"pool p-fast: profile none -> {PROFILE}",
            "pool p-fast: tp none -> 1",
            "pool p-fast: max_inflight none -> 4",
            "pool p-fast: max_queued_tokens none -> 9",
            "pool p-fast: cost none -> 2",
            "pool p-fast: replicas none -> 3",
            "pool p-fast: batch none -> 64",
        ],
    ),
    "objectives": (
        lambda f: f.update(objectives={"chat": {"ttft_ms": 300, "priority": 5}, "*": {}}),
        ["objective chat none -> ttft_ms 300 priority 5", "objective * none -> {}"],
    ),
    "policies and weights": (
        lambda f: f.update(
            objectives={"chat": {"policy": "protect", "weight": 2}, "*": {"weight": 1}}
        ),
        ["objective chat none -> policy protect weight 2", "objective * none -> {}"],
    ),
    "scheduling": (
        lambda f: f.update(scheduling={"spill": "any", "admission": "on", "bypass": "off"}),
        ["scheduling: spill listed -> any", "scheduling: admission off -> on"],
    ),
    "scheduling as it is without": (
        lambda f: f.update(scheduling={"spill": "listed", "admission": "off"}),
        [],
    ),
    "another mode": (
        aggregated,
        [
            "mode disagg -> agg",
            "prefill grid: removed",
            "decode grid: removed",
            "agg grid: added",
            *(f"pool {name}: removed, 1 worker" for name in NAMES),
            *(f"pool {name}: added, 1 worker" for name in ("a-fast", "a-mid", "a-bulk")),
        ],
    ),
}


@pytest.mark.parametrize("what", ALONE)
def test_each_change_has_its_line(what: str) -> None:
    change, wanted = ALONE[what]
    after = file()
    change(after)
    assert lines(file(), after) == wanted
    # The way back changes as many things.
    assert len(lines(after, file())) == len(wanted)


def test_an_inner_edge_is_a_change_though_both_ends_stay() -> None:
    before, after = file(), file()
    edges(before, 0, 500, 8000)
    edges(after, 0, 501, 8000)
    wanted = ["prefill axis isl edges 0, 500, 8000 -> edges 0, 501, 8000"]
    assert lines(before, after) == wanted


def test_at_most_so_many_cells_of_a_stage_are_listed() -> None:
    def big(pool: int) -> dict[str, Any]:
        made = file()
        mapping = [[pool] * 10 for _ in range(10)]
        made[PREFILL] |= {
            "isl_resolution": 10,
            "ttft_resolution": 10,
            "prefill_pool_mapping": mapping,
        }
        return made

    found = lines(big(0), big(1))
    assert len(found) == MAX_CELLS + 1
    assert found[0] == "prefill cell [0][0]: p-fast -> p-bulk"
    assert found[-1] == "prefill cells: 36 more change"


def test_a_profile_of_another_content_is_a_change() -> None:
    with_profile = file()
    with_profile["pools"]["p-fast"] |= {"profile": PROFILE, "tp": 1}
    old = prepare(parse_config(with_profile, source="f", serving=True))
    # The file at the profile's path was written since.
    new = Prepared(old.config, {**old.estimators, "p-fast": old.estimators["d-fast"]})
    assert list(changes(old, new)) == [f"pool p-fast: profile {PROFILE} has another content"]


def test_names_that_do_not_print_stay_on_their_line() -> None:
    after = file()
    after["prefill_pools"] = ["p-fast", "p\n\x1b[31m"]
    after["pools"]["p\n\x1b[31m"] = after["pools"].pop("p-bulk")
    found = lines(file(), after)
    assert all(line.isprintable() for line in found), found
    assert 'pool "p\\n\\u001b[31m": added, 1 worker' in found
