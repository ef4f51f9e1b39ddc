"""The options of listeners and TLS: plaintext only when asked for, and what is said of misfits."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slagate.router.commands import cli
from support.gateway.certificates import Ca
from support.gateway.processes import LOOPBACK, fleet_config, serve_arguments, worker_arguments

EXIT_USAGE = 2


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, arguments)


NOTHING = f"{LOOPBACK}:9"
UNTOLD = [
    (["worker", "sim", "--role", "agg", "--listen", f"{LOOPBACK}:0"], "--tls-cert", "--insecure"),
    (["pools", "--target", NOTHING], "--tls-ca", "--insecure"),
    (["generate", "--target", NOTHING, "--isl", "3"], "--tls-ca", "--insecure"),
    (["explain", "--target", NOTHING, "--isl", "3"], "--tls-ca", "--insecure"),
    (["receipts", "--target", NOTHING], "--tls-ca", "--insecure"),
    (["reload", "--target", NOTHING], "--tls-ca", "--insecure"),
    (["grid", "show", "--target", NOTHING], "--tls-ca", "--insecure"),
    (["profile", "measure", "--target", NOTHING, "--out", "x"], "--tls-ca", "--insecure"),
]


@pytest.mark.parametrize(("arguments", "tls", "plaintext"), UNTOLD)
def test_a_command_that_is_not_told_how_says_both_ways(
    arguments: list[str], tls: str, plaintext: str
) -> None:
    ended = run(*arguments)
    assert ended.exit_code == EXIT_USAGE
    assert f"give {tls} (" in ended.stderr or f"give {tls} and" in ended.stderr
    assert f"or {plaintext} for plaintext" in ended.stderr


def test_a_gateway_is_told_for_both_of_its_sides(tmp_path: Path) -> None:
    config = tmp_path / "fleet.json"
    config.write_text(json.dumps(fleet_config({"a": ("agg", [NOTHING])})))
    for given, missing in (("--insecure", "--worker-"), ("--worker-insecure", "--")):
        ended = run(*serve_arguments(config, tls=(given,)))
        assert ended.exit_code == EXIT_USAGE
        assert f"or {missing}insecure for plaintext" in ended.stderr
        assert f"give {missing}tls-c" in ended.stderr


@pytest.mark.parametrize(
    ("one", "other"), [("listen", "admin"), ("listen", "http"), ("admin", "http")]
)
def test_two_listeners_of_a_gateway_have_no_address_in_common(
    tmp_path: Path, one: str, other: str
) -> None:
    config = tmp_path / "fleet.json"
    config.write_text(json.dumps(fleet_config({"a": ("agg", [NOTHING])})))
    # Of an option given twice the last one counts.
    for more in ((), ("--processes", "2")):
        same = (f"--{one}", NOTHING, f"--{other}", NOTHING)
        ended = run(*serve_arguments(config, *same, *more))
        told = f"slagate: --{one} and --{other} are both {NOTHING}\n"
        assert (ended.exit_code, ended.stderr) == (EXIT_USAGE, told)


def test_options_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    pair = Ca(tmp_path).issue("own")
    cert, key = ("--tls-cert", str(pair.cert)), ("--tls-key", str(pair.key))
    for options, told in (
        (cert, "--tls-cert needs --tls-key"),
        (key, "--tls-key needs --tls-cert"),
        ((*cert, *key, "--insecure"), "--insecure is plaintext: give no --tls-cert with it"),
        (
            ("--tls-cert", str(tmp_path / "none"), *key),
            f"--tls-cert {tmp_path}/none: No such file or directory",
        ),
    ):
        ended = run(*worker_arguments("agg", tls=options))
        assert (ended.exit_code, told in ended.stderr) == (EXIT_USAGE, True), ended.stderr
