"""Rows of a suite, played in this process: what they say, and what bounds them."""

import json
from pathlib import Path
from typing import Any

import pytest

from slagate.router.replay.out import TIMES, OutFile, Row, RowKey
from slagate.router.replay.suite import Suite, load_suite
from slagate.router.replay.sweep import Job, bounded, do_job, keys_of, missing

N_ROWS = 24


def suite(**changed: Any) -> Suite:
    return load_suite("sla-small").model_copy(
        update={"requests": N_ROWS, "loads": (4.0,), "seeds": (1,), **changed}
    )


def played(of: Suite, policy: str, load: float | None = 4.0) -> Row:
    ended: list[None] = []
    rate = of.find_rate if load is None else None
    key = RowKey(Path(of.traces[0]).stem, "split", policy, load, 1, rate)
    row = do_job(Job(of, key), lambda: ended.append(None))
    assert len(ended) % of.requests == 0
    return row


def without_times(row: Row) -> str:
    return json.dumps({name: value for name, value in row.items() if name not in TIMES})


def test_the_same_run_gives_the_same_row() -> None:
    first, second = (played(suite(), "dynamo_kv") for _ in range(2))
    assert without_times(first) == without_times(second)
    assert {*TIMES} <= first.keys()


def test_a_row_says_who_met_the_targets_and_what_it_cost() -> None:
    row = played(suite(), "prefix")
    assert row["n"] == N_ROWS
    assert 0 < row["both_met"] <= row["ttft_met"] <= 1
    assert 0 < row["feasible"] <= 1
    assert row["refused"] == 0
    assert row["idle_share"].keys() == row["idle_while_waiting"].keys() == {"p4", "p1", "d4", "d1"}
    assert all(0 <= share <= 1 for share in row["idle_share"].values())
    of_class = row["classes"]
    assert sum(each["n"] for each in of_class.values()) == N_ROWS
    for each in of_class.values():
        assert 0 < each["ttft_ms"]["p50"] <= each["ttft_ms"]["p99"]
        assert 0 < each["itl_ms"]["p50"] <= each["itl_ms"]["p99"]


def test_the_oracle_is_no_less_than_a_policy() -> None:
    of = suite()
    schedule = played(of, "oracle")
    rows = [played(of, policy) for policy in ("prefix", "mooncake")]
    oracle = bounded(schedule, rows)
    assert oracle["policy"] == "oracle"
    assert oracle["both_met"] == max(row["both_met"] for row in [schedule, *rows])
    assert oracle["bound"] in ("schedule", "prefix", "mooncake")


@pytest.mark.parametrize(("both_met", "n_missing"), [(0.4, 0), (0.6, 1)])
def test_an_oracle_of_fewer_policies_is_made_again(
    tmp_path: Path, both_met: float, n_missing: int
) -> None:
    of = suite(policies=("prefix", "mooncake"))
    prefix, mooncake, oracle = keys_of(of)
    out = OutFile(tmp_path / "rows.json", keys_of(of), setup={}, parameters={}, traces={})
    assert missing(of, out) == [prefix, mooncake, oracle]
    for key in (prefix, oracle):
        out.put(key, {"both_met": 0.5})
    assert missing(of, out) == [mooncake, oracle]
    out.put(mooncake, {"both_met": both_met})
    assert missing(of, out) == [oracle][:n_missing]


def test_the_highest_load_is_found_where_there_is_one() -> None:
    row = played(suite(find_rate=0.9, ideal=True, requests=6), "mooncake", None)
    assert row["find_rate"] == 0.9
    if row["load"]:
        assert row["both_met_feasible"] >= 0.9


@pytest.mark.parametrize("find_rate", [None, 0.9])
def test_the_oracle_is_behind_what_it_bounds(find_rate: float | None) -> None:
    of = suite(find_rate=find_rate, loads=(1.0, 2.0))
    keys = keys_of(of)
    n_policies = len(of.policies)
    assert [key.policy for key in keys[: n_policies + 1]] == [*of.policies, "oracle"]
    assert (
        len(keys) == len(set(keys)) == 2 * (n_policies + 1) + n_policies * (find_rate is not None)
    )
