"""What `configs/` has for deployments, run: the commands of the manifests, and the scripts for Slurm."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
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
    worker_arguments,
)
from support.limits import HANG_S
from support.repository.manifests import FOLDER, Pod, command_of, fleet, named, objects, pods

SLURM = FOLDER.parent / "slurm"
BASH = shutil.which("bash") or ""

pytestmark = pytest.mark.skipif(not BASH, reason="scripts are bash's")


def http(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=HANG_S) as answer:
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


def test_a_worker_answers_the_probes_of_the_manifests(tmp_path: Path) -> None:
    options = ("--metrics-listen", f"{LOOPBACK}:0")
    with running("worker", worker_arguments("prefill", *options), tmp_path) as worker:
        at = str(worker.ready["metrics"])
        assert [http(at, path)[0] for path in ("/healthz", "/readyz", "/metrics")] == [200] * 3


# --- the model cache -------------------------------------------------------------------------------


def test_a_model_is_downloaded_once_and_never_seen_in_part(tmp_path: Path) -> None:
    script = named(objects(FOLDER / "model-cache" / "pvc.yaml"), "ConfigMap", "fill-models")["data"]
    (tmp_path / "fill.sh").write_text(script["fill.sh"].replace("/models/", f"{tmp_path}/models/"))
    (tmp_path / "models").mkdir()
    tools = tmp_path / "tools"
    tools.mkdir()
    tool(
        tools / "python3",
        f'test ! -e {tmp_path}/models/m && mkdir "$PART" && echo x >>{tmp_path}/downloads',
    )
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "MODEL": "org/m"}
    for _ in range(2):  # a Job may run again
        subprocess.run([BASH, str(tmp_path / "fill.sh")], env=env, check=True)
    assert os.listdir(tmp_path / "models") == ["m"]
    assert (tmp_path / "downloads").read_text() == "x\n"


# --- groups of nodes -------------------------------------------------------------------------------


def launch_scripts(folder: Path) -> Path:
    """The scripts of the LeaderWorkerSets, with their paths within `folder`, and a place for tools."""
    data = named(fleet("deepseek-r1"), "ConfigMap", "multinode-launch")["data"]
    for name, text in data.items():
        moved = text.replace("/tmp/", f"{folder}/").replace("/etc/slagate/launch", str(folder))
        (folder / name).write_text(
            moved.replace("/usr/sbin/", "").replace("/run/sshd", str(folder))
        )
    tools = folder / "tools"
    tools.mkdir()
    return tools


def tool(path: Path, script: str) -> None:
    path.write_text(f"#!{BASH}\n{script}\n")
    path.chmod(0o755)


def started(folder: Path, name: str, *arguments: str) -> "subprocess.Popen[str]":
    env = {"PATH": f"{folder / 'tools'}:{os.environ['PATH']}", "SSH_PORT": "2222"}
    env |= {"LWS_LEADER_ADDRESS": "r1-0.r1.slagate", "LWS_GROUP_SIZE": "3", "GPUS_PER_NODE": "8"}
    return subprocess.Popen(
        [BASH, str(folder / name), *arguments],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_leader_starts_one_rank_for_each_gpu_of_its_group(tmp_path: Path) -> None:
    tools = launch_scripts(tmp_path)
    tool(tools / "ssh", f'echo "$5" >>{tmp_path}/asked')
    tool(tools / "mpirun", 'printf "%s\\n" "$@"')
    with started(tmp_path, "leader.sh", "--role=prefill", "--model=/a b") as leader:
        words = leader.communicate(timeout=HANG_S)[0].splitlines()
    assert leader.returncode == 0
    assert words[words.index("-np") + 1] == "24"
    hosts = "localhost:8,r1-0-1.r1.slagate:8,r1-0-2.r1.slagate:8"
    assert words[words.index("--host") + 1] == hosts
    rank0 = ["bash", f"{tmp_path}/rank0.sh", "--role=prefill", "--model=/a b"]
    assert words[words.index("trtllm-llmapi-launch") + 1 :] == rank0
    assert (tmp_path / "asked").read_text().split() == ["r1-0-1.r1.slagate", "r1-0-2.r1.slagate"]


def test_the_drain_of_a_leader_ends_when_its_worker_has(tmp_path: Path) -> None:
    tools = launch_scripts(tmp_path)
    tool(tools / "slagate", f'trap "echo drained >{tmp_path}/end; exit 0" TERM\n'
         f'touch {tmp_path}/serves\nwhile :; do sleep 0.05; done')  # fmt: skip
    with started(tmp_path, "rank0.sh") as worker:
        try:
            eventually((tmp_path / "serves").exists, "the worker serves")
            # Its parent has to collect it before nobody has its number any more, as an init process does.
            reaped = threading.Thread(target=worker.wait)
            reaped.start()
            with started(tmp_path, "drain.sh") as drain:
                assert drain.wait(HANG_S) == 0
            assert (tmp_path / "end").read_text() == "drained\n"
            reaped.join()
        finally:
            worker.kill()


def test_the_other_nodes_stay_until_their_ranks_are_gone(tmp_path: Path) -> None:
    tools = launch_scripts(tmp_path)
    tool(
        tools / "sshd",
        f"echo $$ >{tmp_path}/listens.new; mv {tmp_path}/listens.new {tmp_path}/listens\nexec sleep 600",
    )
    tool(tools / "pgrep", f"touch {tmp_path}/looked; test -e {tmp_path}/ranks")
    (tmp_path / "ranks").touch()
    with started(tmp_path, "others.sh") as others:
        try:
            eventually((tmp_path / "listens").exists, "the SSH server listens")
            others.send_signal(signal.SIGTERM)
            eventually((tmp_path / "looked").exists, "it looks for ranks")
            assert others.poll() is None
            (tmp_path / "ranks").unlink()
            assert others.wait(HANG_S) == 0
        finally:
            others.kill()
            # Nobody's child now; a container ends with its first process.
            os.kill(int((tmp_path / "listens").read_text()), signal.SIGKILL)


# --- Slurm -----------------------------------------------------------------------------------------


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
    return ["--engine", "sim", "--role", role, "--profile", PROFILE, "--insecure"]


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
        assert f"rank0.sh {decode} --engine sim --role decode" in launched
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
