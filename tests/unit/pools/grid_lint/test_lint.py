import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slagate.pools.fleet_file.load import FleetConfig, load_config, parse_config
from slagate.pools.grid.errors import ConfigError
from slagate.pools.grid.json_text import json_path
from slagate.pools.grid_lint.lint import CODES, lint
from slagate.router.cli.grid.lint import pool_profiles
from slagate.router.loadgen.trace import SLA_CLASSES, load_trace
from slagate.workers.findings import Finding
from slagate.workers.profiles.profile import TpProfile, load_profile, tp_profile_from_json
from support.fleet.files import agg_file, disagg_file
from support.seeds import n_in

REPOSITORY = Path(__file__).parents[4]
FIXTURES = REPOSITORY / "tests" / "golden" / "lint"
TRACE = [request.isl_tokens for request in load_trace(FIXTURES / "trace.jsonl")]
QWEN = "qwen3-32b-fp8-h200"
PREFILL = "prefill_pool_selection_strategy"
MAPPING = "prefill_pool_mapping"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixture names a profile by its path from there."""
    monkeypatch.chdir(REPOSITORY)


def found_in(config: FleetConfig, *, traffic: list[int] | None = None) -> list[Finding]:
    return lint(config, profiles=pool_profiles(config), traffic=traffic or [])


def codes_of(content: dict[str, Any], *, traffic: list[int] | None = None) -> list[str]:
    return [f.code for f in found_in(parse_config(content, source="f"), traffic=traffic)]


def fixture(code: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FIXTURES / f"{code}.json").read_text())
    return content


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[str]:
    """The JSON path of everything in a document."""
    yield json_path(path)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from places(item, (*path, at))


# --- the codes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES)
def test_the_fixture_of_a_code_has_just_that_finding(code: str) -> None:
    traffic = TRACE if code.startswith("G4") else []
    (finding,) = found_in(load_config(FIXTURES / f"{code}.json"), traffic=traffic)
    assert finding.code == code
    assert finding.place in set(places(fixture(code)))
    assert re.search(r"\d", finding.message)
    assert finding.advice.endswith(".")


@pytest.mark.parametrize("traffic", [[], TRACE])
def test_a_clean_file_has_no_findings(traffic: list[int]) -> None:
    assert found_in(load_config(FIXTURES / "clean.json"), traffic=traffic) == []


def test_every_code_has_a_fixture_and_a_section_and_neither_has_more() -> None:
    page = (REPOSITORY / "docs" / "lint.md").read_text()
    sections = re.findall(r"^### (G\d+): (.+)\n\n\*\*What:\*\*", page, re.MULTILINE)
    assert sections == list(CODES.items())
    assert {path.stem for path in FIXTURES.glob("G*.json")} == set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_no_message_begins_with_a_name(code: str) -> None:
    """The command begins it with a capital letter."""
    config = load_config(FIXTURES / f"{code}.json")
    (finding,) = found_in(config, traffic=TRACE if code.startswith("G4") else [])
    names = [*config.objectives, *config.pools]
    names += [name for grid in config.stages.values() for name in grid.pool_names]
    assert not finding.message.startswith(tuple(names))


def test_a_slower_pool_for_longer_prompts_has_two_remedies() -> None:
    """It may be the shorter prompts that are in the wrong pool: one that is more than they need."""
    (finding,) = found_in(load_config(FIXTURES / "G102.json"))
    assert "Give the longer prompts the faster pool; or" in finding.advice
    assert finding.advice.endswith("the shorter prompts that one, too.")


@pytest.mark.parametrize("name", ["demo", "example-agg", "example-disagg", "two-workers"])
def test_the_shipped_grids_lint_clean(name: str) -> None:
    config = load_config(REPOSITORY / "configs" / "grids" / f"{name}.json")
    assert not list(found_in(config))


def test_the_demos_grid_is_for_the_demos_trace_and_its_classes() -> None:
    config = load_config(REPOSITORY / "configs" / "grids" / "demo.json")
    traffic = [request.isl_tokens for request in load_trace()]
    assert not list(lint(config, profiles=pool_profiles(config), traffic=traffic))
    for asked in SLA_CLASSES:
        default = config.objectives[asked.name]
        assert (default.ttft_ms, default.itl_ms) == (asked.ttft_ms, asked.itl_ms)


# --- where a rule begins and ends -------------------------------------------------------------------


def prefill(
    mapping: list[list[object]], *, profiles: bool = False, **keys: object
) -> dict[str, Any]:
    """The clean file with another prefill mapping and other keys in its strategy."""
    content = fixture("clean")
    content[PREFILL] |= {MAPPING: mapping, **keys}
    if not profiles:
        del content["pools"]
    return content


def test_profiles_say_which_pool_is_slower_where_both_have_one() -> None:
    """The pool priorities say the opposite."""
    content = fixture("clean") | {"prefill_pool_priorities": [0, 1]}
    content["prefill_pools"].reverse()
    content[PREFILL][MAPPING] = [[1, 1, 0], [1, 1, 1]]
    assert codes_of(content) == []
    del content["pools"]
    assert codes_of(content) == ["G101", "G102"]


CHEAP_FIRST = [[[1, 0], [2, 1], [2, 2]], [[1, 0], [1, 0]], [[0, 0], [1, 1]], [[2, 1, 0], [2, 2, 0]]]
"""Tables of pools listed from cheap to fast; the first is of the tests of Dynamo's endpoint picker."""


def epp_grid(mapping: list[list[int]], **more: object) -> dict[str, Any]:
    return {
        "poolLabels": ["tp1", "tp2", "tp4"][: max(map(max, mapping)) + 1],
        "sizeMin": 0,
        "sizeMax": 3000,
        "sizeResolution": len(mapping),
        "latencyMinMs": 1000,
        "latencyMaxMs": 5000,
        "latencyResolution": len(mapping[0]),
        "mapping": mapping,
        **more,
    }


@pytest.mark.parametrize("mapping", CHEAP_FIRST)
def test_where_all_cells_say_that_pools_are_listed_from_cheap_to_fast_none_is_wrong(
    mapping: list[list[int]],
) -> None:
    """The order of a list is a guess, and not even Dynamo's own tools agree on one."""
    wrong = {"G101", "G102"}
    assert not wrong & {*codes_of(epp_grid(mapping))}
    n_pools = max(map(max, mapping)) + 1
    pools = {f"tp{2**at}": {"cost": 2**at, "workers": [f"h{at}:1"]} for at in range(n_pools)}
    assert not wrong & {*codes_of(epp_grid(mapping, pools=pools))}


@pytest.mark.parametrize("mapping", CHEAP_FIRST)
def test_priorities_costs_and_retries_say_how_fast_pools_are_whatever_the_cells_say(
    mapping: list[list[int]],
) -> None:
    wrong = {"G101", "G102"}
    n_pools = max(map(max, mapping)) + 1
    assert wrong & {*codes_of(epp_grid(mapping, prefill_pool_priorities=[*range(n_pools)]))}
    assert wrong & {*codes_of(epp_grid(mapping, enable_priority_retry=True))}
    pools = {f"tp{2**at}": {"tp": 8 - at, "workers": [f"h{at}:1"]} for at in range(n_pools)}
    (first, *_) = [
        finding
        for finding in found_in(parse_config(epp_grid(mapping, pools=pools), source="f"))
        if finding.code in wrong
    ]
    assert re.search(r"[678] GPUs per worker against [678]", first.message)


def test_a_wrong_cell_is_found_in_a_list_from_cheap_to_fast_too() -> None:
    found = found_in(parse_config(epp_grid([[1, 0], [1, 2], [2, 2]]), source="f"))
    (finding,) = [each for each in found if each.code == "G101"]
    assert finding.place == "mapping[1][0]"
    assert "place 1 of a list, slowest first, against 2" in finding.message


@pytest.mark.parametrize(
    "mapping", [[[1, 0, 0], [0, 0, 0]], [[0, 0, 1], [1, 1, 1]], [[0, 1], [1, 0]]]
)
def test_cells_that_contradict_each_other_leave_the_list_as_from_fast_to_slow(
    mapping: list[list[int]],
) -> None:
    found = found_in(parse_config(epp_grid(mapping), source="f"))
    messages = [each.message for each in found if each.code in ("G101", "G102")]
    assert messages
    assert all("place 1 of a list, fastest first, against 0" in each for each in messages)


def test_equal_places_are_told_once_and_all_of_them_named() -> None:
    content = prefill([[1, 0, 0], [1, 0, 0]]) | {"prefill_pool_priorities": [0, 1]}
    (finding,) = [f for f in found_in(parse_config(content, source="f")) if f.code == "G101"]
    assert finding.place == f"{PREFILL}.{MAPPING}[0][0]"
    assert finding.message.endswith("; the same at 1 more: [1][0]")


def test_the_message_has_the_figures_of_the_profiles() -> None:
    (finding,) = found_in(load_config(FIXTURES / "G303.json"))
    assert finding == Finding(
        "G303",
        "warning",
        f"{PREFILL}.{MAPPING}[0][0]",
        "cell [0][0] (ISL 0 to 4,096, TTFT 60 to 160 ms) goes to p-tp1, whose idle workers take"
        " 97.4 ms TTFT for 4,095 tokens; p-tp2 meets targets from 60.4 ms",
        "Give the cell the faster pool, or begin its band at what its own pool can do.",
    )


def test_a_stage_with_one_pool_has_no_findings_about_choices() -> None:
    content = prefill([[0, 0, 0], [0, 0, 0]], isl_min=0)
    content |= {"num_prefill_pools": 1, "prefill_pools": ["p"]}
    assert codes_of(content) == []


def test_a_missing_target_may_land_in_the_slowest_pool_if_the_file_says_so() -> None:
    content = fixture("G201")
    assert codes_of(content) == ["G201"]
    content["objectives"] = {"*": {"itl_ms": 30}}
    assert codes_of(content) == ["G201"]
    content["objectives"] = {"*": {"ttft_ms": 211}}
    assert codes_of(content) == []


@pytest.mark.parametrize(("row", "codes"), [([0, 1, 2], []), ([0, 2, 2], ["G201"])])
def test_a_missing_target_may_land_in_a_pool_that_is_not_the_slowest_of_its_row(
    row: list[object], codes: list[str]
) -> None:
    content = prefill([row, [0, 0, 1]])
    content |= {"num_prefill_pools": 3, "prefill_pools": ["fast", "middle", "slow"]}
    assert codes_of(content) == codes


def test_cfg_03_the_middle_of_an_even_axis_is_an_edge_and_the_message_says_so() -> None:
    (even,) = found_in(load_config(FIXTURES / "G201.json"))
    assert (
        "210 ms (the middle of the range, which is an edge and counts to the looser" in even.message
    )
    odd = prefill([[0, 1, 1], [0, 0, 1]])
    (finding,) = found_in(parse_config(odd, source="f"))
    assert finding.code == "G201"
    assert "an edge" not in finding.message


def test_a_class_default_just_below_an_edge_is_fine() -> None:
    content = fixture("G202")
    content["objectives"]["standard"]["ttft_ms"] = 259.999
    assert codes_of(content) == []


def test_a_class_default_may_lie_on_an_edge_between_equal_pools() -> None:
    content = fixture("G202")
    content["objectives"]["standard"]["ttft_ms"] = 160
    assert codes_of(content) == []


def test_numbers_are_written_as_the_picture_of_a_grid_has_them() -> None:
    content = fixture("G203")
    content["objectives"]["batch"]["ttft_ms"] = 4000 / 3
    (finding,) = found_in(parse_config(content, source="f"))
    assert finding.message.startswith("1,333.33 ms is outside 60 to 360 ms, so the class")


@pytest.mark.parametrize("end", [60, 360])
def test_a_class_default_may_lie_on_the_end_of_an_axis(end: int) -> None:
    content = fixture("G203")
    content["objectives"]["batch"]["ttft_ms"] = end
    assert codes_of(content) == []


def test_neighbours_with_uneven_edges_that_say_the_same_are_found() -> None:
    content = prefill([[0, 0, 1], [0, 0, 1], [0, 0, 0]])
    for key in ("isl_min", "isl_max", "isl_resolution"):
        del content[PREFILL][key]
    content[PREFILL]["isl_edges"] = [0, 1000, 3000, 8192]
    (finding,) = found_in(parse_config(content, source="f"))
    assert (finding.code, finding.place) == ("G107", f"{PREFILL}.isl_edges")
    assert "0 to 1,000 and 1,000 to 3,000" in finding.message


def test_three_bands_of_which_two_agree_are_no_finding() -> None:
    """With even bands there is no way to say it with fewer."""
    assert codes_of(prefill([[0, 0, 1], [0, 0, 1], [0, 0, 0]], isl_resolution=3)) == []


def test_an_axis_of_one_band_is_no_axis_that_does_nothing() -> None:
    assert codes_of(prefill([[0, 0, 1]], isl_resolution=1)) == []


def test_the_order_of_slower_pools_in_a_spill_list_is_free() -> None:
    content = fixture("G109")
    content[PREFILL][MAPPING] = [[[0, 2, 1], 0, 1], [0, 0, 0]]
    assert codes_of(content) == []


@pytest.mark.parametrize("spill", [[1, 0, 2], [2, 0, 1], [2, 1, 0]])
def test_spill_may_go_on_to_slower_pools_after_the_faster_ones(spill: list[int]) -> None:
    content = fixture("G109")
    content[PREFILL][MAPPING][0][2] = spill
    content[PREFILL]["priority_overrides"] = [
        {"min_priority": at - 10, "max_priority": at - 10, "target_pool": at} for at in (0, 1, 2)
    ]
    assert codes_of(content) == []


def test_no_retry_starts_from_a_pool_that_is_only_spilled_to() -> None:
    """X is faster than S, where requests come by spill alone, and not than F, where they start."""
    content = disagg_file() | {"num_prefill_pools": 3, "prefill_pools": ["F", "S", "X"]}
    content |= {"prefill_pool_priorities": [0, 2, 1], "enable_priority_retry": True}
    content[PREFILL][MAPPING] = [[["F", "S"], "F"], ["F", ["F", "S"]]]
    config = parse_config(content, source="f")
    assert config.warnings == ("prefill_pools[2]: no cell, override or retry leads to this pool",)
    reach = [(f.code, f.place) for f in found_in(config) if f.code in ("G103", "G104", "G105")]
    assert reach == [("G103", "prefill_pools[2]"), ("G105", "prefill_pools[1]")]
    grid = config.stages["prefill"]
    assert {pool for pools in grid.starts() for pool in grid.order(pools)} == {0, 1}


def test_an_override_that_cannot_match_reaches_no_pool() -> None:
    content = prefill([[0, 0, 0], [0, 0, 0]])
    dead = {"min_priority": 2**31, "max_priority": 2**40, "target_pool": 1}
    content[PREFILL]["priority_overrides"] = [dead]
    assert codes_of(content) == ["G103", "G108", "G502"]


@pytest.mark.parametrize(
    ("low", "high", "codes"), [(-20, 0, []), (0, 0, []), (0, 20, []), (1, 20, ["G503"])]
)
def test_a_low_priority_may_get_a_slower_pool(low: int, high: int, codes: list[str]) -> None:
    content = fixture("G503")
    rule = content[PREFILL]["priority_overrides"][0]
    rule |= {"min_priority": low, "max_priority": high}
    assert codes_of(content) == codes


def test_equal_pools_that_are_each_others_spill_are_fine() -> None:
    content = fixture("G504")
    content[PREFILL][MAPPING] = [[0, 0, [1, 2]], [0, 0, [2, 1]]]
    assert codes_of(content) == []


def test_retry_in_one_stage_is_enough() -> None:
    """A stage with one pool never retries elsewhere, and has no other choice."""
    content = fixture("G505")
    content[PREFILL][MAPPING] = [[0, 0, 1], [0, 0, 0]]
    assert codes_of(content) == []


def test_without_retry_equal_priorities_say_nothing() -> None:
    content = fixture("G504")
    content["enable_priority_retry"] = False
    assert codes_of(content) == []


def test_without_retry_the_priorities_may_contradict_the_profiles() -> None:
    content = fixture("G506")
    content["enable_priority_retry"] = False
    assert codes_of(content) == []


def test_default_priorities_that_contradict_the_profiles_are_told_at_the_names() -> None:
    content = fixture("G506")
    del content["prefill_pool_priorities"]
    content["prefill_pools"].reverse()
    content[PREFILL][MAPPING] = [[1, 1, 0], [1, 1, 1]]
    (finding,) = found_in(parse_config(content, source="f"))
    assert (finding.code, finding.place) == ("G506", "prefill_pools")


def test_a_trace_outweighs_the_suspicion_about_the_first_edge() -> None:
    content = fixture("G204")
    assert codes_of(content, traffic=[600, 3000, 5000]) == []
    assert codes_of(content, traffic=[500, 3000, 5000]) == ["G402"]


def test_traffic_beyond_uneven_edges_is_told_at_the_last_edge() -> None:
    content = prefill([[0, 0, 1], [0, 0, 0]])
    for key in ("isl_min", "isl_max", "isl_resolution"):
        del content[PREFILL][key]
    content[PREFILL]["isl_edges"] = [0, 1000, 3000]
    (finding,) = found_in(parse_config(content, source="f"), traffic=[500, 2000, 5000])
    assert (finding.code, finding.place) == ("G401", f"{PREFILL}.isl_edges[2]")


def test_fewer_than_one_request_in_a_hundred_are_outliers() -> None:
    content = fixture("clean")
    assert codes_of(content, traffic=[1000, 5000] * 50 + [9000]) == []
    assert codes_of(content, traffic=[1000, 5000] * 49 + [9000]) == ["G401", "G401"]


def test_one_request_in_a_hundred_is_no_outlier_any_more() -> None:
    above = [1000, 5000] * 49 + [1000, 9000]
    assert codes_of(fixture("clean"), traffic=above) == ["G401", "G401"]
    below = [600, 5000] * 49 + [600, 500]
    assert codes_of(fixture("G204"), traffic=below) == ["G402"]


def test_a_prompt_on_the_last_edge_is_on_the_axis() -> None:
    assert codes_of(fixture("clean"), traffic=[1000, 8192]) == []


def test_cost_says_which_pool_is_cheap() -> None:
    content = fixture("G304")
    assert codes_of(content) == ["G304"]
    content["pools"]["p-tp1"]["cost"] = 2
    assert codes_of(content) == []


def test_a_cheaper_pool_has_to_meet_the_target_when_it_is_busy() -> None:
    """p-tp1 takes 97.4 ms for 4095 tokens alone, and at 80 % 502 ms, behind two prompts of 8192."""
    content = fixture("G304")
    content[PREFILL] |= {"ttft_max_ms": 1590, MAPPING: [[0, 0, 1], [0, 0, 1]]}  # edge at 570 ms
    assert "G304" in codes_of(content)
    content[PREFILL]["ttft_max_ms"] = 1590 - 60  # edge at 550 ms, of which a tenth is to spare
    assert "G304" not in codes_of(content)


def test_a_cheaper_pool_has_to_meet_the_target_at_its_worst_size() -> None:
    """Longer contexts leave room for smaller batches, so it is not always the longest."""
    content = fixture("clean")
    content |= {"num_decode_pools": 2, "decode_pools": ["d-tp2", "d-tp1"]}
    content["pools"]["d-tp2"] = content["pools"]["p-tp2"]
    content["decode_pool_selection_strategy"] |= {
        "context_length_max": 60_000,
        "itl_min_ms": 20,
        "itl_max_ms": 30,
        "itl_resolution": 2,
        "decode_pool_mapping": [[0, 0]],
    }
    profile = load_profile("llama-3.1-8b-h100").tp(1)
    longest_ms, worst_ms = (
        1000 * profile.itl_s(0.8 * profile.kv_capacity_tokens / n, n)
        for n in (60_000, profile.kv_capacity_tokens / 256)
    )
    assert longest_ms < 0.9 * 25 < worst_ms
    assert "G304" not in codes_of(content)
    content["decode_pool_selection_strategy"]["itl_max_ms"] = 34
    assert worst_ms < 0.9 * 27
    assert "G304" in codes_of(content)


def test_the_tightest_latency_band_may_have_an_expensive_pool_for_what_is_tighter() -> None:
    content = fixture("G304")
    content[PREFILL] |= {"ttft_min_ms": 1200, MAPPING: [[0, 1, 1], [0, 1, 1]]}
    assert "G304" not in codes_of(content)


def test_the_last_size_band_may_have_an_expensive_pool_for_what_is_longer() -> None:
    """A trace that has nothing longer says that there is none."""
    content = fixture("G304")
    config = parse_config(content, source="f")
    (without,) = found_in(config)
    (short,) = found_in(config, traffic=[4000, 8192])
    (long,) = found_in(config, traffic=[4000, 8193] + [4000] * 200)
    assert without.message == long.message
    assert short.message == without.message + "; the same at 2 more: [1][1], [1][2]"


def agg_with_profiles(mapping: list[list[list[int]]], **keys: object) -> dict[str, Any]:
    """A grid of ISL 0 to 8192 in two bands by TTFT 60 to 360 ms in two by ITL 5 to 45 ms in two."""
    content = agg_file()
    content["agg_pool_selection_strategy"] = {
        "isl_min": 0,
        "isl_max": 8192,
        "isl_resolution": 2,
        "ttft_min_ms": 60,
        "ttft_max_ms": 360,
        "ttft_resolution": 2,
        "itl_min_ms": 5,
        "itl_max_ms": 45,
        "itl_resolution": 2,
        "agg_pool_mapping": mapping,
        **keys,
    }
    profile = {"profile": "llama-3.1-8b-h100"}
    content |= {"num_agg_pools": 2, "agg_pools": ["a-tp2", "a-tp1"]}
    content["pools"] = {"a-tp2": profile | {"tp": 2}, "a-tp1": profile | {"tp": 1}}
    content["objectives"] = {"*": {"ttft_ms": 100, "itl_ms": 10}}
    return content


def test_a_pool_of_both_phases_has_to_do_both_while_it_is_busy() -> None:
    """At 80 %, among prompts of 8192 tokens, a-tp1 takes up to 1332 ms TTFT and 185.3 ms ITL."""
    mapping = [[[0, 0], [0, 0]], [[0, 0], [0, 1]]]
    for itl_ms, ttft_ms, expensive in (
        (207, 1490, True),
        (207, 1470, False),
        (205, 1490, False),
    ):
        content = agg_with_profiles(
            mapping,
            ttft_min_ms=ttft_ms - 80,
            ttft_max_ms=ttft_ms + 80,
            itl_min_ms=itl_ms - 40,
            itl_max_ms=itl_ms + 40,
        )
        content["objectives"] = {"*": {"ttft_ms": ttft_ms - 1, "itl_ms": itl_ms - 1}}
        assert ("G304" in codes_of(content)) is expensive


def made_up(
    *, ttft_ms: float, itl_ms: float, busy_itl_ms: float, kv_tokens: int = 10**8, cold: int = 8192
) -> TpProfile:
    """The same times for all prompts; prefill with nothing cached is measured up to `cold` tokens."""
    return tp_profile_from_json(
        {
            "model": "m",
            "tensor_parallel_size": 1,
            "kv_capacity_tokens": kv_tokens,
            "kv_bytes_per_token": 1,
            "prefill": [[1, 0, ttft_ms], [cold, 0, ttft_ms], [2 * cold, 2048, ttft_ms]],
            "decode": [[b, n, x] for b, x in ((1, itl_ms), (256, busy_itl_ms)) for n in (1, 16384)],
        }
    )


@pytest.mark.parametrize(
    ("itl_ms", "busy_itl_ms", "slower"),
    [(8, 20, False), (8, 60, False), (12, 30, False), (12, 60, True), (10, 50, True)],
)
def test_slower_is_slower_in_one_latency_and_faster_in_none(
    itl_ms: float, busy_itl_ms: float, *, slower: bool
) -> None:
    """Under no load faster, that is; along an axis of one latency neither in the other."""
    content = agg_with_profiles([[[0, 0], [0, 0]], [[1, 1], [0, 0]]])
    profiles = {
        "a-tp2": made_up(ttft_ms=50, itl_ms=10, busy_itl_ms=50),
        "a-tp1": made_up(ttft_ms=70, itl_ms=itl_ms, busy_itl_ms=busy_itl_ms),
    }
    found = {f.code for f in lint(parse_config(content, source="f"), profiles=profiles)}
    assert ("G101" in found, "G102" in found) == (slower, slower)


def test_along_an_axis_a_pool_is_slower_only_if_it_is_so_in_the_latency_of_that_axis() -> None:
    """a-tp1 is slower in ITL alone: once tighter TTFT targets get it, and then tighter ITL targets."""
    profiles = {
        "a-tp2": made_up(ttft_ms=50, itl_ms=10, busy_itl_ms=50),
        "a-tp1": made_up(ttft_ms=50, itl_ms=12, busy_itl_ms=60),
    }
    for mapping, told in (([[1, 1], [0, 0]], False), ([[1, 0], [1, 0]], True)):
        content = agg_with_profiles([mapping, mapping])
        found = {f.code for f in lint(parse_config(content, source="f"), profiles=profiles)}
        assert ("G101" in found) is told


def test_cells_that_no_pool_meets_are_no_finding_where_their_row_and_column_are_met() -> None:
    """Long prompts with tight targets are in every table of both."""
    content = prefill([[0, 0, 1], [0, 0, 0]], profiles=True, isl_max=16_384)
    content[PREFILL] |= {"ttft_max_ms": 330}  # columns from 60, 150 and 240; 122 and 266 ms
    assert codes_of(content) == []
    content[PREFILL] |= {"ttft_max_ms": 240}
    assert codes_of(content) == ["G303"]
    content[PREFILL] |= {"ttft_max_ms": 120}  # for the last band's beginning it is too tight
    assert "G302" in codes_of(content)
    content[PREFILL] |= {"ttft_min_ms": 0, "ttft_max_ms": 300, "ttft_resolution": 100}
    content[PREFILL][MAPPING] = [[0] * 99 + [1], [0] * 100]
    assert codes_of(content) == ["G301"]


def test_what_no_pool_meets_is_not_missed_by_one_of_them() -> None:
    content = prefill([[1, 1], [1, 1]], profiles=True, isl_max=16_384, ttft_resolution=2)
    content[PREFILL] |= {"ttft_min_ms": 60, "ttft_max_ms": 140}
    (finding,) = [f for f in found_in(parse_config(content, source="f")) if f.code == "G303"]
    assert finding.place == f"{PREFILL}.{MAPPING}[0][0]"
    assert "[1][0]" not in finding.message  # 122 ms in the faster pool, and the band ends at 100


@pytest.mark.parametrize(("busy_itl_ms", "is_better"), [(15, True), (25, False)])
def test_a_pool_that_is_faster_only_while_it_is_idle_is_no_better(
    busy_itl_ms: float, *, is_better: bool
) -> None:
    content = fixture("clean")
    content |= {"num_decode_pools": 2, "decode_pools": ["d-a", "d-b"]}
    content["decode_pool_selection_strategy"] |= {
        "itl_min_ms": 5,
        "itl_resolution": 2,
        "decode_pool_mapping": [[1, 0]],
    }
    del content["pools"]
    profiles = {
        "d-a": made_up(ttft_ms=50, itl_ms=4, busy_itl_ms=busy_itl_ms),
        "d-b": made_up(ttft_ms=50, itl_ms=8, busy_itl_ms=20),
    }
    found = [f.code for f in lint(parse_config(content, source="f"), profiles=profiles)]
    assert found == (["G101", "G303"] if is_better else [])


def test_a_profile_has_measured_what_it_has_rows_for_with_nothing_cached() -> None:
    config = parse_config(fixture("clean"), source="f")
    times = {"ttft_ms": 50, "itl_ms": 10, "busy_itl_ms": 20}
    long, short = made_up(**times), made_up(**times, cold=4096)
    assert lint(config, profiles={"p-tp2": long, "p-tp1": long}) == []
    (finding,) = lint(config, profiles={"p-tp2": short, "p-tp1": long})
    assert finding.code == "G601"
    assert "up to 8,192 tokens; its profile measured up to 4,096" in finding.message


@pytest.mark.parametrize(
    ("longest", "cold", "measured"), [(8192, 4096, 4096), (20_000, 32_768, 16_384)]
)
def test_a_pool_of_both_phases_has_measured_what_both_of_them_have(
    longest: int, cold: int, measured: int
) -> None:
    """Of decode the profile has contexts of up to 16384 tokens."""
    content = agg_with_profiles([[[0, 0], [0, 0]], [[0, 0], [0, 1]]], isl_max=longest)
    profile = made_up(ttft_ms=50, itl_ms=10, busy_itl_ms=20, cold=cold)
    config = parse_config(content, source="f")
    found = lint(config, profiles=dict.fromkeys(config.pools, profile))
    messages = [f.message for f in found if f.code == "G601"]
    assert len(messages) == 2
    assert all(f"its profile measured up to {measured:,}," in message for message in messages)


def test_a_pool_needs_memory_only_for_the_prompts_of_its_own_cells() -> None:
    """p-tp1 gets prompts below 4096 tokens."""
    config = parse_config(fixture("clean"), source="f")
    times = {"ttft_ms": 50, "itl_ms": 10, "busy_itl_ms": 20}
    large, small = made_up(**times), made_up(**times, kv_tokens=4095)
    assert lint(config, profiles={"p-tp2": large, "p-tp1": small}) == []
    (finding,) = lint(config, profiles={"p-tp2": small, "p-tp1": large})
    assert finding.code == "G602"


@pytest.mark.parametrize(
    ("limits", "is_enough"),
    [
        ({}, False),
        ({"max_inflight": 4}, True),
        ({"batch": 4}, True),
        ({"batch": 4, "max_inflight": 64}, True),
        ({"batch": 64, "max_inflight": 4}, True),
        ({"batch": 256}, False),
    ],
)
def test_a_limit_of_requests_makes_the_batch_of_a_busy_worker(
    limits: dict[str, int], *, is_enough: bool
) -> None:
    content = fixture("clean")
    content |= {"num_decode_pools": 2, "decode_pools": ["d-tp2", "d-tp1"]}
    content["pools"]["d-tp2"] = content["pools"]["p-tp2"]
    content["decode_pool_selection_strategy"] |= {
        "itl_min_ms": 5,
        "itl_max_ms": 35,
        "itl_resolution": 3,
        "decode_pool_mapping": [[0, 0, 1]],
    }
    content["objectives"] = {"*": {"itl_ms": 10}}
    content["pools"]["d-tp1"] |= limits
    assert codes_of(content) == ["G304"] * is_enough


@pytest.mark.parametrize(
    ("figures", "is_enough"),
    [
        ({}, False),
        ({"replicas": 2}, True),
        ({"workers": ["a:1", "b:1"]}, True),
        ({"workers": ["a:1", "b:1"], "replicas": 1}, False),
    ],
)
def test_a_prompt_waits_for_one_of_the_workers_that_are_planned(
    figures: dict[str, Any], *, is_enough: bool
) -> None:
    """One takes 502 ms for 4095 tokens when busy, and 285 ms when it is two; the edge is at 360 ms."""
    content = fixture("G304")
    content[PREFILL] |= {"ttft_max_ms": 960, MAPPING: [[0, 0, 1], [0, 0, 1]]}
    content["pools"]["p-tp1"] |= figures
    assert ("G304" in codes_of(content)) is is_enough


def test_more_workers_are_not_slower_though_each_is() -> None:
    """Four p-tp1 are at 99 % of their time faster than one p-tp2."""
    content = prefill([[1, 1], [0, 1]], profiles=True, ttft_resolution=2)
    assert codes_of(content).count("G101") == 0
    content[PREFILL][MAPPING] = [[1, 0], [0, 0]]
    assert "G101" in codes_of(content)
    content["pools"]["p-tp1"]["replicas"] = 4
    assert "G101" not in codes_of(content)


def test_a_single_cell_with_a_pool_that_is_four_times_too_large_is_found() -> None:
    names = [f"p{tp}" for tp in (1, 2, 4, 8)]
    axes = {"isl_min": 0, "isl_max": 8192, "isl_resolution": 4}
    axes |= {"ttft_min_ms": 400, "ttft_max_ms": 2000, "ttft_resolution": 4}
    mapping = [[3, 0, 0, 0], [3, 1, 0, 0], [3, 2, 1, 0], [3, 3, 2, 1]]
    content = fixture("clean")
    content |= {"num_prefill_pools": 4, "prefill_pools": names}
    content["prefill_pool_priorities"] = [3, 2, 1, 0]
    tp = {"d-tp1": 8} | {name: int(name[1:]) for name in names}
    content["pools"] = {name: {"profile": QWEN, "tp": tp[name]} for name in tp}
    content["objectives"] = {"*": {"ttft_ms": 700}}
    content[PREFILL] = {**axes, MAPPING: mapping}
    assert codes_of(content) == []
    mapping[1][1] = 3
    found = found_in(parse_config(content, source="f"))
    assert [f.place for f in found if f.code == "G304"] == [f"{PREFILL}.{MAPPING}[1][1]"]


def test_the_kv_cache_limits_the_batch_of_a_busy_worker() -> None:
    content = fixture("G602")
    content |= {"num_decode_pools": 2, "decode_pools": ["d-tp2", "d-tp1"]}
    content["pools"]["d-tp2"] = content["pools"]["p-tp2"]
    content["decode_pool_selection_strategy"] |= {
        "context_length_max": 5000,
        "itl_resolution": 3,
        "decode_pool_mapping": [[0, 0, 1]],
    }
    assert codes_of(content) == ["G304"]


def test_a_grid_of_three_axes_is_linted_in_both_latencies() -> None:
    content = agg_file()
    content["agg_pool_selection_strategy"]["agg_pool_mapping"] = [
        [[0, 0], [0, 0], [1, 0]],
        [[0, 0], [0, 0], [2, 0]],
    ]
    found = found_in(parse_config(content, source="f"))
    place = "agg_pool_selection_strategy.agg_pool_mapping"
    assert [(f.code, f.place) for f in found] == [
        ("G101", f"{place}[0][2][0]"),
        ("G102", f"{place}[1][2][0]"),
    ]


def test_a_grid_without_sizes_is_judged_by_the_median_prompt() -> None:
    content = agg_file()
    strategy = content["agg_pool_selection_strategy"]
    for key in ("isl_min", "isl_max", "isl_resolution"):
        del strategy[key]
    strategy |= {"ttft_min_ms": 60, "ttft_max_ms": 360}
    strategy["agg_pool_mapping"] = [[0, 0], [0, 0], [0, 1]]
    content |= {"num_agg_pools": 2, "agg_pools": ["a-tp2", "a-tp1"]}
    profile = {"profile": "llama-3.1-8b-h100"}
    content["pools"] = {"a-tp2": profile | {"tp": 2}, "a-tp1": profile | {"tp": 1}}
    content["objectives"] = {"*": {"itl_ms": 10}}
    assert codes_of(content) == []
    assert codes_of(content, traffic=[12_000, 12_000, 100]) == ["G301"]


def test_the_paths_are_those_of_the_endpoint_pickers_spelling() -> None:
    content = {
        "poolLabel": "pool",
        "poolLabels": ["fast", "slow", "idle"],
        "sizeMin": 512,
        "sizeMax": 8192,
        "sizeResolution": 2,
        "latencyMinMs": 100,
        "latencyMaxMs": 900,
        "latencyResolution": 2,
        "mapping": [[1, 0], [0, 0]],
        "priorityOverrides": [{"minPriority": -5, "maxPriority": -1, "targetPool": 1}],
    }
    found = found_in(parse_config(content, source="f"))
    assert [(f.code, f.place) for f in found] == [
        ("G101", "mapping[0][0]"),
        ("G103", "poolLabels[2]"),
        ("G204", "sizeMin"),
        ("G502", "priorityOverrides[0]"),
    ]


# --- against a slower way to find the same ----------------------------------------------------------


@pytest.mark.parametrize("seed", range(n_in(gate=1, long=20)))
def test_without_g303_no_sweep_finds_a_pool_that_misses_while_another_meets(seed: int) -> None:
    rng = random.Random(seed)
    profile = load_profile("qwen3-32b-fp8-h200")
    n_clean = 0
    for _ in range(60):
        content = disagg_file()
        names = [f"p-tp{tp}" for tp in (8, 4, 2, 1)]
        content |= {"num_prefill_pools": 4, "prefill_pools": names}
        content["prefill_pool_priorities"] = [0, 1, 2, 3]
        content["pools"] = {f"p-tp{tp}": {"profile": profile.name, "tp": tp} for tp in (1, 2, 4, 8)}
        low, high = rng.choice([0, 100, 600]), rng.choice([900, 3000])
        content[PREFILL] |= {"isl_max": 16_384, "ttft_min_ms": low, "ttft_max_ms": high}
        content[PREFILL][MAPPING] = [sorted(rng.choices([0, 0, 1, 2, 3], k=2)) for _ in range(2)]
        config = parse_config(content, source="f")
        grid = config.stages["prefill"]
        has_g303 = "G303" in {f.code for f in found_in(config)}
        n_clean += not has_g303
        misses = any(
            time_ms[grid.select({"isl": isl, "ttft_ms": target}).pool] > target >= min(time_ms)
            for isl in range(0, 16_384, 331)
            for time_ms in [[profile.tp(tp).prefill_s(isl, 0) * 1000 for tp in (8, 4, 2, 1)]]
            for target in range(low, high, 7)
        )
        assert misses <= has_g303, f"seed {seed}"
    assert 0 < n_clean < 60, f"seed {seed}"


@pytest.mark.parametrize("seed", range(n_in(gate=1, long=20)))
def test_an_override_is_hidden_when_no_priority_comes_to_it(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(n_in(gate=50, long=200)):
        content = fixture("clean")
        rules = []
        for _ in range(rng.randint(1, 6)):
            low = rng.randint(-8, 8)
            high = low + rng.choice([0, 1, 2, 9])
            rules.append({"min_priority": low, "max_priority": high, "target_pool": 0})
        content[PREFILL]["priority_overrides"] = rules
        hit = set()
        for priority in range(-20, 30):
            for at, rule in enumerate(rules):
                if rule["min_priority"] <= priority <= rule["max_priority"]:
                    hit.add(at)
                    break
        found = found_in(parse_config(content, source="f"))
        hidden = [f.place for f in found if f.code == "G501"]
        expected = [
            f"{PREFILL}.priority_overrides[{at}]" for at in range(len(rules)) if at not in hit
        ]
        assert hidden == expected, f"seed {seed}"


@pytest.mark.parametrize("seed", range(n_in(gate=1, long=20)))
def test_no_numbers_that_load_are_too_odd_to_lint(seed: int) -> None:
    """And each path is a place of the file, or one that it lacks in an object that it has."""
    rng = random.Random(seed)
    odd = [-1e308, -1e15, -3, -0.0, 0, 5e-324, 0.1, 1, 7, 500.5, 2**31, 2**53 + 1, 1e300, 1e308]
    n_loaded = 0
    for _ in range(150):
        content = fixture(rng.choice(["clean", "G109", "G303", "G506", "G605"]))
        strategy = content[PREFILL]
        strategy["isl_min"], strategy["isl_max"] = sorted(rng.sample(odd, 2))
        strategy["ttft_min_ms"], strategy["ttft_max_ms"] = sorted(rng.sample(odd, 2))
        low, high = sorted(rng.choices(odd, k=2))
        rule = {"min_priority": low, "max_priority": high, "target_pool": 1}
        strategy["priority_overrides"] = [rule, rule]
        content["objectives"] = {rng.choice("*a"): {"ttft_ms": rng.choice(odd)}}
        try:
            config = parse_config(content, source="f")
        except ConfigError:  # a negative default, bands of no width
            continue
        n_loaded += 1
        known = set(places(content)) | {"prefill_pools", "pools.p-tp1"}
        for finding in found_in(config, traffic=rng.choice([[], [1, 2**31]])):
            assert finding.place in known, f"seed {seed}"
    assert n_loaded > 50, f"seed {seed}"
