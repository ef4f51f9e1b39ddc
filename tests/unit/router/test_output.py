"""stdout that takes no more, or not every character: a sentence and a status, never a traceback."""

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from support.limits import HANG_S

EXAMPLE = str(files("slagate.configs") / "grids" / "example-disagg.json")


def slagate(
    *arguments: str, stdout: int, environ: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-m", "slagate.router", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=os.environ | (environ or {}),
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("grid", "schema"),
        ("grid", "show", EXAMPLE),
        ("grid", "lint", EXAMPLE),
        ("--help",),
        (
            "worker",
            "sim",
            "--role",
            "agg",
            "--listen",
            "127.0.0.1:0",
            "--insecure",
            "--transport",
            "shm",
        ),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_full_disk_is_told_and_is_a_failure(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = slagate(*arguments, stdout=full.fileno())
    told = b"slagate: cannot write to stdout: No space left on device\n"
    assert done.returncode == 1
    assert done.stderr.endswith(told)
    assert b"Traceback" not in done.stderr


def test_a_reader_that_left_is_no_failure_of_a_command_that_only_prints() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = slagate("grid", "schema", stdout=closed.fileno())
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "environ",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=lambda environ: next(iter(environ)),
)
def test_what_an_encoding_lacks_is_written_as_in_json(
    environ: dict[str, str], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    golden = pytestconfig.rootpath / "tests" / "golden" / "lint" / "G103.json"
    text = golden.read_text(encoding="utf-8")
    fleet = tmp_path / "fleet.json"
    fleet.write_text(text.replace("p-tp1", "数😀é"), encoding="utf-8")
    shown = slagate("grid", "show", str(fleet), stdout=subprocess.PIPE, environ=environ)
    assert shown.returncode == 0
    assert rb"\u6570\ud83d\ude00\u00e9" in shown.stdout
    lint = slagate("grid", "lint", "--json", str(fleet), stdout=subprocess.PIPE, environ=environ)
    assert lint.stdout.isascii()
    assert any("数😀é" in json.loads(line)["message"] for line in lint.stdout.splitlines())
