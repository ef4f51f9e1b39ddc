"""The linter on large files: its work grows with the cells and with the pools, and its report does not."""

import random
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import pytest

from slagate.pools.fleet_file.load import FleetConfig, parse_config
from slagate.pools.grid_lint import view as grid_lint_view
from slagate.pools.grid_lint.lint import lint
from slagate.router.cli.grid.lint import pool_profiles
from slagate.workers.findings import Finding
from slagate.workers.profiles import profile
from support.fleet.files import disagg_file
from support.fleet.problems import MAPPING, PREFILL


def large(*, n_bands: int, n_pools: int, profiles: bool = True) -> FleetConfig:
    """A random grid of n by n bands; the pools have every TP size, and each priority is there twice."""
    rng = random.Random(n_bands)
    names = [f"p{at}" for at in range(n_pools)]
    content: dict[str, Any] = disagg_file() | {"num_prefill_pools": n_pools, "prefill_pools": names}
    content |= {"enable_priority_retry": True}
    content["prefill_pool_priorities"] = [at // 2 for at in range(n_pools)]
    content[PREFILL] |= {"isl_max": 100_000, "ttft_min_ms": 0, "ttft_max_ms": 20_000}
    content[PREFILL] |= {"isl_resolution": n_bands, "ttft_resolution": n_bands}
    table = [[rng.randrange(n_pools) for _ in range(n_bands)] for _ in range(n_bands)]
    content[PREFILL][MAPPING] = table
    pools = {
        name: {"profile": "llama-3.1-8b-h100", "tp": (1, 2, 4)[at % 3]}
        for at, name in enumerate(names)
    }
    content["pools"] = pools if profiles else {}
    return parse_config(content, source="f")


def calls_of_lint(config: FleetConfig) -> int:
    """How many Python functions and steps of generators it takes."""
    profiles = pool_profiles(config)
    n_calls = 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal n_calls
        n_calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        lint(config, profiles=profiles)
    finally:
        sys.setprofile(before)
    return n_calls


@pytest.mark.parametrize("profiles", [True, False])
def test_four_times_the_cells_are_four_times_the_work(*, profiles: bool) -> None:
    small, big = (
        calls_of_lint(large(n_bands=n_bands, n_pools=3, profiles=profiles)) for n_bands in (40, 80)
    )
    assert big < 4.5 * small


def test_four_times_the_pools_are_at_most_four_times_the_work() -> None:
    small, big = (calls_of_lint(large(n_bands=12, n_pools=n_pools)) for n_pools in (100, 400))
    assert big < 4.5 * small


def test_a_profile_is_asked_once_for_each_size_and_not_for_each_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []
    prefill_s = profile.TpProfile.prefill_s

    def count(self: profile.TpProfile, new_tokens: float, cached_tokens: float) -> float:
        asked.append(new_tokens)
        return prefill_s(self, new_tokens, cached_tokens)

    monkeypatch.setattr(profile.TpProfile, "prefill_s", count)
    config = large(n_bands=40, n_pools=60)
    lint(config, profiles=pool_profiles(config))
    # Idle and busy, TP sizes, sizes in a band, bands; and the profile's rows and the longest prompt of all.
    assert 0 < len(asked) <= 2 * 3 * (5 * 40 + 10)


def test_only_the_cells_that_a_finding_names_are_put_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[object] = []
    cell_words = grid_lint_view.LintedStage.cell_words

    def count(self: grid_lint_view.LintedStage, index: tuple[int, ...]) -> str:
        said.append(index)
        return cell_words(self, index)

    monkeypatch.setattr(grid_lint_view.LintedStage, "cell_words", count)
    config = large(n_bands=40, n_pools=3)
    found = lint(config, profiles=pool_profiles(config))
    assert {"G101", "G102", "G303"} <= {f.code for f in found}
    assert 0 < len(said) <= 7 * len(found)


def with_code(found: Iterable[Finding], code: str) -> list[Finding]:
    return [finding for finding in found if finding.code == code]


def test_pools_that_contradict_their_profiles_are_told_once() -> None:
    """The pools with the most priority are TP 1, and all are slower than some pool after them."""
    config = large(n_bands=4, n_pools=100)
    (finding,) = with_code(lint(config, profiles=pool_profiles(config)), "G506")
    assert finding.message.startswith(
        "pool p0 has priority 0, faster than 49 of p98, but is slower"
    )
    more, _, listed = finding.message.partition("; the same at ")[2].partition(" more: ")
    assert int(more) == 65  # all others of TP 1 and 2, but for p99, which has number 49 too
    assert listed.split(", ")[0] == "p1 before p98"
    assert (listed.count(" before "), listed.endswith(", ...")) == (6, True)


def test_pools_of_equal_priority_are_told_once_for_each_number() -> None:
    content = disagg_file() | {"num_prefill_pools": 9, "enable_priority_retry": True}
    content["prefill_pools"] = [f"p{at}" for at in range(9)]
    content["prefill_pool_priorities"] = [0, 1, 1, 1, 2, 2, 2, 2, 2]
    content[PREFILL][MAPPING] = [[1, [2, 1, 3]], [[2, 3], 4]]
    found = with_code(lint(parse_config(content, source="f"), profiles={}), "G504")
    assert [finding.message.partition(" have ")[0] for finding in found] == [
        "pools p1, p2 and p3",
        "pools p4, p5, p6, p7 and p8",
    ]
    content[PREFILL][MAPPING] = [[1, [2, 1, 3]], [[2, 3], [4, 5, 6, 7, 8]]]
    content["prefill_pool_priorities"] = [1, 1, 1, 1, 1, 1, 1, 2, 2]
    (finding,) = with_code(lint(parse_config(content, source="f"), profiles={}), "G504")
    assert finding.message.startswith("pools p0, p1, p2, p3, p4, p5, ... (7 pools) have the same")
