"""The entry point of the command: what has to be so before gRPC is imported."""

import os
import subprocess
import sys

import pytest

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
