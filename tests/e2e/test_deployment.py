"""What `configs/` has for deployments, run: the commands of the manifests, and the scripts for Slurm."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.certificates import Ca
from support.foreign_client import Client, request
from support.manifests import FOLDER, Pod, command_of, fleet, named, pods
from support.processes import (
    LOOPBACK,
    PROFILE,
    READY_LIMIT_S,
    STOP_LIMIT_S,
    eventually,
    fleet_config,
    running,
    worker_arguments,
)
from support.sim_tokens import expected, prompt

SLURM = FOLDER.parent / "slurm"
BASH = shutil.which("bash") or ""

pytestmark = pytest.mark.skipif(not BASH, reason="scripts are bash's")


def http(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# --- manifests -------------------------------------------------------------------------------------


def here(words: list[str], moved: dict[str, str]) -> list[str]:
    """A command of a manifest on this machine: other files, and ports of the kernel's choice."""
    words = [re.sub(r"=0\.0\.0\.0:\d+$", f"={LOOPBACK}:0", word) for word in words]
    for there, file in moved.items():
        words = [word.replace(there, file) for word in words]
    return words


def gateway_pod() -> Pod:
    (pod,) = (pod for pod in pods(fleet("qwen3")) if pod.container["name"] == "gateway")
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
    pod = gateway_pod()
    with running("gateway", here(command_of(pod) or [], moved), tmp_path) as gateway:
        at = str(gateway.ready["http"])
        probe = pod.container["livenessProbe"]["httpGet"]["path"]
        assert http(at, probe) == (200, "ok\n")
        # None of its workers is there.
        status, reason = http(at, pod.container["readinessProbe"]["httpGet"]["path"])
        assert (status, reason != "") == (503, True)
        assert "slagate_requests_total" in http(at, "/metrics")[1]
        assert gateway.terminate() == 0


def test_a_worker_answers_the_probes_of_the_manifests(tmp_path: Path) -> None:
    options = ("--metrics-listen", f"{LOOPBACK}:0")
    with running("worker", worker_arguments("prefill", *options), tmp_path) as worker:
        at = str(worker.ready["metrics"])
        assert [http(at, path)[0] for path in ("/healthz", "/readyz", "/metrics")] == [200] * 3


# --- Slurm -----------------------------------------------------------------------------------------


class Batch:
    """A batch script, run as Slurm would, with a `srun` that runs what it is given right here."""

    def __init__(self, run: Path, script: str, arguments: list[str], **environment: str) -> None:
        tools = run / "tools"
        tools.mkdir(exist_ok=True)
        (tools / "srun").write_text(
            f"#!{BASH}\nwhile [[ $1 == --* ]]; do shift; done\n"
            'if [[ $1 == kill ]]; then "$@"; else exec "$@"; fi\n'
        )
        (tools / "slagate").write_text(f'#!{BASH}\nexec {sys.executable} -m slagate.router "$@"\n')
        for tool in tools.iterdir():
            tool.chmod(0o755)
        self.log = run / f"{script}-{environment.get('POOL', '')}.log"
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [BASH, str(SLURM / script), *arguments],
                stdout=log,
                stderr=log,
                env=os.environ
                | {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(SLURM)}
                | {"SLURM_NTASKS": "1", "SLURMD_NODENAME": "here", "RUN_DIR": str(run)}
                | {"LISTEN_HOST": LOOPBACK}
                | environment,
            )

    def terminate(self) -> int:
        """`scancel --batch --signal=TERM`, and the exit status."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(STOP_LIMIT_S)

    def end(self) -> None:
        if self.popen.poll() is None:
            self.terminate()


def worker_options(role: str) -> list[str]:
    return ["--engine", "sim", "--role", role, "--profile", PROFILE, "--insecure"]


@contextmanager
def slurm_fleet(run: Path) -> Iterator[dict[str, Batch]]:
    """A prefill pool, a decode pool and a gateway, started in the order that makes it wait."""
    config = fleet_config({"p": ("prefill", []), "d": ("decode", [])})
    for pool in config["pools"].values():
        del pool["workers"]
    (run / "fleet.json").write_text(json.dumps(config))
    jobs = {}
    with ExitStack() as stack:

        def start(name: str, script: str, arguments: list[str], **environment: str) -> None:
            jobs[name] = Batch(run, script, arguments, **environment)
            stack.callback(jobs[name].end)

        start(
            "gateway", "gateway.sbatch", ["--insecure", "--worker-insecure"],
            FLEET=str(run / "fleet.json"), WORKERS="p=1 d=1", PORT="0", ADMIN_PORT="0",
            HTTP_PORT="0", WAIT_S="60",
        )  # fmt: skip
        for name, role in (("p", "prefill"), ("d", "decode")):
            start(name, "pool.sbatch", worker_options(role), POOL=name)
        ready = run / "gateway.json"
        eventually(ready.exists, "the gateway serves", limit_s=READY_LIMIT_S)
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
        timeout=2 * READY_LIMIT_S,
        check=False,
    )


def test_workers_that_do_not_come_are_named(tmp_path: Path) -> None:
    done = fleet_script(tmp_path, "p=2", wait_s=0)
    assert (done.returncode, done.stderr) == (1, "fleet.sh: p has 0 of 2 workers after 0 s\n")
