"""Mistakes of a newcomer that need a fleet or a process; all others: unit/router/cli/test_newcomer.py."""

import signal
import subprocess
from pathlib import Path

import pytest

from support.gateway.processes import (
    LOOPBACK,
    MODEL,
    SLAGATE,
    Cluster,
    eventually,
    fleet_config,
    gateway,
    run_here,
    starting,
)
from support.limits import HANG_S

PLAIN = "--insecure --target"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (f"pools {PLAIN} {{listen}}", "Is {listen} the gateway's admin listener"),
        (f"receipts {PLAIN} {{listen}}", "Is {listen} the gateway's admin listener"),
        (f"pools {PLAIN} {{http}}", "{http} does not speak gRPC; it should be the gateway's admin"),
        (f"generate {PLAIN} {{admin}} --isl 5", "Is {admin} a gateway's or a worker's listener"),
        (f"bench {PLAIN} {{admin}}", "--target is the gateway's --listen, --admin its --admin"),
        (f"bench {PLAIN} {{listen}} --admin {{listen}}", "--admin its --admin"),
        (f"generate {PLAIN} {{listen}} --isl 5 --model llama", f"is not served here, but {MODEL}"),
        (f"explain {PLAIN} {{admin}} --isl 5 --model llama", f"is not served here, but {MODEL}"),
        (f"generate {PLAIN} {{listen}} --isl 200000", "do not fit the context window of 131072"),
        (f"reload {PLAIN} {{admin}} --rollback", "there is no configuration before this one"),
    ],
)
def test_what_a_gateway_is_asked_wrongly(agg: Cluster, typed: str, told: str) -> None:
    ready = agg.gateway.process.ready
    done = run_here(*typed.format(**ready).split())
    assert done.returncode == 1
    assert told.format(**ready) in done.stderr
    assert "Traceback" not in done.stderr


def test_figures_that_cannot_be_written_are_a_failure(agg: Cluster) -> None:
    typed = f"bench {PLAIN} {agg.gateway.address} --concurrency 1 --requests 1 --isl 5 --osl 2"
    done = run_here(*typed.split(), "--csv", "/dev/full")
    assert done.returncode == 1
    assert "--csv /dev/full: cannot be written: No space left on device" in done.stderr


def test_workers_that_were_not_started_are_what_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # the reason is on one line
    with gateway(tmp_path, fleet_config({"a": ("agg", [f"{LOOPBACK}:9"])})) as served:
        for typed in (
            f"generate {PLAIN} {served.address}",
            f"explain {PLAIN} {served.admin_address}",
        ):
            done = run_here(*typed.split(), "--isl", "5")
            assert done.returncode == 1
            assert "no worker of the gateway has been reached" in done.stderr
            assert "slagate pools says why" in done.stderr

        def why() -> bool:
            shown = run_here(*f"pools {PLAIN} {served.admin_address}".split())
            assert shown.returncode == 0
            return "Connection refused" in " ".join(shown.stdout.split())

        eventually(why, "pools says why")


def test_ctrl_c_is_130_and_nothing_else(agg: Cluster, tmp_path: Path) -> None:
    # All kept ones would fill a pipe that nobody reads, and with it the process would stand still.
    typed = f"receipts --follow --limit 1 {PLAIN} {agg.gateway.admin_address}"
    with starting("follower", typed.split(), tmp_path) as follower:
        assert follower.popen.stdout is not None
        assert follower.popen.stdout.readline()
        follower.popen.send_signal(signal.SIGINT)
        assert follower.popen.wait(HANG_S) == 130
        assert follower.stderr() == ""


def test_ctrl_c_in_the_first_moment_is_no_traceback() -> None:
    """While modules are imported: the signal comes with the first one of ours."""
    script = (
        "import os, signal, sys\n"
        "from slagate.router.__main__ import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'slagate.router.commands':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "main()\n"
    )
    done = subprocess.run(
        [SLAGATE[0], "-c", script], capture_output=True, timeout=HANG_S, check=False
    )
    assert (done.returncode, done.stderr) == (130, b"")
