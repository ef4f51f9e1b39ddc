"""docs/grid.md: its files load, and its commands print what it says they print."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slagate.pools.grid_config import parse_config, require_workers
from slagate.router.__main__ import cli

PAGE = (Path(__file__).parents[2] / "docs" / "grid.md").read_text()
FILES = [
    json.loads(block)
    for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    if block.startswith("{")
]
CONSOLE = "\n".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL))
SELECT = r"\$ echo '(.*)' \| slagate grid select (\S+) --stage (\w+)\n((?:(?!\$ ).+\n)+)"


def test_the_files_of_the_page_load_without_warnings_and_the_first_one_can_serve() -> None:
    configs = [parse_config(content, source="page") for content in FILES]
    assert [config.mode for config in configs] == ["disagg", "prefill"]
    assert [config.warnings for config in configs] == [(), ()]
    require_workers(configs[0])


def test_cfg_01_the_commands_of_the_page_print_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    block = next(b for b in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL) if b[0] == "{")
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
