"""The fleet file's pools section: where workers are, and whether the grids have the ones they need."""

from importlib.resources import files

import pytest

from slagate.pools.fleet_file.load import load_config, parse_config
from slagate.pools.grid.errors import ConfigError
from support.fleet.files import disagg_file
from support.fleet.problems import lines

WORKER = "pools.p-fast.workers[0]"
REFUSED_POOLS: list[tuple[object, str]] = [
    ([], "pools"),
    (None, "pools"),
    ({"a.b": 1}, 'pools["a.b"]'),
    ({"p-fast": {"workers": "127.0.0.1:9000"}}, "pools.p-fast.workers"),
    ({"p-fast": {"workers": ["127.0.0.1"]}}, WORKER),
    ({"p-fast": {"workers": ["127.0.0.1:"]}}, WORKER),
    ({"p-fast": {"workers": [":9000"]}}, WORKER),
    ({"p-fast": {"workers": ["h:0"]}}, WORKER),
    ({"p-fast": {"workers": ["h:65536"]}}, WORKER),
    ({"p-fast": {"workers": ["h:09000"]}}, WORKER),
    ({"p-fast": {"workers": ["h:+9000"]}}, WORKER),
    ({"p-fast": {"workers": ["h:9000 "]}}, WORKER),
    ({"p-fast": {"workers": ["h:9000\n"]}}, WORKER),
    ({"p-fast": {"workers": ["http://h:9000"]}}, WORKER),
    ({"p-fast": {"workers": ["h:٣٣"]}}, WORKER),
    ({"p-fast": {"workers": ["::1:9000"]}}, WORKER),
    ({"p-fast": {"workers": ["[::1]"]}}, WORKER),
    ({"p-fast": {"workers": ["[10.0.0.1]:9000"]}}, WORKER),
    ({"p-fast": {"workers": [9000]}}, WORKER),
    ({"p-fast": {"profile": "qwen3-32b-fp8-h200"}}, "pools.p-fast.tp"),
    ({"p-fast": {"profile": "", "tp": 1}}, "pools.p-fast.profile"),
    ({"p-fast": {"profile": None, "tp": 1}}, "pools.p-fast.profile"),
    ({"p-fast": {"tp": 0}}, "pools.p-fast.tp"),
    ({"p-fast": {"tp": True}}, "pools.p-fast.tp"),
    ({"p-fast": {"max_inflight": 0}}, "pools.p-fast.max_inflight"),
    ({"p-fast": {"max_inflight": 1.5}}, "pools.p-fast.max_inflight"),
    ({"p-fast": {"max_inflight": 2**31}}, "pools.p-fast.max_inflight"),
    ({"p-fast": {"replicas": 0}}, "pools.p-fast.replicas"),
    ({"p-fast": {"replicas": 2.5}}, "pools.p-fast.replicas"),
    ({"p-fast": {"batch": 0}}, "pools.p-fast.batch"),
    ({"p-fast": {"batch": 2**31}}, "pools.p-fast.batch"),
    ({"p-fast": {"max_queued_tokens": 10**20 - 1}}, "pools.p-fast.max_queued_tokens"),
]


def test_pools_say_where_workers_are() -> None:
    spec = {"workers": ["h:1", "[::1]:65535"], "profile": "x", "tp": 2, "max_inflight": 8}
    config = parse_config(disagg_file() | {"pools": {"p-fast": spec}}, source="f")
    found = config.pools["p-fast"]
    assert (found.workers, found.profile) == (("h:1", "[::1]:65535"), "x")
    assert (found.tp, found.max_inflight) == (2, 8)


def test_the_largest_limit_loads_and_the_next_one_is_refused_with_the_bound() -> None:
    for name in ("max_inflight", "max_queued_tokens", "batch"):
        pools = {"p-fast": {name: 2**31 - 1}}
        config = parse_config(disagg_file() | {"pools": pools}, source="f")
        assert getattr(config.pools["p-fast"], name) == 2**31 - 1
        pools["p-fast"][name] += 1
        assert lines(disagg_file() | {"pools": pools}) == [
            f"pools.p-fast.{name}: must be at most 2147483647 (got 2147483648)"
        ]


@pytest.mark.parametrize(("pools", "path"), REFUSED_POOLS)
def test_one_fault_in_the_pools_gives_one_problem_at_its_path(pools: object, path: str) -> None:
    (line,) = lines(disagg_file() | {"pools": pools})
    assert line.startswith(f"{path}: ")
    assert " (got " in line


def test_workers_are_required_of_exactly_the_pools_of_the_grids() -> None:
    pools = {
        "p-fast": {"workers": ["h:1"]},
        "p-bulk": {},
        "d-fast": {"workers": ["h:2", "h:3", "h:2"]},
        "d-bluk": {"workers": ["H:1"]},
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(disagg_file() | {"pools": pools}, source="fleet.json", serving=True)
    assert caught.value.source == "fleet.json"
    assert [str(problem) for problem in caught.value.problems] == [
        "pools.p-bulk.workers: must not be empty (got nothing)",
        "pools.d-bulk: is required, as a decode pool has this name (got nothing)",
        'pools.d-fast.workers[2]: is at pools.d-fast.workers[0] already (got "h:2")',
        'pools.d-bluk: is not one of the pools p-fast, p-bulk, d-fast, d-bulk (got "d-bluk")',
        'pools.d-bluk.workers[0]: is at pools.p-fast.workers[0] already (got "H:1")',
    ]


def test_an_empty_list_of_workers_is_shown_as_what_is_there() -> None:
    pools = {"p-fast": {"workers": []}, "p-bulk": {"cost": 1}}
    with pytest.raises(ConfigError) as caught:
        parse_config(disagg_file() | {"pools": pools}, source="fleet.json", serving=True)
    assert [str(problem) for problem in caught.value.problems][:2] == [
        "pools.p-fast.workers: must not be empty (got [])",
        "pools.p-bulk.workers: must not be empty (got nothing)",
    ]


@pytest.mark.parametrize(
    ("name", "stages"),
    [("example-disagg", ["prefill", "decode"]), ("example-agg", ["agg"])],
)
def test_the_shipped_examples_load_without_warnings_and_have_workers(
    name: str, stages: list[str]
) -> None:
    path = files("slagate.configs") / "grids" / f"{name}.json"
    config = load_config(str(path), serving=True)
    assert (list(config.stages), config.warnings) == (stages, ())
