"""The search for a policy's parameters, with an attainment that is worked out by hand."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from slagate.router.replay.policies.registry import PEERS, make, parameters_of
from slagate.router.replay.tune import (
    Tried,
    best_first,
    combinations,
    other_rows,
    points_table,
    tried,
    write_parameters,
)
from slagate.workers.runtime.usage import UsageError

TUNABLE = [name for name in PEERS if parameters_of(name)]


def searched() -> list[Tried]:
    """Points of which a TTFT limit of 0.9 is the best; the limit of ITL makes no difference."""
    points = []
    for parameters in combinations("mooncake"):
        limit = parameters["ttft_limit"]
        assert isinstance(limit, float)
        points.append(tried("mooncake", parameters, 0.8 - abs(limit - 0.9)))
    return points


@pytest.mark.parametrize("policy", TUNABLE)
def test_at_least_twenty_combinations_each_of_which_a_policy_takes(policy: str) -> None:
    found = combinations(policy)
    assert len(found) >= 20
    assert len({tuple(each.items()) for each in found}) == len(found)
    known = parameters_of(policy)
    assert {name: each.default for name, each in known.items()} in found
    for each in found:
        make(policy, each)


@pytest.mark.parametrize("policy", ["lmetric", "round_robin", "static_grid", "prefix"])
def test_a_policy_without_parameters_is_refused(policy: str) -> None:
    with pytest.raises(UsageError, match=f"--tune: {policy} has no parameters"):
        combinations(policy)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UsageError, match='did you mean "mooncake"'):
        combinations("moncake")


def test_the_best_is_the_highest_and_of_equals_the_nearest_to_the_defaults() -> None:
    points = searched()
    assert [dict(point.parameters) for point in points] == combinations("mooncake")
    best, second, *_, worst = best_first(points)
    assert best.parameters == {"ttft_limit": 0.9, "itl_limit": 1.0}
    assert (best.attainment, best.n_changed) == (pytest.approx(0.8), 1)
    assert second.parameters["ttft_limit"] == 0.9
    assert worst.parameters["ttft_limit"] == 1.25


def test_the_table_has_every_point_the_best_first() -> None:
    console = Console(width=100, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(points_table("mooncake", searched()))
    lines = [line.strip() for line in captured.get().splitlines()]
    assert lines[0] == "mooncake"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "%" in line]
    assert len(rows) == 20
    assert rows[0] == ["0.9", "1", "80.0%"]
    assert [row for row in rows if "*" in row[-1]] == [["1", "1", "70.0%*"]]
    assert lines[-1] == "* the defaults"


@pytest.mark.parametrize(
    ("skip", "n_rows", "n_in_trace", "found"),
    [
        (0, 400, 12_031, (400, 400)),
        (400, 800, 12_031, (1200, 800)),
        (11_231, 800, 12_031, (10_431, 800)),  # none are behind
        (11_000, 800, 12_031, (10_200, 800)),  # too few are behind
        (100, 400, 600, (500, 100)),  # as many as there are
        (300, 400, 750, (0, 300)),
    ],
)
def test_rows_that_are_not_shown(
    skip: int, n_rows: int, n_in_trace: int, found: tuple[int, int]
) -> None:
    assert other_rows(skip, n_rows, n_in_trace) == found
    first, n_found = found
    assert not set(range(first, first + n_found)) & set(range(skip, skip + n_rows))


def test_a_trace_that_is_all_shown_is_refused() -> None:
    with pytest.raises(UsageError, match="--tune: the trace has 400 rows, and none but those"):
        other_rows(0, 400, 400)


def test_the_best_parameters_are_written_into_the_suite(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    before = {
        "loads": [1, 2],
        "parameters": {"polyserve": {"late": "least"}, "mooncake": {"itl_limit": 2}},
        "classes": [{"name": "é"}],
    }
    path.write_text(json.dumps(before))
    write_parameters(path, "mooncake", {"ttft_limit": 0.9, "itl_limit": 1.0})
    after = json.loads(path.read_text(encoding="utf-8"))
    assert after == before | {
        "parameters": {
            "polyserve": {"late": "least"},
            "mooncake": {"ttft_limit": 0.9, "itl_limit": 1.0},
        }
    }
    assert list(after) == list(before)
    assert '  "loads": [1, 2],\n' in path.read_text(encoding="utf-8")


def test_a_suite_without_parameters_gets_some(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    path.write_text("{}")
    write_parameters(path, "mooncake", {"ttft_limit": 0.9})
    assert json.loads(path.read_text()) == {"parameters": {"mooncake": {"ttft_limit": 0.9}}}


@pytest.mark.parametrize("text", ["[]", "", '{"parameters": []}', "{"])
def test_what_is_no_suite_stays_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"--tune: .*suite\.json: is no suite file"):
        write_parameters(path, "mooncake", {"ttft_limit": 0.9})
    assert path.read_text() == text


def test_a_missing_suite_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--tune: .*none\.json: No such file"):
        write_parameters(tmp_path / "none.json", "mooncake", {"ttft_limit": 0.9})
