"""What a user did wrong ends a command with one line; what we did wrong keeps its traceback."""

import io
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
import typer
from rich.console import Console

from slagate.pools.grid.errors import ConfigError
from slagate.router.cli.command import EXIT_USAGE, run_to_exit
from slagate.router.demo.demo import run_demo
from slagate.router.loadgen.trace import TraceError, load_trace
from slagate.workers.runtime.usage import ProfileError, UsageError
from slagate.workers.runtime.virtual_loop import run
from slagate.workers.serving.sim import SimOptions, sim_worker
from support.engine.workers import PROFILE


def failing(error: Exception, *, in_group: bool) -> Coroutine[Any, Any, int]:
    async def fail() -> None:
        raise error

    async def main() -> int:
        if not in_group:
            await fail()
        async with anyio.create_task_group() as outer, anyio.create_task_group() as inner:
            outer.start_soon(anyio.sleep_forever)
            inner.start_soon(fail)
        return 0

    return main()


@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize(
    "error",
    [UsageError("--isl: no"), TraceError("line 3: no"), ProfileError("tp: no"), OSError("in use")],
    ids=lambda error: type(error).__name__,
)
def test_what_the_user_did_is_one_line_and_exit_status_2(
    error: Exception, capsys: pytest.CaptureFixture[str], *, in_group: bool
) -> None:
    with pytest.raises(typer.Exit) as caught:
        run_to_exit(lambda: failing(error, in_group=in_group))
    assert caught.value.exit_code == EXIT_USAGE
    assert capsys.readouterr().err == f"slagate: {error}\n"


def test_a_bug_is_not_taken_for_a_wrong_option() -> None:
    for error in (ValueError("a bug"), KeyError("a bug"), RuntimeError("a bug")):
        with pytest.raises(type(error), match="a bug"):
            run_to_exit(lambda error=error: failing(error, in_group=False))
        with pytest.raises(Exception, match="unhandled errors") as caught:
            run_to_exit(lambda error=error: failing(error, in_group=True))
        assert not isinstance(caught.value, typer.Exit)


def test_every_error_of_a_user_has_its_own_class() -> None:
    assert issubclass(TraceError, UsageError)
    for kind in (UsageError, ConfigError, ProfileError):
        assert kind is not ValueError


def test_a_demo_of_more_requests_than_there_are_is_a_wrong_option(tmp_path: Path) -> None:
    for n_requests in (0, len(load_trace()) + 1):
        with pytest.raises(UsageError, match="requests: the sample has"):
            run(run_demo, n_requests, tmp_path / "demo.json", Console(file=io.StringIO()))


def test_an_option_that_the_simulated_engine_refuses_is_a_wrong_option() -> None:
    async def main() -> None:
        options = SimOptions("agg", PROFILE, 1, kv_block_bytes=17)
        with pytest.raises(UsageError, match="kv_block_bytes"):
            async with sim_worker(options, instance_id="i", transport=None):
                raise AssertionError("it was served")

    run(main)
