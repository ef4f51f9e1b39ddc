"""Timing profiles: rows come back exactly, in between is in between, and a bad file names its field."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slagate.workers.profiles.profile import TpProfile, available_profiles, load_profile
from slagate.workers.profiles.table import MAX_KNOWN, MAX_WHOLE, TimingTable
from slagate.workers.runtime.usage import ProfileError

ALL = [
    pytest.param(load_profile(name).tp(size), id=f"{name}-tp{size}")
    for name in available_profiles()
    for size in load_profile(name).tp_sizes
]


def small() -> dict[str, Any]:
    return {
        "schema": 1,
        "model": "m",
        "system": "s",
        "engine": "e",
        "source": "t",
        "prefill_columns": ["new_tokens", "cached_tokens", "ms"],
        "decode_columns": ["batch_size", "context_tokens", "itl_ms"],
        "kv_bytes_per_token": 1000,
        "tp": {
            "1": {
                "kv_capacity_tokens": 4096,
                "prefill": [[100, 0, 10.0], [200, 0, 20.0], [100, 1000, 14.0], [200, 1000, 28.0]],
                "decode": [[1, 512, 4.0], [4, 512, 8.0], [1, 2048, 4.0], [4, 2048, 16.0]],
            }
        },
    }


def load(tmp_path: Path, content: dict[str, Any]) -> TpProfile:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content))
    return load_profile(path).tp(1)


def raw_rows(profile: TpProfile, name: str) -> list[list[float]]:
    folder = Path(__file__).resolve().parents[4] / "configs/profiles"
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        if content["model"] == profile.model:
            rows: list[list[float]] = content["tp"][str(profile.tensor_parallel_size)][name]
            return rows
    raise AssertionError(profile.model)


@pytest.mark.parametrize("profile", ALL)
def test_rows_of_the_table_come_back_exactly(profile: TpProfile) -> None:
    for new, cached, ms in raw_rows(profile, "prefill"):
        assert profile.prefill_s(new, cached) == ms / 1000
    for batch, context, ms in raw_rows(profile, "decode"):
        assert profile.itl_s(batch, context) == ms / 1000


@pytest.mark.parametrize("profile", ALL)
def test_time_between_two_rows_lies_between_their_times(profile: TpProfile) -> None:
    """Along each axis, also where the measurements are noisy and fall."""
    rows = sorted(raw_rows(profile, "prefill"), key=lambda row: (row[1], row[0]))
    for (new, cached, a_ms), (next_new, next_cached, b_ms) in pairwise(rows):
        if cached == next_cached:
            between = profile.prefill_s(math.sqrt(new * next_new), cached) * 1000
            assert min(a_ms, b_ms) <= between <= max(a_ms, b_ms)
    rows = sorted(raw_rows(profile, "decode"))
    for (batch, context, a_ms), (next_batch, next_context, b_ms) in pairwise(rows):
        if batch == next_batch:
            between = profile.itl_s(batch, math.sqrt(context * next_context)) * 1000
            assert min(a_ms, b_ms) <= between * (1 + 1e-12)
            assert between <= max(a_ms, b_ms) * (1 + 1e-12)


@settings(max_examples=60)
@given(
    profile=st.sampled_from([param.values[0] for param in ALL]),
    x=st.integers(1, 2_000_000),
    y=st.integers(0, 2_000_000),
)
def test_times_are_positive_and_finite_everywhere(profile: TpProfile, x: int, y: int) -> None:
    for seconds in (profile.prefill_s(x, y), profile.itl_s(x, y)):
        assert 0 < seconds < math.inf


@settings(max_examples=60)
@given(
    profile=st.sampled_from([param.values[0] for param in ALL]),
    new=st.integers(64, 400_000),
    more=st.integers(1, 100_000),
    cached=st.integers(0, 400_000),
)
def test_more_new_tokens_never_take_less_time(
    profile: TpProfile, new: int, more: int, cached: int
) -> None:
    """All packaged prefill tables rise in new tokens, inside and beyond."""
    assert profile.prefill_s(new + more, cached) >= profile.prefill_s(new, cached) * (1 - 1e-12)


def test_interpolation_is_log_log_and_linear_in_cached_tokens(tmp_path: Path) -> None:
    profile = load(tmp_path, small())
    assert profile.prefill_s(150, 0) == pytest.approx(0.015)
    assert profile.prefill_s(100, 250) == pytest.approx(0.011)
    assert profile.itl_s(2, 512) == pytest.approx(0.004 * math.sqrt(2))
    assert profile.itl_s(4, 1024) == pytest.approx(0.008 * math.sqrt(2))


def test_beyond_the_table_the_last_two_rows_set_the_slope(tmp_path: Path) -> None:
    profile = load(tmp_path, small())
    assert profile.prefill_s(400, 0) == pytest.approx(0.040)
    assert profile.prefill_s(100, 3000) == pytest.approx(0.022)
    assert profile.itl_s(16, 2048) == pytest.approx(0.064)


def test_a_falling_last_slope_is_not_carried_on(tmp_path: Path) -> None:
    content = small()
    content["tp"]["1"]["decode"] = [[1, 512, 4.0], [4, 512, 3.0]]
    content["tp"]["1"]["prefill"] = [[100, 0, 10.0], [100, 1000, 9.0]]
    profile = load(tmp_path, content)
    assert profile.itl_s(1000, 512) == 0.003
    assert profile.prefill_s(100, 1_000_000) == 0.009
    assert profile.prefill_s(5, 0) == 0.010


def test_contexts_below_the_first_row_take_what_that_row_takes(tmp_path: Path) -> None:
    """The slope between the first two rows would make a batch faster than one request."""
    profile = load(tmp_path, small())
    assert profile.itl_s(4, 1) == profile.itl_s(4, 511) == profile.itl_s(4, 512) == 0.008
    batches = profile.itl_of_batches(np.full(9, 4), np.full(9, 1.0))
    np.testing.assert_allclose(batches, 0.008, rtol=1e-12)


def test_time_below_the_first_row_of_cached_tokens_is_never_negative(tmp_path: Path) -> None:
    """A steep rise between two rows leads below 0 in front of them."""
    content = small()
    content["tp"]["1"]["prefill"] = [[100, 1000, 1.0], [100, 1100, 9.0]]
    profile = load(tmp_path, content)
    assert profile.prefill_s(100, 0) == 0
    assert profile.prefill_many(np.full(20, 100.0), np.zeros(20)).tolist() == [0.0] * 20


@pytest.mark.parametrize("field", ["prefill", "decode"])
def test_rows_that_lead_out_of_the_numbers_are_refused(tmp_path: Path, field: str) -> None:
    content = small()
    content["tp"]["1"][field] = [[100, 512, 1.0], [101, 512, 1000.0]]
    with pytest.raises(ProfileError, match=rf"tp\.1\.{field}: rows too steep"):
        load(tmp_path, content)


@pytest.mark.parametrize("field", ["prefill", "decode"])
def test_rows_between_others_may_lead_out_of_the_numbers_as_little(
    tmp_path: Path, field: str
) -> None:
    """Five lines of rows, of which the third alone rises steeply."""
    content = small()
    rows = [[x, 512 * y, 1.0] for y in range(1, 6) for x in (1, 2)]
    rows[5][2] = 1e12
    content["tp"]["1"][field] = rows
    with pytest.raises(ProfileError, match=rf"tp\.1\.{field}: rows too steep"):
        load(tmp_path, content)


def test_nothing_to_do_takes_no_time(tmp_path: Path) -> None:
    profile = load(tmp_path, small())
    assert profile.prefill_s(0, 500) == 0
    assert profile.itl_s(0, 500) == 0


def test_an_unknown_size_lists_the_sizes_there_are() -> None:
    with pytest.raises(ProfileError, match=r"size 3; available: 1, 2, 4"):
        load_profile("llama-3.1-8b-h100").tp(3)


def test_an_unknown_name_lists_the_packaged_profiles() -> None:
    with pytest.raises(ProfileError, match=r"'nope'.*available: .*llama-3.1-8b-h100"):
        load_profile("nope")


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="No such file"):
        load_profile(tmp_path / "x.json")


def test_packaged_profiles_say_what_they_are() -> None:
    profile = load_profile("qwen3-32b-fp8-h200")
    tp = profile.tp(2)
    assert (profile.system, tp.model) == ("h200_sxm", profile.model)
    assert tp.kv_capacity_tokens > 100_000
    assert tp.kv_bytes_per_token == profile.kv_bytes_per_token > 0


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), 2, "schema"),
        (("model",), "", "model"),
        (("kv_bytes_per_token",), 0, "kv_bytes_per_token"),
        (("extra",), 1, "extra"),
        (("prefill_columns",), ["cached_tokens", "new_tokens", "ms"], "prefill_columns"),
        (("tp",), {}, "tp"),
        (("tp", "1", "kv_capacity_tokens"), True, r"tp\.1\.kv_capacity_tokens"),
        (("tp", "1", "prefill"), [], r"tp\.1\.prefill"),
        (("tp", "1", "prefill", 1), [0, 0, 1.0], r"tp\.1\.prefill\.1"),
        (("tp", "1", "prefill", 1), [100, 0, 1.0], r"tp\.1\.prefill\.1: repeats"),
        (("tp", "1", "decode", 2), [1, 2048, -4.0], r"tp\.1\.decode\.2"),
        (("tp", "1", "decode", 2), [1, 2048, math.nan], r"tp\.1\.decode\.2"),
        (("tp", "1", "decode", 2), ["1", 2048, 4.0], r"tp\.1\.decode\.2"),
        (("tp", "1", "decode", 2), [1, 0, 4.0], r"tp\.1\.decode\.2: context_tokens"),
    ],
)
def test_a_bad_field_is_named(
    tmp_path: Path, path: tuple[Any, ...], value: object, message: str
) -> None:
    content = small()
    inner: Any = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ProfileError, match=rf"p\.json: .*{message}"):
        load(tmp_path, content)


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("{")
    with pytest.raises(ProfileError, match="Invalid JSON"):
        load_profile(str(path))


@pytest.mark.parametrize("profile", ALL)
def test_whole_batch_sizes_give_what_any_give(profile: TpProfile) -> None:
    """Also where the table of whole ones ends, and beyond either end of the measurements."""
    for largest in (MAX_WHOLE, MAX_WHOLE + 3):
        sizes = np.repeat(np.arange(1, largest + 1), 40)
        contexts = np.tile(np.geomspace(0.1, 2e6, 40), largest)
        known = [profile.itl_s(*each) for each in zip(sizes, contexts, strict=True)]
        np.testing.assert_allclose(profile.itl_of_batches(sizes, contexts), known, rtol=1e-12)
    assert len(profile.itl_of_batches(sizes[:0], contexts[:0])) == 0


def test_points_take_the_same_however_often_they_are_asked_for() -> None:
    rows = [(1, 0, 1.0), (1000, 0, 50.0), (1, 100, 2.0), (1000, 100, 70.0)]
    asked = TimingTable(rows, log_y=False)
    points = [(float(x), float(y)) for y in (0, 50, 200) for x in range(1, MAX_KNOWN)]
    for _ in range(2):
        # A table that was asked for nothing before.
        for x, y in points[:: MAX_KNOWN // 8]:
            assert asked.at(x, y) == asked.at(x, y) == TimingTable(rows, log_y=False).at(x, y)
        for x, y in points:
            asked.at(x, y)
