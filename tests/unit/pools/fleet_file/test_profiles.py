"""Reading the profiles of pools, and what is said of those that cannot be used."""

import json
from pathlib import Path

import pytest

from slagate.pools.estimator.estimator import Estimator
from slagate.pools.fleet.fleet import prepare
from slagate.pools.fleet_file.load import load_config, parse_config
from slagate.pools.fleet_file.rules import FleetFault, read_profiles
from slagate.pools.grid.errors import ConfigError
from slagate.workers.profiles.profile import load_profile
from support.fleet.files import disagg_file

PROFILE = "llama-3.1-8b-h100"
WORKERS = {name: {"workers": [f"{name}:1"]} for name in ("p-fast", "p-bulk", "d-fast", "d-bulk")}


def test_what_can_be_read_comes_back_and_the_rest_is_told_by_its_key() -> None:
    specs: dict[str, tuple[str, int | None]] = {
        "good": (PROFILE, 2),
        "no-file": ("nowhere", 1),
        "no-path": ("a\0b.json", 1),
        "no-size": (PROFILE, 77),
        "refused-size": (PROFILE, None),
        "neither": ("nowhere", None),
    }
    found, faults = read_profiles(specs)
    assert {name: profile.tensor_parallel_size for name, profile in found.items()} == {"good": 2}
    assert [(fault.path, fault.got) for fault in faults] == [
        (("pools", "no-file", "profile"), "nowhere"),
        (("pools", "no-path", "profile"), "a\0b.json"),
        (("pools", "no-size", "tp"), 77),
        (("pools", "neither", "profile"), "nowhere"),
    ]
    size = next(fault for fault in faults if fault.path[1] == "no-size")
    assert size == FleetFault(
        size.path, f"profile {PROFILE}: no tensor-parallel size 77; available: 1, 2, 4", 77
    )


def test_only_who_asks_for_serving_gets_profiles_and_the_pools_without_one_have_none() -> None:
    pools = {**WORKERS, "p-fast": {"workers": ["p:1"], "profile": PROFILE, "tp": 1}}
    content = disagg_file() | {"pools": pools}
    assert parse_config(content, source="f").profiles is None
    profiles = parse_config(content, source="f", serving=True).profiles
    assert profiles is not None
    assert [(name, each.tensor_parallel_size) for name, each in profiles.items()] == [("p-fast", 1)]


def test_the_pools_of_a_fleet_begin_with_what_their_profiles_say() -> None:
    pools = {**WORKERS, "p-fast": {"workers": ["p:1"], "profile": PROFILE, "tp": 2}}
    config = parse_config(disagg_file() | {"pools": pools}, source="f", serving=True)
    estimators = prepare(config).estimators
    assert estimators.keys() == WORKERS.keys()
    expected = Estimator(load_profile(PROFILE).tp(2), source=f"profile {PROFILE} tp 2")
    assert estimators["p-fast"].starts_as(expected)
    assert estimators["p-bulk"].starts_as(Estimator())


def test_a_profile_that_cannot_be_read_is_told_where_it_is_named(tmp_path: Path) -> None:
    """Also beside a size that is refused for itself, of which nothing more is said."""
    fleet, pools = tmp_path / "fleet.json", tmp_path / "pools.json"
    fleet.write_text(json.dumps(disagg_file() | {"pools": WORKERS}))
    more = {"p-fast": {"profile": "nowhere", "tp": 0}, "d-bulk": {"profile": PROFILE, "tp": 77}}
    pools.write_text(json.dumps({"pools": more}))
    with pytest.raises(ConfigError) as caught:
        load_config(fleet, pools=pools, serving=True)
    size, profile, missing = map(str, caught.value.problems)
    assert size == f"{pools}: pools.p-fast.tp: must be at least 1 (got 0)"
    assert profile.startswith(f"{pools}: pools.p-fast.profile: profile 'nowhere' is not packaged")
    assert profile.endswith('(got "nowhere")')
    assert missing.startswith(f"{pools}: pools.d-bulk.tp: profile {PROFILE}: no tensor-parallel")
