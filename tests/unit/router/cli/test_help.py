"""What `--help` says: every command and option, whole, however narrow the terminal is."""

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import metadata
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from slagate.router.commands import cli


def commands(path: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command there is, and each group of them, by the words that it is called with."""
    yield path, command
    if hasattr(command, "list_commands"):
        for name in command.list_commands(None):
            yield from commands((*path, name), command.get_command(None, name))


ALL = dict(commands((), get_command(cli)))


def shown(path: tuple[str, ...]) -> str:
    """As in a terminal: typer's runner has a width of its own."""
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as ended:
        cli([*path, "--help"], prog_name="slagate")
    assert ended.value.code == 0
    return out.getvalue()


def described(path: tuple[str, ...]) -> dict[str, str]:
    """The text of each option, by its name."""
    text = shown(path).partition("Options:\n")[2].partition("Commands:\n")[0]
    entries = re.split(r"\n  (?=-)", f"\n{text.rstrip()}")[1:]
    return {
        name: re.sub(r"\s+", " ", entry)
        for entry in entries
        for name in re.findall(r"--[a-z-]+", entry)[:1]
    }


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_option_is_shown_whole(
    path: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = shown(path)
    names = {name for each in ALL[path].params for name in (*each.opts, *each.secondary_opts)}
    words = set(re.split(r"[\s,/]+", text))
    assert {name for name in names if name.startswith("-")} <= words
    assert "…" not in text
    assert "..." not in text.replace("ARGS]...", "").replace(",...", "").replace("{...}", "")
    assert max(map(len, text.splitlines())) <= columns


def test_the_listeners_of_a_gateway_have_a_text_each() -> None:
    texts = [described(("serve",))[name] for name in ("--listen", "--admin", "--http")]
    for text, word in zip(texts, ("clients", "operators", "/healthz"), strict=True):
        assert word in text
        assert "Port 0: the kernel chooses." in text


@pytest.mark.parametrize("path", [(), ("grid",), ("profile",), ("worker",)], ids=" ".join)
def test_a_group_lists_its_commands_with_their_whole_sentence(path: tuple[str, ...]) -> None:
    text = " ".join(shown(path).partition("Commands:\n")[2].split())
    for below, command in ALL.items():
        if below[:-1] == path and below:
            assert f"{below[-1]} {' '.join(command.help.split())[:200]}".split(". ")[0] in text


def test_the_version_is_that_of_the_package() -> None:
    done = CliRunner().invoke(cli, ["--version"])
    assert done.exit_code == 0
    assert done.stdout.startswith(f"slagate {metadata.version('slagate')} (Python 3.")
