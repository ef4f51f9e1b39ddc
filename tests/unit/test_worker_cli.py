"""`slagate worker`: a bare call runs a worker; the group has room for commands about one."""

import pytest
from typer.testing import CliRunner

from slagate.router.__main__ import cli


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "127.0.0.1:0", "--insecure"], "--role is missing"),
        (["--role", "agg", "--insecure"], "--listen is missing"),
        (["--role", "agg", "--listen", "127.0.0.1:0"], "--tls-cert"),
        (["--role", "agg", "--listen", "127.0.0.1:0", "--engine", "x"], "--engine must be"),
        (["--role", "agg", "--listen", "nowhere"], "--listen"),
        (["chek"], "chek"),
    ],
)
def test_a_wrong_call_of_the_group_is_a_usage_error(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["worker", *arguments])
    assert result.exit_code == 2
    assert said in result.output
