"""The product as its users run it: real `slagate` processes on loopback, started and ended by tests.

Every process listens on port 0 and says on its ready line where that is. stderr goes to a file, shown
when something fails. Nothing outlives the block that started it.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from typer.testing import CliRunner

from slagate.proto import gateway_pb2 as gw
from slagate.proto import gateway_pb2_grpc as gw_grpc
from slagate.router.commands import cli
from support.limits import HANG_S

SLAGATE = (sys.executable, "-m", "slagate.router")

MODEL = "meta-llama/Meta-Llama-3.1-8B"
PROFILE = "llama-3.1-8b-h100"
LOOPBACK = "127.0.0.1"

POLL_S = 0.02


def eventually(holds: Callable[[], object], what: str) -> None:
    """Return once `holds()` is true; fail the test with `what` when it hangs.

    The state of another process cannot be waited for, only asked for: this is the one place of the
    tests that asks again after a pause.
    """
    pause = threading.Event()
    for _ in range(round(HANG_S / POLL_S)):
        if holds():
            return
        pause.wait(POLL_S)
    raise AssertionError(f"not within {HANG_S} s: {what}")


class Process:
    """One running command. `ready` is its ready line."""

    def __init__(self, name: str, popen: "subprocess.Popen[bytes]", stderr_path: Path) -> None:
        self.name = name
        self.popen = popen
        self.ready: dict[str, Any] = {}
        self._stderr_path = stderr_path
        self._rest_of_stdout = b""

    def stderr(self, start: int = 0) -> str:
        """What it has written to stderr so far, from a byte offset on."""
        return self._stderr_path.read_bytes()[start:].decode(errors="replace")

    def stderr_size(self) -> int:
        return self._stderr_path.stat().st_size

    @property
    def address(self) -> str:
        return str(self.ready["listen"])

    def wait_ready(self) -> None:
        """Read the ready line; fails with the process's stderr when none comes."""
        assert self.popen.stdout is not None
        fd = self.popen.stdout.fileno()
        text = b""
        while b"\n" not in text:
            readable, _, _ = select.select([fd], [], [], HANG_S)
            chunk = os.read(fd, 65536) if readable else b""
            if not chunk:
                why = "ended" if readable else f"said nothing for {HANG_S} s"
                raise AssertionError(f"{self.name} {why} before it was ready:\n{self.stderr()}")
            text += chunk
        line, self._rest_of_stdout = text.split(b"\n", 1)
        self.ready = json.loads(line)

    def rest_of_stdout(self) -> bytes:
        """What came on stdout after the ready line; to be called after the end."""
        assert self.popen.stdout is not None
        return self._rest_of_stdout + self.popen.stdout.read()

    def terminate(self) -> int:
        """SIGTERM, and the exit status; fails when that is not enough."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(HANG_S)

    def kill(self) -> None:
        """SIGKILL: the process gets no chance to say anything."""
        self.popen.kill()
        self.popen.wait()

    def rss_bytes(self) -> int:
        """Resident memory now, from /proc."""
        pages = Path(f"/proc/{self.popen.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _start(
    name: str, arguments: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None
) -> Process:
    stderr_path = folder / f"{name}.stderr"
    with stderr_path.open("wb") as stderr:
        popen = subprocess.Popen(
            [*SLAGATE, *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=None if environ is None else {**os.environ, **environ},
        )
    return Process(name, popen, stderr_path)


def _end(process: Process) -> None:
    try:
        if process.popen.poll() is None:
            process.popen.terminate()
            process.popen.wait(HANG_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"{process.name} ignored SIGTERM:\n{process.stderr()}") from None
    finally:
        assert process.popen.stdout is not None
        process.popen.stdout.close()


def _terminate(processes: Iterable[Process]) -> None:
    """SIGTERM for all; those that have ended are left alone."""
    for process in processes:
        process.popen.terminate()


@contextmanager
def starting(
    name: str,
    arguments: Sequence[str],
    folder: Path,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Process]:
    """`slagate ARGUMENTS`, from its first moment on, for the time of the block.

    `environ` is beside the environment of the tests.
    """
    process = _start(name, arguments, folder, environ)
    try:
        yield process
    finally:
        _end(process)


@contextmanager
def running(name: str, arguments: Sequence[str], folder: Path) -> Iterator[Process]:
    """`slagate ARGUMENTS`, ready, for the time of the block."""
    with starting(name, arguments, folder) as process:
        process.wait_ready()
        yield process


def worker_arguments(
    role: str, *options: str, listen: str = f"{LOOPBACK}:0", tls: Sequence[str] = ("--insecure",)
) -> list[str]:
    """A worker's command line; where it hands over, no limit of that to speak of."""
    limits = ["--kv-transfer-timeout", str(HANG_S), "--handoff-timeout", str(HANG_S)]
    fixed = ["worker", "sim", "--role", role, "--profile", PROFILE, "--listen", listen, *tls]
    return [*fixed, *(limits if role != "agg" else []), *options]


def serve_arguments(
    config: Path, *options: str, tls: Sequence[str] = ("--insecure", "--worker-insecure")
) -> list[str]:
    anywhere = f"{LOOPBACK}:0"
    listeners = ["--listen", anywhere, "--admin", anywhere, "--http", anywhere]
    return ["serve", "--config", str(config), *listeners, *tls, *options]


def run_cli(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """A command that ends by itself."""
    return subprocess.run(
        [*SLAGATE, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def run_here(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """As `run_cli`, in this process, which saves the start of one.

    For what a process of its own adds nothing to: words, statuses, and calls to a running gateway.
    """
    ended = CliRunner().invoke(cli, arguments, input=stdin)
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return subprocess.CompletedProcess(arguments, ended.exit_code, ended.stdout, ended.stderr)


class Gateway:
    """A running gateway and what its operators ask it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.address = process.address
        self.admin_address = str(process.ready["admin"])
        self.http_address = str(process.ready["http"])
        self.channel = grpc.insecure_channel(self.admin_address)
        self.admin: Any = gw_grpc.GatewayStub(self.channel)

    def workers(self) -> list[gw.WorkerStatus]:
        return list(self.admin.ListWorkers(gw.ListWorkersRequest(), timeout=HANG_S).workers)

    def pools(self) -> list[gw.PoolStatus]:
        return list(self.admin.ListPools(gw.ListPoolsRequest(), timeout=HANG_S).pools)

    def http(self, path: str) -> tuple[int, str]:
        """Status and body of `GET path`."""
        try:
            with urllib.request.urlopen(
                f"http://{self.http_address}{path}", timeout=HANG_S
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def is_ready(self) -> bool:
        return self.http("/readyz")[0] == 200

    def metrics(self, name: str) -> dict[str, float]:
        """Every sample of a name, by its labels as they are written."""
        lines = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", self.http("/metrics")[1], re.MULTILINE)
        return {labels: float(value) for labels, value in lines}

    def outcomes(self, outcome: str) -> int:
        """Requests that ended in this outcome."""
        return int(self.metrics("slagate_requests_total")[f'{{outcome="{outcome}"}}'])

    def is_idle(self) -> bool:
        """No lease is held, by any account of it."""
        gauges = ("inflight", "queued_tokens", "context_tokens")
        return not (
            any(worker.inflight or worker.queued_tokens for worker in self.workers())
            or any(pool.inflight or pool.queued_tokens for pool in self.pools())
            or any(any(self.metrics(f"slagate_worker_{gauge}").values()) for gauge in gauges)
        )


@contextmanager
def gateway(
    folder: Path, config: Mapping[str, Any], *options: str, name: str = "gateway"
) -> Iterator[Gateway]:
    """A gateway over a fleet file; whether it is ready is the caller's question."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    with running(name, serve_arguments(path, *options), folder) as process:
        served = Gateway(process)
        with served.channel:
            yield served


class Pool(NamedTuple):
    """Workers of one kind; `options` are the flags of each."""

    role: str  # prefill, decode or agg
    n_workers: int = 1
    options: tuple[str, ...] = ()


class Cluster(NamedTuple):
    """A ready gateway and its workers, by pool."""

    gateway: Gateway
    workers: dict[str, list[Process]]

    def addresses(self, pool: str) -> list[str]:
        return [worker.address for worker in self.workers[pool]]


def fleet_config(pools: Mapping[str, tuple[str, Sequence[str]]]) -> dict[str, Any]:
    """A fleet file with one pool a stage: pool name -> (role, worker addresses).

    Each grid has two by two cells, all of that pool: size up to and over 8000 tokens, target up to and
    over 500 ms (TTFT) or 25 ms (ITL).
    """
    config: dict[str, Any] = {"mode": "disagg", "pools": {}}
    ttft = {"ttft_min_ms": 100, "ttft_max_ms": 900, "ttft_resolution": 2}
    itl = {"itl_min_ms": 5, "itl_max_ms": 45, "itl_resolution": 2}
    axes: dict[str, dict[str, int]] = {
        "prefill": {"isl_min": 0, "isl_max": 16000, "isl_resolution": 2} | ttft,
        "decode": {"context_length_min": 0, "context_length_max": 16000}
        | {"context_length_resolution": 2}
        | itl,
        "agg": ttft | itl,
    }
    for name, (role, addresses) in pools.items():
        if role == "agg":
            config["mode"] = "agg"
        config[f"num_{role}_pools"] = 1
        config[f"{role}_pools"] = [name]
        config[f"{role}_pool_selection_strategy"] = axes[role] | {
            f"{role}_pool_mapping": [[0, 0], [0, 0]]
        }
        config["pools"][name] = {"workers": list(addresses), "profile": PROFILE, "tp": 1}
    return config


@contextmanager
def cluster(folder: Path, pools: Mapping[str, Pool], *options: str) -> Iterator[Cluster]:
    """Workers and a ready gateway over them; `options` are the gateway's flags."""
    with ExitStack() as stack:
        workers: dict[str, list[Process]] = {}
        for name, pool in pools.items():
            for number in range(pool.n_workers):
                arguments = worker_arguments(pool.role, *pool.options)
                worker = _start(f"{name}-{number}", arguments, folder)
                stack.callback(_end, worker)
                workers.setdefault(name, []).append(worker)
        # All at once: they start and end side by side, so waiting for one waits for the others too.
        everyone = [worker for group in workers.values() for worker in group]
        stack.callback(_terminate, everyone)
        for worker in everyone:
            worker.wait_ready()
        addresses = {
            name: (pool.role, [worker.address for worker in workers[name]])
            for name, pool in pools.items()
        }
        served = stack.enter_context(gateway(folder, fleet_config(addresses), *options))
        all_ready = "every worker is ready"
        eventually(lambda: all(w.state == "ready" for w in served.workers()), all_ready)
        yield Cluster(served, workers)
