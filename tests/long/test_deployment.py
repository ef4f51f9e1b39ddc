"""What `configs/` has for deployments, run: the gateway of the manifests, a fleet by Slurm scripts."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.engine.tokens import expected, prompt
from support.gateway.certificates import Ca
from support.gateway.foreign_client import Client, request
from support.gateway.processes import (
    LOOPBACK,
    PROFILE,
    eventually,
    fleet_config,
    run_cli,
    running,
)
from support.limits import HANG_S
from support.repository.manifests import FOLDER, Pod, command_of, fleet, named, pods
from support.repository.scripts import BASH, http, tool

SLURM = FOLDER.parent / "slurm"

pytestmark = pytest.mark.skipif(not BASH, reason="scripts are bash's")


def here(words: list[str], moved: dict[str, str]) -> list[str]:
    """A command of a manifest on this machine: other files, and ports of the kernel's choice."""
    words = [re.sub(r"=0\.0\.0\.0:\d+$", f"={LOOPBACK}:0", word) for word in words]
    for there, file in moved.items():
        words = [word.replace(there, file) for word in words]
    return words


def pod_of(container: str) -> Pod:
    (pod,) = (pod for pod in pods(fleet("qwen3")) if pod.container["name"] == container)
    return pod


def test_the_gateway_of_the_manifest_starts_and_answers_its_probes(tmp_path: Path) -> None:
    clients, to_workers = Ca(tmp_path, "clients"), Ca(tmp_path, "workers")
    server, client = clients.issue("gateway"), to_workers.issue("gateway-worker")
    fleet_path = tmp_path / "fleet.json"
    fleet_path.write_text(named(fleet("qwen3"), "ConfigMap", "slagate-fleet")["data"]["fleet.json"])
    moved = {
        "/etc/slagate/fleet/fleet.json": str(fleet_path),
        "/etc/slagate/tls/tls.crt": str(server.cert),
        "/etc/slagate/tls/tls.key": str(server.key),
        "/etc/slagate/tls/ca.crt": str(clients.path),
        "/etc/slagate/worker-tls/tls.crt": str(client.cert),
        "/etc/slagate/worker-tls/tls.key": str(client.key),
        "/etc/slagate/worker-tls/ca.crt": str(to_workers.path),
        "--processes=4": "--processes=2",  # four Python processes are not what is tested
    }
    pod = pod_of("gateway")
    with running("gateway", here(command_of(pod) or [], moved), tmp_path) as gateway:
        at = str(gateway.ready["http"])
        probe = pod.container["livenessProbe"]["httpGet"]["path"]
        assert http(at, probe) == (200, "ok\n")
        # None of its workers is there.
        status, reason = http(at, pod.container["readinessProbe"]["httpGet"]["path"])
        assert (status, reason != "") == (503, True)
        assert "slagate_requests_total" in http(at, "/metrics")[1]

        # The Job's command gets as far as the gateway's own reason, so certificates are not it.
        operator = clients.issue("operator")
        moved = {
            "slagate-gateway.slagate.svc:7000": gateway.address,
            "slagate-admin.slagate.svc:7009": str(gateway.ready["admin"]),
            "/etc/slagate/tls/tls.crt": str(operator.cert),
            "/etc/slagate/tls/tls.key": str(operator.key),
            "/etc/slagate/tls/ca.crt": str(clients.path),
            "/results": str(tmp_path),
            "--wait=3600": "--wait=1",
        }
        bench = run_cli(*here(command_of(pod_of("bench")) or [], moved))
        assert bench.returncode == 1
        assert f"is not ready after 1 s: {reason.strip()}" in bench.stderr
        assert gateway.terminate() == 0


def slurm_tools(run: Path) -> None:
    """Stand-ins, on the path of `Batch`; once, for a file that is being written cannot be run."""
    tools = run / "tools"
    tools.mkdir()
    tool(
        tools / "srun",
        'while [[ $1 == --* ]]; do shift; done\nif [[ $1 == kill ]]; then "$@"; else exec "$@"; fi',
    )
    tool(tools / "slagate", f'exec {sys.executable} -m slagate.router "$@"')
    tool(tools / "trtllm-llmapi-launch", f'echo "$*" >>"{run}/launched"\nexec "$@"')


class Batch:
    """A batch script, run as Slurm would, with a `srun` that runs what it is given right here."""

    def __init__(self, run: Path, script: str, arguments: list[str], **environment: str) -> None:
        self.log = run / f"{script}-{environment.get('POOL', '')}.log"
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [BASH, str(SLURM / script), *arguments],
                stdout=log,
                stderr=log,
                env=os.environ
                | {"PATH": f"{run / 'tools'}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(SLURM)}
                | {"SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "1", "SLURMD_NODENAME": "here"}
                | {"RUN_DIR": str(run), "LISTEN_HOST": LOOPBACK}
                | environment,
            )

    def terminate(self) -> int:
        """`scancel --batch --signal=TERM`, and the exit status."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(HANG_S)

    def end(self) -> None:
        if self.popen.poll() is None:
            self.terminate()


def worker_options(role: str) -> list[str]:
    return ["sim", "--role", role, "--profile", PROFILE, "--insecure"]


@contextmanager
def slurm_fleet(run: Path) -> Iterator[dict[str, Batch]]:
    """A prefill pool, a decode pool and a gateway, started in the order that makes it wait."""
    config = fleet_config({"p": ("prefill", []), "d": ("decode", [])})
    for pool in config["pools"].values():
        del pool["workers"]
    (run / "fleet.json").write_text(json.dumps(config))
    slurm_tools(run)
    jobs = {}
    with ExitStack() as stack:

        def start(name: str, script: str, arguments: list[str], **environment: str) -> None:
            jobs[name] = Batch(run, script, arguments, **environment)
            stack.callback(jobs[name].end)

        start(
            "gateway", "gateway.sbatch", ["--insecure", "--worker-insecure"],
            FLEET=str(run / "fleet.json"), WORKERS="p=1 d=1", PORT="0", ADMIN_PORT="0",
            HTTP_PORT="0", WAIT_S="120",
        )  # fmt: skip
        for name, role in (("p", "prefill"), ("d", "decode")):
            # Decode's world has two ranks, of which the command runs at the first.
            n_tasks = {"prefill": "1", "decode": "2"}[role]
            start(name, "pool.sbatch", worker_options(role), POOL=name, SLURM_NTASKS=n_tasks)
        ready = run / "gateway.json"
        eventually(ready.exists, "the gateway serves")
        yield jobs


def assert_served(address: str) -> None:
    tokens = prompt(300)
    with Client(address) as client:
        answer = client.generate(request(tokens, max_tokens=5))
    assert answer.tokens == expected(tokens, 5)


def test_slurm_scripts_bring_a_fleet_up_drain_it_and_take_over_new_addresses(
    tmp_path: Path,
) -> None:
    with slurm_fleet(tmp_path) as jobs:
        ready = json.loads((tmp_path / "gateway.json").read_text())
        eventually(lambda: http(ready["http"], "/readyz")[0] == 200, "the gateway is ready")
        assert_served(ready["listen"])

        decode = tmp_path / "workers" / "d" / "d-0.json"
        (launched,) = (tmp_path / "launched").read_text().splitlines()
        assert f"rank0.sh {decode} sim --role decode" in launched
        worker_pid = json.loads(decode.read_text())["pid"]
        before = json.loads((tmp_path / "pools.json").read_text())["pools"]
        assert jobs["d"].terminate() == 0
        assert not decode.exists()
        assert not Path(f"/proc/{worker_pid}").exists()
        eventually(lambda: http(ready["http"], "/readyz")[0] == 503, "the gateway misses it")

        # It comes back on another port: fleet.sh tells, and `serve --watch` does the rest.
        again = Batch(tmp_path, "pool.sbatch", worker_options("decode"), POOL="d")
        try:
            done = fleet_script(tmp_path, "p=1", "d=1")
            assert (done.returncode, done.stderr) == (0, "")
            after = json.loads((tmp_path / "pools.json").read_text())["pools"]
            assert (after["p"] == before["p"], after["d"] == before["d"]) == (True, False)
            eventually(lambda: http(ready["http"], "/readyz")[0] == 200, "it is ready again")
            assert_served(ready["listen"])
            assert jobs["gateway"].terminate() == 0
        finally:
            again.end()


def fleet_script(run: Path, *pools: str, wait_s: int = 60) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [BASH, str(SLURM / "fleet.sh"), *pools],
        env=os.environ | {"RUN_DIR": str(run), "WAIT_S": str(wait_s)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_workers_that_do_not_come_are_named(tmp_path: Path) -> None:
    done = fleet_script(tmp_path, "p=2", wait_s=0)
    assert (done.returncode, done.stderr) == (1, "fleet.sh: p has 0 of 2 workers after 0 s\n")
