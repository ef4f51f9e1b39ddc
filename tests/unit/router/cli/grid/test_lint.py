import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from slagate.router.cli.command import COLUMNS
from slagate.router.cli.grid.lint import lint
from slagate.router.commands import cli as slagate

REPOSITORY = Path(__file__).parents[5]
FIXTURES = REPOSITORY / "tests" / "golden" / "lint"

cli = typer.Typer()
cli.command()(lint)


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def test_no_findings_is_status_0() -> None:
    result = run(FIXTURES / "clean.json", "--trace", FIXTURES / "trace.jsonl")
    assert (result.exit_code, result.stdout) == (0, "no findings\n")


def test_findings_are_status_1_and_readable_in_100_columns() -> None:
    result = run(FIXTURES / "G303.json")
    assert result.exit_code == 1
    assert max(map(len, result.stdout.splitlines())) <= COLUMNS
    assert result.stdout.splitlines() == [
        "G303  prefill_pool_selection_strategy.prefill_pool_mapping[0][0]",
        "      Cell [0][0] (ISL 0 to 4,096, TTFT 60 to 160 ms) goes to p-tp1, whose idle workers take"
        " 97.4 ms",
        "      TTFT for 4,095 tokens; p-tp2 meets targets from 60.4 ms.",
        "      Fix: Give the cell the faster pool, or begin its band at what its own pool can do.",
        "",
        "1 finding: G303",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80])
def test_findings_are_readable_in_a_narrow_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = run(FIXTURES / "G303.json").stdout
    monkeypatch.setenv("COLUMNS", str(columns))
    with redirect_stdout(Terminal()) as narrow, pytest.raises(SystemExit):
        cli([str(FIXTURES / "G303.json")])
    assert narrow.getvalue().split() == wide.split()
    lines = narrow.getvalue().splitlines()
    assert max(len(line) for line in lines if line.startswith(" ")) <= columns


def test_a_finding_about_a_pool_has_its_name_as_it_is() -> None:
    result = run(FIXTURES / "G605.json")
    assert "\n      Pool p-tp1 has no profile" in result.stdout


def test_a_pool_that_nothing_reaches_is_told_once() -> None:
    result = run(FIXTURES / "G103.json")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "G103 " in result.stdout
    looked = CliRunner().invoke(slagate, ["grid", "show", str(FIXTURES / "G103.json")])
    assert "no cell, override or retry leads to this pool" in looked.stderr


def test_the_other_warnings_of_a_file_are_told(tmp_path: Path) -> None:
    content = json.loads((FIXTURES / "G103.json").read_text())
    strategy = content["prefill_pool_selection_strategy"]
    strategy["ttft_min"] = strategy.pop("ttft_min_ms")
    (tmp_path / "f.json").write_text(json.dumps(content))
    result = run(tmp_path / "f.json")
    assert result.stderr.count("warning: ") == 1
    assert "ttft_min: deprecated, write ttft_min_ms" in result.stderr


def test_json_is_an_object_a_line() -> None:
    result = run(FIXTURES / "G204.json", "--json")
    (line,) = result.stdout.splitlines()
    assert result.exit_code == 1
    assert list(json.loads(line)) == ["code", "path", "message", "advice"]
    assert run(FIXTURES / "clean.json", "--json").stdout == ""


def test_an_ignored_code_is_left_out_and_counted() -> None:
    result = run(FIXTURES / "G204.json", "--ignore", "g204", "--ignore", "G101")
    assert (result.exit_code, result.stdout) == (0, "no findings (1 ignored)\n")


def test_a_trace_adds_the_findings_about_traffic() -> None:
    assert run(FIXTURES / "G403.json").exit_code == 0
    result = run(FIXTURES / "G403.json", "--trace", FIXTURES / "trace.jsonl")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (1, "1 finding: G403")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["{tmp}/missing.json"], "$: cannot be read"),
        (["{tmp}/broken.json"], "num_prefill_pools: is required"),
        (["{tmp}/profile.json"], "pools.p-tp2.profile: profile 'nowhere' is not packaged"),
        (["{tmp}/tp.json"], "pools.p-tp2.tp: profile llama-3.1-8b-h100: no tensor-parallel size 3"),
        (["{clean}", "--trace", "{tmp}/missing.jsonl"], "missing.jsonl: No such file"),
        (["{clean}", "--ignore", "G999"], "--ignore must be a code of docs/lint.md"),
    ],
)
def test_what_cannot_be_read_is_status_2_and_says_why(
    args: list[str], message: str, tmp_path: Path
) -> None:
    clean = (FIXTURES / "clean.json").read_text()
    (tmp_path / "broken.json").write_text("{}")
    name = '"llama-3.1-8b-h100", "tp": 2'
    (tmp_path / "profile.json").write_text(clean.replace(name, '"nowhere", "tp": 2'))
    (tmp_path / "tp.json").write_text(clean.replace(name, '"llama-3.1-8b-h100", "tp": 3'))
    result = run(*(arg.format(tmp=tmp_path, clean=FIXTURES / "clean.json") for arg in args))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
