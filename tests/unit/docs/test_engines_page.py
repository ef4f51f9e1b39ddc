"""docs/engines.md: its commands print what it says, and its tables are complete."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slagate.router.commands import cli
from slagate.workers.engine_args.check import check_values
from slagate.workers.engine_args.rules.table import CODES
from slagate.workers.engine_args.yaml_text import engine_configs

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "engines.md").read_text()
CONSOLES = re.findall(r"```console\n\$ slagate (.*)\n([^`]*)```", PAGE)


@pytest.mark.parametrize(("command", "printed"), CONSOLES, ids=["print", "check"])
def test_a_command_of_the_page_prints_what_it_says(command: str, printed: str) -> None:
    # NIXL sets it for all of a process that has used it.
    ended = CliRunner().invoke(cli, shlex.split(command), env={"UCX_TLS": None})
    assert ended.stdout == printed


def test_every_code_is_on_the_page_with_the_severities_it_has() -> None:
    rows = re.findall(r"^\| (E\d+) \| ([a-z ]+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert {code: title for code, _, title in rows} == CODES
    said = (REPOSITORY / "tests" / "golden" / "engine-args.txt").read_text()
    severities: dict[str, set[str]] = {}
    for severity, code in re.findall(r"^(error|warning|note) (E\d+) ", said, re.MULTILINE):
        severities.setdefault(code, set()).add(severity)
    assert {code: set(listed.split(" or ")) for code, listed, _ in rows} == severities


def test_every_packaged_configuration_is_on_the_page() -> None:
    (section,) = re.findall(r"## Packaged configurations\n(.*?)\n## ", PAGE, re.DOTALL)
    assert sorted(re.findall(r"`([\w.-]+/[\w-]+)`", section)) == engine_configs()


def test_the_arguments_that_the_page_names_are_there() -> None:
    (section,) = re.findall(r"## Knobs\n(.*?)\n## ", PAGE, re.DOTALL)
    for section_name, key in re.findall(r"`(\w+_config)\.(\w+)", section):
        findings = check_values({section_name: {key: object()}}, allow_unknown=False)
        assert "E101" not in [finding.code for finding in findings], f"{section_name}.{key}"
