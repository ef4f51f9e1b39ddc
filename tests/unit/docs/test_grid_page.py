"""docs/grid.md: its files load, and its commands print what it says they print."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slagate.pools.fleet.config_diff import changes
from slagate.pools.fleet.fleet import prepare
from slagate.pools.fleet_file.load import load_config, parse_config
from slagate.router.cli.grid.commands import select_lines
from slagate.router.commands import cli
from slagate.router.receipts.config import config_message
from slagate.router.request.settings import Settings

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "grid.md").read_text()
BLOCKS = [b for b in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL) if b.startswith("{")]
FILES = [json.loads(block) for block in BLOCKS]
CONSOLE = "\n".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL))
PRINTED = r"\n((?:(?!\$ ).+\n)+)"
SELECT = r"\$ echo '(.*)' \| slagate grid select (\S+) --stage (\w+)" + PRINTED


def test_the_files_of_the_page_load_without_warnings_and_the_first_one_can_serve() -> None:
    configs = [parse_config(content, source="page") for content in FILES]
    assert [config.mode for config in configs] == ["disagg", "prefill"]
    assert [config.warnings for config in configs] == [(), ()]
    parse_config(FILES[0], source="page", serving=True)


def test_cfg_01_the_commands_of_the_page_print_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    block = BLOCKS[0]
    Path("fleet.json").write_text(block)
    (edits,) = re.findall(r"\$ sed '(.*)' fleet.json > broken.json", CONSOLE)
    for edit in edits.split("; "):
        _, old, new, _ = edit.split("/")
        old = old.replace("\\", "")
        assert old in block
        block = block.replace(old, new, 1)
    Path("broken.json").write_text(block)
    shown = re.findall(SELECT, CONSOLE)
    assert [file for _, file, _, _ in shown] == ["fleet.json", "fleet.json", "broken.json"]
    for line, file, stage, printed in shown:
        ended = CliRunner().invoke(cli, ["grid", "select", file, "--stage", stage], input=line)
        assert ended.exit_code == (2 if file == "broken.json" else 0)
        assert ended.output == printed


def test_the_first_file_of_the_page_lints_clean_and_is_shown_as_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fleet.json").write_text(BLOCKS[0])
    (lint,) = re.findall(r"\$ slagate (grid lint fleet.json)" + PRINTED, CONSOLE)
    (show,) = re.findall(r"\$ slagate (grid show fleet.json --stage prefill)" + PRINTED, CONSOLE)
    for command, printed in (lint, show):
        ended = CliRunner().invoke(cli, command.split())
        assert ended.exit_code == 0
        assert ended.output.startswith(printed.removesuffix("...\n"))


def test_the_reload_of_the_page_is_what_its_edit_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ((old, new),) = re.findall(r"\$ sed -i 's/(.*)/(.*)/' fleet.json", CONSOLE)
    found = []
    for content in (BLOCKS[0], BLOCKS[0].replace(old, new, 1)):
        Path("fleet.json").write_text(content)
        found.append(prepare(load_config("fleet.json", serving=True)))
    versions = [config_message(each, policy=Settings().policy).version for each in found]
    lines = "".join(f"  {line}\n" for line in changes(*found))
    for verb in ("would go", "went"):
        assert f"{verb} from {versions[0]} to {versions[1]}\n{lines}$ " in CONSOLE
    assert CliRunner().invoke(cli, ["grid", "lint", "fleet.json"]).exit_code == 0


def test_the_worked_example_has_the_rows_of_the_shipped_file() -> None:
    config = load_config(REPOSITORY / "configs" / "grids" / "example-disagg.json")
    row = r"^\| ISL (\d+), (.+?) \| (\d).*? \| (\d).*? \| (\d) \| `(\S+)`"
    table = re.findall(row, PAGE, re.MULTILINE)
    assert len(table) == 5
    for isl, rest, *numbers, name in table:
        asked = {"isl": int(isl)}
        for field, said in (("ttft_ms", r"target (\d+) ms"), ("priority", r"priority (\d+)")):
            if value := re.search(said, rest):
                asked[field] = int(value[1])
        (line,) = select_lines(
            config.stages["prefill"], [json.dumps(asked)], objectives=config.objectives
        )
        found = json.loads(line)
        assert [found[key] for key in ("row", "col", "base_pool")] == [int(n) for n in numbers]
        assert found["pool_name"] == name
