"""Every broken file of tests/golden/broken-grids ends the command with status 2 and all that is wrong.

The messages are in tests/golden/broken-grids.txt; `pytest --rewrite-golden` writes them anew. A file whose
name starts with `serve-` can be looked at and not served.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slagate.router.commands import cli

FILES = sorted(Path(__file__).parents[3].joinpath("golden", "broken-grids").glob("*.json"))
NOWHERE = [
    *(f"--{listener}=127.0.0.1:0" for listener in ("listen", "admin", "http")),
    *("--insecure", "--worker-insecure"),
]


def outcome(path: Path) -> str:
    """Status and messages of the command for a file."""
    command = ["grid", "select", str(path), "--stage", "prefill"]
    if path.name.startswith("serve-"):
        command = ["serve", "--config", str(path), *NOWHERE]
    ended = CliRunner().invoke(cli, command)
    assert isinstance(ended.exception, SystemExit), f"{path.name}: {ended.exception!r}"
    assert ended.stdout == ""
    return f"exit {ended.exit_code}\n{ended.stderr.replace(str(path), path.name)}"


def test_all_problems_of_every_broken_file_are_listed(golden: Callable[[str, str], None]) -> None:
    assert len(FILES) >= 40
    golden("broken-grids.txt", "\n".join(f"--- {path.name}\n{outcome(path)}" for path in FILES))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_broken_file_ends_the_command_with_status_2_and_paths(path: Path) -> None:
    status, source, *problems = outcome(path).splitlines()
    assert (status, source.split(":")[:2]) == ("exit 2", ["slagate", f" {path.name}"])
    assert problems
    for problem in problems:
        assert problem.startswith("  ")
        assert any(words in problem for words in ("(got ", "is not JSON", "is empty"))


def test_the_files_that_cannot_be_served_can_be_looked_at() -> None:
    for path in FILES:
        if path.name.startswith("serve-") and "other" not in path.name:
            looked = ["grid", "select", str(path), "--stage", "prefill"]
            assert CliRunner().invoke(cli, looked, input="").exit_code == 0
