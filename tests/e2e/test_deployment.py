"""What `configs/` has for deployments, run: probes and scripts of the manifests.

Whole gateways and fleets are in tests/long.
"""

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from support.gateway.processes import (
    LOOPBACK,
    eventually,
    running,
    worker_arguments,
)
from support.limits import HANG_S
from support.repository.manifests import FOLDER, fleet, named, objects
from support.repository.scripts import BASH, http, tool

SLURM = FOLDER.parent / "slurm"

pytestmark = pytest.mark.skipif(not BASH, reason="scripts are bash's")


def test_a_worker_answers_the_probes_of_the_manifests(tmp_path: Path) -> None:
    options = ("--metrics-listen", f"{LOOPBACK}:0")
    with running("worker", worker_arguments("prefill", *options), tmp_path) as worker:
        at = str(worker.ready["metrics"])
        assert [http(at, path)[0] for path in ("/healthz", "/readyz", "/metrics")] == [200] * 3


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
