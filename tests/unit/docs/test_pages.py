"""README and docs: every command on these pages is one there is, with options that there are."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.main import get_command

from slagate.router.commands import cli

SLAGATE = get_command(cli)
SERVED = re.compile(r"--(target|admin|listen|decode) [\w.]*\d")
"""What listens or dials for real."""


class Command(NamedTuple):
    """A command, and the words behind its name."""

    command: Any
    words: Sequence[str]


@pytest.fixture(scope="module")
def pages(pytestconfig: pytest.Config) -> dict[str, str]:
    root: Path = pytestconfig.rootpath
    found = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return {page.name: page.read_text(encoding="utf-8") for page in found}


def named(words: Sequence[str]) -> Command:
    """What the words behind `slagate` name. Raises `KeyError` where there is no such command."""
    command: Any = SLAGATE
    for at, word in enumerate(words):
        if not hasattr(command, "get_command") or not re.fullmatch("[a-z]+", word):
            return Command(command, words[at:])
        below = command.get_command(None, word)
        if below is None:
            raise KeyError(word)
        command = below
    return Command(command, ())


def typed(page: str) -> Iterator[str]:
    """Commands to be typed: lines of blocks that are for a shell, whole."""
    for kind, block in re.findall(r"```(console|bash)\n(.*?)```", page, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if kind == "bash" or line.startswith("$ "):
                yield from (
                    part.strip()
                    for part in re.split(
                        r"[|;]|&&|(?<![\w'])[<>](?![\w'])", line.removeprefix("$ ")
                    )
                    if part.strip().startswith("slagate ")
                )


def mentioned(page: str) -> Iterator[str]:
    """Commands between backticks, and in blocks that show how they are put together."""
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    yield from re.findall(r"`(slagate [^`]+)`", text)
    blocks = re.findall(r"^    slagate .*\n(?:^     +[\[-].*\n)*", text, re.MULTILINE)
    yield from (block.partition("#")[0].partition(" | ")[0] for block in blocks)


def test_what_is_to_be_typed_is_taken_by_the_command_line(pages: dict[str, str]) -> None:
    n_typed = 0
    for name, page in pages.items():
        for line in typed(page):
            words = shlex.split(line, comments=True)[1:]
            words = [re.sub("^[A-Z]+(:(PORT|[0-9]+))$", "localhost:7000", word) for word in words]
            command, rest = named(words)
            try:
                command.make_context("slagate", list(rest))
            except Exception as error:
                raise AssertionError(f"{name}: {line}: {error}") from error
            n_typed += 1
    assert n_typed > 40


def test_no_option_is_mentioned_that_is_not_there(pages: dict[str, str]) -> None:
    n_options = 0
    for name, page in pages.items():
        for text in (*typed(page), *mentioned(page)):
            command, rest = named(text.split()[1:])
            known = {each for one in command.params for each in (*one.opts, *one.secondary_opts)}
            said = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", " ".join(rest)))
            assert said <= known | {"--help"}, f"{name}: {text}"
            n_options += len(said)
    assert n_options > 150


def test_whoever_listens_or_dials_says_how(pages: dict[str, str]) -> None:
    """Without one of these the command ends with a wrong use."""
    for name, page in pages.items():
        for text in (*typed(page), *mentioned(page)):
            if SERVED.search(text) and "..." not in text:
                assert re.search("--insecure|--tls-ca|--tls-cert", text), f"{name}: {text}"
