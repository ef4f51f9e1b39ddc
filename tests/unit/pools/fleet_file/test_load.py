"""The fleet file: what its keys mean, which spellings it takes, and how it is read."""

import json
from pathlib import Path

import pytest

from slagate.pools.fleet_file.load import FleetConfig, load_config, parse_config
from slagate.pools.grid.errors import ConfigError
from support.fleet.files import agg_file, disagg_file
from support.fleet.problems import AGG, DECODE, MAPPING, PREFILL, lines


def load(tmp_path: Path, text: str) -> FleetConfig:
    path = tmp_path / "fleet.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return load_config(path)


# --- meaning ---------------------------------------------------------------------------------------


def test_both_stages_come_out_with_their_orientation() -> None:
    """Rows are sizes and columns are targets: a transposed read gives other pools."""
    content = disagg_file()
    content[PREFILL][MAPPING] = [[0, 1], [1, 0]]
    content[DECODE]["decode_pool_mapping"] = [[0, 0], [1, 1]]
    config = parse_config(content, source="f")
    assert (config.mode, config.stages["prefill"].retry, config.warnings) == ("disagg", True, ())
    assert config.stages.keys() == {"prefill", "decode"}
    assert config.stages["prefill"].pool_names == ("p-fast", "p-bulk")
    cell = config.stages["prefill"].select({"isl": 100, "ttft_ms": 800})
    assert (cell.index, cell.row, cell.col, cell.pool) == ((0, 1), 0, 1, 1)
    decode = config.stages["decode"]
    assert decode.select({"context_length": 9000, "itl_ms": 5}).pool == 1
    assert decode.select({"context_length": 100, "itl_ms": 40}).pool == 0


def test_a_grid_of_three_axes_is_isl_then_ttft_then_itl() -> None:
    agg = parse_config(agg_file(), source="f").stages["agg"]
    mapping = agg_file()[AGG]["agg_pool_mapping"]
    for layer, isl in enumerate((0, 3000)):
        for row, ttft_ms in enumerate((0, 100, 250)):
            for col, itl_ms in enumerate((0, 30)):
                cell = agg.select({"isl": isl, "ttft_ms": ttft_ms, "itl_ms": itl_ms})
                assert (cell.index, cell.row, cell.col) == ((layer, row, col), row, col)
                assert cell.pool == mapping[layer][row][col]


def test_an_agg_grid_without_isl_has_two_axes() -> None:
    content = agg_file()
    for key in ("isl_min", "isl_max", "isl_resolution"):
        del content[AGG][key]
    content[AGG]["agg_pool_mapping"] = [[0, 1], [0, 1], [1, 2]]
    cell = parse_config(content, source="f").stages["agg"].select({"ttft_ms": 250, "itl_ms": 30})
    assert (cell.index, cell.pool) == ((2, 1), 2)


def test_the_mode_is_disagg_when_the_file_does_not_say() -> None:
    content = disagg_file()
    del content["mode"]
    assert parse_config(content, source="f").mode == "disagg"


def test_bounds_keep_their_type_so_that_large_ints_stay_exact() -> None:
    content = disagg_file()
    content[PREFILL] |= {"isl_min": 2**60, "isl_max": 2**60 + 4}
    axis = parse_config(content, source="f").stages["prefill"].axes[0]
    assert (axis.low, axis.step, axis.index(2**60 + 1), axis.index(2**60 + 2)) == (2**60, 2, 0, 1)


# --- spellings -------------------------------------------------------------------------------------


def test_long_and_short_names_of_the_pool_lists_mean_the_same() -> None:
    content = disagg_file()
    for stage in ("prefill", "decode"):
        content[f"{stage}_pool_dynamo_namespaces"] = content.pop(f"{stage}_pools")
    long = parse_config(content, source="f")
    assert long.stages == parse_config(disagg_file(), source="f").stages


def test_cfg_09_old_latency_keys_load_with_one_warning_each() -> None:
    content = disagg_file()
    strategy = content[PREFILL]
    strategy["ttft_min"] = strategy.pop("ttft_min_ms")
    strategy["ttft_max"] = strategy.pop("ttft_max_ms")
    config = parse_config(content, source="f")
    assert config.stages == parse_config(disagg_file(), source="f").stages
    assert config.warnings == (
        f"{PREFILL}.ttft_min: deprecated, write ttft_min_ms",
        f"{PREFILL}.ttft_max: deprecated, write ttft_max_ms",
    )


def test_cfg_09_the_new_key_wins_and_the_old_one_is_reported() -> None:
    content = disagg_file()
    content[PREFILL]["ttft_min"] = 1
    config = parse_config(content, source="f")
    assert config.stages["prefill"].axes[1].low == 100
    assert config.warnings == (f"{PREFILL}.ttft_min: ignored, ttft_min_ms is there too",)


def test_cfg_09_agg_has_old_keys_for_both_targets() -> None:
    content = agg_file()
    for key in ("ttft_min", "ttft_max", "itl_min", "itl_max"):
        content[AGG][key] = content[AGG].pop(f"{key}_ms")
    config = parse_config(content, source="f")
    assert [warning.split(":")[0] for warning in config.warnings] == [
        f"{AGG}.{key}" for key in ("ttft_min", "ttft_max", "itl_min", "itl_max")
    ]


def test_problems_name_keys_as_the_file_spells_them() -> None:
    content = disagg_file()
    content["prefill_pools"] = ["p-fast", ""]
    content[PREFILL]["ttft_max"] = "900"
    del content[PREFILL]["ttft_max_ms"]
    assert lines(content) == [
        'prefill_pools[1]: must not be empty (got "")',
        f'{PREFILL}.ttft_max: must be a finite number (got "900")',
    ]


@pytest.mark.parametrize(
    ("place", "key", "line"),
    [
        ((PREFILL,), "ttft_resoluton", 'unknown key, did you mean "ttft_resolution"? (got 4)'),
        ((), "ttft_resolution", f"unknown key at this level, it belongs in {PREFILL} (got 4)"),
        ((PREFILL,), "itl_min_ms", f"unknown key at this level, it belongs in {DECODE} (got 4)"),
        ((PREFILL,), "mode", "unknown key at this level, it belongs at the top level (got 4)"),
        ((), "workers", "unknown key at this level, it belongs in an entry of pools (got 4)"),
        (
            (),
            "target_pool",
            "unknown key at this level, it belongs in an entry of priority_overrides (got 4)",
        ),
        ((), "num_agg_pools", 'unknown key in mode "disagg", it belongs to mode "agg" (got 4)'),
        ((), "prefil_pools", 'unknown key, did you mean "prefill_pools"? (got 4)'),
        ((), "zzz", "unknown key (got 4)"),
        (("pools", "p-fast"), "worker", 'unknown key, did you mean "workers"? (got 4)'),
    ],
)
def test_cfg_10_an_unknown_key_is_refused_by_path_with_what_was_meant(
    place: tuple[str, ...], key: str, line: str
) -> None:
    content = disagg_file() | {"pools": {"p-fast": {}}}
    at = content
    for part in place:
        at = at[part]
    at[key] = 4
    assert lines(content) == [f"{'.'.join((*place, key))}: {line}"]


def test_cfg_10_a_key_of_an_override_rule_is_checked_too() -> None:
    content = disagg_file()
    rule = {"min_priority": 1, "max_priority": 2, "target_pool": 0, "max_prioritty": 3}
    content[PREFILL]["priority_overrides"] = [rule]
    assert lines(content) == [
        f"{PREFILL}.priority_overrides[0].max_prioritty: unknown key, did you mean"
        ' "max_priority"? (got 3)'
    ]


# --- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "$: is empty"),
        ("{", "$: is not JSON: "),
        ("null", "$: must be an object (got null)"),
        ("NaN", "$: must be an object (got NaN)"),
        ("[" * 200_000, "$: is not JSON: nested too deeply"),
        ("\ufeff{}", "$: is not JSON, as it has a byte order mark (save it as UTF-8 without one)"),
        ("\ud800", "$: cannot be read: "),
    ],
)
def test_text_that_is_not_a_json_object_is_a_config_error(
    tmp_path: Path, text: str, line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    (problem,) = caught.value.problems
    assert str(problem).startswith(line)
    assert caught.value.source == str(tmp_path / "fleet.json")


@pytest.mark.parametrize("name", ["absent.json", ".", "nul\0.json"])
def test_a_path_that_cannot_be_read_is_a_config_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"\$: cannot be read: "):
        load_config(tmp_path / name)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "9" * 5000])
def test_a_number_that_is_not_finite_is_reported_once_at_its_path(
    tmp_path: Path, number: str
) -> None:
    text = json.dumps(disagg_file()).replace('"isl_max": 8000', f'"isl_max": {number}')
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"{PREFILL}.isl_max: must be a finite number (got ")


@pytest.mark.parametrize("value", ["NaN", "null", '"x"', "[{}]", "1e400"])
def test_cfg_09_whatever_an_old_key_holds_beside_the_current_one_is_ignored(
    tmp_path: Path, value: str
) -> None:
    text = json.dumps(disagg_file()).replace('"isl_max"', f'"ttft_min": {value}, "isl_max"')
    config = load(tmp_path, text)
    assert config.warnings == (f"{PREFILL}.ttft_min: ignored, ttft_min_ms is there too",)
    assert parse_config(json.loads(config.text), source="f").warnings == ()


def test_of_a_key_given_twice_the_last_one_counts_with_a_warning(tmp_path: Path) -> None:
    text = json.dumps(disagg_file() | {"pools": {"p-fast": {}}})
    text = text.replace('"p-fast": {}', '"p-fast": {"tp": 9}, "p-fast": {"tp": 1, "tp": 2}')
    text = text.replace('"isl_max"', '"isl_max": NaN, "isl_max"')
    config = load(tmp_path, text)
    twice = "is given more than once, the last one counts"
    assert sorted(config.warnings) == [
        f"pools.p-fast.tp: {twice}",
        f"pools.p-fast: {twice}",
        f"{PREFILL}.isl_max: {twice}",
    ]
    assert config.pools["p-fast"].tp == 2
    assert config.stages["prefill"].axes[0].high == 8000


def test_a_file_loads_as_its_content_parses(tmp_path: Path) -> None:
    loaded = load(tmp_path, json.dumps(disagg_file()))
    assert loaded.stages == parse_config(disagg_file(), source="f").stages
    assert loaded.source == str(tmp_path / "fleet.json")
