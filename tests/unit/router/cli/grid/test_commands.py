"""The options that every command with a fleet file takes, and what it says on stderr."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

from slagate.router.cli.fleet_options import pool_workers
from slagate.router.commands import cli
from support.fleet.files import disagg_file
from support.fleet.problems import PREFILL


def write(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def select(fleet: str, *options: str, stdin: str = '{"isl": 1}') -> Result:
    return CliRunner().invoke(
        cli, ["grid", "select", fleet, "--stage", "prefill", *options], input=stdin
    )


def old_keys() -> dict[str, Any]:
    content = disagg_file()
    content[PREFILL] |= {"ttft_min": content[PREFILL].pop("ttft_min_ms"), "ttft_max": 1}
    return content


def test_cfg_09_each_old_key_is_warned_of_once_and_stdout_has_answers_only(tmp_path: Path) -> None:
    fleet = write(tmp_path / "fleet.json", old_keys())
    ended = select(fleet, stdin='{"isl": 1}\n{"isl": 2}\n')
    assert ended.exit_code == 0
    assert ended.stderr.splitlines() == [
        f"slagate: warning: {PREFILL}.ttft_max: ignored, ttft_max_ms is there too",
        f"slagate: warning: {PREFILL}.ttft_min: deprecated, write ttft_min_ms",
    ]
    assert [json.loads(line)["row"] for line in ended.stdout.splitlines()] == [0, 0]


def test_cfg_10_an_unknown_key_ends_the_command_and_is_listed_with_lenient(tmp_path: Path) -> None:
    fleet = write(tmp_path / "fleet.json", disagg_file() | {"ttft_resoluton": 4})
    ended = select(fleet)
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert "  ttft_resoluton: unknown key" in ended.stderr
    ended = select(fleet, "--lenient")
    assert ended.exit_code == 0
    assert ended.stderr == "slagate: warning: ttft_resoluton: unknown key, ignored\n"


def test_pools_and_pool_are_checked_with_the_file(tmp_path: Path) -> None:
    fleet = write(tmp_path / "fleet.json", disagg_file())
    pools = write(tmp_path / "pools.json", {"pools": {"p-fast": {"workers": ["h:1"], "tp": 0}}})
    ended = select(fleet, "--pools", pools, "--pool", "p-bulk=h:2,h", "--pool", "p-bulk=h:0")
    assert ended.exit_code == 2
    assert ended.stderr.splitlines()[1:] == [
        f"  {pools}: pools.p-fast.tp: must be at least 1 (got 0)",
        '  --pool p-bulk[1]: must be host:port with a port from 1 to 65535 (got "h")',
        '  --pool p-bulk[2]: must be host:port with a port from 1 to 65535 (got "h:0")',
    ]


def test_a_pool_option_is_a_name_and_addresses() -> None:
    assert pool_workers(["a=h:1,h:2", "b=h:3", "a=h:4", "c=d=h:5"]) == {
        "a": ["h:1", "h:2", "h:4"],
        "b": ["h:3"],
        "c=d": ["h:5"],
    }


@pytest.mark.parametrize("option", ["a", "", "=h:1", "h:1"])
def test_a_pool_option_without_a_name_ends_the_command(tmp_path: Path, option: str) -> None:
    ended = select(write(tmp_path / "fleet.json", disagg_file()), "--pool", option)
    assert ended.exit_code == 2
    assert ended.stderr == f"slagate: --pool must be NAME=HOST:PORT,... (got {option!r})\n"


def test_select_notes_a_class_that_is_not_listed_once(tmp_path: Path) -> None:
    fleet = write(tmp_path / "fleet.json", disagg_file() | {"objectives": {"*": {"ttft_ms": 100}}})
    ended = select(fleet, stdin='{"isl": 1, "objective": "bach"}\n' * 2)
    assert len(ended.stdout.splitlines()) == 2
    note = 'slagate: note: class "bach" is not in objectives, it counts as "*"\n'
    assert (ended.exit_code, ended.stderr) == (0, note)


def test_schema_prints_the_schema() -> None:
    ended = CliRunner().invoke(cli, ["grid", "schema"])
    assert (ended.exit_code, ended.stderr) == (0, "")
    schema = json.loads(ended.stdout)
    Draft202012Validator(schema).validate(disagg_file())


def test_an_epp_file_has_the_prefill_stage_and_no_other(tmp_path: Path) -> None:
    content = {
        "poolLabels": ["tp1", "tp2"],
        "sizeMax": 8000,
        "sizeResolution": 1,
        "latencyMaxMs": 1000,
        "latencyResolution": 2,
        "mapping": [[0, 1]],
    }
    fleet = write(tmp_path / "epp.json", content)
    ended = select(fleet, stdin='{"isl": 1, "ttft_ms": 500}')
    assert json.loads(ended.stdout)["pool_name"] == "tp2"
    ended = CliRunner().invoke(cli, ["grid", "select", fleet, "--stage", "decode"], input="")
    assert ended.exit_code == 2
    assert "--stage must be one of prefill in this file (got 'decode')" in ended.stderr
