"""The entry point of the command: what has to be so before gRPC is imported, and what is not imported."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from slagate.router.commands import COMMANDS, cli

ENTRY = "slagate.router.__main__"


@pytest.mark.parametrize("given", [None, "INFO"])
def test_grpc_is_quiet_from_its_import_on_unless_the_user_wants_otherwise(
    given: str | None,
) -> None:
    script = (
        "import os, sys\n"
        f"from {ENTRY} import main\n"
        "assert 'grpc' not in sys.modules\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    print(os.environ['GRPC_VERBOSITY'], 'grpc' in sys.modules)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    if given is not None:
        environment["GRPC_VERBOSITY"] = given
    ended = subprocess.run(
        [sys.executable, "-c", script, "grid", "schema"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.splitlines()[-1] == f"{given or 'NONE'} True"


@pytest.mark.parametrize(
    ("command", "own", "of_others"),
    [
        (["worker", "sim", "--role", "agg"], "worker.run", {"slagate.pools.fleet_file.load"}),
        (["reload"], "client", {"numpy", "slagate.workers.profiles.profile"}),
    ],
)
def test_a_command_imports_none_of_what_only_others_need(
    command: list[str], own: str, of_others: set[str]
) -> None:
    script = (
        "import sys\n"
        f"from {ENTRY} import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    print(*sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *command], capture_output=True, text=True, check=True
    )
    modules = set(ended.stdout.split())
    assert f"slagate.router.cli.{own}" in modules
    assert not modules & {"slagate.router.cli.serve", "cryptography", *of_others}


def test_a_mistyped_command_is_answered_with_what_it_is_like() -> None:
    ended = CliRunner().invoke(cli, ["expain"])
    assert ended.exit_code == 2
    assert "Did you mean 'explain'?" in " ".join(ended.output.split())


def test_the_help_lists_every_command() -> None:
    words = CliRunner().invoke(cli, ["--help"]).output.split()
    assert COMMANDS.keys() <= set(words)
